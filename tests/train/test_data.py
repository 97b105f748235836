"""From outside: data that changed under a run, images that cannot be read, and training that waits for data."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from tests.train.tiers import later

pytestmark = pytest.mark.never_forgiven

if TYPE_CHECKING:
    from conftest import Station

SMALL = ("--task.model", "small", "--task.size", 16, "--batch_size", 6, "--micro_batch_size", 2, "--cpu_threads", 1,
         "--log.tensorboard", "false", "--log.every_steps", 1)  # fmt: skip


def paint(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 4)):
        for name in ("cats", "dogs"):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.{'jpg' if number % 2 else 'png'}")
    return folder


def test_a_resume_over_other_data_is_refused_in_a_line_that_says_what_differs(station: Station) -> None:
    pets = paint(station.folder / "pets")
    station.ok("run", "images", "--name", "a", "--data.root", "pets", *SMALL, "--steps", 4)
    before = {path: path.read_bytes() for path in (station.runs / "a").rglob("*") if path.is_file()}
    (pets / "train/cats/7.jpg").rename(pets / "train/dogs/77.jpg")
    (pets / "train/dogs/3.jpg").rename(pets / "train/cats/33.jpg")
    done = station("resume", "a", "--steps", 6)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "train/cats/7.jpg is gone; train/dogs/3.jpg is gone; train/cats/33.jpg is new" in done.stderr
    assert "start a new run with its weights" in done.stderr
    assert {path: path.read_bytes() for path in (station.runs / "a").rglob("*") if path.is_file()} == before
    assert "finished" in station.ok("resume", "a").stderr
    assert "warning: the data differ" in station.ok("eval", "a").stderr

    (pets / "train/dogs/77.jpg").rename(pets / "train/cats/7.jpg")
    (pets / "train/cats/33.jpg").rename(pets / "train/dogs/3.jpg")
    pets = pets.rename(station.folder / "animals")  # elsewhere, but the same
    station.ok("resume", "a", "--steps", 6, "--data.root", "animals", "--follow")
    assert station.record("a")["step"] == 6

    for part in ("train", "val"):
        shutil.copytree(pets / part / "cats", pets / part / "birds")
    for command, code in (
        (["resume", "a"], 0), (["resume", "a", "--steps", 8], 2), (["eval", "a"], 2),
        (["export", "a", "--to", "x.pt"], 2),
    ):  # fmt: skip
        done = station(*command)
        assert done.returncode == code and len(done.stderr.splitlines()) == 1, done.stderr
        assert code == 0 or "train/birds/0.png is new" in done.stderr
    assert not (station.folder / "x.pt").exists()


@pytest.mark.minutes
def test_the_keeper_does_not_resume_over_other_data_unless_their_record_is_removed(station: Station) -> None:
    paint(station.folder / "pets")
    flags = [*SMALL, "--data.root", "pets", "--steps", 100000]
    done = station.start("run", "images", "--name", "a", *flags)
    station.wait_for_step("a", 3)
    done.kill()
    station.wait_for_end("a")
    (station.folder / "pets/val/cats/1.jpg").unlink()
    kept = station("keeper", "--once")
    assert "a: cannot be resumed: the data have changed" in kept.stderr and "val/cats/1.jpg is gone" in kept.stderr
    assert station.run("a").state() == "interrupted"
    (station.runs / "a/data.json").unlink()
    station.ok("resume", "a", "--steps", 5)
    assert station.wait_for_end("a")["state"] == "finished"


@pytest.mark.minutes
def test_a_tasks_own_fingerprint_is_asked_at_the_launch_and_at_a_resume_and_not_by_ranks(station: Station) -> None:
    task = station.folder / "own.py"
    task.write_text(OWN)
    (station.folder / "version").write_text("1")
    station.ok("run", task, "--name", "a", "--spawn", 2, "--steps", 2, "--batch_size", 4)
    assert (station.folder / "asked").read_text() == "x"
    (station.folder / "version").write_text("2")
    done = station("resume", "a", "--steps", 4)
    assert done.returncode == 2 and 'fingerprint() gives "2" for \'version\' and gave "1"' in done.stderr
    (station.folder / "version").write_text("1")
    station.ok("resume", "a", "--steps", 4, "--follow")
    assert (station.folder / "asked").read_text() == "xxx"
    for returns, said in (("{1, 2}", "not JSON serializable"), ("1 / 0", "ZeroDivisionError")):
        task.write_text(OWN.replace('{"version": (here / "version").read_text()}', returns))
        done = station("run", task, "--name", "b", "--steps", 2)
        assert done.returncode == 2 and said in done.stderr and "fingerprint() failed" in done.stderr
        assert len(done.stderr.splitlines()) == 1 and not (station.runs / "b").exists()


OWN = """
from pathlib import Path
import torch
here = Path(__file__).parent if (Path(__file__).parent / "version").exists() else Path(__file__).parents[2]
def datasets(config):
    return torch.utils.data.TensorDataset(torch.rand(16, 2)), None
