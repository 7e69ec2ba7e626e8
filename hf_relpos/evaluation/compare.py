"""Measurements of `hf-relpos compare`: a student against its teacher, on text and on sentence pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..console import ProgressCallback
from ..data.batching import Row
from ..data.pairs import PAIR_COLUMNS, Pair, read_pairs
from ..data.text import TextError, pair_fields, read_texts
from ..data.windows import cut_windows, warn_of_unknown_tokens
from .encoder import Encoder
from .inspection import model_max_length, set_attention_window
from .loading import load_encoder
from .model_fidelity import FidelitySettings, default_lengths, fidelity
from .similarity import pair_vectors, rank_correlation, scipy_stats, similarities, spearman_difference


@dataclass(frozen=True)
class CompareSettings:
    """Settings of `compare_models`.

    Attributes:
        teacher: folder or Hub repository.
        student: likewise.
        text: files or Hub datasets for `read_texts`, on which neither model was fitted.
        field: key or column of the text; one for all, or one for each.
        lengths: tokens per window; None for `default_lengths`.
        sts: files of scored sentence pairs.
        columns: columns of these files: score, first and second sentence.
        pooling: `mean` or `cls`; None for that of the teacher's repository, or `mean` if it has none.
        tokenizer: folder or Hub repository of the tokenizer; None for the teacher's.
        tokens: approximate number of tokens of text for each length.
        attention_window: `attention_window` of the student, 0 for none; None for its own. Lengths past the teacher's
            maximum are then also measured with its own.

    Raises:
        ValueError: for a length that is too short, and a different number of fields than texts.
    """

    teacher: str
    student: str
    text: Sequence[str]
    field: str | Sequence[str] = "text"
    lengths: Sequence[int] | None = None
    sts: Sequence[Path] = ()
    columns: Sequence[str] = PAIR_COLUMNS
    pooling: str | None = None
    tokenizer: str | None = None
    tokens: int = 4096
    attention_window: int | None = None

    def __post_init__(self) -> None:
        pair_fields(self.text, self.field)
        if self.lengths and min(self.lengths) < 3:
            raise ValueError(f"--lengths {min(self.lengths)}: [CLS] and [SEP] take two tokens; give 3 or more")


def compare_models(settings: CompareSettings, progress: ProgressCallback | None = None) -> dict[str, Any]:
    """Measure the agreement of a student with its teacher; warns about text with many unknown tokens.

    Returns:
        The content of the JSON file.

    Raises:
        ValueError: for files that cannot be read, and models that cannot be compared.
    """
    if settings.sts:
        scipy_stats()  # an error now, not after the models have run
    pairs_by_file = {str(path): read_pairs(path, settings.columns) for path in settings.sts}
    teacher = load_encoder(settings.teacher, settings.tokenizer, settings.pooling)
    student = load_encoder(settings.student, settings.tokenizer or settings.teacher, teacher.pooling)
    window = settings.attention_window
    own = None if window is None else set_attention_window(student.model, window)
    lengths = sorted(set(settings.lengths or default_lengths(model_max_length(teacher.model))))
    windows, skipped, unknown = windows_by_length(
        teacher.tokenizer, settings.text, settings.field, lengths, settings.tokens
    )
    warn_of_unknown_tokens(unknown)
    fidelity_settings = FidelitySettings(teacher.pooling, teacher.tokenizer.mask_token_id)
    limit = model_max_length(teacher.model)
    past = {length: rows for length, rows in windows.items() if limit is not None and length > limit}
    rows_again = past if own is not None and own != window else {}
    measured = fidelity(teacher.model, student.model, windows, fidelity_settings, progress)
    measured.skipped.update(skipped)
    results = {
        "teacher": settings.teacher,
        "student": settings.student,
        "text": list(settings.text),
        "unknown": unknown,
        "attention_window": getattr(student.model.config, "attention_window", None),
        **measured.to_dict(),
    }
    if pairs_by_file:
        results["similarity"] = {
            name: compare_similarity(teacher, student, pairs, progress) for name, pairs in pairs_by_file.items()
        }
    if own is not None and rows_again:
        set_attention_window(student.model, own)
        results["as_it_is"] = fidelity(teacher.model, student.model, rows_again, fidelity_settings, progress).to_dict()
    return results


def windows_by_length(
    tokenizer: PreTrainedTokenizerBase,
    text: Sequence[str],
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
            cut = cut_windows(tokenizer, read_texts(text, field), max(tokens, 4 * length), (length,), 0.0)
        except TextError as error:
            if length == min(lengths):  # longer windows fail, too
                raise
            skipped[length] = str(error)
        else:
            windows[length], unknown = cut.ids, max(unknown, cut.unknown_rate)
    return windows, skipped, unknown


def compare_similarity(
    teacher: Encoder, student: Encoder, pairs: Sequence[Pair], progress: ProgressCallback | None = None
) -> dict[str, Any]:
    """Spearman × 100 of both models, their difference with a 95 % range, and the cosines of their sentence vectors."""
    vectors = [pair_vectors(encoder, pairs, progress) for encoder in (teacher, student)]
    scores = np.array([pair.score for pair in pairs])
    cosines = [similarities(each) for each in vectors]
    left, right = (each.double().flatten(0, 1) for each in vectors)
    agreement = torch.nn.functional.cosine_similarity(left, right, dim=-1)
    worst = int(agreement.argmin())
    return {
        "pairs": len(pairs),
        "teacher": 100 * rank_correlation(cosines[0], scores),
        "student": 100 * rank_correlation(cosines[1], scores),
        "difference": spearman_difference(cosines[0], cosines[1], scores),
        "sentence_cosine": {
            "mean": float(agreement.mean()),
            "min": float(agreement[worst]),
            "sentence_of_min": (pairs[worst // 2].sentence1, pairs[worst // 2].sentence2)[worst % 2],
        },
    }
