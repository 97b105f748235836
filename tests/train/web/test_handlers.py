"""Who gets an answer, what is text and what is markup, and what the buttons do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from web import Web

from tests.train.conftest import Station
from tests.waiting import eventually
from train.web import handlers, texts

pytestmark = pytest.mark.never_forgiven
EXAMPLES = {
    r"/train/?": ["", "?q=a"], r"/train/latest": ["latest"], r"/train/run/([^/]+)": ["run/done", "run/none"],
    r"/train/api/home": ["api/home"], r"/train/api/run/([^/]+)": ["api/run/done", "api/run/none"],
    r"/train/do/(demo)": ["do/demo"], r"/train/do/(stop|resume)/([^/]+)": ["do/stop/done", "do/resume/none"],
    r"/train/static/([0-9a-f]+)/([\w.]+)": ["static/0/page.js", "static/ab/none"],
}  # fmt: skip
"""Maps the addresses of the page to some that fit them."""
ROUTES = [path for paths in EXAMPLES.values() for path in paths]
PAGES = ("", "?q=hostile", "run/done", "run/hostile", "run/done?with=hostile", "run/none")


def test_every_address_is_tried() -> None:
    assert set(EXAMPLES) == set(handlers.paths())


@pytest.mark.parametrize("path", ROUTES)
def test_without_the_token_nothing_answers(path: str, web: Web) -> None:
    for headers in ({}, {"Authorization": "token wrong"}, {"Cookie": f"username-127-0-0-1-{web.port}=none"}):
        asked = web.ask("GET", f"/train/{path}", headers=headers)
        if path.startswith(("api", "static")):
            assert asked.status == 403
        else:
            assert asked.status == 302 and "/login" in asked.headers["Location"]
        assert web.ask("POST", f"/train/{path}", "x=1", headers).status == 403


def test_a_button_needs_the_mark_of_our_form_and_our_own_page(web: Web) -> None:
    assert web.post("do/resume/done", has_xsrf=False).status == 403
    assert web.post("do/resume/done", Origin="http://elsewhere.example").status in (403, 404)
    refused = web.post("do/resume/done")
    assert refused.status == 404 and "no button" in refused.text


def test_a_button_of_another_run_of_this_name_does_nothing(web: Web, shown: Station) -> None:
    before = shown.record("hostile")
    stale = web.post("do/resume/hostile", created="2020-01-01T00:00:00.000+00:00")
    assert stale.status == 404 and "hostile is another run by now; look at it first" in stale.text
    assert shown.record("hostile") == before
    fresh = web.post("do/resume/done", created=web.get("api/run/done").json["values"]["created"])
    assert fresh.status == 404 and "no button" in fresh.text


HANGS = """
import os, sys, time
from train.cli import main
from train.web import look

look._PATIENCE, read = 0.3, look.Runs.look

def waits(runs):
    while os.path.exists("hangs"):
        time.sleep(0.02)
    return read(runs)

