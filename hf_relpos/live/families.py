"""The families of stock models that can be accelerated: which classes become which, and what is left alone."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers.models.deberta.modeling_deberta import DebertaEncoder
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as DebertaSelfAttention
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder, DisentangledSelfAttention

from . import deberta


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
        effect: what is gained, from the measurements of `scripts/bench_live.py`.
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
            return "it is accelerated already"
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
        effect="faster, and memory linear in the length",
    ),
    Family(
        name="DeBERTa v1",
        container=DebertaEncoder,
        attention=DebertaSelfAttention,
        classes={
            DebertaEncoder: deberta.AcceleratedDebertaEncoder,
            DebertaSelfAttention: deberta.AcceleratedDebertaSelfAttention,
        },
        effect="faster, and memory linear in the length",
        unsupported=deberta.talking_heads,
    ),
]
