"""Transformers' loader: its report, what it makes of the tensors of a file, and what it allocates without contents.

Also the layers that PEFT puts adapters on.
"""

import copy
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from .torch import counted_writes


# The logger of the report, which Transformers' function `log_state_dict_report` writes as one record.
LOGGER = logging.getLogger("transformers.modeling_utils")
REPORT = re.compile(r"(\w+) LOAD REPORT from: (.*)")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
NOTED = 4096  # elements of a buffer that are kept to see whether anybody has written to it
# Packages between a filter of that logger and who loads a model.
LOADERS = ("hf_relpos", "logging", "torch", "transformers", "transformers_modules")


def left_out(record: logging.LogRecord, tensors: re.Pattern[str]) -> tuple[str, str] | None:
    """The class of the model and its source, if a record is a report that lists a tensor as left out.

    Args:
        record: any record of the logger.
        tensors: matches the names of the tensors.
    """
    text = COLOUR.sub("", record.getMessage())
    found = REPORT.search(text)
    if found is None or not any("UNEXPECTED" in line and tensors.search(line) for line in text.splitlines()):
        return None
    return found[1], found[2]


def level_of_the_loader() -> int:
    """`stacklevel`, in the function that calls this, of the code that asked Transformers for a model."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LOADERS:
        frame, level = frame.f_back, level + 1
    return level


@contextmanager
def named_in_reports(source: Any) -> Iterator[None]:
    """The report names a source, where the loader of this thread is given tensors and knows of none."""
    thread = threading.get_ident()

    def name(record: logging.LogRecord) -> bool:
        if record.thread == thread and isinstance(record.msg, str):
            record.msg = record.msg.replace(" from: None\n", f" from: {source}\n", 1)
        return True

    LOGGER.addFilter(name)
    try:
        yield
    finally:
        LOGGER.removeFilter(name)


class Allocation(NamedTuple):
    """What was in a buffer when Transformers allocated it, or that a module was built with it on the meta device.

    Attributes:
        name: its name in the model that was loaded; empty for one on the meta device.
        contents: elements of it; None for one on the meta device, to which `to_empty` gives memory.
        version: how often PyTorch had seen a write to it.
    """

    name: str
    contents: torch.Tensor | None
    version: int

    def is_untouched(self, buffer: torch.Tensor) -> bool:
        """Whether nobody has written to the buffer since; it may have been moved or cast."""
        if self.contents is None or counted_writes(buffer) > self.version:
            return counted_writes(buffer) <= self.version
        before, now = self.contents.to(buffer.device, buffer.dtype), _sample(buffer)
        return torch.equal(before.view(torch.uint8), now.view(torch.uint8))


# What buffers held, by module and attribute. A module is here once it has registered any buffer.
allocations: "WeakKeyDictionary[nn.Module, dict[str, Allocation]]" = WeakKeyDictionary()
# Configurations of the models as they were loaded.
loaded_configurations: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()


def note_allocation(module: nn.Module, name: str, buffer: torch.Tensor | None) -> bool:
    """Note what a buffer holds that Transformers' loader allocates, when a module is about to get any buffer.

    Returns:
        Whether it is such a buffer.
    """
    if type(module).__hash__ is None:
        return False
    noted = allocations.setdefault(module, {})
    noted.pop(name, None)  # somebody else's buffer from now on
    if type(buffer) is not torch.Tensor:
        return False
    if buffer.is_meta:
        noted[name] = Allocation("", None, 0)
        return False
    before = module._buffers.get(name)
    if before is None or not before.is_meta or buffer.layout != torch.strided:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_load_parameter_into_model":
        frame = frame.f_back
    if frame is None:
        return False
    root = frame.f_locals["model"]
    noted[name] = Allocation(frame.f_locals["param_name"], _sample(buffer), counted_writes(buffer))
    if root not in loaded_configurations:
        loaded_configurations[root] = copy.deepcopy(root.config)
    return True


def _sample(buffer: torch.Tensor) -> torch.Tensor:
    flat = buffer.detach().reshape(-1)
    return flat[:: max(1, len(flat) // NOTED)].clone()


def converted_tensors(
    model: Any, names: Iterable[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, list[str], dict[str, torch.Tensor]]]:
    """What Transformers' loader makes of the tensors of a checkpoint for a model, a few at a time.

    Args:
        model: a PreTrainedModel, which is not changed.
        names: of all tensors in the files.
        read: gives the tensor of a name.

    Yields:
        The (first) name in the model, names in the files, and the tensors made of them by their names in the model.
        There are none if the model has no place for them.
    """
    mapping = getattr(model, "_weight_conversions", None)
    mapping = get_model_conversion_mapping(model) if mapping is None else mapping
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(names, key=_by_number):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        groups.setdefault(target, []).append((name, pattern))
    for target, sources in groups.items():
        stored, pattern = [name for name, _ in sources], sources[0][1]
        if target not in state:
            yield target, stored, {}
        elif pattern is None:
            yield target, stored, {target: read(stored[0])}
        else:
            converter = copy.deepcopy(next(each for each in converters if pattern in each.source_patterns))
            for name, own in sources:
                converter.add_tensor(target, name, own, read(name))  # type: ignore[arg-type]  # takes tensors, too
            made = converter.convert(target, model=model, config=model.config)
            yield target, stored, {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key that sorts experts.2 before experts.10, as the loader does."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def register_targets(model_type: str, like: str) -> None:
    """Adapters go on the layers that they go on in models of another type, unless others are given.

    Importing PEFT here costs nothing: Transformers does so for its callbacks, of which `hf_relpos` has one.
    """
    from peft.utils import constants

    for name, targets in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(targets, dict) and like in targets:
            targets.setdefault(model_type, targets[like])
