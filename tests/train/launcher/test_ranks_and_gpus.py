"""Which GPUs a run may see: as asked for, and again when it is resumed. The number of GPUs here is set by the tests."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from train import config, gpus
from train.errors import Refused
from train.gpus import Card
from train.launcher import launches
from train.launcher.launches import NewScript
from train.launcher.ranks_and_gpus import choose_again, count_ranks, see
from train.parallel.devices import pick_device, take_device
from train.run import environment, folders
from train.run.run_folder import Run

HERE = ["GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-46163e99-0000-0000-0000-000000000000", "GPU-99aa"]
SLICE = "MIG-3b1d6f0e-5a5f-5f1e-9d5a-6a2f5a1f3b1d"


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch counts: by CUDA_VISIBLE_DEVICES, up to the first that is not there; UUIDs may be cut short."""

    def count() -> int:
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        if wanted is None:
            return len(HERE)
        found = 0
        for part in map(str.strip, wanted.split(",")):
            is_id = part.isdecimal() and int(part) < len(HERE)
            if not (is_id or part == SLICE or any(uuid.startswith(part) for uuid in HERE if not part.isdecimal())):
                break
            found += 1
        return found

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")  # so that it is afterwards what it was
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setattr(torch.cuda, "device_count", count)


@pytest.mark.never_forgiven
@pytest.mark.parametrize("gpus", [HERE[0], f"{HERE[0]},{HERE[1]}", SLICE])
def test_uuids_are_refused_with_where_to_give_them(gpus: str) -> None:
    with pytest.raises(Refused, match="CUDA_VISIBLE_DEVICES"):
        count_ranks(None, gpus)


def test_a_slice_that_the_variable_names_is_the_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", SLICE)
    assert count_ranks("auto", None) == (1, None)
    assert count_ranks(None, "1") == (1, SLICE)


def test_ids_count_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 0")
    assert count_ranks(None, "1,") == (1, "0")
    assert count_ranks(None, "2") == (2, "2,0")


ROWS = {
    "nothing was or is chosen": (None, None, None, None, None),
    "by the variable at its start, which is put back": (None, None, "2", None, "2"),
    "by --gpus at its start": (None, None, None, "1,2", "1,2"),
    "by --gpus among those of the variable": (None, None, "3,4", "4", "4"),
    "the same variable in this shell changes nothing": (None, "3,4", "3,4", "4", "4"),
    "another variable in this shell is what is wanted now": (None, "0,1", "3,4", "4", "0,1"),
    "a variable in this shell, and none at its start": (None, "0", None, "1,2", "0"),
    "--gpus counts among those of this shell": ("1,", None, "3,4", "4", "1"),
    "--gpus beside the variable": ("1,", "2,0", "3,4", "4", "0"),
}


@pytest.mark.parametrize(("asked", "typed_with", "saved", "recorded", "seen"), ROWS.values(), ids=ROWS)
def test_a_resume_sees_what_its_run_folder_and_its_caller_say(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    typed_with: str | None,
    saved: str | None,
    recorded: str | None,
    seen: str | None,
) -> None:
    """Of a run that was launched with this CUDA_VISIBLE_DEVICES, and of which --gpus chose these."""
    kept = environment.to_json(environment.keep({"CUDA_VISIBLE_DEVICES": saved} if saved else {}))
    folders.create(tmp_path, "a", files={environment.FILE: kept}, record={"world_size": 1, "gpus": recorded})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", typed_with or saved or "")  # laid over, or put back
    if not (typed_with or saved):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    run = Run(tmp_path / "a")
    assert choose_again(run, run.read(), nproc=None, gpus=asked, now=typed_with) == (1, seen)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


def test_other_ranks_go_on_with_the_gpus_that_the_run_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"world_size": 2, "nproc": 2, "gpus": "1,2"}
    run = folders.create(
        tmp_path, "a", files={environment.FILE: environment.to_json(environment.keep({}))}, record=record
    )
    for nproc, ranks in (("1", 1), ("auto", 2), ("3", 3)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert choose_again(run, run.read(), nproc=nproc, gpus=None, now=None) == (ranks, "1,2")
    with pytest.raises(Refused, match=r"2 are usable here; use --nproc 2, or others than 1,2: --gpus"):
        pick_device(config.Config(), 3, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert choose_again(run, run.read(), nproc="3", gpus="3", now=None) == (3, "0,1,2")


def test_gpus_have_the_numbers_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    see(None)
    assert "CUDA_DEVICE_ORDER" not in os.environ  # nothing was chosen
    see("1")
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    see("1")
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"  # its user has said so


def test_ranks_count_their_gpus_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str | None] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: order.append(os.environ.get("CUDA_DEVICE_ORDER")))
    card = SimpleNamespace(name="a card", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    take_device(torch.device("cpu"))
    assert "CUDA_DEVICE_ORDER" not in os.environ
    take_device(torch.device("cuda", 1))
    assert order == ["PCI_BUS_ID"]


def test_the_record_of_a_script_names_the_gpu_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gpus, "cards", lambda: [Card(f"card {n}", (9, 0), uuid, number=n) for n, uuid in enumerate(HERE)]
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is afterwards what it was
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (tmp_path / "script.py").touch()
    launch = NewScript(str(tmp_path / "script.py"), runs=str(tmp_path / "runs"), name="a", gpus="1,2")
    assert launches.check(launch.to_json()).record["versions"]["gpu"] == "card 1"
