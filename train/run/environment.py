"""Keeps the environment variables that a resume needs, and restores them.

A program may need them (PYTHONPATH, HF_HOME, DATA=…), and a resume comes from another shell or from the keeper. Kept
are settings of libraries, the variables that the source of the task or script mentions, and those of `--keep-env`.
Secrets are never kept, because run folders are copied and shown to others. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pwd
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from .. import hash_seed
from ..errors import Refused
from . import wandb_run

FILE = "environment.json"
"""File in the run folder; only its owner may read it."""
NOTIFY = ".notify"
"""File in the run folder with the text of --notify; only its owner may read it, and no archive or mirror has it."""

_SETTINGS = re.compile(
    r"""(?x)
    PATH | LANG | LANGUAGE | TZ | (?i:(http|https|ftp|all|no)_proxy) | (SSL_CERT | REQUESTS_CA | CURL_CA)_ \w+
    | (LC_ | LD_ | PYTHON | MALLOC_ | TRAIN_) \w*
    | (CUDA | CUDNN | CUBLAS | NVIDIA | NCCL | TORCH | PYTORCH | TRITON | ATEN) \w*
    | (OMP | KMP | GOMP | MKL | OPENBLAS | ONEDNN | DNNL) \w*
    | (GLOO | UCX | FI | IBV | RDMAV | MLX5)_ \w*  # networks
    | (HF | TRANSFORMERS | TOKENIZERS | ACCELERATE | WANDB)_ \w*
    # object stores: where, and where the secrets are
    | AWS_(PROFILE | REGION | DEFAULT_REGION | ENDPOINT_URL(_\w+)? | CONFIG_FILE | SHARED_CREDENTIALS_FILE | CA_BUNDLE)
    | AWS_(\w*CHECKSUM\w* | MAX_ATTEMPTS | RETRY_MODE | DEFAULTS_MODE | SDK_LOAD_CONFIG | ROLE_ARN)
    | AWS_(EC2_METADATA | IGNORE | S3 | STS | USE)_ \w*
    | GOOGLE_APPLICATION_CREDENTIALS | GOOGLE_CLOUD_PROJECT | AZURE_STORAGE_ACCOUNT_NAME | FSSPEC_ \w*
    """
)
"""Names of variables that a resume restores, whatever the source mentions."""
_OF_PROCESS = re.compile(
    r"""(?x)
    _ | PWD | OLDPWD | SHLVL | HOSTNAME | TERM | DISPLAY | COLUMNS | LINES | (TMUX | SSH | XDG | DBUS)(_ \w*)?
    | LC_CTYPE  # Python sets it by itself (PEP 538)
    | RANK | WORLD_SIZE | (LOCAL | GROUP | ROLE | NODE)_(RANK | WORLD_SIZE | NAME) | MASTER_(ADDR | PORT)
    | (TORCHELASTIC | PET | KUBERNETES)_ \w*
    | (SLURM | SLURMD | SBATCH | PMI | PMIX | OMPI | PRTE | PBS | LSB | LSF | FLUX)_ \w*
    | TRAIN_(AGENT_PID | ATTEMPT | FAULT | LEASES | NAME | PROVE | RUNS | RUN_DIR | SLOTS | SNAPSHOT | STATE)
    | TRAIN_(TRUSTED_OWNER | WARM)
    | TRAIN_NOTIFY  # a secret that a run can do without
    """
)
"""Names of variables that describe a session, a job or a rank. They are not kept: they would be wrong later."""
_FOUND_BY_TORCH = re.compile(r"TORCHINDUCTOR_CACHE_DIR=.*/torchinductor_[^/]*")
"""A value that torch sets by itself when its compiler is imported (from 2.11 on in every process that trains)."""
_SECRET = re.compile(
    r"""(?xi) (?!NCCL_|UCX_) .* (
        SECRET | PASSWORD | PASSWD | PASSPHRASE | BEARER | COOKIE | WEBHOOK | AUTHORIZATION | SIGNATURE
        | (TOKEN | KEY | JWT)S?\d* (_|$)
        | (^|_|(?-i:(?<=[a-z])(?=[A-Z]))) (PWD | PAT | CRED | DSN | SIG | SAS | OTP)S?\d* $
        | (?<!COM)(?<!BY) PASS\d* $
        | (^|_|(?-i:(?<=[a-z])(?=[A-Z]))) AUTH (_|$)
        | CREDENTIALS? (?!S|_FILE)
        | (^|_) NOTIFY $
    )"""
)
"""Names of secrets. In NCCL_IB_PKEY the key is a partition of InfiniBand."""
_NO_SECRET = frozenset({"GOOGLE_APPLICATION_CREDENTIALS"})
"""Names that read like secrets, but hold the path of a file."""
_PASSWORD = re.compile(
    r"""(?xi)
    (^|//) [^\s/:@]* : [^\s/]+ @ [\w.\[-]  # user:password@host
    | (?<!\w) (?!(\w+\+)?ssh: | sftp: | rsync:) [a-z][a-z0-9+.-]* :// [^\s/@]+ @ [\w.\[-]  # http://token@host
    # https://host/file?sig=…, and strings that open a connection: Server=a;Password=b
    | [?&] [\w-]* (sig | signature | token | key | secret | password | credential | auth | code) = [^&\s]
    | (^|[;\s]) \w* (password | passwd | pwd | secret | api_?key | accesskey | accountkey | signature | token) = [^;\s]
    # addresses that are secrets themselves
    | ://hooks?\. | ://[^\s/]* webhook | ://[^\s]* /webhooks?/ | ://[^\s/]+/services/T\w+/B\w+/
    # what services hand out begins like this
    | (?-i: (?<!\w) (
        gh[oprsu]_\w{20} | github_pat_ | glpat- | hf_\w{20} | sk-[\w-]{20} | xox[a-z]- | A[KS]IA[0-9A-Z]{16}
        | AIza[\w-]{30} | ya29\. | eyJ[\w-]+\.eyJ | npm_\w{30} | pypi-Ag | dop_v1_
    ))
    | ^\s* (bearer | basic | token) \s+ \S{8} | authorization: | -----BEGIN\ [A-Z ]*PRIVATE\ KEY
    | ["'] ([\w-]* (secret | passw | passphrase | token | key) [\w-]* | auths?) ["'] \s* :  # a field in JSON
    """
)
"""Values that are secrets or contain one, whatever their name."""
_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_NAMES = 12
"""Maximum number of names in a warning."""
_WEIGHTY = ("PYTHON", "LD_", "PATH", "CUDA", "NVIDIA", "NCCL", "TORCH", "OMP", "MKL", "HF_")
"""Prefixes of the names that a warning lists first."""


@dataclasses.dataclass(frozen=True)
class SavedEnvironment:
    """The kept part of an environment."""

    values: dict[str, str]
    withheld: list[str]
    """Names of secrets that the run may need."""

    @property
    def warnings(self) -> list[str]:
        """A line for the user about secrets that are not kept; [] without any."""
        if not self.withheld:
            return []
        remedy = "set them in the keeper's environment, and in your shell before a resume"
        return [f"secrets are not kept with the run ({_list(self.withheld)}); {remedy}"]


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is a secret, by its name (WANDB_API_KEY, but not TOKENIZERS_PARALLELISM), or contains one, by
    the shape of its value: an address with a password, for example."""
    return bool((_SECRET.match(name) and name not in _NO_SECRET) or _PASSWORD.search(value))


def shown(words: Iterable[str]) -> str:
    """Return a command line as a shell takes it, with `…` in place of secrets: values of flags that name one, and words
    that contain one."""
    found, flag = list[str](), ""
    for word in words:
        name, sign, value = word.partition("=") if word.startswith("-") else (flag, "", word)
        is_flag = word.startswith("-") and not sign
        hides = not is_flag and is_secret(name.lstrip("-").replace("-", "_").replace(".", "_").upper(), value)
        found.append(shlex.quote(word) if not hides else f"{name}=…" if sign else "…")
        flag = word if is_flag else ""
    return " ".join(found)


def user() -> str:
    """Return the name of the user of this process, or the number if it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def image() -> str | None:
    """Return the version and commit of the image in which this process runs; None: it runs in no image of ours."""
    return os.environ.get("TRAINSTATION_VERSION")


def check_names(names: Iterable[str], environ: Mapping[str, str]) -> None:
    """Raise Refused for a name of `--keep-env` that cannot be kept."""
    for name in names:
        if name not in environ:
            raise Refused(f"--keep-env {name}: {name} is not set here; set it, or leave --keep-env {name} out")
        if is_secret(name, environ[name]):
            raise Refused(f"--keep-env {name}: a secret is never kept; set {name} in the keeper's environment instead")
        if _OF_PROCESS.fullmatch(name):
            raise Refused(f"--keep-env {name}: {name} differs from start to start, so it is never kept")


def keep(environ: Mapping[str, str], sources: Iterable[Path] = (), names: Iterable[str] = ()) -> SavedEnvironment:
    """Return the part of an environment that is kept with a run.

    Args:
        sources: Files of the task or script. The variables that they mention are kept too.
        names: More variables to keep.
    """
    wanted, environ = {*names, *_mentioned(sources)}, wandb_run.users(environ)
    found = {name: value for name, value in sorted(environ.items()) if name in wanted or _SETTINGS.fullmatch(name)}
    lasting = {name: value for name, value in found.items() if not _is_of_process(name, value)}
    withheld = [name for name, value in lasting.items() if is_secret(name, value)]
    return SavedEnvironment({name: value for name, value in lasting.items() if name not in withheld}, withheld)


def _mentioned(sources: Iterable[Path]) -> set[str]:
    """Return every word in these files: the name of a variable stands in os.environ["NAME"] or in "$NAME/file"."""
    found: set[str] = set()
    for path in sources:
        with contextlib.suppress(OSError):
            found.update(word.decode() for word in _WORD.findall(path.read_bytes()))
    return found


def kept_again(
    before: SavedEnvironment | None, environ: Mapping[str, str], *, sources: Iterable[Path], names: Iterable[str]
) -> SavedEnvironment:
    """Return the environment to keep at a resume: what is kept stays so, and names of secrets that it lacked too."""
    if before is None:
        return keep(environ, sources, names)
    now = keep(environ, sources, [*names, *before.values])
    return SavedEnvironment(now.values, sorted({*before.withheld, *now.withheld} - now.values.keys()))


def to_json(saved: SavedEnvironment) -> str:
    """Return the text for the file in the run folder."""
    return json.dumps(dataclasses.asdict(saved), indent=1) + "\n"


def read(folder: Path) -> SavedEnvironment | None:
    """Return the environment kept in a run folder; None if it is missing or cannot be read."""
    try:
        tree = json.loads((folder / FILE).read_text(encoding="utf-8"))
        values = {str(name): str(value) for name, value in tree["values"].items()}
        return SavedEnvironment(values, [*map(str, tree["withheld"])])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def hash_seed_of(saved: SavedEnvironment | None) -> str | None:
    """Return PYTHONHASHSEED of a run's processes; None: unknown."""
    return saved.values.get(hash_seed.SEED) if saved is not None else None


def resumed(
    saved: SavedEnvironment | None, own: Mapping[str, str], as_recorded: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the environment of a resume, and warnings about differences from the kept one.

    Args:
        own: The caller's environment.
        as_recorded: Whether the kept values win, and settings that were not set at the launch are left out: for the
            keeper, whose own settings do not matter. Else `own` wins.
    """
    own = wandb_run.users(own)
    if saved is None:
        return own, []
    lost = [name for name in saved.withheld if name not in own]
    problem = "secrets that were set at the launch are missing here"
    warnings = [f"{problem} ({_list(lost)}); if the run needs them, set them and resume again"] if lost else []
    more = [name for name in keep(own).values if name not in saved.values and name not in saved.withheld]
    if as_recorded:
        return {name: value for name, value in own.items() if name not in more} | saved.values, warnings
    missing = {name: value for name, value in saved.values.items() if name not in own}
    other = [name for name in saved.values if name in own and own[name] != saved.values[name]]
    if missing:
        warnings.append(f"restored variables that were set at the launch and are not set here: {_list(missing)}")
    if other or more:
        parts = [f"changed since the launch: {_list(other)}"] if other else []
        parts += [f"not set at the launch: {_list(more)}"] if more else []
        warnings.append(f"this shell's variables are used ({'; '.join(parts)})")
    return {**own, **missing}, warnings


def _is_of_process(name: str, value: str) -> bool:
    return bool(_OF_PROCESS.fullmatch(name) or _FOUND_BY_TORCH.fullmatch(f"{name}={value}"))


def _list(names: Iterable[str]) -> str:
    found = sorted(names, key=lambda name: (not name.startswith(_WEIGHTY), name))
    more = f" and {len(found) - _NAMES} more" if len(found) > _NAMES else ""
    return ", ".join(found[:_NAMES]) + more
