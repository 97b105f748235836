"""The page of runs in a real browser, against the station: what its script does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Station
from playwright.sync_api import Browser, Page, expect

from tests.waiting import eventually

pytestmark = pytest.mark.turns

SCRIPT = """
for step in range(1, 4):
    print(f"\\x1b[32mstep\\x1b[0m {step} loss {1 / step} <i>x</i> 3", flush=True)
raise ValueError("no <b>such</b> layer \\x1b[31mred\\x1b[0m <script>alert(1)</script>")
"""
ODD = {"step": 3, "</script><u>m": 1.5, "constructor": 2.0, "toString": 1.0, "__proto__": 1.0}
"""A line of metrics whose names are those of objects in scripts, and markup."""
AMBER = """(canvas) => {
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    return data.filter((red, place) => place % 4 === 0 && data[place + 3] > 0 && red - data[place + 2] > 60).length;
}"""
"""Counts what is drawn in the colour of restarts."""


@pytest.fixture(autouse=True)
def clean(page: Page) -> Iterator[list[str]]:
    """What the browser complains of: errors of scripts, and what the page's policy has stopped."""
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda line: line.type in ("error", "warning") and said.append(line.text))
    yield said
    assert [line for line in said if "Failed to load resource" not in line] == []


@pytest.fixture
def hostile(station: Station) -> str:
    """A run that failed, with markup in its reason, its log and its metrics."""
    if not (station.folder / "runs" / "hostile").exists():
        (station.folder / "runs" / "hostile.py").write_text(SCRIPT)
        station.dev("train", "launch", "--script", "runs/hostile.py", "--name", "hostile", "--max-restarts", "0")
        eventually("it has failed", lambda: station.show("hostile").get("state") == "failed")
        station.dev("sh", "-c", f"echo '{json.dumps(ODD)}' >>runs/hostile/metrics.jsonl")
    return "hostile"


@pytest.fixture
def done(station: Station) -> str:
    """A run that has finished."""
    if not (station.folder / "runs" / "done").exists():
        order = ("--nproc", "1", "--epochs", "3", "--log.every_steps", "1")
        station.dev("train", "launch", "digits", "--name", "done", *order, "--follow")
    return "done"


EVIL = """
<body><form method="post" action="/train/do/resume/hostile"></form><script>
(async () => {
    const found = [];
    const method = "POST";
    for (const options of [{}, { mode: "no-cors", method }, { headers: { "X-XSRFToken": "x" }, method }]) {
        const address = options.method ? "/train/do/resume/hostile" : "/train/run/hostile";
        const told = await fetch(address, { credentials: "include", ...options }).catch(() => null);
        found.push(told && told.type !== "opaque" ? told.status : 0);
    }
    let cookies = "none";
    try { cookies = document.cookie; } catch {}
    document.title = `${found} ${cookies}`;
    document.forms[0].submit();
})();
</script>
"""
"""A page that reads another one with the login of who looks at it, and presses its button."""


def enter(station: Station, page: Page, path: str = "") -> None:
    with page.expect_response("**/train/api/**"):
        page.goto(f"{station.url}/train/{path}?token={station.token}")
    page.wait_for_timeout(200)  # the page shows the answer
    assert page.url == f"{station.url}/train/{path}", "the address no longer has the token"


def polled(page: Page) -> None:
    """Waits until the page has shown another answer."""
    page.wait_for_event("response", lambda answer: "/train/api/" in answer.url)
    page.wait_for_timeout(200)


def step_at(page: Page, share: float) -> float:
    """Rests the pointer on the first curve, at this share of its width. Returns the step beside its title."""
    over = page.locator("#panels .u-over").first

    def told() -> str:
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        assert box
        page.mouse.move(box["x"] + 1 + (box["width"] - 3) * share, box["y"] + 50)
        text = page.locator("#panels figcaption .soft").first.text_content()
        return f"{text} " if over.bounding_box() == box else ""  # another panel may come meanwhile, and move this one

    return float(eventually("the curve rests", told).partition("\u00b7 ")[2] or 0)


