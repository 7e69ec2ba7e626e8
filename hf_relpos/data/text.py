"""Read documents from text files and folders."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from .records import excerpt, iterate_records, open_text, text_field, text_problem, text_suffix


Sources = str | Path | Iterable[str | Path]  # one, or several
SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".tsv", ".csv")
# Largest number of characters read: a stream may have no end.
MAX_CHARACTERS = 100_000_000


class TextError(ValueError):
    """Raised for text that cannot be read or is too short; the message names the remedy."""


def pair_fields(sources: Sources, field: str | Sequence[str] = "text") -> list[tuple[str | Path, str]]:
    """Pair each text source with its field.

    Args:
        sources: one or several.
        field: one for all of them, or one for each.

    Raises:
        TextError: for sources that are not paths, a different number of fields, and fields that are not names.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    if isinstance(sources, bytes) or not isinstance(sources, Iterable):
        raise TextError(f"texts = {sources!r} is a {type(sources).__name__}; give a path, or a list of paths")
    paths = list(sources)
    for path in paths:
        if not isinstance(path, str | Path) or not str(path).strip():
            raise TextError(f"texts = {path!r} is not a path; give the name of a file or folder")
    names = [field] if isinstance(field, str) else list(field)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TextError(f"field = {field!r} is not the name of a key or column (--field); give one, such as 'text'")
    if len(names) == 1:
        names *= len(paths)
    if len(names) != len(paths):
        raise TextError(f"field = {names}: {len(names)} fields for {len(paths)} texts; give one, or one for each")
    return list(zip(paths, names, strict=True))


def paths_or_documents(texts: Any) -> list[Path] | list[str]:
    """Tell paths from documents; the result can be iterated over several times.

    Args:
        texts: a path (a string or a Path), several paths, or documents (strings). Among several, a string is a path if
            it names an existing text file or a folder. An iterator of documents is read up to `MAX_CHARACTERS`
            characters.

    Raises:
        TextError: for anything else; names the item and what to give instead.
    """
    if isinstance(texts, str | Path):
        if not str(texts).strip():
            raise TextError(f"texts = {texts!r} is empty; give a path")
        return [Path(texts)]
    if isinstance(texts, bytes | bytearray | Mapping | Set) or not isinstance(texts, Iterable):
        raise TextError(f"texts is a {type(texts).__name__}; give a path, paths, or a list of documents")
    items: list[Any] = []
    characters = 0
    for number, text in enumerate(texts):
        if isinstance(text, str) and _names_a_file(text):
            text = Path(text)
        if not isinstance(text, Path):
            if problem := text_problem(text):
                raise TextError(f"texts[{number}] {problem}")
            characters += len(text)
        items.append(text)
        if isinstance(text, Path) != isinstance(items[0], Path):
            kinds = f"texts[{number}] is a {_kind(text)}, and texts[0] is a {_kind(items[0])}"
            raise TextError(f"{kinds}; give paths or documents")
        if characters > MAX_CHARACTERS:
            break
    if not items:
        raise TextError("texts is empty; give a path, or documents")
    return items


def _names_a_file(text: str) -> bool:
    """Whether a string names an existing text file, or a folder by a path with a slash."""
    path = os.path.expanduser(text)
    return os.path.exists(path) and (text_suffix(Path(path)) in SUFFIXES or os.sep in text)


def _kind(text: str | Path) -> str:
    return "document" if isinstance(text, str) else f"path ({str(text)!r})"


def read_texts(
    sources: Sources, field: str | Sequence[str] = "text", skip_unreadable: bool = False, by_line: bool = False
) -> Iterator[str]:
    """Read the documents of files or folders, one after the other.

    A `.txt` file holds documents with blank lines between them. From a `.jsonl` file (one object per line), and a
    `.tsv` or `.csv` file (a header line and one document per row), `field` is read. All may be compressed (`.xz`,
    `.gz`, `.bz2`). A folder stands for all such files in it, sorted by name.

    Args:
        sources: one or several.
        field: key or column of the text: one for all of them, or one for each.
        skip_unreadable: leave out, with a warning, what follows an error in a file.
        by_line: each line of a `.txt` file is a text, not each paragraph.

    Raises:
        TextError: for files that are missing, of another kind, not UTF-8 text, or without that field; for values that
            are neither text nor null; and for a different number of fields than sources.
    """
    for source, own_field in pair_fields(sources, field):
        path = find_text(source)
        for file in _files_in(path) if path.is_dir() else [path]:
            yield from (text for text in _read_file(file, own_field, skip_unreadable, by_line) if text.strip())


def check_texts(sources: Iterable[str | Path], field: str | Sequence[str]) -> None:
    """
    Raises:
        TextError: as `pair_fields` and `find_text`, for each.
    """
    for source, _ in pair_fields(sources, field):
        find_text(source)


def find_text(source: str | Path) -> Path:
    """The file or folder of a text.

    Raises:
        TextError: for a path that does not exist, and a file of another kind.
    """
    try:
        path = Path(source).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be entered, no such user
        reason = getattr(error, "strerror", None) or error
        raise TextError(f"texts = '{excerpt(str(source))}': {reason}; check the path") from error
    if not exists:
        hub = "datasets.load_dataset(NAME, split='train').to_json('texts.jsonl')"
        raise TextError(f"texts = '{source}': there is no such file; check the path. A Hub dataset is saved by {hub}")
    if not path.is_dir() and text_suffix(path) not in SUFFIXES:
        raise TextError(f"texts = '{path}': ends in {path.suffix!r}; give .txt, .jsonl, .tsv or .csv")
    return path


def _files_in(folder: Path) -> list[Path]:
    """The text files of a folder and the folders in it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and text_suffix(file) in SUFFIXES)
    if not files:
        raise TextError(f"texts = '{folder}': the folder has no .txt, .jsonl, .tsv or .csv file; add one")
    return files


def _read_file(path: Path, field: str, skip_unreadable: bool, by_line: bool) -> Iterator[str]:
    try:
        if text_suffix(path) in (".txt", ".md"):
            with open_text(path) as file:
                for number, text in enumerate(file if by_line else _paragraphs(file), 1):
                    yield text_field(path, number, "line" if by_line else "paragraph", text.strip())
            return
        for number, record in enumerate(iterate_records(path, [field], "name one of these with field (--field)"), 1):
            if record[field] is not None:  # skips JSON's null
                yield text_field(path, number, field, record[field])
    except ValueError as error:
        if not skip_unreadable:
            raise TextError(f"texts = {error}; or set skip_unreadable (--skip-unreadable)") from error
        warnings.warn(f"texts = {error}; left out from there on", stacklevel=2)


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Paragraphs, which blank lines separate, each joined into one line."""
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line.strip())
        elif paragraph:
            yield " ".join(paragraph)
            paragraph = []
    if paragraph:
        yield " ".join(paragraph)
