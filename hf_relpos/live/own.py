"""Encoders whose attention this package computes, and the parts that are replaced for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from . import deberta, mpnet, roformer, t5, xlnet
from .attention import BatchAsMask
from .foreign import has_stock_attention, modules_in
from .speech import attend_by_offset
from .substitute import stock_class, substitute_class


LONG_INPUTS = "attention is faster from 1,024 tokens, as fast below, in memory linear in the length"


def _file(model: str) -> str:
    return f"transformers.models.{model}.modeling_{model}"


@dataclass(frozen=True)
class OwnParts:
    """The parts of an encoder of Transformers that are replaced.

    Attributes:
        model: folder in `transformers.models`.
        methods: classes of this folder, by those of Transformers whose methods they replace; that of its
            self-attention is the first.
        effect: what is faster without unpadding, from scripts/benchmarks/bench_encoder.py.
        level: of docs/live.md.
        serves_short: whether these parts are faster on short rows, too, and so compute all calls with their padding.
    """

    model: str
    methods: Mapping[str, type]
    effect: str = LONG_INPUTS
    level: Literal["own", "contract"] = "own"
    serves_short: bool = False

    def fits(self, encoder: nn.Module) -> bool:
        """Whether an encoder is of this architecture, with this attention."""
        is_there = type(encoder).__module__ == _file(self.model) and self.attention_in(encoder)
        return bool(is_there) and has_stock_attention(encoder)

    def give(self, encoder: nn.Module) -> None:
        """Replace the parts of an encoder in place."""
        for part in modules_in(encoder):
            kind = type(part)
            if kind.__module__ == _file(self.model) and kind.__name__ in self.methods:
                part.__class__ = substitute_class(kind, self.methods[kind.__name__])

    def attention_in(self, encoder: nn.Module) -> list[nn.Module]:
        """Return the attention modules of an encoder."""
        name = next(iter(self.methods))
        return [part for part in modules_in(encoder) if stock_class(type(part)).__name__ == name]


DEBERTA_V2 = {"DisentangledSelfAttention": deberta.SelfAttention, "DebertaV2Encoder": deberta.Stack}
DEBERTA_V1 = {"DisentangledSelfAttention": deberta.FirstSelfAttention, "DebertaEncoder": deberta.Stack}
DEBERTA_EFFECT = "attention is faster, in memory linear in the length"
ROFORMER = {
    "RoFormerSelfAttention": roformer.SelfAttention,
    "RoFormerEncoder": BatchAsMask,
    "RoFormerSinusoidalPositionalEmbedding": roformer.Sinusoids,
}
XLNET_EFFECT = "attention is faster from 512 tokens, as fast below, in the memory of a few L × L matrices less"
OWN = (
    OwnParts("deberta_v2", DEBERTA_V2, DEBERTA_EFFECT, serves_short=True),
    OwnParts("deberta", DEBERTA_V1, DEBERTA_EFFECT, serves_short=True),
    OwnParts("mpnet", {"MPNetSelfAttention": mpnet.SelfAttention, "MPNetEncoder": mpnet.Stack}),
    OwnParts("roformer", ROFORMER),
    OwnParts("xlnet", {"XLNetRelativeAttention": xlnet.RelativeAttention, "XLNetModel": xlnet.Model}, XLNET_EFFECT),
    OwnParts("t5", {"T5Attention": t5.ByOffset}, level="contract"),
    OwnParts("mt5", {"MT5Attention": t5.ByOffset}, level="contract"),
    OwnParts("umt5", {"UMT5Attention": t5.ByOffset}, level="contract"),
)


def own_parts(encoder: nn.Module) -> OwnParts | None:
    """Return the parts to replace in an encoder; None if there are none."""
    return next((each for each in OWN if each.fits(encoder)), None)


# Self-attention classes of speech encoders that may have `relative_key`, and their modules in Transformers.
SPEECH = {"Wav2Vec2BertSelfAttention": "wav2vec2_bert", "SeamlessM4Tv2ConformerSelfAttention": "seamless_m4t_v2"}


def give_speech(root: nn.Module) -> int:
    """Replace relative attention of speech encoders in place; return the number of modules."""
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
