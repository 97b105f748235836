#!/usr/bin/env python3
"""Makes the pictures of docs/ from real runs: `make pictures`, or `make pictures IN="ways top"`. Needs Chromium.

Look at each picture before you commit it. The runs lie in a temporary folder.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
DOCS = CHECKOUT / "docs"
TRAIN = [sys.executable, "-m", "train"]
WAYS = {"launch": "A launch", "death": "A death", "batch": "A batch"}
"""Maps a picture of a way through the code to its heading in how-it-works.md."""
RECORDER = """
import os, sys, time
last = None
def note(frame, event, _):
    global last
    code = frame.f_code
    # a function (1: CO_OPTIMIZED) of the package, but not the body of a module or class
    if event != "call" or not code.co_flags & 1 or "/train/" not in code.co_filename:
        return
    if (what := (os.getpid(), code.co_filename)) != last:
        last = what
        with open(f"{os.environ['WAYS']}/{what[0]}", "a") as file:
            print(time.time(), os.environ.get("RANK", ""), what[1].rpartition("/train/")[2], code.co_name, file=file)
sys.setprofile(note)
"""
"""Notes which files of the package a process enters, and when."""


def train(*words: object, **environ: str) -> str:
    command = [*TRAIN, *map(str, words)]
    return subprocess.run(command, env=os.environ | environ, check=True, stdout=subprocess.PIPE, text=True).stdout


def screenshot(page: Path, to: Path, width: int, height: int) -> None:
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--log-level=3"]
    shot = [f"--screenshot={to}", f"--window-size={width},{height}", page.as_uri()]
    subprocess.run([*browser, *shot], check=True, capture_output=True)


def prove() -> None:
    """What a terminal shows of a proof of README's script."""
    from rich.console import Console

    sys.path.insert(0, str(CHECKOUT))
    from tests.docs import pages

    script = Path(os.environ["TRAIN_RUNS"], "ddp.py")
    blocks = pages.read(CHECKOUT / "README.md").blocks
    script.write_text(next(block.text for block in blocks if block.file == script.name))
    said = train("prove", script, "--nproc", 2)
    console = Console(record=True, width=110, file=io.StringIO())
    console.print("[bold]$ train prove ddp.py --nproc 2[/]", highlight=False)
    console.print(said, highlight=False, markup=False)
    _draw_terminal(console, "prove")


def top() -> None:
    """What a terminal shows while two runs train and another one has failed."""
    from rich.console import Console
    from rich.text import Text

    from train.monitor.top import STYLE, Page

    train("launch", "digits", "--name", "first", "--nproc", 1, "--epochs", 3, "--follow")
    for name, ranks in (("wide", 2), ("small", 1)):
        train("launch", "digits", "--name", name, "--nproc", ranks, "--epochs", 2000)
    page = Page(Path(os.environ["TRAIN_RUNS"]), ["first", "wide", "small"])
    page.ask(0)
    time.sleep(8)
    console = Console(record=True, width=96, file=io.StringIO())
    for row in page.rows(96, 30):
        console.print(Text(row.text, style=STYLE.get(row.kind, ""), no_wrap=True, overflow="crop"))
    for name in ("wide", "small"):
        train("stop", name, "--now")
    _draw_terminal(console, "top")


def _draw_terminal(console: Any, name: str) -> None:
    svg = Path(os.environ["TRAIN_RUNS"], f"{name}.html")
    drawing = console.export_svg(title=f"train {name}")
    width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing).groups())  # type: ignore[union-attr]
    svg.write_text(f"<body style='margin:0'>{drawing}")
    screenshot(svg, DOCS / f"{name}.png", 1200, round(height * 1200 / width))


def report() -> None:
    train("launch", "digits", "--name", "killed", "--nproc", 2, "--epochs", 15, "--follow", TRAIN_FAULT="step@1:200")
    page = Path(os.environ["TRAIN_RUNS"], "report.html")
    train("report", "killed", "--to", page)
    # without the facts, which name this machine and its folders
    page.write_text(page.read_text().replace("</head>", "<style>.facts { display: none }</style></head>", 1))
    screenshot(page, DOCS / "report.png", 900, 1000)


def scaling() -> None:
    """The table of `train bench scaling` as bars."""
    figures = json.loads(train("bench", "scaling", "--times", 10, "--json"))
    rows, axes = figures["rows"], _axes(7.5, 3.2)
    names = [f"{row['way']}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in rows]
    bars = axes.barh(names, [row["samples_per_s"] for row in rows], color=["#8aa", "#48a"] * 9)
    axes.bar_label(bars, [f"{row['samples_per_s']:.0f}  ({row['speed_up']:.2f} x)" for row in rows], padding=3)
    if not any(row["way"] == "DataParallel" for row in rows):
        axes.barh(["DataParallel"], [0])
        axes.text(0, len(rows), "  not measured: it needs GPUs", va="center", style="italic")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlabel("samples per second, and times the bare loop on 1 rank")
    gpus = "no GPU" if "CPU" in figures["device"] else figures["device"]
    axes.set_title(f"{figures['model']}, measured on {os.cpu_count()} CPU cores, {gpus}", fontsize=10)
    axes.figure.savefig(DOCS / "scaling.png", dpi=110, bbox_inches="tight")


def _axes(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height))[1]


