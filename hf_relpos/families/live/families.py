"""The families of stock models that can be accelerated: which classes become which, and what is left alone."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers.models.deberta.modeling_deberta import DebertaEncoder
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as DebertaSelfAttention
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder, DisentangledSelfAttention
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder, MPNetSelfAttention
from transformers.models.mt5.modeling_mt5 import MT5Attention, MT5Stack
from transformers.models.roformer.modeling_roformer import RoFormerEncoder, RoFormerSelfAttention
from transformers.models.t5.modeling_t5 import T5Attention, T5Stack
from transformers.models.xlnet.modeling_xlnet import XLNetModel, XLNetRelativeAttention

from . import deberta, mpnet, roformer, t5, xlnet


ALREADY = "it is accelerated already"
LONG_INPUTS = "faster from 1,024 tokens, as fast below; attention in memory linear in the length"


def _nothing(container: nn.Module) -> list[str]:
    return []


@dataclass(frozen=True)
class Family:
    """One stock architecture.

    Attributes:
        name: for people.
        container: the stock module around the attention modules, which prepares what they share.
        attention: the stock attention module.
        classes: stock class to ours.
        effect: what is gained, from the measurements of `scripts/benchmarks/bench_live.py`.
        unsupported: reasons to leave a container as it is, besides those common to all.
    """

    name: str
    container: type[nn.Module]
    attention: type[nn.Module]
    classes: dict[type[nn.Module], type[nn.Module]]
    effect: str
    unsupported: Callable[[nn.Module], list[str]] = _nothing

    def why_not(self, container: nn.Module) -> str | None:
        """Why a container of this family stays as it is; None for one that can be changed."""
        ours = tuple(self.classes.values())
        if any(type(module) in ours for module in container.modules()):
            return ALREADY
        if type(container) is not self.container:
            return f"{type(container).__name__} is a subclass of {self.container.__name__} with code of its own"
        found = [module for module in container.modules() if isinstance(module, self.attention)]
        if not found:
            return f"it has no {self.attention.__name__}"
        for module in found:
            if type(module) is not self.attention:
                return f"{type(module).__name__} is a subclass of {self.attention.__name__} with code of its own"
        if any("forward" in vars(module) for module in (container, *found)):
            return "other code has replaced the forward method of its modules"
        reasons = self.unsupported(container)
        return "; ".join(reasons) or None


FAMILIES = [
    Family(
        name="DeBERTa v2, v3",
        container=DebertaV2Encoder,
        attention=DisentangledSelfAttention,
        classes={
            DebertaV2Encoder: deberta.AcceleratedDebertaV2Encoder,
            DisentangledSelfAttention: deberta.AcceleratedDisentangledSelfAttention,
        },
        effect="faster, in training at about 512 tokens only as fast; attention in memory linear in the length",
    ),
    Family(
        name="DeBERTa v1",
        container=DebertaEncoder,
        attention=DebertaSelfAttention,
        classes={
            DebertaEncoder: deberta.AcceleratedDebertaEncoder,
            DebertaSelfAttention: deberta.AcceleratedDebertaSelfAttention,
        },
        effect=LONG_INPUTS,
        unsupported=deberta.talking_heads,
    ),
    Family(
        name="MPNet",
        container=MPNetEncoder,
        attention=MPNetSelfAttention,
        classes={
            MPNetEncoder: mpnet.AcceleratedMPNetEncoder,
            MPNetSelfAttention: mpnet.AcceleratedMPNetSelfAttention,
        },
        effect=LONG_INPUTS,
    ),
    Family(
        name="RoFormer",
        container=RoFormerEncoder,
        attention=RoFormerSelfAttention,
        classes={RoFormerSelfAttention: roformer.AcceleratedRoFormerSelfAttention},
        effect=LONG_INPUTS,
        unsupported=roformer.decoder,
    ),
    Family(
        name="T5 encoder",
        container=T5Stack,
        attention=T5Attention,
        classes={T5Attention: t5.AcceleratedT5Attention},
        effect=LONG_INPUTS,
        unsupported=t5.decoder,
    ),
    Family(
        name="mT5 encoder",
        container=MT5Stack,
        attention=MT5Attention,
        classes={MT5Attention: t5.AcceleratedMT5Attention},
        effect=LONG_INPUTS,
        unsupported=t5.decoder,
    ),
    Family(
        name="XLNet",
        container=XLNetModel,
        attention=XLNetRelativeAttention,
        classes={XLNetRelativeAttention: xlnet.AcceleratedXLNetRelativeAttention},
        effect="faster from 512 tokens, as fast below; memory of a few L × L matrices less",
        unsupported=xlnet.other_uses,
    ),
]
