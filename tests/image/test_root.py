"""Root executes, reads and follows only what root alone can write: whoever holds the token or a key stays dev."""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from conftest import OWNER, ROOT, Station, Terminal, run
from traced import Opened, opened_by_root, strace_folder

from tests.waiting import eventually

pytestmark = pytest.mark.never_forgiven

# Run by root it leaves a mark and a shell that makes anybody root; run by dev it does nothing.
PYTHON = """
import os, shutil
if os.geteuid() == 0:
    with open("/workspace/runs/was-root", "a") as mark:
        mark.write(__file__ + chr(10))
    shutil.copy("/bin/sh", "/workspace/runs/shell")
    os.chmod("/workspace/runs/shell", 0o4755)
"""
SHELL = '[ "$(/usr/bin/id -u)" != 0 ] || { echo "$0 $BASH_SOURCE" >>/workspace/runs/was-root; }\n'
MODULES = ("usercustomize", "sitecustomize", "supervisor", "pkg_resources", "json", "os", "train_evil", "secrets")
COMMANDS = ("awk", "bash", "cat", "cut", "curl", "df", "env", "find", "grep", "id", "install", "nvidia-smi", "python3")
COMMANDS += ("sh", "ssh-keygen", "sshd", "stat", "supervisord", "tini", "train")
LACKING = ("emacs", "sl")  # commands that the image has not
STARTUP = (".bashrc", ".bash_profile", ".profile", ".bash_logout", ".ssh/rc", ".curlrc", ".inputrc", ".tmux.conf")


@pytest.fixture(scope="module")
def mine(make_station: Callable[..., Station]) -> Station:
    station = make_station("root")
    station.make("up")
    return station


def write_as_dev(station: Station, path: str, text: str, mode: str = "644") -> None:
    line = f'mkdir -p "$(dirname {path})" && cat >{path} && chmod {mode} {path}'
    run("docker", "exec", "-i", "--user", "dev", station.container, "bash", "-c", line, input=text)


@pytest.fixture(scope="class")
def planted(mine: Station) -> Iterator[Station]:
    """A station in which dev has put something at every place that somebody's start has ever looked at."""
    site = "/home/dev/.local/lib/python3.11/site-packages"
    for folder in (site, "/tmp", "/home/dev", "/workspace/runs", "/workspace/train"):
        for name in MODULES:
            write_as_dev(mine, f"{folder}/{name}.py", PYTHON)
    for name in MODULES:  # as where the protection is lifted, or the container was started without compose
        (mine.folder / f"{name}.py").write_text(PYTHON)
    write_as_dev(mine, f"{site}/planted.pth", "import usercustomize\n")
    program = f"#!/usr/bin/env -S -i /bin/bash\n{SHELL}exit 0\n"
    for name in COMMANDS + LACKING:
        write_as_dev(mine, f"/home/dev/.local/bin/{name}", program, "755")
    for name in LACKING:
        for folder in ("/tmp", "/home/dev", "/workspace/projects", "/workspace/train"):
            write_as_dev(mine, f"{folder}/{name}", program, "755")
    for name in STARTUP:
        write_as_dev(mine, f"/home/dev/{name}", SHELL if "rc" in name or "profile" in name else "")
    yield mine
    mine.dev("bash", "-c", f"cd /home/dev && rm -rf .local {' '.join(STARTUP)} *.py /tmp/*.py /workspace/runs/*.py")
    lacking = " ".join(LACKING)
    for folder in ("/tmp", "/home/dev", "/workspace/projects", "/workspace/train"):
        mine.dev("bash", "-c", f"cd {folder} && rm -f {lacking} Makefile")
    for name in MODULES:
        (mine.folder / f"{name}.py").unlink()
        (mine.folder / "train" / f"{name}.py").unlink()


def was_root(station: Station) -> str:
    runs = station.folder / "runs"
    assert not (runs / "shell").exists()
    mark = runs / "was-root"
    return mark.read_text() if mark.exists() else ""


