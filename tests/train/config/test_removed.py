"""What earlier versions had is refused with what to type instead, and their run folders continue with the same bits."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.train.conftest import Station
from train import config
from train.checkpoint import manifest as manifests
from train.errors import Refused

_OLD = {"init": "init.file", "init_skip": "init.skip", "trace": "log.trace"}


def made_old(station: Station, name: str, **changed: Any) -> None:
    """Write config.toml and the manifests of a run as the version before `removed` did."""
    run = station.run(name)
    tree = tomllib.loads((run.folder / "config.toml").read_text())
    tree["init"] = {"file": tree.pop("init"), "skip": tree.pop("init_skip"), "rename": "a.=b.", "partial": True}
    tree["log"]["trace"] = tree.pop("trace")
    tree["optim"] |= changed
    (run.folder / "config.toml").write_text(tomli_w.dumps(tree))
    for path in run.folder.glob("checkpoints/*/manifest.json"):
        manifest = json.loads(path.read_text())
        flat = {_OLD.get(one, one): value for one, value in manifest["config"].items() if "optim.args" not in one}
        flat |= {"init.rename": "a.=b.", "init.partial": True}
        flat |= {f"optim.{one}": value for one, value in changed.items() if one != "args"}
        path.write_text(manifests.manifest_text(manifest | {"config": flat}))


def test_a_run_folder_of_an_earlier_version_continues_with_the_same_bits(station: Station) -> None:
    fields = ("--steps", 6, "--batch_size", 400, "--cpu_threads", 1, "--checkpoint.every_steps", 3)
    betas = ("--optim.name", "adam", "--optim.args.betas", "[0.7, 0.999]")
    station.ok("run", "digits", "--name", "base", *fields)
    station.ok("run", "digits", "--name", "whole", *fields, *betas, "--init", "base")
    stopped = station("run", "digits", "--name", "old", *fields, *betas, "--init", "base",
                      env={"TRAIN_FAULT": "step:5:kill"})  # fmt: skip
    assert stopped.returncode and station.run("old").newest_checkpoint == 3
    made_old(station, "old", momentum=0.7, args={})
    shown = station.ok("show", "old").stdout
    assert "old" in shown
    station.ok("resume", "old", "--follow", "--log.every_steps", 1)
    assert station.record("old")["weights_sha256"] == station.record("whole")["weights_sha256"]
    assert station.record("old")["weights_sha256"] != station.record("base")["weights_sha256"]
    again = tomllib.loads((station.run("old").folder / "config.toml").read_text())
    assert again["init"].endswith("step-00000006") and again["trace"] == again["init_skip"] == ""
    assert station("resume", "old", "--epochs", 1, "--optim.momentum", 0.8).returncode == 2


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("init.file", "a.pt", "init.file is gone; its name is init now"),
        ("init.rename", "a=b", "init.rename is gone; rename the weights in adapt_state_dict"),
        ("init.partial", "true", "init.partial is gone; leave out weights by init_skip"),
        ("log.trace", "1:2", "log.trace is gone; its name is trace now"),
        ("schedule.scaling", "sqrt", "schedule.scaling sqrt is gone; multiply optim.lr"),
    ],
)
def test_a_removed_name_is_refused_in_a_flag_a_file_and_defaults(
    tmp_path: Path, name: str, value: str, words: str
) -> None:
    group, _, field = name.partition(".")
    (tmp_path / "c.toml").write_text(f'[{group}]\n{field} = "{value}"\n')
    asked = {"settings": None, "defaults": {}, "task_file": tmp_path / "task.py", "config_file": None}
    for changed, flags in (
        ({}, {name: value}),
        ({"config_file": str(tmp_path / "c.toml")}, {}),
        ({"defaults": {name: value}}, {}),
    ):
        with pytest.raises(Refused, match=words):
            config.resolve(flags, **asked | changed)


def test_the_value_of_an_old_run_is_kept_and_no_list_offers_it() -> None:
    kind = config.fields()["schedule.scaling"].annotation
    assert config.type_name(kind) == "none|linear"
    assert config.build({"schedule.scaling": "sqrt"}).schedule.scaling == "sqrt"
    with pytest.raises(Refused, match="should be 'none' or 'linear'"):
        config.build({"schedule.scaling": "root"})


def test_a_removed_flag_is_named_before_anything_is_imported(station: Station) -> None:
    refused = station("launch", "digits", "--init.rename", "a.=b.")
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1, refused.stderr
    assert "--init.rename is gone; rename the weights in adapt_state_dict" in refused.stderr
