"""The environment that a run was started with: saved in its folder, and restored where a resume lacks it.

A program may need it (PYTHONPATH, HF_HOME, DATA=…), and a run is resumed from another shell, or by the keeper. Secrets
are not saved: a run folder is copied and shown. Variables that describe a session, a job or a rank are not saved
either: they would be wrong for the next one. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from train import hash_seed

FILE = "environment.json"
"""In the run folder; readable by its owner alone."""

_SESSION = re.compile(
    r"""(?x)
    _ | PWD | OLDPWD | SHLVL | SHELL | LOGNAME | MAIL | HOSTNAME | COLUMNS | LINES | DISPLAY | COLORTERM | PS\d
    | PROMPT_COMMAND | LS_COLORS | LESS\w* | PAGER | EDITOR | VISUAL | WINDOWID | STY | WT_SESSION
    | (TMUX | SSH | TERM | XDG | DBUS | WAYLAND | VSCODE | VTE | GPG | SUDO | BASH | ZSH | JPY | KITTY) (_ .*)?
    | HIST(FILE | SIZE | FILESIZE | CONTROL | IGNORE | TIMEFORMAT) | (GNOME | DESKTOP | ITERM | SYSTEMD | WATCHDOG)_ .*
    | LISTEN_(PID | FDS | FDNAMES) | INVOCATION_ID | JOURNAL_STREAM | NOTIFY_SOCKET | MAINPID
    | LC_CTYPE  # Python sets it by itself (PEP 538)
    | CREDENTIALS_DIRECTORY | PYTEST_CURRENT_TEST | PYTEST_VERSION
    # of this package; of a rank, as torchrun sets it
    | TRAIN_.* | TORCHELASTIC_.* | RANK | WORLD_SIZE | (LOCAL | GROUP | ROLE | NODE) _ (RANK | WORLD_SIZE | NAME)
    | MASTER_(ADDR | PORT)
    # of the job or pod that it was started in
    | (SLURM | SLURMD | SBATCH | PMI | PMIX | OMPI | PRTE | PBS | LSB | LSF | KUBERNETES)_ .*
    | FLUX_(JOB | TASK | URI) .*
    """
)
"""Names that describe a session, a job or a rank, not what a program needs."""
_FOUND_BY_TORCH = re.compile(r"TORCHINDUCTOR_CACHE_DIR=.*/torchinductor_[^/]*")
"""What torch sets in a process that asked for nothing, where its compiler is imported (from 2.11 on: in every one that
trains)."""
_SECRET_PART = re.compile(r"(.*(TOKEN|KEY|SECRET|PASSWORD|PASSWD)S?|PASS|PWD|PASSPHRASE|AUTH|PAT|JWT|COOKIES?|DSN)\d*")
_SECRET_WITHIN = re.compile(r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE_?KEY|API_?KEY|ACCESS_?KEY|BEARER")
_SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|wandb_v1_)[\w-]{16,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\."
)
"""What tokens of widespread services look like, under whatever name."""
_PASSWORD_WITHIN = re.compile(
    r"""(?xi)
    //[^\s/:@?\#]*:[^\s/]*@  # scheme://user:password@host
    | ^[^\s/:@]+:[^\s/@]+@[\w.-]+(:\d+)?/?$  # user:password@host
    | //[^\s/:@]{20,}@  # scheme://token@host
    | \b(password|passwd|pwd|secret|token|sig|signature|(api_?|access_?)?key)=[^&;\s,]+
    """
)
"""Values with a password in an address, or named as such."""
_NO_SECRET = re.compile(r"(NCCL|UCX)_.*")
"""Settings of libraries that take no secret: a PKEY of theirs is a partition of InfiniBand."""
_PLAIN = re.compile(r"|[01]|(?i:true|false|yes|no|on|off)|(/[\w.@-]+){2,}")
"""Values that are none, whatever the name: HF_HUB_DISABLE_IMPLICIT_TOKEN=1, or where a file with credentials lies."""
_NAMES = 12
"""So many names a warning lists."""
_WEIGHTY = ("PYTHON", "LD_", "PATH", "CUDA", "NVIDIA", "NCCL", "TORCH", "OMP", "MKL", "HF_")
"""Beginnings of the names that a warning lists first."""


@dataclasses.dataclass(frozen=True)
class SavedEnvironment:
    """The saved part of an environment."""

    values: dict[str, str]
    withheld: list[str]
    """Names of what was not saved, for it reads like a secret."""

    @property
    def warnings(self) -> list[str]:
        """A line for the user about what is not saved; none if everything is."""
        if not self.withheld:
            return []
        return [f"not kept for a resume, as secrets: {_list(self.withheld)}; set them again when you resume"]


def is_secret(name: str) -> bool:
    """Whether a variable's name reads like that of a secret: WANDB_API_KEY, but not TOKENIZERS_PARALLELISM."""
    upper = name.upper()
    if _NO_SECRET.fullmatch(upper):
        return False
    return bool(_SECRET_WITHIN.search(upper) or any(map(_SECRET_PART.fullmatch, upper.split("_"))))


