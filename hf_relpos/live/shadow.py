"""Copies of models to measure on, which other threads and the model itself see nothing of."""

import copy
import itertools
from collections import deque
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .foreign import is_watched


# Fields of a configuration that ask for keys and values, or XLNet's memory.
MEMORY_FIELDS = ("use_cache", "use_mems_eval", "use_mems_train")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def shadow(root: nn.Module, has_memory: bool = True) -> Any:
    """A copy of a module in evaluation that shares its parameters, with other tensors and configurations of its own.

    Args:
        has_memory: whether its models may return keys and values, or XLNet's memory; calls that do keep their padding.
    """
    modules: dict[int, nn.Module] = {}
    configs: dict[int, Any] = {}
    copies: dict[int, Any] = {}

    def own_of(value: Any) -> Any:
        """What a forward may write to: tensors that are no parameters, and containers, with what is in them."""
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            return copies.setdefault(id(value), value.clone())
        if not isinstance(value, dict | list | set | deque) or id(value) in copies:
            return copies.get(id(value), value)
        made: Any = copy.copy(value)
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
        own |= {name: own_of(value) for name, value in vars(module).items()}
        own["_modules"] = {
            name: each if each is None else copied(each) for name, each in list(module._modules.items())
        }
        if is_watched(module):  # hooks of others are not called
            own |= {name: type(own[name])() for name in HOOKS}
        own["training"] = False
        if "config" in own and not isinstance(own["config"], ModuleType):
            own["config"] = configs.setdefault(id(own["config"]), copy.copy(own["config"]))
        return made

    made = copied(root)
    for config, field in itertools.product(() if has_memory else configs.values(), MEMORY_FIELDS):
        if hasattr(config, "_attn_implementation") and hasattr(config, field):
            setattr(config, field, False)
    return made
