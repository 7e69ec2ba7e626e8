"""Weight-sharing copies of models to measure on, without effects on the model or other threads."""

import copy
import itertools
from collections import deque
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .foreign import HOOKS, is_watched, modules_in


# Fields of a configuration that ask for keys and values, or XLNet's memory.
MEMORY_FIELDS = ("use_cache", "use_mems_eval", "use_mems_train")
# Kinds of values that a forward may write to; parameters are not copied.
WRITABLE = (torch.Tensor, dict, list, set, deque)


def shadow(root: nn.Module, has_memory: bool = True) -> Any:
    """Return a copy of a module in evaluation mode that shares its parameters and nothing else.

    Args:
        has_memory: whether its models may return keys and values, or XLNet's memory; calls that do keep their padding.
    """
    modules: dict[int, nn.Module] = {}
    configs: dict[int, Any] = {}
    copies: dict[int, Any] = {}
    files = {type(module).__module__ for module in modules_in(root)} - {"torch._dynamo.eval_frame"}

    def own_of(value: Any) -> Any:
        """Copy what a forward may write to: tensors other than parameters, and containers, recursively.

        Also of modules that are no submodules, their methods, and plain objects of classes from the models' files.
        """
        if isinstance(value, nn.Module):
            return copied(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, copied(value.__self__))
        kind = type(value)
        if kind.__module__ in files and kind.__new__ is object.__new__ and hasattr(value, "__dict__"):
            if id(value) not in copies:
                copies[id(value)] = plain = object.__new__(kind)
                vars(plain).update({name: own_of(each) for name, each in vars(value).items()})
            return copies[id(value)]
        if not isinstance(value, WRITABLE) or id(value) in copies:
            return copies.get(id(value), value)
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, nn.Parameter) else copies.setdefault(id(value), value.clone())
        made: Any = value.copy()  # faster than `copy.copy`, for the many empty dicts of a module
        if type(made) is not type(value):
            made = copy.copy(value)
        copies[id(value)] = made
        if isinstance(value, dict | list):
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (mine := own_of(each)) is not each:
                    made[key] = mine
        return made

    def copied(module: nn.Module) -> nn.Module:
        found = modules.get(id(module))
        if found is not None:
            return found
        made = modules[id(module)] = object.__new__(type(module))
        own = vars(made)
        own |= {name: own_of(value) for name, value in vars(module).items() if name != "_modules"}
        own["_modules"] = {
            name: each if each is None else copied(each) for name, each in list(module._modules.items())
        }
        if is_watched(module):  # hooks of others are not called
            own |= {name: type(own[name])() for name in HOOKS}
        own["training"] = False
        own |= {name: value.without_record() for name, value in own.items() if hasattr(value, "without_record")}
        config = own.get("config")
        if config is not None and not isinstance(config, ModuleType):
            if id(config) not in configs:
                configs[id(config)] = copy.copy(config)
            own["config"] = configs[id(config)]
        return made

    made = copied(root)
    for config, field in itertools.product(() if has_memory else configs.values(), MEMORY_FIELDS):
        if hasattr(config, "_attn_implementation") and hasattr(config, field):
            setattr(config, field, False)
    return made


def first_layers(root: nn.Module) -> Any:
    """Return such a copy with the first layers of each stack only: one of each kind, at least two."""
    made = shadow(root, has_memory=False)
    for part in list(modules_in(made)):
        if isinstance(part, nn.ModuleList):
            kinds = [_kind_of(layer) for layer in part]
            last = max(map(kinds.index, kinds), default=0)
            part._modules = dict(list(part._modules.items())[: max(last + 1, 2)])
    return made


def _kind_of(layer: nn.Module) -> frozenset[Any]:
    """Classes, switches and names in a layer, but for numbers, with which layers are counted."""
    fields = [(name, type(part), vars(part).items()) for name, part in layer.named_modules()]
    return frozenset(
        (*each, field, value) for *each, own in fields for field, value in own if isinstance(value, str | bool)
    )
