"""Windows of tokens cut from the texts of a conversion, to learn from and to check with."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..checkpoints.errors import ConversionError, conversion_errors
from ..data.text import TextError, read_texts
from ..data.windows import PairLayout, Windows, cut_windows, pair_windows, unknown_tokens_note
from ..evaluation.inspection import has_mlm_head
from .methods import TOO_FEW
from .plan import Conversion


# Lengths of the windows, up to the teacher's maximum length; there are also single sentences.
LENGTHS = (128, 256, 512)
FEW = 10_000  # tokens, below which the report warns

# Share of the windows that are segment pairs, also for a sentence encoder, which may be fine-tuned on pairs. For
# all-MiniLM-L6-v2, 400 steps, the sentence cosine of single texts at 512 tokens is .977 without pairs, .978 with a
# quarter of them and .977 with half. Fine-tuned on pairs of STS-B, half is 3.2 ± .3 points above the source, a quarter
# .3 ± 2.5; without pairs, F1 on questions of SQuAD was 17 points below it.
PAIRS = 0.5

# Steps on short rows per step on rows past the source's limit, which are expensive and come in addition: on two thirds
# of the steps, the sentence cosine of short rows was lower by up to .006. With all-MiniLM-L6-v2 and 2,048 tokens, 2 in
# place of 3 takes 1.3 times as long; the token cosine of long rows is .942 instead of .941, the sentence cosine at 512
# tokens .974 instead of .970.
SHORT_STEPS = 3


def window_lengths(limit: int) -> tuple[int, ...]:
    """The `LENGTHS` up to `limit`; `limit` alone if it is shorter than all of them."""
    return tuple(length for length in LENGTHS if length <= limit) or (limit,)


def learning_windows(conversion: Conversion, tokenizer: Any, model: PreTrainedModel) -> Windows:
    """The training windows, with segment pairs and masks; rows beyond the source's limit are added to them.

    `details["text"]` describes them.

    Args:
        model: the result, whose head decides about masks.

    Raises:
        ConversionError: as `gather`, for text too short to learn anything, and a share of pairs for a source without
            them.
    """
    options, limit, seed = conversion.options, conversion.limit, conversion.seed + 1
    length, batch, lengths = options.length or limit, options.batch_tokens, window_lengths(limit)
    windows = gather(conversion, tokenizer, "fit", conversion.tokens_to_distil, lengths, seed, 0.5)
    if length > limit:
        steps = -(-windows.tokens // (batch * SHORT_STEPS))
        tokens = steps * max(1, batch // length) * length
        windows = windows.joined(gather(conversion, tokenizer, "fit", tokens, (length,), seed + 3, 0.0))
    layout, share = PairLayout.of(tokenizer) if conversion.tells_segments_apart else None, options.pairs
    if layout is None and share:
        raise ConversionError(f"method_options['pairs'] = {share}: source or tokenizer lack token types; leave it out")
    windows = pair_windows(windows, layout, PAIRS if share is None else share, limit, seed)
    windows = mask_windows(windows, model, tokenizer, options.mask, seed)
    conversion.details["text"] = {
        "tokens": windows.tokens,
        "windows": len(windows.ids),
        "unknown_share": round(windows.unknown_rate, 5),
        "pair_windows": sum(map(any, windows.types or ())),
        "notes": check_windows(windows, max(limit, length)),
    }
    return windows


def gather(
    conversion: Conversion, tokenizer: Any, part: str, tokens: int, lengths: Sequence[int], seed: int, short: float
) -> Windows:
    """Cut windows from files, each with the same share of the tokens, or from documents.

    Training and held-out windows share no text, because both are cut from the same, divided passages.

    Args:
        part: "fit", or "check", which skips texts that fill no window.
        tokens: number of tokens.
        lengths: of the windows.
        seed: of the random choice.
        short: share of the tokens for single sentences.

    Raises:
        ConversionError: for text that cannot be read, or does not fill one window.
    """
    passage = max(*window_lengths(conversion.limit), conversion.options.length or 0)
    cut = partial(cut_windows, tokenizer, lengths=lengths, short=short, seed=seed, part=part, passage=passage)
    texts = conversion.texts or []
    files = [read_texts(*each, conversion.skip_unreadable) for each in texts if isinstance(each, tuple)]
    sources: Sequence[Iterable[Any]] = files or [texts]
    found: list[Windows] = []
    for source in sources:
        with suppress(TextError) if part == "check" else conversion_errors("texts: "):
            found.append(cut(source, -(-tokens // len(sources))))
    return found[0].joined(*found[1:]) if found else Windows([], 0.0, tokens)


def mask_windows(windows: Windows, model: PreTrainedModel, tokenizer: Any, share: float, seed: int) -> Windows:
    """Mask a share of the tokens in half of the windows, only for a model that predicts masked tokens.

    Without masks, the result would reproduce fewer of the source's predictions of masked tokens. With masks in every
    window, it would never see unmasked text.
    """
    mask = tokenizer.mask_token_id
    if not share or mask is None or not has_mlm_head(model):
        return windows
    rng, special = np.random.default_rng(seed + 3), tokenizer.all_special_ids
    rows = []
    for row in windows.ids:
        rate = share if rng.random() < 0.5 else 0.0
        ids = np.asarray(row)
        masked = (rng.random(len(ids)) < rate) & ~np.isin(ids, special)
        rows.append(np.where(masked, mask, ids).tolist())
    return replace(windows, ids=rows)


def check_windows(windows: Windows, limit: int) -> list[str]:
    """Notes on shortcomings of the text, for the report; each is also a warning.

    Raises:
        ConversionError: for text too short to learn anything.
    """
    if windows.tokens < TOO_FEW:
        raise ConversionError(f"texts: {windows.tokens} tokens are too few; give at least {TOO_FEW}, better 12,000")
    longest = max(map(len, windows.ids))
    notes = []
    if windows.tokens < FEW:
        remedy = "give more text" if windows.tokens < 0.9 * windows.budget else "set a higher number of steps"
        notes.append(f"only {windows.tokens:,} tokens of text: a good result needs 12,000 or more; {remedy}")
    notes += filter(None, [unknown_tokens_note(windows.unknown_rate)])
    if longest < min(limit, max(LENGTHS)):
        lack = f"no window has more than {longest} tokens, so distances from {longest} to {limit - 1} were not trained"
        notes.append(f"{lack}; give longer documents")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return notes


def shared_first_token(windows: Sequence[Sequence[int]]) -> int | None:
    """The first token of all windows, such as [CLS]; None if they differ."""
    firsts = {ids[0] for ids in windows}
    return firsts.pop() if len(firsts) == 1 else None
