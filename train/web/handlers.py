"""The handlers of the page. Each is one of Jupyter's, and asks for the login itself."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jinja2 import Environment, FileSystemLoader
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.utils import url_path_join
from tornado.web import Application, HTTPError, authenticated

from .. import errors, module_runner, screen
from ..errors import Refused
from . import curves, home, run_page, texts
from .look import Look, Place
from .texts import Texts

P = ParamSpec("P")
T = TypeVar("T")
_HERE = Path(__file__).parent
UPLOT = "uPlot.iife.min.js"
_KINDS = {".js": "text/javascript", ".css": "text/css"}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
)
"""Not `script-src 'self'`: the same server sends every file of a run folder, scripts too."""
_PATIENCE = 30.0
"""Seconds that a request waits for a command. The command continues after that."""
_EVERY = 1.0
"""Seconds for which an answer to the script of a page is used again."""
_LONGEST = 200
"""Maximum number of characters of a search."""
_under_way: set[tuple[str, str]] = set()
"""Commands of buttons that are being carried out."""
_MOST_COMPARED = 7
"""Maximum number of runs beside the first one."""


def add(app: Application, runs: Path, has_lab: bool) -> None:
    """Add the page to a server.

    Args:
        runs: The folder of the runs.
        has_lab: Whether the server has JupyterLab, and so sends files.
    """
    base, given = app.settings["base_url"], {"look": Look(runs), "files": Files(has_lab)}
    app.add_handlers(".*$", [(url_path_join(base, path), handler, given) for path, handler in paths().items()])


def paths() -> dict[str, type[Page]]:
    """Map the addresses of the page, as patterns, to their handlers."""
    return {
        r"/train/?": Home, r"/train/latest": Latest, r"/train/run/([^/]+)": OneRun, r"/train/api/home": HomeFacts,
        r"/train/api/run/([^/]+)": RunFacts, r"/train/do/(demo)": Act, r"/train/do/(stop|resume)/([^/]+)": Act,
        r"/train/static/([0-9a-f]+)/([\w.]+)": Static,
    }  # fmt: skip


class Files:
    """What pages load: our style and script, and uPlot where it is installed."""

    def __init__(self, has_lab: bool, prefix: str = sys.prefix) -> None:
        self.has_lab = has_lab
        found = [*(_HERE / "static").iterdir()]
        found += [Path(prefix) / "share" / "trainstation" / name for name in (UPLOT, "uPlot.min.css")]
        contents = {path.name: path.read_bytes() for path in found if path.is_file()}  # no request waits for a disk
        self._found = {name: (hashlib.sha256(one).hexdigest()[:16], one) for name, one in contents.items()}
        self.has_uplot = UPLOT in self._found
        self.templates = Environment(
            loader=FileSystemLoader(_HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
            finalize=_printable,
        )  # fmt: skip
        self.templates.policies["json.dumps_kwargs"] = {}  # curves in their order, not in that of their names

    def address(self, name: str) -> str:
        """Return the part of an address after /train/."""
        return f"static/{self._found[name][0]}/{name}"

    def read(self, digest: str, name: str) -> bytes | None:
        """Return a file by its address; None: there is none."""
        known, content = self._found.get(name, ("", None))
        return content if known == digest else None


def _printable(value: Any) -> Any:
    """Return a value of a page without characters that reverse or hide text. Keep markup as it is."""
    return value if hasattr(value, "__html__") else "\n".join(map(screen.printable, str(value).split("\n")))


class Page(JupyterHandler):
    """A handler of the page."""

    is_page = True
    """False: it answers programs, so a missing login is an error."""

    def initialize(self, look: Look, files: Files) -> None:
        """Take what all handlers share."""
        self.look, self.files = look, files

    @functools.cached_property
    def nonce(self) -> str:
        """The mark of our own scripts in this answer."""
        return secrets.token_urlsafe(16)

    @property
    def content_security_policy(self) -> str:
        """What a browser may load and run for this answer."""
        return _POLICY.format(nonce=self.nonce)

    @functools.cached_property
    def texts(self) -> Texts:
        """The words of the page in the language of the browser."""
        return texts.of(self.request.headers.get("Accept-Language", ""))

    @property
    def base(self) -> str:
        """The address of the page on this server."""
        return url_path_join(self.base_url, "train") + "/"

    @property
    def place(self) -> Place:
        """What a page is made from."""
        lab = url_path_join(self.base_url, "lab") if self.files.has_lab else ""
        files = url_path_join(self.base_url, "files") if self.files.has_lab else ""
        return Place(self.look, self.texts, self.base, lab=lab, files=files, root=self.settings["server_root_dir"])

    def get_login_url(self) -> str:
        """Return where to log in; programs get 403 instead."""
        if not self.is_page:
            raise HTTPError(403)
        return str(super().get_login_url())

    def page(self, template: str, **values: Any) -> Callable[..., str]:
        """Begin a page. Return what writes its text, with further values; any thread may call that."""
        self.set_header("Cache-Control", "no-store")
        self.set_header("Referrer-Policy", "same-origin")
        return functools.partial(
            self.files.templates.get_template(template).render, t=self.texts, place=self.place, nonce=self.nonce,
            files=self.files, xsrf=self.xsrf_token.decode(), **values,
        )  # fmt: skip

    async def send(self, make: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Send facts to the script of a page, made in the thread that looks at the runs."""
        key = ("json", self.texts.language, self.request.uri or "")  # several pages may ask the same
        text = await self.tell(
            self.look.kept, key, _EVERY, lambda: json.dumps(make(*arguments, **named), allow_nan=False)
        )
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.finish(text)

    async def tell(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function in the thread that looks at the runs. What it refuses is answered by 404."""
        try:
            return await self.look.call(function, *arguments, **named)
        except Refused as problem:
            raise HTTPError(404, "%s", str(problem)) from None
        except TimeoutError:
            raise HTTPError(503, "%s", self.texts("slow")) from None

    def _request_summary(self) -> str:
        """Return the request for the log: an address may hold the token."""
        return f"{self.request.method} {self.request.path}"

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log an error without the request, whose address may hold the token."""
        if not isinstance(value, HTTPError):
            self.log.error("%s: %s", self._request_summary(), value, exc_info=(typ, value, tb))

    def number(self, name: str, otherwise: int = 0) -> int:
        """Return a number of the address."""
        text = self.get_query_argument(name, "")
        return errors.whole(text) if errors.is_whole(text) and len(text) < 12 else otherwise

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send what is wrong as a line, never a traceback."""
        error = (kwargs.get("exc_info") or (None, None))[1]
        line = self.texts("error", status_code)
        if isinstance(error, HTTPError) and error.log_message and status_code in (*range(400, 500), 503):
            line = errors.one_line(error.log_message % error.args if error.args else error.log_message)
        if self.is_page:
            self.finish(self.page("problem.html", line=line, api="", data={"lists": {}})())
        else:
            self.set_header("Content-Type", "application/json")
            self.finish(json.dumps({"problem": line}))


class Home(Page):
    """The machine and the runs."""

    @authenticated
    async def get(self) -> None:
        query, page = self.get_query_argument("q", "")[:_LONGEST], self.number("page", 1)
        write = self.page("home.html", query=query, api=self.base + "api/home")
        self.finish(await self.tell(lambda: write(data=home.content(self.place, query, page))))


class HomeFacts(Page):
    """The same for its script."""

    is_page = False

    @authenticated
    async def get(self) -> None:
        query, page, since = self.get_query_argument("q", "")[:_LONGEST], self.number("page", 1), self.number("since")
        await self.send(home.content, self.place, query, page, since=since)


class OneRun(Page):
    """A run, or several that are compared."""

    @authenticated
    async def get(self, name: str) -> None:
        write = self.page("run.html", machine=curves.machine_names(), api=f"{self.base}api/run/{name}")

        def made() -> str:
            data, svg, others = run_page.whole(self.place, name, self.asked)
            return write(data=data, svg=svg, others=others)

        self.finish(await self.tell(made))

    @property
    def asked(self) -> run_page.Asked:
        """What the address asks for."""
        others = [one.strip() for one in self.get_query_argument("with", "").split(",") if one.strip()]
        mark = self.get_query_argument("mark", "")
        return run_page.Asked(tuple(others[:_MOST_COMPARED]), rank=self.number("rank"), mark=mark)


class RunFacts(OneRun):
    """The same for its script."""

    is_page = False

    @authenticated
    async def get(self, name: str) -> None:
        await self.send(run_page.content, self.place, name, self.asked)


class Latest(Page):
    """The run that was started last."""

    @authenticated
    async def get(self) -> None:
        self.redirect(self.base + await self.tell(home.latest, self.look))


class Act(Page):
    """Does what a button says, by the command that a user could type."""

    @authenticated
    async def get(self, *_: str) -> None:
        """A login that a button has asked for ends at the first page."""
        self.redirect(self.base)

    @authenticated
    async def post(self, what: str, name: str = "") -> None:
        address = f"run/{name}" if name else "latest"
        if (what, name) not in _under_way:  # else the button was pressed twice
            _under_way.add((what, name))
            try:
                address = await self._do(what, name)
            finally:
                _under_way.discard((what, name))
        self.redirect(self.base + address, status=303)

    async def _do(self, what: str, name: str) -> str:
        """Carry out the command of a button. Return the part of the address after /train/ of what to show next."""
        if name:
            await self.tell(run_page.check_may, self.look, name, what, created=self.get_body_argument("created", ""))
        elif await self.tell(self.look.found):
            return "latest"  # the demo is for a folder without runs
        command = [what, name] if name else ["launch", "digits"]
        code, out, said = await _carry_out(command, self.look.folder)
        started = out.split()[-1] if out.split() and not name else name
        await self.tell(self.look.remember, started, "" if code == 0 and not name else said)
        return f"run/{started}" if started else ""


async def _carry_out(command: Sequence[str], runs: Path) -> tuple[int, str, str]:
    """Run `train COMMAND`. Return its exit code, its output, and the last line of what it said."""
    done = await asyncio.create_subprocess_exec(
        *module_runner.command("train", *command, "--runs", str(runs)), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    reading = asyncio.ensure_future(done.communicate())
    try:
        out, said = await asyncio.wait_for(asyncio.shield(reading), _PATIENCE)
    except TimeoutError:  # it continues
        return 1, "", f"still working: train {' '.join(command)}"
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    return done.returncode or 0, out.decode(errors="replace"), lines[-1] if lines else ""


class Static(Page):
    """Our style and script. The digest in the address changes with the file, so browsers keep it."""

    is_page = False

    @authenticated
    async def get(self, digest: str, name: str) -> None:
        content = self.files.read(digest, name)
        if content is None:
            raise HTTPError(404)
        self.set_header("Content-Type", _KINDS[Path(name).suffix])
        self.set_header("Cache-Control", "private, max-age=31536000, immutable")
        self.finish(content)
