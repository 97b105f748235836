"""End every way in that a person may have left in a running station. Runs as root: python3 -I -S rotate.py

`make rotate` calls it after removing token and keys on the host. It ends dev's processes (kernels, terminals, ssh
sessions), except those of runs. It sets aside the files in the home folder that programs read or execute when they
start. Then it creates token and keys, and starts JupyterLab, keeper and exporter again.
"""

import contextlib
import filecmp
import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

STATION = Path("/usr/local/lib/trainstation")
HOME = Path("/home/dev")
SERVICES = ("jupyter", "exporter", "packages")
PATIENCE = 5.0
"""Seconds that processes get to end before SIGKILL."""
STAYS = (".cache", ".local/state/trainstation")
"""Names that stay: downloads that runs may be using, and the key by which the station knows its runs."""
ALSO = ("bin",)
"""Names that are set aside though they are not hidden. Debian's ~/.profile puts `bin` on PATH."""


def processes(uid: int) -> dict[int, tuple[int, str]]:
    """Map the number of each process of a user to its parent's number and its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if folder.stat().st_uid == uid:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = (parent, line)
    return found


def of_runs(found: dict[int, tuple[int, str]]) -> set[int]:
    """Return the processes of runs: their tmux servers, the agent or torchrun in them, ranks with their zygote, and all
    processes that these started."""
    kept = set()
    for number, (parent, line) in found.items():
        is_server = line.startswith(("tmux -f /dev/null -L train-", "tmux -f /dev/null -L torchrun-"))
        is_agent = found.get(parent, (0, ""))[1].startswith("tmux -f /dev/null -L ") and (
            "train.launcher.agent" in line or "torch.distributed.run" in line
        )
        if is_server or is_agent or line.startswith("train-rank"):
            kept.add(number)
        if line.startswith("train-rank") and found.get(parent, (0, ""))[1].startswith("train-zygote"):
            kept.add(parent)
    servers = {number for number in kept if found[number][1].startswith("tmux ")}
    while more := {n for n, (parent, _) in found.items() if parent in kept - servers and n not in kept}:
        kept |= more
    return kept


def of_keeper(found: dict[int, tuple[int, str]]) -> set[int]:
    """Return the keeper and the zygote that it holds."""
    keepers = {number for number, (_, line) in found.items() if line.endswith("service.py keeper ")}
    return keepers | {n for n, (parent, line) in found.items() if parent in keepers and line.startswith("train-zygote")}


def send(numbers: set[int], *signals: int) -> None:
    for number in numbers:
        for each in signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, each)


def end_processes(uid: int) -> set[int]:
    """End the processes that belong to no run. Return those of the keeper.

    The keeper gets no SIGTERM, because it would first save and stop all runs. It is paused (SIGSTOP) until the files
    that it has read are set aside.
    """
    since, asked = time.monotonic(), set()
    while True:
        found = processes(uid)
        keeper = of_keeper(found)
        send(keeper, signal.SIGSTOP)
        others = set(found) - of_runs(found) - keeper
        took = time.monotonic() - since
        if not others or took > 4 * PATIENCE:
            return keeper
        if took > PATIENCE:
            send(others, signal.SIGKILL)
        else:
            send(others - asked, signal.SIGTERM, signal.SIGHUP)  # shells end on the second
            asked |= others
        time.sleep(0.2)


def set_aside() -> tuple[str, list[str]]:
    """Move hidden names in the home folder, except those in STAYS, to a new folder. Return its name and theirs."""
    folder = HOME / time.strftime("set-aside-%Y%m%d-%H%M%S")
    moved = []

    def move(inside: Path) -> None:
        for path in sorted((HOME / inside).iterdir()):
            name = path.relative_to(HOME)
            if str(name) in STAYS or is_as_made(path):
                continue
            if not path.is_symlink() and path.is_dir() and any(stay.startswith(f"{name}/") for stay in STAYS):
                move(name)
            elif name.parts[0].startswith(".") or str(name) in ALSO:
                target = folder / name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.rename(target)
                moved.append(str(name))

    move(Path())
    for path in Path("/etc/skel").iterdir():
        if not (HOME / path.name).exists():
            (HOME / path.name).write_bytes(path.read_bytes())
    return folder.name, moved


def is_as_made(path: Path) -> bool:
    made = Path("/etc/skel") / path.name
    is_plain = path.parent == HOME and path.is_file() and not path.is_symlink()
    return is_plain and made.is_file() and filecmp.cmp(path, made, shallow=False)


def as_dev(user: pwd.struct_passwd) -> None:
    """Set files aside as dev, in a child process, so that root follows no link of dev."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            os.setgroups([])
            os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
            os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
            os.umask(0o077)
            folder, moved = set_aside()
            if moved:
                print(f"set aside in the home folder, in {folder}/: {' '.join(moved)}", flush=True)
            code = 0
        os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit("could not set aside the files in the home folder: check whether its disk is full")


def supervisor(*words: str) -> None:
    command = ["/usr/bin/python3", "-I", "/usr/bin/supervisorctl", "-c", "/etc/trainstation/supervisord.conf", *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)


def main() -> None:
    user = pwd.getpwnam("dev")
    supervisor("stop", *SERVICES)
    keeper = end_processes(user.pw_uid)
    try:
        as_dev(user)
    finally:
        send(keeper, signal.SIGKILL)  # supervisord starts it again
    done = subprocess.run([STATION / "make-keys"], check=False)
    supervisor("start", *SERVICES)
    runs = {" ".join(line.split()[2:]) for _, line in processes(user.pw_uid).values() if line.startswith("train-rank")}
    if runs:
        print(f"these runs continue with the code that they started with: {' '.join(sorted(runs))}", flush=True)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
