"""Saves the environment variables with which a run was started, and restores the missing ones at a resume.

A program may need them (PYTHONPATH, HF_HOME, DATA=…), and a resume comes from another shell or from the keeper.
Secrets are not saved, because run folders are copied and shown to others. Variables that describe a session, a job or
a rank are not saved either: they would be wrong later. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import hash_seed

FILE = "environment.json"
"""File in the run folder; only its owner may read it."""

_SESSION = re.compile(
    r"""(?x)
    _ | PWD | OLDPWD | SHLVL | SHELL | LOGNAME | MAIL | HOSTNAME | COLUMNS | LINES | DISPLAY | COLORTERM | PS\d
    | PROMPT_COMMAND | LS_COLORS | LESS\w* | PAGER | EDITOR | VISUAL | WINDOWID | STY | WT_SESSION
    | (TMUX | SSH | TERM | XDG | DBUS | WAYLAND | VSCODE | VTE | GPG | SUDO | BASH | ZSH | JPY | KITTY) (_ .*)?
    | HIST(FILE | SIZE | FILESIZE | CONTROL | IGNORE | TIMEFORMAT) | (GNOME | DESKTOP | ITERM | SYSTEMD | WATCHDOG)_ .*
    | LISTEN_(PID | FDS | FDNAMES) | INVOCATION_ID | JOURNAL_STREAM | NOTIFY_SOCKET | MAINPID
    | LC_CTYPE  # Python sets it by itself (PEP 538)
    | CREDENTIALS_DIRECTORY | PYTEST_CURRENT_TEST | PYTEST_VERSION
    # of this package, and of a rank as set by torchrun
    | TRAIN_.* | TORCHELASTIC_.* | RANK | WORLD_SIZE | (LOCAL | GROUP | ROLE | NODE) _ (RANK | WORLD_SIZE | NAME)
    | MASTER_(ADDR | PORT)
    # of the job or pod in which the run was started
    | (SLURM | SLURMD | SBATCH | PMI | PMIX | OMPI | PRTE | PBS | LSB | LSF | KUBERNETES)_ .*
    | FLUX_(JOB | TASK | URI) .*
    """
)
"""Names of variables that describe a session, a job or a rank."""
_FOUND_BY_TORCH = re.compile(r"TORCHINDUCTOR_CACHE_DIR=.*/torchinductor_[^/]*")
"""A value that torch sets by itself when its compiler is imported (from 2.11 on in every process that trains)."""
_SECRET_PART = re.compile(r"(.*(TOKEN|KEY|SECRET|PASSWORD|PASSWD)S?|PASS|PWD|PASSPHRASE|AUTH|PAT|JWT|COOKIES?|DSN)\d*")
_SECRET_WITHIN = re.compile(r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|PRIVATE_?KEY|API_?KEY|ACCESS_?KEY|BEARER")
_SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|wandb_v1_)[\w-]{16,}"
    r"|\beyJ[\w-]{10,}\.[\w-]{10,}\."
)
"""Tokens of common services, under any name."""
_PASSWORD_WITHIN = re.compile(
    r"""(?xi)
    //[^\s/:@?\#]*:[^\s/]*@  # scheme://user:password@host
    | ^[^\s/:@]+:[^\s/@]+@[\w.-]+(:\d+)?/?$  # user:password@host
    | //[^\s/:@]{20,}@  # scheme://token@host
    | \b(password|passwd|pwd|secret|token|sig|signature|(api_?|access_?)?key)=[^&;\s,]+
    """
)
"""Values with a password in an address or after a name such as `password=`."""
_NO_SECRET = re.compile(r"(NCCL|UCX)_.*")
"""Settings of libraries without secrets: their PKEY is a partition of InfiniBand."""
_PLAIN = re.compile(r"|[01]|(?i:true|false|yes|no|on|off)|(/[\w.@-]+){2,}")
"""Values that are no secret under any name: HF_HUB_DISABLE_IMPLICIT_TOKEN=1, or the path of a file."""
_NAMES = 12
"""Maximum number of names in a warning."""
_WEIGHTY = ("PYTHON", "LD_", "PATH", "CUDA", "NVIDIA", "NCCL", "TORCH", "OMP", "MKL", "HF_")
"""Prefixes of the names that a warning lists first."""


@dataclasses.dataclass(frozen=True)
class SavedEnvironment:
    """The saved part of an environment."""

    values: dict[str, str]
    withheld: list[str]
    """Names of variables that were not saved because they look like secrets."""

    @property
    def warnings(self) -> list[str]:
        """A line for the user about variables that are not saved; [] if all are."""
        if not self.withheld:
            return []
        return [f"secrets are not saved with the run ({_list(self.withheld)}); set them again when you resume"]


def is_secret(name: str) -> bool:
    """Whether a variable's name looks like that of a secret: WANDB_API_KEY, but not TOKENIZERS_PARALLELISM."""
    upper = name.upper()
    if _NO_SECRET.fullmatch(upper):
        return False
    return bool(_SECRET_WITHIN.search(upper) or any(map(_SECRET_PART.fullmatch, upper.split("_"))))


