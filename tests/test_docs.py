"""README.md and docs: links lead somewhere, code is code, and commands have the options that they are shown with."""

import ast
import re
import shlex
from pathlib import Path

import nbformat
import pytest
import typer
import yaml

from hf_relpos.cli import app
from hf_relpos.version import __version__


ROOT = Path(__file__).resolve().parents[1]
SITE = sorted(path for kind in ("*.md", "*.ipynb") for path in (ROOT / "docs").rglob(kind))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *SITE]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def text(page):
    """Of a notebook its cells of Markdown; its code has a test of its own."""
    if page.suffix == ".ipynb":
        return "\n\n".join(cell.source for cell in nbformat.read(page, 4).cells if cell.cell_type == "markdown")
    return page.read_text("utf-8")


def prose(page):
    return BLOCK.sub("", text(page))


def anchors(page):
    """Of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists() and path.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_code_is_code(page):
    for language, code in BLOCK.findall(text(page)):
        if language == "python":
            ast.parse(code.replace("…", "..."))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_are_there_with_their_options(page):
    group = typer.main.get_command(app)
    blocks = "\n".join(code for language, code in BLOCK.findall(text(page)) if language == "bash")
    spans = re.findall(r"`(hf-relpos [^`]*)`", prose(page))
    lines = [line for line in blocks.replace("\\\n", " ").splitlines() if line.startswith("hf-relpos ")]
    for line in [*lines, *spans]:
        words = shlex.split(line.partition(" -- ")[0], comments=True)[1:]  # after it, of another program
        if words and not words[0].startswith("-"):
            known = {option for parameter in group.commands[words[0]].params for option in parameter.opts} | {"--help"}
            assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_tables_have_rows(page):
    """Without a row below the rule, GitHub and MkDocs show bars: an empty line ends a table."""
    lines = prose(page).splitlines()
    rules = [number for number, line in enumerate(lines) if re.fullmatch(r"\|[ :|-]*-[ :|-]*\|", line)]
    for number in rules:
        bars = {lines[at].replace(r"\|", "").count("|") for at in (number - 1, number, number + 1)}
        assert len(bars) == 1 < min(bars), "\n".join(lines[number - 1 : number + 2])


def test_the_way_in_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))
    own = {str(page.relative_to(ROOT / "docs").with_suffix(".md")) for page in SITE}
    assert own | {"index.md"} == listed, "README.md is the home"


def test_the_version_to_cite_is_the_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == __version__ and cited["license"] == "Apache-2.0" and cited["cff-version"] == "1.2.0"
