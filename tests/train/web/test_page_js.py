"""The page in a real browser, where playwright and Chromium are installed: `pip install playwright`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from web import Web

from tests.train.conftest import Station
from tests.waiting import eventually

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.minutes, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")]
KEPT = os.environ.get("PAGE_PICTURES", "")
"""Folder in which to keep pictures of the pages, for people who look at them."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens pages in a browser that has logged in. A script that was stopped or has failed fails the test."""
    problems: list[str] = []

    def make(web: Web, path: str = "", **options: Any) -> Any:
        page = browser.new_context(viewport={"width": 1280, "height": 800}, **options).new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if "Content Security" in said.text else None)
        page.goto(f"http://127.0.0.1:{web.port}/train/?token={web.token.read_text().strip()}")
        page.goto(f"http://127.0.0.1:{web.port}/train/{path}")
        return page

    make.problems = problems  # type: ignore[attr-defined]
    yield make
    assert not problems


def keep(page: Any, name: str) -> None:
    if KEPT:
        page.screenshot(path=Path(KEPT) / f"{name}.png", full_page=True)


def test_a_run_is_watched_while_it_is_killed_and_comes_back(
    station: Station, webs: Callable[..., Web], opened: Callable[..., Any]
) -> None:
    order = ("--epochs", 100000, "--log.every_steps", 1, "--checkpoint.every_steps", 20, "--no-lease")
    station.ok("launch", "digits", "--name", "live", *order)
    station.wait_for_step("live", 30)
    web = webs(station)
    home, page = opened(web), opened(web, "run/live")
    step, table = page.locator("[data-f=step]").first, page.locator("[data-list=attempts] > [data-key]")
    before = step.text_content()
    eventually("the step moves on", lambda: step.text_content() != before)
    page.select_option("[name=range]", "0.5")
    page.locator("#facts > summary").press("Enter")
    page.locator("#folded > summary").press("Enter")
    panels = page.locator("#panels figure")
    assert panels.count() >= 1 and page.locator("#machine-panels figure").count() > 2
    panels.first.evaluate("(figure) => { figure.dataset.same = 'yes'; }")
    os.kill(station.record("live")["pids"]["ranks"][0], signal.SIGKILL)
    eventually("the second attempt is shown", lambda: table.count() == 2)
    eventually("home tells of it", lambda: "1 restart" in (home.locator("[data-key=live]").text_content() or ""))
    log = page.locator("#output")
    eventually("the log goes on", lambda: "step" in (log.text_content() or ""))
    assert page.input_value("[name=range]") == "0.5" and page.locator("#facts[open]").count() == 1
    assert panels.first.evaluate("(figure) => figure.dataset.same") == "yes"  # drawn in place, not anew
    page.get_by_role("button", name="Stop").click()
    eventually("it has stopped", lambda: "stopped" in (page.locator(".head .state").text_content() or ""))
    page.get_by_role("button", name="Resume").click()
    eventually("it runs again", lambda: "running" in (page.locator(".head .state").text_content() or ""))
    keep(page, "live")


def test_a_zoom_stays_and_a_double_click_shows_all(web: Web, opened: Callable[..., Any]) -> None:
    page = opened(web, "run/done")
    over = page.locator("#panels .u-over").first
    box = over.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=5)
    page.mouse.up()
    eventually("the part is shown", lambda: page.input_value("[name=range]") == "own")
    page.wait_for_timeout(5000)  # two refreshes
    assert page.input_value("[name=range]") == "own"
    over.dblclick()
    eventually("all is shown", lambda: page.input_value("[name=range]") == "1")
    page.select_option("[name=axis]", "time")
    page.check("[name=log]")
    assert page.locator("#panels figure").count() >= 2


@pytest.mark.parametrize("kind", ["wide", "narrow", "dark", "zh"])
def test_pages_fit_and_what_runs_say_stays_text(kind: str, web: Web, opened: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"dark": {"color_scheme": "dark"}, "zh": {"locale": "zh-CN"}}.get(kind, {})
    for name, path in {
        "home": "",
        "run": "run/done",
        "hostile": "run/hostile",
        "both": "run/done?with=hostile",
    }.items():
        page = opened(web, path, **options)
        if kind == "narrow":
            page.set_viewport_size({"width": 400, "height": 800})
        page.wait_for_timeout(2500)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), path
        assert page.locator("main b, main i, main u").filter(has_text="such").count() == 0
        keep(page, f"{name}-{kind}")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is (kind != "dark")


def test_without_uplot_the_curve_is_the_notebooks(web: Web, opened: Callable[..., Any]) -> None:
    page = opened(web)
    page.route("**/uPlot*", lambda route: route.abort())
    page.goto(f"http://127.0.0.1:{web.port}/train/run/done")
    page.wait_for_timeout(2500)
    assert page.locator("#svg polyline").is_visible() and not page.locator("#controls").is_visible()


def test_a_script_in_a_run_folder_cannot_use_the_page(web: Web, shown: Station, opened: Callable[..., Any]) -> None:
    """The address of another script of this server, put into the page, is not run: it lacks the mark."""
    page = opened(web, "run/done")
    address = page.evaluate("document.querySelector('script[src*=\"page.js\"]').src")
    ran = page.evaluate(
        """(address) => new Promise((done) => {
            const script = document.createElement("script");
            script.src = address;
            script.onload = () => done(true);
            script.onerror = () => done(false);
            document.head.append(script);
        })""",
        address,
    )
    assert not ran and "violates" in opened.problems.pop()  # type: ignore[attr-defined]


def test_a_lost_server_is_said_and_the_page_recovers_by_itself(
    shown: Station, webs: Callable[..., Web], opened: Callable[..., Any]
) -> None:
    web = webs(shown)
    page = opened(web)
    web.process.send_signal(signal.SIGSTOP)
    page.route("**/api/home*", lambda route: route.abort())
    eventually("it is said", lambda: page.locator("#offline").is_visible())
    web.process.send_signal(signal.SIGCONT)
    page.unroute("**/api/home*")
    eventually("it has recovered", lambda: not page.locator("#offline").is_visible())
    page.context.clear_cookies()
    page.wait_for_url("**/login*")


def test_the_last_visit_is_a_time_in_the_browser(web: Web, opened: Callable[..., Any]) -> None:
    page = opened(web)
    page.wait_for_timeout(1000)
    assert not page.locator(".news").is_visible()
    page.route("**/api/home*", lambda route: route.abort())  # so that the page does not note that it was seen
    page.evaluate("localStorage.setItem('train-seen', String(Date.now() / 1000 - 3600))")
    page.unroute("**/api/home*")
    page.reload()
    eventually("the failed run is told of first", lambda: "hostile" in page.locator(".news li").first.text_content())
    assert "1 h ago" in page.locator(".news h2").text_content()
    page.reload()
    eventually("a reload keeps it", lambda: page.locator(".news li").count() == 2)


def test_without_scripts_all_can_be_read(web: Web, opened: Callable[..., Any]) -> None:
    page = opened(web, "run/done?rank=0", java_script_enabled=False)
    assert page.locator("#svg polyline").is_visible() and page.locator("[data-key=compute]").is_visible()
    assert "finished after 46 steps" in page.locator("#output").text_content()
    page.goto(f"http://127.0.0.1:{web.port}/train/?q=hostile")
    assert [row.get_attribute("data-key") for row in page.locator("li.run").all()] == ["hostile"]
