"""What TensorBoard shows of a run."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from train.run import folders, metrics
from train.run.metrics import Evaluation, Training
from train.trainer.loggers.tensorboard import TensorBoard


def line(step: int) -> Training:
    return {
        "step": step, "epoch": 1, "loss": 1 / step, "lr": 0.5, "samples_per_s": 100.0, "data_wait": 0.0,
        "step_time": 0.25, "memory": 1000.0,
    }  # fmt: skip


def evaluation(step: int, accuracy: float) -> Evaluation:
    return {"step": step, "epoch": 1, "samples": 9, "eval": {"accuracy": accuracy}}


def test_every_line_is_shown_once_and_an_attempt_hides_what_the_one_before_wrote_beyond_its_begin(
    tmp_path: Path,
) -> None:
    for begin, end in ((0, 8), (5, 10)):
        board = TensorBoard(tmp_path, [], begin, print, {})
        for step in range(begin + 1, end + 1):
            board.training(line(step))
        board.evaluation(evaluation(end, end / 16))
        board.close()
    shown = EventAccumulator(str(tmp_path)).Reload()
    tags = {"loss", "lr", "samples_per_s", "data_wait", "step_time", "memory"}
    assert set(shown.Tags()["scalars"]) == {f"train/{tag}" for tag in tags} | {"eval/accuracy"}
    assert [event.step for event in shown.Scalars("train/loss")] == [*range(1, 11)]
    assert [event.value for event in shown.Scalars("train/step_time")] == [0.25] * 10
    assert [(event.step, event.value) for event in shown.Scalars("eval/accuracy")] == [(10, 0.625)]


@pytest.mark.parametrize("left", [0, 60, 100], ids=["nothing", "a part", "all"])
def test_the_next_attempt_shows_what_a_kill_took_along_and_nothing_twice(tmp_path: Path, left: int) -> None:
    run = folders.create(tmp_path, "a", files={}, record={})
    lines = [line(1), line(2), evaluation(2, math.nan), line(3), line(4), evaluation(4, 0.25)]
    run.metrics.write_text("".join(metrics.metrics_text(one) + "\n" for one in lines))
    folder = run.folder / "tensorboard"
    board = TensorBoard(folder, [], 0, print, {})
    for one in [*lines, line(5), evaluation(5, 0.125)]:  # the last two are made again
        board.evaluation(one) if metrics.is_evaluation(one) else board.training(one)
    board.close()
    (file,) = folder.iterdir()
    os.truncate(file, file.stat().st_size * left // 100)
    file.rename(folder / "events.out.tfevents.1000000000.a.1.1")  # two files of one second have no order
    TensorBoard(folder, metrics.recent(run), 4, print, {}).close()
    shown = EventAccumulator(str(folder)).Reload()
    losses = [(event.step, event.value) for event in shown.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(1 / step)) for step in range(1, 5)]
    assert [event.step for event in shown.Scalars("eval/accuracy")] == [2, 4]


@pytest.mark.minutes
def test_a_real_run_shows_its_configuration_and_no_point_twice_after_a_stop(
    engine: Any,
) -> None:
    station = engine.station
    engine.run(
        "board", task="digits", steps=55, batch_size=128, micro_batch_size=128, eval__every_epochs=0.5,
        optim__lr=0.125, log__tensorboard="true",
    )  # fmt: skip
    engine.resume("board", steps=80)
    shown = EventAccumulator(str(station.runs / "board" / "tensorboard"), {"scalars": 0}).Reload()
    steps = [event.step for event in shown.Scalars("train/loss")]
    assert steps == list(range(1, station.record("board")["step"] + 1))
    assert shown.Scalars("train/lr")[0].value > 0
    events = [json.loads(line) for line in (station.runs / "board" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in events if "loss" in line]
    assert [event.value for event in shown.Scalars("train/loss")] == pytest.approx(losses)
    content = shown.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["optim.lr"].number_value == 0.125 and values["optim.name"].string_value == "sgd"
    content = shown.SummaryMetadata("_hparams_/experiment").plugin_data.content
    names = {one.name.tag for one in plugin_data_pb2.HParamsPluginData.FromString(content).experiment.metric_infos}
    assert names == {"eval/loss", "eval/accuracy"} <= set(shown.Tags()["scalars"])
