"""The stand-in driver itself: what torch sees of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import standin

pytestmark = pytest.mark.minutes

SEEN = """
import os, torch
host = torch.arange(1000.)
device = host.cuda()
assert device.device == torch.device("cuda", 0) and torch.equal(device.cpu(), host)
assert host.pin_memory().is_pinned() and not host.is_pinned()
assert torch.cuda.get_device_name() == "Stand-in H100" and torch.cuda.get_device_capability() == (9, 0)
free, total = torch.cuda.mem_get_info()
big = torch.empty(10**9, dtype=torch.uint8, device="cuda")
assert total == 4 * 10**9 and 0 <= free - torch.cuda.mem_get_info()[0] - 10**9 < 4096
try:
    torch.empty(5 * 10**9, dtype=torch.uint8, device="cuda:1")
    raise SystemExit("memory that is not there")
except RuntimeError as error:
    assert "out of memory" in str(error)
begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begun.record()
torch.cuda._sleep(20_000_000)
ended.record()
assert not ended.query()
torch.cuda.synchronize()
assert ended.query() and 10 <= begun.elapsed_time(ended) < 20
assert torch.cuda.device_count() == 2
if os.fork() == 0:
    code = os.EX_OK
    try:
        torch.ones(3).cuda()
        code = os.EX_SOFTWARE
    except RuntimeError as error:
        code = os.EX_OK if "forked" in str(error) else os.EX_SOFTWARE
    os._exit(code)
assert os.wait()[1] == 0
print("seen")
"""


def test_torch_sees_devices_memory_and_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    added = standin.environment(2, memory_gb=4, log=log)
    command = [sys.executable, "-c", SEEN]
    done = subprocess.run(command, env=os.environ | added, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "seen\n"), done.stderr
    words = [line.split()[1:] for line in log.read_text().splitlines()]
    assert words[:2] == [["driver", "2", "devices"], ["context", "0"]]
    assert ["copy", "h", "d", "4000", "sync"] in words and ["copy", "d", "h", "4000", "sync"] in words
    assert ["full", "1", "5000000000"] in words
