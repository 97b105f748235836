"""Looks at runs, GPUs and the disk when Prometheus asks, and tells what there is. Nothing else: no thread, no clock.

How many series there can be is bounded: all runs that live, those that alerts are about, the most recent of the others,
and of each run its ranks.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import prometheus_client
from prometheus_client import Metric

import train
from train import screen
from train.errors import one_line
from train.gpus import ECC, REASONS, Gpu, Gpus, process_of
from train.record import heartbeat, station, store
from train.record.record import Record
from train.record.store import Run, seconds_of
from train.runs.monitor import look
from train.runs.monitor.figures import Figures

log = logging.getLogger("train.exporter")

MOST_ALIVE = 200
"""Live runs that are told of. A machine that has more has another problem."""
MOST_TROUBLED = 200
"""Runs that alerts are about, likewise."""
_FAILED_FOR = 86400.0
"""Seconds that a failed run is one of them: as TrainRunFailed has it."""


class Collector(prometheus_client.registry.Collector):
    """What Prometheus' library asks for figures. It never raises: what fails is left out, counted and logged."""

    def __init__(self, folder: Path, recent: int) -> None:
        self._runs, self._recent = look.Runs(folder), recent
        self._gpus = Gpus()
        self._told_gpus: list[Gpu] = []
        self._problems = 0
        self._said: set[str] = set()
        self._one_at_a_time = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._one_at_a_time:
            begun, figures = time.perf_counter(), Figures()
            self._try("the GPUs", lambda: self._add_gpus(figures))
            self._try("the disk", lambda: self._add_disk(figures))
            self._try("the runs", lambda: self._add_runs(figures))
            figures.add("train_keeper_last_seen_timestamp_seconds", station.keeper_seen())
            figures.add("train_exporter_info", 1, train.__version__)
            figures.add("train_exporter_problems_total", self._problems)
            figures.add("train_exporter_look_duration_seconds", time.perf_counter() - begun)
            return figures.families()

    def describe(self) -> Iterable[Metric]:
        return []  # what there is depends on the moment; without this the library would look once before it serves

    def _try(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._problems += 1
            line = f"{what}: {type(error).__name__}: {one_line(error)}"
            if line not in self._said and len(self._said) < 100:  # once: it will come again with the next look
                self._said.add(line)
                log.warning("cannot look at %s", screen.printable(line))

    def _add_disk(self, figures: Figures) -> None:
        folder = self._runs.folder
        while not folder.exists() and folder != folder.parent:  # before the first run there is no folder
            folder = folder.parent
        disk = os.statvfs(folder)
        figures.add("train_runs_disk_free_bytes", disk.f_bavail * disk.f_frsize)
        figures.add("train_runs_disk_size_bytes", disk.f_blocks * disk.f_frsize)

    def _add_runs(self, figures: Figures) -> None:
        records = self._runs.records()
        states = collections.Counter(record["state"] for record in records)
        for state in look.STATES:
            figures.add("train_runs", states[state], state)
        figures.add("train_runs_damaged", self._runs.damaged)
        alive = [record for record in records if look.is_alive(record)]
        ended = records[len(alive) :]
        since = time.time() - _FAILED_FOR  # one point in time: none is in both
        troubled = [record for record in ended if _is_troubled(record, since)]
        others = [record for record in ended if not _is_troubled(record, since)]
        shown = alive[:MOST_ALIVE] + troubled[:MOST_TROUBLED] + others[: self._recent]
        figures.add("train_runs_left_out", len(records) - len(shown))
        taken: dict[int, float] = {}
        for gpu in self._told_gpus:
            for pid, size in gpu.processes.items():  # a process may compute on several
                taken[pid] = taken.get(pid, 0.0) + size
        for record in shown:
            self._try(f"the run {record['name']!a}", functools.partial(self._add_run, figures, record, taken))

    def _add_run(self, figures: Figures, record: Record, taken: dict[int, float]) -> None:
        name = record["name"]
        run = Run(self._runs.folder / name)
        lives, progress = look.is_alive(record), look.progress(run, record)
        device = str(record.get("device") or "")
        what = str(
            record.get("task") or Path(str(record.get("script") or "")).name
        )  # where it lies is nobody's business
        figures.add("train_run_info", 1, name, what[:64], device[:16])
        figures.one_of("train_run_state", record["state"], look.STATES, name)
        figures.add("train_run_step", progress.step, name)
        figures.add("train_run_target_steps", progress.total, name)
        figures.add("train_run_epoch", record["epoch"], name)
        figures.add("train_run_ranks", record["world_size"], name)
        figures.add("train_run_loss", progress.loss, name)
        figures.add("train_run_learning_rate", progress.rate, name)
        figures.add("train_run_samples_per_second", progress.samples_per_s, name)
        figures.add("train_run_step_duration_seconds", progress.step_time, name)
        figures.add("train_run_data_wait_ratio", progress.waits, name)
        figures.add("train_run_peak_memory_bytes", progress.memory, name)
        figures.add("train_run_started_timestamp_seconds", seconds_of(record.get("started")), name)
        if not lives:
            figures.add("train_run_ended_timestamp_seconds", seconds_of(record.get("ended")), name)
        figures.add("train_run_attempts_total", len(record["attempts"]), name)
        figures.add("train_run_deaths_total", look.deaths(record), name)
        saved = look.saved(run)
        if saved is not None:
            figures.add("train_run_checkpoint_step", saved[0], name)
            figures.add("train_run_checkpoint_timestamp_seconds", saved[1], name)
        if look.is_at_work(record):
            self._add_ranks(figures, run, record, taken)

    def _add_ranks(self, figures: Figures, run: Run, record: Record, taken: dict[int, float]) -> None:
        found = look.ranks(run, record)
        figures.add("train_run_last_progress_timestamp_seconds", look.moved(record, found), run.name)
        if not record.get("script"):
            doing = heartbeat.NAMES[look.phase(found)]
            figures.one_of("train_run_phase", doing, heartbeat.NAMES, run.name)
        for rank in found:
            if rank.beat is None:
                continue
            labels = run.name, str(rank.number)
            figures.add("train_rank_step", rank.beat.step, *labels)
            figures.add("train_rank_last_beat_timestamp_seconds", rank.beaten or None, *labels)
            on_gpus = process_of(rank.beat.pid, run.folder / "lock", taken)
            figures.add("train_rank_gpu_memory_bytes", None if on_gpus is None else taken[on_gpus], *labels)
            process = look.process(record, rank)
            if process is not None:
                figures.add("train_rank_resident_memory_bytes", look.resident(process), *labels)

    def _add_gpus(self, figures: Figures) -> None:
        self._told_gpus = self._gpus.read()
        for gpu in self._told_gpus:
            labels = str(gpu.number), gpu.uuid
            figures.add("train_gpu_info", 1, *labels, gpu.name)
            figures.add("train_gpu_up", float(gpu.answers), *labels)
            figures.add("train_gpu_utilization_ratio", gpu.use, *labels)
            figures.add("train_gpu_memory_used_bytes", gpu.memory_used, *labels)
            figures.add("train_gpu_memory_size_bytes", gpu.memory_size, *labels)
            figures.add("train_gpu_temperature_celsius", gpu.celsius, *labels)
            figures.add("train_gpu_slowdown_temperature_celsius", gpu.celsius_slowdown, *labels)
            figures.add("train_gpu_power_watts", gpu.watts, *labels)
            figures.add("train_gpu_power_limit_watts", gpu.watts_limit, *labels)
            for kind in ECC:
                figures.add("train_gpu_ecc_errors_total", gpu.ecc.get(kind), *labels, kind)
            for reason, bit in REASONS.items():
                if gpu.reasons is not None:
                    figures.add("train_gpu_throttled", float(bool(gpu.reasons & bit)), *labels, reason)


def _is_troubled(record: Record, since: float) -> bool:
    """Whether an alert is about a run that has ended: whatever has ended later must not hide it."""
    if record["state"] == store.FAILED:
        return (seconds_of(record.get("ended")) or 0.0) > since
    return bool(record["state"] == store.INTERRUPTED)
