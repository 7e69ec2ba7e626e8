"""Agreement of a converted model with its source: hidden states, sentence vectors, attention, masked tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..console import ProgressCallback
from ..data.batching import BATCH_TOKENS, Row, batch_indices
from .attention_fidelity import AttentionDivergence, eager_attention
from .encoder import check_pooling, hidden_states, pad_batch
from .fidelity_report import Fidelity, LengthFidelity, ShiftConsistency
from .hidden_state_fidelity import SHIFTS, CosineMeans, shift_consistency
from .inspection import accepts_position_ids, has_mlm_head, model_max_length
from .masked import masked_agreement
from .sliding_windows import windowed_hidden_states


LENGTHS = (16, 64, 128, 256, 512)


@dataclass(frozen=True)
class FidelitySettings:
    """Settings of `fidelity`.

    Attributes:
        pooling: pooling of the sentence vectors, `mean` or `cls`.
        mask_token_id: id of [MASK], to measure the agreement on masked tokens if both models predict them; None skips
            this.
        divergence: compare attention weights; this switches both models to eager attention.
        ceiling: measure the teacher's agreement with itself under shifts.
        shifts: shifts for `ceiling`, in positions.
        sample: tokens of each length used for `divergence` and `ceiling`, which take several times as long as the
            cosines. Whole windows are used, evenly spread, at least one. None for all.
        seed: decides which tokens are masked.
        batch_tokens: tokens per batch.

    Raises:
        ValueError: for an unknown pooling.
    """

    pooling: str = "mean"
    mask_token_id: int | None = None
    divergence: bool = True
    ceiling: bool = True
    shifts: Sequence[int] = SHIFTS
    sample: int | None = None
    seed: int = 0
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        check_pooling(self.pooling)


def default_lengths(limit: int | None) -> list[int]:
    """Window lengths up to a teacher's maximum length (512 for no limit), and twice and four times this length."""
    limit = limit or LENGTHS[-1]
    return sorted({*(length for length in LENGTHS if length <= limit), limit, 2 * limit, 4 * limit})


def fidelity(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    windows_by_length: Mapping[int, Sequence[Row]],
    settings: FidelitySettings | None = None,
    progress: ProgressCallback | None = None,
) -> Fidelity:
    """Compare a student with its teacher on windows of text of several lengths.

    Past the teacher's maximum length the reference is its hidden states of overlapping windows
    (`windowed_hidden_states`), and neither attention nor masked tokens are compared. Lengths past the student's
    maximum are skipped and listed.

    Args:
        teacher: a model with `last_hidden_state`, or with a head on such a model, in eval mode.
        student: likewise, of the same hidden size and tokenizer, on the same device.
        windows_by_length: for each length, rows of at most that many tokens, `[CLS] … [SEP]`.
        settings: None for the defaults.
        progress: called for each length with the number of tokens done, and their total.

    Raises:
        ValueError: for a length without windows, windows that are too long, models of different widths or
            vocabularies, and hidden states that are not finite.
    """
    settings = settings or FidelitySettings()
    _check(teacher, student, windows_by_length)
    limit, student_limit = model_max_length(teacher), model_max_length(student)
    lengths, skipped = [], {}
    for length, windows in sorted(windows_by_length.items()):
        advance = _count(progress, length, windows)
        if student_limit is not None and length > student_limit:
            skipped[length] = f"the student reads {student_limit} tokens"
        elif limit is None or length <= limit:
            lengths.append(_within_limit(teacher, student, length, windows, settings, advance))
        else:
            lengths.append(_past_limit(teacher, student, length, windows, settings, advance))
    return Fidelity(limit, student_limit, settings.pooling, lengths, skipped)


def _predicts(teacher: PreTrainedModel, student: PreTrainedModel, settings: FidelitySettings) -> bool:
    return settings.mask_token_id is not None and has_mlm_head(teacher) and has_mlm_head(student)


def _count(progress: ProgressCallback | None, length: int, windows: Sequence[Row]) -> Callable[[torch.Tensor], None]:
    """A function to call with the mask of each batch."""
    done, total = 0, sum(map(len, windows))

    def advance(mask: torch.Tensor) -> None:
        nonlocal done
        done += int(mask.sum())
        if progress is not None:
            progress(f"comparing, {length:,} tokens", done, total)

    return advance


