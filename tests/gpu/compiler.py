"""Whether torch.compile can work here: Triton builds a small C library against Python's headers at its first use."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from tests.gpu.harness import Scale

_SOURCE = "#include <Python.h>\n#include <dlfcn.h>\nint number(void) { return PY_MAJOR_VERSION; }\n"
"""What Triton's own libraries include, but for the driver's header, which it brings."""


@functools.cache
def missing(scale: Scale) -> str:
    """Why no compiled model can be looked at, in a line; '' if one can."""
    if scale.is_small:
        return "small, it would be compiled for longer than it trains"
    if find_spec("triton") is None:
        return "torch.compile needs triton, which is not installed"
    return _no_library() or _no_kernel(scale)


def _no_kernel(scale: Scale) -> str:
    """Compile what anybody's torch.compile can: a card may be too old for Triton, or its driver not be found."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(64, device=scale.device))
    except Exception as error:
        said = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"torch.compile fails of x * 2 + 1: {type(error).__name__}: {said[0]}"[:300]
    finally:
        torch.compiler.reset()
    return ""


def _no_library() -> str:
    """Build one as Triton does (triton/runtime/build.py): with the first compiler of $CC, gcc and clang."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return "torch.compile needs a C compiler, and here is none (gcc, clang or $CC)"
    # 'posix_local' is Debian's own, and has no headers
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = sysconfig.get_paths(scheme=scheme)["include"]
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as folder:
        source = Path(folder) / "number.c"
        source.write_text(_SOURCE)
        command = [compiler, str(source), "-shared", "-fPIC", "-o", f"{source}.so", f"-I{headers}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"torch.compile needs a C compiler: {error}"[:300]
    if done.returncode == 0:
        return ""
    if not (Path(headers) / "Python.h").exists():
        return f"torch.compile needs Python.h, which is not in {headers} (Debian: python3-dev)"
    said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[0]
    return f"torch.compile needs a C compiler that works; {compiler}: {said}"[:300]
