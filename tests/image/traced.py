"""Reads strace's output: which paths did processes open or execute while they were root."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

FORKED = re.compile(r"(?:clone3?|v?fork)\(.* = (?P<child>\d+)$")
BECAME = re.compile(r"(?P<call>setuid|setreuid|setresuid|setfsuid)\((?P<ids>[-\d, ]*)\) += 0")
OPENED = re.compile(
    r"(?P<call>open|openat|openat2|execve|execveat|creat)\("
    r'(?:(?:AT_FDCWD|\d+)<(?P<base>[^>]*)>, )?"(?P<path>[^"]*)"'
)


@dataclass(frozen=True)
class Opened:
    call: str
    path: str  # absolute; also of what was looked for and is not there: it would have been taken


def strace_folder(folder: Path) -> Path:
    """strace with the libraries it needs, to be mounted into a container that has neither."""
    (folder / "out").mkdir(parents=True)
    strace = shutil.which("strace")
    assert strace, "strace is missing: scripts/test-image.sh installs it"
    shutil.copy(strace, folder / "strace")
    listed = subprocess.run(["ldd", strace], check=True, capture_output=True, text=True).stdout
    for path in re.findall(r"(/\S+) \(0x", listed):
        shutil.copy(path, folder / ("ld.so" if "/ld-linux" in path else Path(path).name))
    return folder


def opened_by_root(folder: Path, name: str) -> list[Opened]:
    """What was opened by processes whose user was root at that time, from the files `name.PID` of `strace -ff`."""
    seen: list[Opened] = []
    files = {int(path.suffix[1:]): path for path in folder.glob(f"{name}.*")}

    def follow(pid: int, root: bool) -> None:
        for line in files.pop(pid).read_text(errors="replace").splitlines():
            if became := BECAME.match(line):
                ids = [int(word) for word in became["ids"].split(",")]
                effective = ids[1] if became["call"] in ("setreuid", "setresuid") else ids[0]
                root = root if effective == -1 else effective == 0
            elif (forked := FORKED.match(line)) and int(forked["child"]) in files:
                follow(int(forked["child"]), root)
            elif root and (opened := OPENED.match(line)):
                seen.append(Opened(opened["call"], str(Path(opened["base"] or "/", opened["path"]))))

    while files:
        follow(min(files), True)
    return seen
