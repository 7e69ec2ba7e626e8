"""A call of an encoder: its arguments by name, what they say of its batch, and what is known of the encoder."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch

from ..attention.unpadding import UnpaddedBatch
from ..host.tracing import has_contents
from .arguments import TOKENS, parameters_of, wants
from .foreign import foreign_part, has_stock_attention
from .record import Record


# Fewer padding tokens than these cost less than taking them out. See docs/results/benchmarks/cpu-encoder.md.
FEWEST = 16


class MismatchError(TypeError):
    """An encoder takes or gives something else than a level expects."""


class Level:
    """A way in which calls are computed otherwise than by the encoder's own forward.

    Attributes:
        name: of docs/live.md.
        removes_padding: whether it computes batches without their padding.
    """

    name: ClassVar[str]
    removes_padding: ClassVar[bool] = True

    def unsupported(self, call: "EncoderCall") -> list[str]:
        """Why it does not compute a call, besides the rules that hold for all levels; empty if it does."""
        raise NotImplementedError

    def run(self, call: "EncoderCall") -> Any:
        """The outputs of the encoder; states of padding that is taken out are zeros.

        Raises:
            MismatchError: if the encoder turns out to take or give something else.
        """
        raise NotImplementedError

    def for_check(self) -> Self:
        """The level as it is tried on the few short rows of a check."""
        return self


@dataclass(frozen=True)
class Setup:
    """What is known of an encoder, and so how its calls are computed.

    Attributes:
        levels: in the order in which they are tried; the first is the one that the report names.
        sides: where a row's padding may stand to be taken out: "right", "left".
        pads: ids of the padding token; a position is padding if its mask is 0 and it has one of them.
        trusts_mask: whether the mask alone says what is padding.
        returns_cache: whether it returns keys and values, or XLNet's memory, where it is not told to do without.
        drops_cache: whether nobody reads the cache of calls that do not ask for it.
        limit: the length of a batch from which on rotations or chosen keys depend on that length; None for none.
        trains: whether its outputs in training depend on each row alone, dropout aside.
        trusted: classes, and code of others, that were inside when the levels were checked; None to trust all.
        is_foreign: whether code of others was among them.
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
        """The parts of the encoder that are replaced, and compute calls with padding, too; None for none."""
        return next((own for level in self.levels if (own := getattr(level, "own", None)) is not None), None)

    def for_check(self, *levels: Level) -> "Setup":
        """The same for a check: of these levels, or of its own, without a record, and of any padding."""
        tried = tuple(level.for_check() for level in levels or self.levels)
        return replace(self, levels=tried, trusted=None, fewest=1, record=None, in_float32=False)

    def without_record(self) -> "Setup":
        """For copies to measure on."""
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
    """

    def __init__(self, encoder: Any, forward: Callable[..., Any], setup: Setup, given: dict[str, Any]) -> None:
        self.encoder, self.forward, self.setup, self.given = encoder, forward, setup, given
        self.names, self.takes_others = parameters_of(type(encoder).forward)
        if setup.drops_cache and "use_cache" in self.names and given.get("use_cache") is None:
            self.given = given | {"use_cache": False}
        self.config: Any = getattr(encoder, "config", None)
        self.computed: int | None = None  # how many tokens a level has computed, if not all B·L

    def wants(self, name: str) -> bool:
        """Whether it asks for something, by an argument or by a field of the configuration."""
        return wants(self.encoder, self.given, name)

    @cached_property
    def tokens(self) -> torch.Tensor | None:
        """Its tokens (B, L) or embeddings (B, L, D); None without exactly one tensor of either that can be read."""
        found = [self.given[name] for name in TOKENS if self.given.get(name) is not None]
        is_read = len(found) == 1 and isinstance(found[0], torch.Tensor) and found[0].dim() > 1 and found[0].numel()
        return found[0] if is_read and has_contents(found[0]) else None

    @cached_property
    def shape(self) -> tuple[int, int]:
        """B and L; zeros where the tokens cannot be read."""
        return (0, 0) if self.tokens is None else (self.tokens.shape[0], self.tokens.shape[1])

    @cached_property
    def real(self) -> torch.Tensor | None:
        """(B, L), True for tokens; None where the mask is no such one."""
        mask = self.given.get("attention_mask")
        if self.tokens is None:
            return None
        if mask is None:
            return torch.ones(self.shape, dtype=torch.bool)
        is_mask = isinstance(mask, torch.Tensor) and mask.shape == self.shape and has_contents(mask)
        return mask != 0 if is_mask else None

    @cached_property
    def hidden(self) -> int:
        """How many positions the mask hides."""
        return 0 if self.real is None else self.real.numel() - int(self.real.sum())

    @cached_property
    def has_empty_row(self) -> bool:
        """Whether a row has no token."""
        return self.real is not None and not bool(self.real.any(1).all())

    @cached_property
    def sides(self) -> set[str]:
        """Where padding stands before or after a row's tokens."""
        if self.real is None or not self.hidden:
            return set()
        left, right = (not bool(self.real[:, column].all()) for column in (0, -1))
        return {side for side, is_there in (("left", left), ("right", right)) if is_there}

    @cached_property
    def is_windowed(self) -> bool:
        """Whether a level computes its local layers by window, which is worth it also without padding."""
        return any(getattr(level, "reaches", lambda length: False)(self.shape[1]) for level in self.setup.levels)

    @cached_property
    def other_ids(self) -> int:
        """How many hidden positions have ids other than the padding token's, which somebody may read."""
        if self.setup.trusts_mask or self.real is None or not self.hidden:
            return 0
        ids = self.given.get("input_ids")
        if ids is None or ids.shape != self.real.shape:
            return self.hidden
        found = ids[~self.real]
        return int((~torch.isin(found, torch.tensor(self.setup.pads, dtype=found.dtype))).sum())

    @cached_property
    def changed(self) -> str:
        """Code of others that has come into the encoder, with the remedy; "" for none."""
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
    def _by_shape(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Names of the arguments with entries for tokens, with entries for rows, and of those that are neither."""
        by_token, by_row, others = [], [], []
        rows, length = self.shape
        for name, value in self.given.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.dim() > 1 and value.shape[0] in (1, rows) and value.shape[1] == length:
                    by_token.append(name)
                elif value.shape[0] == rows and rows != length and name != "position_ids":
                    by_row.append(name)
                else:
                    others.append(name)
            elif not isinstance(value, torch.Tensor | bool | int | float | str | None):
                others.append(name)
        return tuple(by_token), tuple(by_row), tuple(others)

    @property
    def by_token(self) -> tuple[str, ...]:
        """Names of arguments (B or 1, L, …)."""
        return self._by_shape[0]

    @property
    def by_row(self) -> tuple[str, ...]:
        """Names of arguments (B, …)."""
        return self._by_shape[1]

    @property
    def not_understood(self) -> tuple[str, ...]:
        """Names of arguments that have entries neither for tokens nor for rows."""
        return self._by_shape[2]

    @cached_property
    def unpadded(self) -> UnpaddedBatch | None:
        """The batch without its padding; None where padding stands inside of a row."""
        return None if self.real is None else UnpaddedBatch.of(self.real, slice(0))

    def arguments(self, positions: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Its arguments with position ids, those by token for all rows; and the names of those by token.

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
        """Position ids, (B or 1, L), as the encoder finds them in a padded batch."""
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
        """What `compute` returns for arguments that ask for a mapping; as a tuple if the caller wants one."""
        asked = given.get("return_dict")
        asked = getattr(self.config, "return_dict", True) if asked is None else asked
        if asked is not False or not (self.takes_others or "return_dict" in self.names):
            return compute(given)
        outputs = compute(given | {"return_dict": True})
        return outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
