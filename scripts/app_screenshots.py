"""Drive the page of `hf-relpos app` in a headless browser, check what it shows, and take pictures of it.

    pip install playwright && apt-get install chromium        # neither is needed for anything else
    python scripts/app_screenshots.py /tmp/pictures           # docs/screenshots/app.png is its attention.png

It ends with an error where a view stays empty, an error is not shown as words, the page is wider than the window, or
the browser asks anything but this machine.
"""

import argparse
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, expect, sync_playwright

from hf_relpos.app.models import CONVERTED, PACKAGED
from hf_relpos.app.page import serve


SECONDS = 120_000  # in milliseconds, for a view on a busy machine
WIDE, NARROW = {"width": 1100, "height": 900}, {"width": 400, "height": 800}


def open_page(browser: Browser, url: str, size: dict[str, int], hosts: set[str | None]) -> Page:
    """The page, when its first view is drawn; adds to the hosts that it asks."""
    page = browser.new_page(viewport=size)
    page.set_default_timeout(SECONDS)
    page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
    page.goto(url)
    expect(page.locator(".matplotlib img").nth(2)).to_be_visible(timeout=SECONDS)
    page.wait_for_load_state("networkidle")
    return page


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


def check_errors(page: Page) -> None:
    """A text that is too long, and a folder that is no checkpoint: words on the page, and no traceback."""
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
        field.fill(kept)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="a Chromium; by default that of the path")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    hosts: set[str | None] = set()
    served = serve(PACKAGED, CONVERTED, port=0, block=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=arguments.browser, args=["--no-sandbox"])
        for name, size in (("", WIDE), ("-narrow", NARROW)):
            page = open_page(browser, served.local_url, size, hosts)

            def picture(view: str, page: Page = page, name: str = name) -> None:
                page.screenshot(path=arguments.out / f"{view}{name}.png", full_page=True)

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
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], f"wider than {size}"
        check_errors(page)
        page.screenshot(path=arguments.out / "error-narrow.png")
        browser.close()
    served.close()
    outside = hosts - {"127.0.0.1", "localhost", None, ""}
    assert not outside, f"the page asked {outside}"
    print(f"pictures in {arguments.out}; asked: {', '.join(sorted(filter(None, hosts)))}")


if __name__ == "__main__":
    main()
