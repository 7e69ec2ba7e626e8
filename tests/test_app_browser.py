"""The page of `hf-relpos app` in a headless Chromium: `make test-browser`.

Views are drawn and no wider than the window, errors are words in place of tracebacks, and the browser asks no host but
this machine. docs/screenshots/app.png is a picture of the attention in the widest window.
"""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect, sync_playwright

from hf_relpos.app.models import CONVERTED, PACKAGED
from hf_relpos.app.page import serve


pytestmark = pytest.mark.browser
SECONDS = 120_000  # in milliseconds, for a view on a busy machine
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
THIS_MACHINE = {"127.0.0.1", "localhost", None, ""}  # without a host: data in the address itself


@dataclass(frozen=True)
class Look:
    """A window, and whether its reader likes it dark."""

    name: str
    width: int
    height: int
    color_scheme: Literal["light", "dark"] = "light"


WIDE, NARROW, DARK = Look("wide", 1100, 900), Look("narrow", 400, 800), Look("dark", 1100, 900, "dark")


@pytest.fixture(scope="module")
def open_page():
    """A context manager from a look to the served page, when its first view is drawn."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail(f"no browser ({', '.join(BROWSERS)}) is on the path: apt-get install chromium", pytrace=False)
    served = serve(PACKAGED, CONVERTED, port=0, block=False)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])

            @contextmanager
            def opened(look):
                size = {"width": look.width, "height": look.height}
                page = browser.new_page(viewport=size, color_scheme=look.color_scheme)
                page.set_default_timeout(SECONDS)
                hosts: set[str | None] = set()
                page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
                page.goto(served.local_url)
                expect(page.locator(".matplotlib img").nth(1)).to_be_visible(timeout=SECONDS)
                page.wait_for_load_state("networkidle")
                yield page
                assert not hosts - THIS_MACHINE
                page.close()

            yield opened
            browser.close()
    finally:
        served.close()


def show(page, tab, pictures):
    """Open a tab and wait for so many pictures in it."""
    tabs = page.get_by_role("tab", name=tab).locator("visible=true")
    if tabs.count():
        tabs.first.click()
    else:  # a narrow window has the last ones in a menu
        page.locator(".overflow-menu > button").click()
        page.locator(".overflow-dropdown button", has_text=tab).click()
    expect(page.locator(".matplotlib img:visible")).to_have_count(pictures, timeout=SECONDS)


@pytest.mark.parametrize("look", [WIDE, NARROW, DARK], ids=lambda look: look.name)
def test_every_view_is_drawn_within_the_window_from_this_machine_alone(look, open_page, tmp_path):
    with open_page(look) as page:

        def picture(view):
            path = tmp_path / f"{view}-{look.name}.png"
            page.screenshot(path=path, full_page=True)
            assert path.read_bytes().startswith(b"\x89PNG")
            assert page.evaluate("document.documentElement.scrollWidth") <= look.width, view

        lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3)")
        assert (sum(map(int, lightness)) < 3 * 128) == (look.color_scheme == "dark"), lightness
        show(page, "Positions", 2)
        picture("positions")
        show(page, "Attention", 2)
        picture("attention")
        show(page, "Masked", 0)
        expect(page.get_by_role("gridcell").first).to_be_visible(timeout=SECONDS)
        picture("masked")
        show(page, "Cosine", 0)
        page.get_by_role("button", name="Measure").click()
        show(page, "Cosine", 1)
        picture("cosine")
        page.wait_for_load_state("networkidle")


@pytest.mark.parametrize(
    "label, value, words",
    [
        ("Text", "word " * 200, "the text has 202 tokens, and the model reads 128; shorten it"),
        ("Right model", "/etc", "this is not a checkpoint folder"),
    ],
    ids=["text", "model"],
)
def test_what_cannot_be_shown_is_said_in_words_until_it_is_mended(label, value, words, open_page):
    with open_page(NARROW) as page:
        show(page, "Attention", 2)
        field = page.get_by_label(label, exact=True)
        kept = field.input_value()
        field.fill(value)
        page.get_by_role("button", name="Show").click()
        expect(page.locator("[role=alert]:visible")).to_contain_text(words, timeout=SECONDS)
        assert "Traceback" not in page.content()
        field.fill(kept)
        page.get_by_role("button", name="Show").click()
        expect(page.locator(".matplotlib img:visible")).to_have_count(2, timeout=SECONDS)
        expect(page.locator("[role=alert]:visible")).to_have_count(0, timeout=SECONDS)
