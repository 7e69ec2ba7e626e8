"""How faithful a converted model is to its source: hidden states, sentence vectors, attention, masked tokens.

An absolute model does not agree with itself when its input is moved by some positions, so the distance between
teacher and student needs a scale: `shift_consistency`. It is not a bound, since [CLS] stays in its place and the
distance to it tells a relative model, too, where it is.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..data.batching import BATCH_TOKENS, Row, batch_indices
from ..data.masking import IGNORE_INDEX, mask_rows
from .encoder import ProgressCallback, check_pooling, hidden_states, pad_batch, pool
from .inspection import accepts_position_ids, first_position_id, has_mlm_head, model_max_length
from .masked import masked_predictions
from .sliding_windows import windowed_hidden_states


SHIFTS = (1, 4, 16, 32, 64)
LENGTHS = (16, 64, 128, 256, 512)
# Attention weights of the teacher that are kept at a time, in bytes.
ATTENTION_BYTES = 512 * 1024 * 1024
# A student whose window hides a key gives it weight 0 and would diverge without end; 1e-10 costs 23 nats times its
# share.
LEAST_WEIGHT = 1e-10

# What `verdict` calls safe and usable: smallest mean cosine of sentence vectors and of tokens to the teacher's. A
# conversion with sentence cosine .95 lost 0.1 to 0.4 points of STS-B in shared measurements on all-MiniLM-L6-v2, whose
# own agreement under a shift of 16 positions is .96; with .85 to .90 it lost 0.7 to 1.9.
SAFE = (0.95, 0.92)
USABLE = (0.85, 0.80)


@dataclass(frozen=True)
class ShiftConsistency:
    """Cosines between a model's reading of texts and its reading of the same texts some positions further on.

    Attributes:
        windows: how many texts.
        token_cosine: of the mean reading over all shifts to the unshifted one, mean over tokens.
        sentence_cosine: the same of sentence vectors.
        by_shift: for each shift its token and sentence cosine.
    """

    windows: int
    token_cosine: float
    sentence_cosine: float
    by_shift: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class MaskedAgreement:
    """Predictions of masked tokens by both models.

    Attributes:
        tokens: how many were masked.
        agreement: share of them for which both predict the same token.
        teacher_accuracy: share that the teacher predicts right.
        student_accuracy: share that the student predicts right.
    """

    tokens: int
    agreement: float
    teacher_accuracy: float
    student_accuracy: float


@dataclass(frozen=True)
class LengthFidelity:
    """Fidelity on windows of one length.

    Attributes:
        length: tokens of the longest window.
        windows: how many.
        tokens: in all of them.
        reference: `teacher`, or past its limit `windowed teacher`.
        token_cosine: mean over all tokens of the cosine of the last hidden states.
        sentence_cosine: mean over windows of the cosine of the sentence vectors.
        token_cosine_by_quarter: the token cosine in each quarter of the windows, from their beginning.
        divergence: KL(teacher‖student) of the attention weights in nats, for each layer, mean over heads and query
            tokens; None past the limit and for models whose weights cannot be compared.
        masked: None unless both models predict masked tokens, and past the limit.
        ceiling: the teacher's agreement with itself, when its input moves by some positions; None where no shift fits
            into them. Past the limit, when its windows start elsewhere (3/8 of a window apart instead of a half), with
            no `by_shift`.
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