def test_a_run_is_watched_while_it_is_killed_and_comes_back(station: Station, page: Page, kept: Path) -> None:
    order = ("--nproc", "1", "--epochs", "100000", "--log.every_steps", "1", "--checkpoint.every_steps", "20")
    station.dev("train", "launch", "digits", "--name", "watched", *order)
    enter(station, page, "run/watched")
    head, over = page.locator(".head"), page.locator("#panels .u-over").first
    expect(over).to_be_visible()
    page.locator("#folded > summary").press("Enter")
    page.locator("#panels figure").first.evaluate("(figure) => { figure.dataset.same = 'yes'; }")
    eventually("the curve grows", lambda: step_at(page, 1) > 40)
    canvas = page.locator("#panels canvas").first
    assert canvas.evaluate(AMBER) == 0
    before = step_at(page, 1)
    station.root("kill", "-9", str(station.show("watched")["pids"]["ranks"][0]))  # type: ignore[index]
    expect(page.locator("[data-list=attempts] > [data-key]")).to_have_count(2)
    expect(head.locator(".lost")).to_contain_text("1 restart")
    expect(head.locator(".state")).to_contain_text("running")
    expect(page.locator("#log-of")).to_contain_text("attempt 2")
    eventually("the curve grows on", lambda: step_at(page, 1) > before + 20)
    eventually("the restart is marked", lambda: canvas.evaluate(AMBER) > 0)
    assert page.locator("#panels figure").first.get_attribute("data-same") == "yes", "it is drawn in place"
    page.screenshot(path=kept / "run-watched.png", full_page=True)
    page.get_by_role("button", name="Stop").click()
    expect(head.locator(".state")).to_contain_text("stopped")
    assert station.show("watched")["state"] == "stopped"
    page.get_by_role("button", name="Resume").click()
    expect(head.locator(".state")).to_contain_text("running")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    station.dev("train", "rm", "watched")
    expect(page.locator("#offline")).to_contain_text("there is no run watched")
    assert head.inner_text().strip() == "watched", "neither a state nor a button"
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(4000)
    assert asked == []


def test_a_zoom_and_what_was_chosen_stay(station: Station, page: Page, done: str) -> None:
    enter(station, page, f"run/{done}")
    over, chosen = page.locator("#panels .u-over").first, page.locator("[name=range]")
    box = over.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=5)
    page.mouse.up()
    expect(chosen).to_have_value("own")
    view = "sessionStorage.getItem(`train-view ${location.pathname}`)"
    zoom = json.loads(page.evaluate(view))["zoom"]
    page.check("[name=log]")  # draws the panels anew
    page.locator("#folded > summary").click()  # and more of them
    polled(page)
    page.reload()
    expect(chosen).to_have_value("own")
    expect(page.locator("[name=log]")).to_be_checked()
    expect(page.locator("#machine-panels figure").first).to_be_visible()
    eventually("each panel begins where the zoom does", lambda: step_at(page, 0) >= zoom["min"] - 2)
    assert json.loads(page.evaluate(view))["zoom"] == zoom
    page.locator("#panels .u-over").first.dblclick()
    expect(chosen).to_have_value("1")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain HTTP
    page.locator("[data-copy]").first.click()
    expect(page.locator("[data-copy]").first).to_have_text("copied")
    assert page.evaluate("document.getSelection().toString()").startswith("train ")


@pytest.mark.never_forgiven
def test_what_runs_say_stays_text_and_pages_fit(station: Station, browser: Browser, hostile: str, kept: Path) -> None:
    for kind, options in {
        "wide": {"viewport": {"width": 1280, "height": 800}},
        "narrow": {"viewport": {"width": 400, "height": 800}},
        "dark": {"color_scheme": "dark"},
        "zh": {"locale": "zh-CN"},
    }.items():
        page, said = browser.new_context(**options).new_page(), list[str]()
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.on("console", lambda line, said=said: said.append(line.text))
        for name, path in {"home": "", "hostile": f"run/{hostile}"}.items():
            enter(station, page, path)
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), kind
            assert page.locator("main b, main i, main u, main script[src]").filter(has_text="such").count() == 0
            assert "no <b>such</b> layer red <script>" in page.locator("main").inner_text()
            page.screenshot(path=kept / f"page-{name}-{kind}.png", full_page=True)
        titles = page.locator("#panels figcaption").all_text_contents()
        assert {"constructor2", "toString1", "__proto__1", "</script><u>m1.5"} <= set(titles)
        assert said == []
        page.context.close()


