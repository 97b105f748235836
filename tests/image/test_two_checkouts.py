"""Every checkout has a station, volumes, network, names, ports and secrets of its own, and speaks of no other's."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import OWNER, Station, copy_checkout, run
from playwright.sync_api import Page, expect

from tests.waiting import eventually

pytestmark = [pytest.mark.never_forgiven, pytest.mark.turns]

ODD = "a path with blanks, ünd so"


@dataclass
class Checkout:
    """A person's checkout, with nothing set: neither name nor ports."""

    folder: Path
    home: Path

    @property
    def env(self) -> dict[str, str]:
        ours = ("TRAIN", "GPU", "MAKE", "ARGS", "MFLAGS", "COMPOSE", "JUPYTER_PORT", "SSH_PORT", "STATION")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        return {**kept, "HOME": str(self.home), "DOCKER_CONFIG": str(Path.home() / ".docker"), "GPUS": "none"}

    def make(self, *words: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        return run("make", "-s", *words, cwd=self.folder, env={**self.env, **settings}, check=check, timeout=900)

    def refused(self, *words: str, **settings: str) -> str:
        done = self.make(*words, check=False, **settings)
        assert done.returncode != 0
        (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
        return line

    def compose(self, *words: str, **settings: str) -> str:
        return run("docker", "compose", *words, cwd=self.folder, env={**self.env, **settings}).stdout

    def setting(self, name: str) -> str:
        lines = (self.folder / ".env").read_text().splitlines()
        return next((line.split("=", 1)[1] for line in lines if line.startswith(f"{name}=")), "")

    @property
    def container(self) -> str:
        return run(str(self.folder / "scripts" / "station.sh"), "id", env=self.env).stdout.strip()

    def inspect(self, template: str) -> str:
        return run("docker", "inspect", "-f", template, self.container).stdout.strip()

    @property
    def health(self) -> str:
        """As the station has it at this moment; the engine looks every 15 seconds."""
        return run("docker", "exec", self.container, "station-health", check=False).stdout.strip()

    @property
    def belongings(self) -> dict[str, set[str]]:
        """What in the engine and on the host is this station's, by kind."""
        found = json.loads(self.inspect("{{json .}}"))
        return {
            "name": {found["Name"]},
            "volumes": {mount["Name"] for mount in found["Mounts"] if mount["Type"] == "volume"},
            "networks": set(found["NetworkSettings"]["Networks"]),
            "ports": {binding[0]["HostPort"] for binding in found["HostConfig"]["PortBindings"].values()},
            "host key": {(self.folder / ".secrets" / "known_hosts").read_text().split()[-1]},
            "token": {(self.folder / ".secrets" / "jupyter_token").read_text()},
            "key": {(self.folder / ".secrets" / "id_ed25519").read_text()},
        }


@pytest.fixture(scope="module")
def checkout(station: Station, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], Checkout]]:
    """Makes checkouts, and takes away what they leave. The image is there, for `station` has built it."""
    made: list[Checkout] = []
    home = tmp_path_factory.mktemp("home")

    def make(folder: Path, copied: bool = False) -> Checkout:
        if not copied:
            copy_checkout(folder)
        made.append(Checkout(folder, home))
        return made[-1]

    yield make
    for one in made:
        if one.folder.exists():
            one.make("clean-station", check=False)
            shutil.rmtree(one.folder)
    assert station.health() == "healthy"
    run("docker", "image", "inspect", station.inspect("{{.Config.Image}}"))  # clean-station has left it


