"""A call of an encoder: its arguments by name, properties of its batch, and the setup of the encoder."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import torch

from ..attention.unpadding import Batch
from ..host.tracing import has_contents
from .arguments import TOKENS, parameters_of, wants
from .foreign import foreign_part, has_stock_attention
from .record import Reason, Record


# Fewer padding tokens than these cost less than taking them out. See docs/results/benchmarks/cpu-encoder.md.
FEWEST = 16


T = TypeVar("T")


class cached_property(functools.cached_property[T]):
    """Without the lock of Python 3.11, which all threads share, and forked processes inherit."""

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()


class MismatchError(TypeError):
    """An encoder takes or returns something that a level does not expect."""


class Level:
    """A way to compute calls without padding, other than the encoder's own forward.

    Attributes:
        name: of docs/live.md.
        removes_padding: whether it computes batches without their padding.
    """

    name: ClassVar[str]
    removes_padding: ClassVar[bool] = True

    def unsupported(self, call: "EncoderCall") -> list[str]:
        """Return why this level cannot compute a call, besides the rules for all levels; empty if it can."""
        raise NotImplementedError

    def run(self, call: "EncoderCall") -> Any:
        """Return the outputs of the encoder; hidden states at removed padding are zeros.

        Raises:
            MismatchError: if the encoder turns out to take or give something else.
        """
        raise NotImplementedError

    def for_check(self) -> Self:
        """Return the level as it is tried on the few short sequences of a check."""
        return self


@dataclass(frozen=True)
class Setup:
    """How the calls of an encoder are computed, and what was found out about it.

    Attributes:
        levels: in the order in which they are tried; the first is the one that the report names.
        sides: where a row's padding may stand to be taken out: "right", "left".
        pads: ids of the padding token; a position is padding if its mask is 0 and it has one of them.
        trusts_mask: whether the mask alone says what is padding.
        returns_cache: whether it returns keys and values, or XLNet's memory, where it is not told to do without.
        drops_cache: whether nobody reads the cache of calls that do not ask for it.
        limit: the length of a batch from which on rotations or chosen keys depend on that length; None for none.
        trains: whether its outputs in training depend on each row alone, dropout aside.
        trusted: classes, and third-party code, that were inside when the levels were checked; None to trust all.
        is_foreign: whether third-party code was among them.
        checked: the length of the longest batch of the check.
        keeps_states: whether calls that ask for all hidden states keep their padding.
        in_float32: whether calls in half precision are computed in float32.
        fewest: padding tokens that are worth taking out.
        difference: from Transformers at tokens, as a share of the largest value.
        captured: the level of calls of few tokens without padding; None for none.
        record: of its calls; None for those of a check, in which errors are raised.
    """

    levels: tuple[Level, ...] = ()
    sides: tuple[str, ...] = ("right", "left")
    pads: tuple[int, ...] = ()
    trusts_mask: bool = False
    returns_cache: bool = False
    drops_cache: bool = False
    limit: int | None = None
    trains: bool = True
    trusted: frozenset[Any] | None = None
    is_foreign: bool = False
    checked: int = 0
    keeps_states: bool = False
    in_float32: bool = False
    fewest: int = field(default_factory=lambda: FEWEST)
    difference: float = 0.0
    captured: Level | None = None
    record: Record | None = None

    @property
    def own(self) -> Any:
        """The replaced parts of the encoder, which also compute calls with padding; None if there are none."""
        return next((own for level in self.levels if (own := getattr(level, "own", None)) is not None), None)

    def for_check(self, *levels: Level) -> "Setup":
        """Return the setup for a check: these levels or its own, no record, any amount of padding."""
        tried = tuple(level.for_check() for level in levels or self.levels)
        return replace(self, levels=tried, trusted=None, fewest=1, record=None, in_float32=False)

    def without_record(self) -> "Setup":
        """Return it for copies to measure on."""
        return replace(self, record=None, captured=None)

    def __deepcopy__(self, memo: Any) -> "Setup":
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without code, of which there are no pickles."""
        known = None if self.trusted is None else frozenset(each for each in self.trusted if isinstance(each, type))
        return {**vars(self), "trusted": known}


