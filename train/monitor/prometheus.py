"""`train exporter`: serve metrics of runs, GPUs and the disk to Prometheus over HTTP. Collected on each request.

Names follow Prometheus' conventions (prometheus.io/docs/practices/naming): base units, `_total` for counters, times
as seconds since the epoch. The number of series is bounded: all live runs, runs with an alert, the most recent of the
others, and the ranks of each.
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

from .. import __version__, screen
from ..errors import EXIT_FINISHED, Refused, one_line
from ..gpus import ECC, REASONS, Gpus, GpuState, process_of
from ..launcher import keeper_sign
from ..run import heartbeat, states
from ..run.run_folder import seconds_of
from ..run.spec import spec_of
from .runs import Runs
from .status import RunStatus, doing

log = logging.getLogger("train.exporter")

_MOST = 400
"""Maximum number of runs that are live or have an alert."""
_FAILED_FOR = 86400.0
"""Seconds a failed run has an alert, as in TrainRunFailed."""

RUN, RANK, GPU = ("run",), ("run", "rank"), ("gpu", "uuid")

FIGURES: dict[str, tuple[Sequence[str], str]] = {
    "train_runs": (("state",), "Runs in the folder, by state"),
    "train_runs_damaged": ((), "Run folders that cannot be read"),
    "train_runs_left_out": ((), "Runs without further metrics, because they ended before the most recent ones"),
    "train_runs_disk_free_bytes": ((), "Free space on the disk with the runs, for ordinary users"),
    "train_runs_disk_size_bytes": ((), "Size of the disk with the runs"),
    "train_run_info": ((*RUN, "task", "device", "user", "gpus"), "Always 1; what the run trains, where, and for whom"),
    "train_run_state": ((*RUN, "state"), "1 for the state of the run, 0 for the others"),
    "train_run_phase": ((*RUN, "phase"), "1 for what the run does during an attempt, 0 for the others"),
    "train_run_step": (RUN, "Last finished step, counted from 1; falls when a run continues from a checkpoint"),
    "train_run_target_steps": (RUN, "Steps after which the run ends"),
    "train_run_epoch": (RUN, "Current epoch, counted from 1"),
    "train_run_ranks": (RUN, "Ranks of the last attempt"),
    "train_run_loss": (RUN, "Loss of the last line of metrics.jsonl"),
    "train_run_learning_rate": (RUN, "Learning rate of the last line of metrics.jsonl, while the run lives"),
    "train_run_samples_per_second": (RUN, "Samples per second of all ranks, while the run lives"),
    "train_run_step_duration_seconds": (RUN, "Duration of a step, while the run lives"),
    "train_run_data_wait_ratio": (RUN, "Share of a step in which rank 0 waits for data, 0 to 1, while the run lives"),
    "train_run_peak_memory_bytes": (RUN, "Peak memory so far: of rank 0's GPU, or of its process on a CPU"),
    "train_run_last_progress_timestamp_seconds": (RUN, "Last progress of any rank, while one runs; not for scripts"),
    "train_run_started_timestamp_seconds": (RUN, "Time of the first start"),
    "train_run_ended_timestamp_seconds": (RUN, "Time of the end"),
    "train_run_attempts_total": (RUN, "Number of attempts"),
    "train_run_deaths_total": (RUN, "Attempts that died, whether or not they were restarted yet"),
    "train_run_checkpoint_step": (RUN, "Step of the newest checkpoint"),
    "train_run_checkpoint_timestamp_seconds": (RUN, "Time of the newest checkpoint"),
    "train_rank_step": (RANK, "Last finished step of a rank of a live run"),
    "train_rank_last_beat_timestamp_seconds": (RANK, "Last progress of a rank of a live run"),
    "train_rank_resident_memory_bytes": (RANK, "Memory of a rank's process, if it is visible from here"),
    "train_rank_gpu_memory_bytes": (
        RANK,
        "GPU memory of a rank; in a container only the GPUs' totals are known",
    ),
    "train_gpu_info": ((*GPU, "name"), "Always 1; the name of the GPU"),
    "train_gpu_up": (GPU, "1: the GPU answers; 0: it has answered this exporter before, and does not now"),
    "train_gpu_utilization_ratio": (GPU, "Share of the time in which the GPU computed, 0 to 1"),
    "train_gpu_memory_used_bytes": (GPU, "Used memory of the GPU"),
    "train_gpu_memory_size_bytes": (GPU, "Memory of the GPU"),
    "train_gpu_temperature_celsius": (GPU, "Temperature of the GPU"),
    "train_gpu_slowdown_temperature_celsius": (GPU, "Temperature from which the GPU slows down"),
    "train_gpu_power_watts": (GPU, "Power the GPU uses"),
    "train_gpu_power_limit_watts": (GPU, "Power limit of the GPU"),
    "train_gpu_ecc_errors_total": ((*GPU, "kind"), "Memory errors over the life of the GPU: corrected, uncorrected"),
    "train_gpu_throttled": ((*GPU, "reason"), "1 for each reason that lowers the GPU's clocks"),
    "train_keeper_last_seen_timestamp_seconds": ((), "Last sign of life of this user's keeper, until it ends"),
    "train_exporter_info": (("version",), "Always 1; the version of train"),
    "train_exporter_look_duration_seconds": ((), "Time spent on collecting this answer"),
    "train_exporter_problems_total": ((), "Collections that failed unexpectedly; see the log of the exporter"),
}


_OF_LINE = {
    "train_run_learning_rate": "lr", "train_run_samples_per_second": "samples_per_s",
    "train_run_peak_memory_bytes": "memory",
}  # fmt: skip
"""Maps a metric to a number of a training line."""
_OF_GPU = {
    "train_gpu_utilization_ratio": "use", "train_gpu_memory_used_bytes": "memory_used",
    "train_gpu_memory_size_bytes": "memory_size", "train_gpu_temperature_celsius": "celsius",
    "train_gpu_slowdown_temperature_celsius": "celsius_slowdown", "train_gpu_power_watts": "watts",
    "train_gpu_power_limit_watts": "watts_limit",
}  # fmt: skip
"""Maps a metric to a field of gpus.GpuState."""


@dataclasses.dataclass
class Figures:
    """Samples of the metrics in FIGURES."""

    _families: dict[str, GaugeMetricFamily | CounterMetricFamily] = dataclasses.field(default_factory=dict)

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample, unless the value is None."""
        if value is None:
            return
        family = self._families.get(name)
        if family is None:
            names, text = FIGURES[name]
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = self._families[name] = kind(name, text, labels=names)
        family.add_metric(list(map(clean, labels)), value)

    def one_of(self, name: str, chosen: str, choices: Iterable[str], *labels: str) -> None:
        """Add 1 for the chosen one of these choices, and 0 for the others."""
        for choice in choices:
            self.add(name, float(choice == chosen), *labels, choice)

    def families(self) -> list[Metric]:
        """Return all samples, in the order of FIGURES."""
        return [self._families[name] for name in FIGURES if name in self._families]


