"""Killed, stopped, started again: the station comes back clean."""

from collections.abc import Callable

import pytest
from conftest import Station

pytestmark = pytest.mark.turns


def test_after_a_kill_nothing_stale_is_in_the_way(station: Station) -> None:
    station.dev("tmux", "new-session", "-d", "-s", "before")  # leaves a socket in /tmp
    container = station.container
    station.root("true")
    station.compose("kill", "--signal", "KILL")
    assert station.inspect("{{.State.Running}}") == "false"
    station.make("up")
    assert station.container == container  # the same one, with its old files
    assert station.health() == "healthy"
    assert station.ssh("tmux new-session -d -s after && tmux list-sessions").stdout.startswith("after:")


@pytest.mark.never_forgiven
def test_down_and_up_keep_home_and_runs(station: Station) -> None:
    station.ssh("echo mine >~/note && echo yours >/workspace/runs/note")
    station.make("down")
    station.make("up")
    assert station.ssh("cat ~/note /workspace/runs/note").stdout == "mine\nyours\n"


def test_plain_docker_compose_works_on_a_fresh_clone(make_station: Callable[..., Station]) -> None:
    """What is missing is made inside, belongs to the checkout's owner, and is said once in the log."""
    fresh = make_station("plain")
    fresh.compose("up", "--detach", "--no-build")
    fresh.wait_healthy()
    assert "a token for JupyterLab was made: .secrets/jupyter_token" in fresh.log
    assert "a pair was made: ssh -i .secrets/id_ed25519" in fresh.log
    assert fresh.ssh("id -un").stdout == "dev\n"
    owner = fresh.folder.stat().st_uid
    made = [path for path in (fresh.folder / ".secrets").iterdir() if path.name != "known_hosts"]
    assert {path.stat().st_uid for path in made} == {owner}
    fresh.compose("restart", timeout=200)
    fresh.wait_healthy()
    assert fresh.log.count("a token for JupyterLab was made") == 1
    fresh.compose("down", "--volumes")
