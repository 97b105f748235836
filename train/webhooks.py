"""Sends a line of text to a person: to the URL of a chat service, or to a command. Imports no torch.

An address is a secret. No message here prints more of it than the host.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import hmac
import html
import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError

from .errors import Refused, one_line, shortened
from .screen import printable

PATIENCE = 10.0
"""Maximum seconds that a server may take to answer, with the look-up of its name."""
COMMAND_PATIENCE = 60.0
"""Maximum seconds that a command may run."""
VARIABLE = "TRAIN_NOTIFY"
_MOST_READ = 65536
"""Maximum number of bytes that are read of an answer."""
_MOST_SHOWN = 200
"""Maximum number of characters of an answer that are shown."""
_SHORTEST_SECRET = 6
"""Minimum number of characters of a part of a URL that is replaced by … in an answer."""
_SHAPES = {
    "slack": r"/services/T\w+/B\w+/",
    "discord": r"/api/(v\d+/)?webhooks/\d+/",
    "feishu": r"/open-apis/bot/v2/hook/",
    "dingtalk": r"/robot/send$",
    "wecom": r"/cgi-bin/webhook/send$",
}
"""Maps a service to how the path of its URLs begins. ntfy has no path of its own, so the host must begin with ntfy."""
_KEYWORD = "train"
"""In each text to Feishu, DingTalk and WeCom: a robot may take only messages with a keyword."""
_SIGNED = ("feishu", "dingtalk")
_CODES = {"feishu": ("code", "msg"), "dingtalk": ("errcode", "errmsg"), "wecom": ("errcode", "errmsg")}
"""Maps services that answer 200 to a refused message to the fields that say so: a code, 0 if it was taken, and why."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Where messages are sent."""

    secret: str = dataclasses.field(repr=False)
    """The URL, or the command."""
    source: str
    """What the user has set: --notify, TRAIN_NOTIFY or a file."""
    place: str
    """The host of the URL, or `a command`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """What is sent."""

    text: str
    """One line."""
    run: str
    state: str
    step: int
    host: str


class Answer(NamedTuple):
    """What became of a message."""

    is_sent: bool
    text: str
    """What the server or the command answered, without secrets."""


def parse(text: str, source: str) -> Address:
    """Return the address that a user has set.

    Raises:
        Refused: it is no URL to which messages can be sent; the message does not quote it.
    """
    scheme, sign, rest = text.partition("://")
    if not sign or not re.fullmatch(r"[A-Za-z][\w+.-]*", scheme):
        if re.fullmatch(r"([\w-]+\.)+[a-z]{2,}(:\d+)?/\S+", text) and not os.path.exists(text):  # noqa: PTH110 # Path.exists raises for long texts
            raise Refused(f"{source} is no command, and as a URL it begins with https://; add that")
        return Address(text, source, "a command")
    if scheme.lower() not in ("http", "https"):
        raise Refused(f"{source} is a URL of {scheme}; give one of https, or a command")
    try:
        parts = urllib.parse.urlsplit(text)
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        raise Refused(f"{source} is no valid URL; check host and port") from None
    if not parts.hostname or not text.isascii() or not text.isprintable() or " " in rest:
        raise Refused(f"{source} is no valid URL: it needs a host, and no blanks or characters outside of ASCII")
    if "@" in parts.netloc:
        raise Refused(f"{source} has a user or password before its host, which is not sent; use a command: curl")
    if parts.fragment and _service(parts) not in _SIGNED:
        raise Refused(f"{source} has a secret after #, which only Feishu and DingTalk use; leave it out")
    return Address(text, source, f"{parts.hostname}{port}")


def send(address: Address, message: Message, folder: str = "/") -> Answer:
    """Send a message, and wait for the answer. Raises nothing.

    Args:
        folder: Working folder of a command.
    """
    if not address.secret.lower().startswith(("http://", "https://")):
        return _run(address.secret, message, folder)
    found: list[Answer] = []
    # a thread, because neither the look-up of a name nor an answer that drips has a time limit
    thread = threading.Thread(target=lambda: found.append(_post(address, message)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return found[0] if found else Answer(False, f"{address.place} did not answer within {PATIENCE:g} s")


def _run(command: str, message: Message, folder: str) -> Answer:
    """Run a command with the text on its standard input, and in NOTICE. ps does not show it: it is in a variable."""
    environ = {**os.environ, VARIABLE: command, "NOTICE": message.text}
    try:
        process = subprocess.Popen(
            ["sh", "-c", f'eval "${VARIABLE}"'], env=environ, cwd=folder if Path(folder).is_dir() else "/",
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return Answer(False, f"the command cannot be started: {one_line(error)}")
    try:
        process.communicate(f"{message.text}\n".encode(), COMMAND_PATIENCE)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Answer(False, f"the command did not end within {COMMAND_PATIENCE:g} s and was killed")
    return Answer(not process.returncode, f"the command ended with exit code {process.returncode}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for an error: urllib would follow it without the message."""

    def redirect_request(self, *args: Any) -> None:
        return None


