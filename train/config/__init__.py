"""The configuration of a run: from flags and files to a checked `Config`."""

from .fields import fields, flatten, parse_value, read_toml, to_flat, to_toml, type_name
from .resolve import build, check_flags, forbidden_changes, from_toml, layer, read_flat, resolve, with_flags
from .schema import Config, Count, EarlyStopping, Optim, Parallel, Schedule, Share, Watch

LOCAL = ("data.root", "data.workers", "init")
"""Fields that may differ between the machines of a run. The result depends only on the data that is read there."""

__all__ = [
    "LOCAL", "Config", "Count", "EarlyStopping", "Optim", "Parallel", "Schedule", "Share", "Watch",
    "build", "check_flags", "fields", "flatten", "forbidden_changes", "from_toml", "layer", "parse_value", "read_flat",
    "read_toml", "resolve", "to_flat", "to_toml", "type_name", "with_flags",
]  # fmt: skip
