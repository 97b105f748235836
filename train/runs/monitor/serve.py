"""Serves the figures over HTTP: every path of it is the page that Prometheus scrapes. Whoever asks changes nothing."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
import sys
import threading
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, NoReturn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client

from train import screen
from train.errors import EXIT_FINISHED, Refused
from train.runs.monitor.collect import Collector

log = logging.getLogger("train.exporter")

_SILENCE = 5.0
"""Seconds that a connection may say nothing."""
_SLOWEST = 30.0
"""Seconds that a connection may take in all: one that says a letter a second would hold its place for ever."""
_AT_ONCE = 100
"""Connections that are served at the same time; others wait to be taken."""


class _OneLine(logging.Formatter):
    """What went wrong may quote a request, or what somebody has written into a run folder."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return screen.printable(super().formatMessage(record))


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE

    def handle(self) -> None:
        """One request, within a time."""
        ending = threading.Timer(_SLOWEST, self._end)
        ending.daemon = True
        ending.start()
        try:
            super().handle()
        finally:
            ending.cancel()

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line a scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = _AT_ONCE  # the library's 5 make a burst of questions wait for seconds

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Without asking a name server what this machine is called, as the library's would."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "train-exporter", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._places.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One that hangs up, or says nothing, is no error of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            log.warning("a request failed: %s: %s", type(error).__name__, error)


def serve(runs: Path, address: str, port: int, recent: int) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then exit.

    Raises:
        Refused: the address or the port cannot be had.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FINISHED))
    handler = logging.StreamHandler()
    handler.setFormatter(_OneLine("train: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(Collector(runs, recent))
    prometheus_client.ProcessCollector(registry=registry)
    with _bound(address, port) as server:
        server.set_app(_tolerant(prometheus_client.make_wsgi_app(registry)))
        host = str(server.server_address[0])
        shown = f"[{host}]" if ":" in host else host
        print(f"figures of {runs} on http://{shown}:{port}/metrics", flush=True)
        server.serve_forever()
    sys.exit(EXIT_FINISHED)


def _tolerant(page: Any) -> Any:
    """The library's page, whose reading of headers stumbles over what no Prometheus sends."""

    def answer(environ: dict[str, Any], start: Any) -> Any:
        try:
            return page(environ, start)
        except Exception as error:
            log.warning("a request failed: %s: %s", type(error).__name__, error)
            start("400 Bad Request", [("Content-Type", "text/plain")])
            return [b"this request is not understood\n"]

    return answer


def _bound(address: str, port: int) -> _Server:
    try:
        family, *_, target = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]  # fmt: skip
    except (socket.gaierror, UnicodeError):
        raise Refused(
            f"--address {address}: no such address; 127.0.0.1 is this machine, 0.0.0.0 every way in"
        ) from None
    try:
        return _Server(family, target)  # type: ignore[arg-type]
    except PermissionError:
        raise Refused(f"--port {port}: ports below 1024 are root's; give another --port") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Refused(f"--port {port} is taken on {address}; give another --port") from None
        raise Refused(f"--address {address}: {error.strerror}; hostname -I lists this machine's") from None
