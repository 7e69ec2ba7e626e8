"""Level `contract`: compute an encoder without padding through Transformers' attention and mask interfaces.

The encoder runs unchanged on one row with the real tokens of all rows, (1, T). Two functions stand before those that
Transformers has registered as `sdpa`: the mask function hands the layers a `Batch` in place of a mask of T × T,
and the attention function computes the groups of rows of about the same length that it holds, each as Transformers
would compute a batch of these rows, with the mask that Transformers makes for them. So causal masks, windows and
two-sided attention need no code here. All other calls, and those of other models, they hand on.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..attention.formula import Table, Terms, toeplitz_table
from ..attention.sliding_window import SlidingWindowMask
from ..attention.unpadding import Batch, RowGroup, running, take_batch
from ..host.transformers import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
from .attention import attend_as_stock, prefer_backend
from .call import EncoderCall, Level, MismatchError
from .foreign import modules_in
from .record import note_attention


DELEGATE = "sdpa"
# Rows of so many windows are computed by window. See docs/results/benchmarks/cpu-encoder.md.
MANY_WINDOWS = 8
OTHER_ATTENTION = "another attention function was chosen after optimize"
_has_full_rows: ContextVar[bool] = ContextVar("has_full_rows", default=False)


def with_masks(batch: Batch, given: Mapping[str, Any]) -> Batch:
    """A batch with the masks that Transformers' `sdpa` takes for the rows of its groups.

    Args:
        given: arguments of Transformers' mask functions; "mask_function" is the one from indices of batch, head, query
            and key to whether the query sees the key.
    """
    mask_function, local, longest = given.get("mask_function"), given.get("local_size"), batch.groups[0].length
    window = window_of(mask_function, local) if local and longest > local else None
    is_plain = getattr(mask_function, "__name__", "") == "bidirectional_mask_function"

    def masked(group: RowGroup) -> RowGroup:
        length, is_token = group.length, None if group.mask is None else group.mask[:, 0, 0]
        if is_plain or (window is not None and length <= window + 1):
            return group
        if window is not None and length >= MANY_WINDOWS * window:
            device = group.rows.device
            mask: Any = SlidingWindowMask(length, length, window, device, global_tokens=(), is_token=is_token)
        else:
            sizes = {"batch_size": len(group.rows), "q_length": length, "kv_length": length}
            mask = _delegates[1](**{**given, **sizes, "q_offset": 0, "kv_offset": 0, "attention_mask": is_token})
        return replace(group, mask=mask, kept={})

    return replace(batch, groups=tuple(map(masked, batch.groups)))


def window_of(mask_function: Any, about: int) -> int | None:
    """Return the attention window of a mask, if it is the same on both sides; None for any other pattern.

    Transformers composes its mask functions of closures, so it is read off some rows of the pattern.

    Args:
        about: the size of the window as the configuration counts it.
    """
    keys, zero = torch.arange(4 * about + 8), torch.zeros((), dtype=torch.long)
    try:
        window = int(mask_function(zero, zero, zero, keys).sum()) - 1
        queries = (0, 1, about, len(keys) // 2, len(keys) - 1)
        near = [(keys - query).abs() <= window for query in queries]
        seen = [mask_function(zero, zero, torch.tensor(query), keys) for query in queries]
    except (IndexError, RuntimeError, TypeError):  # closures over tensors of a batch
        return None
    return window if 0 < window <= about and all(map(torch.equal, seen, near)) else None


@contextmanager
def full_rows() -> Iterator[None]:
    """While a graph is recorded, of rows without padding and without a cache."""
    token = _has_full_rows.set(True)
    try:
        yield
    finally:
        _has_full_rows.reset(token)


def closed_over(function: Any) -> Iterator[Any]:
    """Return everything in the closures of a composed function, recursively."""
    waiting, seen = [function], {id(function)}
    while waiting:
        for cell in getattr(waiting.pop(), "__closure__", None) or ():
            value = cell.cell_contents
            for each in value if isinstance(value, tuple | list) else (value,):
                if id(each) not in seen:
                    seen.add(id(each))
                    waiting.append(each)
                    yield each


def make_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function: the running batch with masks, or Transformers' own mask.

    Raises:
        MismatchError: for a pattern by a tensor of the batch, such as documents, which has other indices in a group.
    """
    batch, skips = take_batch(), ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    is_recorded = not torch.compiler.is_dynamo_compiling() and _has_full_rows.get()  # Dynamo knows no ContextVar
    if is_recorded and any(kwargs.get(name) for name in skips) and kwargs.get("local_size") is None:
        return None  # as Transformers does where no graph is recorded
    if batch is None or kwargs["batch_size"] * kwargs["q_length"] != batch.tokens:  # that of a part with masks
        return _delegates[1](*args, **kwargs)
    if any(isinstance(each, torch.Tensor) and each.dim() for each in closed_over(kwargs.get("mask_function"))):
        raise MismatchError("its masks are made of an argument by token")
    return with_masks(batch, kwargs)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention function, with the arguments of Transformers' own.

    Args:
        query: (1, H, T, d) with a `Batch` as the mask; keys and values may have fewer heads.
        position_bias: of T5 and its like; of the offsets of the longest row, (H, 2L − 1), with a `Batch`.

    Returns:
        (1, T, H, d), and None for the weights.
    """
    delegate = _delegates[0]
    if not isinstance(attention_mask, Batch):
        return delegate(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    note_attention(f"Transformers' {DELEGATE}, {len(attention_mask.groups)} groups of sequences")
    bias: tuple[Table, ...] = ()
    if (position_bias := kwargs.pop("position_bias", None)) is not None:
        bias = (toeplitz_table(position_bias, attention_mask.groups[0].context),)
    sizes = [each.shape[-1] for each in (query, key, value)]

    def one(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
        pairs = zip(rows, sizes, strict=True)
        query, key, value = (each.unflatten(-1, (-1, size)).transpose(1, 2) for each, size in pairs)
        if bias or isinstance(group.mask, SlidingWindowMask):
            repeats = query.shape[1] // key.shape[1]  # of keys and values that several queries share
            if repeats > 1:
                key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
            terms = Terms(scale=scaling if scaling is not None else sizes[0] ** -0.5, bias=bias)
            return attend_as_stock(module, (query, key, value), terms, group, dropout)
        given = {"dropout": dropout, "scaling": scaling, **kwargs}
        out: torch.Tensor = delegate(module, query, key, value, group.mask, **given)[0]
        return out.flatten(2)

    out = attention_mask.by_group(one, *(each.transpose(1, 2).flatten(2) for each in (query, key, value)))
    return out.unflatten(-1, (-1, sizes[2])), None


def against_unpadding(call: EncoderCall) -> list[str]:
    """What speaks against computing the tokens of a call in one row."""
    found = ["it asks for hidden states"] if call.wants("output_hidden_states") else []
    return [*found, "a sequence has padding inside"] if call.unpadded is None else found


@dataclass(frozen=True)
class Contract(Level):
    """The level.

    Attributes:
        positions: as of `EncoderCall.arguments`.
        window: of local layers, whose rows of many windows are computed by window; None for none.
        own: an `OwnParts`, the parts of the encoder that are replaced, too; None for none.
    """

    positions: str | None = "columns"
    window: int | None = None
    own: Any = None

    @property
    def name(self) -> str:  # type: ignore[override]
        """The level `own` is the same for encoders whose attention gets the batch from parts of this package."""
        return "contract" if self.own is None else str(self.own.level)

    def reaches(self, length: int) -> bool:
        """Whether sequences of a length have many windows."""
        return self.window is not None and length >= MANY_WINDOWS * self.window

    def unsupported(self, call: EncoderCall) -> list[str]:
        """As of every level."""
        found = [f"{name!r} has entries for sequences" for name in call.by_row]
        if call.shape[0] == 1 and not call.is_windowed:
            found.append("it has a single sequence")
        if self.name == "contract" and not attends_by(call.encoder):
            found.append(OTHER_ATTENTION)
        return found + against_unpadding(call)

    def run(self, call: EncoderCall) -> Any:
        """As of every level."""
        given, by_token = call.arguments(self.positions)
        batch = call.unpadded
        assert batch is not None
        inside = {name: batch.remove(given[name]) for name in by_token}
        # with a mask, position ids that begin again are not taken for documents in a row
        inside["attention_mask"] = torch.ones(1, batch.tokens, dtype=torch.long)
        return call.forward_as_asked(functools.partial(self._run, call, batch), {**given, **inside})

    def _run(self, call: EncoderCall, batch: Batch, inside: dict[str, Any]) -> Any:
        call.computed = batch.tokens
        with running(batch):
            outputs = call.forward(**inside)
        fields = {name for name in outputs if outputs[name] is not None} if isinstance(outputs, Mapping) else set()
        if not batch.is_used or not {"last_hidden_state"} <= fields <= {"last_hidden_state", "pooler_output"}:
            raise MismatchError(f"{type(call.encoder).__name__} has other masks or outputs than the contract")
        outputs["last_hidden_state"] = batch.restore(outputs["last_hidden_state"])
        if "pooler_output" in fields:
            outputs["pooler_output"] = call.encoder.pooler(outputs["last_hidden_state"])
        return outputs


class Native(Level):
    """Level `own` of this package's models, which compute a batch that they are given."""

    name = "own"

    def unsupported(self, call: EncoderCall) -> list[str]:
        """As of every level."""
        found = [f"config.{name} is set" for name in ("conv_kernel_size", "memory_length") if call.wants(name)]
        if call.given.get("memory") is not None or call.given.get("memory_sink") is not None:
            found.append("it has a memory")
        return found + against_unpadding(call)

    def run(self, call: EncoderCall) -> Any:
        """As of every level."""
        assert call.unpadded is not None
        call.computed = call.unpadded.tokens
        with running(call.unpadded):
            return call.forward(**call.given)