look.Runs.look = waits
sys.exit(main(["web", "--port", sys.argv[1]]))
"""


def test_a_folder_that_does_not_answer_is_named_and_stops_no_other_request(station: Station) -> None:
    (station.folder / "hangs").touch()
    page = Web(station, HANGS)
    try:
        said = texts.of("en")("slow")
        for path in ("", "run/none", "latest"):
            answer = page.get(path)
            assert answer.status == 503 and said in answer.text and 'class="skip"' in answer.text, path
        facts = page.get("api/home")
        assert facts.status == 503 and facts.json == {"problem": said}
        assert page.post("do/demo").status == 503 and not station.runs.exists()
        assert page.get("static/0/page.js").status == 404 and page.ask("GET", "/login").status == 200
        (station.folder / "hangs").unlink()
        eventually("the page answers again", lambda: page.get("").status == 200)
    finally:
        (station.folder / "hangs").unlink(missing_ok=True)
        page.close()


@pytest.mark.parametrize("path", [*PAGES, "api/home", "api/run/hostile"])
def test_only_our_own_scripts_run(path: str, web: Web) -> None:
    first, second = web.get(path), web.get(path)
    policy, nonces = first.headers["Content-Security-Policy"], set()
    for one in (first, second):
        nonces |= set(re.findall("'nonce-([^']+)'", one.headers["Content-Security-Policy"]))
        assert one.headers["X-Content-Type-Options"] == "nosniff"
    assert len(nonces) == 2
    assert "default-src 'none'" in policy and "script-src 'nonce-" in policy
    assert "unsafe" not in policy and "script-src 'self'" not in policy
    if not path.startswith("api"):
        nonce = re.findall("nonce-([^']+)'", policy)[0]
        assert all(f'nonce="{nonce}"' in one for one in re.findall(r"<script[^>]*>", first.text))
        assert not re.search(r"\son\w+=|style=|javascript:", first.text)


def test_what_a_run_says_is_text(web: Web) -> None:
    for path in ("", "run/hostile"):
        page = web.get(path).text
        assert "&lt;b&gt;such&lt;/b&gt; layer red &lt;script&gt;alert(1)" in page
        assert "<b>such" not in page and "<i>x" not in page and "<u>m" not in page and "\x1b" not in page
    facts = web.get("api/run/hostile").json
    assert "<b>such</b> layer red" in facts["values"]["reason"]  # the script of the page puts it in as text
    assert "step 3 loss 0.3" in facts["values"]["log"] and "\\u001b" not in web.get("api/run/hostile").text
    assert facts["curves"][0]["line"]["figures"] == {"</script><u>m": [1.5]}


@pytest.mark.parametrize(
    "name", ["..%2f", "..", "%2e%2e", "<script>alert(1)<%2fscript>", ".hidden", "a" * 300, "a%00b", "%0ab"]
)
def test_what_is_no_name_is_not_found(name: str, web: Web) -> None:
    for path in (f"run/{name}", f"api/run/{name}", f"run/done?with={name}"):
        answer = web.get(path)
        assert answer.status == 404, path
        assert "<script>alert" not in answer.text and "Traceback" not in answer.text
    assert web.post(f"do/stop/{name}").status == 404


def test_a_damaged_run_hides_neither_the_others_nor_itself(
    tmp_path: Path, webs: Callable[..., Web], shown: Station
) -> None:
    mine = Station(tmp_path)
    shutil.copytree(shown.runs / "done", mine.runs / "done")
    for name, text in {"empty": "", "list": "[]", "odd": '{"state": "<q>"}'}.items():
        (mine.runs / name).mkdir()
        (mine.runs / name / "run.json").write_text(text)
    shutil.copytree(shown.runs / "done", mine.runs / "unset")
    (mine.runs / "unset" / "config.toml").write_text("= <q>")
    page = webs(mine)
    home = page.get("")
    assert home.status == 200 and "2 damaged run folders" in home.text
    assert all(f'data-key="{name}"' in home.text for name in ("done", "odd", "unset"))
    for name in ("empty", "list", "odd", "unset"):
        answer = page.get(f"run/{name}")
        assert answer.status == (404 if name in ("empty", "list") else 200)
        assert "Traceback" not in answer.text and "<q>" not in answer.text


def test_files_of_the_page_are_kept_by_their_digest(web: Web) -> None:
    (address,) = re.findall(r"/train/(static/\w+/page\.js)", web.get("").text)
    answer = web.get(address)
    assert "immutable" in answer.headers["Cache-Control"] and answer.headers["Content-Type"] == "text/javascript"
    assert "innerHTML" not in answer.text and "eval(" not in answer.text
    assert web.get(re.sub(r"static/\w+", "static/0", address)).status == 404
    assert web.get("static/0/..%2f..%2fpyproject.toml").status == 404


def test_without_uplot_pages_ask_for_none(tmp_path: Path) -> None:
    files = handlers.Files(has_lab=False, prefix=str(tmp_path))
    assert not files.has_uplot
    shared = tmp_path / "share" / "trainstation"
    shared.mkdir(parents=True)
    (shared / handlers.UPLOT).write_text("")
    assert handlers.Files(has_lab=False, prefix=str(tmp_path)).has_uplot


@pytest.mark.turns
def test_a_newcomer_starts_the_demo_stops_it_and_continues(station: Station, webs: Callable[..., Web]) -> None:
    station.more["TRAIN_SLOTS"] = "2"
    page = webs(station, TRAIN_SLOTS="2")
    assert "Start the demo" in page.get("").text
    begun = page.post("do/demo")
    assert begun.status == 303, begun.text
    name = begun.headers["Location"].rpartition("/")[2]
    assert page.get("latest").headers["Location"].endswith(name)
    station.ok("launch", "digits", "--name", "live", "--epochs", 100000)
    station.wait_for_step("live", 1)
    facts = page.get("api/run/live").json
    assert facts["values"]["may_stop"] and not facts["values"]["may_resume"]
    assert page.post("do/stop/live").status == 303
    assert station.wait_for_end("live")["state"] == "stopped"
    facts = page.get("api/run/live").json
    assert facts["values"]["state"] == "stopped" and facts["values"]["may_resume"]
    assert "train resume live" in facts["values"]["next"] and "live" in facts["values"]["said"]
    assert page.post("do/resume/live").status == 303
    station.wait(name="live", until=lambda record: record["state"] == "running")
