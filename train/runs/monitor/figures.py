"""The figures that `train exporter` gives: names, units, meanings.

Named as Prometheus' conventions have it (prometheus.io/docs/practices/naming): base units, `_total` for what only
grows, times as seconds since the epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
    """A label that UTF-8 holds and a terminal shows: a folder's name may be any bytes, and a record have any words.

    Escaped, not replaced: two names that differ stay two. The library escapes the ends of lines itself.
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in label
    )
