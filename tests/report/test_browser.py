"""The page in a real browser: what is clicked and typed, what is shown, what is loaded and run."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ir.plain import source
from tests.report.studies import HOSTILE, hostile_study, small_study

from kernelbraid.report import render

pytestmark = pytest.mark.slow

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium: one on the path, or the one that playwright installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
        own = driver.chromium.executable_path
        if found is None and not Path(own).exists():
            pytest.skip("no Chromium here: apt-get install chromium-headless-shell, or playwright install")
        launched = driver.chromium.launch(executable_path=found or own, args=["--no-sandbox"])
        yield launched
        launched.close()


class Opened:
    """A page, and what happened on it that should not have."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.page = browser.new_context(viewport={"width": 1280, "height": 900}, **context).new_page()
        self.loaded: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.loaded.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(path.as_uri())
        if context.get("java_script_enabled", True):
            self.page.wait_for_function("document.documentElement.dataset.ready === 'yes'")

    def selected(self) -> str:
        return str(self.page.inner_text("#detail dd code"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("small")
    store, shas = small_study(folder / "s")
    render.write(store, folder / "report.html")
    return folder / "report.html", shas


def test_nodes_are_walked_by_keys(browser: Any, small: tuple[Path, dict[str, str]]) -> None:
    path, shas = small
    opened = Opened(browser, path)
    page = opened.page
    page.focus("#graph")
    walked = []
    for key in ("Home", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "End"):
        page.keyboard.press(key)
        walked.append(opened.selected())
    names = {sha: name for name, sha in shas.items()}
    assert [names[sha] for sha in walked] == ["root", "best", "merged", "merged", "slow", "best", "best"]
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "detail"
    before = page.get_attribute("#graph", "viewBox")
    page.focus("#graph")
    page.keyboard.press("+")
    assert page.get_attribute("#graph", "viewBox") != before
    page.keyboard.press("0")
    assert page.get_attribute("#graph", "viewBox") == before
    assert opened.said == [] and opened.loaded == [path.as_uri()]


def test_a_click_shows_everything_about_a_node(browser: Any, small: tuple[Path, dict[str, str]]) -> None:
    path, shas = small
    opened = Opened(browser, path)
    page = opened.page
    place = page.evaluate(
        """() => { const node = document.querySelector("#graph .node.incumbent").getBoundingClientRect();
                   return [node.x + node.width / 2, node.y + node.height / 2]; }"""
    )
    page.mouse.click(*place)
    page.wait_for_selector("#detail pre")
    assert opened.selected() == shas["best"]
    text = page.inner_text("#detail")
    for words in ("larger blocks", "no gain", "-10%", "toy/1/batch/decode", "promoted: faster", "it gains"):
        assert words in text, words
    assert "4 of 4 requirements checked hold, 3,000 elements compared as bits" in text
    patch = page.inner_text("#detail pre")
    assert "-BLOCK = 32" in patch and "+BLOCK = 65" in patch
    page.click("text=whole source")
    assert page.inner_text("#detail pre") == source(1).text
    page.click(f"#list a[href='#i-{shas['broken'][:12]}']")
    broken = page.inner_text("#detail")
    assert "toy/1/batch/decode broke: out, request 0, row 1: 1.0 (3f800000) against nan (7fc00000)" in broken
    page.goto(f"{path.as_uri()}#i-{shas['merged'][:12]}")
    page.wait_for_selector(f"#detail button:has-text('changes from {shas['slow'][:12]}')")
    page.click(f"#detail button:has-text('changes from {shas['slow'][:12]}')")
    page.wait_for_selector("#detail pre:has-text('-BLOCK = 67')")
    page.fill("#filter", "crashed")
    assert page.inner_text("#shown") == "1 of 7"
    assert page.locator("#list tbody tr:visible").count() == 1
    assert opened.said == []


def test_hostile_texts_do_not_run(browser: Any, tmp_path: Path) -> None:
    with hostile_study(tmp_path / "s") as store:
        render.write(store, tmp_path / "report.html")
    opened = Opened(browser, tmp_path / "report.html")
    page = opened.page
    page.focus("#graph")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#detail pre")
    page.click("text=whole source")
    shown = page.evaluate("document.querySelector('#detail').textContent")
    assert shown.count(HOSTILE) >= 8
    assert page.evaluate("window.hostile") is None
    assert opened.loaded == [(tmp_path / "report.html").as_uri()] and opened.said == []
    # Even markup that got into the page would not run: its content security policy refuses.
    page.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hostile = 5\">')"
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.hostile") is None
    assert any("Content Security Policy" in words for words in opened.said)


def test_dark_mode_print_and_no_scripts(browser: Any, small: tuple[Path, dict[str, str]]) -> None:
    path, shas = small
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = Opened(browser, path), Opened(browser, path, color_scheme="dark")
    assert light.page.evaluate(ground) != dark.page.evaluate(ground)
    paper = dark.page
    paper.emulate_media(media="print")
    assert paper.evaluate(ground) == light.page.evaluate(ground)
    assert paper.evaluate("getComputedStyle(document.querySelector('#tools')).display") == "none"
    scrolling = paper.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollHeight > e.clientHeight)"
    )
    assert scrolling == []
    bare = Opened(browser, path, java_script_enabled=False).page
    assert not bare.is_visible("#tools") and not bare.is_visible("#detail") and bare.is_visible("noscript p")
    assert bare.is_visible(f"#i-{shas['crashed'][:12]}") and bare.is_visible("#graph")
    narrow = Opened(browser, path, color_scheme="dark").page
    narrow.set_viewport_size({"width": 400, "height": 800})
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
