"""Measurements of `hf-relpos compare`: a student against its teacher, on text."""

import warnings
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..console import ProgressCallback
from ..data.batching import Row
from ..data.text import TextError, pair_fields, read_texts
from ..data.windows import cut_windows, unknown_tokens_note
from ..deprecation import rename_arguments
from .inspection import model_max_length
from .loading import load_encoder
from .model_fidelity import default_lengths, fidelity


@rename_arguments(text=("texts", {}))
def compare_models(
    teacher: str,
    student: str,
    texts: Sequence[str],
    field: str | Sequence[str] = "text",
    lengths: Sequence[int] | None = None,
    pooling: str | None = None,
    tokenizer: str | None = None,
    tokens: int = 4096,
    progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Measure the agreement of a student with its teacher; warns about text with many unknown tokens.

    Args:
        teacher: folder or Hub repository.
        student: likewise.
        texts: files or folders for `read_texts`, on which neither model was fitted.
        field: key or column of the text; one for all, or one for each.
        lengths: tokens per window; None for `default_lengths`.
        pooling: `mean` or `cls`; None for that of the teacher's repository, or `mean` if it has none.
        tokenizer: folder or Hub repository of the tokenizer; None for the teacher's.
        tokens: approximate number of tokens of text for each length.

    Returns:
        The content of the JSON file.

    Raises:
        ValueError: for a length that is too short, a different number of fields than texts, files that cannot be read,
            and models that cannot be compared.
    """
    pair_fields(texts, field)
    if lengths and min(lengths) < 3:
        raise ValueError(f"--lengths {min(lengths)} is too short: [CLS] and [SEP] are two tokens; give 3 or more")
    one = load_encoder(teacher, tokenizer, pooling)
    other = load_encoder(student, tokenizer or teacher, one.pooling)
    lengths = sorted(set(lengths or default_lengths(model_max_length(one.model))))
    windows, skipped, unknown = windows_by_length(one.tokenizer, texts, field, lengths, tokens)
    if note := unknown_tokens_note(unknown):
        warnings.warn(note, stacklevel=2)
    mask = one.tokenizer.mask_token_id
    measured = fidelity(one.model, other.model, windows, one.pooling, mask, progress=progress)
    measured.skipped.update(skipped)
    told = {"teacher": teacher, "student": student, "text": list(texts), "unknown": unknown}
    window = getattr(other.model.config, "attention_window", None)
    return {**told, "attention_window": window, **measured.to_dict()}


def windows_by_length(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    field: str | Sequence[str],
    lengths: Sequence[int],
    tokens: int,
) -> tuple[dict[int, Sequence[Row]], dict[int, str], float]:
    """Cut windows of each length, about `tokens` tokens but at least four windows.

    Returns:
        Windows by length; skipped lengths, which the text does not fill, with the reason; share of unknown tokens.

    Raises:
        TextError: for text that cannot be read, or fills none of the lengths.
    """
    windows: dict[int, Sequence[Row]] = {}
    skipped: dict[int, str] = {}
    unknown = 0.0
    for length in lengths:
        try:
            cut = cut_windows(tokenizer, read_texts(texts, field), max(tokens, 4 * length), (length,), 0.0)
        except TextError as error:
            if length == min(lengths):  # longer windows fail, too
                raise
            skipped[length] = str(error)
        else:
            windows[length], unknown = cut.ids, max(unknown, cut.unknown_rate)
    return windows, skipped, unknown