def clean(label: str) -> str:
    """Return a label in valid, printable UTF-8. The name of a folder may be any bytes, and a record any text.

    Characters are escaped, not replaced, so that different names stay different. The library escapes line ends.
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in label
    )


class Collector(prometheus_client.registry.Collector):
    """Collects the metrics for Prometheus' library. Never raises: what fails is left out, counted and logged."""

    def __init__(self, folder: Path, recent: int) -> None:
        self._runs, self._recent = Runs(folder), recent
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
            figures.add("train_keeper_last_seen_timestamp_seconds", keeper_sign.last_seen())
            figures.add("train_exporter_info", 1, __version__)
            figures.add("train_exporter_problems_total", self._problems)
            figures.add("train_exporter_look_duration_seconds", time.perf_counter() - begun)
            return figures.families()

    def _try(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._problems += 1
            line = f"{what}: {type(error).__name__}: {one_line(error)}"
            if line not in self._reported and len(self._reported) < 100:  # log it once, though each look repeats it
                self._reported.add(line)
                log.warning("cannot look at %s", screen.printable(line))

    def _add_disk(self, figures: Figures) -> None:
        folder = self._runs.folder  # it does not exist before the first run
        disk = os.statvfs(next(each for each in (folder, *folder.parents) if each.exists()))
        figures.add("train_runs_disk_free_bytes", disk.f_bavail * disk.f_frsize)
        figures.add("train_runs_disk_size_bytes", disk.f_blocks * disk.f_frsize)

    def _add_runs(self, figures: Figures) -> None:
        found = self._runs.look()
        counts = collections.Counter(one.state for one in found)
        for name in states.ALL:
            figures.add("train_runs", counts[name], name)
        figures.add("train_runs_damaged", self._runs.damaged)
        now = time.time()  # one time for both lists, so that no run is in both
        wanted = [one for one in found if _is_wanted(one, now)]  # live runs come first
        others = [one for one in found if not _is_wanted(one, now)]
        shown = wanted[:_MOST] + others[: self._recent]
        figures.add("train_runs_left_out", len(found) - len(shown))
        taken: dict[int, float] = {}
        for gpu in self._last_gpus:
            for pid, size in gpu.processes.items():  # a process may use several GPUs
                taken[pid] = taken.get(pid, 0.0) + size
        for one in shown:
            self._try(f"the run {one.name!a}", functools.partial(self._add_run, figures, one, taken))

    def _add_run(self, figures: Figures, one: RunStatus, taken: dict[int, float]) -> None:
        name, record = one.name, one.record
        label = one.program.label(spec_of(record, {}))
        device, gpus = (record.get("device") or "")[:16], ",".join(one.gpus)[:256]
        figures.add("train_run_info", 1, name, label[:64], device, one.user[:64], gpus)
        figures.one_of("train_run_state", one.state, states.ALL, name)
        figures.add("train_run_epoch", record["epoch"], name)
        figures.add("train_run_ranks", record["world_size"], name)
        figures.add("train_run_step", one.step, name)
        figures.add("train_run_target_steps", one.total, name)
        figures.add("train_run_loss", record.get("loss"), name)
        figures.add("train_run_step_duration_seconds", one.step_time, name)
        figures.add("train_run_data_wait_ratio", one.waits, name)
        for figure, field in _OF_LINE.items():
            figures.add(figure, one.measured(field), name)
        figures.add("train_run_started_timestamp_seconds", seconds_of(record.get("started")), name)
        if not one.is_alive:
            figures.add("train_run_ended_timestamp_seconds", seconds_of(record.get("ended")), name)
        figures.add("train_run_attempts_total", len(record["attempts"]), name)
        figures.add("train_run_deaths_total", one.deaths, name)
        if (saved := one.saved) is not None:
            figures.add("train_run_checkpoint_step", saved[0], name)
            figures.add("train_run_checkpoint_timestamp_seconds", saved[1], name)
        if one.is_at_work:
            self._add_ranks(figures, one, taken)

    def _add_ranks(self, figures: Figures, one: RunStatus, taken: dict[int, float]) -> None:
        figures.add("train_run_last_progress_timestamp_seconds", one.last_progress, one.name)
        if one.program.reports_steps(one.record["attempts"]):
            figures.one_of("train_run_phase", doing(one.ranks), heartbeat.NAMES, one.name)
        for rank in one.ranks:
            if rank.beat is None:
                continue
            labels = one.name, str(rank.number)
            figures.add("train_rank_step", rank.beat.step, *labels)
            figures.add("train_rank_last_beat_timestamp_seconds", rank.beaten or None, *labels)
            on_gpus = process_of(rank.beat.pid, one.run.folder / "lock", taken)
            figures.add("train_rank_gpu_memory_bytes", None if on_gpus is None else taken[on_gpus], *labels)
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if process := one.process(rank):
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


def _is_wanted(one: RunStatus, now: float) -> bool:
    """Whether a run is live or has an alert. Runs that ended later must not displace it."""
    if one.state == states.FAILED:
        return one.last_change > now - _FAILED_FOR
    return one.state == states.INTERRUPTED or one.is_alive


def serve(runs: Path, *, address: str, port: int, recent: int) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then exit.

    Raises:
        Refused: the address or the port is not available.
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
    print(f"metrics of {runs} at http://{shown}:{port}/metrics", flush=True)
    thread.join()
    sys.exit(EXIT_FINISHED)
