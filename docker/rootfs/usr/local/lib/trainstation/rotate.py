"""End every way in that a person may have left in a running station. Runs as root: python3 -I -S rotate.py

`make rotate` calls it after removing token and keys on the host. It stops the services, of which the keeper saves all
runs. It ends all processes of dev, whatever they call themselves. It sets aside the files in the home folder that
programs read or execute when they start. Then it creates token and keys, and starts the services again, of which the
keeper resumes the runs. It prints what stays.
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
SERVICES = ("jupyter", "exporter", "packages", "keeper")
"""Services that run as dev. The keeper saves the runs when it is stopped."""
PATIENCE = 5.0
"""Seconds that processes get to end before SIGKILL."""
LONGEST = 20.0
"""Seconds after which processes that even SIGKILL does not end are reported."""
STAYS = (".cache", ".local/state/trainstation")
"""Names that stay: downloads that runs may be using, and the key by which the station knows its runs."""
ALSO = ("bin",)
"""Names that are set aside though they are not hidden. Debian's ~/.profile puts `bin` on PATH."""
RUNS = """
import os, pathlib
from train.launcher import resumable
from train.run import folders
found = {True: [], False: []}
for run in folders.every_here(pathlib.Path(os.environ["TRAIN_RUNS"])):
    record = run.read_effective()
    if resumable.is_resumable(record):
        found[resumable.keeper_may_start(record)].append(run.name)
if found[True]:
    print("saved, and resumed by the keeper with the code in their folders:", *found[True])
if found[False]:
    print("stopped, and not resumed, because a restart begins at step 0 (train resume NAME):", *found[False])
"""
"""Prints what becomes of the runs. Executed as dev."""


def processes(uid: int) -> dict[int, str]:
    """Map the number of each living process that has this user among its users to its command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, LookupError):
            lines = (folder / "status").read_text().splitlines()
            fields = {name: values.split() for name, _, values in (line.partition(":") for line in lines)}
            # a thread may outlive the first one
            has_ended = fields["State"][0] in "ZX" and int(fields["Threads"][0]) < 2
            if str(uid) in fields["Uid"] and not has_ended:
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found[int(folder.name)] = words or " ".join(fields["Name"])
    return found


def become(user: pwd.struct_passwd) -> None:
    """Give up root's rights, in a child process."""
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)


def end_processes(user: pwd.struct_passwd) -> None:
    """End all processes of dev. Names prove nothing, because dev chooses them. Print those that do not end."""
    since, asked = time.monotonic(), set()
    while found := processes(user.pw_uid):
        took = time.monotonic() - since
        if took > LONGEST:
            lines = "; ".join(f"{number} {line[:80]}" for number, line in sorted(found.items())[:10])
            print(f"still there, because SIGKILL did not end them: {lines}", flush=True)
            sys.exit(1)
        for number in set(found) - asked if took <= PATIENCE else ():
            for one in (signal.SIGTERM, signal.SIGHUP):  # shells end on the second
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, one)
        asked |= set(found)
        if took > PATIENCE:
            kill_all(user)
        time.sleep(0.2)


def kill_all(user: pwd.struct_passwd) -> None:
    """Send SIGKILL to all processes of dev in one system call, which a process that always forks cannot outrun."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            become(user)
            os.kill(-1, signal.SIGKILL)  # spares the caller
        os._exit(0)
    os.waitpid(child, 0)


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
            become(user)
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
    end_processes(user)
    try:
        as_dev(user)
        if subprocess.run([STATION / "as-dev", "/usr/bin/python3", "-I", "-c", RUNS], check=False).returncode:
            print("which runs were running is unknown, see above; train ls lists them all", flush=True)
        done = subprocess.run([STATION / "make-keys"], check=False)
    finally:
        supervisor("start", *SERVICES)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
