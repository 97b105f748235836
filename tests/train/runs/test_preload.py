"""What a cold start imports, and beside what: in processes of their own, for this one has torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEGIN = """
import sys
from train.runs import preload

def loaded(name):
    return name in open("/proc/self/maps").read()
"""


def execute(text: str, **variables: str | None) -> str:
    """What a fresh process prints that has executed this, with these variables; None: without that one."""
    environ = {name: value for name, value in (os.environ | variables).items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + text], env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.minutes
def test_what_is_imported_beside_is_what_torch_would_import() -> None:
    assert execute(
        "import torch\n"
        "preload.load(preload.CHECKS)\n"  # torch is there: nothing is loaded beside
        "preload.load(preload.RANKS)\n"
        "print(set(preload.BESIDE) - set(sys.modules))\n"
    ) in ("set()", "{'networkx'}")  # newer releases of torch go without


@pytest.mark.minutes
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


@pytest.fixture(scope="module")
def openblas() -> None:
    """NumPy computes with it, which has threads of its own."""
    if "openblas" not in execute("import threadpoolctl, numpy\nprint(threadpoolctl.threadpool_info())\n"):
        pytest.skip("this NumPy computes with another library")


@pytest.mark.minutes
@pytest.mark.usefixtures("openblas")
def test_no_thread_waits_for_numpys_work_and_a_rank_has_as_many_as_it_is_told() -> None:
    said = execute(
        "import os, threadpoolctl\n"
        "preload.load(preload.CHECKS)\n"
        "preload.load(preload.RANKS)\n"
        "from train.runs.processes import children\n"
        "print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'), flush=True)\n"
        "for threads in (1, 3):\n"
        "    if os.fork() == 0:\n"
        "        children._limit_threads(threads)\n"
        "        (blas,) = [one for one in threadpoolctl.threadpool_info() if one['internal_api'] == 'openblas']\n"
        "        print(blas['num_threads'], len(os.listdir('/proc/self/task')), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n",
        OPENBLAS_NUM_THREADS=None,
    )
    assert said.splitlines() == ["1 None", "1 1", "3 3"]


@pytest.mark.minutes
@pytest.mark.usefixtures("openblas")
def test_how_many_threads_numpy_has_is_what_the_user_says() -> None:
    said = execute(
        "import os\n"
        "preload.load(preload.CHECKS)\n"
        "print(os.environ['OPENBLAS_NUM_THREADS'], len(os.listdir('/proc/self/task')))\n",
        OPENBLAS_NUM_THREADS="3",
    )
    assert said == f"3 {min(3, len(os.sched_getaffinity(0)))}"


def test_the_module_of_a_frame_is_the_one_that_python_finds() -> None:
    said = execute(
        "import inspect, json\n"
        "before, frames = inspect.getmodule, []\n"
        "def seen(*_):\n"
        "    frames.extend((sys._getframe(), sys._getframe(1)))\n"
        "json.loads('{}', object_hook=seen)\n"
        "exec(compile('seen()', 'nowhere.py', 'exec'), {'seen': seen, '__name__': 'json'})\n"  # says it is another's
        "with preload._frames_known():\n"
        "    found = [inspect.getmodule(one) for one in (*frames, json, seen)]\n"
        "assert found == [before(one) for one in (*frames, json, seen)] and inspect.getmodule is before\n"
        "print(*[getattr(one, '__name__', None) for one in found])\n"
    )
    assert said.split()[1] == "json.decoder" and said.split()[-2:] == ["json", "__main__"], said