def tells_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a secret or contains one: a token, or an address with a password."""
    is_meant = is_secret(name) and not _PLAIN.fullmatch(value)
    return is_meant or bool(_SECRET_VALUE.search(value) or _PASSWORD_WITHIN.search(value))


def keep(environment: Mapping[str, str]) -> SavedEnvironment:
    """Return the part of an environment that may be saved: without any variable whose name looks like a secret."""
    usual = {name: value for name, value in sorted(environment.items()) if not _is_of_session(name, value)}
    withheld = [name for name, value in usual.items() if is_secret(name) or tells_secret(name, value)]
    return SavedEnvironment({name: value for name, value in usual.items() if name not in withheld}, withheld)


def after(before: SavedEnvironment | None, now: SavedEnvironment) -> SavedEnvironment:
    """Return the environment to save at a resume. Keeps the names of secrets even if this resume lacked them."""
    if before is None:
        return now
    return SavedEnvironment(now.values, sorted({*before.withheld, *now.withheld} - now.values.keys()))


def to_json(saved: SavedEnvironment) -> str:
    """Return the text for the file in the run folder."""
    return json.dumps(dataclasses.asdict(saved), indent=1) + "\n"


def read(folder: Path) -> SavedEnvironment | None:
    """Return the environment saved in a run folder; None if it is missing or cannot be read."""
    try:
        tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
        withheld = [*map(str, tree["withheld"]), *map(str, tree.get("cut", []))]  # `cut`: of an earlier release
        values = {str(name): str(value) for name, value in tree["values"].items() if name not in withheld}
        return SavedEnvironment(values, withheld)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def hash_seed_of(saved: SavedEnvironment | None) -> str | None:
    """Return PYTHONHASHSEED of a run's processes; None: unknown."""
    return saved.values.get(hash_seed.SEED) if saved is not None else None


def resumed(
    saved: SavedEnvironment | None, own: Mapping[str, str], as_recorded: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a resume, and warnings about differences from the saved one.

    Args:
        own: The caller's environment.
        as_recorded: Whether the saved values win (for the keeper, whose environment does not matter); else `own` wins.
    """
    if saved is None:
        return dict(own), []
    usual = {name: value for name, value in own.items() if not _is_of_session(name, value)}
    lost = [name for name in saved.withheld if name not in own]
    problem = "secrets that were set at the launch are missing here"
    warnings = [f"{problem} ({_list(lost)}); if the run needs them, set them and resume again"] if lost else []
    if as_recorded:
        # its own secrets and session variables stay; all others come from the saved environment
        mine = {name: own[name] for name in own if name not in usual or name in saved.withheld}
        return mine | saved.values, warnings
    missing = {name: value for name, value in saved.values.items() if name not in own}
    other = [name for name in saved.values if name in own and own[name] != saved.values[name]]
    more = [name for name in usual if name not in saved.values and name not in saved.withheld]
    if missing:
        warnings.append(f"restored variables that were set at the launch and are not set here: {_list(missing)}")
    if other or more:
        parts = [f"changed since the launch: {_list(other)}"] if other else []
        parts += [f"not set at the launch: {_list(more)}"] if more else []
        warnings.append(f"this shell's variables are used ({'; '.join(parts)})")
    return {**own, **missing}, warnings


def _is_of_session(name: str, value: str) -> bool:
    return bool(_SESSION.fullmatch(name) or _FOUND_BY_TORCH.fullmatch(f"{name}={value}"))


def _list(names: Iterable[str]) -> str:
    found = sorted(names, key=lambda name: (not name.startswith(_WEIGHTY), name))
    more = f" and {len(found) - _NAMES} more" if len(found) > _NAMES else ""
    return ", ".join(found[:_NAMES]) + more