@pytest.fixture(scope="module")
def first(checkout: Callable[..., Checkout], tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    one = checkout(tmp_path_factory.mktemp("first") / "trainstation")
    one.make("up")
    return one


@pytest.fixture(scope="module")
def second(first: Checkout, checkout: Callable[..., Checkout], tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """In a path with blanks, and with an .env as Windows writes it."""
    started = first.inspect("{{.State.StartedAt}}")
    one = checkout(tmp_path_factory.mktemp("second") / ODD / "trainstation")
    text = (one.folder / ".env.example").read_text().replace("#TZ=UTC", 'export TZ = "Asia/Tokyo" # here')
    (one.folder / ".env").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    printed = one.make("up").stdout
    assert f"taken by the station of {first.folder}" in printed
    assert first.inspect("{{.State.StartedAt}}") == started
    return one


def apart(one: Checkout, other: Checkout) -> None:
    mine, yours = one.belongings, other.belongings
    assert {kind: mine[kind] & yours[kind] for kind in mine} == {kind: set() for kind in mine}


def test_two_stations_share_nothing_and_are_both_healthy(first: Checkout, second: Checkout) -> None:
    apart(first, second)
    machine = socket.gethostname().split(".")[0].lower().replace("_", "-")
    for one in (first, second):
        assert one.health == "healthy"
        (token,) = one.belongings["token"]
        assert one.make("url").stdout.strip().endswith(f"?token={token}")
        assert one.make("url").stdout.split(":")[2].split("/")[0] in one.belongings["ports"]
        name = f"{one.setting('COMPOSE_PROJECT_NAME')}-{machine}"[:56].rstrip("-")
        assert one.inspect("{{.Config.Hostname}}") == one.setting("STATION_HOSTNAME") == name
        if os.getuid() == 0:
            made = [one.folder / ".env", one.folder / ".secrets", *(one.folder / ".secrets").iterdir()]
            assert {path.stat().st_uid for path in made} == {OWNER}


def test_a_browser_opens_the_printed_address_and_shows_no_station_the_cookies_of_another(
    first: Checkout, second: Checkout, page: Page
) -> None:
    addresses = [one.make("url").stdout.strip() for one in (first, second)]
    for address in addresses:
        page.goto(address)
        expect(page.locator("header .brand")).to_be_visible()  # the page with the runs
    mine, others = ({cookie["value"] for cookie in page.context.cookies(address)} for address in addresses)
    assert mine and others and not mine & others


def test_a_path_with_blanks_works_in_every_way_in(second: Checkout, tmp_path: Path) -> None:
    line = second.make("ssh-command").stdout
    assert line.count("\n") == 1
    done = run("sh", "-c", f"{line.strip()} 'date +%Z; id -un'", cwd=tmp_path, env=second.env)
    assert (done.stdout, done.stderr) == ("JST\ndev\n", "")
    assert run(*shlex.split(line), "id -un", env=second.env).stdout == "dev\n"
    assert second.make("ssh", "ARGS=id -un; echo $((6 * 7))").stdout == "dev\n42\n"
    assert "health   healthy" in second.make("status").stdout
    done = run(str(second.folder / "scripts" / "train"), "ls", env=second.env)
    assert "no runs" in done.stdout + done.stderr


def test_a_path_that_tools_read_each_in_its_way_is_refused(checkout: Callable[..., Checkout], tmp_path: Path) -> None:
    assert "move it to one without" in checkout(tmp_path / "it's $HOME").refused("up")


@pytest.mark.parametrize("target", ["ssh", "shell", "logs", "rebuild"])
def test_what_is_meant_for_inside_runs_nothing_on_the_host(second: Checkout, target: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.parent.chmod(0o777)
    words = f"--no-such; touch {mark} $(touch {mark}) `touch {mark}` $(shell touch {mark}) | touch {mark}"
    second.make(target, f"ARGS={words}", check=False)
    assert not mark.exists()


def test_make_up_again_and_docker_compose_alone_find_the_same_station(second: Checkout) -> None:
    before = second.container, (second.folder / ".env").read_bytes()
    second.make("up")
    second.compose("up", "--detach")
    assert (second.container, (second.folder / ".env").read_bytes()) == before
    assert second.compose("ps", "--quiet").strip() == second.container


def test_files_put_into_the_checkout_from_inside_are_not_obeyed(first: Checkout) -> None:
    before = first.container
    planted = {
        "compose.yaml": "services: {evil: {image: trainstation:runtime, privileged: true}}\n",
        "docker-compose.override.yml": "services: {station: {privileged: true}}\n",
        "makefile": "up:\n\techo EVIL\n",
    }
    for name, text in planted.items():
        (first.folder / name).write_text(text)
    try:
        assert "EVIL" not in first.make("up").stdout
        assert first.compose("config", "--services").split() == ["station"]
        assert "privileged" not in first.compose("config")
    finally:
        for name in planted:
            (first.folder / name).unlink()
    assert first.container == before


def test_a_compose_file_of_ones_own_lies_where_dev_cannot_change_it(first: Checkout) -> None:
    mine = "services: {station: {environment: {MINE: here}}}\n"
    (first.folder / "notebooks" / "mine.yml").write_text(mine)
    message = first.refused("up", COMPOSE_FILE="docker-compose.yml:notebooks/mine.yml")
    assert "notebooks/mine.yml lies in notebooks/, where user dev inside can put anything" in message
    (first.folder / "notebooks" / "mine.yml").rename(first.folder / "docker" / "mine.yml")
    train = ("docker", "exec", "--user", "dev", "--env", "HOME=/home/dev")
    run(*train, first.container, "train", "launch", "digits", "--name", "lives", "--nproc", "1", "--epochs", "100000")
    try:
        printed = first.make("up", COMPOSE_FILE="docker-compose.yml:docker/mine.yml").stdout
        assert "these runs are saved, and the keeper resumes them: lives" in printed
        run(*train, first.container, "train", "stop", "lives", "--now", check=False)
        assert "MINE=here" in first.inspect("{{.Config.Env}}")
        assert "MINE: here" in first.compose("config")  # .env remembers it
    finally:
        (first.folder / "docker" / "mine.yml").unlink()
        first.make("up", COMPOSE_FILE="docker-compose.yml")
    assert "MINE=here" not in first.inspect("{{.Config.Env}}")


def test_another_checkouts_name_or_port_is_refused(first: Checkout, second: Checkout) -> None:
    before = first.container
    (port, _) = sorted(first.belongings["ports"])
    assert f"port {port} is taken on 127.0.0.1 by the station of {first.folder}" in second.refused("up", SSH_PORT=port)
    name = first.setting("COMPOSE_PROJECT_NAME")
    for words in (["up"], ["status"], ["clean-station"]):
        second.refused(*words, COMPOSE_PROJECT_NAME=name)
    second.make("down", COMPOSE_PROJECT_NAME=name)
    assert str(first.folder) in second.refused("up", COMPOSE_PROJECT_NAME=name)
    assert first.container == before
    assert first.inspect("{{.State.Running}}") == "true"


def test_a_copy_gets_a_station_of_its_own(checkout: Callable[..., Checkout], first: Checkout) -> None:
    folder = first.folder.parent / "copy"
    run("cp", "-a", str(first.folder), str(folder))
    copy = checkout(folder, copied=True)
    for words in (["url"], ["logs"]):
        assert "this checkout has no station" in copy.refused(*words)
    assert "this checkout has no station" in copy.make("down").stdout
    assert f"a copy of {first.folder}: it gets its own station" in copy.make("up").stdout
    apart(first, copy)
    assert first.health == "healthy"
    before = copy.container
    assert "a copy of" not in copy.make("up").stdout
    assert copy.container == before
    copy.make("clean-station")
    shutil.rmtree(folder)


def test_a_moved_checkout_keeps_its_station_and_a_clone_in_its_place_does_not_get_it(
    checkout: Callable[..., Checkout], first: Checkout
) -> None:
    before = first.belongings
    run("docker", "exec", "--user", "dev", first.container, "sh", "-c", "echo mine >/home/dev/note")
    there = first.folder
    moved = checkout(there.parent / "moved", copied=True)
    there.rename(moved.folder)
    try:
        assert "running" in moved.make("status").stdout
        moved.make("down")
        clone = checkout(there)
        clone.make("up")
        assert f"was moved here from {there}" in moved.make("up").stdout
        assert {**moved.belongings, "ports": before["ports"]} == before
        assert run("docker", "exec", moved.container, "cat", "/home/dev/note").stdout == "mine\n"
        apart(moved, clone)
    finally:
        clone.make("clean-station", check=False)
        shutil.rmtree(there, ignore_errors=True)
        moved.make("down")
        moved.folder.rename(there)
    (there / ".env").write_text("")  # lost, and empty as an engine leaves one that mounted it; .secrets has the name
    first.make("up")
    assert {**first.belongings, "ports": before["ports"]} == before


def test_what_docker_compose_alone_began_is_named(checkout: Callable[..., Checkout], tmp_path: Path) -> None:
    one = checkout(tmp_path / f"alone-{os.getpid()}")
    ports = {"JUPYTER_PORT": "27777", "SSH_PORT": "27778"}
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml")
    assert f"image: alone-{os.getpid()}-station:runtime" in one.compose(*files, "config")  # no other checkout's
    one.compose(*files, "up", "--detach", "--no-build", **ports, STATION_BUILT="trainstation:runtime")
    try:
        assert f"docker compose --project-name alone-{os.getpid()} down" in one.refused("up", **ports)
        (one.folder / ".env").write_text(f"COMPOSE_PROJECT_NAME=alone-{os.getpid()}\n")
        before = one.container
        one.make("up", **ports)
        assert one.inspect("{{.Name}}") == f"/alone-{os.getpid()}-station-1" and before
    finally:
        one.make("clean-station", check=False)


def test_an_image_of_ones_own_is_taken_as_it_is_and_stays(
    checkout: Callable[..., Checkout], first: Checkout, tmp_path: Path
) -> None:
    one, mine, built = checkout(tmp_path / "own"), f"of-mine/station:{os.getpid()}", first.setting("STATION_BUILT")
    run("docker", "tag", built, mine)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key"))
    (one.folder / ".env").write_text(f"STATION_IMAGE={mine}\n")
    try:
        one.make("up")
        line = one.make("ssh-command").stdout
        assert f"-i {one.folder}/.secrets/id_ed25519 " in line
        one.make("up", SSH_PUBLIC_KEY=f"{tmp_path}/key.pub")  # the pair that make up has made may log in no more
        assert one.inspect("{{.Config.Image}}") == mine == one.setting("STATION_IMAGE")
        one.compose("up", "--detach")
        assert one.inspect("{{.Config.Image}}") == mine
        line = one.make("ssh-command", SSH_PUBLIC_KEY=f"{tmp_path}/key.pub").stdout
        assert f"-i {tmp_path}/key " in line and ".secrets/id_ed25519" not in line
        assert "is neither here nor in a registry" in one.refused("up", STATION_IMAGE="of-mine/station:none")
        one.make("clean-station")
        assert run("docker", "image", "inspect", mine, check=False).returncode == 0
        # what a make up of an earlier version kept there is none of a person's
        (one.folder / ".env").write_text("STATION_IMAGE=trainstation:runtime-0123456789ab\n")
        one.make("up")
        assert (one.setting("STATION_IMAGE"), one.setting("STATION_BUILT")) == ("", built)
    finally:
        one.make("clean-station", check=False)
        run("docker", "image", "rm", mine, check=False)


def test_two_make_up_at_once(checkout: Callable[..., Checkout], tmp_path: Path) -> None:
    """In one checkout the second waits and finds the station up; in two each gets ports of its own."""
    one, other = checkout(tmp_path / "one"), checkout(tmp_path / "other")
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    begun = [
        subprocess.Popen(["make", "-s", "up"], cwd=who.folder, env=who.env, **options) for who in (one, one, other)
    ]
    printed = [process.communicate(timeout=900)[0] for process in begun]
    assert [process.returncode for process in begun] == [0, 0, 0], printed
    apart(one, other)
    label = f"label=com.docker.compose.project={one.setting('COMPOSE_PROJECT_NAME')}"
    assert run("docker", "ps", "--all", "--quiet", "--filter", label).stdout.count("\n") == 1
    for who in (one, other):
        who.make("clean-station")


def test_a_checkout_at_another_revision_has_an_image_of_its_own(
    checkout: Callable[..., Checkout], first: Checkout, tmp_path: Path
) -> None:
    def images() -> set[str]:
        return set(run("docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split())

    friendly = run("docker", "image", "inspect", "-f", "{{.Id}}", "trainstation:runtime").stdout.strip()
    other = checkout(tmp_path / "revision")
    (other.folder / "docker" / "rootfs" / "etc" / "tmux.conf").write_text(f"# {tmp_path}\n")
    before = images()
    try:
        printed = other.make("up").stdout
        image = other.inspect("{{.Config.Image}}")
        assert image not in before
        log = Path(printed.partition("its log: ")[2].partition("\n")[0])
        assert "exporting to image" in log.read_text()
        log.unlink()
        assert image != first.inspect("{{.Config.Image}}")
        other.make("clean-station")
        assert image not in images()
        assert first.setting("STATION_BUILT") in images()
    finally:
        run("docker", "tag", friendly, "trainstation:runtime")
    assert "building" not in first.make("up").stdout
    eventually("the first station is healthy", lambda: first.health == "healthy")
