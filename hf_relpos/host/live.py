"""What live models use of Transformers. Classes that they subclass are imported when asked for, one architecture's."""

import importlib
from typing import Any

from transformers.utils import output_capturing

from .declarations import LIVE


def collects_outputs() -> bool:
    """Whether the call that is running collects the states or weights of single layers."""
    return bool(output_capturing._active_collector.get())


def records_of(model: Any) -> None:
    """Let a model of a substituted class return hidden states and attention weights as its stock class does.

    Transformers looks up what a model records by the name of its class, which in older releases is the key of a
    `dict`, and which later ones find themselves.
    """
    registry: Any = output_capturing._CAN_RECORD_REGISTRY
    key = str(type(model)) if type(registry) is dict else model
    if not registry.get(key):
        registry[key] = model._can_record_outputs


def __getattr__(name: str) -> Any:
    if name not in LIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = LIVE[name].path.partition(":")
    return getattr(importlib.import_module(module), path.partition(".")[0])
