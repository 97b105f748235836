"""A real browser: Debian's Chromium, driven as a person clicks. Screenshots are kept in build/image-tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Station, Terminal
from playwright.sync_api import Browser, Page, expect

from tests.waiting import eventually

pytestmark = pytest.mark.turns


@pytest.mark.never_forgiven
def test_without_the_token_a_login_page_is_all_there_is(station: Station, page: Page) -> None:
    page.goto(f"{station.url}/lab")
    assert "/login" in page.url
    expect(page.locator("#password_input")).to_be_visible()
    expect(page.get_by_text("make url")).to_be_visible()
    page.fill("#password_input", "wrong")
    page.click("#login_submit")
    expect(page.get_by_text("Invalid credentials")).to_be_visible()


def test_a_login_lands_on_the_page_and_a_tile_leads_there_from_lab(station: Station, page: Page, kept: Path) -> None:
    said: list[str] = []
    page.on("console", lambda message: message.type in ("error", "warning") and said.append(message.text))
    page.goto(station.url)
    assert "/login" in page.url
    page.fill("#password_input", station.token)
    page.click("#login_submit")
    expect(page.get_by_role("heading", name="This machine")).to_be_visible()
    page.wait_for_timeout(5000)  # the page reads the runs anew
    page.screenshot(path=kept / "landing.png")
    assert said == []
    page.goto(f"{station.url}/?token={station.token}")  # what make url prints
    assert page.url.startswith(f"{station.url}/train/")
    answer = page.context.request.get(f"{station.url}/train/")
    assert "script-src 'nonce-" in answer.headers["content-security-policy"]
    assert "uPlot.iife.min" in answer.text()
    page.goto(f"{station.url}/lab?reset")
    with page.context.expect_page() as opened:
        page.locator(".jp-LauncherCard", has_text="Runs").click()
    expect(opened.value.get_by_role("heading", name="This machine")).to_be_visible()
    assert opened.value.url == f"{station.url}/train/"
    assert page.context.request.get(f"{station.url}/page/").status == 404  # the tile's entry proxies nothing


def test_the_token_opens_the_lab_with_notebooks_and_runs(station: Station, page: Page) -> None:
    """It opens where notebooks can be saved; the rest of the checkout is one click away."""
    page.goto(f"{station.url}/lab?token={station.token}&reset")
    expect(page.locator(".jp-DirListing-itemName", has_text="01-the-station").first).to_be_visible(timeout=60_000)
    page.locator(".jp-BreadCrumbs-home").first.click()
    for folder in ("notebooks", "projects", "runs", "train"):
        expect(page.locator(".jp-DirListing-itemName", has_text=folder).first).to_be_visible(timeout=60_000)
    expect(page.locator(".jp-LauncherCard", has_text="TensorBoard")).to_be_visible()


TAB = ".lm-TabBar-tabLabel"


def test_the_first_login_opens_the_welcome_notebook_and_later_ones_what_was_open(
    station: Station, page: Page, kept: Path
) -> None:
    page.goto(f"{station.url}/lab?token={station.token}")
    expect(page.locator(TAB, has_text="01-the-station")).to_be_visible()
    expect(page.locator(".jp-Notebook h1").first).to_contain_text("1. ")
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible()
    page.screenshot(path=kept / "welcome.png")
    assert page.locator(".lm-TabBar-tab.jp-mod-dirty").count() == 0, "it was only opened"
    names = page.locator(".jp-DirListing-itemName")
    assert names.evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).length") == 0
    page.locator(".jp-Notebook a", has_text="docs/tasks.md").click()
    expect(page.locator(".jp-MarkdownViewer h1").first).to_be_visible()
    page.locator(".lm-TabBar-tab", has_text="tasks.md").locator(".lm-TabBar-tabCloseIcon").click()
    page.locator(".lm-TabBar-tab", has_text="01-the-station").locator(".lm-TabBar-tabCloseIcon").click()
    expect(page.locator(".jp-Launcher")).to_be_visible()
    page.wait_for_timeout(3000)  # JupyterLab saves its tabs a moment later
    page.goto(f"{station.url}/lab?token={station.token}")
    expect(page.locator(".jp-Launcher")).to_be_visible()
    assert page.locator(TAB, has_text="01-the-station").count() == 0


def test_a_station_in_chinese_that_opens_lab(make_station: Callable[..., Station], page: Page, kept: Path) -> None:
    mine = make_station("chinese", STATION_LANG="zh_CN", STATION_LANDING="lab")
    mine.make("up")
    page.goto(f"{mine.url}/?token={mine.token}")
    expect(page.locator(TAB, has_text="01-the-station")).to_be_visible()
    expect(page.locator(".lm-MenuBar-itemLabel", has_text="\u6587\u4ef6").first).to_be_visible()  # File
    expect(page.locator(".jp-Notebook h1").first).to_contain_text("1. ")
    assert "/projects/course/zh/" in page.url
    page.screenshot(path=kept / "welcome-zh.png")
    page.goto(f"{mine.url}/lab/tree/README.zh-CN.md")  # the image's other settings hold, too
    expect(page.locator(".jp-MarkdownViewer h1").first).to_be_visible()
    words = mine.ssh_words
    with Terminal(words[0], "-tt", *words[1:], cwd=mine.folder, env=mine.env) as terminal:
        terminal.wait_for("projects/course/zh/")  # the greeting
    mine.make("down")


def test_a_notebook_cell_prints_torchs_version(station: Station, page: Page, kept: Path) -> None:
    page.goto(f"{station.url}/lab?token={station.token}&reset")
    page.locator(".jp-LauncherCard", has_text="Python 3").first.click()
    cell = page.locator(".jp-Notebook .jp-CodeCell .cm-content").first
    cell.click()
    page.keyboard.type("import torch; print('torch', torch.__version__)")
    # JupyterLab forgets what it is told to run before the kernel is there, which under load is seconds later.
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=90_000)
    page.keyboard.press("Shift+Enter")
    expect(page.locator(".jp-OutputArea-output").first).to_contain_text("torch 2.7.1", timeout=90_000)
    page.screenshot(path=kept / "notebook.png")


def test_a_terminal_begins_in_the_checkout_where_paths_of_the_documentation_are(station: Station, page: Page) -> None:
    page.goto(f"{station.url}/lab?token={station.token}&reset")
    page.locator(".jp-LauncherCard", has_text="Terminal").click()
    expect(page.locator(".lm-TabBar-tabLabel", has_text="dev@").first).to_be_visible()  # the prompt is there
    page.keyboard.type("pwd >runs/where\n")
    where = station.folder / "runs" / "where"
    eventually("the terminal has written", lambda: where.exists() and where.read_text())
    assert where.read_text() == "/workspace\n"


@pytest.mark.never_forgiven
def test_a_bookmarked_report_opens_and_other_sites_cannot_read_it(station: Station, page: Page) -> None:
    (station.folder / "runs" / "report.html").write_text("<h1>a report</h1>")
    bookmark = f"{station.url}/files/runs/report.html"
    page.goto(bookmark)
    page.fill("#password_input", station.token)  # another browser: the login page, and from there to the report
    page.click("#login_submit")
    expect(page.locator("h1")).to_have_text("a report")
    page.goto(bookmark)
    expect(page.locator("h1")).to_have_text("a report")
    page.goto(f"data:text/html,<a href='{bookmark}'>here</a>")
    page.click("a")
    expect(page.get_by_text("This link comes from outside JupyterLab")).to_be_visible()
    answer = page.context.request.get(bookmark)  # as a page of another site has it loaded, without a referer
    assert answer.status == 403 and "a report" not in answer.text()


def test_tensorboard_opens_behind_jupyters_token(station: Station, page: Page, kept: Path) -> None:
    station.ssh("train launch digits --name curves --nproc 1 --epochs 2 --follow")
    page.goto(f"{station.url}/tensorboard/")
    assert "/login" in page.url
    page.goto(f"{station.url}/tensorboard/?token={station.token}")
    expect(page).to_have_title("TensorBoard", timeout=90_000)
    expect(page.get_by_text("curves/tensorboard").first).to_be_visible(timeout=60_000)
    page.screenshot(path=kept / "tensorboard.png")


def test_a_second_browser_has_tabs_of_its_own_and_the_first_finds_its_again(
    station: Station, browser: Browser, page: Page
) -> None:
    page.goto(f"{station.url}/lab?token={station.token}&reset")
    page.locator(".jp-LauncherCard", has_text="Terminal").click()
    expect(page.locator(TAB, has_text="dev@").first).to_be_visible()
    page.wait_for_timeout(3000)  # JupyterLab saves its tabs a moment later
    other = browser.new_context()
    try:
        second = other.new_page()
        second.goto(f"{station.url}/lab?token={station.token}&reset")
        expect(second.locator(".jp-Launcher")).to_be_visible()
        assert second.locator(TAB, has_text="dev@").count() == 0
        assert second.locator(".jp-Terminal").count() == 0
        assert second.url.split("?")[0] != page.url.split("?")[0]
    finally:
        other.close()
    page.goto(f"{station.url}/lab?token={station.token}")
    expect(page.locator(TAB, has_text="dev@").first).to_be_visible()


def test_the_readme_opens_as_a_page(station: Station, page: Page, kept: Path) -> None:
    page.goto(f"{station.url}/lab/tree/README.md?token={station.token}")
    expect(page.locator(".jp-MarkdownViewer h1").first).to_be_visible()
    page.screenshot(path=kept / "readme.png")
