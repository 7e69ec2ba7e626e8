"""Accelerate the self-attention of a live stock model with our backends, in place, and undo it.

The class of a module instance is replaced by a subclass of the stock class. Parameters, names and hooks are unchanged,
`isinstance` holds, and copies, pickles and replicas of the model are accelerated, too.
"""

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..attention.cpu_gemm import FastLinear
from ..attention.tracing import is_traced
from ..families.family import ALREADY_ACCELERATED, module_of
from ..families.registry import LIVE
from ..host.transformers import CACHE_NAMES, KEYWORDS, check_keywords
from ..models.modeling_relpos_bert import RelPosBertEncoder
from .parts import OURS, strange_part
from .unpadding import IMPLEMENTATIONS, SPANS


logger = logging.get_logger(__name__)
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


class Handle:
    """Undoes what was done to `_modules`; also a context manager."""

    _modules: list[nn.Module]

    def undo(self) -> None:
        """Give the modules that this call changed what they had. A second call does nothing."""
        while self._modules:
            restore(self._modules.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


@dataclass
class AcceleratedAttention(Handle):
    """Report of `accelerate_attention` and handle to undo it; also a context manager. It can be printed.

    Attributes:
        accelerated: encoders that were changed.
        left: encoders of these families that were skipped, with the reason.
    """

    accelerated: tuple[Accelerated, ...]
    left: tuple[Skipped, ...]
    _modules: list[nn.Module] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        if self.accelerated and not self._modules:
            return "undone: the attention is stock's again"
        lines = [
            f"accelerated {each.name or 'the model'}: {each.family}, {each.layers} layers; {each.effect}"
            for each in self.accelerated
        ]
        lines += [f"left {each.name or 'the model'} ({each.kind}): {each.reason}" for each in self.left]
        return (
            "\n".join(lines)
            or f"no attention of {', '.join(family.name for family in LIVE if family.classes)} was found"
        )


def accelerate_attention(model: Any) -> AcceleratedAttention:
    """Compute the relative self-attention of a loaded stock model with the backends of this package.

    It changes the encoders of stock DeBERTa v1, v2 and v3, MPNet, RoFormer, XLNet, T5 and mT5 anywhere in `model`, in
    place. Parameters, their names, the state dict and saved files do not change. Training, gradient checkpointing,
    autocast, adapters and quantised projections work as before. `output_attentions` uses the eager backend. The
    outputs are those of stock up to rounding, also at padding.

    Active dropout draws other random numbers. In DeBERTa, queries at padding have no dropout of attention weights, and
    XLNet drops the same position features in all rows of a batch.

    Copies, pickles and replicas of the model are accelerated, too; loading such a pickle requires this package. The
    stock code computes calls that these classes do not support, such as explicit relative positions. Except in DeBERTa
    it also computes short inputs on the CPU, and graphs, where it is as fast (docs/live.md).

    Args:
        model: a PreTrainedModel, a CrossEncoder or SentenceTransformer, a GLiNER, another module that contains one of
            these encoders, or a pipeline with such a `model`.

    Returns:
        The report of changed and skipped encoders, which is also the handle to undo it.

    Raises:
        TypeError: if `model` neither is a module nor has one as its `model`.

    Example:

    ```python
    >>> from sentence_transformers import CrossEncoder
    >>> from hf_relpos import accelerate_attention

    >>> reranker = CrossEncoder("mixedbread-ai/mxbai-rerank-base-v1")
    >>> handle = accelerate_attention(reranker)
    >>> print(handle)
    >>> handle.undo()
    ```
    """
    accelerated, left, changed = substitute(module_of(model, "accelerate_attention"), unpad=False)
    handle = AcceleratedAttention(tuple(accelerated), tuple(left), changed)
    if not accelerated and all(each.reason != ALREADY_ACCELERATED for each in left):
        logger.warning(f"accelerate_attention changed nothing: {handle}")
    return handle


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
    """Undo `accelerate_attention` and `optimize` everywhere in a model, also in a copy or after loading a pickle.

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
