"""Cache folders of libraries, for a user without a name or without a writable home folder.

torch's compiler needs the user's name; Triton, matplotlib and the Hugging Face libraries need the home folder. Files in
such folders are executed, so another user must not be able to create them first. Also runs on Python 3.8.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
_IMAGE = "TRAINSTATION_IMAGE"
"""Variable that the image sets."""
_IN_HOME = {
    "TRITON_CACHE_DIR": ".triton/cache", "TORCH_EXTENSIONS_DIR": ".cache/torch_extensions",
    "MPLCONFIGDIR": ".config/matplotlib", "CUDA_CACHE_PATH": ".nv/ComputeCache",
    "HF_HOME": ".cache/huggingface", "TORCH_HOME": ".cache/torch",
}  # fmt: skip
"""Maps the variable of a cache to the library's default folder inside the home folder."""
_READ_ALONE = ("HF_HOME", "TORCH_HOME", "MPLCONFIGDIR")
"""Variables of caches that are useful even if read-only: downloads and settings."""


def user_name(environ: Mapping[str, str]) -> str:
    """Return the user's name, as Python's getpass finds it; '': there is none."""
    named = next((environ[name] for name in ("LOGNAME", "USER", "LNAME", "USERNAME") if environ.get(name)), "")
    with contextlib.suppress(KeyError):
        return named or pwd.getpwuid(os.getuid()).pw_name
    return ""


def home(environ: Mapping[str, str]) -> Path | None:
    """Return the user's home folder; None: there is none."""
    with contextlib.suppress(KeyError, OSError):
        given = Path(environ["HOME"] if "HOME" in environ else pwd.getpwuid(os.getuid()).pw_dir)
        return given if given.is_absolute() and given.is_dir() else None
    return None


def inductor(environ: Mapping[str, str]) -> Path | None:
    """Return the cache folder of torch's compiler as torch chooses it; None: the user has no name."""
    if environ.get(INDUCTOR):
        return Path(environ[INDUCTOR])
    name = re.sub(r'[\\/:*?"<>|]', "_", user_name(environ))  # as torch writes it
    above = _temporary()
    return above / f"torchinductor_{name}" if name and above is not None else None


def missing(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set so that libraries find a name, a home and private folders.

    Empty if nothing is missing. Leaves out folders if there is no safe place for them.
    """
    names = {} if user_name(environ) else dict.fromkeys(("USER", "LOGNAME"), f"uid{os.getuid()}")
    kept = _in_home(environ)
    names.update(kept)
    wanted = lacking({**environ, **kept})
    base = private_folder() if wanted else None
    if base is None:
        return names
    for variable in wanted:
        (base / variable.lower()).mkdir(mode=0o700, exist_ok=True)
        names[variable] = str(base / variable.lower())
    return names


def _in_home(environ: Mapping[str, str]) -> dict[str, str]:
    """Return in the image the cache folder of torch's compiler inside the home folder, which is a volume. torch's own
    folder, among temporary files, ends with the container."""
    folder = home(environ)
    if not environ.get(_IMAGE) or environ.get(INDUCTOR) or folder is None or not can_write(folder / ".cache"):
        return {}
    return {INDUCTOR: str(folder / ".cache" / f"torchinductor_{os.getuid()}")}


def provide() -> None:
    """Set the `missing` variables in this process, and so in those it starts."""
    with contextlib.suppress(OSError):
        os.environ.update(missing(os.environ))


def lacking(environ: Mapping[str, str]) -> list[str]:
    """Return the variables of folders that this user lacks or that another user could write."""
    folder, compiled = home(environ), inductor(environ)
    found = []
    if not environ.get(INDUCTOR) and (compiled is None or (os.path.lexists(str(compiled)) and not is_own(compiled))):
        found.append(INDUCTOR)
    if folder is None:
        return [*found, "HOME"]
    for variable, place in _IN_HOME.items():
        is_kept = variable in _READ_ALONE and (folder / place).exists()
        if not environ.get(variable) and not is_kept and not can_write(folder / place):
            found.append(variable)
    return found


def has_place() -> bool:
    """Whether there is a safe place for private folders."""
    above = _temporary()
    with contextlib.suppress(OSError):
        return above is not None and _is_safe(above) and os.access(str(above), os.W_OK | os.X_OK)
    return False


def private_folder() -> Path | None:
    """Return a private folder for caches, created if necessary; None: there is no safe place for one.

    Its name is always the same, so that compiled files are found again, unless another user has taken that name.
    """
    above = _temporary()
    if above is None:
        return None
    try:
        if not _is_safe(above):
            return None
        usual = above / f"trainstation-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            usual.mkdir(mode=0o700)
        return usual if is_own(usual) and not usual.lstat().st_mode & 0o077 else _other_folder()
    except OSError:
        return None


@functools.lru_cache
def _other_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix=f"trainstation-{os.getuid()}-"))


def _is_safe(above: Path) -> bool:
    """Whether no other user can replace files in this folder."""
    found = above.stat()
    is_closed = not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX)
    return is_closed and found.st_uid in (0, os.getuid())


def _temporary() -> Path | None:
    """Return the folder for temporary files; None: there is none."""
    with contextlib.suppress(OSError):
        return Path(tempfile.gettempdir())
    return None


def is_own(folder: Path) -> bool:
    """Whether this is a folder, not a link, that belongs to this user and is not writable for everyone."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o002
    return False


def can_write(folder: Path) -> bool:
    """Whether this folder can be written or created."""
    while not os.path.lexists(str(folder)) and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(str(folder), os.W_OK | os.X_OK)
