"""Records in files: JSON lines or tab-separated, plain or packed (.xz, .gz), with errors that name the line."""

import gzip
import json
import lzma
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .retrieval import Query
from .similarity import Pair


OPENERS = {".xz": lzma.open, ".gz": gzip.open}


def read_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 text file, unpacked by its ending; without their ends.

    Raises:
        ValueError: for a file that is not there, is no text, or is cut short.
    """
    path = Path(path)
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", newline=None) as file:
            return file.read().split("\n")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; check the path") from None
    except (UnicodeDecodeError, lzma.LZMAError, OSError, EOFError) as error:
        raise ValueError(f"{path}: not readable as UTF-8 text ({error}); restore or re-encode the file") from error


def read_records(path: str | Path, columns: Sequence[str], header: bool | None = None) -> list[dict[str, Any]]:
    """The named fields of every record of a file.

    A file is JSON lines if its name says so (.jsonl, .json) and else tab-separated. Tabs separate, nothing quotes.

    Args:
        path: file.
        columns: names of the fields; in a tab-separated file without a header, those of its first columns.
        header: whether the first line of a tab-separated file names its columns; None for whether it holds all of
            `columns`.

    Raises:
        ValueError: for a record that lacks a field, and a file without records; names file, line and remedy.
    """
    path = Path(path)
    suffix = path.with_suffix("").suffix if path.suffix in OPENERS else path.suffix
    records = list(_json_records(path, columns) if suffix in (".jsonl", ".json") else _rows(path, columns, header))
    if not records:
        raise ValueError(f"{path}: holds no records; give a file with the columns {', '.join(columns)}")
    return records


def _json_records(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}); put one object on each line") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a {type(record).__name__}, not an object; write {{…}}")
        lost = [column for column in columns if column not in record]
        if lost:
            raise ValueError(
                f"{path}, line {number}: no field {lost[0]!r} (it has {', '.join(record)}); name the fields with "
                "--columns"
            )
        yield {column: record[column] for column in columns}


def _rows(path: Path, columns: Sequence[str], header: bool | None) -> Iterator[dict[str, Any]]:
    lines = [(number, line.split("\t")) for number, line in enumerate(read_lines(path), 1) if line.strip()]
    if not lines:
        return
    first = lines[0][1]
    named = set(columns) <= set(first)
    if header is None:
        header = named
    if header and not named:
        lost = next(column for column in columns if column not in first)
        raise ValueError(
            f"{path}, line {lines[0][0]}: no column {lost!r} (it has {', '.join(first)}); name the columns with "
            "--columns"
        )
    places = [first.index(column) for column in columns] if header else list(range(len(columns)))
    for number, fields in lines[1:] if header else lines:
        if len(fields) <= max(places):
            raise ValueError(
                f"{path}, line {number}: {len(fields)} fields between tabs, and "
                f"{columns[places.index(max(places))]!r} is column {max(places) + 1}; correct the line, or name the "
                "columns with --columns"
            )
        yield {column: fields[place] for column, place in zip(columns, places, strict=True)}


def read_pairs(
    path: str | Path, columns: Sequence[str] = ("score", "sentence1", "sentence2"), header: bool | None = None
) -> list[Pair]:
    """Scored pairs of sentences.

    Args:
        path: JSON lines or tab-separated.
        columns: names of score, first and second sentence.
        header: as in `read_records`.

    Raises:
        ValueError: for what `read_records` refuses, a score that is no number, and fewer than two pairs.
    """
    if len(columns) != 3:
        raise ValueError(f"columns = {list(columns)}: name three, for score, first and second sentence")
    pairs = []
    for number, record in enumerate(read_records(path, columns, header), 1):
        score, one, other = (record[column] for column in columns)
        try:
            value = float(score)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(
                f"{path}, record {number}: {columns[0]} = {score!r} is no number; name the columns with --columns "
                f"(score, first and second sentence; now {', '.join(columns)})"
            )
        pairs.append(Pair(value, str(one), str(other)))
    if len(pairs) < 2:
        raise ValueError(f"{path}: one pair cannot be ranked; give more")
    return pairs


def read_documents(path: str | Path, columns: Sequence[str] = ("id", "text")) -> dict[str, str]:
    """Documents by their ids.

    Raises:
        ValueError: for what `read_records` refuses, and an id that two documents have.
    """
    documents: dict[str, str] = {}
    for number, record in enumerate(read_records(path, columns), 1):
        name = str(record[columns[0]])
        if name in documents:
            raise ValueError(f"{path}, record {number}: {columns[0]} = {name!r} was there before; make the ids unique")
        documents[name] = str(record[columns[1]])
    return documents


def read_queries(path: str | Path, columns: Sequence[str] = ("query", "doc")) -> list[Query]:
    """Queries and the id of the document that answers each.

    Raises:
        ValueError: for what `read_records` refuses.
    """
    return [Query(str(r[columns[0]]), str(r[columns[1]])) for r in read_records(path, columns)]
