"""Detect third-party code in an encoder, on every call: hooks, replaced forwards, swapped modules.

Between its first and its last layer an encoder's states may have no padding, and its positions may be by offset. Code
of others expects neither, and it may come and go after `optimize`.
"""

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import ScriptMethod, nn
from transformers import PreTrainedModel

from ..host.torch import hooks_of_all_modules
from ..host.transformers import ALL_ATTENTION_FUNCTIONS
from .substitute import OURS, stock_class, stock_file


# Packages whose functions may be in a class.
PACKAGES = (OURS, "apex", "bitsandbytes", "peft", "torch", "torchao", "transformers")
# Modules whose hooks may see states without padding: those that collect outputs where a caller asks, and those that
# make embeddings require gradients, for gradient checkpointing.
UNAWARE = ("transformers.utils.output_capturing", "transformers.modeling_utils", "peft.peft_model")
# Classes that treat each token by itself, and so may be put in later, by file and name; without names all of a file.
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
# Attributes of an instance that stand for methods of its class; and those that may hold functions of others.
REPLACED = frozenset(("forward", "_call_impl", "_compiled_call_impl"))
FUNCTIONS = frozenset(("act", "activation", "activation_function", "intermediate_act_fn"))

CAPTURE = "_hf_relpos_capture"  # the attribute that holds an encoder's `Capture`
CONTENTS = "_hf_relpos_contents"  # the attribute that holds an encoder's `Contents`
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HELD = ("_modules", "_parameters", "_buffers", *HOOKS)  # dicts of a module whose values count

# Classes that were looked at, with the forward that they had then and whether all of their code is of `PACKAGES`.
_classes: dict[type, tuple[Any, bool]] = {}


def is_known_code(value: Any) -> bool:
    """True unless `value` is a function defined outside `PACKAGES` (decorators unwrapped)."""
    function = getattr(value, "__func__", getattr(value, "fget", value))  # of a static or class method, or a property
    while isinstance(function, functools.partial):
        function = function.func
    if not callable(function) or isinstance(function, type | BuiltinFunctionType):
        return True
    while isinstance(function, FunctionType):
        # `__module__` is what decorators copy
        package, *inner = function.__globals__.get("__name__", "").split(".")
        if package not in PACKAGES or inner[:1] == ["_dynamo"]:
            return False
        function = getattr(function, "__wrapped__", None)
    return function is None


def is_known_class(kind: Any) -> bool:
    """Whether a class is defined in `PACKAGES`, with the forward that it had when first seen.

    The class of a scripted module has no forward: its code counts as that of others.
    """
    found, forward = _classes.get(kind), getattr(kind, "forward", None)
    if found is None:
        bases = itertools.takewhile(lambda base: base not in (nn.Module, PreTrainedModel), kind.__mro__)
        contents = (item for base in bases for item in vars(base).items())
        is_known = all(name == "__init__" or is_known_code(value) for name, value in contents)
        found = _classes[kind] = (forward, is_known and forward is not None)
    return found[1] and forward is found[0]


def is_by_token(kind: type) -> bool:
    """Whether a class is known to treat each token by itself."""
    file, name = kind.__module__, kind.__name__
    for place, names in BY_TOKEN.items():
        if f"{file}.".startswith(f"{place}.") and (name in names if names else name not in NEIGHBOURS):
            return True
    return False


def modules_in(root: nn.Module) -> Iterator[nn.Module]:
    """A module and all of its parts, faster than `root.modules()`."""
    parts = [root]
    while parts:
        part = parts.pop()
        yield part
        parts += [each for each in part._modules.values() if each is not None]


def kinds_in(root: nn.Module) -> tuple[frozenset[type], frozenset[Any]]:
    """Return the classes of Transformers and PyTorch inside a module, and third-party classes and code."""
    known: set[type] = set()
    foreign: set[Any] = set()
    for part in modules_in(root):
        kind = stock_class(type(part))
        is_packaged = kind.__module__.partition(".")[0] in PACKAGES and is_known_class(kind)
        (known if is_packaged else foreign).add(kind)
        foreign.update(_replacements(part))
    return frozenset(known), frozenset((*foreign, *_attention_of_others(root)))


def _attention_of_others(root: Any) -> list[Any]:
    """Return the code of an encoder's attention function if a third party registered it, else nothing."""
    name = getattr(getattr(root, "config", None), "_attn_implementation", None)
    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return [] if is_known_code(function) else [_code_of(function)]


