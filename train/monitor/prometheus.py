"""`train exporter`: figures of runs, GPUs and the disk for Prometheus, over HTTP; collected when it asks.

Named as Prometheus' conventions have it (prometheus.io/docs/practices/naming): base units, `_total` for what only
grows, times as seconds since the epoch. How many series there can be is bounded: all live runs, those that alerts are
about, the most recent of the others, and the ranks of each.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import prometheus_client
import psutil
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

import train
from train import screen
from train.errors import EXIT_FINISHED, Refused, one_line
from train.gpus import ECC, REASONS, Gpus, GpuState, process_of
from train.launcher import keeper
from train.monitor import run_status
from train.run import heartbeat, states
from train.run.record import Record
from train.run.run_folder import Run, seconds_of

log = logging.getLogger("train.exporter")

_MOST = 400
"""Runs, at most, that live or that alerts are about. A machine that has more has another problem."""
_FAILED_FOR = 86400.0
"""Seconds that an alert is about a failed run: as TrainRunFailed has it."""

RUN, RANK, GPU = ("run",), ("run", "rank"), ("gpu", "uuid")

FIGURES: dict[str, tuple[Sequence[str], str]] = {
    "train_runs": (("state",), "Runs in the folder, by state"),
    "train_runs_damaged": ((), "Run folders that cannot be read"),
    "train_runs_left_out": ((), "Runs of which nothing else is told: they ended before the most recent ones"),
    "train_runs_disk_free_bytes": ((), "Left for users on the disk with the runs"),
    "train_runs_disk_size_bytes": ((), "Size of the disk with the runs"),
    "train_run_info": ((*RUN, "task", "device"), "1; what the run trains, and on what"),
    "train_run_state": ((*RUN, "state"), "1 for the state the run is in, 0 for the others"),
    "train_run_phase": ((*RUN, "phase"), "1 for what a run does while an attempt runs, 0 for the others"),
    "train_run_step": (RUN, "The last step made, counted from 1; falls back when a run continues from a checkpoint"),
    "train_run_target_steps": (RUN, "Steps the run is to make"),
    "train_run_epoch": (RUN, "The epoch it is in, counted from 1"),
    "train_run_ranks": (RUN, "Ranks of the last attempt"),
    "train_run_loss": (RUN, "Loss of the last step that was told"),
    "train_run_learning_rate": (RUN, "Learning rate of the last step that was told, while it lives"),
    "train_run_samples_per_second": (RUN, "Samples that all ranks train on in a second, while it lives"),
    "train_run_step_duration_seconds": (RUN, "Time of a step, while it lives"),
    "train_run_data_wait_ratio": (RUN, "Share of a step in which rank 0 waits for data, 0 to 1, while it lives"),
    "train_run_peak_memory_bytes": (RUN, "The most memory so far: of rank 0's GPU, or of its process on a CPU"),
    "train_run_last_progress_timestamp_seconds": (RUN, "When a rank last got on, while any runs; not told of scripts"),
    "train_run_started_timestamp_seconds": (RUN, "When it was first started"),
    "train_run_ended_timestamp_seconds": (RUN, "When it ended"),
    "train_run_attempts_total": (RUN, "Times it was started"),
    "train_run_deaths_total": (RUN, "Attempts that died and were started again, or wait for it"),
    "train_run_checkpoint_step": (RUN, "Step of the newest checkpoint"),
    "train_run_checkpoint_timestamp_seconds": (RUN, "When the newest checkpoint was made"),
    "train_rank_step": (RANK, "The last step that a rank of a live run has made"),
    "train_rank_last_beat_timestamp_seconds": (RANK, "When a rank of a live run last got on"),
    "train_rank_resident_memory_bytes": (RANK, "Memory of a rank's process, where it is seen from here"),
    "train_rank_gpu_memory_bytes": (
        RANK,
        "Memory that a rank has on GPUs; in a container only the GPUs' totals are known",
    ),
    "train_gpu_info": ((*GPU, "name"), "1; which GPU this is"),
    "train_gpu_up": (GPU, "1: it answers; 0: it was there since the exporter began, and is gone or does not answer"),
    "train_gpu_utilization_ratio": (GPU, "Share of the time in which it computed, 0 to 1"),
    "train_gpu_memory_used_bytes": (GPU, "Its memory that is taken"),
    "train_gpu_memory_size_bytes": (GPU, "Its memory"),
    "train_gpu_temperature_celsius": (GPU, "How hot it is"),
    "train_gpu_slowdown_temperature_celsius": (GPU, "How hot it may be before it slows itself down"),
    "train_gpu_power_watts": (GPU, "Power it takes"),
    "train_gpu_power_limit_watts": (GPU, "Power it may take"),
    "train_gpu_ecc_errors_total": ((*GPU, "kind"), "Errors of its memory since it was made: corrected, uncorrected"),
    "train_gpu_throttled": ((*GPU, "reason"), "1 for each reason why its clocks are lower than they could be"),
    "train_keeper_last_seen_timestamp_seconds": ((), "When this user's keeper was last seen alive, until it ends"),
    "train_exporter_info": (("version",), "1; the version of train"),
    "train_exporter_look_duration_seconds": ((), "Time that looking took for this answer"),
    "train_exporter_problems_total": ((), "Looks that failed in a way nobody foresaw; the exporter's log names them"),
}


_OF_PROGRESS = {
    "train_run_step": "step", "train_run_target_steps": "total", "train_run_loss": "loss",
    "train_run_learning_rate": "rate", "train_run_samples_per_second": "samples_per_s",
    "train_run_step_duration_seconds": "step_time", "train_run_data_wait_ratio": "waits",
    "train_run_peak_memory_bytes": "memory",
}  # fmt: skip
"""Figures that are fields of run_status.Progress."""
_OF_GPU = {
    "train_gpu_utilization_ratio": "use", "train_gpu_memory_used_bytes": "memory_used",
    "train_gpu_memory_size_bytes": "memory_size", "train_gpu_temperature_celsius": "celsius",
    "train_gpu_slowdown_temperature_celsius": "celsius_slowdown", "train_gpu_power_watts": "watts",
    "train_gpu_power_limit_watts": "watts_limit",
}  # fmt: skip
"""Figures that are fields of gpus.GpuState."""


@dataclasses.dataclass
class Figures:
    """Samples, gathered under the names of FIGURES."""

    _families: dict[str, GaugeMetricFamily | CounterMetricFamily] = dataclasses.field(default_factory=dict)

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """A sample; None: there is none."""
        if value is None:
            return
        family = self._families.get(name)
        if family is None:
            names, text = FIGURES[name]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = self._families[name] = kind(name, text, labels=names)
        family.add_metric(list(map(clean, labels)), value)

    def one_of(self, name: str, chosen: str, choices: Iterable[str], *labels: str) -> None:
        """1 for the one of the choices that holds, 0 for the others."""
        for choice in choices:
            self.add(name, float(choice == chosen), *labels, choice)

    def families(self) -> list[Metric]:
        """All that was gathered, in the order of FIGURES."""
        return [self._families[name] for name in FIGURES if name in self._families]


def clean(label: str) -> str:
    """A label that UTF-8 holds and a terminal shows: a folder's name may be any bytes, and a record have any text.

    Escaped, not replaced: two names that differ stay two. The library escapes the ends of lines itself.
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in label
    )


