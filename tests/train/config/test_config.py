"""The configuration: what a flag, a key of a file and a default mean, and which of them wins."""

from __future__ import annotations

import dataclasses
import math
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from train import config
from train.errors import Refused
from train.launcher.request import Request, resolve

pytestmark = pytest.mark.never_forgiven


@dataclasses.dataclass
class Settings:
    width: int = 32
    share: float = 0.5
    mode: Literal["fast", "slow"] = "fast"
    limit: int | None = None
    sizes: tuple[int, ...] = (1, 2)
    place: Path = Path("here")
    on: bool = False


def test_every_field_is_a_flag_with_a_help_text() -> None:
    known = config.fields()
    for name in (
        "epochs", "steps", "seed", "batch_size", "micro_batch_size", "optim.name", "optim.lr", "optim.momentum",
        "optim.weight_decay", "schedule.warmup_epochs", "schedule.decay", "schedule.scaling",
        "schedule.base_batch_size", "parallel.strategy", "precision", "compile", "clip_grad_norm", "sync_batchnorm",
        "deterministic", "data.root", "data.workers", "checkpoint.every_steps", "checkpoint.every_minutes",
        "checkpoint.keep", "log.every_steps", "log.samples", "eval.every_epochs", "eval.every_steps",
    ):  # fmt: skip
        assert name in known
    assert all(len(info.help) > 20 and info.help.endswith(".") for info in known.values())


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "7", 7),
        ("steps", "none", None),
        ("epochs", "0.5", 0.5),
        ("optim.lr", "1e-3", 0.001),
        ("compile", "true", True),
        ("compile", "false", False),
        ("compile", "blocks", "blocks"),
        ("optim.name", "sgd", "sgd"),
        ("data.root", "5", "5"),
        ("data.root", "", ""),
        ("clip_grad_norm", "None", None),
    ],
)
def test_the_text_of_a_flag_becomes_a_value_of_the_fields_type(name: str, text: str, value: object) -> None:
    made = config.parse_value(name, config.fields()[name].annotation, text)
    assert made == value and type(made) is type(value)


def test_settings_of_a_task_may_be_lists_written_as_in_toml() -> None:
    assert config.parse_value("task.sizes", tuple[int, ...], "[3, 4]") == (3, 4)
    with pytest.raises(Refused, match="TOML"):
        config.parse_value("task.sizes", tuple[int, ...], "3 4")


def test_flags_win_over_the_file_the_file_over_the_task_and_the_task_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("batch_size = 10\nseed = 3\n[optim]\nlr = 0.7\n[task]\nwidth = 9\n")
    task, made = resolve(Request(task="digits", flags={"seed": "4", "task.shift": "0"}, config_file=str(file)))
    assert (made.seed, made.batch_size, made.optim.lr) == (4, 10, 0.7)
    assert (made.task.width, made.task.shift, made.task.dropout) == (9, 0, 0.2)
    assert made.epochs == task.DEFAULTS["epochs"]
    assert made.schedule.gamma == config.Schedule().gamma


def test_a_file_may_leave_to_a_flag_what_has_no_default(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Settings:\n    size: int\n    name: str = 'x'\n"
        "def model(config): ...\ndef datasets(config): ...\ndef loss(model, batch): ...\n"
    )
    (tmp_path / "c.toml").write_text("steps = 5")
    request = Request(task=str(tmp_path / "task.py"), flags={"task.size": "3"}, config_file=str(tmp_path / "c.toml"))
    assert resolve(request)[1].task.size == 3


def test_a_mark_before_the_text_of_a_file_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xef\xbb\xbfsteps = 3\n")
    assert config.read_toml(file) == {"steps": 3}


@pytest.mark.parametrize(
    ("layers", "epochs", "steps"),
    [
        ([{"steps": 5}], None, 5),
        ([{"steps": 5}, {"epochs": 2.0}], 2.0, None),
        ([{"epochs": 2.0}, {"steps": 5}], None, 5),
        ([{"epochs": 2.0}, {"steps": None}], 2.0, None),
        ([], 10.0, None),
    ],
)
def test_steps_and_epochs_replace_each_other(
    layers: list[dict[str, Any]], epochs: float | None, steps: int | None
) -> None:
    flat: dict[str, Any] = {"epochs": config.fields()["epochs"].default}
    for one in layers:
        flat = config.layer(one, None, "", flat)
    made = config.build(flat)
    assert (made.epochs, made.steps) == (epochs, steps)