def _replacements(part: nn.Module) -> list[Any]:
    """Return the code of third-party functions that replace methods of an instance."""
    own = vars(part)
    if REPLACED.isdisjoint(own) and FUNCTIONS.isdisjoint(own):
        return []
    # scripts get their own method at their first call
    functions = [own[name] for name in REPLACED & own.keys() if not isinstance(own[name], ScriptMethod | None)]
    functions += [own[name] for name in FUNCTIONS & own.keys() if not is_known_code(own[name])]
    return [_code_of(each) for each in functions]


def _code_of(function: Any) -> Any:
    """Return the code that copies of a function share."""
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", type(function))


def is_watched(part: nn.Module) -> bool:
    """Whether hooks read the states of a module; Transformers' own hooks count only if a caller asks for outputs."""
    if part._backward_hooks or part._backward_pre_hooks:
        return True
    if not (part._forward_hooks or part._forward_pre_hooks):
        return False
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    return any(getattr(hook, "__globals__", {}).get("__name__") not in UNAWARE for hook in hooks)


def configs_of(parts: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """The fields of the configurations of modules."""
    found = (vars(part).get("config") for part in parts)
    return [*{id(each): vars(each) for each in found if hasattr(each, "__dict__")}.values()]


class Contents:
    """What an encoder and its parts held when nothing in them was foreign. Copies and pickles begin with none.

    Attributes:
        values: of all attributes, modules, parameters, buffers, hooks and configurations.
    """

    values: list[Any] | None = None

    def __reduce__(self) -> Any:
        return Contents, ()

    def without_record(self) -> "Contents":
        """For copies to measure on."""
        return Contents()

    def take(self, root: nn.Module, trusted: frozenset[Any]) -> None:
        """Note what a module holds now, in which all is trusted."""
        parts, held = [*modules_in(root)], []
        for own in map(vars, parts):
            held += [own, *(own[name] for name in HELD)]
        held += configs_of(parts)
        kinds = {stock_class(type(each)) for each in parts}
        forwards = [(kind, getattr(kind, "forward", None)) for kind in kinds]
        values = [*itertools.chain.from_iterable(map(dict.values, held))]
        self._state = trusted, parts, [*map(type, parts)], forwards, held, values
        self.values = values

    def hold(self, trusted: frozenset[Any]) -> bool:
        """Whether a module is as it was, by the identity of each value."""
        if self.values is None or self._state[0] is not trusted:
            return False
        _, parts, types, forwards, held, values = self._state
        return (
            sum(map(len, held)) == len(values)
            and all(map(operator.is_, map(type, parts), types))
            and all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, held)), values))
            and all(getattr(kind, "forward", None) is forward for kind, forward in forwards)
        )


def foreign_part(root: nn.Module, trusted: frozenset[Any]) -> nn.Module | None:
    """Return the first part of a module with hooks or unknown code; None if there is none.

    Hooks of the module itself do not count: they see its inputs and outputs alone.

    Args:
        trusted: classes, and code of replaced forwards, that were there when the module was checked.
    """
    if hooks_of_all_modules() or not trusted.issuperset(_attention_of_others(root)):
        return root
    contents = vars(root).get(CONTENTS)
    if contents is not None and contents.hold(trusted):
        return None
    kinds: set[Any] = set()
    for part in modules_in(root):
        kind: Any = stock_class(type(part))
        if kind not in kinds:
            is_trusted = kind in trusted or (is_by_token(kind) and is_known_class(kind))
            if not is_trusted or (kind in _classes and getattr(kind, "forward", None) is not _classes[kind][0]):
                return part
            kinds.add(kind)
        if not trusted.issuperset(_replacements(part)) or (part is not root and is_watched(part)):
            return part
    if contents is not None:
        contents.take(root, trusted)
    return None


def is_stock(module: nn.Module) -> bool:
    """Whether a module still computes what its class defined, so that our code may replace it."""
    known, foreign = kinds_in(module)
    is_own = not foreign and foreign_part(module, known) is None
    return is_own and not is_watched(module) and has_stock_attention(module)


def has_stock_attention(module: nn.Module) -> bool:
    """Whether a model uses Transformers' own attention functions."""
    file = stock_file(module)
    functions: Any = getattr(file, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)
    found = (getattr(file, "eager_attention_forward", None), functions.get("eager"), functions.get("sdpa"))
    return functions is ALL_ATTENTION_FUNCTIONS and all(is_known_code(each) for each in found)
