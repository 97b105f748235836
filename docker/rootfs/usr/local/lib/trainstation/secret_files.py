"""Read and write the folder with the token and the keys. The steps start it as root, with `python3 -I`.

    secret_files.py FOLDER NAME check    print in one line what is wrong; change nothing
    secret_files.py FOLDER NAME keys     print the public keys that may log in, and close the folder to others
    secret_files.py FOLDER NAME allowed  print them for sshd; change nothing
    secret_files.py FOLDER NAME pair     store the pair on standard input, private part first; its owner may log in
    secret_files.py FOLDER NAME token    print JupyterLab's token; create one if there is none
    secret_files.py FOLDER NAME notify   print where `train` sends notices; nothing if there is no such file

NAME is the folder's name for people. The folder's owner may put anything there, also links to root's files. So the
folder is opened once as root. Everything else is done as its owner, by names inside it: a link is refused, and a new
file is written beside its place and renamed into it. On an error: exit code 2 and one line on stderr.
"""

import base64
import os
import re
import secrets
import stat
import sys
from pathlib import Path

PAIR = ("id_ed25519", "id_ed25519.pub")
FILES = ("authorized_keys", "jupyter_token", *PAIR, "known_hosts", "notify")
MOST = 256 * 1024  # bytes of one file
FOLDER, NAME, TASK = sys.argv[1:]

# Options (blanks in them only between quotes), type, key, comment.
LINE = re.compile(
    r"""(?:(?:[^\s"]|"(?:\\.|[^"\\])*")+[ \t]+)??"""
    r"""(?P<type>ssh-(?:ed25519|rsa)|ecdsa-sha2-nistp(?:256|384|521)|sk-(?:ssh-ed25519|ecdsa-sha2-nistp256)@openssh\.com)"""
    r"""[ \t]+(?P<blob>[A-Za-z0-9+/]+={0,2})(?:[ \t].*)?"""
)


class Wrong(Exception):
    """A fault that a person has to correct. Its text says what and how."""


def say(text: str) -> None:
    print(f"trainstation: {text}", file=sys.stderr)


def become_owner() -> None:
    """Enter the folder and give up all rights except its owner's."""
    try:
        fd = os.open(FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise Wrong(f"{NAME} must be a folder and no link ({os.strerror(error.errno)})") from error
    info, home = os.fstat(fd), Path("/workspace").stat()
    # The engine has just created it, as root. Give it the owner and mode of a folder made by the checkout's owner.
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
    """Give the folder mode 700 and each file in it 600, and say so once."""
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
    """Return the text of a file in the folder, or None if it does not exist.

    Raises:
        Wrong: it is not a plain file, has a second name, or is too large.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        kind = "is a link" if Path(name).is_symlink() else f"cannot be read ({os.strerror(error.errno)})"
        raise Wrong(f"{NAME}/{name} {kind}, but must be a file: remove it, and the station makes one") from error
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Wrong(f"{NAME}/{name} cannot be read, because it is not a file: remove it, and the station makes one")
        if info.st_nlink > 1:
            raise Wrong(f"{NAME}/{name} is a second name of another file: replace it by a copy")
        if info.st_size > MOST:
            raise Wrong(f"{NAME}/{name} has {info.st_size} bytes and cannot be a key or token: remove it")
        return file.read(MOST).decode("utf-8", "replace")


def write(name: str, text: str) -> None:
    """Write a file into the folder as a whole, without following an existing link."""
    beside = f".{name}-{secrets.token_hex(8)}"  # tempfile would use the whole path, which only root can reach
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
    """Return the lines of authorized_keys that are public keys, and the number of other lines except comments."""
    lines = [line.strip() for line in (read("authorized_keys") or "").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    keys = [line for line in lines if is_public_key(line)]
    return keys, len(lines) - len(keys)


def is_public_key(line: str) -> bool:
    """Check a line as sshd does (sshd(8), AUTHORIZED_KEYS FILE FORMAT): options, type, key in base64, comment."""
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
        raise Wrong(f"{NAME}/authorized_keys holds no public key: write one key a line, as in ~/.ssh/id_ed25519.pub")
    token = read("jupyter_token")
    if token is not None and not re.fullmatch(r"[A-Za-z0-9_-]{16,}", token.replace("\n", "")):
        raise Wrong(f"{NAME}/jupyter_token must be 16 or more letters, digits, - and _: remove it to get a new one")


def keys() -> None:
    found, others = public_keys()
    if others:
        say(f"{others} line(s) of {NAME}/authorized_keys are no public keys and are ignored")
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


def notify() -> None:
    print(read("notify") or "", end="")


if __name__ == "__main__":
    try:
        become_owner()
        if TASK == "keys":  # the first that may change something
            close_to_others()
        {"check": check, "keys": keys, "allowed": allowed, "pair": pair, "token": token, "notify": notify}[TASK]()
    except Wrong as wrong:
        say(f"error: {wrong}")
        sys.exit(2)
    except OSError as error:
        say(f"error: {NAME} cannot be written to: {error.strerror}")
        sys.exit(2)