@dataclass(frozen=True)
class Fidelity:
    """What `fidelity` measured.

    Attributes:
        teacher_limit: tokens that the teacher reads; None for any number.
        student_limit: tokens that the student reads; None for any number.
        pooling: of the sentence vectors.
        lengths: by length, ascending.
        skipped: lengths that were asked for and not measured, with the reason.
    """

    teacher_limit: int | None
    student_limit: int | None
    pooling: str
    lengths: list[LengthFidelity]
    skipped: dict[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All of it and the verdict, as JSON takes it (keys are strings)."""
        plain = dataclasses.asdict(self)
        plain["skipped"] = {str(length): reason for length, reason in self.skipped.items()}
        for entry in plain["lengths"]:
            if entry["ceiling"]:
                entry["ceiling"]["by_shift"] = {
                    str(shift): {"token_cosine": token, "sentence_cosine": sentence}
                    for shift, (token, sentence) in entry["ceiling"]["by_shift"].items()
                }
        return {**plain, "verdict": verdict(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Fidelity":
        """The measurements that `to_dict` gave, read from JSON or not.

        Args:
            plain: all of it; other keys are left alone.

        Raises:
            ValueError: for what is not of that form.
        """
        try:
            lengths = [_length_from_dict(entry) for entry in plain["lengths"]]
            skipped = {int(length): reason for length, reason in plain["skipped"].items()}
            return cls(plain["teacher_limit"], plain["student_limit"], plain["pooling"], lengths, skipped)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"the fidelity cannot be read ({type(error).__name__}: {error}); give what Fidelity.to_dict returned"
            ) from error


def _length_from_dict(plain: Mapping[str, Any]) -> LengthFidelity:
    """One entry of `Fidelity.to_dict()["lengths"]`."""
    entry = dict(plain)
    if entry["masked"]:
        entry["masked"] = MaskedAgreement(**entry["masked"])
    if entry["ceiling"]:
        shifts = {
            int(shift): (both["token_cosine"], both["sentence_cosine"])
            for shift, both in entry["ceiling"]["by_shift"].items()
        }
        entry["ceiling"] = ShiftConsistency(**{**entry["ceiling"], "by_shift": shifts})
    return LengthFidelity(**entry)


def default_lengths(limit: int | None) -> list[int]:
    """Window lengths up to a teacher's limit, that limit, and twice and four times as much.

    A teacher without a limit is taken for one of 512.
    """
    limit = limit or LENGTHS[-1]
    return sorted({*(length for length in LENGTHS if length <= limit), limit, 2 * limit, 4 * limit})


class _Cosines:
    """Sums of cosines over tokens and over windows."""

    def __init__(self, pooling: str):
        self.pooling = pooling
        self.token = torch.zeros(4, dtype=torch.float64)
        self.count = torch.zeros(4, dtype=torch.float64)
        self.sentence, self.windows = 0.0, 0

    def add(self, one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> None:
        """Hidden states (B, L, D) of both, and the mask (B, L)."""
        cosines = nn.functional.cosine_similarity(one.double(), other.double(), dim=-1)
        places = torch.arange(mask.shape[1], device=mask.device)
        quarters = 4 * places // mask.sum(1, keepdim=True)  # of each window by its own length
        self.token.index_add_(0, quarters[mask].cpu(), cosines[mask].cpu())
        self.count.index_add_(0, quarters[mask].cpu(), torch.ones_like(cosines[mask]).cpu())
        vectors = (pool(hidden.double(), mask, self.pooling) for hidden in (one, other))
        self.sentence += float(nn.functional.cosine_similarity(*vectors, dim=-1).sum())
        self.windows += len(mask)

    def means(self) -> tuple[float, float]:
        """Token and sentence cosine."""
        return float(self.token.sum() / self.count.sum()), self.sentence / self.windows

    def quarters(self) -> list[float]:
        """Token cosine by quarter of the windows; a quarter without tokens is left out."""
        return [float(total / count) for total, count in zip(self.token, self.count, strict=True) if count]


@contextmanager
def _eager(*models: PreTrainedModel) -> Iterator[None]:
    """Models whose attention holds its weights, for a while."""
    before = [model.config._attn_implementation for model in models]
    try:
        for model in models:
            model.set_attn_implementation("eager")
        yield
    finally:
        for model, name in zip(models, before, strict=True):
            model.set_attn_implementation(name)


@contextmanager
def attention_weights(model: PreTrainedModel, take: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Within this context the next forward calls `take(layer, weights)` for each layer, as soon as it has them.

    Nothing is kept here, in contrast to `output_attentions=True`. Attention weights are what a module returns as the
    last part of a tuple, four-dimensional and from L queries to L keys. Works for every model of Transformers whose
    eager attention returns its weights; `take` is not called for others.

    Args:
        model: with eager attention.
        take: weights are (B, H, L, L).
    """
    layer, last = 0, None

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        nonlocal layer, last
        weights = out[-1] if isinstance(out, tuple) and len(out) > 1 else None
        # the modules around the one that computes them return the same tensor once more
        if isinstance(weights, torch.Tensor) and weights.dim() == 4 and weights is not last:
            if weights.shape[-1] == weights.shape[-2]:
                last = weights
                take(layer, weights)
                layer += 1

    hooks = [module.register_forward_hook(hook) for module in model.base_model.modules()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def attention_divergence(teacher: torch.Tensor, student: torch.Tensor, mask: torch.Tensor) -> float:
    """Σ KL(teacher‖student) over heads and query tokens that are not padding, in nats.

    Args:
        teacher: weights (B, H, L, L).
        student: weights, the same shape.
        mask: (B, L), true for tokens that are not padding.
    """
    total = 0.0
    for p, q in zip(teacher.unbind(1), student.unbind(1), strict=True):  # a head at a time, to spare memory
        ratio = p.clamp(min=LEAST_WEIGHT).log_().sub_(q.clamp(min=LEAST_WEIGHT).log_())
        total += float((ratio * p).sum(-1, dtype=torch.float64)[mask].sum())
    return total


class _Divergence:
    """Sums of the attention divergence by layer, and both models' hidden states on the way."""

    def __init__(self, teacher: PreTrainedModel, student: PreTrainedModel):
        self.teacher, self.student = teacher, student
        self.totals: dict[int, float] = {}
        self.rows = 0
        self.comparable = True

    def add(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a batch with both; returns their hidden states.

        The teacher's weights are kept until the student comes to the same layer, for as many layers at a time as fit
        into `ATTENTION_BYTES`; where these are not all, both read the batch again for the next ones.
        """
        config = self.teacher.base_model.config
        layers = config.num_hidden_layers
        heads = config.num_attention_heads
        at_once = max(1, ATTENTION_BYTES // (4 * heads * len(ids) * ids.shape[1] ** 2))
        states = None
        for start in range(0, layers, at_once):
            kept: dict[int, torch.Tensor] = {}
            seen = {"teacher": [], "student": []}  # shapes of the weights, layer by layer

            def keep(layer: int, weights: torch.Tensor, start=start, kept=kept, seen=seen) -> None:
                seen["teacher"].append(weights.shape)
                if start <= layer < start + at_once:
                    kept[layer] = weights

            def compare(layer: int, weights: torch.Tensor, kept=kept, seen=seen) -> None:
                seen["student"].append(weights.shape)
                theirs = kept.pop(layer, None)
                if theirs is not None and theirs.shape == weights.shape:
                    found = attention_divergence(theirs, weights, mask) / weights.shape[1]
                    self.totals[layer] = self.totals.get(layer, 0.0) + found

            with attention_weights(self.teacher, keep):
                one = hidden_states(self.teacher, ids, mask)
            with attention_weights(self.student, compare):
                other = hidden_states(self.student, ids, mask)
            states = states or (one, other)
            if not seen["teacher"] or seen["teacher"] != seen["student"]:
                self.comparable = False  # no weights, or others than the student's
                break
        self.rows += int(mask.sum())
        return states

    def means(self) -> list[float] | None:
        """By layer; None for models whose attention weights cannot be compared."""
        if not self.comparable:
            return None
        return [total / self.rows for _, total in sorted(self.totals.items())]


def shift_consistency(
    teacher: PreTrainedModel,
    windows: Sequence[Row],
    shifts: Sequence[int] = SHIFTS,
    pooling: str = "mean",
    batch_tokens: int = BATCH_TOKENS,
) -> ShiftConsistency:
    """How far a model agrees with itself when its input moves by some positions; [CLS] stays at the first one.

    Args:
        teacher: a model that takes `position_ids`.
        windows: rows of tokens, `[CLS] … [SEP]`.
        shifts: those that move the longest window past the model's limit are left out.
        pooling: `mean` or `cls`.

    Raises:
        ValueError: when no shift fits, or the model takes no position ids.
    """
    check_pooling(pooling)
    if not accepts_position_ids(teacher):
        raise ValueError(f"{type(teacher).__name__}: takes no position_ids, so its input cannot be moved")
    limit = model_max_length(teacher)
    longest = max(map(len, windows))
    fitting = [shift for shift in shifts if limit is None or longest + shift <= limit]
    if not fitting:
        raise ValueError(
            f"windows of {longest} tokens leave no room for a shift of {min(shifts)} in the {limit} positions of the "
            "model; give shorter ones"
        )
    first = first_position_id(teacher)
    mean, single = _Cosines(pooling), {shift: _Cosines(pooling) for shift in fitting}
    for numbers in batch_indices(windows, batch_tokens):
        ids, mask = pad_batch([windows[number] for number in numbers], teacher)
        plain = hidden_states(teacher, ids, mask)
        total = torch.zeros_like(plain)
        for shift in fitting:
            places = torch.arange(ids.shape[1], device=ids.device)
            places = torch.where(places > 0, places + shift, 0) + first
            moved = hidden_states(teacher, ids, mask, places.expand_as(ids))
            single[shift].add(moved, plain, mask)
            total += moved
        mean.add(total / len(fitting), plain, mask)
    return ShiftConsistency(len(windows), *mean.means(), {shift: found.means() for shift, found in single.items()})


def masked_agreement(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    windows: Sequence[Row],
    mask_token_id: int,
    seed: int = 0,
    rate: float = 0.15,
    batch_tokens: int = BATCH_TOKENS,
) -> MaskedAgreement:
    """Whether two masked language models predict the same tokens.

    Args:
        windows: rows of tokens, `[CLS] … [SEP]`; the first and the last token are never masked.
        mask_token_id: [MASK].
        seed: decides which tokens are masked.
        rate: share of the tokens to mask.

    Raises:
        ValueError: for windows without a token between the first and the last.
    """
    inputs, labels = mask_rows(windows, mask_token_id, np.random.default_rng(seed), rate)
    same = right = right_too = count = 0
    for numbers in batch_indices(inputs, batch_tokens):
        rows = [inputs[number] for number in numbers]
        targets = torch.cat([torch.as_tensor(labels[number]) for number in numbers])
        targets = targets[targets != IGNORE_INDEX]
        places = [torch.as_tensor(labels[number]) != IGNORE_INDEX for number in numbers]
        one, other = (masked_predictions(model, rows, places).argmax(-1).cpu() for model in (teacher, student))
        same += int((one == other).sum())
        right += int((one == targets).sum())
        right_too += int((other == targets).sum())
        count += len(targets)
    return MaskedAgreement(count, same / count, right / count, right_too / count)


def _windowed(teacher: PreTrainedModel, rows: Sequence[Row], stride: int, batch_tokens: int) -> torch.Tensor:
    """`windowed_hidden_states` of several rows, (B, L, D), padded with zeros."""
    found = [windowed_hidden_states(teacher, row, stride=stride, batch_tokens=batch_tokens) for row in rows]
    return nn.utils.rnn.pad_sequence(found, batch_first=True)


def fidelity(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    windows_by_length: Mapping[int, Sequence[Row]],
    pooling: str = "mean",
    mask_token_id: int | None = None,
    divergence: bool = True,
    ceiling: bool = True,
    shifts: Sequence[int] = SHIFTS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: ProgressCallback | None = None,
) -> Fidelity:
    """Compare a student with its teacher on windows of text of several lengths.

    Past the teacher's limit it is compared with what the teacher says of overlapping windows
    (`windowed_hidden_states`), and neither attention nor masked tokens are compared. Lengths that the student does not
    read are skipped and listed.

    Args:
        teacher: any model with `last_hidden_state`, or with a head on top of such a one; in eval mode.
        student: likewise, of the same hidden size and tokenizer, on the same device.
        windows_by_length: for each length rows of tokens, `[CLS] … [SEP]`, of that length at most.
        pooling: of the sentence vectors, `mean` or `cls`.
        mask_token_id: [MASK], for the agreement on masked tokens where both models predict them; None for without.
        divergence: compare attention weights, which takes eager attention.
        ceiling: measure the teacher's agreement with itself.
        shifts: for the ceiling, in positions.
        seed: decides which tokens are masked.
        batch_tokens: tokens read together.
        progress: called with the length, and how many tokens of all are done.

    Raises:
        ValueError: for a length without windows, windows longer than it, models of different widths or vocabularies,
            and hidden states that are not finite.
    """
    check_pooling(pooling)
    for what in ("hidden_size", "vocab_size"):
        sizes = [getattr(model.base_model.config, what, None) for model in (teacher, student)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise ValueError(
                f"{what} = {sizes[0]} in the teacher and {sizes[1]} in the student; give a student that was made of "
                "this teacher"
            )
    for length, windows in windows_by_length.items():
        if not windows or max(map(len, windows)) > length:
            raise ValueError(
                f"windows_by_length[{length}] has {len(windows)} windows"
                + (f", the longest of {max(map(len, windows))} tokens" if windows else "")
                + "; give at least one, and none longer than the length"
            )
    limit, student_limit = model_max_length(teacher), model_max_length(student)
    both_masked = mask_token_id is not None and has_mlm_head(teacher) and has_mlm_head(student)
    total = sum(len(row) for windows in windows_by_length.values() for row in windows)
    done = 0
    lengths, skipped = [], {}
    for length, windows in sorted(windows_by_length.items()):
        count = sum(map(len, windows))
        if student_limit is not None and length > student_limit:
            skipped[length] = f"the student reads {student_limit} tokens"
            done += count
            continue
        inside = limit is None or length <= limit
        cosines, moved = _Cosines(pooling), _Cosines(pooling)
        weights = _Divergence(teacher, student) if inside and divergence else None
        with _eager(teacher, student) if weights is not None else nullcontext():
            for numbers in batch_indices(windows, batch_tokens):
                rows = [windows[number] for number in numbers]
                ids, mask = pad_batch(rows, student)
                if weights is not None:
                    states = weights.add(ids, mask)
                elif inside:
                    states = tuple(hidden_states(model, ids, mask) for model in (teacher, student))
                else:
                    reference = _windowed(teacher, rows, limit // 2, batch_tokens)
                    states = reference, hidden_states(student, ids, mask)
                    if ceiling:
                        moved.add(_windowed(teacher, rows, 3 * limit // 8, batch_tokens), reference, mask)
                cosines.add(*states, mask)
                done += int(mask.sum())
                if progress is not None:
                    progress(f"{length} tokens", done, total)
        own = None
        if ceiling and not inside:
            own = ShiftConsistency(len(windows), *moved.means(), {})
        elif ceiling and accepts_position_ids(teacher):
            if limit is None or max(map(len, windows)) + min(shifts) <= limit:
                own = shift_consistency(teacher, windows, shifts, pooling, batch_tokens)
        token, sentence = cosines.means()
        lengths.append(
            LengthFidelity(
                length=length,
                windows=len(windows),
                tokens=count,
                reference="teacher" if inside else "windowed teacher",
                token_cosine=token,
                sentence_cosine=sentence,
                token_cosine_by_quarter=cosines.quarters(),
                divergence=None if weights is None else weights.means(),
                masked=masked_agreement(teacher, student, windows, mask_token_id, seed=seed, batch_tokens=batch_tokens)
                if inside and both_masked
                else None,
                ceiling=own,
            )
        )
    return Fidelity(limit, student_limit, pooling, lengths, skipped)


def _reaches(entry: LengthFidelity, floor: tuple[float, float]) -> bool:
    return entry.sentence_cosine >= floor[0] and entry.token_cosine >= floor[1]


def verdict(measured: Fidelity) -> str:
    """The result in words: how far the student may stand in for the teacher.

    Safe is a length, with all shorter ones that were measured, at which the sentence cosine is at least .95 and the
    token cosine at least .92 (`SAFE`); usable after fine-tuning, .85 and .80 (`USABLE`). Past the teacher's limit
    there is nothing to compare with but windows, so no length is called safe there.
    """
    inside = [entry for entry in measured.lengths if entry.reference == "teacher"]
    outside = [entry for entry in measured.lengths if entry.reference != "teacher"]
    parts = []
    rest = list(inside)
    for word, floor in (("safe", SAFE), ("usable after fine-tuning", USABLE)):
        reached = 0
        while rest and _reaches(rest[0], floor):
            reached = rest.pop(0).length
        if reached:
            parts.append(f"{word} inside {reached}")
    if rest:
        worst = min(rest, key=lambda entry: entry.sentence_cosine)
        parts.append(
            f"not the teacher's at {rest[0].length} (sentence cosine {worst.sentence_cosine:.2f}"
            + (f" at {worst.length})" if worst is not rest[0] else ")")
        )
    if measured.teacher_limit is not None:
        part = f"past {measured.teacher_limit} untested by the teacher"
        if outside:
            figures = ", ".join(f"{entry.token_cosine:.2f} at {entry.length:,}" for entry in outside)
            part += f" (token cosine to its windows: {figures})"
        elif measured.student_limit is not None:
            part = f"past {measured.student_limit} the student reads nothing"
        parts.append(part)
    return "; ".join(parts) or "nothing was measured"
