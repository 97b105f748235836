"""What a cold start imports, and beside what: in processes of their own, for this one has torch."""

from __future__ import annotations

import subprocess
import sys

BEGIN = """
import sys
from train.runs import preload

def loaded(name):
    return name in open("/proc/self/maps").read()
"""


def execute(text: str) -> str:
    """What a fresh process prints that has executed this."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + text], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_libraries_of_torch_are_loaded_before_torch_is_imported() -> None:
    said = execute(
        "assert not loaded('libtorch_cpu.so')\n"
        "preload.begin()\n"
        "preload._loading[0].join()\n"
        "assert loaded('libtorch_cpu.so') and not loaded('libtorch_python') and 'torch' not in sys.modules\n"
        "preload.load(preload.CHECKS)\n"
        "import torch\n"
        "print(preload.is_clean(), int(torch.arange(10).sum()))\n"
    )
    assert said == "True 45"


def test_what_is_imported_beside_is_what_torch_would_import() -> None:
    assert execute(
        "import torch\n"
        "preload.load(preload.CHECKS)\n"  # torch is there: nothing is loaded beside
        "preload.load(preload.RANKS)\n"
        "print(set(preload.BESIDE) - set(sys.modules))\n"
    ) in ("set()", "{'networkx'}")  # newer releases of torch go without


def test_what_is_imported_beside_loads_no_library_that_would_wait_for_those_of_torch() -> None:
    assert execute(
        "def libraries(): return {line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}\n"
        "preload._import_where_there(preload._LIBRARIES)\n"
        "before = libraries()\n"
        "preload._import_where_there(preload.BESIDE)\n"
        "import train.runs.agent\n"  # which is next
        "print(libraries() - before)\n"
    ) == ("set()")


def test_a_torch_without_its_libraries_is_left_to_say_so_itself() -> None:
    said = execute(
        "import tempfile, pathlib\n"
        "folder = pathlib.Path(tempfile.mkdtemp())\n"
        "preload._open_libraries(folder)\n"
        "(folder / 'libtorch_global_deps.so').write_bytes(b'no library')\n"
        "preload._open_libraries(folder)\n"
        "print(loaded(str(folder)))\n"
    )
    assert said == "False"
