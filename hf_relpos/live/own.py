"""Encoders whose attention this package computes itself, and the parts of theirs that are replaced for it."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..host.declarations import LIVE
from .foreign import is_known_class, is_stock, modules_in


LONG_INPUTS = "attention is faster from 1,024 tokens, as fast below, in memory linear in the length"


def _talking_heads(encoder: nn.Module) -> str | None:
    has_them = any(getattr(module, "talking_head", False) for module in encoder.modules())
    return "talking heads mix the scores of all heads" if has_them else None


def _decoder(encoder: Any) -> str | None:
    return "a decoder: it attends to the left only" if encoder.config.is_decoder else None


def _other_uses(encoder: Any) -> str | None:
    if encoder.config.attn_type != "bi":
        return f"attn_type = {encoder.config.attn_type!r}: it attends to the left only"
    return "bi_data = True: half of a batch runs backwards" if encoder.config.bi_data else None


@dataclass(frozen=True)
class OwnParts:
    """What is replaced in an encoder of Transformers.

    Attributes:
        title: name in reports.
        file: the module of Transformers.
        encoder: its class with the forward that takes tokens.
        code: the module of this folder with our classes.
        classes: class of Transformers to ours, which is a subclass of it.
        attention: the first of these.
        effect: what is faster without unpadding, from scripts/benchmarks/bench_encoder.py.
        refusal: from an encoder to why it is left to Transformers' code; None for no reason.
    """

    title: str
    file: str
    encoder: str
    code: str
    classes: dict[str, str]
    effect: str = LONG_INPUTS
    refusal: Callable[[nn.Module], str | None] = lambda encoder: None

    def fits(self, encoder: nn.Module) -> bool:
        """Whether an encoder is of this very class, with attention of the class that comes with it."""
        if type(encoder).__module__ != self.file or type(encoder).__name__ != self.encoder:
            return False
        attention = getattr(sys.modules[self.file], next(iter(self.classes)))
        found = [type(part) for part in modules_in(encoder) if isinstance(part, attention)]
        names = (self.encoder, *self.classes)
        released = all(LIVE[name].is_released for name in names if name in LIVE)
        return bool(found) and all(kind is attention for kind in found) and released and is_stock(encoder)

    def give(self, encoder: nn.Module) -> list[nn.Module]:
        """Give the parts of an encoder our classes, in place; returns these parts."""
        file, code = sys.modules[self.file], importlib.import_module(f"{__package__}.{self.code}")
        ours = {getattr(file, stock): getattr(code, name) for stock, name in self.classes.items()}
        parts = [part for part in modules_in(encoder) if type(part) in ours and is_known_class(type(part))]
        for part in parts:
            part.__class__ = ours[type(part)]
        return parts

    def layers(self, encoder: nn.Module) -> int:
        """How many attention modules an encoder has."""
        attention = getattr(sys.modules[self.file], next(iter(self.classes)))
        return sum(isinstance(part, attention) for part in modules_in(encoder))


def _file(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


def _accelerated(*names: str) -> dict[str, str]:
    return {name: f"Accelerated{name}" for name in names}


OWN = (
    OwnParts(
        "DeBERTa v2, v3",
        _file("deberta_v2"),
        "DebertaV2Model",
        "deberta",
        _accelerated("DisentangledSelfAttention", "DebertaV2Encoder"),
        "attention is faster, in memory linear in the length",
    ),
    OwnParts(
        "DeBERTa v1",
        _file("deberta"),
        "DebertaModel",
        "deberta",
        {"DisentangledSelfAttention": "AcceleratedDebertaSelfAttention", **_accelerated("DebertaEncoder")},
        refusal=_talking_heads,
    ),
    OwnParts("MPNet", _file("mpnet"), "MPNetModel", "mpnet", _accelerated("MPNetSelfAttention", "MPNetEncoder")),
    OwnParts(
        "RoFormer",
        _file("roformer"),
        "RoFormerModel",
        "roformer",
        _accelerated("RoFormerSelfAttention", "RoFormerEncoder", "RoFormerSinusoidalPositionalEmbedding"),
        refusal=_decoder,
    ),
    OwnParts(
        "XLNet",
        _file("xlnet"),
        "XLNetModel",
        "xlnet",
        _accelerated("XLNetRelativeAttention", "XLNetModel"),
        "attention is faster from 512 tokens, as fast below, in the memory of a few L × L matrices less",
        _other_uses,
    ),
    *(
        OwnParts(f"{name} encoder", _file(name.lower()), f"{prefix}Stack", "t5", _accelerated(*parts))
        for name, prefix in (("T5", "T5"), ("mT5", "MT5"))
        for parts in [(f"{prefix}Attention", f"{prefix}Stack")]
    ),
    OwnParts(
        "UMT5 encoder", _file("umt5"), "UMT5Stack", "umt5", _accelerated("UMT5Attention", "UMT5Stack"), effect=""
    ),
)


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
        code = importlib.import_module(f"{__package__}.speech")
        part.__class__ = getattr(code, f"Accelerated{type(part).__name__}")
    return found


def own_parts(encoder: nn.Module) -> tuple[OwnParts | None, str | None]:
    """The parts for an encoder, None if there are none; and why they are not taken, if that is to be said."""
    found = next((each for each in OWN if each.fits(encoder)), None)
    reason = None if found is None else found.refusal(encoder)
    return (None, f"{found.title}: {reason}") if found is not None and reason else (found, None)