@pytest.mark.parametrize(
    ("layers", "epochs", "steps"),
    [
        ([], 1.0, None), ([{"eval.every_steps": 5}], None, 5),
        ([{"eval.every_steps": 5}, {"eval.every_epochs": 0.0}], 0.0, None),
        ([{"eval.every_epochs": 2.0}, {"eval.every_steps": 5}], None, 5),
    ],
)  # fmt: skip
def test_evaluations_come_by_steps_or_by_epochs(
    layers: list[dict[str, Any]], epochs: float | None, steps: int | None, tmp_path: Path
) -> None:
    flat: dict[str, Any] = {"epochs": 1.0}
    for one in layers:
        flat = config.layer(one, None, "", flat)
    (tmp_path / "config.toml").write_text(config.to_toml(config.build(flat)))
    made = config.from_toml(tmp_path / "config.toml", None)
    assert (made.eval.every_epochs, made.eval.every_steps) == (epochs, steps)


def test_a_configuration_written_as_toml_reads_back_as_itself(tmp_path: Path) -> None:
    flat = {"steps": 5, "optim.lr": 0.25, "clip_grad_norm": 1.0, "task.sizes": [3], "task.limit": 8, "data.root": 'a"ü'}
    made = config.build(flat, Settings)
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml(made))
    again = config.from_toml(file, Settings)
    assert again == made
    assert again.task.place == Path("here") and again.task.sizes == (3,)
    assert config.to_flat(again) == config.to_flat(made)
    assert again.epochs is None and again.micro_batch_size is None


def test_a_none_that_replaced_a_default_is_still_none_when_read_back(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config.to_toml(config.build({"steps": 5, "clip_grad_norm": None})))
    assert config.from_toml(tmp_path / "config.toml", None).clip_grad_norm is None


@pytest.mark.parametrize("default", [{"default": 1.0}, {"default_factory": float}, {}])
def test_a_none_of_a_task_is_still_none_when_read_back_whatever_its_default(
    default: dict[str, Any], tmp_path: Path
) -> None:
    own = dataclasses.make_dataclass("Settings", [("clip", float | None, dataclasses.field(**default))])
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml(config.build({"steps": 5, "task.clip": None}, own)))
    assert config.from_toml(file, own).task.clip is None
    assert config.flatten(config.read_toml(file))["task.clip"] is None  # as --config takes it
    file.write_text(config.to_toml(config.build({"steps": 5, "task.clip": 2.0}, own)))
    assert "none =" not in file.read_text() and config.from_toml(file, own).task.clip == 2.0


def test_what_a_file_lacks_has_its_default_and_a_list_that_is_none_is_refused(tmp_path: Path) -> None:
    own = dataclasses.make_dataclass("Settings", [("clip", float | None, 1.0), ("size", int | None, None)])
    file = tmp_path / "config.toml"
    file.write_text("steps = 5\n[task]\n")
    assert config.from_toml(file, own).task == own(clip=1.0, size=None)
    for text, words in (("none = 3", "list of field names"), ('none = ["task.clib"]', "task.clip")):
        file.write_text(f"{text}\nsteps = 5\n")
        with pytest.raises(Refused, match=words):
            config.from_toml(file, own)


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", True])
def test_a_number_is_a_finite_number(value: object) -> None:
    with pytest.raises(Refused, match="lr"):
        config.build({"steps": 1, "optim.lr": value})
    with pytest.raises(Refused, match=r"task\.share"):
        config.build({"steps": 1, "task.share": value}, Settings)


def test_defaults_of_settings_are_of_their_own_types() -> None:
    wrong = dataclasses.make_dataclass("Settings", [("a", int, dataclasses.field(default="x"))])
    with pytest.raises(Refused, match=r"task\.a = 'x'"):
        config.build({"steps": 1}, wrong)
    enum = dataclasses.make_dataclass("Settings", [("a", Colour, dataclasses.field(default=Colour.RED))])
    assert config.build({"steps": 1}, enum).task.a is Colour.RED


def test_neither_epochs_nor_steps_is_refused() -> None:
    with pytest.raises(Refused, match="neither epochs nor steps"):
        config.build({"epochs": None, "steps": None})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("epochs", 9.0, True),
        ("steps", 9, True),
        ("data.workers", 2, True),
        ("data.root", "/b", True),
        ("log.samples", True, True),
        ("checkpoint.keep", 9, True),
        ("eval.every_epochs", 2.0, True),
        ("seed", 9, False),
        ("batch_size", 9, False),
        ("micro_batch_size", 9, False),
        ("optim.lr", 0.9, False),
        ("precision", "bf16", False),
        ("cpu_threads", 9, False),
        ("task.width", 9, False),
        ("data.name", "MNIST", False),
    ],
)
def test_a_resume_may_change_only_what_does_not_change_the_result(name: str, value: object, allowed: bool) -> None:
    before = config.to_flat(config.build({"steps": 1}, Settings))
    changed = config.forbidden_changes(before, before | {name: value})
    assert changed == ([] if allowed else [name])
