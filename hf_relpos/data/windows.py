"""Windows of token ids, cut from documents at random and enclosed in the model's special tokens."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from .records import text_problem
from .seed import check_seed
from .text import MAX_CHARACTERS, TextError


SENTENCE_END = re.compile(r"(?<=[.!?。！？])[\"'”’)\]]*\s+")
# A text with a larger share of unknown tokens is assumed to be in another language.
MAX_UNKNOWN_RATE = 0.05
# Smallest number of tokens in a segment of a pair.
SHORTEST_SEGMENT = 2


def sentences(text: str) -> list[str]:
    """Split a document after full stops, question and exclamation marks."""
    return [sentence for sentence in SENTENCE_END.split(text.strip()) if sentence]


def pieces(text: str, size: int) -> list[str]:
    """Split a document into sentences, and sentences of more than ten times `size` characters into pieces of `size`.

    A sentence of many megabytes, such as a table or a text without full stops, would take the tokenizer minutes.
    """
    return [piece for each in sentences(text) for piece in ([each] if len(each) <= 10 * size else _cut(each, size))]


def _cut(text: str, size: int) -> Iterator[str]:
    """Cut a text into pieces of at most `size` characters, after a space where their second half has one."""
    start = 0
    while start < len(text):
        end = start + size
        space = text.rfind(" ", start + size // 2, end) if end < len(text) else -1
        end = end if space < 0 else space + 1
        yield text[start:end]
        start = end


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    empty = tokenizer("", verbose=False).input_ids
    inner = tokenizer("a", add_special_tokens=False, verbose=False).input_ids
    whole = tokenizer("a", verbose=False).input_ids
    before = next((n for n in range(len(whole)) if whole[n : n + len(inner)] == inner), len(empty))
    return list(whole[:before]), list(whole[before + len(inner) :])


@dataclass(frozen=True)
class PairLayout:
    """The special tokens of two segments in one row, the first of token type 0, the second of token type 1.

    Attributes:
        before: special tokens before the first segment, of type 0.
        between: special tokens between the segments, of type 0.
        after: special tokens after the second segment, of type 1.
    """

    before: list[int]
    between: list[int]
    after: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "PairLayout | None":
        """The layout of a tokenizer; None if both segments get the same type or are in another order."""
        before, after = special_tokens(tokenizer)
        one, other = (list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids) for text in ("a", "b"))
        pair = tokenizer("a", "b", return_token_type_ids=True, verbose=False)
        ids, types = list(pair.input_ids), list(pair.get("token_type_ids") or [])
        start, second = len(before) + len(one), len(ids) - len(other) - len(after)
        between = ids[start:second]
        in_order = one and other and between and ids == [*before, *one, *between, *other, *after]
        is_known = in_order and types == [0] * second + [1] * (len(ids) - second)
        return cls(before, between, after) if is_known else None


@dataclass(frozen=True)
class Windows:
    """Windows of tokens, each with the model's special tokens around it.

    Attributes:
        ids: one list of token ids per window.
        unknown_rate: share of unknown tokens.
        budget: the requested number of tokens; `tokens` may be fewer when the text is short.
        types: one list of token types per window; None if all are 0, as for windows of one segment.
    """

    ids: list[list[int]]
    unknown_rate: float
    budget: int
    types: list[list[int]] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens, special tokens included."""
        return sum(map(len, self.ids))

    @property
    def token_types(self) -> list[list[int]]:
        """`types`, or zeros if it is None."""
        return self.types or [[0] * len(ids) for ids in self.ids]

    def joined(self, *others: "Windows") -> "Windows":
        """These windows and others."""
        parts = (self, *others)
        unknown = sum(part.unknown_rate * part.tokens for part in parts) / sum(part.tokens for part in parts)
        types = [row for part in parts for row in part.token_types] if any(part.types for part in parts) else None
        budget = sum(part.budget for part in parts)
        return Windows([ids for part in parts for ids in part.ids], unknown, budget, types)