def test_the_last_visit_is_when_somebody_was_there(station: Station, page: Page, hostile: str) -> None:
    """A tab that stays open overnight tells what happened as soon as somebody is back."""
    seen, since = "localStorage.getItem('train-seen')", "Number(localStorage.getItem('train-since'))"
    enter(station, page)
    polled(page)
    assert page.evaluate(seen) is None, "nobody has touched anything"
    page.mouse.move(200, 200)
    eventually("it was a visit", lambda: page.evaluate(seen))
    page.goto(f"{station.url}/train/run/{hostile}")
    page.evaluate("localStorage.setItem('train-seen', String(Date.now() / 1000 - 7200))")
    page.mouse.move(300, 300)
    polled(page)
    assert page.evaluate(since) == 0, "the news were not shown there"
    page.goto(f"{station.url}/train/")
    expect(page.locator(".news h2")).to_contain_text("2 h ago")
    expect(page.locator(".news li").filter(has_text=hostile)).to_be_visible()


def test_a_lost_connection_is_said_and_the_page_recovers_by_itself(station: Station, page: Page, hostile: str) -> None:
    enter(station, page)
    row = page.locator(f"[data-list=ended] > [data-key={hostile}]")
    row.locator("a").first.focus()
    row.evaluate("(row) => row.parentElement.insertBefore(row, row.parentElement.querySelector('template'))")
    row.locator("a").first.focus()  # the next answer moves the row to its place
    polled(page)
    expect(row.locator("a").first).to_be_focused()
    page.context.set_offline(True)
    expect(page.locator("#offline")).to_contain_text("Not connected")
    page.context.set_offline(False)
    expect(page.locator("#offline")).to_be_hidden()
    page.context.clear_cookies()
    page.wait_for_url("**/login*")


def test_without_uplot_or_scripts_the_page_is_read(station: Station, browser: Browser, page: Page, done: str) -> None:
    page.route("**/uPlot*", lambda route: route.abort())
    enter(station, page, f"run/{done}")
    polled(page)
    expect(page.locator("#svg polyline")).to_be_visible()
    expect(page.locator("#controls")).to_be_hidden()
    plain = browser.new_context(java_script_enabled=False).new_page()
    plain.goto(f"{station.url}/train/run/{done}?token={station.token}")
    expect(plain.locator("#svg polyline")).to_be_visible()
    expect(plain.locator("#output")).to_contain_text("finished after")
    expect(plain.locator("[data-copy]").first).to_be_hidden()
    plain.context.close()


@pytest.mark.never_forgiven
def test_a_script_in_a_run_folder_cannot_use_the_page(station: Station, page: Page, clean: list[str]) -> None:
    """Another script of this server, put into the page, is not run: it lacks the mark."""
    (station.folder / "runs" / "evil.js").write_text("document.title = 'evil'")
    enter(station, page)
    ran = page.evaluate(
        """(address) => new Promise((done) => {
            const script = document.createElement("script");
            script.src = address;
            script.onload = () => done(true);
            script.onerror = () => done(false);
            document.head.append(script);
        })""",
        f"{station.url}/files/runs/evil.js",
    )
    assert not ran and "violates" in clean.pop()


@pytest.mark.never_forgiven
def test_a_page_in_a_run_folder_can_neither_read_nor_press(
    station: Station, page: Page, hostile: str, clean: list[str]
) -> None:
    (station.folder / "runs" / "evil.html").write_text(EVIL)
    attempts = station.show(hostile)["attempts"]
    enter(station, page)
    page.goto(f"{station.url}/files/runs/evil.html")
    expect(page).to_have_title("0,0,0 none")
    page.wait_for_timeout(2000)
    assert page.url.endswith("/files/runs/evil.html"), "the form was not sent"
    assert station.show(hostile)["attempts"] == attempts
    clean.clear()  # what the browser has refused
