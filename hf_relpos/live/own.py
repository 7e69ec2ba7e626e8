"""Encoders whose attention this package computes itself, and the parts of theirs that are replaced for it."""

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from .foreign import is_known_class, is_stock, modules_in
from .substitute import transformers_class


Padded = Literal["always", "long", "never"]
LONG_INPUTS = "attention is faster from 1,024 tokens, as fast below, in memory linear in the length"


def _file(model: str) -> str:
    return f"transformers.models.{model}.modeling_{model}"


@functools.cache
def substitutes(code: str) -> dict[type, type]:
    """The classes of a module of this folder, by those of Transformers that they stand for."""
    module = importlib.import_module(f"{__package__}.{code}")
    found = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, nn.Module)]
    return {transformers_class(each): each for each in found if each.__module__ == module.__name__}


@dataclass(frozen=True)
class OwnParts:
    """What is replaced in an encoder of Transformers.

    Attributes:
        model: folder in `transformers.models`.
        encoder: class with the forward that takes tokens.
        attention: class of its self-attention.
        code: the module of this folder with our classes.
        effect: what is faster without unpadding, from scripts/benchmarks/bench_encoder.py.
        level: of docs/live.md.
        padded: which calls these parts compute with their padding, too: all, or those long enough to be faster.
        refusal: from an encoder to why it is left to Transformers' code; None for no reason.
    """

    model: str
    encoder: str
    attention: str
    code: str
    effect: str = LONG_INPUTS
    padded: Padded = "long"
    level: Literal["own", "contract"] = "own"
    refusal: Callable[[nn.Module], str | None] = lambda encoder: None

    @property
    def attention_class(self) -> type:
        """The class of Transformers."""
        found: type = getattr(sys.modules[_file(self.model)], self.attention)
        return found

    def fits(self, encoder: nn.Module) -> bool:
        """Whether an encoder is of this very class, with attention of the class that comes with it."""
        if type(encoder).__module__ != _file(self.model) or type(encoder).__name__ != self.encoder:
            return False
        kinds = {type(part) for part in self.attention_in(encoder)}
        return kinds == {self.attention_class} and is_stock(encoder)

    def give(self, encoder: nn.Module) -> list[nn.Module]:
        """Give the parts of an encoder our classes, in place; returns these parts."""
        ours = substitutes(self.code)
        parts = [part for part in modules_in(encoder) if type(part) in ours and is_known_class(type(part))]
        for part in parts:
            part.__class__ = ours[type(part)]
        return parts

    def attention_in(self, encoder: nn.Module) -> list[nn.Module]:
        """The attention modules of an encoder."""
        return [part for part in modules_in(encoder) if isinstance(part, self.attention_class)]


def _other_deberta(encoder: Any) -> str | None:
    if any(getattr(part, "talking_head", False) for part in encoder.modules()):
        return "talking heads mix the scores of all heads"
    return f"z_steps = {encoder.z_steps}: the last layer runs again for other queries" if encoder.z_steps > 1 else None


def _decoder(encoder: Any) -> str | None:
    return "a decoder: it attends to the left only" if encoder.config.is_decoder else None


def _other_t5(encoder: Any) -> str | None:
    """Up to Transformers 5.14 they have no other attention than "eager"."""
    chosen = encoder.config._attn_implementation
    return None if chosen == "sdpa" else f"attn_implementation = {chosen!r}: attention is accelerated with 'sdpa'"


def _other_xlnet(encoder: Any) -> str | None:
    if encoder.config.attn_type != "bi":
        return f"attn_type = {encoder.config.attn_type!r}: it attends to the left only"
    return "bi_data = True: half of a batch runs backwards" if encoder.config.bi_data else None


DEBERTA: dict[str, Any] = {
    "attention": "DisentangledSelfAttention",
    "code": "deberta",
    "effect": "attention is faster, in memory linear in the length",
    "padded": "always",
    "refusal": _other_deberta,
}
T5: dict[str, Any] = {"code": "t5", "level": "contract", "refusal": _other_t5}
XLNET_EFFECT = "attention is faster from 512 tokens, as fast below, in the memory of a few L × L matrices less"
OWN = (
    OwnParts("deberta_v2", "DebertaV2Model", **DEBERTA),
    OwnParts("deberta", "DebertaModel", **DEBERTA),
    OwnParts("mpnet", "MPNetModel", "MPNetSelfAttention", "mpnet"),
    OwnParts("roformer", "RoFormerModel", "RoFormerSelfAttention", "roformer", refusal=_decoder),
    OwnParts("xlnet", "XLNetModel", "XLNetRelativeAttention", "xlnet", XLNET_EFFECT, refusal=_other_xlnet),
    OwnParts("t5", "T5Stack", "T5Attention", **T5),
    OwnParts("mt5", "MT5Stack", "MT5Attention", **T5),
    OwnParts("umt5", "UMT5Stack", "UMT5Attention", **T5),
)


def own_parts(encoder: nn.Module) -> tuple[OwnParts | None, str | None]:
    """The parts for an encoder, None if there are none; and why they are not taken, if that is to be said."""
    found = next((each for each in OWN if each.fits(encoder)), None)
    reason = None if found is None else found.refusal(encoder)
    return (None, reason) if reason else (found, None)


# Self-attention classes of speech encoders that may have `relative_key`, and their modules in Transformers.
SPEECH = {"Wav2Vec2BertSelfAttention": "wav2vec2_bert", "SeamlessM4Tv2ConformerSelfAttention": "seamless_m4t_v2"}


def give_speech(root: nn.Module) -> list[nn.Module]:
    """Give speech encoders' relative attention our classes, in place; returns what was changed."""
    found: list[nn.Module] = [
        part
        for part in root.modules()
        if type(part).__module__ == _file(SPEECH.get(type(part).__name__, ""))
        and getattr(part, "position_embeddings_type", None) == "relative_key"
        and all(each.device.type == "cpu" for each in part.parameters())
    ]
    for part in found:
        part.__class__ = substitutes("speech")[type(part)]
    return found
