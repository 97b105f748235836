"""The lines of metrics.jsonl and of the sample logs: what is written is read, by whoever reads, at any moment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import cast

import pytest

from train.monitor.status import RunStatus
from train.run import folders, metrics
from train.run.metrics import Evaluation, Lines, Tail, Training, metrics_text
from train.run.run_folder import Run

pytestmark = pytest.mark.never_forgiven


def training(step: int, loss: float = 0.5) -> Training:
    return {
        "step": step, "epoch": 1, "loss": loss, "lr": 0.1, "samples_per_s": 9.5, "data_wait": 0.0, "step_time": 0.1,
        "memory": 7.0,
    }  # fmt: skip


def evaluation(step: int, loss: float = 0.25) -> Evaluation:
    return {"step": step, "epoch": 1, "samples": 10, "eval": {"loss": loss, "accuracy": 0.75}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return folders.create(tmp_path, "a", files={}, record={"world_size": 1})


def write(run: Run, *lines: metrics.Line) -> None:
    file = Lines(run.metrics)
    for line in lines:
        file.add(metrics_text(line))
    file.close()


def test_what_is_written_is_read_by_kind_and_in_order(run: Run) -> None:
    assert [*metrics.each(run)] == metrics.evaluations(run) == []
    assert metrics.last_evaluation(run) is None
    write(run, training(1), training(2), evaluation(2))
    write(run, training(3), evaluation(3))
    assert [*metrics.each(run)] == [training(1), training(2), evaluation(2), training(3), evaluation(3)]
    assert metrics.evaluations(run) == [evaluation(2), evaluation(3)]
    assert metrics.last_evaluation(run) == evaluation(3)


def test_the_last_training_line_is_found_behind_any_number_of_evaluations_and_is_what_a_run_shows(run: Run) -> None:
    attempt = {"number": 1, "started": "", "end": None, "world_size": 1, "from_step": 0, "to_step": None}
    run.update(step=2, loss=0.9, forked_from={"run": "b", "step": 2}, attempts=[attempt])
    write(run, training(1), training(3, 5.65e-05), *(evaluation(step) for step in range(3, 2000)))
    assert metrics.last_training(run) == training(3, 5.65e-05)
    assert RunStatus(run, run.read()).record["loss"] == 0.9, "of a fork that never trained the lines are another's"
    run.update(lambda record: record["attempts"][0].update(ready="2026-01-01T00:00:00+00:00"))
    shown = RunStatus(run, run.read()).record
    assert (shown["step"], shown["loss"]) == (3, 5.65e-05)


def test_a_figure_that_is_not_finite_is_null_for_any_reader_of_json(run: Run) -> None:
    write(run, evaluation(1, math.nan), evaluation(2, -math.inf), training(3, math.inf))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    lines = [json.loads(text, parse_constant=refuse) for text in run.metrics.read_text().splitlines()]
    assert [line.get("eval", line)["loss"] for line in lines] == [None, None, None]
    assert lines[0]["eval"]["accuracy"] == 0.75


@pytest.mark.parametrize("rubbish", [b'{"step": 4, "lo', b"\xff\xfe", b"\0" * 9, b"5", b"[1]", b"null", b""])
def test_what_is_no_whole_line_is_left_out_and_cut_off(run: Run, rubbish: bytes) -> None:
    write(run, training(3), evaluation(3))
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole + rubbish)
    assert [*metrics.each(run)] == [training(3), evaluation(3)]
    assert metrics.evaluations(run) == [evaluation(3)]
    metrics.cut(run, 9)
    assert run.metrics.read_bytes() == whole


def test_a_cut_leaves_the_lines_of_the_steps_before_in_every_file(run: Run) -> None:
    write(run, training(1), training(2), evaluation(2), training(3), evaluation(3))
    for rank in (0, 3):
        file = Lines(metrics.samples_file(run, rank))
        for step in (1, 2, 3):
            file.add(metrics.samples_text(step, [10 * step, rank]))
        file.close()
    metrics.cut(run, 2)
    assert [*metrics.each(run)] == [training(1), training(2), evaluation(2)]
    assert metrics.samples_file(run, 0).read_text() == "1 10 0\n2 20 0\n"
    assert metrics.samples_file(run, 3).read_text() == "1 10 3\n2 20 3\n"
    metrics.cut(run, 0)
    assert run.metrics.read_bytes() == metrics.samples_file(run, 3).read_bytes() == b""


def test_a_tail_gives_what_is_new_once_and_only_whole_lines(run: Run) -> None:
    early = Tail(run)
    assert early.new() == []
    write(run, training(1))
    late = Tail(run)
    assert early.new() == [training(1)] and early.new() == late.new() == []
    text = metrics_text(evaluation(2)).encode() + b"\n"
    with run.metrics.open("ab", buffering=0) as file:
        for byte in text[:-1]:
            file.write(bytes([byte]))
            assert late.new() == []
        file.write(text[-1:])
    assert late.new() == early.new() == [evaluation(2)]


def test_a_tail_goes_on_behind_a_cut(run: Run) -> None:
    write(run, training(1), training(2), training(3))
    tail = Tail(run)
    metrics.cut(run, 1)
    assert tail.new() == []
    write(run, training(2, loss=0.125))
    (line,) = tail.new()
    assert cast(Training, line)["loss"] == 0.125


def write_texts(run: Run, *texts: str) -> None:
    run.metrics.write_text("".join(f"{text}\n" for text in texts))


def test_a_line_of_a_script_needs_a_step_only_and_a_nan_in_it_is_a_gap(run: Run) -> None:
    write_texts(
        run,
        '{"step": 1, "loss": NaN, "name": "x", "flag": true}',
        '{"step": 2, "accuracy": 0.5, "loss": "high"}',
        '{"step": 2.5, "loss": 1}',
        '{"loss": 1}',
        '{"step": 3, "epoch": 0.5, "eval": {"bleu": Infinity}}',
    )
    found = [(line["step"], metrics.figures_of(line), line.get("epoch")) for line in metrics.each(run)]
    assert found == [(1, {"loss": None}, None), (2, {"accuracy": 0.5, "loss": None}, None), (3, {"bleu": None}, None)]


def test_of_a_step_that_is_made_again_the_last_line_counts(run: Run) -> None:
    first = ('{"step": 1, "loss": 1}', '{"step": 2, "loss": 2}', '{"step": 2, "accuracy": 0.5}')
    again = ('{"step": 2, "loss": 20}', '{"step": 4, "loss": 40}')
    write_texts(run, *first, '{"step": 3, "loss": 3}', '{"step": 3, "eval": {"bleu": 3}}', *again)
    assert [json.dumps(line) for line in metrics.lines(run)] == [
        '{"step": 1, "loss": 1}',
        '{"step": 2, "loss": 20, "accuracy": 0.5}',
        '{"step": 3, "eval": {"bleu": 3}}',
        '{"step": 4, "loss": 40}',
    ]


def test_a_figure_that_counts_its_steps_separately_cuts_no_other(run: Run) -> None:
    def found() -> list[tuple[int, dict[str, float | None]]]:
        return [(line["step"], metrics.figures_of(line)) for line in metrics.lines(run)]

    first, second = '{"step": 10, "loss": 10}', '{"step": 20, "loss": 20}'
    write_texts(run, first, '{"step": 1, "valid": 1}', second, '{"step": 2, "valid": 2}', '{"step": 0, "hp": -1}')
    assert found() == [
        (0, {"hp": -1}), (1, {"valid": 1}), (2, {"valid": 2}), (10, {"loss": 10}), (20, {"loss": 20})
    ]  # fmt: skip
    write_texts(run, first, second, '{"step": 15, "loss": 7, "hp": 1}')
    assert found() == [(10, {"loss": 10}), (15, {"loss": 7, "hp": 1})]


def test_a_tail_keeps_the_last_line_that_it_could_not_read(run: Run) -> None:
    tail = Tail(run)
    write_texts(run, '{"step": 1, "loss": 1}', "", "step=2 loss=1")
    assert [line["step"] for line in tail.new()] == [1] and tail.rejected == b"step=2 loss=1"
