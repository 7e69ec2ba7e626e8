"""Agreement of a converted model (the student) with its source (the teacher): hidden states, attention, predictions.

The hidden states of an absolute model change when its input is shifted by some positions. `shift_consistency` measures
this, as a scale for the distance between teacher and student. It is not a bound: [CLS] stays at its position, so a
relative model can tell the position of a token by its distance to [CLS].
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..console import ProgressCallback
from ..data.batching import BATCH_TOKENS, Row, batch_indices
from .encoder import check_pooling, hidden_states, pad_batch, pool
from .inspection import accepts_position_ids, first_position_id, has_mlm_head, model_max_length
from .masked import MaskedAgreement, masked_agreement
from .sliding_windows import windowed_hidden_states


# Most bytes of the attention weights of both models on a batch; a single row that has more is not compared.
ATTENTION_BYTES = 1024**3
# A student gives weight 0 to keys outside its attention window, and the divergence would be infinite. With 1e-10 such
# a key costs 23 nats times the teacher's weight.
MIN_WEIGHT = 1e-10


@contextmanager
def eager_attention(*models: PreTrainedModel) -> Iterator[None]:
    """Context in which models use eager attention, which returns its weights."""
    before = [model.config._attn_implementation for model in models]
    try:
        for model in models:
            model.set_attn_implementation("eager")
        yield
    finally:
        for model, name in zip(models, before, strict=True):
            model.set_attn_implementation(name)


def attention_divergence(teacher: torch.Tensor, student: torch.Tensor, mask: torch.Tensor) -> float:
    """Σ KL(teacher‖student) over heads and query tokens that are not padding, in nats.

    Args:
        teacher: weights, (B, H, L, L).
        student: weights, the same shape.
        mask: (B, L), true for tokens that are not padding.
    """
    total = 0.0
    for p, q in zip(teacher.unbind(1), student.unbind(1), strict=True):  # one head at a time, to save memory
        ratio = p.clamp(min=MIN_WEIGHT).log_().sub_(q.clamp(min=MIN_WEIGHT).log_())
        total += float((ratio * p).sum(-1, dtype=torch.float64)[mask].sum())
    return total


@torch.inference_mode()
def attention_divergences(
    teacher: PreTrainedModel, student: PreTrainedModel, windows: Sequence[Row], batch_tokens: int = BATCH_TOKENS
) -> list[float] | None:
    """Mean divergence of the attention weights for each layer, over heads and tokens.

    Args:
        windows: rows of tokens, `[CLS] … [SEP]`.

    Returns:
        None for models whose weights differ in shape or are not returned, and for weights that take more than
        `ATTENTION_BYTES`.
    """
    config, longest = teacher.base_model.config, max(map(len, windows))
    row_bytes = 2 * 4 * config.num_hidden_layers * config.num_attention_heads * longest**2
    if row_bytes > ATTENTION_BYTES:
        return None
    totals: list[float] = []
    with eager_attention(teacher, student):
        for indices in batch_indices(windows, min(batch_tokens, longest * (ATTENTION_BYTES // row_bytes))):
            ids, mask = pad_batch([windows[index] for index in indices], student)
            one, other = (
                model.base_model(input_ids=ids, attention_mask=mask.long(), output_attentions=True).attentions or ()
                for model in (teacher, student)
            )
            if not one or [weights.shape for weights in one] != [weights.shape for weights in other]:
                return None
            found = [attention_divergence(p, q, mask) / p.shape[1] for p, q in zip(one, other, strict=True)]
            totals = [a + b for a, b in zip(totals or [0.0] * len(found), found, strict=True)]
    return [total / sum(map(len, windows)) for total in totals]


LENGTHS = (16, 64, 128, 256, 512)
SHIFTS = (1, 4, 16, 32, 64)
# Thresholds of `verdict` for safe and usable: mean cosines of sentence vectors and of tokens to the teacher's. On
# all-MiniLM-L6-v2, whose own agreement under a shift of 16 positions is .96, a conversion with sentence cosine .95
# lost 0.1 to 0.4 points of STS-B, and one with .85 to .90 lost 0.7 to 1.9.
SAFE = (0.95, 0.92)
USABLE = (0.85, 0.80)


@dataclass(frozen=True)
class FidelitySettings:
    """Settings of `fidelity`.

    Attributes:
        pooling: pooling of the sentence vectors, `mean` or `cls`.
        mask_token_id: id of [MASK], to measure the agreement on masked tokens if both models predict them; None skips
            this.
        divergence: compare attention weights; this switches both models to eager attention.
        ceiling: measure the teacher's agreement with itself under shifts.
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
    sample: int | None = None
    seed: int = 0
    batch_tokens: int = BATCH_TOKENS

    def __post_init__(self) -> None:
        check_pooling(self.pooling)


