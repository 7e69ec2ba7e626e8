"""Read tagged sentences from CoNLL-like files, with any columns and tagging scheme, as tokens with IOB2 tags."""

import re
from collections.abc import Sequence
from pathlib import Path

from .records import excerpt, read_lines


Sentence = tuple[list[str], list[str]]

TAG = re.compile(r"O|[BIESMLU]-.+")
# Prefixes of BMES and BILOU, as those of BIOES.
MARKS = {"M": "I", "L": "E", "U": "S"}


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Convert tags of IOB1, IOB2, IOE1, IOE2, BIOES, BMES or BILOU to IOB2.

    Tags are read as by the CoNLL-2000 scorer: an entity begins at B and S, after E, S and O, and where the type
    changes. So an I- after O begins an entity.
    """
    converted, before = [], "O"
    for tag in tags:
        mark, _, kind = tag.partition("-")
        if mark == "O":
            converted.append("O")
        else:
            mark = MARKS.get(mark, mark)
            begins = mark in "BS" or before[0] in "OES" or before[2:] != kind
            converted.append(f"{'B' if begins else 'I'}-{kind}")
        before = f"{mark}-{kind}"
    return converted


def read_conll(path: str | Path) -> list[Sentence]:
    """Read the tokens and IOB2 tags of each sentence.

    The file has one token per line and an empty line between sentences. Columns are separated by tabs, or by spaces
    in a line without tabs. The last column with tags in most lines has the tags, and the first other column that does
    not number the tokens has the tokens. Lines of `-DOCSTART-`, and lines that begin with "# " and do not end in a
    tag, are skipped.

    Args:
        path: file, compressed (.xz, .gz) or not.

    Raises:
        ValueError: for lines with different numbers of columns, invalid tags, and a file without
            sentences; names file, line and remedy.
    """
    path = Path(path)
    rows: list[tuple[int, list[str]] | None] = []  # None between sentences
    for number, line in enumerate(read_lines(path), 1):
        line = line.rstrip("\t \r")
        # str.split() would also split at an ideographic space
        fields = [field.strip(" ") for field in line.split("\t")] if "\t" in line else re.split(" +", line)
        if not line or fields[0] == "-DOCSTART-":
            rows.append(None)
        elif not (line.startswith("# ") and not TAG.fullmatch(fields[-1])):
            rows.append((number, fields))
    lines = [row for row in rows if row is not None]
    if not lines:
        raise ValueError(f"{path}: holds no sentences; give a CoNLL file")
    first, width = lines[0][0], len(lines[0][1])
    for number, fields in lines:
        if len(fields) < 2 or len(fields) != width:
            raise ValueError(
                f"{path}, line {number}: {excerpt(' '.join(fields))!r} has {len(fields)} columns"
                + (f", line {first} has {width}" if number != first else "")
                + "; give each line a token and its tag, between tabs"
            )
    token, tag = _detect_columns(path, lines)
    for number, fields in lines:
        if not TAG.fullmatch(fields[tag]):
            raise ValueError(
                f"{path}, line {number}: {excerpt(fields[tag])!r} in column {tag + 1} is no tag (O, or a type after "
                "B-, I-, E-, S-, M-, L- or U-); correct it"
            )
    sentences: list[Sentence] = []
    words, tags = [], []
    for row in [*rows, None]:
        if row is not None:
            words.append(row[1][token])
            tags.append(row[1][tag])
        elif words:
            sentences.append((words, to_iob2(tags)))
            words, tags = [], []
    return sentences


def _detect_columns(path: Path, lines: Sequence[tuple[int, list[str]]]) -> tuple[int, int]:
    """Columns of tokens and of tags, counted from 0.

    A column that holds tags in only most of its lines counts: a column to its left may hold chunk tags.
    """
    width = len(lines[0][1])
    tags = [sum(bool(TAG.fullmatch(fields[column])) for _, fields in lines) for column in range(width)]
    if not any(tags):
        raise ValueError(
            f"{path}: no column has tags (O, or a type after B-, I-, E-, S-, M-, L- or U-), as line {lines[0][0]} "
            f"shows: {excerpt(' '.join(lines[0][1]))!r}; give a CoNLL file"
        )
    tag = max(range(width), key=lambda column: (2 * tags[column] > len(lines), column))
    others = [column for column in range(width) if column != tag]
    numbers = [all(fields[column].isdigit() for _, fields in lines) for column in range(width)]
    token = next((column for column in others if not numbers[column]), others[0])
    return token, tag
