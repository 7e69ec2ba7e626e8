"""Whose code the parts of an encoder are, in every call anew.

Between its first and its last layer an encoder's states may have no padding, and its positions may be by offset. Code
of others expects neither: hooks, a `forward` that was replaced on an instance or a class, a module that was put in,
attention functions that were registered. All of it may come after `optimize`, and go again. So it is looked for in
each call, and where it is found the call is stock's.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..families.registry import LIVE
from ..host.torch import hooks_of_all_modules
from ..host.transformers import ALL_ATTENTION_FUNCTIONS


OURS = __name__.partition(".")[0]
# Packages whose functions may be in a class: what they were when the class was defined.
PACKAGES = (OURS, "apex", "bitsandbytes", "peft", "torch", "torchao", "transformers")
# Modules whose hooks may see states without padding: those that collect outputs where a caller asks, those that make
# embeddings require gradients, for gradient checkpointing, and ours.
UNAWARE = (
    f"{__package__}.accelerate",
    "transformers.utils.output_capturing",
    "transformers.modeling_utils",
    "peft.peft_model",
)
# Classes that treat each token by itself, by file and name; without names all of a file or package but NEIGHBOURS.
BY_TOKEN: dict[str, tuple[str, ...]] = {
    OURS: (),
    "apex.normalization": (),
    "bitsandbytes": (),
    "peft": (),
    "torch.ao.nn.quantized": ("Linear", "LinearPackedParams"),
    "torch.nn.modules.activation": (),
    "torch.nn.modules.container": (),
    "torch.nn.modules.dropout": ("AlphaDropout", "Dropout"),
    "torch.nn.modules.linear": ("Identity", "Linear", "NonDynamicallyQuantizableLinear"),
    "torch.nn.modules.normalization": ("LayerNorm", "RMSNorm"),
    "torch.nn.modules.sparse": ("Embedding",),
    "torchao": (),
    "transformers.activations": (),
    "transformers.pytorch_utils": ("Conv1D",),
}
NEIGHBOURS = ("GLU", "LogSoftmax", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin")
# How much is known of a class: nothing; that its code is PyTorch's or Transformers'; that it treats tokens one by one.
STRANGE, KNOWN, ONE_BY_ONE = range(3)
# Attributes of an instance that stand for methods of its class; and those that may hold functions of others.
REPLACED = ("_call_impl", "_compiled_call_impl")
FUNCTIONS = frozenset(("act", "activation", "activation_function", "intermediate_act_fn"))


@dataclass(frozen=True)
class Kind:
    """What is known of a class, while nobody changes it.

    Attributes:
        level: STRANGE, KNOWN or ONE_BY_ONE.
        stock: the file of Transformers that it is of, whose encoders may have it; empty for any encoder.
        methods: names that no instance may have as attributes of its own.
        contents: the attributes of the class and its bases, and their values when this was found out.
    """

    level: int
    stock: str
    methods: frozenset[str]
    contents: tuple[tuple[Mapping[str, Any], tuple[Any, ...]], ...]

    @classmethod
    def of(cls, kind: type) -> "Kind":
        """Look at a class and its bases below `nn.Module`, or `PreTrainedModel`."""
        own = []
        for base in kind.__mro__:
            if base in (nn.Module, PreTrainedModel):
                break
            own.append(vars(base))
        level = _level(kind)
        methods = {"forward"}
        for name, value in chain.from_iterable(each.items() for each in own):
            if callable(value) and not isinstance(value, type):
                methods.add(name)
            if name != "__init__" and not is_known_code(value):
                level = STRANGE
        stock = kind.__module__ if kind.__module__.startswith("transformers.models.") else ""
        return cls(level, stock, frozenset((*methods, *REPLACED)), tuple((each, tuple(each.values())) for each in own))

    def is_current(self) -> bool:
        """Whether the class still has these very contents."""
        return all(
            len(found) == len(values) and all(map(is_, found.values(), values)) for found, values in self.contents
        )


_kinds: dict[type, Kind] = {}


def _kind_of(kind: type) -> Kind:
    found = _kinds.get(kind)
    if found is None or not found.is_current():
        found = _kinds[kind] = Kind.of(kind)
    return found


def _level(kind: type) -> int:
    file, name = kind.__module__, kind.__name__
    if any((family.stock, family.attention) == (file, name) for family in LIVE):
        return STRANGE  # put in later: ours is a subclass
    if file.startswith("transformers.models."):
        return ONE_BY_ONE
    for place, names in BY_TOKEN.items():
        if f"{file}.".startswith(f"{place}.") and (name in names if names else name not in NEIGHBOURS):
            return ONE_BY_ONE
    return KNOWN if file.startswith(("torch.nn.", "torch.ao.")) else STRANGE


def is_known_code(value: Any) -> bool:
    """Whether what a class has by some name is no function, or one of `PACKAGES`, below all decorators."""
    function = getattr(value, "__func__", getattr(value, "fget", value))  # of a static or class method, or a property
    if not callable(function) or isinstance(function, type):
        return True
    if isinstance(function, BuiltinFunctionType):
        return True
    while isinstance(function, FunctionType):
        # `__module__` is what decorators copy
        package, *inner = function.__globals__.get("__name__", "").split(".")
        if package not in PACKAGES or inner[:1] == ["_dynamo"]:
            return False
        function = getattr(function, "__wrapped__", None)
    return function is None


def _is_watched(part: nn.Module) -> bool:
    """Whether hooks read its states; those of Transformers read only where a caller asks for them."""
    if part._backward_hooks or part._backward_pre_hooks:
        return True
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    return any(getattr(hook, "__globals__", {}).get("__name__") not in UNAWARE for hook in hooks)


def _inside(root: nn.Module) -> Iterator[nn.Module]:
    """A module and all of its parts."""
    parts = [root]
    while parts:
        part = parts.pop()
        yield part
        parts += [each for each in part._modules.values() if each is not None]


def strange_part(module: nn.Module, least: int = ONE_BY_ONE) -> nn.Module | None:
    """The first part of a module with code of others, or of which less is known than that; None if there is none."""
    kinds: dict[type, Kind] = {}
    stock = next(each.__module__ for each in type(module).__mro__ if each.__module__.partition(".")[0] != OURS)
    if hooks_of_all_modules() or not _attends_as_known(stock):
        return module
    for part in _inside(module):
        kind = kinds.get(type(part))
        if kind is None:
            kind = kinds[type(part)] = _kind_of(type(part))
            if kind.level < least or kind.stock not in ("", stock):
                return part
        own = vars(part)
        if not own.keys().isdisjoint(kind.methods):
            return part
        if not own.keys().isdisjoint(FUNCTIONS) and any(not is_known_code(own.get(name)) for name in FUNCTIONS):
            return part
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            if _is_watched(part):
                return part
    return None


def _attends_as_known(stock: str) -> bool:
    """Whether the attention functions of a file of Transformers are those that it came with."""
    names = vars(sys.modules[stock])
    functions = names.get("ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    if functions is not ALL_ATTENTION_FUNCTIONS:
        return False
    found = (names.get("eager_attention_forward"), functions.get("eager"), functions.get("sdpa"))
    return all(is_known_code(each) for each in found)


def is_known(kind: type) -> bool:
    """Whether a class, and its bases, have the code that they were defined with."""
    return _kind_of(kind).level > STRANGE


def is_own(module: nn.Module) -> bool:
    """Whether an encoder or its attention has no code of others, so that ours gives what stock's would."""
    return strange_part(module, KNOWN) is None
