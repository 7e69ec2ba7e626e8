"""Drive the page of `hf-relpos app` in a headless browser, check what it shows, and take pictures of it.

    apt-get install chromium && pip install playwright  # playwright is in the extra `dev`
    python scripts/maintenance/app_screenshots.py /tmp/pictures    # docs/screenshots/app.png is its attention-wide.png

It ends with an error where a view stays empty, an error is not shown as words, the page is wider than the window, or
the browser asks anything but this machine. tests/test_app_browser.py does the same (`make test-browser`).
"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect, sync_playwright

from hf_relpos.app.models import CONVERTED, PACKAGED
from hf_relpos.app.page import serve


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


LOOKS = (Look("wide", 1100, 900), Look("narrow", 400, 800), Look("dark", 1100, 900, "dark"))


def find_browser() -> str:
    """A Chromium on the path.

    Raises:
        FileNotFoundError: without one; says what to install.
    """
    for name in BROWSERS:
        if (path := shutil.which(name)) is not None:
            return path
    raise FileNotFoundError(f"no browser ({', '.join(BROWSERS)}) is on the path: apt-get install chromium")


@contextmanager
def open_browser(path: str | None = None) -> Iterator[Browser]:
    """A headless Chromium; by default that of the path."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path or find_browser(), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def serve_page() -> Iterator[str]:
    """The address of the page with the packaged models, for as long as the block lasts."""
    served = serve(PACKAGED, CONVERTED, port=0, block=False)
    try:
        yield served.local_url
    finally:
        served.close()


@contextmanager
def open_page(browser: Browser, url: str, look: Look) -> Iterator[Page]:
    """The page, when its first view is drawn; in the end an error if anything but this machine was asked."""
    page = browser.new_page(viewport={"width": look.width, "height": look.height}, color_scheme=look.color_scheme)
    page.set_default_timeout(SECONDS)
    hosts: set[str | None] = set()
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.goto(url)
    expect(page.locator(".matplotlib img").nth(1)).to_be_visible(timeout=SECONDS)
    page.wait_for_load_state("networkidle")
    yield page
    assert not hosts - THIS_MACHINE, f"the page asked {hosts - THIS_MACHINE}"
    page.close()


def show(page: Page, tab: str, pictures: int) -> None:
    """Open a tab and wait for so many pictures in it."""
    tabs = page.get_by_role("tab", name=tab).locator("visible=true")
    if tabs.count():
        tabs.first.click()
    else:  # a narrow window has the last ones in a menu
        page.locator(".overflow-menu > button").click()
        page.locator(".overflow-dropdown button", has_text=tab).click()
    visible = page.locator(".matplotlib img:visible")
    expect(visible).to_have_count(pictures, timeout=SECONDS)


def check_views(browser: Browser, url: str, look: Look, out: Path) -> None:
    """Every view is drawn, and no wider than the window; a picture of each, `<view>-<look>.png`."""
    with open_page(browser, url, look) as page:

        def picture(view: str) -> None:
            page.screenshot(path=out / f"{view}-{look.name}.png", full_page=True)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= look.width, f"{view} is {width} pixels wide in a window of {look.width}"

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


def check_errors(browser: Browser, url: str, look: Look, out: Path) -> None:
    """A text that is too long, and a folder that is no checkpoint: words on the page, and no traceback."""
    with open_page(browser, url, look) as page:
        show(page, "Attention", 2)
        for label, value, words in (
            ("Text", "word " * 200, "the text has 202 tokens, and the model reads 128; shorten it"),
            ("Right model", "/etc", "this is not a checkpoint folder"),
        ):
            field = page.get_by_label(label, exact=True)
            kept = field.input_value()
            field.fill(value)
            page.get_by_role("button", name="Show").click()
            alert = page.locator("[role=alert]:visible")
            expect(alert).to_contain_text(words, timeout=SECONDS)
            assert "Traceback" not in page.content()
            page.screenshot(path=out / f"error-{label.split()[0].lower()}-{look.name}.png", full_page=True)
            field.fill(kept)
        page.get_by_role("button", name="Show").click()
        expect(page.locator(".matplotlib img:visible")).to_have_count(2, timeout=SECONDS)
        expect(page.locator("[role=alert]:visible")).to_have_count(0, timeout=SECONDS)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--browser", help="a Chromium; by default that of the path")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open_browser(arguments.browser) as browser, serve_page() as url:
        for look in LOOKS:
            check_views(browser, url, look, arguments.out)
        check_errors(browser, url, LOOKS[1], arguments.out)
    print(f"pictures in {arguments.out}")


if __name__ == "__main__":
    main()
