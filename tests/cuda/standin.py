"""A CUDA driver that is not there, for processes of tests: built from the C files here, loaded by LD_PRELOAD."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cuda.cards import Cards

HERE = Path(__file__).parent
LIBRARIES = {"libcuda.so.1": ("cuda.c", "kernels.c"), "libnccl.so.2": ("nccl.c",), "libnvidia-ml.so.1": ("nvml.c",)}
"""Maps libraries to their C files. All are loaded before any other library. The first also has the calls that do
nothing (`_nothing`)."""
_NAMES = re.compile(r"(?:__cuda|cuda|cu[A-Z]|cublas|cusolver|cusparse|cufft)\w+$")
_TORCH = "libtorch_cuda.so libtorch_cuda_linalg.so libtorch_cpu.so libtorch_python.so libc10_cuda.so libcaffe2_nvrtc.so"
_SOUGHT = """cuMemSetAccess cuMemExportToShareableHandle cuMemImportFromShareableHandle cuMemsetD32Async
cuStreamWriteValue32 cuMulticastAddDevice cuMulticastBindMem cuMulticastCreate"""
"""Functions that torch looks for by name, all of them at once (c10/cuda/driver_api.h)."""
_FLAGS = ("-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", "-lm")


def environment(
    gpus: int | Cards = 1, capability: tuple[int, int] = (9, 0), memory_gb: float = 80, log: Path | None = None, *,
    name: str = "Stand-in H100", caching: bool = False, spin: float = 1,
) -> dict[str, str]:  # fmt: skip
    """Return the variables to start a process with, besides those it has.

    Args:
        gpus: The cards of the machine, or how many there are. CUDA_VISIBLE_DEVICES chooses among them. A test may
            change Cards: NVML tells the changes at once, CUDA to processes that open the driver from then on.
        memory_gb: Memory of each card in 10^9 bytes, for each process.
        log: A file that gets a line for each call of interest: "PID CALL …" (see `standin_log` in the C files).
        caching: Whether torch's caching allocator is on. Then torch counts memory and reports a full device as such,
            but an allocation may hold what was copied to an earlier one, where it holds zeros otherwise.
        spin: How many times longer torch.cuda._sleep takes than on an H100: on a busy machine the host is slow, too.
    """
    folder = built()
    if isinstance(gpus, int):
        size = int(memory_gb * 1e9)
        gpus = Cards(folder, gpus, name=name.replace(" ", "_"), major=capability[0], minor=capability[1], size=size)
    return {
        "LD_PRELOAD": ":".join(str(folder / library) for library in LIBRARIES),
        "TRITON_LIBCUDA_PATH": str(folder),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": str(int(not caching)),
        **gpus.environment,
        "STANDIN_LOG": str(log or ""),
        "STANDIN_SPIN": str(spin),
    }


def lacks() -> str:
    """Return what this machine lacks to build the libraries; '' if nothing."""
    tools = [tool for tool in (os.environ.get("CC", "gcc"), "nm") if shutil.which(tool) is None]
    if not (_torch() / "lib" / "libtorch_cuda.so").exists():
        tools.append("a torch for CUDA")
    return f"the stand-in driver needs {' and '.join(tools)}" if tools else ""


@functools.cache
def built() -> Path:
    """Return the folder with the libraries. Build them first where no process has done so."""
    compiler = os.environ.get("CC", "gcc")
    digest = hashlib.sha256(str(_torch()).encode())
    for file in sorted([Path(__file__), *HERE.glob("*.[ch]")]):
        digest.update(file.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"trainstation-standin-{os.getuid()}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    try:
        (made / "nothing.c").write_text(_nothing())
        packages = _torch().parent
        headers = [*packages.glob("nvidia/*/include"), packages / "triton" / "backends" / "nvidia" / "include"]
        includes = [word for path in headers for word in ("-isystem", str(path))]
        for library, sources in LIBRARIES.items():
            files = [str(HERE / source) for source in sources]
            if library == "libcuda.so.1":
                files.append(str(made / "nothing.c"))
            command = [compiler, *includes, f"-Wl,-soname,{library}", "-o", str(made / library), *files, *_FLAGS]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        (made / "libcuda.so").symlink_to("libcuda.so.1")  # the name that Triton links
        made.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _torch() -> Path:
    """Return torch's folder without importing torch."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _nothing() -> str:
    """Return C code for all CUDA functions that torch's libraries name: they return 0, where no C file has them."""
    libraries = [str(path) for name in _TORCH.split() if (path := _torch() / "lib" / name).exists()]
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    names = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines() if line.startswith(" ")}
    return "\n".join(
        f"__attribute__((weak)) int {name}(void);\n__attribute__((weak)) int {name}(void) {{ return 0; }}"
        for name in sorted({*filter(_NAMES.match, names), *_SOUGHT.split()})
    )