def ways() -> None:
    """Record a run in which rank 1 is killed, and draw where how-it-works.md says that the code goes."""
    folder = Path(os.environ["TRAIN_RUNS"], "ways")
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(RECORDER)
    options = ("--steps", 30, "--data.workers", 1, "--cpu_threads", 1, "--follow")
    (folder / "entries").mkdir()
    environ = {
        "PYTHONPATH": f"{folder}{os.pathsep}{CHECKOUT}",
        "WAYS": str(folder / "entries"),
        "TRAIN_FAULT": "step@1:20",
        "TRAIN_WARM": "off",
    }
    train("launch", "digits", "--name", "traced", "--nproc", 2, *options, **environ)
    entries = []
    for file in (folder / "entries").iterdir():
        lines = [line.split(" ") for line in file.read_text().splitlines()]
        lane = _lane({words[-2] for words in lines}, lines[-1][1])
        entries += [(float(words[0]), lane, words[-2], file.name, words[-1]) for words in lines]
    entries.sort()
    ranks = [pid for _, _, file, pid, _ in entries if file == "supervise/worker.py"]
    first = list(dict.fromkeys(ranks))[:4]  # two attempts with two ranks each
    step = {pid: min(at for at, _, file, one, _ in entries if (file, one) == ("trainer/step.py", pid)) for pid in first}
    death = min(max(entry[0] for entry in entries if entry[3] == pid) for pid in first[:2])
    zero, again = (next(pid for pid in pair if _rank(entries, pid)) for pair in (first[:2], first[2:]))
    asked = [at for at, _, file, pid, name in entries if (file, pid, name) == ("trainer/prefetch.py", zero, "next")]
    _draw("launch", [entry for entry in entries if entry[0] <= step[zero] and entry[1] != "rank 1"])
    after = [entry for entry in entries if death <= entry[0] <= step[again] and entry[1] != "rank 1"]
    renamed = [(at, f"new {lane}" if pid == again else lane, *rest, pid, name) for at, lane, *rest, pid, name in after]
    _draw("death", renamed)
    step_ten = [entry for entry in entries if asked[9] <= entry[0] < asked[10]]
    _draw("batch", [entry for entry in step_ten if entry[3] == zero or entry[1] == "data worker"])


def _rank(entries: list[tuple[float, str, str, str, str]], pid: str) -> bool:
    return any(one == pid and lane == "rank 0" for _, lane, _, one, _ in entries)


def _lane(files: set[str], rank: str) -> str:
    """Return which process of a run enters these files."""
    marks = {
        "commands/launch.py": "train launch", "launcher/agent.py": "agent", "supervise/worker.py": f"rank {rank}",
        "launcher/checks.py": "fork that checks",
    }  # fmt: skip
    found = [lane for file, lane in marks.items() if file in files]
    workers = {"": "zygote", "0": "data worker"}
    return found[0] if found else workers.get(rank, "data worker of another rank")


def _draw(way: str, entries: list[tuple[float, str, str, str, str]]) -> None:
    text = (DOCS / "how-it-works.md").read_text().partition(f"### {WAYS[way]}\n")[2].partition("\n##")[0]
    named = set(re.findall(r"`(?:train/)?([\w/]+\.py)`", text))
    shown = list(dict.fromkeys(
        (lane, file) for _, lane, file, *_ in entries if any(f"/{file}".endswith(f"/{one}") for one in named)
    ))  # fmt: skip
    if left := sorted(one for one in named if not any(file.endswith(one) for _, file in shown)):
        print(f"pictures: {way}: this run did not enter {', '.join(left)}")
    lanes = list(dict.fromkeys(lane for lane, _ in shown))
    axes = _axes(2.6 * len(lanes), 0.34 * len(shown) + 0.8)
    spots = [(lanes.index(lane), row) for row, (lane, _) in enumerate(shown)]
    for before, after in itertools.pairwise(spots):
        axes.annotate("", after, before, arrowprops={"arrowstyle": "->", "color": "#999", "shrinkA": 9, "shrinkB": 9})
    box = {"boxstyle": "round", "facecolor": "#e8f0f6", "edgecolor": "#48a"}
    for (x, y), (_, file) in zip(spots, shown, strict=True):
        axes.text(x, y, file, ha="center", va="center", fontsize=8, family="monospace", bbox=box)
    for x, lane in enumerate(lanes):
        axes.axvline(x, color="#ddd", zorder=0)
        axes.text(x, -0.9, lane, ha="center", weight="bold", fontsize=9)
    axes.set(xlim=(-0.5, len(lanes) - 0.5), ylim=(len(shown) - 0.4, -1.3))
    axes.axis("off")
    axes.figure.savefig(DOCS / f"way-{way}.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    makers = {"prove": prove, "top": top, "report": report, "scaling": scaling, "ways": ways}
    with tempfile.TemporaryDirectory(prefix="pictures-") as place:
        os.environ["TRAIN_RUNS"], os.environ["PYTHONPATH"] = place, str(CHECKOUT)
        for wanted in sys.argv[1:] or makers:
            makers[wanted]()
