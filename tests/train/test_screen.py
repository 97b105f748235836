"""What is printed fits into any terminal and any locale, and quotes nothing whole that is endless."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pytest

from tests.train.terminal import Terminal
from train import screen
from train.errors import Refused, shortened
from train.run import folders

if TYPE_CHECKING:
    from conftest import Station

ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
STRICT = ASCII | {"PYTHONIOENCODING": "ascii:strict"}


@pytest.mark.parametrize("command", ["", "launch", "bench"])
def test_help_is_no_traceback_in_an_ascii_locale(station: Station, command: str) -> None:
    done = station.ok(*filter(None, [command]), "--help", env=STRICT)
    assert done.stdout.isascii() and "usage: train" in done.stdout and not done.stderr


@pytest.mark.minutes
def test_every_output_is_readable_in_an_ascii_locale(station: Station) -> None:
    done = station.ok("run", "digits", "--name", "a", "--steps", 4, "--cpu_threads", 1, env=STRICT)
    assert "finished after 4 steps; weights " in done.stderr and "Traceback" not in done.stderr
    station.run("a").update(reason="größer als … → 3 µs", state="failed")
    shown = station.ok("show", "a", env=STRICT).stdout
    assert "a: failed: gr\\xf6\\xdfer als \\u2026 \\u2192 3 \\xb5s" in shown
    assert "finished after 4 steps; weights " in station.ok("logs", "a", env=STRICT).stdout
    station.ok("ls", env=STRICT)
    assert station("show", "ä", env=STRICT).returncode == 2
    refused = station("run", "digits", "--data.root", "/tmp/größer", "--name", "b", env=STRICT)
    assert refused.returncode in (0, 2) and "Traceback" not in refused.stderr, refused.stderr


def test_a_task_with_letters_of_its_own_is_trained_in_an_ascii_locale_and_its_log_is_utf_8(station: Station) -> None:
    task = "def datasets(config):\n    print('größer →', flush=True)\n    return [(1.0, 2.0)] * 4, None\n"
    task += "import torch\nmodel = lambda config: torch.nn.Linear(1, 1)\n"
    task += "def loss(model, batch):\n    return (model(batch[0].float()[:, None]) - 2).square().mean()\n"
    (station.folder / "größe.py").write_text(task, encoding="utf-8")
    station.ok("launch", "größe.py", "--name", "a", "--steps", 2, "--follow", env=STRICT)
    assert "größer →" in (station.runs / "a" / "logs" / "attempt-1" / "rank0.log").read_text(encoding="utf-8")


def test_a_log_line_that_quotes_a_users_name_steers_no_terminal() -> None:
    line = logging.makeLogRecord({"msg": "accuracy\x1b]0;owned\x07 %s\nnext", "args": ("\x9b2J",)})
    assert screen.PlainLines().format(line) == "accuracy?]0;owned? ?2J\nnext"


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [["show", LONG], [LONG], ["ls", f"--{LONG}"], ["run", LONG], ["run", "digits", "--optim.lr", LONG],
     ["run", "digits", "--seed", "1 " * 3000]],
)  # fmt: skip
def test_what_a_user_gives_is_not_echoed_whole(station: Station, arguments: list[str]) -> None:
    refused = station.here(*arguments)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "xxxx…" in refused.stderr or "1 …" in refused.stderr or "1…" in refused.stderr, refused.stderr
    assert LONG not in refused.stderr and len(refused.stderr) < 1500


def test_words_and_lines_are_cut_in_their_middle() -> None:
    assert shortened("short, as it is") == "short, as it is"
    assert shortened("a" * 300 + "/end of it").endswith("a/end of it") and len(shortened("a" * 300)) == 160
    assert len(shortened("ab " * 3000)) == 1200
    assert len(str(Refused("y" * 5000))) == 160


@pytest.mark.minutes
@pytest.mark.parametrize("columns", [160, 60, 20])
def test_the_bar_shows_the_loss_on_any_terminal(station: Station, columns: int) -> None:
    name = "a-run-with-a-rather-long-name"
    terminal = Terminal(
        station, "run", "digits", "--name", name, "--epochs", "8", "--cpu_threads", "1", columns=columns,
    )  # fmt: skip
    assert terminal.end() == 0, terminal.output
    drawn = [re.sub(r"\x1b\[[A-Z]", "", part) for line in terminal.output.split("\n") for part in line.split("\r")]
    bars = [part for part in drawn if re.search(r"\d%.*loss \d\.\d{4}", part)]
    assert bars, terminal.output
    assert all(len(part) <= columns for part in bars), bars
    assert any("100%" in part for part in bars)
    if columns == 160:
        assert any("samples/s" in part and name in part and "epoch" in part for part in bars)


def test_tables_and_stories_fit_into_a_narrow_terminal(station: Station) -> None:
    station.ok("run", "digits", "--name", "a-run-with-a-rather-long-name", "--steps", 3, "--cpu_threads", 1)
    terminal = Terminal(station, "ls", columns=40)
    assert terminal.end() == 0
    lines = terminal.output.replace("\r", "").splitlines()
    assert len(lines) == 2 and all(len(line) <= 40 for line in lines), lines
    assert "finished" in lines[1] and "loss" in lines[1]
    shown = Terminal(station, "show", "a-run-with-a-rather-long-name", columns=40)
    assert shown.end() == 0
    for line in shown.output.replace("\r", "").splitlines():
        assert len(line) <= 40 or len(line.split()) <= 2, line
    wide = station.ok("ls").stdout
    assert "a-run-with-a-rather-long-name" in wide and "STARTED" in wide and "…" not in wide


def test_a_folder_with_an_endless_name_takes_no_column_from_the_others(station: Station) -> None:
    run = folders.create(
        station.runs, "a", files={}, record={"world_size": 1, "state": "finished", "metrics": {"loss": 0.5}}
    )
    run.folder.rename(run.folder.with_name("n" * 250))
    terminal = Terminal(station, "ls", columns=80)
    assert terminal.end() == 0 and "RANKS" in terminal.output and "loss 0.5000" in terminal.output
    assert "n" * 250 in station.ok("ls").stdout
    assert station.ok("show", "n" * 250).stdout.startswith("n" * 63 + "…: finished")


def test_a_line_is_folded_between_words_only() -> None:
    text = "  versions     train 0.1.0  python 3.11.7  torch 2.7.1  cuda 12.6"
    assert screen.wrapped(text, None, 15) == text
    folded = screen.wrapped(text, 40, 15).splitlines()
    assert len(folded) > 1 and all(len(line) <= 40 for line in folded) and folded[1].startswith(" " * 15)
    assert " ".join(" ".join(folded).split()) == " ".join(text.split())