def _post(address: Address, message: Message) -> Answer:
    parts = urllib.parse.urlsplit(address.secret)
    service, opener = _service(parts), urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(_request(parts, service, message), timeout=2 * PATIENCE) as response:
            code, body = response.status, response.read(_MOST_READ)
    except HTTPError as error:
        code, body = error.code, b""
        with contextlib.suppress(OSError, http.client.HTTPException), error:
            body = error.read(_MOST_READ)
    except (OSError, http.client.HTTPException, ValueError) as error:
        cause = error.reason if isinstance(error, URLError) else error
        return Answer(False, f"{address.place} cannot be reached: {_hidden(str(cause) or type(cause).__name__, parts)}")
    said = body.decode(errors="replace")
    if 300 <= code < 400:
        return Answer(False, f"{address.place} answered {code}: it leads to another address; give that one")
    is_sent, why = 200 <= code < 300, "" if 200 <= code < 300 else said
    if is_sent and service in _CODES:
        is_sent, why = _verdict(said, *_CODES[service])
    why = _hidden(why, parts)
    return Answer(is_sent, f"{address.place} answered {code}" + (f": {why}" if why else ""))


def _service(parts: urllib.parse.SplitResult) -> str:
    """Return the service that a URL belongs to; '' if it is none that is known."""
    if (parts.hostname or "").startswith("ntfy."):
        return "ntfy"
    return next((name for name, pattern in _SHAPES.items() if re.match(pattern, parts.path)), "")


def _verdict(said: str, field: str, reason: str) -> tuple[bool, str]:
    """Return whether a service that answers 200 to everything took a message, and why not."""
    try:
        answer = json.loads(said)
        return answer[field] in (0, "0"), "" if answer[field] in (0, "0") else str(answer.get(reason) or answer[field])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return False, f"no answer of this service: {said}"


def _request(parts: urllib.parse.SplitResult, service: str, message: Message) -> urllib.request.Request:
    """Return the request that a service takes."""
    text, secret, moment = message.text, urllib.parse.unquote(parts.fragment), time.time()
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "trainstation"}
    query, body = parts.query, dict[str, Any]()
    if service in _CODES:
        text = f"{_KEYWORD}: {text}"
    if service == "ntfy":
        title = f"{message.run} {message.state}".encode("ascii", "replace").decode()
        headers |= {"Content-Type": "text/plain; charset=utf-8", "Title": printable(title)}
    elif service == "slack":  # it reads <…> as links and calls
        body = {"text": html.escape(text, quote=False)}
    elif service == "discord":
        body = {"content": text, "allowed_mentions": {"parse": []}}
    elif service == "feishu":  # it reads <at …> as a call
        body = {"msg_type": "text", "content": {"text": text.replace("<at", "< at")}}
        if secret:
            stamp = str(int(moment))
            body |= {"timestamp": stamp, "sign": _signature(key=f"{stamp}\n{secret}", text="")}
    elif service in ("dingtalk", "wecom"):
        body = {"msgtype": "text", "text": {"content": text}}
        if secret:
            stamp = str(int(moment * 1000))
            sign = urllib.parse.quote_plus(_signature(key=secret, text=f"{stamp}\n{secret}"))
            query = f"{query}&timestamp={stamp}&sign={sign}"
    else:
        body = dataclasses.asdict(message)
    url = urllib.parse.urlunsplit(parts._replace(query=query, fragment=""))
    data = text if service == "ntfy" else json.dumps(body, ensure_ascii=False)
    return urllib.request.Request(url, data.encode(errors="replace"), headers, method="POST")


def _signature(*, key: str, text: str) -> str:
    return base64.b64encode(hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()).decode()


def _hidden(text: str, parts: urllib.parse.SplitResult) -> str:
    """Return a foreign text as one short line, with … in place of what it repeats of a URL."""
    found = {*re.split(r"[/?&=#]", f"{parts.path}/{parts.query}"), parts.fragment}
    for secret in sorted(found | {*map(urllib.parse.unquote, found)}, key=len, reverse=True):
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, "…")
    return shortened(" ".join(printable(text).split()), _MOST_SHOWN)
