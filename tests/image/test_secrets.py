"""Secrets are in files only, and Jupyter answers nobody without its token."""

import contextlib
import json
import re
import socket

import pytest
import requests
from conftest import Station, run

pytestmark = pytest.mark.never_forgiven


def secrets(station: Station) -> list[str]:
    key = (station.folder / ".secrets" / "id_ed25519").read_text().splitlines()[1:-1]
    host_key = station.root("cat", "/etc/trainstation/hostkeys/ssh_host_ed25519_key").stdout.splitlines()[1:-1]
    return [station.token, *key, *host_key]


@pytest.mark.parametrize("where", ["history", "image", "container", "processes", "environments", "log"])
def test_no_secret_shows(station: Station, where: str) -> None:
    text = {
        "history": lambda: run("docker", "history", "--no-trunc", "trainstation:runtime").stdout,
        "image": lambda: run("docker", "image", "inspect", "trainstation:runtime").stdout,
        "container": lambda: run("docker", "inspect", station.container).stdout,
        "processes": lambda: station.root("ps", "-eo", "args", "ww").stdout,
        "environments": lambda: station.dev("bash", "-c", "cat /proc/[0-9]*/environ 2>/dev/null; true").stdout,
        "log": lambda: station.log,
    }[where]()
    assert len(text) > 100
    assert not [secret for secret in secrets(station) if secret in text]


def test_no_host_key_and_no_certificate_of_the_builder_is_in_the_image(station: Station) -> None:
    looked_for = "find / -xdev \\( -name 'ssh_host_*' -o -name ca_bundle \\) -size +0 -not -path '/proc/*'"
    done = run("docker", "run", "--rm", "--entrypoint", "bash", "trainstation:runtime", "-c", looked_for)
    assert done.stdout == ""


def test_secret_files_are_for_their_owner_only(station: Station) -> None:
    folder = station.folder / ".secrets"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert station.root("stat", "-c", "%U %a", "/run/trainstation/jupyter_token").stdout == "dev 400\n"


# Asks a server configured as the station's for its own routes, and makes the shortest path that fits each.
ROUTES = r"""
import json, re
from jupyterlab.labapp import LabApp

def fit(parsed):
    text = ""
    for op, value in parsed:
        op = str(op)
        if op in ("LITERAL", "NOT_LITERAL"): text += chr(value) if op == "LITERAL" else "x"
        elif op == "ANY": text += "x"
        elif op == "IN":
            kind, first = value[0]
            text += {"LITERAL": lambda v: chr(v), "RANGE": lambda v: chr(v[0])}.get(str(kind), one_of)(first)
        elif op in ("MAX_REPEAT", "MIN_REPEAT"): text += fit(value[2]) * max(1, value[0])
        elif op == "SUBPATTERN": text += fit(value[3])
        elif op == "BRANCH": text += fit(value[1][0])
    return text

def one_of(kind):
    return {"CATEGORY_DIGIT": "1"}.get(str(kind), "x")

paths = {}
def walk(router):
    for rule in router.rules:
        if getattr(rule.target, "rules", None):
            walk(rule.target)
        pattern = getattr(rule.matcher, "regex", None)
        if pattern is not None:
            paths[pattern.pattern] = fit(re._parser.parse(pattern.pattern))

walk(LabApp.initialize_server(argv=["--port=18999", "--no-browser"]).web_app.default_router)
print("PATHS " + json.dumps({path: bool(re.fullmatch(pattern, path)) for pattern, path in paths.items()}))
"""


@pytest.fixture(scope="module")
def routes(station: Station) -> list[str]:
    done = station.dev("python3", "-c", ROUTES)
    found = json.loads(re.search(r"PATHS (.*)", done.stdout)[1])
    assert len(found) > 60
    assert sum(found.values()) > 0.9 * len(found)  # the paths do fit their routes
    return sorted(found)


# Public by design: the login page, the code and pictures pages are drawn with, the server's version number, and the
# redirect that drops a slash at the end.
PUBLIC = re.compile(
    r"^/(login|logout|static/.*|favicon\.ico|robots\.txt|api/?|custom/.*"
    r"|x/|lab/api/themes/.*|lab/extensions/.*|server-proxy/icon/.*)$"
)


