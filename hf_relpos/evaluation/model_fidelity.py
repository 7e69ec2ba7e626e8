"""Agreement of a converted model (the student) with its source (the teacher): hidden states, and masked tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..console import ProgressCallback
from ..data.batching import Row, batch_indices
from .encoder import check_pooling, hidden_states, pad_batch, pool
from .inspection import check_sizes, has_mlm_head, model_max_length
from .masked import MaskedAgreement, masked_agreement
from .sliding_windows import windowed_hidden_states


LENGTHS = (16, 64, 128, 256, 512)
# Thresholds of `verdict` for safe and usable: mean cosines of sentence vectors and of tokens to the teacher's. On
# all-MiniLM-L6-v2, whose own agreement under a shift of 16 positions is .96, a conversion with sentence cosine .95
# lost 0.1 to 0.4 points of STS-B, and one with .85 to .90 lost 0.7 to 1.9.
SAFE = (0.95, 0.92)
USABLE = (0.85, 0.80)


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
        masked: agreement on masked tokens; None past the maximum length and unless both models predict masked tokens.
        other_windows: past the maximum length, token cosine of the teacher to itself with windows that start elsewhere
            (3/8 of a window apart instead of 1/2); None within it.
    """

    length: int
    windows: int
    tokens: int
    reference: str
    token_cosine: float
    sentence_cosine: float
    masked: MaskedAgreement | None = None
    other_windows: float | None = None

    @property
    def cosine_cells(self) -> list[str]:
        """For tables: token and sentence cosine."""
        return [f"{self.token_cosine:.3f}", f"{self.sentence_cosine:.3f}"]

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
        lengths = [
            LengthFidelity(**{**entry, "masked": MaskedAgreement(**entry["masked"]) if entry["masked"] else None})
            for entry in plain["lengths"]
        ]
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
            parts.append(f"{word} up to {reached} tokens")
    if rest:
        worst = min(rest, key=lambda entry: entry.sentence_cosine)
        where = "" if worst is rest[0] else f" at {worst.length}"
        parts.append(f"not close at {rest[0].length} tokens (sentence cosine {worst.sentence_cosine:.2f}{where})")
    if fidelity.teacher_limit is not None:
        part = f"not measured beyond {fidelity.teacher_limit}"
        if outside:
            figures = []
            for entry in outside:
                own = f" (source's own windows {entry.other_windows:.2f})" if entry.other_windows else ""
                figures.append(f"{entry.token_cosine:.2f} at {entry.length:,}{own}")
            part = f"beyond {fidelity.teacher_limit}, token cosine to the source's windows: {', '.join(figures)}"
        elif fidelity.student_limit is not None:
            part = f"the result reads at most {fidelity.student_limit}"
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
    pooling: str = "mean",
    mask_token_id: int | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Fidelity:
    """Compare a student with its teacher on windows of text of several lengths.

    Past the teacher's maximum length the reference is its hidden states of overlapping windows
    (`windowed_hidden_states`), and masked tokens are not compared. Lengths past the student's
    maximum are skipped and listed.

    Args:
        teacher: a model with `last_hidden_state`, or with a head on such a model, in eval mode.
        student: likewise, of the same hidden size and tokenizer, on the same device.
        windows_by_length: for each length, rows of at most that many tokens, `[CLS] … [SEP]`.
        pooling: pooling of the sentence vectors, `mean` or `cls`.
        mask_token_id: id of [MASK], to measure the agreement on masked tokens if both models predict them; None skips
            this.
        seed: decides which tokens are masked.
        progress: called for each length with the number of tokens done, and their total.

    Raises:
        ValueError: for an unknown pooling, a length without windows, windows that are too long, models of different
            widths or vocabularies, and hidden states that are not finite.
    """
    check_pooling(pooling)
    check_sizes(teacher, student, ("hidden_size", "vocab_size"))
    for length, windows in windows_by_length.items():
        longest = max(map(len, windows), default=0)
        if not 0 < longest <= length:
            counted = f"windows_by_length[{length}] has {len(windows)} windows, the longest of {longest} tokens"
            raise ValueError(f"{counted}; give at least one, and none longer than the length")
    limit, student_limit = model_max_length(teacher), model_max_length(student)
    lengths, skipped = [], {}

    tell = progress or (lambda what, done, total: None)

    def read_in_windows(rows: Sequence[Row], stride: int) -> torch.Tensor:
        """The teacher's hidden states, (B, L, D), padded with zeros."""
        states = [windowed_hidden_states(teacher, row, stride=stride) for row in rows]
        return nn.utils.rnn.pad_sequence(states, batch_first=True)

    def cosines(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token, and of each sentence vector, from hidden states (B, L, D)."""
        one, other = one.double(), other.double()
        tokens = torch.cosine_similarity(one, other, dim=-1)[mask]
        return tokens, torch.cosine_similarity(pool(one, mask, pooling), pool(other, mask, pooling), dim=-1)

    for length, windows in sorted(windows_by_length.items()):
        if student_limit is not None and length > student_limit:
            skipped[length] = f"the student reads at most {student_limit} tokens"
            continue
        size = None if limit is None or length <= limit else limit  # of the teacher's windows
        found, others, done, total = [], [], 0, sum(map(len, windows))
        for indices in batch_indices(windows):
            tell(f"comparing, {length:,} tokens", done, total)
            rows = [windows[index] for index in indices]
            ids, mask = pad_batch(rows, student)
            target = hidden_states(teacher, ids, mask) if size is None else read_in_windows(rows, size // 2)
            found.append(cosines(target, hidden_states(student, ids, mask), mask))
            if size is not None:
                others.append(cosines(read_in_windows(rows, 3 * size // 8), target, mask)[0])
            done += sum(map(len, rows))
        tell(f"comparing, {length:,} tokens", done, total)
        masked = None
        if size is None and mask_token_id is not None and has_mlm_head(teacher) and has_mlm_head(student):
            masked = masked_agreement(teacher, student, windows, mask_token_id, seed)
        token, sentence = (float(torch.cat(each).mean()) for each in zip(*found, strict=True))
        reference = "teacher" if size is None else "windowed teacher"
        own = float(torch.cat(others).mean()) if others else None
        lengths.append(LengthFidelity(length, len(windows), total, reference, token, sentence, masked, own))
    return Fidelity(limit, student_limit, pooling, lengths, skipped)
