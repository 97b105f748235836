"""What a launch says about a script before it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from train.code import imports
from train.scripts import check
from train.scripts.command import BEGINS_ANEW


def warnings(path: Path, text: str, on_restart: str | None = "") -> list[str]:
    path.write_text(text)
    return check.check(str(path), arguments=[], on_restart=on_restart, flags={})[1]


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["MASTER_PORT"] = "{}"', "os.environ['MASTER_PORT'] = str({})",
        "env = dict(MASTER_PORT={})", "{{'MASTER_PORT': '{}'}}",
    ],
)  # fmt: skip
def test_a_port_that_a_script_sets_and_that_is_taken_is_named(tmp_path: Path, line: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (said,) = warnings(tmp_path / "ddp.py", line.format(port))
        assert said.startswith(f"ddp.py sets MASTER_PORT to {port}, which is in use on this machine; leave")
        (tmp_path / "setup.py").write_text(line.format(port))
        (said,) = warnings(tmp_path / "ddp.py", "import setup")
        assert said.startswith(f"setup.py sets MASTER_PORT to {port}")
        assert not warnings(tmp_path / "ddp.py", f"os.environ.setdefault('MASTER_PORT', '{port}')")
    assert not warnings(tmp_path / "ddp.py", line.format(port))
    assert not warnings(tmp_path / "ddp.py", "port = os.environ['MASTER_PORT']; retries = 3")


def test_this_package_is_no_file_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text("import trainstation as ts\nimport beside")
    (tmp_path / "beside.py").write_text("")
    assert [Path(name).name for name in imports.of_script(tmp_path / "loop.py")] == ["loop.py", "beside.py"]


def test_a_script_of_which_nothing_says_that_it_continues_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ddp.py"
    assert [BEGINS_ANEW in line for line in warnings(path, "import torch", None)] == [True]
    assert not warnings(path, "import torch", "")
    assert not warnings(path, "import torch\nimport trainstation as ts\nloop = ts.session(seed=0)", None)
    assert not warnings(path, "import torch, trainstation as ts\nloop = ts.session(seed=0)", None)
    (tmp_path / "loop.py").write_text("def main():\n    from trainstation import session\n    session()\n")
    assert not warnings(path, "import loop", None)
    assert warnings(path, "# import trainstation\nsession()", None)
    assert warnings(path, "import trainstation as ts\nts.launch('digits')", None)