class TestWhatDevLeft:
    def test_the_trap_works_where_root_steps_into_it(self, planted: Station) -> None:
        planted.root("python3", "-c", "import runpy; runpy.run_path('/workspace/usercustomize.py')")
        runs = planted.folder / "runs"
        assert (runs / "was-root").read_text().endswith("usercustomize.py\n")
        assert (runs / "shell").stat().st_mode & stat.S_ISUID
        for name in ("was-root", "shell"):
            (runs / name).unlink()

    def test_nothing_dev_left_runs_as_root_at_the_next_start(self, planted: Station) -> None:
        run("docker", "restart", "--time", "10", planted.container)
        planted.wait_healthy()
        planted.root("station-health")
        assert was_root(planted) == ""

    def test_nothing_dev_left_runs_as_root_when_the_owner_looks_after_the_station(self, planted: Station) -> None:
        for target in ("status", "url", "ssh-command", "up"):
            planted.make(target)
        for command in (["train", "ls"], ["python3", "-c", "pass"], ["id"], ["supervisorctl", "--help"]):
            planted.root(*command)
        assert was_root(planted) == ""

    def test_a_command_that_the_image_lacks_is_not_found(self, planted: Station) -> None:
        for words in (
            ["sl"],
            ["bash", "-c", "sl"],
            ["bash", "-lc", "sl"],
            ["bash", "-ic", "emacs"],
            ["sh", "-lc", "sl"],
        ):
            done = planted.root(*words, check=False)
            assert done.returncode in (126, 127)
            assert "not found" in done.stdout + done.stderr
        assert was_root(planted) == ""

    def test_roots_path_is_roots_alone_and_dev_finds_what_it_has_installed(self, planted: Station) -> None:
        for shell in ("bash -c", "bash -lc", "bash -ic", "sh -lc"):
            path = planted.root(*shell.split(), "echo $PATH").stdout.strip()
            look = f'for f in {path.replace(":", " ")}; do [ ! -e $f ] || stat -L -c "%n %U %a" $f; done'
            folders = planted.root("bash", "-c", look).stdout.splitlines()
            assert len(folders) >= 6
            assert not [line for line in folders if line.split()[1] != "root" or int(line.split()[2], 8) & 0o022]
        assert planted.dev("/usr/local/lib/trainstation/as-dev", "which", "sl").stdout == "/home/dev/.local/bin/sl\n"

    @pytest.mark.parametrize("folder", ["/workspace", "/tmp"])
    def test_roots_python_takes_nothing_from_the_current_folder(self, planted: Station, folder: str) -> None:
        def root(*command: str, given: str = "") -> str:
            words = ("docker", "exec", "-i", "--workdir", folder, planted.container, *command)
            return run(*words, input=given).stdout

        where = "import json, train, train.cli; print(train.cli.__file__, json.__file__)"
        expected = "/opt/trainstation/train/cli.py /usr/lib/python3.11/json/__init__.py\n"
        assert root("python3", "-c", where) == expected
        assert root("python3", given=where) == expected
        assert root("python3", "-", given=where) == expected
        assert root("python3", "-m", "train", "--version")
        root("python3", "-m", "secrets")
        assert was_root(planted) == ""

    def test_tab_in_a_shell_of_roots_runs_nothing_of_devs(self, planted: Station) -> None:
        write_as_dev(planted, "/workspace/projects/Makefile", "$(shell cp /bin/sh /workspace/runs/shell)\nall:\n")
        words = ("docker", "exec", "-it", "--workdir", "/workspace/projects", planted.container, "bash", "-l")
        with Terminal(*words) as terminal:
            terminal.wait_for("# ")
            os.write(terminal.master, b"make \t\t")
            terminal.wait_for("Makefile")  # a file's name, as behind any word
            terminal.type("\x15echo $((40 + 2)) $PWD")
            terminal.wait_for("42 /workspace/projects")
        assert was_root(planted) == ""


def test_train_started_by_root_runs_as_dev(mine: Station) -> None:
    mine.root("train", "launch", "digits", "--name", "by-root", "--nproc", "1", "--steps", "2", "--follow")
    owners = {path.stat().st_uid for path in (mine.folder / "runs" / "by-root").rglob("*")}
    assert owners == {mine.folder.stat().st_uid}


@pytest.fixture(scope="module")
def trace(make_station: Callable[..., Station]) -> list[Opened]:
    """What processes of root opened and executed, from the container's start to healthy and in a health check."""
    station = make_station("traced")
    room = strace_folder(station.folder.parent / "strace")
    strace = ["/strace/ld.so", "--library-path", "/strace", "/strace/strace", "-ff", "-y", "-s", "300"]
    strace += ["-e", "trace=%file,%process,setuid,setreuid,setresuid,setfsuid"]
    entrypoint = [*strace, "-o", "/strace/out/start", "/usr/bin/tini", "-s", "--", "/usr/local/bin/entrypoint"]
    watched = {"entrypoint": entrypoint, "cap_add": ["SYS_PTRACE"], "volumes": [f"{room}:/strace"]}
    (station.folder.parent / "traced.yml").write_text(yaml.safe_dump({"services": {"station": watched}}))
    station.make("up")  # makes secrets and volumes; then once more, watched
    station.make("down")
    files = [word for f in ("docker-compose.yml", "docker-compose.cpu.yml", "../traced.yml") for word in ("-f", f)]
    run("docker", "compose", *files, "up", "-d", "--no-build", cwd=station.folder, env=station.env)
    eventually("the watched station is healthy", station.healthy)
    station.root(*strace, "-o", "/strace/out/health", "/usr/local/bin/station-health")
    run("docker", "compose", *files, "down", "--volumes", "-t", "5", cwd=station.folder, env=station.env)
    seen = opened_by_root(room / "out", "start") + opened_by_root(room / "out", "health")
    shutil.rmtree(room)
    return seen


