"""Text as converters, distillation and evaluation need it: documents from files, windows of tokens from documents."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .records import OPENERS, iterate_lines, iterate_records, kind_of


KINDS = (".txt", ".md", ".jsonl", ".json", ".tsv", ".csv")
SENTENCE_END = re.compile(r"(?<=[.!?。！？])[\"'”’)\]]*\s+")
# The beginning of a page's address, and of no drive of Windows.
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
# What is read of a text at most: a stream may have no end.
LETTERS = 100_000_000
# Share of unknown tokens above which a text is taken for one of another language.
UNKNOWN_LIMIT = 0.05


class TextError(ValueError):
    """Text that cannot be read, or is not enough; says what to do about it."""


def read_texts(
    sources: str | Path | Iterable[str | Path], field: str = "text", limit: int | None = None
) -> Iterator[str]:
    """Documents of files, folders or Hub datasets, one after the other.

    A `.txt` file holds documents with blank lines between them; `.jsonl` one object per line, `.tsv` and `.csv` a
    header line and one document per row, of which `field` is read. `.xz`, `.gz` and `.bz2` after that are unpacked. A
    folder stands for all such files in it, in the order of their names. Anything that is no file is taken for a Hub
    dataset, `user/name`, `user/name:split` or `user/name/configuration:split`, and streamed (extra `datasets`).

    Args:
        sources: one or several.
        field: key or column of the text.
        limit: documents at most.

    Raises:
        TextError: for files that are missing, of another kind, not text in UTF-8, or without that field.
    """
    if isinstance(sources, str | Path):
        sources = [sources]
    count = 0
    for source in sources:
        for text in _documents(source, field):
            if limit is not None and count >= limit:
                return
            if text.strip():
                count += 1
                yield text


def _documents(source: str | Path, field: str) -> Iterator[str]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and kind_of(file) in KINDS)
        if not files:
            raise TextError(f"text = '{source}': no .txt, .jsonl, .tsv or .csv file in the folder")
        for file in files:
            yield from _read_file(file, field)
    elif path.is_file():
        yield from _read_file(path, field)
    elif ADDRESS.match(str(source)):
        address = re.sub(":/+", "://", str(source), count=1)  # a Path has lost a slash
        raise TextError(f"text = '{address}': nothing is read from the web; download it and give the file's path")
    elif (
        kind_of(path) in KINDS  # other dots may be those of a version: user/corpus-1.5
        or path.suffix in OPENERS
        or len(path.parts) > 3
        or path.is_absolute()
        or str(source).startswith((".", "~"))
    ):
        raise TextError(f"text = '{source}': there is no such file; check the path")
    else:
        yield from _read_hub(str(source), field)


def _read_file(path: Path, field: str) -> Iterator[str]:
    kind = kind_of(path)
    if kind not in KINDS:
        raise TextError(f"text = '{path}': ends in {path.suffix!r}; give .txt, .jsonl, .tsv or .csv, packed or not")
    try:
        if kind in (".txt", ".md"):
            yield from _paragraphs(iterate_lines(path))
        else:
            for record in iterate_records(path, [field], header=True, remedy="name it with field"):
                if record[field] is not None:  # JSON's null is no text
                    yield str(record[field])
    except ValueError as error:
        raise TextError(f"text = {error}") from error


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """What blank lines separate, each on one line."""
    paragraph: list[str] = []
    for line in lines:
        if line.strip():
            paragraph.append(line.strip())
        elif paragraph:
            yield " ".join(paragraph)
            paragraph = []
    if paragraph:
        yield " ".join(paragraph)


def _read_hub(source: str, field: str) -> Iterator[str]:
    name, _, split = source.partition(":")
    user, _, rest = name.partition("/")
    repository, _, configuration = rest.partition("/")
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise TextError(
            f"text = {source!r}: there is no such file, and to read a Hub dataset of that name, `pip install datasets`"
        ) from error
    full = f"{user}/{repository}" if repository else user
    try:
        rows = load_dataset(full, configuration or None, split=split or "train", streaming=True)
        for row in rows:
            if field not in row:
                raise TextError(
                    f"text = {source!r}: its rows have {', '.join(row)}, not {field!r}; name one with field"
                )
            if row[field] is not None:
                yield str(row[field])
    except (OSError, ValueError) as error:
        if isinstance(error, TextError):
            raise
        raise TextError(
            f"text = {source!r}: there is no such file, and no such Hub dataset could be opened ({error})"
        ) from error


def sentences(text: str) -> list[str]:
    """A document cut after full stops, question and exclamation marks."""
    return [sentence for sentence in SENTENCE_END.split(text.strip()) if sentence]


def special_tokens(tokenizer) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    around = tokenizer("", verbose=False).input_ids
    inner = tokenizer("a", add_special_tokens=False, verbose=False).input_ids
    whole = tokenizer("a", verbose=False).input_ids
    before = next((at for at in range(len(whole)) if whole[at : at + len(inner)] == inner), len(around))
    return list(whole[:before]), list(whole[before + len(inner) :])


@dataclass(frozen=True)
class Windows:
    """Windows of tokens, each with the model's special tokens around it.

    Attributes:
        ids: one list of token ids per window.
        unknown: share of their tokens that the tokenizer does not know.
        asked: tokens that were asked for; `tokens` may be fewer when the text is short.
    """

    ids: list[list[int]]
    unknown: float
    asked: int

    @property
    def tokens(self) -> int:
        """How many tokens there are, special ones included."""
        return sum(map(len, self.ids))


def cut_windows(
    tokenizer,
    texts: Iterable[str],
    tokens: int,
    lengths: Sequence[int] = (128, 256, 512),
    short: float = 0.5,
    seed: int = 0,
    part: str = "all",
) -> Windows:
    """Windows at random places of a text: single sentences, and full windows of several lengths.

    Documents are strung together where one is too short for a window. No token is in two windows.

    Args:
        tokenizer: of the model.
        texts: documents.
        tokens: budget, special tokens included.
        lengths: of the full windows, special tokens included; each length gets about the same number of tokens.
        short: share of the budget that single sentences get, cut at the shortest of `lengths`.
        seed: of the choice.
        part: `all`, or one of the two parts of a text that have no passage in common, given the same other arguments
            but `tokens`: `fit`, seven eighths of it, or `check`, the rest.

    Raises:
        TextError: when the text does not fill one window.
    """
    rng = np.random.default_rng(seed)
    before, after = special_tokens(tokenizer)
    edges = len(before) + len(after)
    longest = max(lengths)
    # pieces of text that surely hold the longest window, in random order
    pieces: list[str] = []
    current: list[str] = []
    size = 0
    # four letters a token is little, so that a piece seldom falls short; other scripts need fewer
    room = longest * 7
    seen = 0
    for text in texts:
        seen += len(text)
        for passage in sentences(text) if len(text) > room else [text]:
            current.append(passage)
            size += len(passage) + 1
            if size >= room:
                pieces.append(" ".join(current))
                current, size = [], 0
        if seen > LETTERS:
            break
    if current:
        pieces.append(" ".join(current))
    if not pieces:
        raise TextError("the text is empty; give another file")
    order = rng.permutation(len(pieces)).tolist()
    if part != "all":
        order = [at for number, at in enumerate(order) if (number % 8 == 7) == (part == "check")]

    windows: list[list[int]] = []
    left = {"short": int(tokens * short)} | {length: tokens * (1 - short) / len(lengths) for length in lengths}
    cap = min(lengths)

    def wrap(ids: list[int]) -> list[int]:
        return [*before, *ids, *after]

    for at in order:
        if all(rest <= 0 for rest in left.values()):
            break
        kind = max(left, key=lambda key: left[key])
        if kind == "short":
            inside = sentences(pieces[at])
            for number in rng.permutation(len(inside)).tolist()[: max(1, len(inside) // 2)]:
                ids = tokenizer(inside[number], add_special_tokens=False, verbose=False).input_ids[: cap - edges]
                if len(ids) < 3 or left["short"] <= 0:
                    continue
                windows.append(wrap(ids))
                left["short"] -= len(ids) + edges
            continue
        ids = tokenizer(pieces[at], add_special_tokens=False, verbose=False).input_ids
        start = 0
        # what is left of a piece serves shorter windows
        for length in sorted(lengths, reverse=True):
            while left[length] > 0 and len(ids) - start >= length - edges:
                windows.append(wrap(ids[start : start + length - edges]))
                left[length] -= length
                start += length - edges
    if not windows:
        raise TextError(f"the text does not fill one window of {min(lengths)} tokens; give more of it")
    unknown = tokenizer.unk_token_id
    total = sum(map(len, windows))
    count = sum(ids.count(unknown) for ids in windows) if unknown is not None else 0
    rng.shuffle(windows)
    return Windows(windows, count / total, tokens)
