"""Read records from text files, compressed or not: JSON lines, tab- or comma-separated. Errors name the line."""

import bz2
import csv
import gzip
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any


OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
REMEDY = "name the columns with --columns"
# Largest number of characters in a line or cell: a small compressed file without line ends could fill the memory.
MAX_LINE = 100_000_000


def text_suffix(path: str | Path) -> str:
    """The suffix of a file's name, such as `.jsonl`, ignoring a compression suffix; empty without one."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in OPENERS]
    return suffixes[-1].lower() if suffixes else ""


def iterate_lines(path: str | Path) -> Iterator[str]:
    """Read the lines of a UTF-8 text file lazily, without line ends; the suffix tells the compression.

    Raises:
        ValueError: for a file that is missing, not text, truncated, or has a line of more than `MAX_LINE` characters;
            and for a folder, pipe or device.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path}: is not a regular file; write the text to a file, and give that")
        opener: Callable[..., Any] = OPENERS.get(path.suffix, open)
        with opener(path, "rt", encoding="utf-8-sig") as file:
            while line := file.readline(MAX_LINE):
                if "\0" in line:
                    raise ValueError(f"{path}: holds zero bytes, so it is not text; give another file")
                if len(line) == MAX_LINE:
                    raise ValueError(f"{path}: has a line of {MAX_LINE:,} characters or more; break it into lines")
                yield line.rstrip("\n")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; check the path") from None
    except (UnicodeDecodeError, lzma.LZMAError, zlib.error, OSError, EOFError) as error:
        raise ValueError(f"{path}: not readable as UTF-8 text ({error}); restore or re-encode the file") from error


def read_lines(path: str | Path) -> list[str]:
    """All lines of a file, from `iterate_lines`."""
    return list(iterate_lines(path))


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
        return (
            f"holds {value[error.start]!a}, a lone surrogate, which is half a character; remove it, or write the "
            "text anew in UTF-8"
        )
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
    problem = text_problem(value)
    if problem:
        raise ValueError(f"{path}, record {number}: {column!r} {problem}")
    return str(value)


def iterate_records(
    path: str | Path, columns: Sequence[str], header: bool | None = None, remedy: str = REMEDY
) -> Iterator[dict[str, Any]]:
    """Read the named fields of every record of a file lazily.

    `.jsonl` and `.json` files are JSON lines, `.csv` files are comma-separated with quotes, and all others are
    tab-separated without quotes.

    Args:
        path: file.
        columns: names of the fields. Without a header, they name the first columns.
        header: whether the first line of a .csv or .tsv file is a header; None: if it holds all of `columns`.
        remedy: advice in errors about columns.

    Raises:
        ValueError: for a record that lacks a field; names file, line and remedy.
    """
    path = Path(path)
    if text_suffix(path) in (".jsonl", ".json"):
        yield from _json_records(path, columns, remedy)
    else:
        yield from _rows(path, columns, header, remedy)


def read_records(
    path: str | Path, columns: Sequence[str], header: bool | None = None, remedy: str = REMEDY
) -> list[dict[str, Any]]:
    """All records of a file, from `iterate_records`.

    Raises:
        ValueError: for files that `iterate_records` rejects, and a file without records.
    """
    records = list(iterate_records(path, columns, header, remedy))
    if not records:
        raise ValueError(f"{path}: holds no records; give a file with the columns {', '.join(columns)}")
    return records


def _json_records(path: Path, columns: Sequence[str], remedy: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(iterate_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); put one object on each line") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a {type(record).__name__}, not an object; write {{…}}")
        missing = [column for column in columns if column not in record]
        if missing:
            raise ValueError(f"{path}, line {number}: no field {missing[0]!r} (it has {', '.join(record)}); {remedy}")
        yield {column: record[column] for column in columns}


def _split(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row that is not blank; a quoted cell may span lines."""
    if text_suffix(path) != ".csv":
        yield from ((n, line.split("\t")) for n, line in enumerate(iterate_lines(path), 1) if line.strip())
        return
    # strict: otherwise an unclosed quote swallows the rest of the file
    rows = csv.reader((line + "\n" for line in iterate_lines(path)), strict=True)
    while True:
        first = rows.line_num + 1
        limit = csv.field_size_limit(MAX_LINE)  # global to the process; its default of 131,072 is too low for a book
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{path}, line {first}: {error}; correct the quotes") from error
        finally:
            csv.field_size_limit(limit)
        if any(cell.strip() for cell in cells):
            yield first, cells


def _rows(path: Path, columns: Sequence[str], header: bool | None, remedy: str) -> Iterator[dict[str, Any]]:
    lines = _split(path)
    try:
        start, first = next(lines)
    except StopIteration:
        return
    has_names = set(columns) <= set(first)
    if header is None:
        header = has_names
    if header and not has_names:
        missing = next(column for column in columns if column not in first)
        raise ValueError(f"{path}, line {start}: no column {missing!r} (it has {', '.join(first)}); {remedy}")
    twice = [column for column in columns if header and first.count(column) > 1]
    if twice:
        raise ValueError(f"{path}, line {start}: several columns are named {twice[0]!r}; rename all but one")
    indices = [first.index(column) for column in columns] if header else list(range(len(columns)))
    rest = lines if header else itertools.chain([(start, first)], lines)
    for number, fields in rest:
        if len(fields) <= max(indices):
            raise ValueError(
                f"{path}, line {number}: {len(fields)} columns, and {columns[indices.index(max(indices))]!r} is "
                f"column {max(indices) + 1}; correct the line, or {remedy}"
            )
        yield {column: fields[index] for column, index in zip(columns, indices, strict=True)}