@dataclass(frozen=True)
class ShiftConsistency:
    """Cosines between a model's hidden states of the same texts at shifted and unshifted positions.

    Attributes:
        windows: number of texts.
        token_cosine: cosine between the mean hidden state over all shifts and the unshifted one, mean over tokens.
        sentence_cosine: the same for sentence vectors, mean over texts.
        by_shift: `token_cosine` and `sentence_cosine` of each shift.
    """

    windows: int
    token_cosine: float
    sentence_cosine: float
    by_shift: dict[str, dict[str, float]]


@dataclass(frozen=True)
class LengthFidelity:
    """Agreement with the teacher on windows of one length.

    Attributes:
        length: tokens of the longest window.
        windows: number of windows.
        tokens: number of tokens in all windows.
        reference: `teacher`, or past its maximum length `windowed teacher`.
        token_cosine: mean over all tokens of the cosine of the last hidden states.
        sentence_cosine: mean over windows of the cosine of the sentence vectors.
        token_cosine_by_quarter: token cosine in each quarter of the windows, from the beginning.
        divergence: KL(teacher‖student) of the attention weights in nats, for each layer, mean over heads and query
            tokens; None past the maximum length, for models whose weights cannot be compared, and for weights that
            take more than a gigabyte.
        masked: agreement on masked tokens; None past the maximum length and unless both models predict masked tokens.
        ceiling: the teacher's agreement with itself under shifts of its input; None if no shift fits into its
            positions. Past the maximum length it is measured on windows that start elsewhere (3/8 of a window apart
            instead of 1/2), without `by_shift`.
    """

    length: int
    windows: int
    tokens: int
    reference: str
    token_cosine: float
    sentence_cosine: float
    token_cosine_by_quarter: list[float]
    divergence: list[float] | None = None
    masked: MaskedAgreement | None = None
    ceiling: ShiftConsistency | None = None

    @property
    def cosine_cells(self) -> list[str]:
        """For tables: token and sentence cosine, then those of the teacher with itself."""
        shifted = ["–", "–"]
        if self.ceiling:
            shifted = [f"{self.ceiling.token_cosine:.3f}", f"{self.ceiling.sentence_cosine:.3f}"]
        return [f"{self.token_cosine:.3f}", f"{self.sentence_cosine:.3f}", *shifted]

    @property
    def masked_cells(self) -> list[str]:
        """For tables: agreement, accuracy of the teacher and of the student on masked tokens, in percent."""
        masked = self.masked
        shares = (masked.agreement, masked.teacher_accuracy, masked.student_accuracy) if masked else ()
        return [f"{100 * share:.1f}" for share in shares] or ["–"] * 3