def tells_secret(name: str, value: str) -> bool:
    """Whether a variable reads like a secret, or has one in its value: a token, or an address with a password."""
    is_meant = is_secret(name) and not _PLAIN.fullmatch(value)
    return is_meant or bool(_SECRET_VALUE.search(value) or _PASSWORD_WITHIN.search(value))


def keep(environment: Mapping[str, str]) -> SavedEnvironment:
    """The part of an environment that may be saved: nothing under a name that reads like a secret, whatever it is."""
    usual = {name: value for name, value in sorted(environment.items()) if not _is_of_session(name, value)}
    withheld = [name for name, value in usual.items() if is_secret(name) or tells_secret(name, value)]
    return SavedEnvironment({name: value for name, value in usual.items() if name not in withheld}, withheld)


def after(before: SavedEnvironment | None, now: SavedEnvironment) -> SavedEnvironment:
    """The environment to save from a resume on: names of secrets stay, also where this resume lacked them."""
    if before is None:
        return now
    return SavedEnvironment(now.values, sorted({*before.withheld, *now.withheld} - now.values.keys()))


def to_json(saved: SavedEnvironment) -> str:
    """As it lies in the run folder."""
    return json.dumps(dataclasses.asdict(saved), indent=1) + "\n"


def read(folder: Path) -> SavedEnvironment | None:
    """The environment saved in a run folder; None where there is none, or it cannot be read."""
    try:
        tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
        withheld = [*map(str, tree["withheld"]), *map(str, tree.get("cut", []))]  # an earlier release cut passwords out
        values = {str(name): str(value) for name, value in tree["values"].items() if name not in withheld}
        return SavedEnvironment(values, withheld)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def hash_seed_of(saved: SavedEnvironment | None) -> str | None:
    """The number by which a run's processes hash strings; None: it is not known."""
    return saved.values.get(hash_seed.SEED) if saved is not None else None


def resumed(
    saved: SavedEnvironment | None, own: Mapping[str, str], as_recorded: bool
) -> tuple[dict[str, str], list[str]]:
    """The environment of a resume, and warnings about what differs from the one before.

    Args:
        own: that of whoever resumes.
        as_recorded: the saved values win (for the keeper, whose own environment means nothing); else `own` wins.
    """
    if saved is None:
        return dict(own), []
    usual = {name: value for name, value in own.items() if not _is_of_session(name, value)}
    lost = [name for name in saved.withheld if name not in own]
    warnings = [f"set when it was started, not kept as a secret, and not set here: {_list(lost)}"] if lost else []
    if as_recorded:
        # secrets of its own, and what describes its session, stay; of all else what is kept is the whole
        mine = {name: own[name] for name in own if name not in usual or name in saved.withheld}
        return mine | saved.values, warnings
    missing = {name: value for name, value in saved.values.items() if name not in own}
    other = [name for name in saved.values if name in own and own[name] != saved.values[name]]
    more = [name for name in usual if name not in saved.values and name not in saved.withheld]
    if missing:
        warnings.append(f"set when it was started and not here, and set again now: {_list(missing)}")
    if other or more:
        parts = [f"other than when it was started: {_list(other)}"] if other else []
        parts += [f"not set then: {_list(more)}"] if more else []
        warnings.append(f"the environment here holds, {'; '.join(parts)}")
    return {**own, **missing}, warnings


def _is_of_session(name: str, value: str) -> bool:
    return bool(_SESSION.fullmatch(name) or _FOUND_BY_TORCH.fullmatch(f"{name}={value}"))


def _list(names: Iterable[str]) -> str:
    found = sorted(names, key=lambda name: (not name.startswith(_WEIGHTY), name))
    more = f" and {len(found) - _NAMES} more" if len(found) > _NAMES else ""
    return ", ".join(found[:_NAMES]) + more
