"""A person who logs in to the station is greeted, in Chinese where STATION_LANG says so; a command is not greeted."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

ETC = Path(__file__).parents[2] / "docker" / "rootfs" / "etc"


def said(home: Path, *options: str, **variables: str) -> str:
    """Return what the profile prints at a login on a terminal, or with these options of bash."""
    text = (ETC / "profile.d" / "trainstation.sh").read_text().replace("/etc/trainstation", str(ETC / "trainstation"))
    (home / "profile").write_text("id() { echo 1000; }\n" + text)  # tests may run as root, who is not greeted
    command = ["bash", "--norc", *(options or ("-i",)), "-c", f". {home}/profile; echo done"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    terminal, inner = pty.openpty()
    try:
        subprocess.run(command, check=True, stdin=inner, stdout=inner, env=environment, timeout=60)
        return os.read(terminal, 65536).decode().replace("\r\n", "\n")
    finally:
        os.close(terminal)
        os.close(inner)


def greeting(name: str) -> str:
    return (ETC / "trainstation" / name).read_text()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "greeting"),
        ({"STATION_LANG": "en"}, "greeting"),
        ({"STATION_LANG": "zh_CN"}, "greeting.zh_CN"),
        ({"STATION_LANG": "../../../etc/passwd"}, "greeting"),
    ],
)
def test_a_login_is_greeted_in_the_language_of_the_station(
    tmp_path: Path, variables: dict[str, str], name: str
) -> None:
    assert said(tmp_path, **variables) == greeting(name) + "done\n"


def test_a_command_and_a_window_of_tmux_are_not_greeted(tmp_path: Path) -> None:
    assert said(tmp_path, "-l", STATION_LANG="zh_CN") == "done\n"
    assert said(tmp_path, STATION_LANG="zh_CN", TMUX="here") == "done\n"
    (tmp_path / ".hushlogin").touch()
    assert said(tmp_path, STATION_LANG="zh_CN") == "done\n"


def test_both_greetings_have_the_same_commands_and_fit_a_terminal() -> None:
    english, chinese = (greeting(name).splitlines() for name in ("greeting", "greeting.zh_CN"))
    assert len(english) == len(chinese) == 3
    for command in ("train launch digits --name demo1 --follow", "train ls", "train show demo1", "train --help"):
        assert command in english[2] and command in chinese[2]
    assert max(len(line) + sum(letter > "\u2fff" for letter in line) for line in (*english, *chinese)) <= 120
