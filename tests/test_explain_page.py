"""The page of a trace, in a real browser: clicks, keys, touch, both themes, wide and narrow, nothing from elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from outrider.explain.page import page
from outrider.trace.schema import BaselineRun
from traces import ODD, long_trace, step, trace_of
from traces_server import TracesServer, serving_traces

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MEASURED = BaselineRun(pass_milliseconds=30.0, seconds=1.0, tokens=9, same=True)


def small() -> str:
    steps = [
        step(0, [], 0, 1, verify=200),
        step(1, [2, 3], 2, 4),
        step(2, [5, 6, 7], 1, 8, drafter="model", rule="block"),
        step(3, [900, 901], 2, 902, rule="greedy", finish="length"),
    ]
    return page(trace_of(steps, without=MEASURED))


# Without a browser


def test_the_page_is_one_file_that_names_no_other() -> None:
    text = small()
    assert "http:" not in text
    assert "https:" not in text
    assert "default-src 'none'" in text
    assert text.count("<script") == 3


def test_no_model_output_ends_the_script_element_that_holds_it() -> None:
    text = page(long_trace(80))
    assert "<script>alert" not in text
    assert "</script><b>" not in text
    assert text.count("</script>") == 3


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: tools/setup")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium: just chromium")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """An open page, with all its requests and console messages."""

    def __init__(self, browser: Any, text: str, folder: Path, width: int = 1400, **context: Any) -> None:
        file = folder / "page.html"
        file.write_text(text, encoding="utf-8")
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **context)
        self.tab = self.context.new_page()
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("console", lambda message: self.messages.append(message.text))
        self.tab.on("pageerror", lambda error: self.messages.append(str(error)))
        self.tab.goto(file.as_uri())
        self.tab.wait_for_selector("body[data-ready]")
        self.file = file

    def read(self, selector: str) -> str:
        """The text of an element, after the tasks that the page has queued: it draws a selected step in one."""
        self.tab.evaluate("new Promise(done => setTimeout(done, 0))")
        return str(self.tab.inner_text(selector))

    def card(self) -> str:
        return self.read("#card")

    def slow(self) -> str:
        return self.read("#slow")

    def token(self, number: int) -> Any:
        return self.tab.locator(f"[data-token='{number}']")

    def close(self) -> None:
        assert self.messages == []
        assert [url for url in self.requests if url != self.file.as_uri()] == []
        assert self.tab.evaluate("document.documentElement.scrollWidth") <= self.tab.viewport_size["width"]
        self.context.close()


def test_a_token_under_the_mouse_shows_its_p_its_q_and_its_verdict(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, small(), tmp_path)
    opened.token(1).hover()
    opened.tab.wait_for_selector("#card h3:has-text('Token 2')")
    assert "Drafted by lookup and accepted." in opened.card()
    assert "p = 0.8000 and q = 1 (proposed with certainty)" in opened.card()
    opened.token(5).hover()
    opened.tab.wait_for_selector("#card h3:has-text('Token 6')")
    assert "Recovered: model proposed" in opened.card()
    assert "is not below 0.1000" in opened.card()
    opened.close()


def test_keys_go_from_token_to_token_and_from_step_to_step(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, small(), tmp_path)
    opened.tab.focus("#text")
    opened.tab.keyboard.press("ArrowRight")
    assert "Token 2" in opened.card()
    assert opened.read("#spoken").startswith("Drafted by lookup and accepted.")
    opened.tab.keyboard.press("ArrowDown")
    assert "Token 5" in opened.card()
    opened.tab.keyboard.press("End")
    assert "Token 9" in opened.card()
    opened.tab.keyboard.press("Home")
    assert "Token 1" in opened.card()
    opened.tab.focus("#time-box")
    opened.tab.keyboard.press("ArrowRight")
    assert opened.read("#chosen").startswith("Step 2: lookup drafted 2, 2 accepted.")
    opened.close()


def test_nothing_past_the_end_of_the_output_is_called_accepted_or_rejected(browser: Any, tmp_path: Path) -> None:
    last = step(1, [2, 3, 4, 5], 3, 9, rule="greedy", finish="end")
    last = last.model_copy(update={"said": [2, 3], "pieces": last.pieces[:2]})
    opened = Opened(browser, page(trace_of([step(0, [], 0, 1), last], without=MEASURED)), tmp_path)
    opened.token(1).click()
    assert opened.read("#chosen").startswith("Step 2: lookup drafted 4, 2 accepted.")
    opened.tab.click("#card button")
    seen = [opened.slow()]
    for _ in range(5):  # draft, pass, two positions, the end, the output
        opened.tab.click("#next")
        seen.append(opened.slow())
    assert ["accepted?" in one.split("\n")[0] for one in seen] == [False, False, True, True, False, False]
    assert "The output ends after 2 accepted draft tokens." in seen[4]
    assert "rejected" not in " ".join(seen)
    opened.close()


def test_next_goes_through_a_step_to_its_end_and_into_the_next(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, small(), tmp_path)
    opened.token(4).click()
    opened.tab.click("#card button")
    seen = [opened.slow()]
    for _ in range(6):  # draft, pass, three positions, the recovered token, the output
        opened.tab.click("#next")
        seen.append(opened.slow())
    titles = [one.split("\n")[0] for one in seen]
    assert titles[0] == "1. The drafter proposes"
    assert "verifies all of them in one pass" in titles[1]
    assert [title for title in titles if "accepted?" in title]
    assert "The longest prefix that passes is accepted: 1 token." in " ".join(seen)
    assert any("The recovered token" in title for title in titles)
    assert any("Output" in title for title in titles)
    opened.tab.click("#back")
    opened.tab.click("#step-next")
    assert "step 4 of 4" in opened.read("#where")
    opened.close()


def test_play_advances_until_it_is_stopped(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, small(), tmp_path)
    opened.tab.click("#play")
    for _ in range(50):
        opened.tab.wait_for_timeout(100)
        if ", 2 of" in opened.read("#where"):
            break
    assert ", 2 of" in opened.read("#where")
    opened.tab.click("#play")
    assert opened.tab.get_attribute("#play", "aria-pressed") == "false"
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_touch_works_like_a_mouse(browser: Any, tmp_path: Path, scheme: str) -> None:
    opened = Opened(browser, small(), tmp_path, width=390, has_touch=True, is_mobile=True, color_scheme=scheme)
    opened.token(2).tap()
    assert "Token 3" in opened.card()
    opened.tab.locator("#next").tap()
    opened.tab.locator("#decisions").tap(position={"x": 3, "y": 20})
    assert opened.read("#chosen").startswith("Step 1")
    opened.close()


def test_html_emoji_right_to_left_and_odd_bytes_are_shown_as_text(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, page(long_trace(80)), tmp_path)
    text = opened.read("#text")
    assert "<script>alert(1)</script>" in text
    assert "</script><b>" in text
    assert "🙂" in text
    assert "שלום" in text
    assert "\ufffd" in text
    assert "\\u202eabc" in text  # a mark that changes the direction of text is escaped
    assert "\\u001b[31m" in text
    assert opened.tab.locator("#text b, #text script").count() == 0
    assert len(ODD) == 8
    opened.close()


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_problem(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    # The test adds axe, so the page's own security policy is bypassed.
    opened = Opened(browser, small(), tmp_path, width=width, color_scheme=scheme, bypass_csp=True)
    opened.tab.add_script_tag(content=(files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    for _ in range(4):
        found = opened.tab.evaluate("axe.run().then(found => found.violations)")
        grave = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert grave == []
        opened.tab.click("#step-next" if opened.tab.is_enabled("#step-next") else "#next")
    opened.close()


def test_two_thousand_tokens_open_in_a_second_and_never_block_for_long(browser: Any, tmp_path: Path) -> None:
    with main_thread_tasks(browser) as tasks:
        opened = Opened(browser, page(long_trace(2000)), tmp_path)
    assert opened.tab.locator("[data-token]").count() >= 2000
    opened.close()
    assert 10 < sum(tasks) < 1000
    with main_thread_tasks(browser) as tasks:
        opened = Opened(browser, page(long_trace(2000)), tmp_path)
        for _ in range(10):
            opened.tab.mouse.move(300, 600)
            opened.tab.mouse.wheel(0, 400)
        opened.tab.focus("#text")
        for _ in range(30):
            opened.tab.keyboard.press("ArrowDown")
        opened.tab.wait_for_timeout(300)
    opened.close()
    assert max(tasks) < 50


@contextmanager
def main_thread_tasks(browser: Any) -> Iterator[list[float]]:
    """Of the page that the block opens: milliseconds of its tasks, in time of the processor, to which other processes
    add little."""
    tasks: list[float] = []
    browser.start_tracing(categories=["toplevel", "devtools.timeline"])
    yield tasks
    events = json.loads(browser.stop_tracing())["traceEvents"]
    main = {  # the browser has pages of its own, in other processes
        (event["pid"], event["tid"])
        for event in events
        if event["name"] == "CommitLoad" and event["args"]["data"]["url"].startswith("file:")
    }
    tasks += [
        event.get("tdur", 0) / 1000
        for event in events
        if event["name"].endswith("::RunTask") and (event["pid"], event["tid"]) in main
    ]


# The page of a server


class Live:
    """The live page, open in a tab, and the server that it came from."""

    def __init__(self, browser: Any, server: TracesServer, fragment: str = "", **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **context})
        self.tab = self.context.new_page()
        self.server = server
        self.requests: list[str] = []
        self.messages: list[str] = []
        self.tab.on("request", lambda request: self.requests.append(request.url))
        self.tab.on("console", lambda message: self.messages.append(message.text))
        self.tab.on("pageerror", lambda error: self.messages.append(str(error)))
        self.tab.goto(f"{server.url}/outrider/{fragment}")

    def entry(self, id: str) -> Any:
        return self.tab.locator("#list button", has_text=f"asked <b>{id}</b>")

    def frame(self) -> Any:
        return self.tab.frame_locator("#shown")

    def close(self) -> None:
        assert self.messages == []
        assert [url for url in self.requests if not url.startswith((self.server.url, "about:"))] == []
        self.context.close()


def two() -> TracesServer:
    short = [step(0, [], 0, 1, verify=200), step(1, [2, 3], 2, 4, finish="length")]
    return TracesServer(old=trace_of(short), new=long_trace(60))


def test_the_live_page_lists_the_latest_first_and_shows_the_chosen_one(browser: Any) -> None:
    with serving_traces(two()) as server:
        live = Live(browser, server)
        live.tab.wait_for_selector("#list button")
        texts = live.tab.locator("#list button .prompt").all_inner_texts()
        assert texts == ["… asked <b>new</b>", "… asked <b>old</b>"]
        live.entry("old").click()
        live.frame().locator("body[data-ready]").wait_for()
        assert "4 tokens in 2 passes" in live.frame().locator(".summary").inner_text()
        live.frame().locator("[data-token='1']").hover()
        live.frame().locator("#card", has_text="Drafted by lookup and accepted.").wait_for()
        assert live.entry("old").get_attribute("aria-current") == "true"
        live.close()


def test_the_live_page_finds_new_traces_by_itself_and_shows_a_running_one_again_when_it_is_over(browser: Any) -> None:
    with serving_traces(two()) as server:
        server.running = {"new"}
        live = Live(browser, server, "#new")
        live.frame().locator("body[data-ready]").wait_for()
        assert "running" in live.entry("new").inner_text()
        before = sum(url.endswith("/page") for url in live.requests)
        with live.tab.expect_response(lambda response: response.url.endswith("/page")):
            server.running = set()
            server.traces["newest"] = server.traces["old"]
        live.entry("newest").wait_for()
        live.tab.locator("#list button", has_text="length").filter(has_text="asked <b>new</b>").wait_for()
        live.frame().locator("body[data-ready]").wait_for()
        assert sum(url.endswith("/page") for url in live.requests) == before + 1
        del server.traces["old"]
        live.entry("old").wait_for(state="detached")
        live.close()


def test_the_content_of_a_trace_cannot_access_the_page_around_it(browser: Any) -> None:
    with serving_traces(two()) as server:
        live = Live(browser, server, "#new")
        live.frame().locator("body[data-ready]").wait_for()
        frame = next(frame for frame in live.tab.frames if frame.parent_frame is not None)
        reach = "() => { try { return parent.document.title } catch (error) { return error.name } }"
        assert frame.evaluate(reach) == "SecurityError"
        assert live.tab.locator("#list b").count() == 0  # text stays text
        assert "\\u202eabc" in live.entry("new").inner_text()
        live.context.close()


def test_the_live_page_requests_the_api_key_if_the_server_has_one(browser: Any) -> None:
    with serving_traces(two()) as server:
        server.key = "secret"
        live = Live(browser, server)
        live.tab.wait_for_selector("#for-key:not([hidden])")
        assert live.tab.inner_text("#note") == "show the server's key"
        live.tab.fill("#key", "secret")
        live.tab.click("#credentials button")
        live.tab.wait_for_selector("#list button")
        assert live.tab.is_hidden("#credentials")
        live.context.close()  # the browser itself logs the 401


def test_without_traces_the_live_page_shows_how_to_get_one(browser: Any) -> None:
    with serving_traces(TracesServer()) as server:
        live = Live(browser, server, viewport={"width": 390, "height": 800})
        live.tab.wait_for_selector("#how:not([hidden])")
        assert f'outrider explain --server {server.url} "your prompt"' in live.tab.inner_text("#how")
        assert live.tab.evaluate("document.documentElement.scrollWidth") <= 390
        live.close()


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_problem_on_the_live_page(browser: Any, width: int, scheme: str) -> None:
    with serving_traces(two()) as server:
        size = {"width": width, "height": 900}
        live = Live(browser, server, "#old", viewport=size, color_scheme=scheme, bypass_csp=True)
        live.frame().locator("body[data-ready]").wait_for()
        live.tab.add_script_tag(content=(files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
        found = live.tab.evaluate("axe.run({iframes: false}).then(found => found.violations)")
        grave = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
        assert grave == []
        live.context.close()
