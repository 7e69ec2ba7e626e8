"""Unpadding of live encoders: between its first and its last layer a batch is its real tokens, one after the other.

Projections, feed-forward parts and LayerNorms act on each token by itself, so that stock's layers run unchanged on
(1, T, D). Attention alone needs rows: those of about the same length are computed together, without the padding of the
longest (Portes et al. 2023, MosaicBERT, arXiv 2312.17482, §3.1.3, unpad likewise).

An unpadding encoder hands its layers an `UnpaddedBatch` in place of the attention mask. So threads, gradient
checkpointing and copies of a model need nothing of their own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...attention.masks import is_visible
from ...host.transformers import has_cache
from .attention import has_contents


# A group has rows of at least this share of the length of its longest one. Smaller groups have less padding, and more
# of them take more calls.
SHORTEST = 0.8
# Rows of so few tokens are together in any case.
SHORT = 16
# The key of a hook of ours.
HOOK = "hf_relpos"
# Modules whose hooks may see states without padding: those that collect outputs where a caller asks, and those that
# make embeddings require gradients, for gradient checkpointing.
UNAWARE = ("transformers.utils.output_capturing", "transformers.modeling_utils", "peft.peft_model")
# Packages with modules that may be inside an encoder without padding, and PyTorch's modules that may not.
BY_TOKEN = (__name__.partition(".")[0], "apex", "bitsandbytes", "peft", "torch", "torchao", "transformers")
NOT_BY_TOKEN = ("batchnorm", "conv", "flatten", "fold", "instancenorm", "padding", "pooling", "rnn", "transformer")
# Hooks of all modules.
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
# Values of `_attn_implementation` that are attention as it is known here; others are code of somebody else's.
IMPLEMENTATIONS = (None, "eager", "sdpa")
# What heads read: BERT's poolers the first state of a row.
FIRST = slice(0, 1)
# A batch is left as it is where less than this share of its tokens are padding.
FEWEST = 0.05


@dataclass(frozen=True)
class RowGroup:
    """b rows of a batch whose attention is computed together.

    Attributes:
        tokens: where their real tokens are among the T of the batch.
        rows: b.
        length: l, of the longest.
        positions: of the real tokens among the b·l of the padded rows; None where all rows have l.
        visible: which keys are real tokens, (b, 1, 1, l); None where all are.
    """

    tokens: slice
    rows: int
    length: int
    positions: torch.Tensor | None
    visible: torch.Tensor | None

    def in_rows(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors of the batch, (1, T, E), as (b, l, E); padding has zeros."""
        own = vectors[0, self.tokens]
        if self.positions is not None:
            own = own.new_zeros(self.rows * self.length, own.shape[1]).index_copy(0, self.positions, own)
        return own.unflatten(0, (self.rows, self.length))

    def tokens_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The real tokens of (b, l, E), in their order."""
        flat = rows.flatten(0, 1)
        return flat if self.positions is None else flat.index_select(0, self.positions)


@dataclass(frozen=True)
class UnpaddedBatch:
    """A batch of B rows of L tokens without its padding, rows in the order of their lengths, the longest first.

    Attributes:
        indices: (T,), of the real tokens in the flattened batch.
        batch: B.
        length: L.
        groups: of rows, in order.
    """

    indices: torch.Tensor
    batch: int
    length: int
    groups: tuple[RowGroup, ...]

    @classmethod
    def of(cls, real: torch.Tensor, read: slice = FIRST) -> "UnpaddedBatch | None":
        """From a mask (B, L), True for real tokens; None where there is too little padding to take out, or inside.

        Tokens of a row have to be neighbours, since the distances between them count.

        Args:
            read: the states of a row that heads read. Padding stays where it is among them.
        """
        batch, length = real.shape
        lengths = real.sum(1)
        if int(lengths.sum()) > (1 - FEWEST) * batch * length or not bool(real[:, read].all()):
            return None
        if bool((real[:, 1:] & ~real[:, :-1]).sum(1).add(real[:, 0]).ne(1).any()):  # rows without a token, too
            return None
        columns = torch.arange(length, device=real.device)
        order = lengths.argsort(descending=True, stable=True)
        sizes = lengths[order].tolist()
        indices = (order[:, None] * length + columns)[real[order]]
        groups, first, begin = [], 0, 0
        while first < batch:
            longest = sizes[first]
            last = first
            while last < batch and (sizes[last] >= SHORTEST * longest or longest <= SHORT):
                last += 1
            count, rows = sum(sizes[first:last]), last - first
            visible = positions = None
            if count < rows * longest:
                seen = columns[:longest] < lengths[order[first:last], None]
                visible, positions = seen[:, None, None, :], seen.flatten().nonzero().flatten()
            groups.append(RowGroup(slice(begin, begin + count), rows, longest, positions, visible))
            first, begin = last, begin + count
        return cls(indices, batch, length, tuple(groups))

    def dim(self) -> int:
        """As of the mask (B, L) that it stands for: stock encoders ask."""
        return 2

    def remove(self, states: torch.Tensor) -> torch.Tensor:
        """(B, L, D) to (1, T, D)."""
        return states.flatten(0, 1).index_select(0, self.indices)[None]

    def restore(self, tokens: torch.Tensor) -> torch.Tensor:
        """(1, T, D) to (B, L, D), with zeros for padding."""
        states = tokens.new_zeros(self.batch * self.length, tokens.shape[2])
        return states.index_copy(0, self.indices, tokens[0]).unflatten(0, (self.batch, self.length))

    def by_group(self, attend: Callable[..., torch.Tensor], *vectors: torch.Tensor) -> torch.Tensor:
        """Compute attention group by group.

        Args:
            attend: from a group and its vectors, each (b, l, E), to its output, (b, l, D).
            vectors: of the batch, each (1, T, E).

        Returns:
            (1, T, D).
        """
        found = [group.tokens_of(attend(group, *(group.in_rows(each) for each in vectors))) for group in self.groups]
        return torch.cat(found)[None]


def key_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask that hides the same keys from all queries and heads, as (B, K), True for those that are seen; else None.

    Args:
        mask: (B, K), or (B, 1, 1 or L, K); boolean, of zeros and ones, or additive.
    """
    if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
        return None
    if mask.dim() == 2:
        return mask != 0
    if mask.shape[1] != 1 or (mask.is_floating_point() and not bool(((mask == 0) | ~is_visible(mask)).all())):
        return None
    visible = is_visible(mask)
    first = visible[:, 0, 0]
    return first if bool((visible == first[:, None, None]).all()) else None