@dataclass(frozen=True)
class WithPadding(Level):
    """Use this package's attention for calls that keep their padding.

    Attributes:
        own: an `OwnParts`, the parts of the encoder that are replaced.
        serves_short: whether they compute calls of any length.
    """

    name = "attention alone"
    removes_padding = False
    own: Any
    serves_short: bool = False

    def unsupported(self, call: EncoderCall) -> list[str]:
        """As of every level."""
        found = []
        if self.own.level == "contract" and not attends_by(call.encoder):
            found.append(OTHER_ATTENTION)
        if not self.serves_short and not prefer_backend(call.shape[0], call.config.num_attention_heads, call.shape[1]):
            found.append("its attention is as fast in Transformers, for sequences this short")
        if not self.own.serves_short and call.has_empty_row:
            found.append("a sequence has no token, and its queries attend to all keys in Transformers")
        return found

    def run(self, call: EncoderCall) -> Any:
        """As of every level."""
        assert call.real is not None
        with running(Batch.with_padding(call.real)):
            return call.forward_as_asked(lambda given: call.forward(**given), call.given)

    def for_check(self) -> "WithPadding":
        """Return the level for the short sequences of a check."""
        return replace(self, serves_short=True)


def attends_by(encoder: Any) -> bool:
    """Whether all attention of an encoder goes through the interfaces that `take_over` replaces."""
    for part in modules_in(encoder):
        config: Any = vars(part).get("config")
        if getattr(config, "_attn_implementation", None) not in (DELEGATE, None):
            return False
    return ALL_ATTENTION_FUNCTIONS[DELEGATE] is attend and ALL_MASK_ATTENTION_FUNCTIONS[DELEGATE] is make_mask


# Transformers' attention and mask function, which `attend` and `make_mask` call.
_delegates = (ALL_ATTENTION_FUNCTIONS[DELEGATE], ALL_MASK_ATTENTION_FUNCTIONS[DELEGATE])


def take_over() -> None:
    """Let `attend` and `make_mask` see what Transformers' `sdpa` is called with; without a batch they hand it on.

    So configurations keep the name of their attention, which models ask for.
    """
    global _delegates
    found = ALL_ATTENTION_FUNCTIONS[DELEGATE], ALL_MASK_ATTENTION_FUNCTIONS[DELEGATE]
    if found == (attend, make_mask):
        return
    attends, masks = _delegates
    _delegates = attends if found[0] is attend else found[0], masks if found[1] is make_mask else found[1]
    ALL_ATTENTION_FUNCTIONS.register(DELEGATE, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(DELEGATE, make_mask)
