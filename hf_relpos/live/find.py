"""Find modules inside objects of other libraries, and encoders inside modules."""

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .arguments import TOKENS, parameters_of


DEPTH = 3  # attributes of attributes of attributes
MOST_ITEMS = 1000  # of a list or dict that are looked at
# Where models, pipelines and libraries around them have a tokenizer, or a processor with one; the last is GLiNER's.
TOKENIZERS = ("tokenizer", "processing_class", "_tokenizer", "processor", "data_processor.transformer_tokenizer")
ATOMS = (str, bytes, int, float, bool, type, FunctionType, MethodType, ModuleType, torch.Tensor, type(None))


@dataclass(frozen=True)
class Found:
    """A module, where it was found, and the object that holds it.

    Attributes:
        path: its place in the object that was given, "" for that object itself.
        module: the module.
        owner: the object that holds it, which may have a tokenizer.
    """

    path: str
    module: nn.Module
    owner: Any


def modules_of(anything: Any, caller: str) -> list[Found]:
    """Return the modules in an object: itself, or in its attributes and items to a depth of three.

    Raises:
        TypeError: if there is none.
    """
    if isinstance(anything, nn.Module):
        return [Found("", anything, anything)]
    found: list[Found] = []
    seen = {id(anything)}
    level = [("", anything)]
    for _ in range(DEPTH):
        inner = []
        for path, holder in level:
            for name, value in _contents(holder):
                if isinstance(value, ATOMS) or id(value) in seen:
                    continue
                seen.add(id(value))
                place = f"{path}.{name}" if path else name
                if isinstance(value, nn.Module):
                    found.append(Found(place, value, holder))
                else:
                    inner.append((place, value))
        level = inner
    inside = {id(part) for each in found for part in each.module.modules() if part is not each.module}
    found = [each for each in found if id(each.module) not in inside]
    if not found:
        raise TypeError(
            f"{caller} takes a torch.nn.Module, or an object that holds one; a {type(anything).__name__} has none in "
            f"its attributes to a depth of {DEPTH}. Give the model inside it"
        )
    return found


def _contents(holder: Any) -> Iterator[tuple[str, Any]]:
    """Attributes, or items, of an object by name; properties are not called."""
    if isinstance(holder, Mapping):
        yield from ((str(key), value) for key, value in list(holder.items())[:MOST_ITEMS])
    elif isinstance(holder, list | tuple | set | frozenset):
        yield from ((str(index), value) for index, value in enumerate(list(holder)[:MOST_ITEMS]))
    else:
        yield from list(getattr(holder, "__dict__", {}).items())
        if hasattr(type(holder), "__pydantic_private__"):
            yield from list((holder.__pydantic_private__ or {}).items())
        for kind in type(holder).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__") and hasattr(holder, name):
                    yield name, getattr(holder, name)


def encoders_in(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the innermost modules that map tokens and a mask to hidden states, by name.

    Decoders that attend to an encoder are not among them.
    """
    found = {module: name for name, module in root.named_modules() if takes_tokens(module, module is root)}
    for module, name in found.items():
        if found.keys().isdisjoint(list(module.modules())[1:]):
            yield name, module


def layers_in(root: nn.Module) -> set[nn.Module]:
    """All modules inside the layers of the encoders in a module."""
    stacks = [
        part for _, encoder in encoders_in(root) for part in encoder.modules() if isinstance(part, nn.ModuleList)
    ]
    return {part for stack in stacks for part in stack.modules()}


def takes_tokens(module: Any, is_root: bool) -> bool:
    """Whether a model has the forward of an encoder, and is no decoder of an encoder's states."""
    if not (is_root or isinstance(module, PreTrainedModel)):
        return False
    names, _ = parameters_of(type(module).forward)
    config = getattr(module, "config", None)
    if "attention_mask" not in names or not any(name in names for name in TOKENS) or "labels" in names:
        return False
    if "encoder_hidden_states" not in names:
        return True
    reads_encoder = getattr(config, "is_decoder", False) and getattr(config, "add_cross_attention", False)
    return not (reads_encoder or getattr(module, "is_decoder", False) or "Decoder" in type(module).__name__)


def tokenizer_of(owner: Any, root: Any) -> Any:
    """The tokenizer that came with a model; None if there is none."""
    for holder, place in itertools.product((owner, root), TOKENIZERS):
        with suppress(KeyError, RuntimeError):  # of objects with names of their own
            found = functools.reduce(lambda value, name: getattr(value, name, None), place.split("."), holder)
            if found is not None:
                return getattr(found, "tokenizer", found)
    return None