def model(config):
    return torch.nn.Linear(2, 1)
def loss(model, batch):
    return model(batch[0]).square().mean()
def fingerprint(config):
    with (here / "asked").open("a") as file:
        file.write("x")
    return {"version": (here / "version").read_text()}
"""


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of which three cannot be read, and one has 16 bits."""
    root = paint(tmp_path_factory.mktemp("damaged") / "pets")
    jpeg = root / "train/cats/1.jpg"
    jpeg.write_bytes(jpeg.read_bytes()[:400])
    (root / "train/dogs/0.png").write_bytes(b"")
    (root / "val/dogs/1.jpg").write_bytes(b"not a picture")
    grey = np.linspace(0, 65535, 20 * 24).astype(np.uint16).reshape(20, 24)
    Image.fromarray(grey).save(root / "train/cats/0.png")
    return root


@pytest.mark.parametrize("more", [(), *later((("--data.workers", 2),), (("--spawn", 2, "--data.workers", 1),))])
def test_an_image_that_cannot_be_read_is_named_in_one_line(station: Station, damaged: Path, more: Any) -> None:
    done = station("run", "images", "--name", "a", "--data.root", damaged, *SMALL, "--epochs", 1, *more)
    assert done.returncode == 3 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.search(
        r"(cats/1\.jpg: image file is truncated|dogs/0\.png: the file is empty).* \(sample \d+ of the", last
    )
    assert "--data.on_error skip" in last
    assert station.record("a")["state"] == "failed"


@pytest.mark.minutes
def test_a_launched_run_leaves_out_what_cannot_be_read_and_says_so(station: Station, damaged: Path) -> None:
    for ranks in (1, 2, 3):
        station.ok(
            "launch", "images", "--name", f"r{ranks}", "--nproc", ranks, "--data.root", damaged, *SMALL, "--epochs", 2,
            "--data.on_error", "skip", "--log.samples", "true", "--data.workers", ranks - 1, "--follow",
        )  # fmt: skip
        assert station.record(f"r{ranks}")["skipped"] == {"training": 2, "evaluation": 1}
        assert station.samples(f"r{ranks}") == station.samples("r1")
        shown = station.ok("show", f"r{ranks}").stdout
        assert "skipped      2 samples of the training set, 1 sample of the evaluation set" in shown
        assert len((station.runs / f"r{ranks}/skipped.jsonl").read_text().splitlines()) == 3
        log = (station.runs / f"r{ranks}/logs/attempt-1").glob("*.log")
        assert "warning: left out: sample" in "".join(path.read_text() for path in log)


SLOW = """
import time, torch
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(WAIT)
        return torch.rand(2)
def datasets(config):
    return Slow(), None
def model(config):
    return torch.nn.Linear(2, 1)
def loss(model, batch):
    time.sleep(WORK)
    return model(batch).square().mean()
"""


@pytest.mark.minutes
def test_training_that_waits_for_data_says_so_once_with_the_remedy(station: Station) -> None:
    task = station.folder / "slow.py"
    task.write_text(SLOW.replace("WAIT", "0.1").replace("WORK", "0"))
    flags = ["--batch_size", 2, "--steps", 16, "--log.every_steps", 2]
    done = station.ok("run", task, "--name", "slow", *flags)
    assert len(re.findall(r"warning: training waits \d+% for data: raise data\.workers to \d", done.stderr)) == 1
    assert re.search(r"data +training waits \d+% for data: .*--data\.workers", station.ok("show", "slow").stdout)
    task.write_text(SLOW.replace("WAIT", "0").replace("WORK", "0.2"))
    done = station.ok("run", task, "--name", "busy", *flags)
    assert "training waits" not in done.stderr + station.ok("show", "busy").stdout
