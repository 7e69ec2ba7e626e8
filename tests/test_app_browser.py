"""The page of `hf-relpos app` in a real browser: `make test-browser`.

scripts/maintenance/app_screenshots.py drives it: views, words in place of tracebacks, no host but this machine.
"""

import pytest
from launching import import_script


pytestmark = pytest.mark.browser
LOOKS = ("wide", "narrow", "dark")


@pytest.fixture(scope="module")
def driver():
    return import_script("app_screenshots")


@pytest.fixture(scope="module")
def opened(driver):
    """A browser, and the address of the served page."""
    try:
        driver.find_browser()
    except FileNotFoundError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    with driver.open_browser() as browser, driver.serve_page() as url:
        yield browser, url


@pytest.mark.parametrize("name", LOOKS)
def test_every_view_is_drawn_within_the_window_from_this_machine_alone(driver, opened, name, tmp_path):
    look = next(look for look in driver.LOOKS if look.name == name)
    driver.check_views(*opened, look, tmp_path)
    for view in ("positions", "attention", "masked", "cosine"):
        assert (tmp_path / f"{view}-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_shown_is_said_in_words_until_it_is_mended(driver, opened, tmp_path):
    driver.check_errors(*opened, driver.LOOKS[1], tmp_path)
