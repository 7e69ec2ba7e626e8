"""Records in text files, compressed or not: JSON lines, tab- or comma-separated, with errors that name the line."""

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


def text_suffix(path: str | Path) -> str:
    """The suffix of a file's name, such as `.jsonl`, without that of the compression; empty for none."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in OPENERS]
    return suffixes[-1].lower() if suffixes else ""


def iterate_lines(path: str | Path) -> Iterator[str]:
    """The lines of a UTF-8 text file, compressed or not by its suffix, without line ends; read lazily.

    Raises:
        ValueError: for a file that is not there, is no text, or is cut short.
    """
    path = Path(path)
    try:
        opener: Callable[..., Any] = OPENERS.get(path.suffix, open)
        with opener(path, "rt", encoding="utf-8-sig") as file:
            for line in file:
                if "\0" in line:
                    raise ValueError(f"{path}: holds zero bytes, so it is not text; give another file")
                yield line.rstrip("\n")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; check the path") from None
    except (UnicodeDecodeError, lzma.LZMAError, zlib.error, OSError, EOFError) as error:
        raise ValueError(f"{path}: not readable as UTF-8 text ({error}); restore or re-encode the file") from error


def read_lines(path: str | Path) -> list[str]:
    """All lines of a file, from `iterate_lines`."""
    return list(iterate_lines(path))


def iterate_records(
    path: str | Path, columns: Sequence[str], header: bool | None = None, remedy: str = REMEDY
) -> Iterator[dict[str, Any]]:
    """The named fields of every record of a file, read lazily.

    `.jsonl` and `.json` are JSON lines, `.csv` is comma-separated with quotes, everything else tab-separated without.

    Args:
        path: file.
        columns: names of the fields; in a .csv or .tsv file without a header, of its first columns.
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


def read_records(path: str | Path, columns: Sequence[str], header: bool | None = None) -> list[dict[str, Any]]:
    """All records of a file, from `iterate_records`.

    Raises:
        ValueError: for what `iterate_records` refuses, and a file without records.
    """
    records = list(iterate_records(path, columns, header))
    if not records:
        raise ValueError(f"{path}: holds no records; give a file with the columns {', '.join(columns)}")
    return records


def _json_records(path: Path, columns: Sequence[str], remedy: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(iterate_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
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
    rows = csv.reader(line + "\n" for line in iterate_lines(path))
    while True:
        first = rows.line_num + 1
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{path}, line {first}: {error}; correct the quotes") from error
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
    indices = [first.index(column) for column in columns] if header else list(range(len(columns)))
    rest = lines if header else itertools.chain([(start, first)], lines)
    for number, fields in rest:
        if len(fields) <= max(indices):
            raise ValueError(
                f"{path}, line {number}: {len(fields)} columns, and {columns[indices.index(max(indices))]!r} is "
                f"column {max(indices) + 1}; correct the line, or {remedy}"
            )
        yield {column: fields[index] for column, index in zip(columns, indices, strict=True)}