class Collector(prometheus_client.registry.Collector):
    """What Prometheus' library asks for figures. It never raises: what fails is left out, counted and logged."""

    def __init__(self, folder: Path, recent: int) -> None:
        self._runs, self._recent = run_status.Runs(folder), recent
        self._gpus = Gpus()
        self._last_gpus: list[GpuState] = []
        self._problems = 0
        self._reported: set[str] = set()
        self._one_at_a_time = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._one_at_a_time:
            begun, figures = time.perf_counter(), Figures()
            self._try("the GPUs", lambda: self._add_gpus(figures))
            self._try("the disk", lambda: self._add_disk(figures))
            self._try("the runs", lambda: self._add_runs(figures))
            figures.add("train_keeper_last_seen_timestamp_seconds", keeper.last_seen())
            figures.add("train_exporter_info", 1, train.__version__)
            figures.add("train_exporter_problems_total", self._problems)
            figures.add("train_exporter_look_duration_seconds", time.perf_counter() - begun)
            return figures.families()

    def _try(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._problems += 1
            line = f"{what}: {type(error).__name__}: {one_line(error)}"
            if line not in self._reported and len(self._reported) < 100:  # once: it will come again with the next look
                self._reported.add(line)
                log.warning("cannot look at %s", screen.printable(line))

    def _add_disk(self, figures: Figures) -> None:
        folder = self._runs.folder  # there is none before the first run
        disk = os.statvfs(next(each for each in (folder, *folder.parents) if each.exists()))
        figures.add("train_runs_disk_free_bytes", disk.f_bavail * disk.f_frsize)
        figures.add("train_runs_disk_size_bytes", disk.f_blocks * disk.f_frsize)

    def _add_runs(self, figures: Figures) -> None:
        records = self._runs.records()
        counts = collections.Counter(record["state"] for record in records)
        for name in states.ALL:
            figures.add("train_runs", counts[name], name)
        figures.add("train_runs_damaged", self._runs.damaged)
        now = time.time()  # one point in time: none is in both
        wanted = [record for record in records if _is_wanted(record, now)]  # those that live come first
        others = [record for record in records if not _is_wanted(record, now)]
        shown = wanted[:_MOST] + others[: self._recent]
        figures.add("train_runs_left_out", len(records) - len(shown))
        taken: dict[int, float] = {}
        for gpu in self._last_gpus:
            for pid, size in gpu.processes.items():  # a process may compute on several
                taken[pid] = taken.get(pid, 0.0) + size
        for record in shown:
            self._try(f"the run {record['name']!a}", functools.partial(self._add_run, figures, record, taken))

    def _add_run(self, figures: Figures, record: Record, taken: dict[int, float]) -> None:
        name = record["name"]
        run = Run(self._runs.folder / name)
        lives, progress = run_status.is_alive(record), run_status.progress(run, record)
        device = record.get("device") or ""
        what = record.get("task") or Path(record.get("script") or "").name  # where it lies is not published
        figures.add("train_run_info", 1, name, what[:64], device[:16])
        figures.one_of("train_run_state", record["state"], states.ALL, name)
        figures.add("train_run_epoch", record["epoch"], name)
        figures.add("train_run_ranks", record["world_size"], name)
        for figure, field in _OF_PROGRESS.items():
            figures.add(figure, getattr(progress, field), name)
        figures.add("train_run_started_timestamp_seconds", seconds_of(record.get("started")), name)
        if not lives:
            figures.add("train_run_ended_timestamp_seconds", seconds_of(record.get("ended")), name)
        figures.add("train_run_attempts_total", len(record["attempts"]), name)
        figures.add("train_run_deaths_total", run_status.deaths(record), name)
        saved = run_status.saved(run)
        if saved is not None:
            figures.add("train_run_checkpoint_step", saved[0], name)
            figures.add("train_run_checkpoint_timestamp_seconds", saved[1], name)
        if run_status.is_at_work(record):
            self._add_ranks(figures, run, record, taken)

    def _add_ranks(self, figures: Figures, run: Run, record: Record, taken: dict[int, float]) -> None:
        found = run_status.ranks(run, record)
        figures.add("train_run_last_progress_timestamp_seconds", run_status.moved(record, found), run.name)
        if not record.get("script"):
            figures.one_of("train_run_phase", run_status.doing(found), heartbeat.NAMES, run.name)
        for rank in found:
            if rank.beat is None:
                continue
            labels = run.name, str(rank.number)
            figures.add("train_rank_step", rank.beat.step, *labels)
            figures.add("train_rank_last_beat_timestamp_seconds", rank.beaten or None, *labels)
            on_gpus = process_of(rank.beat.pid, run.folder / "lock", taken)
            figures.add("train_rank_gpu_memory_bytes", None if on_gpus is None else taken[on_gpus], *labels)
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if process := run_status.process(record, rank):
                    figures.add("train_rank_resident_memory_bytes", process.memory_info().rss, *labels)

    def _add_gpus(self, figures: Figures) -> None:
        self._last_gpus = self._gpus.read()
        for gpu in self._last_gpus:
            labels = str(gpu.number), gpu.uuid
            figures.add("train_gpu_info", 1, *labels, gpu.name)
            figures.add("train_gpu_up", float(gpu.answers), *labels)
            for name, field in _OF_GPU.items():
                figures.add(name, getattr(gpu, field), *labels)
            for kind in ECC:
                figures.add("train_gpu_ecc_errors_total", gpu.ecc.get(kind), *labels, kind)
            for reason, bit in REASONS.items():
                if gpu.reasons is not None:
                    figures.add("train_gpu_throttled", float(bool(gpu.reasons & bit)), *labels, reason)


def _is_wanted(record: Record, now: float) -> bool:
    """Whether a run lives, or an alert is about it: whatever has ended later must not hide it."""
    if record["state"] == states.FAILED:
        return (seconds_of(record.get("ended")) or 0.0) > now - _FAILED_FOR
    return record["state"] == states.INTERRUPTED or run_status.is_alive(record)


def serve(runs: Path, address: str, port: int, recent: int) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then exit.

    Raises:
        Refused: the address or the port cannot be had.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FINISHED))
    logging.basicConfig(format="train: %(message)s", level=logging.INFO)
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Collector(runs, recent))
    prometheus_client.ProcessCollector(registry=registry)
    try:
        server, thread = prometheus_client.start_http_server(port, address, registry)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no such address"
        raise Refused(f"--address {address} --port {port}: {why}; give another address or port") from None
    host = str(server.server_address[0])
    shown = f"[{host}]" if ":" in host else host
    print(f"figures of {runs} on http://{shown}:{port}/metrics", flush=True)
    thread.join()
    sys.exit(EXIT_FINISHED)
