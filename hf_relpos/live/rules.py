"""Why a call is computed by Transformers, or keeps its padding: each reason with its sentence in docs/live.md.

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
    """A reason.

    Attributes:
        docs: when it applies, in a sentence.
        reason: from a call to what speaks against it, with the remedy; "" for nothing.
    """

    docs: str
    reason: Callable[[EncoderCall], str]


def reasons(rules: Iterable[Rule], call: EncoderCall) -> Iterator[Reason]:
    """What speaks against a call, in the order of the rules, as far as somebody asks."""
    return (Reason(rule.docs, text) for rule in rules if (text := rule.reason(call)))


def _named(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _tokens(call: EncoderCall) -> str:
    return "" if call.tokens is not None else "it has not one tensor input_ids or inputs_embeds with tokens"


def _mask(call: EncoderCall) -> str:
    mask = call.given.get("attention_mask")
    if call.tokens is None or call.real is None:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        return "" if call.tokens is None else f"its mask is {shape}, and not {call.shape} for batch and length"
    if mask is None or mask.dtype == torch.bool or bool((mask[call.real] == 1).all()):
        return ""
    return "its mask has other numbers than 0 and 1, which some encoders multiply by: give attention_mask != 0"


def _other_arguments(call: EncoderCall) -> str:
    names = [name for name in OTHERS if call.given.get(name) is not None]
    return f"it has {_named(names)}, by which a row reads more than its own tokens" if names else ""


def _weights(call: EncoderCall) -> str:
    if call.wants("output_attentions"):
        return "it asks for attention weights, of which only Transformers' own attention has all"
    return "somebody collects the outputs of layers" if collects_outputs() else ""


def _chunks(call: EncoderCall) -> str:
    return "chunk_size_feed_forward is set: set it to 0" if call.wants("chunk_size_feed_forward") else ""


# For these a call is Transformers' own.
CALL = (
    Rule("The call has neither tokens nor embeddings, or both, or tensors without contents.", _tokens),
    Rule("The mask is not (batch, length), or has other numbers than 0 and 1.", _mask),
    Rule(
        "It has a cache, an encoder's states, a head mask, or an earlier memory of XLNet (`mems`).", _other_arguments
    ),
    Rule("It asks for attention weights.", _weights),
    Rule("`chunk_size_feed_forward` is set.", _chunks),
)
# The same, asked last, since it looks at each module.
CODE = Rule(
    "Somebody has put a hook, a module, a forward or an attention function into the encoder.",
    lambda call: call.changed,
)


def _few(call: EncoderCall) -> str:
    if call.hidden >= call.setup.fewest or call.is_windowed:
        return ""
    count = f"{call.hidden} padding tokens" if call.hidden else "no padding"
    return f"it has {count}; from {call.setup.fewest} on it is worth taking them out"


def returns_cache(call: EncoderCall) -> str:
    """Why later calls may read what a call returns."""
    if "use_mems" in call.names and call.wants("use_mems"):
        return "it returns XLNet's memory: pass use_mems=False"
    if call.setup.returns_cache and call.wants("use_cache"):
        return "it returns keys and values, which have padding: pass use_cache=False"
    return ""


def _states(call: EncoderCall) -> str:
    if not call.setup.keeps_states or not call.wants("output_hidden_states"):
        return ""
    return "it asks for hidden states, which the program may read at padding: padding='zeros' takes it out"


def _labels(call: EncoderCall) -> str:
    is_read = keeps_padding()
    return "it has labels at padding, which are in the loss: give -100 there, if they are not to be" if is_read else ""


def _trains(call: EncoderCall) -> str:
    is_barred = call.encoder.training and not call.setup.trains
    return "in training its rows depend on each other or on padding" if is_barred else ""


def _unfamiliar(call: EncoderCall) -> str:
    names = [name for name in call.given.keys() - FAMILIAR if call.given[name] is not None]
    if not call.setup.is_foreign or not names:
        return ""
    return f"code of others gets {_named(sorted(names))}, by which it may read padding"


def _length(call: EncoderCall) -> str:
    limit = call.setup.limit
    if limit is None:
        return ""
    if call.shape[1] >= limit:
        return f"its length {call.shape[1]} changes what the encoder computes, from {limit} on"
    return "it has position ids, and rotations that depend on the length" if _given(call, "position_ids") else ""


def _given(call: EncoderCall, name: str) -> bool:
    return call.given.get(name) is not None


def _documents(call: EncoderCall) -> str:
    """Transformers takes position ids that begin again for documents, if there is no mask."""
    positions: Any = call.given.get("position_ids")
    if not call.is_windowed or _given(call, "attention_mask") or not isinstance(positions, torch.Tensor):
        return ""
    is_plain = positions.dim() == 2 and bool((positions.diff(dim=1) == 1).all())
    return "" if is_plain else "its position ids begin again, without a mask: rows hold several documents"


def _ids(call: EncoderCall) -> str:
    if not call.other_ids:
        return ""
    if not _given(call, "input_ids"):
        return "it has embeddings, of which nobody knows who reads hidden ones: pass padding='mask' if nobody does"
    return (
        f"{call.other_ids} of {call.hidden} hidden positions have other ids than the padding token "
        f"{' or '.join(map(str, call.setup.pads))}: pass padding='mask' to optimize if nobody reads them"
    )


def _shapes(call: EncoderCall) -> str:
    if call.tokens is None or not call.not_understood:
        return ""
    return f"{_named(call.not_understood)} has entries neither for tokens nor for rows"


def _empty(call: EncoderCall) -> str:
    return "a row has no token" if call.has_empty_row else ""


def _side(call: EncoderCall) -> str:
    others = call.sides - {*call.setup.sides}
    if not others:
        return ""
    if not call.setup.sides:
        return "its padding stays: optimize was told so, or somebody around the encoder reads it"
    return f"it has padding on the {others.pop()}, where the encoder or somebody around it reads it"


# For these it keeps its padding; attention of this package may compute it all the same.
PADDING = (
    Rule("The batch has fewer than 16 padding tokens.", _few),
    Rule("It returns keys and values, or XLNet's memory: pass `use_cache=False` or `use_mems=False`.", returns_cache),
    Rule('It asks for hidden states, under `padding="auto"`.', _states),
    Rule("Its labels at padding are not -100, and the head around the encoder has them in its loss.", _labels),
    Rule("Code of others reads other rows or padding in training.", _trains),
    Rule("Code of others gets an argument besides tokens, mask, positions, token types and switches.", _unfamiliar),
    Rule(
        "The batch is so long that rotations (`dynamic`, `longrope`) depend on its length, or that keys are chosen by "
        "score or at random (DeepSeek V3.2, Doge, BigBird).",
        _length,
    ),
    Rule("Rows of many windows hold several documents, by position ids that begin again.", _documents),
    Rule("A hidden position has another id than the padding token.", _ids),
    Rule("An argument has entries neither for tokens nor for rows.", _shapes),
    Rule("A row has no token.", _empty),
    Rule("Padding is on a side where somebody around the encoder reads it.", _side),
)
