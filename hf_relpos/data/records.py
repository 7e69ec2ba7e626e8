"""Read records from text files, compressed or not: JSON lines, tab- or comma-separated. Errors name the record."""

import bz2
import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}


def text_suffix(path: str | Path) -> str:
    """The suffix of a file's name, such as `.jsonl`, ignoring a compression suffix; empty without one."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in OPENERS]
    return suffixes[-1].lower() if suffixes else ""


@contextmanager
def open_text(path: str | Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file; the suffix tells the compression.

    Raises:
        ValueError: for a file that is missing, not text, or truncated.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; check the path")
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (UnicodeDecodeError, lzma.LZMAError, zlib.error, OSError, EOFError) as error:
        raise ValueError(f"{path}: not readable as UTF-8 text ({error}); restore or re-encode the file") from error


def read_lines(path: str | Path) -> list[str]:
    """All lines of a file, without line ends.

    Raises:
        ValueError: as `open_text`.
    """
    with open_text(path) as file:
        return [line.rstrip("\r\n") for line in file]


def excerpt(text: str) -> str:
    """The beginning of a text, on one line, for an error."""
    text = " ".join(text[:200].split())
    return text if len(text) <= 80 else f"{text[:79]}…"


def text_problem(value: Any) -> str:
    """Why a tokenizer cannot read a value, with the remedy; empty for valid text."""
    if not isinstance(value, str):
        return f"is a {type(value).__name__}, not text ({excerpt(ascii(value))}); give a string"
    if "\0" in value:
        return "holds a zero character; remove it"
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"{value[error.start]!a}, a lone surrogate, which is half a character"
        return f"holds {half}; remove it, or write the text anew in UTF-8"
    return ""


def text_field(path: str | Path, number: int, column: str, value: Any) -> str:
    """Check that a field is text, and return it.

    Args:
        path: file of the field, for errors.
        number: number of its record, from 1.
        column: name of the field.

    Raises:
        ValueError: for a value that is not text; names file, record and column.
    """
    if problem := text_problem(value):
        raise ValueError(f"{path}, record {number}: {column!r} {problem}")
    return str(value)


def iterate_records(
    path: str | Path, columns: Sequence[str], remedy: str = "name one of these columns"
) -> Iterator[dict[str, Any]]:
    """Read the named fields of every record of a file lazily.

    `.jsonl` and `.json` files are JSON lines. `.csv` files are comma-separated with quotes, and all others are
    tab-separated without quotes; both have a header line.

    Args:
        path: file.
        columns: names of the fields.
        remedy: advice in errors about columns.

    Raises:
        ValueError: for a record that lacks a field; names file, record and remedy.
    """
    number = 0
    with open_text(path) as file:
        rows: Iterator[Any]
        if text_suffix(path) in (".jsonl", ".json"):
            rows = _json_lines(path, file)
        elif text_suffix(path) == ".csv":
            rows = csv.DictReader(file, strict=True)
        else:
            rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            for number, row in enumerate(rows, 1):
                missing = [column for column in columns if column not in row]
                if missing:
                    found = ", ".join(map(str, row))
                    raise ValueError(f"{path}, record {number}: no field {missing[0]!r} (it has {found}); {remedy}")
                short = [column for column in columns if row[column] is None and isinstance(rows, csv.DictReader)]
                if short:
                    raise ValueError(f"{path}, record {number}: ends before {short[0]!r}; correct it, or {remedy}")
                yield {column: row[column] for column in columns}
        except csv.Error as error:
            raise ValueError(f"{path}, record {number + 1}: {error}; correct it, or give JSON lines") from error


def _json_lines(path: str | Path, file: TextIO) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); put one object on each line") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a {type(record).__name__}, not an object; write {{…}}")
        yield record
