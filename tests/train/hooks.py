"""A server on the loopback that takes what is sent to a hook, and answers as the test says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclasses.dataclass
class Received:
    """A request."""

    path: str
    headers: dict[str, str]
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)


class Hook:
    """The server while it lives."""

    def __init__(self, port: int) -> None:
        self.received: list[Received] = []
        self.code, self.answer, self.headers = 200, "{}", dict[str, str]()
        self.seconds = 0.0
        """Before each byte of an answer."""
        self.over = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                hook.received.append(Received(self.path, dict(self.headers), text))
                self.send_response(hook.code)
                for name, value in hook.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    for letter in hook.answer.encode():
                        self.wfile.write(bytes([letter]))
                        hook.over.wait(hook.seconds)

            def log_message(self, *args: object) -> None:
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = False  # they are joined: a thread left behind would be taken for one of a task
        self.place = f"127.0.0.1:{self.server.server_port}"
        self.url = f"http://{self.place}"

    @property
    def texts(self) -> list[str]:
        """What our own JSON had as text."""
        return [one.body["text"] for one in self.received]

    def query(self) -> dict[str, str]:
        """The query of the last request."""
        return dict(pair.split("=", 1) for pair in urlsplit(self.received[-1].path).query.split("&"))


@contextlib.contextmanager
def hook(port: int = 0) -> Iterator[Hook]:
    """Context manager with such a server."""
    made = Hook(port)
    thread = threading.Thread(target=made.server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.over.set()
        made.server.shutdown()
        made.server.server_close()
