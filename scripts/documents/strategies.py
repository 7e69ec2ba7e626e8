"""Reading strategies: which model reads a document, and in which pieces."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


# Models: also the names of the options with their folders.
SOURCE, CONVERTED, LONG = "source", "converted", "converted_long"
MODELS = {SOURCE: "source", CONVERTED: "converted", LONG: "converted for long rows"}
# Kind of strategy to the model that reads, and a description.
KINDS = {
    "truncate": (SOURCE, "the first {n} tokens"),
    "tail": (SOURCE, "the last {n} tokens"),
    "chunks": (SOURCE, "pieces of {n}, each by itself"),
    "segments": (CONVERTED, "pieces of {n}, each by itself"),
    "memory": (CONVERTED, "pieces of {n}, memory of {n}"),
    "long": (LONG, "{n} tokens at once"),
}
DEFAULT_STRATEGIES = ["truncate-512", "chunks-512", "chunks-256", "segments-256", "memory-256", "long-2048"]


@dataclass(frozen=True)
class Strategy:
    """A kind of strategy, and the number of tokens that it reads at once."""

    kind: str
    length: int

    @classmethod
    def parse(cls, name: str) -> "Strategy":
        """The strategy of a name such as memory-256.

        Raises:
            ValueError: for other names.
        """
        kind, _, length = name.rpartition("-")
        if kind not in KINDS or not re.fullmatch(r"[1-9]\d*", length):
            raise ValueError(
                f"{name!r} is no strategy; give one of {', '.join(KINDS)} and its tokens, as in memory-256"
            )
        return cls(kind, int(length))

    def __str__(self) -> str:
        return f"{self.kind}-{self.length}"

    @property
    def model(self) -> str:
        """Which model reads: a key of MODELS."""
        return KINDS[self.kind][0]

    @property
    def description(self) -> str:
        """What is read."""
        return KINDS[self.kind][1].format(n=self.length)

    @property
    def memory(self) -> int:
        """Tokens of its memory."""
        return self.length if self.kind == "memory" else 0

    def pieces(self, ids: Sequence[int], prefix: Sequence[int], suffix: Sequence[int]) -> list[list[int]]:
        """The pieces of a document, in order.

        Args:
            ids: its tokens, without special ones.
            prefix: special tokens at the start of every piece.
            suffix: those at its end.
        """
        size = self.length - len(prefix) - len(suffix)
        if self.kind in ("truncate", "long"):
            ids = ids[:size]
        elif self.kind == "tail":
            ids = ids[-size:]
        return [[*prefix, *ids[start : start + size], *suffix] for start in range(0, len(ids), size)]
