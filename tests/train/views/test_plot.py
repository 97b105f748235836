"""Pictures of runs: they show the numbers of the run folder, and nothing is written when there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from train.commands import plot as command
from train.errors import Refused
from train.run import folders
from train.run.run_folder import Run
from train.run.spec import read_spec
from train.views import settings
from train.views.plot import Curves, plot

pytestmark = pytest.mark.turns


def made(runs: Path, name: str, steps: int = 50, evaluations: bool = True, height: float = 1.0) -> Run:
    run = folders.create(runs, name, files={}, record={"world_size": 1})
    lines = []
    for step in range(1, steps + 1):
        lines.append(
            {"step": step, "epoch": 1, "loss": height / step, "lr": 0.1, "samples_per_s": 100.0 + step,
             "data_wait": 0.001, "step_time": 0.01, "memory": 1}
        )  # fmt: skip
        if evaluations and step % 10 == 0:
            lines.append({"step": step, "epoch": 1, "eval": {"loss": height / step, "accuracy": 1 - 1 / step}})
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def coloured(path: Path) -> int:
    """Pixels that are neither white, grey nor black: lines of the plot."""
    picture = matplotlib.image.imread(path)[..., :3]
    return int((np.ptp(picture, axis=2) > 0.2).sum())


def test_a_png_shows_the_curves_of_the_run(tmp_path: Path) -> None:
    run, target = made(tmp_path / "runs", "a"), tmp_path / "a.png"
    plot([run], target)
    picture = matplotlib.image.imread(target)
    assert picture.shape[0] > 400 and picture.shape[1] > 400
    assert coloured(target) > 2000
    # other numbers, another picture
    plot([made(tmp_path / "runs2", "a", height=5.0)], tmp_path / "b.png")
    other = matplotlib.image.imread(tmp_path / "b.png")
    assert other.shape == picture.shape and (other != picture).any()


def test_norms_of_gradients_have_a_panel_where_they_were_logged(tmp_path: Path) -> None:
    run = made(tmp_path / "runs", "a")
    plot([run], tmp_path / "without.png")
    run.metrics.write_text(run.metrics.read_text().replace('"memory": 1', '"memory": 1, "grad_norm": 0.5'))
    plot([run], tmp_path / "with.png")
    heights = [matplotlib.image.imread(tmp_path / f"{name}.png").shape[0] for name in ("without", "with")]
    assert heights[0] < heights[1]


def test_several_runs_share_a_picture_also_when_only_one_was_evaluated(tmp_path: Path) -> None:
    runs = [made(tmp_path, "a"), made(tmp_path, "b", steps=20, evaluations=False), made(tmp_path, "c", steps=30)]
    plot(runs, tmp_path / "all.png")
    plot(runs[1:2], tmp_path / "one.png")
    assert coloured(tmp_path / "all.png") > coloured(tmp_path / "one.png") > 500


def test_of_very_many_measures_the_first_are_drawn_and_the_others_counted(tmp_path: Path) -> None:
    run = made(tmp_path, "a", steps=3, evaluations=False)
    with run.metrics.open("a") as file:
        measured = {"loss": 1.0} | {f"class-{number:03}": 0.5 for number in range(300)}
        file.write(json.dumps({"step": 3, "epoch": 1, "eval": measured}) + "\n")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot([run], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "class-011" in text and "class-012" not in text
    assert "288 more" in text


def test_the_suffix_chooses_the_format(tmp_path: Path) -> None:
    plot([made(tmp_path, "a")], tmp_path / "a.pdf")
    assert (tmp_path / "a.pdf").read_bytes().startswith(b"%PDF")


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = made(tmp_path, "a", steps=3, evaluations=False)
    with run.metrics.open("a") as file:
        file.write('{"step": 4, "lo')
    found = Curves("a", "C0").read(run)
    assert list(found.steps) == [1, 2, 3] and found.evaluations == {}


@pytest.mark.parametrize(
    ("target", "words"), [("a.bmp", "must end in"), ("a", "must end in"), ("nowhere/a.png", "no folder")]
)
def test_a_target_that_cannot_be_is_refused(tmp_path: Path, target: str, words: str) -> None:
    run = made(tmp_path / "runs", "a")
    with pytest.raises(Refused, match=words):
        plot([run], tmp_path / target)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_run_without_metrics_is_refused_by_name(tmp_path: Path) -> None:
    runs = [
        made(tmp_path / "runs", "full"),
        folders.create(tmp_path / "runs", "fresh", files={}, record={"world_size": 1}),
    ]
    with pytest.raises(Refused, match="fresh has no metrics"):
        plot(runs, tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_run_that_waits_for_data_is_told_so_beside_its_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path, "a")

    def drawn(to: Path) -> tuple[str, str]:
        assert command.run(Namespace(by=None, names=["a"], to=str(to)), tmp_path) == 0
        return to.read_text(), capsys.readouterr().err

    picture, told = drawn(tmp_path / "quiet.svg")
    assert "10% of the time" in picture and "training waits" not in picture + told
    said = "training waits 37% for data: raise data.workers to 8"
    run.note(data_wait=f"{said} (train stop a)")
    picture, told = drawn(tmp_path / "loud.svg")
    assert said in picture and told.startswith(f"a: {said} (train stop a)\nwrote ")


def test_of_several_runs_it_says_in_what_their_configurations_differ(tmp_path: Path) -> None:
    runs = [made(tmp_path, "a"), made(tmp_path, "b"), made(tmp_path, "c")]
    for run, rate in zip(runs, (0.1, 0.01, 0.1), strict=True):
        (run.folder / "config.toml").write_text(f"seed = 0\n[optim]\nlr = {rate}\n[log]\nevery_steps = {rate}\n")
    runs[2].update(world_size=4)
    launched = [(read_spec(run), run.read()["world_size"]) for run in runs]
    assert settings.differing(launched) == ["optim.lr=0.1  ranks=1", "optim.lr=0.01  ranks=1", "optim.lr=0.1  ranks=4"]
    assert settings.differing(launched[:1]) == [""]
    plot(runs, tmp_path / "all.svg")
    text = (tmp_path / "all.svg").read_text()
    assert "optim.lr=0.01" in text and "ranks=4" in text and "seed" not in text


def test_more_runs_than_colours_and_more_points_than_pixels_are_drawn(tmp_path: Path) -> None:
    runs = [made(tmp_path, f"many-{number}", steps=30, height=number + 1) for number in range(13)]
    runs.append(made(tmp_path, "long", steps=20_000, evaluations=False))
    plot(runs, tmp_path / "all.png")
    assert coloured(tmp_path / "all.png") > 2000


def test_what_no_axis_holds_leaves_a_gap_and_a_dollar_in_a_name_is_no_formula(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    with run.metrics.open("a") as file:
        file.write(
            '{"step": 51, "loss": 1e308}\n{"step": 52, "loss": -1e308}\n{"step": 51, "loss": %s}\n' % ("9" * 400)
            + '{"step": %s, "loss": 1}\n{"step": -5, "loss": 1}\n{"step": true, "loss": 1}\n' % ("9" * 400)
            + '{"step": 51, "lr": 1e308, "samples_per_s": -1e308, "data_wait": 1e308, "step_time": 1e-320}\n'
            + '{"step": 60, "epoch": 1, "eval": {"loss": null, "accuracy": null, "$\\\\frac{$": 0.5}}\n'
        )
    plot([run], tmp_path / "a.png")
    assert coloured(tmp_path / "a.png") > 1000


def test_a_pipe_in_place_of_the_lines_keeps_nobody_waiting(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    with pytest.raises(OSError, match="not a regular file"):
        plot([run], tmp_path / "a.png")


def test_a_line_without_a_figure_says_nothing_of_the_time_of_the_others(tmp_path: Path) -> None:
    run = made(tmp_path, "a")
    with run.metrics.open("a") as file:
        file.write('{"step": 51, "loss": 1.0, "data_wait": 0.001}\n{"step": 52, "loss": 1.0, "step_time": null}\n')
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot([run], tmp_path / "a.svg")
    assert "10% of the time" in (tmp_path / "a.svg").read_text()


def test_of_a_script_that_went_back_the_last_values_are_drawn_and_only_what_was_measured(tmp_path: Path) -> None:
    run = folders.create(tmp_path, "a", files={}, record={"world_size": 1, "script": "/own.py"})
    lines = [{"step": step, "loss": 1.0, "accuracy": 0.5} for step in (1, 2, 3, 4, 5)]
    lines += [{"step": 5, "loss": 5.0}, {"step": 3, "loss": 3.0, "accuracy": 0.3}]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    curves = Curves("a", "C0").read(run)
    assert [*curves.steps] == [1, 2, 3] and [*curves.training["loss"]] == [1.0, 1.0, 3.0]
    assert [*map(list, curves.evaluations["accuracy"])] == [[1, 2, 3], [0.5, 0.5, 0.3]]
    assert curves.panels == ["loss", "eval accuracy"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot([run], tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert "accuracy" in drawn and "learning rate" not in drawn and "samples / s" not in drawn
    run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(Refused, match="a has no metrics to draw yet; launch it with --figures"):
        plot([run], tmp_path / "b.svg")


PEAK = """
import re, sys
from pathlib import Path
from train.monitor.status import RunStatus
from train.views import report
from train.run.run_folder import Run
run = Run(Path(sys.argv[1]))
report.write(RunStatus(run, run.read_effective()), Path(sys.argv[2]))
# of its own memory: what getrusage says counts that of the process, too, which it was forked from
print(int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
"""


def test_a_long_run_is_drawn_in_little_memory(tmp_path: Path) -> None:
    """In MiB for 100,000 lines: as objects of Python they take some 100, and 5 as columns."""

    def peak(run: Run) -> int:
        command = [sys.executable, "-c", PEAK, str(run.folder), str(tmp_path / "long.html")]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout)

    short, long = made(tmp_path, "short", steps=10), made(tmp_path, "long", steps=10)
    text = long.metrics.read_text().splitlines()[0] + "\n"
    long.metrics.write_text("".join(text.replace('"step": 1,', f'"step": {step},') for step in range(1, 100_001)))
    assert peak(long) < peak(short) + 50
