"""Encoders whose attention this package computes itself, and the parts of theirs that get methods for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from . import deberta, mpnet, roformer, t5, xlnet
from .attention import BatchAsMask
from .foreign import is_stock, modules_in
from .speech import attend_by_offset
from .substitute import stock_class, substitute_class


Padded = Literal["always", "long", "never"]
LONG_INPUTS = "attention is faster from 1,024 tokens, as fast below, in memory linear in the length"


def _file(model: str) -> str:
    return f"transformers.models.{model}.modeling_{model}"


@dataclass(frozen=True)
class OwnParts:
    """What is replaced in an encoder of Transformers.

    Attributes:
        model: folder in `transformers.models`.
        methods: classes of this folder, by those of Transformers whose methods they replace; that of its
            self-attention is the first.
        effect: what is faster without unpadding, from scripts/benchmarks/bench_encoder.py.
        level: of docs/live.md.
        padded: which calls these parts compute with their padding, too: all, or those long enough to be faster.
        refusal: from an encoder to why it is left to Transformers' code; None for no reason.
    """

    model: str
    methods: Mapping[str, type]
    effect: str = LONG_INPUTS
    padded: Padded = "long"
    level: Literal["own", "contract"] = "own"
    refusal: Callable[[nn.Module], str | None] = lambda encoder: None

    def fits(self, encoder: nn.Module) -> bool:
        """Whether an encoder is one of that file, with that attention, and without code of others."""
        is_there = type(encoder).__module__ == _file(self.model) and self.attention_in(encoder)
        return bool(is_there) and is_stock(encoder)

    def give(self, encoder: nn.Module) -> None:
        """Give the parts of an encoder our methods, in place."""
        for part in modules_in(encoder):
            kind = type(part)
            if kind.__module__ == _file(self.model) and kind.__name__ in self.methods:
                part.__class__ = substitute_class(kind, self.methods[kind.__name__])

    def attention_in(self, encoder: nn.Module) -> list[nn.Module]:
        """The attention modules of an encoder."""
        name = next(iter(self.methods))
        return [part for part in modules_in(encoder) if stock_class(type(part)).__name__ == name]


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


DEBERTA_V2 = {"DisentangledSelfAttention": deberta.SelfAttention, "DebertaV2Encoder": deberta.Stack}
DEBERTA_V1 = {"DisentangledSelfAttention": deberta.FirstSelfAttention, "DebertaEncoder": deberta.Stack}
DEBERTA: dict[str, Any] = {
    "effect": "attention is faster, in memory linear in the length",
    "padded": "always",
    "refusal": _other_deberta,
}
MPNET = {"MPNetSelfAttention": mpnet.SelfAttention, "MPNetEncoder": mpnet.Stack}
ROFORMER = {
    "RoFormerSelfAttention": roformer.SelfAttention,
    "RoFormerEncoder": BatchAsMask,
    "RoFormerSinusoidalPositionalEmbedding": roformer.Sinusoids,
}
T5: dict[str, Any] = {"level": "contract", "refusal": _other_t5}
XLNET = {"XLNetRelativeAttention": xlnet.RelativeAttention, "XLNetModel": xlnet.Model}
XLNET_EFFECT = "attention is faster from 512 tokens, as fast below, in the memory of a few L × L matrices less"
OWN = (
    OwnParts("deberta_v2", DEBERTA_V2, **DEBERTA),
    OwnParts("deberta", DEBERTA_V1, **DEBERTA),
    OwnParts("mpnet", MPNET),
    OwnParts("roformer", ROFORMER, refusal=_decoder),
    OwnParts("xlnet", XLNET, XLNET_EFFECT, refusal=_other_xlnet),
    OwnParts("t5", {"T5Attention": t5.ByOffset}, **T5),
    OwnParts("mt5", {"MT5Attention": t5.ByOffset}, **T5),
    OwnParts("umt5", {"UMT5Attention": t5.ByOffset}, **T5),
)


def own_parts(encoder: nn.Module) -> tuple[OwnParts | None, str | None]:
    """The parts for an encoder, None if there are none; and why they are not taken, if that is to be said."""
    found = next((each for each in OWN if each.fits(encoder)), None)
    reason = None if found is None else found.refusal(encoder)
    return (None, reason) if reason else (found, None)


# Self-attention classes of speech encoders that may have `relative_key`, and their modules in Transformers.
SPEECH = {"Wav2Vec2BertSelfAttention": "wav2vec2_bert", "SeamlessM4Tv2ConformerSelfAttention": "seamless_m4t_v2"}


def give_speech(root: nn.Module) -> int:
    """Give speech encoders' relative attention our methods, in place; returns to how many modules."""
    found = [
        part
        for part in root.modules()
        if type(part).__module__ == _file(SPEECH.get(type(part).__name__, ""))
        and type(part) is stock_class(type(part))
        and getattr(part, "position_embeddings_type", None) == "relative_key"
        and all(each.device.type == "cpu" for each in part.parameters())
    ]
    for part in found:
        part.__class__ = substitute_class(type(part), attend_by_offset)
    return len(found)