def unpadded(
    encoder: nn.Module,
    states: torch.Tensor,
    mask: torch.Tensor | None,
    outputs: dict[str, Any],
    read: slice = FIRST,
) -> UnpaddedBatch | None:
    """The batch of a call without its padding; None for a call that has to see padding, or has none.

    Args:
        encoder: the module around the layers.
        states: (B, L, D), what it is called with.
        mask: what `key_mask` takes.
        outputs: further arguments, of which those that ask for hidden states and attention weights count.
        read: as of `UnpaddedBatch.of`.
    """
    # not all encoders have their configuration themselves
    config: Any = next((vars(each)["config"] for each in encoder.modules() if "config" in vars(each)), None)
    if (
        mask is None
        or not (has_contents(states) and has_contents(mask))
        or states.shape[0] < 2
        or any(outputs.get(name) for name in ("output_hidden_states", "output_attentions"))
        or outputs.get("encoder_hidden_states") is not None
        or has_cache(outputs)
        or outputs.get("is_causal")
        or bool(getattr(config, "chunk_size_feed_forward", False))
        or getattr(config, "_attn_implementation", None) not in IMPLEMENTATIONS
        or _is_watched(encoder)
    ):
        return None
    if mask.dim() == 4 and mask.dtype == torch.bool and getattr(config, "_attn_implementation", None) != "sdpa":
        return None  # stock adds this mask to the scores
    real = key_mask(mask)
    return None if real is None or real.shape != states.shape[:2] else UnpaddedBatch.of(real, read)


def is_by_token(module: nn.Module) -> bool:
    """Whether a module inside an encoder is known to treat each token by itself, or to be attention as it is here.

    So are those of Transformers, layers of PyTorch but for those that have neighbours or statistics of a batch, and
    adapters and quantized layers of other libraries.
    """
    return _holds_modules_by_token(type(module).__module__) and not isinstance(module, nn.MultiheadAttention)


@functools.cache
def _holds_modules_by_token(file: str) -> bool:
    package, *inner = file.split(".")
    return package in BY_TOKEN and not (inner[:2] == ["nn", "modules"] and inner[-1] in NOT_BY_TOKEN)


def _is_watched(encoder: nn.Module) -> bool:
    """Whether states of single layers are read by others: by hooks, by modules of theirs, or as a caller wants.

    Transformers' hooks read only where `output_hidden_states` or `output_attentions` asks for it.
    """
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.get()
    if collected:
        return True
    if any(getattr(torch.nn.modules.module, name) for name in GLOBAL_HOOKS):
        return True
    for module in encoder.modules():
        if module._backward_hooks or module._backward_pre_hooks or not is_by_token(module):
            return True
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", "") not in UNAWARE for hook in hooks):
            return True
    return False


def records_of(model: Any) -> None:
    """Let a model of a substituted class return hidden states and attention weights as its stock class does.

    Transformers looks up what a model records by the name of its class.
    """
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    if not _CAN_RECORD_REGISTRY.get(model):
        _CAN_RECORD_REGISTRY[model] = model._can_record_outputs


class UnpaddingEncoder:
    """An encoder of stock's whose layers get a batch without its padding: to be put before the stock class."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As stock; the states of padding are zeros."""
        encoder: Any = self
        # by position comes, in all of these classes, what a decoder needs
        is_decoder = any(each is not None for each in args)
        batch = None if is_decoder else unpadded(encoder, hidden_states, attention_mask, kwargs)
        if batch is None:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
        outputs = super().forward(batch.remove(hidden_states), batch, *args, **kwargs)  # type: ignore[misc]
        return with_states(outputs, batch)


def with_states(outputs: Any, batch: UnpaddedBatch) -> Any:
    """The outputs of an encoder with the states of all tokens."""
    if isinstance(outputs, tuple):
        return (batch.restore(outputs[0]), *outputs[1:])
    outputs["last_hidden_state"] = batch.restore(outputs["last_hidden_state"])
    return outputs