def test_every_route_turns_away_who_has_no_token(station: Station, routes: list[str]) -> None:
    answered = []
    for path in routes:
        if not path.startswith("/") or PUBLIC.match(path):  # "x": what fits the rule for everything else
            continue
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            answer = requests.request(method, station.url + path, timeout=20)
            at_login = answer.url.startswith(f"{station.url}/login?")
            if not (at_login or answer.status_code in (401, 403, 405)):  # 405: there is no such request
                answered.append(f"{method} {path}: {answer.status_code} {answer.url}")
    assert not answered, "\n".join(answered)


@pytest.mark.parametrize("path", ["/api/kernels", "/api/contents/", "/api/terminals", "/tensorboard/"])
def test_a_wrong_token_is_refused(station: Station, path: str) -> None:
    answer = requests.get(
        station.url + path, headers={"Authorization": "token wrong"}, allow_redirects=False, timeout=20
    )
    assert answer.status_code in (302, 401, 403)


def memory_of_jupyter(station: Station) -> int:
    """Megabytes."""
    status = station.root("cat", f"/proc/{station.service_pid('jupyter')}/status").stdout
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) // 1024


STRANGERS: list[tuple[str, dict[str, str]]] = [
    ("POST /api/contents/x", {}),
    ("POST /login", {}),
    ("PUT /api/contents/x?token=wrong", {"Authorization": "token wrong"}),
    ("POST /files/x", {"Cookie": 'username-localhost="2|1:0|10:1|18:username-localhost|4:eHg=|0123"'}),
]


def test_what_strangers_send_is_not_kept_in_memory(station: Station) -> None:
    """Connections stay open, as a body that was read would stay in memory."""
    before, megabyte = memory_of_jupyter(station), b"x" * 2**20
    with contextlib.ExitStack() as held:
        for line, headers in STRANGERS:
            for length in ("Content-Length: 400000000", "Transfer-Encoding: chunked"):
                one = held.enter_context(socket.create_connection(("127.0.0.1", station.jupyter_port), timeout=30))
                extra = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
                one.sendall(f"{line} HTTP/1.1\r\nHost: localhost\r\n{extra}{length}\r\n\r\n".encode())
                chunk = megabyte if "Length" in length else b"100000\r\n" + megabyte + b"\r\n"
                with pytest.raises(OSError, match=r"reset|Broken pipe"):
                    for _ in range(400):
                        one.sendall(chunk)
        assert memory_of_jupyter(station) < before + 60
    # those who are known send as much as ever: by token, and by the cookie of a login
    body = {"type": "file", "format": "text", "content": "a" * 30_000_000}
    session = requests.Session()
    for path in ("/login", f"/lab?token={station.token}"):
        first = session.get(station.url + path, timeout=60, allow_redirects=False)
        cookies = first.raw.headers.getlist("Set-Cookie")
        assert cookies and all("SameSite=Lax" in cookie for cookie in cookies), "other sites could use the login"
    known = ({"Authorization": f"token {station.token}"}, {"X-XSRFToken": session.cookies["_xsrf"]})
    for by, headers in ((requests, known[0]), (session, known[1])):
        answer = by.put(f"{station.url}/api/contents/runs/large.txt", json=body, headers=headers, timeout=120)
        assert answer.ok, answer.text
    station.dev("rm", "/workspace/runs/large.txt")


def test_ports_are_published_on_this_machine_only(station: Station) -> None:
    ports = json.loads(station.inspect("{{json .HostConfig.PortBindings}}"))
    assert {binding["HostIp"] for bindings in ports.values() for binding in bindings} == {"127.0.0.1"}


def test_nobody_inside_can_gain_rights(station: Station) -> None:
    assert "NoNewPrivs:\t1" in station.ssh("cat /proc/self/status").stdout
    assert station.ssh("grep CapEff /proc/self/status").stdout.split()[1] == "0" * 16
    assert json.loads(station.inspect("{{json .HostConfig.CapDrop}}")) == ["ALL"]
