"""Pictures, texts and sounds of evaluations: files in the run folder, in TensorBoard, and pictures in the report."""

from __future__ import annotations

import base64
import io
import re
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.tasks import TASKS
from train.errors import TrainingFailed
from train.monitor.status import RunStatus
from train.tasks import load
from train.trainer.media import encoded
from train.views import report

TASK = load(str(TASKS / "whole_sets.py"))
OF_WHOLE_SETS = ("matrix.png", "seen_text.txt", "tone.wav")
"""Files of what compute_metrics returns beside numbers."""


def test_a_run_leaves_them_where_they_are_looked_for(engine: Any, tmp_path: Path) -> None:
    task = tmp_path / "task.py"
    more = """
        "matrix": torch.full((1, 8, 8), 0.5),
        "seen_text": f"{len(ids)} *seen*", "tone": (torch.linspace(-1, 1, 800), 8000),
        **own(len(ids)), "seen":"""
    own = """
import os
AT_IMPORT = os.environ["TRAIN_RUN_DIR"]
def own(count):
    import pathlib
    (pathlib.Path(os.environ["TRAIN_RUN_DIR"]) / f"own-{count}.csv").write_text("mine")
    return {}
"""
    text = TASK.file.read_text().replace("def inference_model", "def _unused").replace('"seen":', more)
    task.write_text(text + own)
    flags = {"log__tensorboard": "true", "eval__every_steps": 2, "parallel__strategy": "fsdp", "steps": 3}
    name = "pictures"
    assert engine.run(name, 2, task=task, **flags)["state"] == "finished", engine.said(name)
    run = engine.station.run(name)
    names = ("curve.png", "noise.png", *(f"{name}.{one}" for name in ("test", "val") for one in OF_WHOLE_SETS))
    files = [
        f"{one.rpartition('.')[0]}-step-0000000{step}.{one.rpartition('.')[2]}" for one in names for step in (2, 3)
    ]
    assert sorted(path.name for path in run.images.iterdir()) == sorted(files)
    shown, page = (
        EventAccumulator(str(run.folder / "tensorboard")).Reload(),
        report.html(RunStatus(run, run.read_effective())),
    )
    for one in ("curve", "noise", "val.matrix", "test.matrix"):
        events = shown.Images(f"images/{one}")
        assert [event.step for event in events] == [2, 3]
        newest = (run.images / f"{one}-step-00000003.png").read_bytes()
        assert events[-1].encoded_image_string == newest and events[-1].width == Image.open(io.BytesIO(newest)).width
        assert f"{one}, step 3</figcaption>" in page and base64.b64encode(newest).decode() in page
    assert len(re.findall(r"<img [^>]*>", page)) == 4
    text = shown.Tensors("text/val.seen_text/text_summary")[-1].tensor_proto.string_val
    sound = shown.Audio("audio/test.tone")[-1]
    assert text == [b"23 *seen*"] and (sound.sample_rate, sound.length_frames) == (8000, 800)
    assert {path.name for path in run.folder.glob("own-*.csv")} == {"own-23.csv", "own-30.csv"}


def test_images_of_a_tensor_stand_in_a_grid_and_small_ones_are_drawn_larger() -> None:
    five = torch.arange(5).reshape(5, 1, 1, 1).expand(5, 1, 32, 16) / 4
    page = np.asarray(Image.open(io.BytesIO(encoded("images in FILE", {"five": five})["five"].content)))
    assert page.shape == (2 * (64 + 2) + 2, 3 * (32 + 2) + 2, 3)
    assert [page[y, x, 0] for y, x in ((12, 12), (12, 46), (12, 80), (78, 12), (78, 46))] == [0, 64, 128, 191, 255]
    colours = torch.zeros(3, 70, 80, dtype=torch.uint8)
    colours[1] = 7
    one = np.asarray(Image.open(io.BytesIO(encoded("images in FILE", {"one": colours})["one"].content)))
    assert one.shape == (70, 80, 3) and one[5, 5].tolist() == [0, 7, 0]
    wild = torch.tensor([[[[-3.0, torch.nan, 0.5, 9.0]]]])
    assert np.unique(Image.open(io.BytesIO(encoded("images in FILE", {"wild": wild})["wild"].content))).tolist() == [
        0,
        128,
        255,
    ]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (torch.zeros(3, 4, 4), "dict of pictures, got Tensor"),
        ({"a/b": torch.zeros(3, 4, 4)}, "names a picture 'a/b'"),
        ({"a": [1]}, r"from -1 to 1; got list"),
        ({"a": (torch.zeros(3, 4), 0)}, "got tuple"),
        ({"a": (torch.zeros(3, dtype=torch.int16), 8000)}, "got tuple"),
        ({"a": torch.zeros(5, 4, 4)}, r"got torch.float32 \(5, 4, 4\)"),
        ({"a": torch.zeros(3, 4, 4, dtype=torch.int64)}, r"got torch.int64 \(3, 4, 4\)"),
        ({"a": torch.zeros(0, 3, 4, 4)}, r"got torch.float32 \(0, 3, 4, 4\)"),
    ],
)
def test_what_is_no_picture_is_named(made: Any, words: str) -> None:
    with pytest.raises(TrainingFailed, match=words):
        encoded("images in FILE", made)


def test_sound_keeps_its_channels_and_rate() -> None:
    samples = torch.tensor([[0.0, 0.5, -1.0, 7.0], [0.25, 0.0, 0.0, torch.nan]])
    sound = encoded("images in FILE", {"two": (samples, 16000)})["two"]
    with wave.open(io.BytesIO(sound.content)) as file:
        assert (sound.suffix, file.getnchannels(), file.getframerate(), file.getnframes()) == ("wav", 2, 16000, 4)
        heard = np.frombuffer(file.readframes(4), dtype="<i2").reshape(4, 2)
    assert heard.T.tolist() == [[0, 16384, -32767, 32767], [8192, 0, 0, 0]]
