"""The page as a process of its own, and a browser's requests without a browser."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from tests.ports import free_port
from tests.waiting import eventually


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Web:
    """`train web` in a station, on a free port."""

    def __init__(self, station: Any, program: str = "", **env: str) -> None:
        """`program`: what starts it instead, given the port."""
        self.port = free_port()
        station.more |= env
        self.log = station.folder / "web.log"
        with self.log.open("w") as log:
            if program:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", program, str(self.port)], cwd=station.folder, stdout=log, stderr=log,
                    env=station.environment("web"),
                )  # fmt: skip
            else:
                self.process = station.start("web", "--port", self.port, stdout=log)
        for name in env:
            del station.more[name]
        self.token = Path(station.environment()["TRAIN_STATE"], "web-token")
        eventually("the page answers", self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.ask("GET", "/login").status == 200
        except OSError:
            return False

    @property
    def with_token(self) -> dict[str, str]:
        return {"Authorization": f"token {self.token.read_text().strip()}"}

    def ask(self, method: str, path: str, body: str = "", headers: dict[str, str] | None = None) -> Answer:
        """Send one request; redirects are not followed."""
        asking = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        form = {"Content-Type": "application/x-www-form-urlencoded"} if body else {}
        asking.request(method, path, body or None, form | (headers or {}))
        answer = asking.getresponse()
        text = answer.read().decode()
        asking.close()
        return Answer(answer.status, answer.headers, text)

    def get(self, path: str, **headers: str) -> Answer:
        """Get a page of a user who has logged in."""
        return self.ask("GET", f"/train/{path}", headers=self.with_token | headers)

    def cookies(self) -> dict[str, str]:
        """Log in as a browser does. Return its cookies."""
        answer = self.ask("GET", f"/train/?token={self.token.read_text().strip()}")
        return dict(re.match(r"([^=]+)=([^;]*)", one).groups() for one in answer.headers.get_all("Set-Cookie"))  # type: ignore[union-attr,misc]

    def post(self, path: str, *, has_xsrf: bool = True, created: str = "", **headers: str) -> Answer:
        """Press a button, as a browser does that has logged in."""
        cookies = self.cookies()
        header = "; ".join(f"{name}={value}" for name, value in cookies.items())
        body = urlencode({"_xsrf": cookies["_xsrf"] if has_xsrf else "wrong", "created": created})
        return self.ask("POST", f"/train/{path}", body, {"Cookie": header} | headers)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