# Folders that dev can write to, or to what lies in them. Below /run that is /run/dev alone.
DEVS = re.compile(r"/(workspace|home|tmp|var/tmp|dev/shm|datasets|run/dev)(/|$)")


def test_root_opens_and_executes_nothing_that_dev_can_write(trace: list[Opened]) -> None:
    assert len(trace) > 300
    assert {"/usr/sbin/sshd", "/usr/bin/supervisord"} & {seen.path for seen in trace}
    assert any(seen.path.startswith("/etc/trainstation/private/secrets") for seen in trace)
    wrong = sorted({f"{seen.call} {seen.path}" for seen in trace if DEVS.match(seen.path)})
    assert not wrong


def test_what_root_opens_cannot_be_written_by_dev(mine: Station, trace: list[Opened]) -> None:
    """The list above is a list; here every path is looked at inside, with what leads to it."""
    places: set[str] = set()
    for seen in trace:
        path = Path(seen.path)
        places |= {str(path), *map(str, path.parents)}
    skipped = re.compile(r"/(proc|dev|strace|etc/trainstation/private)(/|$)")
    listed = sorted(place for place in places if not skipped.match(place))
    line = 'while IFS= read -r place; do [ ! -e "$place" ] || [ ! -w "$place" ] || echo "$place"; done'
    done = run("docker", "exec", "-i", "--user", "dev", mine.container, "bash", "-c", line, input="\n".join(listed))
    assert len(listed) > 200
    assert done.stdout == ""


def test_dev_can_write_only_where_dev_is_meant_to(mine: Station) -> None:
    """All of the image, as dev: what is not dev's home, the workspace or a place for everybody is root's."""
    allowed = "/proc /sys /dev /tmp /var/tmp /home/dev /workspace /datasets /run/dev /var/lib/trainstation/leases"
    pruned = " -o ".join(f"-path {place}" for place in allowed.split())
    done = mine.dev(
        "bash", "-c", f"find / \\( {pruned} \\) -prune -o ! -type l -writable -print 2>/dev/null; true", timeout=300
    )
    assert done.stdout == ""


def test_no_program_of_the_image_gives_rights_to_whoever_starts_it(mine: Station) -> None:
    assert mine.root("bash", "-c", "find / -xdev -perm /6000; getcap -r / 2>/dev/null; true", timeout=300).stdout == ""
    assert mine.dev("ping", "-c", "1", "127.0.0.1").returncode == 0


def test_the_secrets_are_not_seen_from_inside(mine: Station) -> None:
    assert mine.dev("ls", "-A", "/workspace/.secrets", check=False).stdout == ""
    for path in ("/etc/trainstation/private/secrets/id_ed25519", "/etc/trainstation/hostkeys/ssh_host_ed25519_key"):
        assert mine.dev("cat", path, check=False).returncode != 0
    assert mine.dev("bash", "-c", "echo key >/workspace/.secrets/authorized_keys", check=False).returncode != 0
    key = (mine.folder / ".secrets" / "id_ed25519").read_text().splitlines()[1]
    assert mine.dev("grep", "-rqsF", "--", key, "/workspace", "/run", "/etc", "/home", check=False).returncode != 0