def _check(teacher: PreTrainedModel, student: PreTrainedModel, windows_by_length: Mapping[int, Sequence[Row]]) -> None:
    """
    Raises:
        ValueError: for models and windows that `fidelity` rejects.
    """
    for name in ("hidden_size", "vocab_size"):
        sizes = [getattr(model.base_model.config, name, None) for model in (teacher, student)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise ValueError(
                f"{name} = {sizes[0]} in the teacher and {sizes[1]} in the student; give a student that was made of "
                "this teacher"
            )
    for length, windows in windows_by_length.items():
        if not windows or max(map(len, windows)) > length:
            raise ValueError(
                f"windows_by_length[{length}] has {len(windows)} windows"
                + (f", the longest of {max(map(len, windows))} tokens" if windows else "")
                + "; give at least one, and none longer than the length"
            )


def _within_limit(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    length: int,
    windows: Sequence[Row],
    settings: FidelitySettings,
    advance: Callable[[torch.Tensor], None],
) -> LengthFidelity:
    """Compare windows that both models read whole."""
    cosines = CosineMeans(settings.pooling)
    attention = AttentionDivergence(teacher, student) if settings.divergence else None
    sample, others = _sampled(windows, settings.sample)
    with eager_attention(teacher, student) if attention is not None else nullcontext():
        for ids, mask in _batches(sample, student, settings):
            states = _states(teacher, student, ids, mask) if attention is None else attention.add(ids, mask)
            cosines.add(*states, mask)
            advance(mask)
    for ids, mask in _batches(others, student, settings):
        cosines.add(*_states(teacher, student, ids, mask), mask)
        advance(mask)
    limit, shifted = model_max_length(teacher), max(map(len, windows)) + min(settings.shifts)
    ceiling = masked = None
    if settings.ceiling and accepts_position_ids(teacher) and (limit is None or shifted <= limit):
        ceiling = shift_consistency(teacher, sample, settings.shifts, settings.pooling, settings.batch_tokens)
    if settings.mask_token_id is not None and _predicts(teacher, student, settings):
        masked = masked_agreement(
            teacher, student, windows, settings.mask_token_id, seed=settings.seed, batch_tokens=settings.batch_tokens
        )
    divergence = None if attention is None else attention.means()
    return _entry(length, windows, "teacher", cosines, divergence=divergence, masked=masked, ceiling=ceiling)


def _sampled(windows: Sequence[Row], tokens: int | None) -> tuple[Sequence[Row], Sequence[Row]]:
    """Evenly spread windows of about that many tokens, and the other windows."""
    total = sum(map(len, windows))
    if tokens is None or tokens >= total:
        return windows, []
    count = max(1, len(windows) * tokens // total)
    chosen = {index * len(windows) // count for index in range(count)}
    parts: tuple[list[Row], list[Row]] = ([], [])
    for index, window in enumerate(windows):
        parts[index not in chosen].append(window)
    return parts


def _batches(
    windows: Sequence[Row], model: PreTrainedModel, settings: FidelitySettings
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and mask of each batch of windows, on the model's device."""
    for indices in batch_indices(windows, settings.batch_tokens):
        yield pad_batch([windows[index] for index in indices], model)


def _states(
    teacher: PreTrainedModel, student: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden states of both models, (B, L, D) each."""
    return hidden_states(teacher, ids, mask), hidden_states(student, ids, mask)


def _past_limit(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    length: int,
    windows: Sequence[Row],
    settings: FidelitySettings,
    advance: Callable[[torch.Tensor], None],
) -> LengthFidelity:
    """Compare windows that the teacher reads in overlapping pieces; `ceiling` is for pieces that start elsewhere."""
    limit = model_max_length(teacher)
    assert limit is not None
    cosines, ceiling = CosineMeans(settings.pooling), CosineMeans(settings.pooling)

    def reference(rows: Sequence[Row], stride: int) -> torch.Tensor:
        """The teacher's hidden states, (B, L, D), padded with zeros."""
        states = [
            windowed_hidden_states(teacher, row, stride=stride, batch_tokens=settings.batch_tokens) for row in rows
        ]
        return nn.utils.rnn.pad_sequence(states, batch_first=True)

    for indices in batch_indices(windows, settings.batch_tokens):
        rows = [windows[index] for index in indices]
        ids, mask = pad_batch(rows, student)
        target = reference(rows, limit // 2)
        states = hidden_states(student, ids, mask)
        if settings.ceiling:
            ceiling.add(reference(rows, 3 * limit // 8), target, mask)
        cosines.add(target, states, mask)
        advance(mask)
    consistency = ShiftConsistency(len(windows), *ceiling.means(), {}) if settings.ceiling else None
    return _entry(length, windows, "windowed teacher", cosines, ceiling=consistency)


def _entry(length: int, windows: Sequence[Row], reference: str, cosines: CosineMeans, **more: Any) -> LengthFidelity:
    """Results for windows of one length, from the sums over its batches."""
    tokens = sum(map(len, windows))
    return LengthFidelity(length, len(windows), tokens, reference, *cosines.means(), cosines.quarters(), **more)
