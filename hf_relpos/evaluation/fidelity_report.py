"""Results of comparing a student with its teacher, as values, as JSON and as a summary in words."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


# Thresholds of `verdict` for safe and usable: mean cosines of sentence vectors and of tokens to the teacher's. On
# all-MiniLM-L6-v2, whose own agreement under a shift of 16 positions is .96, a conversion with sentence cosine .95
# lost 0.1 to 0.4 points of STS-B, and one with .85 to .90 lost 0.7 to 1.9.
SAFE = (0.95, 0.92)
USABLE = (0.85, 0.80)


@dataclass(frozen=True)
class ShiftConsistency:
    """Cosines between a model's hidden states of the same texts at shifted and unshifted positions.

    Attributes:
        windows: number of texts.
        token_cosine: cosine between the mean hidden state over all shifts and the unshifted one, mean over tokens.
        sentence_cosine: the same for sentence vectors, mean over texts.
        by_shift: token and sentence cosine of each shift.
    """

    windows: int
    token_cosine: float
    sentence_cosine: float
    by_shift: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class MaskedAgreement:
    """Predictions of masked tokens by teacher and student.

    Attributes:
        tokens: number of masked tokens.
        agreement: share of masked tokens for which both models predict the same token.
        teacher_accuracy: share that the teacher predicts correctly.
        student_accuracy: share that the student predicts correctly.
    """

    tokens: int
    agreement: float
    teacher_accuracy: float
    student_accuracy: float


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
            tokens; None past the maximum length and for models whose weights cannot be compared.
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
    def cosines(self) -> list[float | None]:
        """Token and sentence cosine, then those of the teacher with itself; None if not measured."""
        shifted = (None, None) if self.ceiling is None else (self.ceiling.token_cosine, self.ceiling.sentence_cosine)
        return [self.token_cosine, self.sentence_cosine, *shifted]

    @property
    def masked_shares(self) -> list[float | None]:
        """Agreement, accuracy of the teacher and of the student on masked tokens; None if not measured."""
        found = self.masked
        return [found.agreement, found.teacher_accuracy, found.student_accuracy] if found else [None] * 3


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
        """The inverse of `to_dict`; other keys are ignored.

        Raises:
            ValueError: for a mapping with missing or invalid entries.
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


def _past_in_words(entry: LengthFidelity) -> str:
    """The agreement past the teacher's limit, beside that of the teacher's windows with other windows of it."""
    own = "" if entry.ceiling is None else f" (other windows of the source {entry.ceiling.token_cosine:.2f})"
    return f"{entry.token_cosine:.2f} at {entry.length:,}{own}"


def verdict(fidelity: Fidelity) -> str:
    """The result in words: up to which length a conversion, the student, can replace its source, the teacher.

    A length is safe if the sentence cosine is at least .95 and the token cosine at least .92 (`SAFE`), there and at
    all shorter lengths. It is usable after fine-tuning with .85 and .80 (`USABLE`). Past the teacher's maximum length,
    where it reads windows, the figures are given instead.
    """
    inside = [entry for entry in fidelity.lengths if entry.reference == "teacher"]
    outside = [entry for entry in fidelity.lengths if entry.reference != "teacher"]
    parts = []
    rest = list(inside)
    for word, floor in (("safe", SAFE), ("usable after fine-tuning", USABLE)):
        reached = 0
        while rest and rest[0].sentence_cosine >= floor[0] and rest[0].token_cosine >= floor[1]:
            reached = rest.pop(0).length
        if reached:
            parts.append(f"{word} inside {reached}")
    if rest:
        worst = min(rest, key=lambda entry: entry.sentence_cosine)
        parts.append(
            f"not the source's at {rest[0].length} (sentence cosine {worst.sentence_cosine:.2f}"
            + (f" at {worst.length})" if worst is not rest[0] else ")")
        )
    if fidelity.teacher_limit is not None:
        if outside:
            figures = ", ".join(map(_past_in_words, outside))
            part = f"past {fidelity.teacher_limit}, token cosine to the source's windows: {figures}"
        elif fidelity.student_limit is not None:
            part = f"past {fidelity.student_limit} the result reads nothing"
        else:
            part = f"past {fidelity.teacher_limit} not measured"
        parts.append(part)
    return "; ".join(parts) or "nothing was measured"