def test_keys_that_dev_adds_do_not_count(mine: Station, tmp_path: Path) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other"))
    write_as_dev(mine, "/home/dev/.ssh/authorized_keys", (tmp_path / "other.pub").read_text(), "600")
    words = [w if not w.endswith("/id_ed25519") else str(tmp_path / "other") for w in mine.ssh_words]
    done = run(*words, "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "true", check=False)
    assert done.returncode == 255
    assert "Permission denied (publickey)" in done.stderr


# --- what the owner of the checkout executes

WRITABLE = ("train", "tests", "notebooks", "projects", "docs", "datasets", "runs")
ATTACKS = """
cd /workspace
for name in $(ls -A) .env .git .secrets .venv Makefile.sh makefile compose.yaml docker-compose.override.yml; do
    mv "$name" gone 2>/dev/null && echo "moved $name"
    [ -e "$name" ] && rm -rf "$name" 2>/dev/null && echo "removed $name"
    rmdir "$name" 2>/dev/null && echo "removed $name"
    ln -sfnT /home/dev "$name" 2>/dev/null && echo "replaced $name"
    case " WRITABLE " in *" $name "*) continue ;; esac
    ( : >>"$name" ) 2>/dev/null && echo "wrote $name"
    mkdir "$name" 2>/dev/null && echo "made $name"
    chmod 777 "$name" 2>/dev/null && echo "opened $name"
    [ ! -d "$name" ] || find "$name" -writable 2>/dev/null
done
true
"""


def everything(folder: Path) -> dict[str, bytes]:
    outside = [path for path in folder.iterdir() if path.name not in WRITABLE]
    files = [file for top in outside for file in ([top] if top.is_file() else top.rglob("*")) if file.is_file()]
    return {str(file): file.read_bytes() for file in files}


def test_what_the_owner_executes_cannot_be_changed_from_inside(mine: Station) -> None:
    (mine.folder / ".git").mkdir(exist_ok=True)
    kept = mine.folder.parent / "kept"
    shutil.copytree(mine.folder, kept, symlinks=True)  # the attack empties what may be written to
    before = everything(mine.folder)
    assert mine.dev("bash", "-c", ATTACKS.replace("WRITABLE", " ".join(WRITABLE))).stdout == ""
    assert everything(mine.folder) == before
    assert len(before) > 40
    for name in WRITABLE:
        shutil.copytree(kept / name, mine.folder / name, symlinks=True, dirs_exist_ok=True)
        for path in [mine.folder / name, *(mine.folder / name).rglob("*")]:
            os.chown(path, OWNER, OWNER, follow_symlinks=False)
    assert "can change" not in mine.log


def test_a_file_replaced_from_outside_stays_protected(mine: Station) -> None:
    """As git and editors do it: a new file takes the name of the old one, and a mount on it would be gone."""
    path = mine.folder / "Makefile"
    (mine.folder / "Makefile.new").write_bytes(path.read_bytes())
    os.chown(mine.folder / "Makefile.new", OWNER, OWNER)
    (mine.folder / "Makefile.new").rename(path)
    assert mine.dev("bash", "-c", "echo evil >>/workspace/Makefile", check=False).returncode != 0
    assert b"evil" not in path.read_bytes()


def test_work_goes_on_in_its_folders(mine: Station) -> None:
    for name in WRITABLE:
        mine.dev("bash", "-c", f"cd /workspace/{name} && echo mine >mine.py && mkdir d && rmdir d")
        assert (mine.folder / name / "mine.py").stat().st_uid == OWNER
        mine.dev("rm", f"/workspace/{name}/mine.py")


def test_what_is_mounted_does_not_lie_where_dev_could_replace_it(mine: Station, tmp_path: Path) -> None:
    (mine.folder / "notebooks" / "data").mkdir()
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", mine.folder / "notebooks" / "ca.pem")
    try:
        for name, path in (("RUNS_DIR", "data"), ("DATASETS_DIR", "data"), ("CA_BUNDLE", "ca.pem")):
            env = {**mine.env, name: f"./notebooks/{path}"}
            done = run("make", "-s", "up", cwd=mine.folder, env=env, check=False)
            assert done.returncode != 0
            assert f"{name}=./notebooks/{path} lies in notebooks/, where user dev" in done.stderr
    finally:
        (mine.folder / "notebooks" / "data").rmdir()
        (mine.folder / "notebooks" / "ca.pem").unlink()


def test_what_is_mounted_does_not_lie_in_a_runs_folder_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine" / "sets").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    scripts = [str(ROOT / "scripts" / f"station-{part}.sh") for part in ("settings", "checks")]
    check = 'die() { echo "$1"; exit 1; }; for file in "${@:2}"; do . "$file"; done; load_settings'
    check += '; check_place DATASETS_DIR "$1"'
    for runs in ("mine", "link"):
        env = {**os.environ, "RUNS_DIR": f"{tmp_path}/{runs}"}
        done = run("bash", "-c", check, "-", f"{tmp_path}/link/sets", *scripts, cwd=tmp_path, env=env, check=False)
        assert f"DATASETS_DIR={tmp_path}/link/sets lies in mine/, where user dev" in done.stdout
        run("bash", "-c", check, "-", f"{tmp_path}/{runs}", *scripts, cwd=tmp_path, env=env)
    for runs in (".", "..", str(tmp_path.parent), "/"):
        env = {**os.environ, "RUNS_DIR": runs}
        done = run("bash", "-c", check, "-", "./datasets", *scripts, cwd=tmp_path, env=env, check=False)
        assert f"RUNS_DIR={runs} holds this checkout" in done.stdout


def test_make_makes_its_own_files_from_nothing(mine: Station) -> None:
    """A Makefile.sh, a Makefile,v or an s.Makefile beside it would be built into a Makefile, and run."""
    names = ("Makefile.sh", "GNUmakefile.sh", "Makefile,v", "s.Makefile", "Makefile.c", "help.sh", "url.sh")
    for name in names:
        (mine.folder / name).write_text("$(shell touch was-made)\ninclude docker/station.mk\n")
        os.utime(mine.folder / name, (2e9, 2e9))
    try:
        mine.make("help")
        mine.make("url")
        assert not (mine.folder / "was-made").exists()
    finally:
        for name in names:
            (mine.folder / name).unlink()


@pytest.mark.turns
def test_one_setting_lifts_the_protection_and_is_warned_of(mine: Station) -> None:
    env = {**mine.env, "PROTECT_CHECKOUT": "false"}
    done = run("make", "-s", "up", cwd=mine.folder, env=env)
    try:
        assert "PROTECT_CHECKOUT=false" in done.stdout + done.stderr
        assert "warning: user dev can change all of this checkout" in mine.log
        assert mine.dev("bash", "-c", "cd /workspace && cp Makefile m && cat m >Makefile && rm m").returncode == 0
        mine.wait_healthy()
    finally:
        mine.make("up")


TYPING = """
import fcntl, sys, termios
try:
    fcntl.ioctl(0, termios.TIOCSTI, b"#")
except OSError as error:
    print("it types nothing:", error.errno, file=sys.stderr)
from train.tasks.digits import Settings, datasets, loss, model
"""


def test_train_types_nothing_into_a_terminal_of_roots(mine: Station) -> None:
    write_as_dev(mine, "/workspace/projects/typed.py", TYPING)
    with Terminal("docker", "exec", "--interactive", "--tty", mine.container, "bash", "--norc") as terminal:
        terminal.wait_for("# ")
        terminal.type("train run projects/typed.py --steps 1 --name typed; echo code $?")
        terminal.wait_for("it types nothing: 1")
        terminal.wait_for("code 0")


def test_what_is_handed_over_is_not_what_a_link_leads_to_by_then(tmp_path: Path) -> None:
    """The first chown finds the folder that it was called for replaced."""
    for folder in ("bin", "runs/one", "host"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs" / "one" / "shadow").touch()
    (tmp_path / "host" / "shadow").touch()
    chown = tmp_path / "bin" / "chown"
    swap = f"cd {tmp_path}/runs && mv one two && ln -s ../host one"
    chown.write_text(
        f'#!/bin/bash\n({swap}) 2>/dev/null\nexec /bin/chown --no-dereference {OWNER}:{OWNER} "${{@:3}}"\n'
    )
    chown.chmod(0o755)
    step = ROOT / "docker/rootfs/usr/local/lib/trainstation/steps/20-user"
    line = next(line for line in step.read_text().splitlines() if line.startswith("hand_over()"))
    env = {**os.environ, "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    run("bash", "-c", f"{line}\nhand_over runs/one", cwd=tmp_path, env=env, check=False)
    assert (tmp_path / "runs" / "two" / "shadow").exists()
    assert (tmp_path / "host" / "shadow").stat().st_uid == 0


def test_only_lines_that_are_public_keys_count(mine: Station, tmp_path: Path) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "more"))
    keys = mine.folder / ".secrets" / "authorized_keys"
    before = keys.read_text()
    more = (tmp_path / "more.pub").read_text()
    keys.write_text(f'# mine\n{before}not a key\nssh-ed25519 AAAA\nroot:x:0:0\nno-pty,from="127.0.0.1,*" {more}')
    try:
        mine.compose("up", "--detach", "--force-recreate", "--no-build")
        mine.wait_healthy()
        used = mine.root("/usr/local/lib/trainstation/authorized-keys").stdout
        assert used == f'{before.strip()}\nno-pty,from="127.0.0.1,*" {more.strip()}\n'
        assert "3 line(s) of .secrets/authorized_keys are no public key" in mine.log
    finally:
        keys.write_text(before)
