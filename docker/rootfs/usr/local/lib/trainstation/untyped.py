"""Runs a command that cannot type into the terminal it has: python3 -I untyped.py COMMAND…

A process may put letters into the input of its session's terminal as if they were typed (TIOCSTI). Where root's shell
reads there next, code of dev's would so become root's. Kernels since 6.2 can forbid it, where their host does. Here a
filter of system calls does (seccomp(2)), for the command and all that it starts; nothing else about it changes.
"""

import ctypes
import errno
import os
import struct
import sys

_TYPES = (0x5412, 0x541C)
"""TIOCSTI, and TIOCLINUX, which pastes on a console."""
_IOCTL = {
    0xC000003E: (16, 514, 0x40000000 | 16, 0x40000000 | 514),  # x86-64, and x32 with it
    0x40000003: (54,),  # i386
    0xC00000B7: (29,),  # arm64
    0x40000028: (54,),  # arm
}
"""The number of ioctl, by what linux/audit.h calls the architecture: a program may use the calls of an older one."""
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_NO_NEW_PRIVS, _SET_FILTER, _SPEC_ALLOW = 38, 1, 4
"""The last: as fast as without; what shares secrets with itself alone needs no defence from itself."""
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _REQUEST = 0, 4, 24
"""Where they lie in struct seccomp_data; of the request its lower half, for the kernel looks at no more."""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def program() -> bytes:
    """The filter: struct sock_filter, one after the other."""
    asked = [(_LOAD, 0, 0, _REQUEST)]
    asked += [(_EQUAL, len(_TYPES) - place, 0, request) for place, request in enumerate(_TYPES)]
    asked += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    whole = [(_LOAD, 0, 0, _ARCHITECTURE)]
    for architecture, numbers in _IOCTL.items():
        found = [(_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
        own = [(_LOAD, 0, 0, _NUMBER), *found, (_RETURN, 0, 0, _ALLOW), *asked]
        whole += [(_EQUAL, 0, len(own), architecture), *own]
    whole.append((_RETURN, 0, 0, _REFUSE))  # calls of no architecture known
    return b"".join(struct.pack("HBBI", *one) for one in whole)


def forbid() -> None:
    """Take from this process, for good, what types.

    Raises:
        OSError: this kernel has no such filters.
    """

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    libc, text = ctypes.CDLL(None, use_errno=True), program()
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    number = _SECCOMP.get(os.uname().machine)
    wanted = ctypes.byref(Program(len(text) // 8, text))
    if number is None or libc.syscall(number, _SET_FILTER, _SPEC_ALLOW, wanted):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    try:
        forbid()
    except OSError as error:
        why = os.strerror(error.errno or errno.ENOSYS)
        sys.exit(f"train: dev's code could type into this terminal of root's ({why}); use: docker exec --user dev")
    os.execvp(sys.argv[1], sys.argv[1:])
