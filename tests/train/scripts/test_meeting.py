"""Ranks of a script that never meet each do the whole work: that is said, and only of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from train.run import states
from train.scripts import meeting

if TYPE_CHECKING:
    from conftest import Station

WARNING = (
    "2 ranks, but they have not met: without torch.distributed.init_process_group each rank trains the same; "
    "see: docs/scripts.md"
)
PLAIN = "print('loss 0.1', end='', flush=True)\n"
GROUP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
SESSION = """
import torch, torch.distributed as dist, trainstation as ts
session = ts.session(seed=0)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = session.loader(torch.utils.data.TensorDataset(torch.ones(4, 1)), batch_size=4)
session.register(model=model, optimizer=optimizer)
for epoch in session.epochs(1):
    for (inputs,) in loader:
        model(inputs).sum().backward()
        optimizer.step()
session.finish()
"""
ACCELERATE = "from accelerate import Accelerator\nAccelerator(cpu=True)\n"
WAITS = "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.05)\n"


def ended(station: Station, name: str, text: str, ranks: int = 2) -> dict[str, Any]:
    """The record of a run of this script that has ended by itself, long before a minute."""
    (station.folder / f"{name}.py").write_text(text)
    station.ok("launch", "--script", f"{name}.py", "--name", name, "--nproc", ranks, "--max-restarts", 0)
    record = station.wait_for_end(name)
    assert (record["state"], "unmet" in record) == (states.FINISHED, f"warning: {WARNING}" in station.logs(name))
    return record


def test_ranks_that_end_without_having_met_are_warned_of(shared_station: Station) -> None:
    station = shared_station
    assert ended(station, "apart", PLAIN)["unmet"] == WARNING
    assert station.ok("logs", "apart").stdout.endswith(f"loss 0.1\nwarning: {WARNING}\n")
    assert "not met" not in station.ok("logs", "apart", "--rank", 1).stdout
    assert f"  warning      {WARNING}\n" in station.ok("show", "apart", env={"COLUMNS": "999"}).stdout


@pytest.mark.parametrize(
    ("name", "text", "ranks"),
    [
        ("alone", PLAIN, 1), ("group", GROUP, 2), ("left", f"{GROUP}dist.destroy_process_group()", 2),
        ("session", SESSION, 2), ("shares", "import os\nprint('part', os.environ['RANK'])", 2),
    ],
)  # fmt: skip
def test_others_are_not(shared_station: Station, name: str, text: str, ranks: int) -> None:
    assert "unmet" not in ended(shared_station, f"met-{name}", text, ranks)


@pytest.mark.minutes
def test_ranks_that_accelerate_starts_are_not(shared_station: Station) -> None:
    pytest.importorskip("accelerate", reason="no room in the image")
    assert "unmet" not in ended(shared_station, "met-accelerate", ACCELERATE)


def test_ranks_that_fail_or_are_stopped_before_the_minute_are_not(shared_station: Station) -> None:
    station = shared_station
    for name, text in (("fails", "raise SystemExit(3)"), ("stays", "import time\ntime.sleep(999)")):
        (station.folder / f"{name}.py").write_text(text)
        station.ok("launch", "--script", f"{name}.py", "--name", name, "--nproc", 2)
    station.wait("stays", lambda record: len(record["pids"].get("ranks", [])) == 2, "its ranks")
    station.ok("stop", "stays")
    for name in ("fails", "stays"):
        assert "unmet" not in station.wait_for_end(name)


def test_ranks_that_have_not_met_after_a_minute_are_warned_of_until_they_meet(station: Station) -> None:
    (station.folder / "late.py").write_text(WAITS + GROUP)
    (station.folder / "sitecustomize.py").write_text("from train.supervise import timeouts\ntimeouts.MEET = 0.2\n")
    path = os.pathsep.join([str(station.folder), station.environment()["PYTHONPATH"]])
    order = ["launch", "--script", "late.py", "--name", "late", "--nproc", 2, "--on-restart", ""]
    station.ok(*order, env={"PYTHONPATH": path, "TRAIN_WARM": "off"})
    station.wait("late", lambda record: record.get("unmet") == WARNING, "the warning")
    assert f"  warning      {WARNING}\n" in station.ok("show", "late", env={"COLUMNS": "999"}).stdout
    assert json.loads(station.ok("ls", "--json").stdout)[0]["unmet"] == WARNING
    (station.folder / "go").touch()
    assert station.wait_for_end("late")["unmet"] == ""
    assert "  warning  " not in station.ok("show", "late").stdout
    assert station.ok("logs", "late").stdout.endswith(f"warning: {WARNING}\nthe 2 ranks have met after all\n")


def test_a_source_that_asks_which_rank_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    for text, asks in (
        ("os.environ['RANK']", True), ('getenv("LOCAL_RANK", 0)', True), ("$WORLD_SIZE", True),
        ("LORA_RANK = 8", False), ("ranks = 2", False), ("", False),
    ):  # fmt: skip
        file.write_text(text)
        assert meeting.asks_rank([tmp_path / "gone.py", file]) is asks, text
