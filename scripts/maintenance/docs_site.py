"""Hooks of mkdocs.yml: what the pages link to outside of docs/, such as a test, gets a page that shows it.

The pages are written for the repository, where `../tests/test_live.py` leads to the file. On the site it leads to
`source/tests/test_live.py.html`, so that no link leaves the site and `mkdocs build --strict` checks all of them.
The home is README.md, so that the repository and the site open with the same text.
A notebook in docs/ gets a page, too, of the same name: its text, code and outputs as Markdown, so that its links are
checked like those of any page.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter


LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")
FLAG = re.compile(r"<code>(?=--?[\w-]+</code>)")
BLOCK = re.compile(r"<pre>.*?</pre>", re.DOTALL)
FLAG_IN_BLOCK = re.compile(r"(?<![\w-])--[a-z][\w-]*")
NOTEBOOK = re.compile(r"(?<=\]\()([^)#:\s]+)\.ipynb(?=[)#])")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json"}


def outside(target: str, page: str) -> str | None:
    """Path from the root of the repository of what a page links to, None inside of docs/.

    Args:
        target: of the link, relative to the page.
        page: path in docs/.
    """
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def notebook_page(notebook: File, config: MkDocsConfig) -> list[File]:
    """The page of a notebook, and its pictures beside it."""
    page = Path(notebook.src_uri).with_suffix(".md")
    content, resources = MarkdownExporter().from_filename(
        notebook.abs_src_path, {"output_files_dir": f"{page.stem}_files"}
    )
    pictures = [
        File.generated(config, (page.parent / name).as_posix(), content=data)
        for name, data in resources["outputs"].items()
    ]
    return [File.generated(config, page.as_posix(), content=content), *pictures]


def home(root: Path) -> str:
    """README.md as a page of docs/."""
    text = (root / "README.md").read_text("utf-8")
    return re.sub(r"\]\((?!https?:)", "](../", text).replace("](../docs/", "](")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The address of the site, if that of the repository (REPOSITORY) is on GitHub: search engines want it."""
    if on_github := re.fullmatch(r"https://github\.com/([^/]+)/([^/]+)/?", config.repo_url or ""):
        config.site_url = f"https://{on_github[1].lower()}.github.io/{on_github[2]}/"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home, a page for each notebook, and one for each file that pages link to outside of docs/."""
    root = Path(config.docs_dir).parent
    files.append(File.generated(config, "index.md", content=home(root)))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        for made in notebook_page(notebook, config):
            files.append(made)
    linked = {
        path
        for page in files.documentation_pages()
        for target in LINK.findall(page.content_string)
        if (path := outside(target, page.src_uri)) is not None and (root / path).is_file()
    }
    for path in sorted(linked):
        text = (root / path).read_text("utf-8")
        language = LANGUAGES.get(Path(path).suffix, "text")
        if path.endswith(".md"):  # at the top of the repository, such as CONTRIBUTING.md
            content = text.replace("](docs/", "](../")
        else:
            content = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n~~~~{language}\n{text}\n~~~~\n"
        files.append(File.generated(config, f"source/{path}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to notebooks, and out of docs/, to their pages; a link to nothing stays, an error of the build."""

    def on_site(link: re.Match[str]) -> str:
        path = outside(link[1], page.file.src_uri)
        there = files.get_file_from_path(f"source/{path}.md")
        return (
            link[1] if there is None else posixpath.relpath(there.src_uri, posixpath.dirname(page.file.src_uri) or ".")
        )

    return LINK.sub(on_site, NOTEBOOK.sub(r"\1.md", markdown))


def on_page_content(html: str, **_: object) -> str:
    """Options of the command line stay on one line: a browser would break them after a hyphen."""
    html = FLAG.sub('<code class="flag">', html)
    return BLOCK.sub(lambda block: FLAG_IN_BLOCK.sub(r'<span class="flag">\g<0></span>', block[0]), html)
