"""Read tagged sentences from CoNLL-like files, in any tagging scheme, as tokens with IOB2 tags."""

import re
from collections.abc import Sequence

from hf_relpos.data.records import excerpt, read_lines


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
        mark = MARKS.get(mark, mark)
        begins = mark in "BS" or before[0] in "OES" or before[2:] != kind
        converted.append("O" if mark == "O" else f"{'B' if begins else 'I'}-{kind}")
        before = f"{mark}-{kind}"
    return converted


def read_conll(path: str) -> list[tuple[list[str], list[str]]]:
    """Read the tokens and IOB2 tags of each sentence.

    The file has one token per line and an empty line between sentences. Columns are separated by tabs, or by spaces
    in a line without tabs. The last column has the tags, and the first that does not number the tokens has the tokens.
    Lines of `-DOCSTART-`, and lines that begin with "# " and do not end in a tag, are skipped.

    Raises:
        ValueError: for lines with different numbers of columns, invalid tags, and a file without sentences; names
            file, line and remedy.
    """
    sentences: list[list[list[str]]] = [[]]
    width = 0
    for number, line in enumerate(read_lines(path), 1):
        line = line.rstrip("\t \r")
        # str.split() would also split at an ideographic space
        fields = [field.strip(" ") for field in line.split("\t")] if "\t" in line else re.split(" +", line)
        is_tagged = bool(TAG.fullmatch(fields[-1]))
        if not line or fields[0] == "-DOCSTART-":
            sentences.append([])
            continue
        if line.startswith("# ") and not is_tagged:
            continue
        width = width or len(fields)
        if len(fields) < 2 or len(fields) != width or not is_tagged:
            what = f"has {len(fields)} columns, the first line {width}"
            if len(fields) == width > 1:
                what = (
                    f"ends in {excerpt(fields[-1])!r}, which is no tag (O, or a type after B-, I-, E-, S-, M-, L-, U-)"
                )
            line = f"{path}, line {number}: {excerpt(' '.join(fields))!r}"
            raise ValueError(f"{line} {what}; give each line a token and its tag, between tabs")
        sentences[-1].append(fields)
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise ValueError(f"{path}: holds no sentences; give a CoNLL file")
    token = 0 if width < 3 or not all(row[0].isdigit() for rows in sentences for row in rows) else 1
    return [([row[token] for row in rows], to_iob2([row[-1] for row in rows])) for rows in sentences]
