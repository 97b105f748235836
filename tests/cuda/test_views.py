"""The GPUs of the stand-in wherever GPUs are shown."""

from __future__ import annotations

import re

import pytest

from tests.cuda.cards import uuid
from tests.cuda.conftest import GpuStation
from tests.ports import free_port
from tests.train.monitor.monitored import get, metrics_in
from tests.waiting import eventually
from train.gpus import sees_host_ids

pytestmark = pytest.mark.minutes


def test_four_gpus_are_shown_with_the_ranks_on_them(machine: GpuStation) -> None:
    visible = f"{uuid(3)},{uuid(1)}"
    machine.ok("launch", "fake", "--name", "one", "--gpus", 2, "--steps", 100000, env={"CUDA_VISIBLE_DEVICES": visible})
    machine.wait_for_step("one", 1)
    for number in range(4):
        machine.cards.write(number, used=(number + 1) << 30, celsius=40 + number)
    top = machine.ok("top", "--once").stdout
    for number in range(4):
        line = rf"^GPU {number} +gpu +{50 + number} % +{number + 1}\.0 of 80 GiB +4{number} C"
        assert re.search(line, top, re.M), top
    for rank, card in enumerate((3, 1)):
        assert re.search(rf"rank {rank} .* gpu +{50 + card} % +{card + 1}\.0 of 80 GiB in all", top), top
    pids = machine.record("one")["pids"]["ranks"]
    machine.cards.write(3, pid=pids[0], bytes=3 << 29)
    port = free_port()
    exporter = machine.start("exporter", "--port", port, stdout=None)
    try:
        eventually("the exporter answers", lambda: _page(port))
        found = _page(port)
        wanted = {(("gpu", str(number)), ("uuid", uuid(number))): 1.0 for number in range(4)}
        assert found["train_gpu_up"] == wanted
        if sees_host_ids():
            assert re.search(r"rank 0 .*  1\.5 of 80 GiB$", machine.ok("top", "--once").stdout, re.M)
            memory = {dict(labels)["rank"]: value for labels, value in found["train_rank_gpu_memory_bytes"].items()}
            assert memory == {"0": 3 << 29}
        machine.cards.keep(0, 2, 3)
        gone = next(labels for labels in wanted if dict(labels)["gpu"] == "1")
        assert _page(port)["train_gpu_up"] == wanted | {gone: 0.0}
    finally:
        exporter.terminate()
        exporter.wait()
    assert re.findall(r"^GPU (\d)", machine.ok("top", "--once").stdout, re.M) == ["0", "1", "2"]


def _page(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    try:
        return metrics_in(get(f"http://127.0.0.1:{port}/metrics"))
    except OSError:
        return {}
