"""Run a command that cannot type into its own terminal: python3 -I untyped.py COMMAND…

A process may put characters into the input of its session's terminal as if they were typed (TIOCSTI). If root's shell
reads there next, it would run commands from dev's code. Kernels since 6.2 can forbid that, but not every host does so.
Here a filter of system calls (seccomp(2)) forbids it, for the command and its children. Nothing else changes.
"""

import ctypes
import errno
import os
import struct
import sys

_TYPES = (0x5412, 0x541C)
"""Requests of ioctl to refuse: TIOCSTI, and TIOCLINUX, which pastes on a console."""
_MACHINES = {
    "x86_64": (0xC000003E, (16, 514, 0x40000000 | 16, 0x40000000 | 514), 317),  # x32's ioctl with it
    "aarch64": (0xC00000B7, (29,), 277),
}
"""Maps a machine to its number in linux/audit.h, the system call numbers of ioctl, and the number of seccomp."""
_NO_NEW_PRIVS, _SET_FILTER, _SPEC_ALLOW = 38, 1, 4
"""The last avoids the slower protection against speculative execution, which is not needed here."""
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _REQUEST = 0, 4, 24
"""Offsets in struct seccomp_data, in bytes. Of the request we read the lower half, like the kernel."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def program(architecture: int, ioctl: tuple[int, ...]) -> bytes:
    """Return the filter as a sequence of struct sock_filter. It refuses all calls of another architecture."""
    whole = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE)]
    for place, values in ((_NUMBER, ioctl), (_REQUEST, _TYPES)):
        whole.append((_LOAD, 0, 0, place))
        whole += [(_EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
        whole.append((_RETURN, 0, 0, _ALLOW))
    whole.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("HBBI", *one) for one in whole)


def forbid() -> None:
    """Forbid this process and its children to type into a terminal, for good.

    Raises:
        OSError: this kernel has no such filters.
    """

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, "seccomp")
    *what, seccomp = machine
    libc, text = ctypes.CDLL(None, use_errno=True), program(*what)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    wanted = ctypes.byref(Program(len(text) // 8, text))
    if libc.syscall(seccomp, _SET_FILTER, _SPEC_ALLOW, wanted):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    try:
        forbid()
    except OSError as error:
        why = os.strerror(error.errno or errno.ENOSYS)
        sys.exit(f"train: dev's code could type into this root terminal ({why}); use: docker exec --user dev")
    os.execvp(sys.argv[1], sys.argv[1:])