@dataclass(frozen=True)
class Fidelity:
    """The result of `fidelity`.

    Attributes:
        teacher_limit: maximum length of the teacher; None for no limit.
        student_limit: maximum length of the student; None for no limit.
        pooling: pooling of the sentence vectors.
        lengths: results by length, ascending.
        skipped: lengths that were not measured, with the reason.
    """

    teacher_limit: int | None
    student_limit: int | None
    pooling: str
    lengths: list[LengthFidelity]
    skipped: dict[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All fields and the verdict in a form for JSON (keys are strings)."""
        skipped = {str(length): reason for length, reason in self.skipped.items()}
        return {**dataclasses.asdict(self), "skipped": skipped, "verdict": verdict(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Fidelity":
        """The inverse of `to_dict`; other keys are ignored."""
        lengths = []
        for entry in plain["lengths"]:
            parts = {"masked": MaskedAgreement, "ceiling": ShiftConsistency}
            own = {name: kind(**entry[name]) for name, kind in parts.items() if entry[name]}
            lengths.append(LengthFidelity(**{**entry, **own}))
        skipped = {int(length): reason for length, reason in plain["skipped"].items()}
        return cls(plain["teacher_limit"], plain["student_limit"], plain["pooling"], lengths, skipped)


def failed_thresholds(fidelity: Fidelity) -> list[str]:
    """The thresholds of `USABLE` that a student fails, with the lengths, in words.

    Past the teacher's limit only the token cosine to the teacher's windows counts. Skipped lengths past it are listed,
    too.
    """
    sentence, token = USABLE
    found = []
    for entry in fidelity.lengths:
        if entry.reference == "teacher" and entry.sentence_cosine < sentence:
            found.append(f"sentence cosine {entry.sentence_cosine:.3f} at {entry.length} tokens, below {sentence}")
        elif entry.token_cosine < token:
            found.append(f"token cosine {entry.token_cosine:.3f} at {entry.length} tokens, below {token}")
    limit = fidelity.teacher_limit
    past = [length for length in fidelity.skipped if limit is not None and length > limit]
    return found + [f"{length} tokens were not checked: {fidelity.skipped[length]}" for length in past]


def verdict(fidelity: Fidelity) -> str:
    """The result in words: up to which length a conversion, the student, can replace its source, the teacher.

    A length is safe if the sentence cosine is at least .95 and the token cosine at least .92 (`SAFE`), there and at
    all shorter lengths. It is usable after fine-tuning with .85 and .80 (`USABLE`). Past the teacher's maximum length,
    where it reads windows, the figures are given instead.
    """
    rest = [entry for entry in fidelity.lengths if entry.reference == "teacher"]
    outside = [entry for entry in fidelity.lengths if entry.reference != "teacher"]
    parts = []
    for word, floor in (("safe", SAFE), ("usable after fine-tuning", USABLE)):
        reached = 0
        while rest and rest[0].sentence_cosine >= floor[0] and rest[0].token_cosine >= floor[1]:
            reached = rest.pop(0).length
        if reached:
            parts.append(f"{word} inside {reached}")
    if rest:
        worst = min(rest, key=lambda entry: entry.sentence_cosine)
        where = "" if worst is rest[0] else f" at {worst.length}"
        parts.append(f"not the source's at {rest[0].length} (sentence cosine {worst.sentence_cosine:.2f}{where})")
    if fidelity.teacher_limit is not None:
        part = f"past {fidelity.teacher_limit} not measured"
        if outside:
            figures = []
            for entry in outside:
                own = f" (other windows of the source {entry.ceiling.token_cosine:.2f})" if entry.ceiling else ""
                figures.append(f"{entry.token_cosine:.2f} at {entry.length:,}{own}")
            part = f"past {fidelity.teacher_limit}, token cosine to the source's windows: {', '.join(figures)}"
        elif fidelity.student_limit is not None:
            part = f"past {fidelity.student_limit} the result reads nothing"
        parts.append(part)
    return "; ".join(parts) or "nothing was measured"


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
    for name in ("hidden_size", "vocab_size"):
        sizes = [getattr(model.base_model.config, name, None) for model in (teacher, student)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise ValueError(
                f"{name} = {sizes[0]} in the teacher and {sizes[1]} in the student; give a student that was made of "
                "this teacher"
            )
    for length, windows in windows_by_length.items():
        longest = max(map(len, windows), default=0)
        if not 0 < longest <= length:
            raise ValueError(
                f"windows_by_length[{length}] has {len(windows)} windows, the longest of {longest} tokens; give at "
                "least one, and none longer than the length"
            )
    limit, student_limit = model_max_length(teacher), model_max_length(student)
    lengths, skipped = [], {}
    for length, windows in sorted(windows_by_length.items()):
        if student_limit is not None and length > student_limit:
            skipped[length] = f"the student reads {student_limit} tokens"
            continue
        pair = _Pair(teacher, student, length, windows, settings, progress)
        lengths.append(pair.within_limit() if limit is None or length <= limit else pair.past_limit(limit))
    return Fidelity(limit, student_limit, settings.pooling, lengths, skipped)


@dataclass(frozen=True)
class _Pair:
    """Teacher and student on windows of one length."""

    teacher: PreTrainedModel
    student: PreTrainedModel
    length: int
    windows: Sequence[Row]
    settings: FidelitySettings
    progress: ProgressCallback | None

    def batches(self) -> Iterator[tuple[Sequence[Row], torch.Tensor, torch.Tensor]]:
        """Rows, ids and mask of each batch of windows; tells how many tokens are done."""
        done, total = 0, sum(map(len, self.windows))
        for indices in batch_indices(self.windows, self.settings.batch_tokens):
            rows = [self.windows[index] for index in indices]
            self.tell(done, total)
            yield rows, *pad_batch(rows, self.student)
            done += sum(map(len, rows))
        self.tell(done, total)

    def tell(self, done: int, total: int) -> None:
        """Report the progress."""
        if self.progress is not None:
            self.progress(f"comparing, {self.length:,} tokens", done, total)

    def within_limit(self) -> LengthFidelity:
        """Compare windows that both models read whole."""
        settings, models = self.settings, (self.teacher, self.student)
        cosines = CosineMeans(settings.pooling)
        for _, ids, mask in self.batches():
            cosines.add(hidden_states(self.teacher, ids, mask), hidden_states(self.student, ids, mask), mask)
        sample = _sampled(self.windows, settings.sample)
        divergence = attention_divergences(*models, sample, settings.batch_tokens) if settings.divergence else None
        limit, shifted = model_max_length(self.teacher), max(map(len, self.windows)) + min(SHIFTS)
        ceiling = masked = None
        if settings.ceiling and accepts_position_ids(self.teacher) and (limit is None or shifted <= limit):
            ceiling = shift_consistency(self.teacher, sample, SHIFTS, settings.pooling, settings.batch_tokens)
        if settings.mask_token_id is not None and all(map(has_mlm_head, models)):
            masked = masked_agreement(
                *models, self.windows, settings.mask_token_id, settings.seed, settings.batch_tokens
            )
        return self.entry("teacher", cosines, divergence, masked, ceiling)

    def past_limit(self, limit: int) -> LengthFidelity:
        """Compare windows that the teacher reads in overlapping pieces, and these with pieces that start elsewhere."""
        settings = self.settings
        cosines, ceiling = CosineMeans(settings.pooling), CosineMeans(settings.pooling)

        def reference(rows: Sequence[Row], stride: int) -> torch.Tensor:
            """The teacher's hidden states, (B, L, D), padded with zeros."""
            states = [
                windowed_hidden_states(self.teacher, row, stride=stride, batch_tokens=settings.batch_tokens)
                for row in rows
            ]
            return nn.utils.rnn.pad_sequence(states, batch_first=True)

        for rows, ids, mask in self.batches():
            target = reference(rows, limit // 2)
            cosines.add(target, hidden_states(self.student, ids, mask), mask)
            if settings.ceiling:
                ceiling.add(reference(rows, 3 * limit // 8), target, mask)
        consistency = ShiftConsistency(len(self.windows), *ceiling.means(), {}) if settings.ceiling else None
        return self.entry("windowed teacher", cosines, None, None, consistency)

    def entry(self, reference: str, cosines: "CosineMeans", *more: Any) -> LengthFidelity:
        """Results, from the sums over all batches."""
        tokens, means = sum(map(len, self.windows)), cosines.means()
        return LengthFidelity(self.length, len(self.windows), tokens, reference, *means, cosines.quarters(), *more)


def _sampled(windows: Sequence[Row], tokens: int | None) -> Sequence[Row]:
    """Evenly spread windows of about that many tokens."""
    total = sum(map(len, windows))
    if tokens is None or tokens >= total:
        return windows
    count = max(1, len(windows) * tokens // total)
    return [windows[index * len(windows) // count] for index in range(count)]


class CosineMeans:
    """Mean cosines over tokens and over windows, accumulated by batch."""

    def __init__(self, pooling: str) -> None:
        self.pooling = pooling
        self.token = torch.zeros(4, dtype=torch.float64)
        self.count = torch.zeros(4, dtype=torch.float64)
        self.sentence, self.windows = 0.0, 0

    def add(self, one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the hidden states of both models, (B, L, D), with the mask, (B, L)."""
        cosines = nn.functional.cosine_similarity(one.double(), other.double(), dim=-1)
        positions = torch.arange(mask.shape[1], device=mask.device)
        quarters = 4 * positions // mask.sum(1, keepdim=True)  # quarters of each window's own length
        self.token.index_add_(0, quarters[mask].cpu(), cosines[mask].cpu())
        self.count += quarters[mask].cpu().bincount(minlength=4)
        left, right = (pool(hidden.double(), mask, self.pooling) for hidden in (one, other))
        self.sentence += float(nn.functional.cosine_similarity(left, right, dim=-1).sum())
        self.windows += len(mask)

    def means(self) -> tuple[float, float]:
        """Token and sentence cosine."""
        return float(self.token.sum() / self.count.sum()), self.sentence / self.windows

    def quarters(self) -> list[float]:
        """Token cosine by quarter of the windows; quarters without tokens are omitted."""
        return [float(total / count) for total, count in zip(self.token, self.count, strict=True) if count]


def shift_consistency(
    teacher: PreTrainedModel,
    windows: Sequence[Row],
    shifts: Sequence[int] = SHIFTS,
    pooling: str = "mean",
    batch_tokens: int = BATCH_TOKENS,
) -> ShiftConsistency:
    """Agreement of a model with itself when its input is shifted; [CLS] stays at the first position.

    Args:
        teacher: a model that takes `position_ids`.
        windows: rows of tokens, `[CLS] … [SEP]`.
        shifts: shifts in positions; those that move the longest window past the model's maximum length are skipped.
        pooling: `mean` or `cls`.

    Raises:
        ValueError: if no shift fits.
    """
    limit = model_max_length(teacher)
    longest = max(map(len, windows))
    fitting = [shift for shift in shifts if limit is None or longest + shift <= limit]
    if not fitting:
        raise ValueError(
            f"windows of {longest} tokens leave no room for a shift of {min(shifts)} in the {limit} positions of the "
            "model; give shorter ones"
        )
    first = first_position_id(teacher)
    mean, single = CosineMeans(pooling), {str(shift): CosineMeans(pooling) for shift in fitting}
    for indices in batch_indices(windows, batch_tokens):
        ids, mask = pad_batch([windows[index] for index in indices], teacher)
        plain = hidden_states(teacher, ids, mask)
        total = torch.zeros_like(plain)
        for shift in fitting:
            positions = torch.arange(ids.shape[1], device=ids.device)
            positions = torch.where(positions > 0, positions + shift, 0) + first
            shifted = hidden_states(teacher, ids, mask, positions.expand_as(ids))
            single[str(shift)].add(shifted, plain, mask)
            total += shifted
        mean.add(total / len(fitting), plain, mask)
    keys = ("token_cosine", "sentence_cosine")
    by_shift = {shift: dict(zip(keys, cosines.means(), strict=True)) for shift, cosines in single.items()}
    return ShiftConsistency(len(windows), *mean.means(), by_shift)
