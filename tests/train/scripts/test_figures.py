"""Figures from the output of a script, and from the files that TensorBoard's writers leave."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from train.errors import Refused
from train.scripts import reader as reading
from train.scripts.reader import EventReader, OutputReader

NANOGPT = r"iter (?P<step>\d+): loss (?P<loss>\S+) time (?P<ms>\S+)ms"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (r"(?P<step>\d+", "is no regular expression: missing"),
        (r"loss (?P<loss>\S+)", "has no group named step"),
        (r"(?P<step>\d+) of (?P<total_steps>\d+)", "has no group for a metric"),
        ("", "has no group named step"),
        ("tensorboard:", r"give a file or folder, such as tensorboard:\{run\}/tb"),
    ],
)
def test_what_cannot_be_read_from_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        reading.check([NANOGPT, text])
    assert "\n" not in str(refused.value)


def read(path: Path, expression: str) -> tuple[list[reading.Line], str]:
    reader = OutputReader(path, expression)
    return [*reader.lines(is_last=True)], reader.problem


def test_a_line_of_output_gives_a_line_of_figures(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("start\niter 10: loss 2.3456, time 12.5ms, mfu 1%\niter 20: loss nan, time 1,234.5ms\niter 30: loss")
    (first, second), problem = read(log, NANOGPT)
    assert first == {"step": 10, "loss": 2.3456, "ms": 12.5} and problem == ""
    assert second["step"] == 20 and second["loss"] != second["loss"] and second["ms"] == 1234.5


def test_a_bar_that_is_redrawn_gives_its_last_state_and_a_line_comes_once(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_bytes(b"step 1 loss 0.5\rstep 2 loss 0.25\rstep 3 loss 0.125\nstep 4 ")
    reader = OutputReader(log, r"step (?P<step>\d+) loss (?P<loss>[\d.]+)")
    assert [*reader.lines(False)] == [{"step": 3, "loss": 0.125}]
    with log.open("ab") as file:
        file.write(b"loss 0.5\n")
    assert [*reader.lines(False)] == [{"step": 4, "loss": 0.5}] and [*reader.lines(True)] == []


def test_output_that_gives_no_number_says_why(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("epoch 1, loss tensor(0.5)\n")
    assert read(log, r"loss (?P<loss>\S+) at (?P<step>\d+)")[1].startswith("no line of the output of rank 0 matches")
    lines, problem = read(log, r"epoch (?P<step>\d+), loss (?P<loss>\S+)")
    assert lines == [] and "loss has matched 'tensor(0.5)', which is no number" in problem


def test_scalars_of_the_writers_of_several_libraries_get_the_usual_names(tmp_path: Path) -> None:
    def write(step: int, **scalars: float) -> None:
        values = [Summary.Value(tag=tag.replace("__", "/"), simple_value=value) for tag, value in scalars.items()]
        writer.add_event(Event(step=step, wall_time=100.0 + step, summary=Summary(value=values)))
        writer.flush()

    began = time.time()
    (tmp_path / "old").mkdir()
    EventFileWriter(str(tmp_path / "old")).close()
    for path in (tmp_path / "old").iterdir():
        os.utime(path, (began - 100, began - 100))
    reader = EventReader(tmp_path, began - 50)
    assert [*reader.lines(True)] == [] and "no files of TensorBoard" in reader.problem
    writer = EventFileWriter(str(tmp_path / "runs" / "version_0"))
    write(1, train__loss=0.1, train__learning_rate=0.25, train__epoch=0.5)  # Hugging Face
    write(2, train_loss_step=0.5)  # Lightning
    write(2, **{"lr-Adam": 0.125, "epoch": 0.0})
    write(3, losses__value_loss=2.0, charts__learning_rate=0.5)  # cleanrl
    assert [*reader.lines(True)] == [
        {"step": 1, "wall_time": 101.0, "loss": 0.1, "lr": 0.25},
        {"step": 2, "wall_time": 102.0, "loss": 0.5, "lr": 0.125},
        {"step": 3, "wall_time": 103.0, "losses/value_loss": 2.0, "lr": 0.5},
    ]
    assert reader.problem == ""
    write(4, loss=0.25, eval__loss=0.75)
    assert [*reader.lines(False)] == [{"step": 4, "wall_time": 104.0, "loss": 0.25, "eval/loss": 0.75}]
    write(5, train__train_loss=0.5)  # Hugging Face, of the whole training
    assert [*reader.lines(False)] == [{"step": 5, "wall_time": 105.0, "train/train_loss": 0.5}]
    writer.close()
    next((tmp_path / "runs" / "version_0").iterdir()).write_bytes(b"rubbish" * 100)
    assert [*reader.lines(True)] == []


EPOCHS = r"Epoch: \[(?P<epoch>\d+)\]\s+\[\s*(?P<step>\d+)/(?P<total_steps>\d+)\].*loss: (?P<loss>\S+)"


def test_steps_that_begin_anew_in_each_epoch_count_on_over_attempts_too(tmp_path: Path) -> None:
    def write(attempt: int, *epochs: int) -> list[reading.Line]:
        log = tmp_path / f"{attempt}.log"
        lines = [
            f"\x1b[32mEpoch: [{epoch}]  [ {step}/6]  loss: \x1b[1m{step + 1}.5\x1b[0m"
            for epoch in epochs
            for step in (0, 2, 4)
        ]
        log.write_text("\n".join(lines) + "\n")
        return [*OutputReader(log, EPOCHS, before).lines(is_last=True)]

    before: list[reading.Line] = []
    before += write(1, 0, 1)
    assert [line["step"] for line in before] == [0, 2, 4, 6, 8, 10]
    assert before[4] == {"epoch": 1, "step": 8, "step_in_epoch": 2, "total_steps": None, "loss": 3.5}
    assert [line["step"] for line in write(2, 1, 2)] == [6, 8, 10, 12, 14, 16]


def test_a_step_that_counts_on_over_epochs_stays_as_it_is(tmp_path: Path) -> None:
    log, places = tmp_path / "rank0.log", [(0, 1), (0, 2), (1, 3), (1, 4), (1, 3), (2, 5)]  # with a step back
    log.write_text("".join(f"{epoch} {step} 0.5\n" for epoch, step in places))
    lines, _ = read(log, r"(?P<epoch>\d+) (?P<step>\d+) (?P<loss>\S+)")
    assert [(line["epoch"], line["step"]) for line in lines] == places


def test_after_a_restart_no_line_is_missed_before_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("loading\n")
    reader = OutputReader(tmp_path / "rank0.log", NANOGPT, [{"step": 3, "loss": 0.5}])
    assert [*reader.lines(is_last=True)] == [] and reader.problem == ""
