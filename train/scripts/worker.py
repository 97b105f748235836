"""What the zygote forks for a script: its ranks, which become the script, and the store at which they connect."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import NoReturn

from .. import caches
from ..supervise import memory
from ..zygote.server import SIGNALS


def script_rank(command: list[str], files: list[int]) -> NoReturn:
    """Become one rank of a script, in a fork of the zygote.

    Args:
        command: Arguments after `python -u`.
        files: Standard files, the run's lock, its folder, and leases.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    memory.lower_than_agent()
    for fd in (files[3], *files[5:]):  # the script and what it starts hold the run's lock and leases,
        os.set_inheritable(fd, True)
    os.set_inheritable(files[4], False)  # but not its folder
    caches.provide()
    os.execv(sys.executable, [sys.executable, "-u", *command])


def host_store(files: list[int]) -> NoReturn:
    """Host the store at which the ranks of a script connect, as torchrun does.

    Args:
        files: Standard files, and a socket. It writes its port there, and answers each byte: 1 if a rank has written
            into the store, else 0.
    """
    import torch.distributed as dist

    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        fd = listening.detach()
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=False, master_listen_fd=fd
    )
    with contextlib.suppress(OSError), socket.socket(fileno=files[3]) as agent:
        agent.sendall(str(port).encode())
        while agent.recv(1):
            agent.sendall(b"1" if store.num_keys() else b"0")
    while True:
        signal.pause()
