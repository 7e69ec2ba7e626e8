"""Reasons why a call falls back to Transformers or keeps its padding, each with its sentence in docs/live.md.

A rule looks at a call, and says what speaks against it with the numbers of that call and a remedy, or "". The list of
docs/live.md is made of `docs`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..host.transformers import collects_outputs
from .arguments import FAMILIAR, OTHERS
from .call import EncoderCall
from .labels import keeps_padding
from .record import Reason


@dataclass(frozen=True)
class Rule:
    """A reason to fall back, and the test for it.

    Attributes:
        docs: when it applies, in a sentence.
        reason: from a call to what speaks against it, with the remedy; "" for nothing.
    """

    docs: str
    reason: Callable[[EncoderCall], str]


def reasons(rules: Iterable[Rule], call: EncoderCall) -> Iterator[Reason]:
    """Yield the reasons that apply to a call, in the order of the rules."""
    return (Reason(rule.docs, text) for rule in rules if (text := rule.reason(call)))


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _tokens(call: EncoderCall) -> str:
    return "" if call.tokens is not None else "it has no tokens: give one tensor, input_ids or inputs_embeds"


def _mask(call: EncoderCall) -> str:
    mask = call.given.get("attention_mask")
    if call.tokens is None or call.real is None:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        return "" if call.tokens is None else f"its mask is {shape}, and not {call.shape} (batch, length)"
    if mask is None or mask.dtype == torch.bool or bool((mask[call.real] == 1).all()):
        return ""
    return "its mask has values other than 0 and 1, which some encoders multiply by: pass attention_mask != 0"


def _other_arguments(call: EncoderCall) -> str:
    names = [name for name in OTHERS if call.given.get(name) is not None]
    return f"it has {_named(names)}, so a sequence attends to more than its own tokens" if names else ""


def _weights(call: EncoderCall) -> str:
    if call.wants("output_attentions"):
        return "it asks for attention weights, which only Transformers' attention returns in full"
    return "the outputs of layers are being collected" if collects_outputs() else ""


def _chunks(call: EncoderCall) -> str:
    return "chunk_size_feed_forward is set: set it to 0" if call.wants("chunk_size_feed_forward") else ""


# For these a call falls back to Transformers.
CALL = (
    Rule("It has neither `input_ids` nor `inputs_embeds`, or both, or meta tensors.", _tokens),
    Rule("The mask is not (batch, length), or has values other than 0 and 1.", _mask),
    Rule("It has a cache, encoder states, a head mask, or XLNet's memory (`mems`).", _other_arguments),
    Rule("It asks for attention weights.", _weights),
    Rule("`chunk_size_feed_forward` is set.", _chunks),
)
# The same, asked last, since it looks at each module.
CODE = Rule(
    "A hook, module, forward or attention function was added to the encoder after `optimize`.",
    lambda call: call.changed,
)


def _few(call: EncoderCall) -> str:
    if call.hidden >= call.setup.fewest or call.is_windowed:
        return ""
    count = f"{call.hidden} padding tokens" if call.hidden else "no padding"
    return f"it has {count}; unpadding starts at {call.setup.fewest}"


def returns_cache(call: EncoderCall) -> str:
    """Why later calls may read what a call returns, as a cache."""
    if "use_mems" in call.names and call.wants("use_mems"):
        return "it returns XLNet's memory: pass use_mems=False"
    if call.setup.returns_cache and call.wants("use_cache"):
        return "it returns keys and values, which have padding: pass use_cache=False"
    return ""


def _states(call: EncoderCall) -> str:
    if not call.setup.keeps_states or not call.wants("output_hidden_states"):
        return ""
    return "it asks for hidden states, which the program may read at padding: pass unpad=True if it does not"


def _labels(call: EncoderCall) -> str:
    is_read = keeps_padding()
    return "it has labels at padding, which are part of the loss: set them to -100 if not wanted" if is_read else ""


def _trains(call: EncoderCall) -> str:
    is_barred = call.encoder.training and not call.setup.trains
    return "in training its sequences depend on each other or on padding" if is_barred else ""


def _unfamiliar(call: EncoderCall) -> str:
    names = [name for name in call.given.keys() - FAMILIAR if call.given[name] is not None]
    if not call.setup.is_foreign or not names:
        return ""
    return f"third-party code gets {_named(sorted(names))}, by which it may read padding"


def _length(call: EncoderCall) -> str:
    limit = call.setup.limit
    if limit is None:
        return ""
    if call.shape[1] >= limit:
        return f"from {limit} tokens on the length changes what the encoder computes; it has {call.shape[1]}"
    return "it has position ids, and RoPE scaling depends on the length" if _given(call, "position_ids") else ""


def _given(call: EncoderCall, name: str) -> bool:
    return call.given.get(name) is not None


def _documents(call: EncoderCall) -> str:
    """Position ids that restart are documents in Transformers, if there is no mask."""
    positions: Any = call.given.get("position_ids")
    if not call.is_windowed or _given(call, "attention_mask") or not isinstance(positions, torch.Tensor):
        return ""
    is_plain = positions.dim() == 2 and bool((positions.diff(dim=1) == 1).all())
    return "" if is_plain else "its position ids restart, without a mask: sequences hold several documents"


def _ids(call: EncoderCall) -> str:
    if not call.other_ids:
        return ""
    if not _given(call, "input_ids"):
        return "it has inputs_embeds, so masked positions may be read: pass unpad='attention_mask' if they are not"
    return (
        f"{call.other_ids} of {call.hidden} masked positions have a token other than the pad token "
        f"{' or '.join(map(str, call.setup.pads))}: pass unpad='attention_mask' to optimize if they are not read"
    )


def _shapes(call: EncoderCall) -> str:
    if call.tokens is None or not call.not_understood:
        return ""
    return f"{_named(call.not_understood)} has entries neither for tokens nor for sequences"


def _empty(call: EncoderCall) -> str:
    return "a sequence has no token" if call.has_empty_row else ""


def _side(call: EncoderCall) -> str:
    others = call.sides - {*call.setup.sides}
    if not others:
        return ""
    if not call.setup.sides:
        return "its padding is kept: unpad=False, or the model around the encoder depends on padding"
    return f"it has padding on the {others.pop()}, on which the encoder or the model around it depends"


# For these it keeps its padding; attention of this package may compute it all the same.
PADDING = (
    Rule("The batch has fewer than 16 padding tokens.", _few),
    Rule("It returns keys and values, or XLNet's memory: pass `use_cache=False` or `use_mems=False`.", returns_cache),
    Rule('It asks for hidden states, with `unpad="auto"`.', _states),
    Rule("Labels at padding are not -100, and the loss of the model's head includes them.", _labels),
    Rule("Third-party code mixes sequences or reads padding in training.", _trains),
    Rule("Third-party code gets an argument besides tokens, mask, positions, token types and flags.", _unfamiliar),
    Rule(
        "The batch is so long that RoPE scaling (`dynamic`, `longrope`) or the choice of keys (DeepSeek V3.2, Doge, "
        "BigBird) depends on its length.",
        _length,
    ),
    Rule("Position ids restart (several documents), and local layers are computed by window.", _documents),
    Rule("A masked position has a token other than the pad token.", _ids),
    Rule("An argument has entries neither for tokens nor for sequences.", _shapes),
    Rule("A sequence has no token.", _empty),
    Rule("The model around the encoder depends on padding on that side.", _side),
)
