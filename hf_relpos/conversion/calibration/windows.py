"""Windows of tokens for calibration, from text or at random, masked, with warnings about too little text."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ...data.masking import mask_tokens
from ...data.text import pair_fields, paths_or_documents, read_texts
from ...data.windows import MAX_UNKNOWN_RATE, Windows, cut_windows, special_tokens
from ...evaluation.inspection import has_mlm_head
from .settings import CalibrationError


# Lengths of the windows, up to the teacher's maximum length; there are also single sentences.
LENGTHS = (128, 256, 512)
# Below the first number of tokens the report warns; below the second nothing can be fitted.
FEW, TOO_FEW = 10_000, 500


def window_lengths(limit: int) -> tuple[int, ...]:
    """The `LENGTHS` up to `limit`; `limit` alone if it is shorter than all of them."""
    return tuple(length for length in LENGTHS if length <= limit) or (limit,)


def gather(
    tokenizer: Any,
    texts: Any,
    tokens: int,
    lengths: Sequence[int],
    part: str,
    field: str | Sequence[str],
    seed: int,
    short: float = 0.5,
    passage: int | None = None,
) -> Windows:
    """Cut windows from files, each with the same share of the tokens, or from documents.

    Args:
        texts: as in `paths_or_documents`.
        part: as in `cut_windows`.
        field: field of files and datasets, one for all or one for each.
        passage: as in `cut_windows`.

    Raises:
        TextError: for text that cannot be read, or does not fill one window.
    """
    texts = paths_or_documents(texts)
    if isinstance(texts[0], Path):
        share = -(-tokens // len(texts))
        first, *others = (
            cut_windows(tokenizer, read_texts(path, own_field), share, lengths, short, seed, part, passage)
            for path, own_field in pair_fields(texts, field)
        )
        return first.joined(*others)
    return cut_windows(tokenizer, texts, tokens, lengths, short, seed, part, passage)


def gather_all(
    tokenizer: Any,
    texts: Any,
    tokens: int,
    lengths: Sequence[int],
    length: int,
    field: str | Sequence[str],
    seed: int,
) -> Windows:
    """The windows to fit. If `length` is longer than all `lengths`, half of the tokens are in rows of that length.

    Raises:
        TextError: for text that does not fill the windows.
    """
    if length <= max(lengths):
        return gather(tokenizer, texts, tokens, lengths, "fit", field, seed)
    short = gather(tokenizer, texts, tokens // 2, lengths, "fit", field, seed, passage=length)
    long = gather(tokenizer, texts, tokens // 2, (length,), "fit", field, seed + 2, short=0.0, passage=length)
    return short.joined(long)


def random_windows(tokenizer: Any, tokens: int, limit: int, seed: int) -> Windows:
    """Windows of random tokens, for a calibration without text, since much of a model's attention is to positions.

    Tokens are drawn by Zipf's law in the order of the vocabulary, which is roughly that of their frequency. Most
    windows are short.

    Args:
        limit: length of the longest window.
    """
    rng = np.random.default_rng(seed)
    special = set(tokenizer.all_special_ids)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    usable = [token for token, word in enumerate(words) if token not in special and not word.startswith("[unused")]
    weight = 1 / (np.arange(len(usable)) + 10.0)
    before, after = special_tokens(tokenizer)
    lengths = {16: 0.3, 24: 0.25, 32: 0.2, 48: 0.15, 128: 0.06, 256: 0.03, 512: 0.01}
    kept = {length: share for length, share in lengths.items() if length <= limit} or {limit: 1.0}
    shares = np.array(list(kept.values())) / sum(kept.values())
    windows, count = [], 0
    while count < tokens:
        length = int(rng.choice(list(kept), p=shares))
        body = rng.choice(usable, size=max(1, length - len(before) - len(after)), p=weight / weight.sum())
        windows.append([*before, *body.tolist(), *after])
        count += length
    return Windows(windows, 0.0, tokens)


def mask_windows(windows: Windows, model: PreTrainedModel, tokenizer: Any, share: float, seed: int) -> Windows:
    """Mask a share of the tokens in half of the windows, only for a model that predicts masked tokens.

    Without masks the result would keep fewer of the source's predictions of masked tokens. With masks in every window
    it would never see unmasked text.
    """
    mask = tokenizer.mask_token_id
    if not share or mask is None or not has_mlm_head(model):
        return windows
    rng, special = np.random.default_rng(seed + 3), tokenizer.all_special_ids
    rows = []
    for row in windows.ids:
        rate = share if rng.random() < 0.5 else 0.0
        ids = np.asarray(row)
        masked, _ = mask_tokens(ids, mask, rng, rate, ~np.isin(ids, special), at_least_one=False)
        rows.append(masked.tolist())
    return replace(windows, ids=rows)


def check_windows(windows: Windows, limit: int) -> list[str]:
    """Notes on shortcomings of the text, for the report; each is also a warning.

    Raises:
        CalibrationError: for text too short to fit anything.
    """
    if windows.tokens < TOO_FEW:
        raise CalibrationError(
            f"texts: {windows.tokens} tokens are too few to fit anything; give at least {TOO_FEW}, better 12,000"
        )
    longest = max(map(len, windows.ids))
    notes = []
    if windows.tokens < FEW:
        remedy = (
            "give more text"
            if windows.tokens < 0.9 * windows.budget
            else "ask for more with the options tokens or steps"
        )
        notes.append(f"only {windows.tokens:,} tokens of text: fits want 12,000 or more; {remedy}")
    if windows.unknown_rate > MAX_UNKNOWN_RATE:
        notes.append(
            f"the tokenizer does not know {100 * windows.unknown_rate:.0f} % of the tokens; is the text in the "
            "model's language?"
        )
    if longest < min(limit, max(LENGTHS)):
        notes.append(
            f"no window has more than {longest} tokens: distances from {longest} to {limit - 1} were never seen and "
            "take the values of their neighbours; give longer documents"
        )
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return notes


def shared_first_token(windows: Sequence[Sequence[int]]) -> int | None:
    """The first token of all windows, such as [CLS]; None if they differ."""
    firsts = {ids[0] for ids in windows}
    return firsts.pop() if len(firsts) == 1 else None


def distance_histogram(windows: Iterable[Sequence[int]]) -> dict[str, int]:
    """Number of token pairs in the windows by distance, in octaves: "1", "2-3", "4-7", …."""
    counts: dict[str, int] = {}
    for ids in windows:
        low = 1
        while low < len(ids):
            high = min(2 * low - 1, len(ids) - 1)
            name = str(low) if low == 1 else f"{low}-{2 * low - 1}"
            pairs = sum(range(len(ids) - high, len(ids) - low + 1))
            counts[name] = counts.get(name, 0) + pairs
            low *= 2
    return dict(sorted(counts.items(), key=lambda item: int(item[0].split("-")[0])))
