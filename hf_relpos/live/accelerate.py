"""Accelerate the self-attention of a live stock model with our backends, in place, and undo it.

The class of a module instance is replaced by a subclass of the stock class. Parameters, names and hooks are unchanged,
`isinstance` holds, and copies, pickles and replicas of the model are accelerated, too.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..attention.cpu_gemm import FastLinear
from ..attention.tracing import is_traced
from ..families.registry import LIVE
from ..host.transformers import CACHE_NAMES, KEYWORDS, check_keywords
from ..models.modeling_relpos_bert import RelPosBertEncoder
from .parts import OURS, strange_part
from .unpadding import IMPLEMENTATIONS, SPANS


TAKEN_OUT = "padding is taken out"
# The key of the hook that rejects unknown keywords, which `**kwargs` of Transformers swallows. It is no number, since
# those of a loaded pickle would be given to other hooks again.
HOOK = "hf_relpos"
STOCK = ("transformers.models.", f"{__package__}.")


@dataclass(frozen=True)
class Accelerated:
    """An encoder that now computes attention with our backends.

    Attributes:
        name: name of the module in the model, "" for the model itself.
        family: name of the family, such as "DeBERTa v2, v3".
        layers: number of attention modules.
        effect: what is faster or smaller, and what is not.
    """

    name: str
    family: str
    layers: int
    effect: str


@dataclass(frozen=True)
class Skipped:
    """An encoder that was skipped.

    Attributes:
        name: name of the module in the model.
        kind: name of its class.
        reason: why it was skipped.
    """

    name: str
    kind: str
    reason: str


def substitute(root: nn.Module, unpad: bool) -> tuple[list[Accelerated], list[Skipped], list[nn.Module]]:
    """Give the modules of stock encoders our classes.

    Args:
        unpad: whether encoders are to take padding out, too.

    Returns:
        What was changed, what was left, and all modules that have another class now.
    """
    accelerated, left, changed, taken = [], [], [], []
    families = [family for family in LIVE if family.is_imported and (family.classes or unpad)]
    containers = [(family, family.stock_class(family.container)) for family in families]
    for name, module in root.named_modules():
        family = next((family for family, container in containers if isinstance(module, container)), None)
        if family is None or isinstance(module, RelPosBertEncoder):
            continue
        reason = family.unsupported_reason(module)
        if reason is not None:
            left.append(Skipped(name, type(module).__name__, reason))
            continue
        replacements, padding = family.replacements(unpad), ""
        if unpad and family.unpadding:
            conditions = (vars(ours).get("takes_out") for ours in replacements.values())  # by what a head reads, too
            padding = next(filter(None, conditions), TAKEN_OUT)
            if padding == TAKEN_OUT and (reader := reader_of_padding(root)):
                padding = f"padding stays, as {reader} may read it"
                replacements = family.replacements()
                if not replacements:
                    left.append(Skipped(name, type(module).__name__, padding))
                    continue
        layers = sum(isinstance(part, family.stock_class(family.attention)) for part in module.modules())
        for part in module.modules():
            if type(part) in replacements:
                part.__class__ = replacements[type(part)]
                changed.append(part)
        if watch := getattr(module, "watch", None):
            around = [each for each in root.modules() if any(part is module for part in each.children())]
            changed += [each for each in around if watch(each)]
        if padding.startswith(TAKEN_OUT) and (strange := strange_part(module)) is not None:
            padding = f"padding stays, as {type(strange).__name__} has code of others or reads several tokens"
        taken.append(module)
        effects = [family.effect, padding]
        accelerated.append(Accelerated(name, family.name, layers, "; ".join(filter(None, effects))))
    return accelerated, left, [*changed, *watch_keywords(root, taken)]


def reader_of_padding(root: nn.Module) -> str | None:
    """The class of a head inside that reads other states of a row than the first, which may be padding; None if none.

    Those are summaries, of which each architecture has a copy, RoFormer one without a field in its configuration; and
    heads for spans, whose softmax and loss are over all states of a row.
    """
    for module in root.modules():
        name = type(module).__name__
        is_summary = name.endswith("SequenceSummary") and getattr(module, "summary_type", None) != "first"
        if is_summary or SPANS in name:
            return name
    return None


def restore_attention(model: nn.Module) -> None:
    """Undo `optimize` everywhere in a model, also in a copy or after loading a pickle.

    Args:
        model: any module.
    """
    for module in model.modules():
        restore(module)


def restore(module: nn.Module) -> None:
    """Give a module the class that it had: the first of its bases that is not of this package."""
    for name in ("unpads", "_rounded", "reads"):  # of this package's own models, layers in low precision, XLNet
        vars(module).pop(name, None)
    module._forward_pre_hooks.pop(HOOK, None)  # type: ignore[call-overload]
    module._forward_pre_hooks_with_kwargs.pop(HOOK, None)  # type: ignore[call-overload]
    kind = type(module)
    if kind.__module__.startswith(f"{__package__}.") or kind is FastLinear:
        bases = (base for base in kind.__mro__ if issubclass(base, nn.Module))
        module.__class__ = next(base for base in bases if base.__module__.partition(".")[0] != OURS)


def watch_keywords(root: nn.Module, containers: list[nn.Module]) -> list[nn.Module]:
    """Let the stock models around these encoders reject unknown keywords; returns those that did not yet."""
    models = [
        module
        for module in root.modules()
        if isinstance(module, PreTrainedModel)
        and type(module).__module__.startswith(STOCK)
        and HOOK not in module._forward_pre_hooks
        and any(part in containers for part in module.modules())
    ]
    for model in models:
        model._forward_pre_hooks[HOOK] = reject_unknown_keywords
        model._forward_pre_hooks_with_kwargs[HOOK] = True
    return models


def reject_unknown_keywords(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before the forward of a stock model.

    Attention functions of others may take keywords of their own, and so may a forward that others put in the place of
    stock's.

    Raises:
        TypeError: for the first unknown keyword; names the nearest known one.
    """
    kind: Any = type(model)
    if is_traced() or kwargs.keys() <= _known(kind):
        return
    if "forward" in vars(model) or model.config._attn_implementation not in IMPLEMENTATIONS:
        return
    inner: list[Any] = [type(part) for part in model.modules() if isinstance(part, PreTrainedModel)]
    check_keywords(model, kwargs, frozenset().union(*map(_known, inner)))


@functools.cache
def _known(kind: Any) -> frozenset[str]:
    """Names that a class and its bases know; ours may take what their stock ones do without naming it."""
    forwards = [vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base) and base is not nn.Module]
    return frozenset((*KEYWORDS, *CACHE_NAMES)).union(*(inspect.signature(each).parameters for each in forwards))