def cut_windows(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    tokens: int,
    lengths: Sequence[int] = (128, 256, 512),
    short: float = 0.5,
    seed: int = 0,
    part: str = "all",
    passage: int | None = None,
) -> Windows:
    """Cut windows from random passages of a text: single sentences, and full windows of several lengths.

    Documents too short for a window are concatenated. No token is in two windows.

    Args:
        tokenizer: tokenizer of the model.
        texts: documents; read up to `MAX_CHARACTERS` characters.
        tokens: budget, special tokens included.
        lengths: of the full windows, special tokens included; each length gets about the same number of tokens.
        short: share of the budget for single sentences, which end with their document at the latest; one that is
            longer than the shortest of `lengths` is cut into several windows.
        seed: seed of the random choice of passages.
        part: `all`, `fit` (seven eighths of the passages) or `check` (the rest). With the same `texts` and `passage`,
            `fit` and `check` have no passage in common.
        passage: approximate number of tokens in a passage; None for the longest of `lengths`.

    Raises:
        TextError: when the text does not fill one window, and for documents that are not text.
        ValueError: for a seed that is not an integer from 0 to 2³² − 1.
    """
    check_seed(seed)
    rng = np.random.default_rng(seed)
    before, after = special_tokens(tokenizer)
    special = len(before) + len(after)
    longest = max(lengths)
    # passages long enough for the longest window, each of some documents or sentences
    passages: list[list[str]] = []
    current: list[str] = []
    size = 0
    # seven characters per token are more than most scripts have, so a passage is seldom too short
    passage_size = max(longest, passage or 0) * 7
    characters = 0
    if isinstance(texts, str | bytes):
        raise TextError(f"texts is a {type(texts).__name__}; give a list of documents, such as [text]")
    for number, text in enumerate(texts):
        if problem := text_problem(text):
            raise TextError(f"texts[{number}] {problem}")
        characters += len(text)
        for piece in pieces(text, passage_size) if len(text) > passage_size else [text]:
            current.append(piece)
            size += len(piece) + 1
            if size >= passage_size:
                passages.append(current)
                current, size = [], 0
        if characters > MAX_CHARACTERS:
            break
    if current:
        passages.append(current)
    if not passages:
        raise TextError("the text is empty; give another file")
    order = rng.permutation(len(passages)).tolist()
    if part != "all":
        checked = set(range(7, len(order), 8)) or set(range(3, len(order))[-1:])  # the last of fewer than eight
        order = [index for index in order if (index in checked) == (part == "check")]

    windows: list[list[int]] = []
    left: dict[str | int, float] = {"short": int(tokens * short)}
    left |= {length: tokens * (1 - short) / len(lengths) for length in lengths}
    shortest = min(lengths)

    for index in order:
        if all(rest <= 0 for rest in left.values()):
            break
        kind = max(left, key=lambda key: left[key])
        if kind == "short":
            inside = [sentence for piece in passages[index] for sentence in sentences(piece)]
            for number in rng.permutation(len(inside)).tolist()[: max(1, len(inside) // 2)]:
                ids = tokenizer(inside[number], add_special_tokens=False, verbose=False).input_ids
                # of text without full stops, which is one long sentence, more than one window
                for start in range(0, len(ids), shortest - special):
                    row = ids[start : start + shortest - special]
                    if len(row) < 3 or left["short"] <= 0:
                        break
                    windows.append([*before, *row, *after])
                    left["short"] -= len(row) + special
            continue
        ids = tokenizer(" ".join(passages[index]), add_special_tokens=False, verbose=False).input_ids
        start = 0
        # shorter windows use the rest of a passage
        for length in sorted(lengths, reverse=True):
            while left[length] > 0 and len(ids) - start >= length - special:
                windows.append([*before, *ids[start : start + length - special], *after])
                left[length] -= length
                start += length - special
    if not windows:
        raise TextError(f"the text does not fill one window of {min(lengths)} tokens; give more text")
    unknown = tokenizer.unk_token_id
    total = sum(map(len, windows))
    count = sum(ids.count(unknown) for ids in windows) if unknown is not None else 0
    rng.shuffle(windows)
    return Windows(windows, count / total, tokens)


def pair_windows(windows: Windows, layout: PairLayout | None, share: float, limit: int, seed: int) -> Windows:
    """Split some windows into two segments at a random place: `[CLS] … [SEP] … [SEP]`, of the same length as before.

    Args:
        windows: windows of one segment each.
        layout: segment layout of the tokenizer; None leaves all windows unchanged.
        share: approximate share of windows that are split.
        limit: maximum length of the source; longer windows, which it reads in pieces, are unchanged.
        seed: seed of the random choice.
    """
    if layout is None or not share:
        return windows
    rng = np.random.default_rng(seed + 5)
    rows, types = [], []
    for ids in windows.ids:
        words = ids[len(layout.before) : len(ids) - len(layout.after)]
        count = len(words) - len(layout.between)
        if len(ids) > limit or count < 2 * SHORTEST_SEGMENT or rng.random() >= share:
            rows.append(ids)
            types.append([0] * len(ids))
            continue
        cut = int(rng.integers(SHORTEST_SEGMENT, count - SHORTEST_SEGMENT + 1))
        second = words[cut + len(layout.between) :]
        rows.append([*layout.before, *words[:cut], *layout.between, *second, *layout.after])
        first = len(rows[-1]) - len(second) - len(layout.after)
        types.append([0] * first + [1] * (len(ids) - first))
    return replace(windows, ids=rows, types=types)


def unknown_tokens_note(rate: float) -> str:
    """A note on a share of unknown tokens with which the text may not be in the model's language; empty below it."""
    if rate <= MAX_UNKNOWN_RATE:
        return ""
    return f"{100 * rate:.0f} % of the tokens are unknown to the tokenizer; is the text in the language of the model?"
