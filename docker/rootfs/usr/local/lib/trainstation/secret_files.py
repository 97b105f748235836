"""What root knows of the folder with the token and the keys. Started by the steps, as root, with `python3 -I`.

    secret_files.py FOLDER NAME check    says in one line what is wrong, if anything is; changes nothing
    secret_files.py FOLDER NAME keys     prints the public keys that may log in, and closes the folder to others
    secret_files.py FOLDER NAME allowed  prints them for sshd, and changes nothing
    secret_files.py FOLDER NAME pair     keeps the pair on its standard input, private part first: its owner may log in
    secret_files.py FOLDER NAME token    prints JupyterLab's token; makes one where there is none

NAME is what a person calls the folder. Who owns it may put anything there, links to root's own files among them. So the
folder is opened once, and all else is done as its owner, by names inside it: a link is refused, a new file is written
beside its place and renamed into it. Exit code 2 with a line on stderr where something is wrong.
"""

import base64
import os
import re
import secrets
import stat
import sys
from pathlib import Path

PAIR = ("id_ed25519", "id_ed25519.pub")
FILES = ("authorized_keys", "jupyter_token", *PAIR, "known_hosts")
MOST = 256 * 1024  # bytes of one file
FOLDER, NAME, TASK = sys.argv[1:]

# Options (in them, blanks stand between quotes), type, key, comment.
LINE = re.compile(
    r"""(?:(?:[^\s"]|"(?:\\.|[^"\\])*")+[ \t]+)??"""
    r"""(?P<type>ssh-(?:ed25519|rsa)|ecdsa-sha2-nistp(?:256|384|521)|sk-(?:ssh-ed25519|ecdsa-sha2-nistp256)@openssh\.com)"""
    r"""[ \t]+(?P<blob>[A-Za-z0-9+/]+={0,2})(?:[ \t].*)?"""
)


class Wrong(Exception):
    """Something a person has to change; its text says what and how."""


def say(text: str) -> None:
    print(f"trainstation: {text}", file=sys.stderr)


def become_owner() -> None:
    """Goes into the folder and gives up every right but its owner's."""
    try:
        fd = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise Wrong(f"{NAME} has to be a folder, and no link ({os.strerror(error.errno)})") from error
    info, home = os.fstat(fd), Path("/workspace").stat()
    # The engine has just made it, as root; it becomes what the checkout's owner would have made.
    if TASK not in ("check", "allowed") and info.st_uid == 0 and not os.listdir(fd):
        os.fchmod(fd, 0o700)
        os.fchown(fd, home.st_uid, home.st_gid)
        info = os.fstat(fd)
    os.fchdir(fd)
    os.close(fd)
    os.umask(0o077)
    os.environ.clear()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(info.st_gid, info.st_gid, info.st_gid)
        os.setresuid(info.st_uid, info.st_uid, info.st_uid)


def close_to_others() -> None:
    """Gives the folder mode 700 and each file in it 600, whoever made them, and says so once."""
    opened = False
    for name in (".", *os.listdir(".")):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # a link, which `check` refuses where it matters
        mode = os.fstat(fd).st_mode
        if (name == "." or stat.S_ISREG(mode)) and mode & 0o077:
            try:
                os.fchmod(fd, 0o700 if name == "." else 0o600)
                opened = True
            except OSError as error:
                say(f"warning: {NAME}/{name} stays open to others ({os.strerror(error.errno)})")
        os.close(fd)
    if opened:
        say(f"{NAME} was open to others: the folder is 700 now, its files are 600")


def read(name: str) -> str | None:
    """The text of a file in the folder, or None where there is none. Raises Wrong for all that is no plain file."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        kind = "is a link" if Path(name).is_symlink() else f"cannot be read ({os.strerror(error.errno)})"
        raise Wrong(f"{NAME}/{name} {kind}: it has to be a file; remove it to have one made") from error
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Wrong(f"{NAME}/{name} cannot be read: it has to be a file; remove it to have one made")
        if info.st_nlink > 1:
            raise Wrong(f"{NAME}/{name} is a second name of another file: put a copy in its place")
        if info.st_size > MOST:
            raise Wrong(f"{NAME}/{name} has {info.st_size} bytes: that is no key and no token")
        return file.read(MOST).decode("utf-8", "replace")


def write(name: str, text: str) -> None:
    """Puts a file into the folder: never through what stands there, and whole or not at all."""
    beside = f".{name}-{secrets.token_hex(8)}"  # tempfile would open it by its whole path, which is root's alone
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        Path(beside).rename(name)
    except BaseException:
        Path(beside).unlink()
        raise


def public_keys() -> tuple[list[str], int]:
    """The lines of authorized_keys that are public keys, and how many others there are, comments left out."""
    lines = [line.strip() for line in (read("authorized_keys") or "").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    keys = [line for line in lines if is_public_key(line)]
    return keys, len(lines) - len(keys)


def is_public_key(line: str) -> bool:
    """A line as sshd takes it (sshd(8), AUTHORIZED_KEYS FILE FORMAT): options, type, the key in base64, a comment."""
    found = LINE.fullmatch(line)
    if not found:
        return False
    try:
        blob = base64.b64decode(found["blob"], validate=True)
    except ValueError:
        return False
    name = found["type"].encode()
    return blob.startswith(len(name).to_bytes(4, "big") + name) and len(blob) > len(name) + 4 + 32


def check() -> None:
    for name in FILES:
        read(name)
    if read("authorized_keys") and not public_keys()[0]:
        raise Wrong(f"{NAME}/authorized_keys holds no public key: one key a line, as in ~/.ssh/id_ed25519.pub")
    token = read("jupyter_token")
    if token is not None and not re.fullmatch(r"[A-Za-z0-9_-]{16,}", token.replace("\n", "")):
        raise Wrong(f"{NAME}/jupyter_token has to be 16 or more letters, digits, - and _; remove it to have one made")


def keys() -> None:
    found, others = public_keys()
    if others:
        say(f"{others} line(s) of {NAME}/authorized_keys are no public key, and do not count")
    for key in found:
        print(key)


def allowed() -> None:
    print("\n".join(public_keys()[0]))


def pair() -> None:
    end = "-----END OPENSSH PRIVATE KEY-----\n"
    private, _, public = sys.stdin.read().partition(end)
    write(PAIR[0], private + end)
    write(PAIR[1], public)
    write("authorized_keys", public)


def token() -> None:
    found = read("jupyter_token")
    if found is None:
        found = secrets.token_hex(24)
        write("jupyter_token", found)
        say(f"a token for JupyterLab was made: {NAME}/jupyter_token")
    print(found.replace("\n", ""), end="")


if __name__ == "__main__":
    try:
        become_owner()
        if TASK == "keys":  # the first that may change something
            close_to_others()
        {"check": check, "keys": keys, "allowed": allowed, "pair": pair, "token": token}[TASK]()
    except Wrong as wrong:
        say(f"error: {wrong}")
        sys.exit(2)
    except OSError as error:
        say(f"error: {NAME} cannot be written to: {error.strerror}")
        sys.exit(2)