class EncoderCall:
    """A call of an encoder.

    Attributes:
        encoder: the module.
        forward: of its class, bound to it.
        setup: what is known of it.
        given: its arguments by name.
        names: of all arguments that it takes.
        computed: how many tokens a level has computed, if not all B·L.
        callers: the calls of several threads that it is made of.
        alone: why it was not computed with calls of other threads.
        answer: what it got.
    """

    def __init__(self, encoder: Any, forward: Callable[..., Any], setup: Setup, given: dict[str, Any]) -> None:
        self.encoder, self.forward, self.setup, self.given = encoder, forward, setup, given
        self.names, self.takes_others = parameters_of(type(encoder).forward)
        if setup.drops_cache and "use_cache" in self.names and given.get("use_cache") is None:
            self.given = given | {"use_cache": False}
        self.config: Any = getattr(encoder, "config", None)
        self.computed: int | None = None
        self.callers: tuple[EncoderCall, ...] = ()
        self.alone: Reason | None = None
        self.answer: Any = None

    def wants(self, name: str) -> bool:
        """Whether it asks for an output, by an argument or by a field of the configuration."""
        return wants(self.encoder, self.given, name)

    @cached_property
    def tokens(self) -> torch.Tensor | None:
        """Token ids (B, L) or embeddings (B, L, D); None unless there is exactly one readable tensor of either."""
        found = [self.given[name] for name in TOKENS if self.given.get(name) is not None]
        is_read = len(found) == 1 and isinstance(found[0], torch.Tensor) and found[0].dim() > 1 and found[0].numel()
        return found[0] if is_read and has_contents(found[0]) else None

    @cached_property
    def shape(self) -> tuple[int, int]:
        """B and L; zeros if the tokens cannot be read."""
        return (0, 0) if self.tokens is None else (self.tokens.shape[0], self.tokens.shape[1])

    @cached_property
    def real(self) -> torch.Tensor | None:
        """Mask (B, L), True for tokens; None for any other mask."""
        mask = self.given.get("attention_mask")
        if self.tokens is None:
            return None
        if mask is None:
            return torch.ones(self.shape, dtype=torch.bool)
        is_mask = isinstance(mask, torch.Tensor) and mask.shape == self.shape and has_contents(mask)
        return mask != 0 if is_mask else None

    @cached_property
    def hidden(self) -> int:
        """Number of masked positions."""
        return 0 if self.real is None else self.real.numel() - int(self.real.sum())

    @cached_property
    def has_empty_row(self) -> bool:
        """Whether a sequence has no token."""
        return self.real is not None and not bool(self.real.any(1).all())

    @cached_property
    def sides(self) -> set[str]:
        """Padding sides: left if padding precedes the tokens of a sequence, right if it follows them."""
        if self.real is None or not self.hidden:
            return set()
        left, right = (not bool(self.real[:, column].all()) for column in (0, -1))
        return {side for side, is_there in (("left", left), ("right", right)) if is_there}

    @cached_property
    def is_windowed(self) -> bool:
        """Whether a level computes local layers by window, which is faster even without padding."""
        return any(getattr(level, "reaches", lambda length: False)(self.shape[1]) for level in self.setup.levels)

    @cached_property
    def other_ids(self) -> int:
        """Number of masked positions with a token other than the pad token, which may be read."""
        if self.setup.trusts_mask or self.real is None or not self.hidden:
            return 0
        ids = self.given.get("input_ids")
        if ids is None or ids.shape != self.real.shape:
            return self.hidden
        found = ids[~self.real]
        return int((~torch.isin(found, torch.tensor(self.setup.pads, dtype=found.dtype))).sum())

    @cached_property
    def changed(self) -> str:
        """Third-party code added to the encoder after `optimize`, with the remedy; "" for none."""
        trusted = self.setup.trusted
        if trusted is None:
            return ""
        if self.setup.own is not None and not has_stock_attention(self.encoder):
            return "the attention function of Transformers was replaced after optimize"
        part = foreign_part(self.encoder, trusted)
        if part is None:
            return ""
        return (
            f"{type(part).__name__} inside has hooks, or was replaced or changed after optimize: call optimize again"
        )

    @cached_property
    def by_token(self) -> tuple[str, ...]:
        """Names of arguments (B or 1, L, …)."""
        rows, length = self.shape
        shapes = ((name, value.shape) for name, value in self.given.items() if isinstance(value, torch.Tensor))
        return tuple(name for name, shape in shapes if shape[1:2] == (length,) and shape[0] in (1, rows))

    @cached_property
    def by_row(self) -> tuple[str, ...]:
        """Names of other arguments (B, …)."""
        rows, length = self.shape
        others = ((name, value) for name, value in self.given.items() if name not in (*self.by_token, "position_ids"))
        shapes = ((name, value.shape) for name, value in others if isinstance(value, torch.Tensor))
        return tuple(name for name, shape in shapes if shape[:1] == (rows,) and rows != length)

    @cached_property
    def not_understood(self) -> tuple[str, ...]:
        """Names of arguments that have entries neither for tokens nor for rows."""
        others = ((name, value) for name, value in self.given.items() if name not in self.by_token + self.by_row)
        plain = bool | int | float | str | None
        return tuple(
            name
            for name, value in others
            if (value.dim() if isinstance(value, torch.Tensor) else not isinstance(value, plain))
        )

    @cached_property
    def unpadded(self) -> Batch | None:
        """The batch without its padding; None where padding stands inside of a row."""
        return None if self.real is None else Batch.of(self.real, slice(0))

    def arguments(self, positions: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the arguments with position ids, those by token for all sequences, and the names of the latter.

        Args:
            positions: the position ids that the encoder is told where the caller gives none. "columns": those of a
                row's columns; "counted": those of RoBERTa, which counts tokens from the one after the padding id on;
                None for encoders that are not told.
        """
        given, by_token = dict(self.given), self.by_token
        if "position_ids" in self.names and given.get("position_ids") is None and positions is not None:
            given["position_ids"], by_token = self._positions(positions), (*by_token, "position_ids")
        rows = self.shape[0]
        return given | {name: given[name].expand(rows, *given[name].shape[1:]) for name in by_token}, by_token

    def _positions(self, positions: str) -> torch.Tensor:
        """Return position ids, (B or 1, L), as the encoder computes them in a padded batch."""
        columns = torch.arange(self.shape[1])[None]
        if positions == "columns":
            return columns
        index = getattr(getattr(self.encoder, "embeddings", None), "padding_idx", None)  # MPNet's is always 1
        pad = self.setup.pads[0] if index is None else index
        if self.given.get("input_ids") is None:
            return columns + pad + 1
        is_counted = (self.given["input_ids"] != pad).long()
        return is_counted.cumsum(1) * is_counted + pad

    def forward_as_asked(self, compute: Callable[[dict[str, Any]], Any], given: dict[str, Any]) -> Any:
        """Return the mapping that `compute` returns, or a tuple if the caller asks for one."""
        asked = given.get("return_dict")
        asked = getattr(self.config, "return_dict", True) if asked is None else asked
        if asked is not False or not (self.takes_others or "return_dict" in self.names):
            return compute(given)
        outputs = compute(given | {"return_dict": True})
        return outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
