"""A user without a name, a home or a place to write gets folders for caches that are private."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from train import caches

AS_NOBODY = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root alone becomes another user"
)
AS_OTHER = ("setpriv", "--reuid=4242", "--regid=4242", "--clear-groups")
LIBRARIES = """
import getpass, os, sys
sys.path.insert(0, sys.argv[1])
from train import caches
caches.provide()
for variable in ("TORCHINDUCTOR_CACHE_DIR", "HOME"):
    found = os.stat(os.environ[variable])
    assert found.st_uid == os.getuid() and found.st_mode & 0o777 == 0o700, variable
    assert os.environ[variable].startswith(sys.argv[2]), variable
assert getpass.getuser() == f"uid{os.getuid()}" and os.path.expanduser("~") == os.environ["HOME"]
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    place = tmp_path / "tmp"
    place.mkdir()
    place.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


def test_a_user_who_has_all_gets_nothing(place: Path, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "USER": "me"}
    assert caches.missing(environ) == {} and not list(place.iterdir())


def test_in_the_image_what_is_compiled_outlives_the_container(place: Path, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "USER": "me", "TRAINSTATION_IMAGE": "1"}
    assert caches.missing(environ) == {caches.INDUCTOR: f"{tmp_path}/.cache/torchinductor_{os.getuid()}"}
    assert caches.missing(environ | {caches.INDUCTOR: "/mine"}) == {}
    (tmp_path / ".cache").touch()  # which keeps out root, too
    assert caches.INDUCTOR not in caches.missing(environ) and not list(place.glob("torchinductor*"))


@pytest.mark.parametrize("home", ["/nonexistent", "~", ""])
def test_a_user_without_a_home_gets_a_private_one(place: Path, home: str) -> None:
    made = caches.missing({"HOME": home, "USER": "me"})
    assert list(made) == ["HOME"] and Path(made["HOME"]).is_relative_to(place)
    assert (Path(made["HOME"]).parent.stat().st_mode & 0o777) == 0o700
    assert caches.missing({"HOME": home, "USER": "me"}) == made  # what was compiled is found again


def test_a_home_without_room_for_caches_stays_and_they_go_elsewhere(place: Path, tmp_path: Path) -> None:
    for name in (".triton", ".cache", ".config"):
        (tmp_path / name).touch()  # which keeps out root, too
    made = caches.missing({"HOME": str(tmp_path), "USER": "me", "HF_HOME": "/mine"})
    assert {"TRITON_CACHE_DIR", "MPLCONFIGDIR"} <= made.keys() and not {"HOME", "HF_HOME"} & made.keys()


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give files to another user")
def test_a_folder_that_another_user_made_first_is_not_used(place: Path) -> None:
    theirs = [place / "torchinductor_me", place / f"trainstation-{os.getuid()}"]
    for folder in theirs:
        folder.mkdir()
        os.chown(folder, 4242, 4242)
    made = caches.missing({"HOME": "/nonexistent", "USER": "me"})
    assert made.keys() == {caches.INDUCTOR, "HOME"}
    assert not any(Path(path).is_relative_to(folder) for path in made.values() for folder in theirs)
    place.chmod(0o777)  # where another user could swap any folder
    assert caches.missing({"HOME": "/nonexistent", "USER": "me"}) == {}


@AS_NOBODY
def test_a_number_without_a_name_has_all_that_libraries_ask_for() -> None:
    python = next((one for one in (sys.executable, "/usr/bin/python3") if _is_readable(one)), None)
    if python is None:
        pytest.skip("no interpreter here that another user may read")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # folders of pytest's are closed to others
        root, place = Path(name), Path(name) / "tmp"
        place.mkdir()
        root.chmod(0o755)
        place.chmod(0o1777)
        folder = Path(caches.__file__).parent
        shutil.copytree(folder, root / "train", ignore=shutil.ignore_patterns("__pycache__"))
        done = subprocess.run(
            [*AS_OTHER, python, "-I", "-c", LIBRARIES, str(root), str(place)],
            env={"PATH": os.environ["PATH"], "TMPDIR": str(place)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _is_readable(python: str) -> bool:
    done = subprocess.run([*AS_OTHER, python, "-I", "-c", "import json"], capture_output=True, check=False)
    return done.returncode == 0
