"""The positions of one attention call, and the other relations between its queries i and keys j."""

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch


def moved(value: Any, device: torch.device | str | int) -> Any:
    """A tuple or a dataclass with what is in it, tensors and all that has a method `to`, on a device."""

    def part(each: Any) -> Any:
        return each.to(device) if hasattr(each, "to") else moved(each, device)

    if isinstance(value, tuple):
        return type(value)(*map(part, value)) if hasattr(value, "_fields") else tuple(map(part, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{each.name: part(getattr(value, each.name)) for each in dataclasses.fields(value)})


def precise(dtype: torch.dtype) -> torch.dtype:
    """The dtype, but at least float32."""
    return dtype if dtype.itemsize >= 4 else torch.float32


class Positions(NamedTuple):
    """Positions of keys that are not their indices.

    Attributes:
        of_keys: (B, K).
        max_distance: the largest |r| possible.
    """

    of_keys: torch.Tensor
    max_distance: int


class TokenInputs(NamedTuple):
    """What the caller says about the tokens themselves; None for what is not known.

    Attributes:
        grid: (B, L, 2), row and column of each token of an image, negative for tokens outside of it.
        token_type_ids: (B, L).
        relation_ids: (B, L, L), the label of each directed edge from i to j.
        real: (B, K), False for keys that are padding.
    """

    grid: torch.Tensor | None = None
    token_type_ids: torch.Tensor | None = None
    relation_ids: torch.Tensor | None = None
    real: torch.Tensor | None = None


class LayerInputs(NamedTuple):
    """What a layer hands to its scheme; None for what there is not.

    Attributes:
        shared: the result, for this call, of the scheme's module that all layers share.
        token_numbers: (B, H, K), what `Scheme.token_numbers` returns of the layer's inputs.
        query_projection: W_q of the layer, D to H·d.
        key_projection: W_k of the layer, D to H·d.
    """

    shared: Any = None
    token_numbers: torch.Tensor | None = None
    query_projection: Callable[[torch.Tensor], torch.Tensor] | None = None
    key_projection: Callable[[torch.Tensor], torch.Tensor] | None = None


NOTHING_SAID, NO_LAYER = TokenInputs(), LayerInputs()


@dataclass(frozen=True)
class AttentionContext:
    """The offsets r = j − i of L queries and K keys, and the other relations that a scheme may use.

    Attributes:
        query_length: L.
        key_length: K.
        start: index of the first query among the keys: 0 without a cache, the number of cached tokens with one. It is
            a tensor of one element when a static cache keeps it on the device.
        positions: positions of the keys if they are not their indices in the row; None for consecutive tokens, which
            is the fast case. The queries are the L keys from `start` on.
        keys: (K,), the index of each key, and its column of `positions`, if the call has only some keys of its rows;
            None means 0, 1, 2, …
        longest: tokens of a row of the batch of which the L are a group without its padding; None for K.
        tokens: grid, token types, labelled edges and padding.
        layer: what the layer hands to its scheme.
        device: the device on which the layer computes; None means the default device.
        dtype: the dtype for angles, slopes and the like: that of the layer, but at least float32.
        kept: what follows from the fields above, made in one layer for all of them (`once`); None to make it anew.
    """

    query_length: int
    key_length: int
    start: int | torch.Tensor = 0
    positions: Positions | None = None
    keys: torch.Tensor | None = None
    longest: int | None = None
    tokens: TokenInputs = NOTHING_SAID
    layer: LayerInputs = NO_LAYER
    device: torch.device | None = None
    dtype: torch.dtype = torch.float32
    kept: dict[Hashable, Any] | None = field(default=None, compare=False, repr=False)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, which is called once for all layers.

        It must follow from this context and the key alone, and have no gradient: a layer may be computed again in the
        backward pass (activation checkpointing).
        """
        if self.kept is None:
            return make()
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    @property
    def is_consecutive(self) -> bool:
        """Whether query and key i are tokens `start + i` and i, with no more known than the lengths."""
        return self.positions is None and self.keys is None and isinstance(self.start, int)

    @property
    def low(self) -> int:
        """The smallest offset that can occur."""
        if self.positions is not None:
            return -self.positions.max_distance
        last = self.key_length if isinstance(self.start, torch.Tensor) else self.start + self.query_length
        return 1 - last

    @property
    def high(self) -> int:
        """The largest offset that can occur."""
        if self.positions is not None:
            return self.positions.max_distance
        return self.key_length - 1 - (0 if isinstance(self.start, torch.Tensor) else self.start)

    def query_positions(self, device: torch.device | None) -> torch.Tensor:
        """Return the positions of the queries, (L,), or (B, L) with explicit positions."""
        if self.kept is not None and self.query_length == self.key_length and self.keys is None:
            return self.key_positions(device)  # the same tensor, so that what is made of it is made once

        def make() -> torch.Tensor:
            indices = torch.arange(self.query_length, device=device) + self.start
            return indices if self.positions is None else self.positions.of_keys[:, indices]

        made: torch.Tensor = self.once(("positions of queries", device), make)
        return made

    def key_positions(self, device: torch.device | None) -> torch.Tensor:
        """Return the positions of the keys, (K,), or (B, K) with explicit positions."""
        if self.positions is not None:
            return self.positions.of_keys if self.keys is None else self.positions.of_keys[:, self.keys]
        if self.keys is not None:
            return self.keys
        made: torch.Tensor = self.once(
            ("positions of keys", device), lambda: torch.arange(self.key_length, device=device)
        )
        return made

    def matrix(self, device: torch.device | None) -> torch.Tensor:
        """Return r = j − i for every query and key, (L, K), or (B, L, K) with explicit positions."""
        return self.key_positions(device)[..., None, :] - self.query_positions(device)[..., :, None]

    def offsets(self, device: torch.device | None) -> torch.Tensor:
        """Return every offset from `low` to `high` in ascending order, (high − low + 1,)."""
        return torch.arange(self.low, self.high + 1, device=device)


def grid_offsets(context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row steps and column steps from query to key, and whether both are on the grid, each (B, L, L).

    Raises:
        ValueError: if the grid does not cover all keys.
    """
    keys, grid = context.key_length, context.tokens.grid
    if grid is None or tuple(grid.shape[1:]) != (keys, 2):
        shape = None if grid is None else tuple(grid.shape)
        raise ValueError(
            f"the grid has shape {shape}; {context.query_length} tokens that attend to {keys} need position_ids of "
            f"shape (batch, {keys}, 2), and a cache keeps none: set use_cache=False"
        )
    grid = grid.long()
    steps = grid[:, None, :] - grid[:, :, None]
    inside = (grid >= 0).all(-1)
    return steps[..., 0], steps[..., 1], inside[:, None, :] & inside[:, :, None]
