"""Serves the figures over HTTP: every path of it is the page that Prometheus scrapes. Whoever asks changes nothing."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import prometheus_client

from train.errors import EXIT_FINISHED, Refused
from train.runs.monitor.collect import Collector


def serve(runs: Path, address: str, port: int, recent: int) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then exit.

    Raises:
        Refused: the address or the port cannot be had.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FINISHED))
    logging.basicConfig(format="train: %(message)s", level=logging.INFO)
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Collector(runs, recent))
    prometheus_client.ProcessCollector(registry=registry)
    try:
        server, thread = prometheus_client.start_http_server(port, address, registry)
    except (socket.gaierror, UnicodeError):
        raise Refused(
            f"--address {address}: no such address; 127.0.0.1 is this machine, 0.0.0.0 every way in"
        ) from None
    except PermissionError:
        raise Refused(f"--port {port}: ports below 1024 are root's; give another --port") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Refused(f"--port {port} is taken on {address}; give another --port") from None
        raise Refused(f"--address {address}: {error.strerror}; hostname -I lists this machine's") from None
    host = str(server.server_address[0])
    shown = f"[{host}]" if ":" in host else host
    print(f"figures of {runs} on http://{shown}:{port}/metrics", flush=True)
    thread.join()
    sys.exit(EXIT_FINISHED)
