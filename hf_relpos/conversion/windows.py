"""Windows of tokens to learn from, cut from text and masked, with warnings about too little text."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..data.masking import mask_tokens
from ..data.text import pair_fields, paths_or_documents, read_texts
from ..data.windows import MAX_UNKNOWN_RATE, Windows, cut_windows
from ..evaluation.inspection import has_mlm_head
from ..families.errors import ConversionError


# Lengths of the windows, up to the teacher's maximum length; there are also single sentences.
LENGTHS = (128, 256, 512)
# Below the first number of tokens the report warns; below the second nothing can be learnt.
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
        ConversionError: for text too short to learn anything.
    """
    if windows.tokens < TOO_FEW:
        raise ConversionError(
            f"texts: {windows.tokens} tokens are too few to learn anything; give at least {TOO_FEW}, better 12,000"
        )
    longest = max(map(len, windows.ids))
    notes = []
    if windows.tokens < FEW:
        remedy = "give more text" if windows.tokens < 0.9 * windows.budget else "ask for more with the option steps"
        notes.append(f"only {windows.tokens:,} tokens of text: a good result wants 12,000 or more; {remedy}")
    if windows.unknown_rate > MAX_UNKNOWN_RATE:
        notes.append(
            f"the tokenizer does not know {100 * windows.unknown_rate:.0f} % of the tokens; is the text in the "
            "model's language?"
        )
    if longest < min(limit, max(LENGTHS)):
        notes.append(
            f"no window has more than {longest} tokens: distances from {longest} to {limit - 1} were never seen; "
            "give longer documents"
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
