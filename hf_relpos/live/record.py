"""Record how the calls of optimized encoders were computed: by level, and why others fell back to Transformers."""

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


logger = logging.getLogger("hf_relpos.live")
# A reason by which at least so many tokens are computed for each one that counts is a warning, not an information.
TWICE = 2


class Reason(NamedTuple):
    """Why a call keeps its padding, or is computed by Transformers.

    Attributes:
        kind: when it applies, as in docs/live.md; calls are counted by it.
        text: the same with the numbers of the call, and what to do about it.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Answer:
    """How one call of an encoder was computed.

    Attributes:
        encoder: name of its class.
        level: of docs/live.md; "Transformers" for its own forward.
        given: B·L, the tokens of the call with its padding.
        computed: how many of them are computed.
        real: how many of them the mask shows.
        reasons: why padding stays, or why Transformers computes it.
        attention: who computes it, in words.
        products: of linear layers.
        joined: how many calls of as many threads were computed together; 0 for one by itself.
    """

    encoder: str
    level: str
    given: int
    computed: int
    real: int
    reasons: tuple[Reason, ...] = ()
    attention: tuple[str, ...] = ()
    products: str = ""
    joined: int = 0

    def __str__(self) -> str:
        lines = [f"{self.encoder}: level {self.level}, {self.computed} of {self.given} tokens are computed"]
        lines[0] += f"; attention: {', '.join(self.attention)}" if self.attention else ""
        lines[0] += f"; in {self.joined} calls of as many threads" if self.joined else ""
        lines += [f"  {reason.text}" for reason in self.reasons]
        return "\n".join([*lines, *([f"  products: {self.products}"] if self.products else [])])


@dataclass
class Counts:
    """Calls of optimized encoders.

    Attributes:
        calls: how many, by level; "Transformers" for those left to it.
        given: tokens of these calls, with their padding.
        computed: tokens that were computed.
        real: tokens that the masks show.
        left: how many calls kept their padding, or were left to Transformers, by reason.
        joined: how many calls were computed together with others, by the number of these calls.
    """

    calls: Counter[str] = field(default_factory=Counter)
    given: int = 0
    computed: int = 0
    real: int = 0
    left: Counter[str] = field(default_factory=Counter)
    joined: Counter[int] = field(default_factory=Counter)

    @property
    def padding_computed(self) -> float:
        """The share of the padding that was computed."""
        return (self.computed - self.real) / max(self.given - self.real, 1)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "calls": dict(self.calls), "left": dict(self.left), "joined": dict(self.joined)}

    def __str__(self) -> str:
        calls = ", ".join(f"{count} by {level}" for level, count in self.calls.most_common())
        lines = [f"calls: {calls or 'none'}; {self.computed} of {self.given} tokens computed"]
        if joined := self.joined.total():
            batches = sum(count // size for size, count in self.joined.items())
            lines[0] += f"; {joined} calls joined to {batches}"
        return "\n".join([*lines, *(f"  {count} ×: {reason}" for reason, count in self.left.most_common())])


# Answers that somebody waits for, and names of what computed the attention of the call that runs, in order.
_watched: ContextVar[tuple[list[Answer], dict[str, None]] | None] = ContextVar("watched", default=None)


def note_attention(name: str) -> None:
    """Note who computes attention, if somebody wants to know."""
    if (watched := _watched.get()) is not None:
        watched[1][name] = None


def is_watching() -> bool:
    """Whether calls of this thread are watched."""
    return _watched.get() is not None


class Record:
    """Counts calls of the encoders that one call of `optimize` changed.

    It knows which threads are inside a call of theirs, so that `undo` lets calls in flight end right. Calls that begin
    while `undo` waits begin after it.
    """

    def __init__(self, verified: Any = None) -> None:
        """
        Args:
            verified: which calls were computed both ways, a `Verified`.
        """
        self.counts, self.verified = Counts(), verified
        self._renew()
        renew_in_child(self)

    def _renew(self) -> None:
        self.changed = threading.Condition()
        self.depths: dict[int, int] = {}
        self.changing: int | None = None  # the thread that changes models

    def __getstate__(self) -> dict[str, Any]:
        return {"verified": self.verified}  # a pickle begins anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def note(self, answer: Answer, is_loud: bool) -> None:
        """Count a call, and log a reason that was not met before.

        Args:
            is_loud: whether its reason is a warning.
        """
        if (watched := _watched.get()) is not None:
            answers, names = watched
            answers.append(replace(answer, attention=tuple(names)))
            names.clear()
        with self.changed:
            counts, reason = self.counts, next(iter(answer.reasons), None)
            counts.calls[answer.level] += answer.joined or 1
            counts.joined.update(answer.joined * [answer.joined])
            counts.given += answer.given
            counts.computed += answer.computed
            counts.real += answer.real
            is_new = reason is not None and reason.kind not in counts.left
            if reason is not None:
                counts.left[reason.kind] += 1
        if is_new and reason is not None:
            logger.log(logging.WARNING if is_loud else logging.INFO, "%s: %s", answer.encoder, reason.text)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark a call of this thread."""
        thread = threading.get_ident()
        with self.changed:
            if thread not in self.depths:
                self.changed.wait_for(lambda: self.changing in (None, thread))
            self.depths[thread] = self.depths.get(thread, 0) + 1
        try:
            yield
        finally:
            with self.changed:
                self.depths[thread] -= 1
                if not self.depths[thread]:
                    del self.depths[thread]
                    self.changed.notify_all()

    @contextmanager
    def none(self) -> Iterator[None]:
        """Wait until no other thread is inside a call, and keep others out."""
        thread = threading.get_ident()
        with self.changed:
            self.changed.wait_for(lambda: self.changing in (None, thread))
            before, self.changing = self.changing, thread
            self.changed.wait_for(lambda: not self.depths.keys() - {thread})
        try:
            yield
        finally:
            with self.changed:
                self.changing = before
                self.changed.notify_all()


@contextmanager
def watching() -> Iterator[list[Answer]]:
    """Collect how calls of this thread are computed, within the context."""
    found: list[Answer] = []
    token = _watched.set((found, {}))
    try:
        yield found
    finally:
        _watched.reset(token)


def tell(answer: Answer) -> None:
    """Tell this thread what a call of it got that another thread has computed."""
    if (watched := _watched.get()) is not None:
        watched[0].append(answer)


_renewed: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_in_child(holder: Any) -> None:
    """Let an object have its `_renew` called in a forked process, for locks of threads that are not there."""
    _renewed.add(holder)


def _renew_all() -> None:
    for each in list(_renewed):
        each._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
