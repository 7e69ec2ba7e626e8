"""Keywords that a stock model does not know are errors in a live model: `**kwargs` of Transformers swallows them."""

import functools
import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..attention.tracing import is_traced
from ..host.transformers import CACHE_NAMES, KEYWORDS, check_keywords
from .unpadding import IMPLEMENTATIONS


# The key of the hook. It is no number, since those of a loaded pickle would be given to other hooks again.
HOOK = "hf_relpos"
STOCK = ("transformers.models.", f"{__package__}.")


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


def forget_keywords(module: nn.Module) -> None:
    """Remove the hook from a module, if it is there."""
    module._forward_pre_hooks.pop(HOOK, None)  # type: ignore[call-overload]
    module._forward_pre_hooks_with_kwargs.pop(HOOK, None)  # type: ignore[call-overload]


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
