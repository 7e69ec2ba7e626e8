"""What live models use of Transformers. Classes that they subclass are imported when asked for, one architecture's."""

import importlib
from typing import Any

from transformers.utils import output_capturing

from .declarations import LIVE


def collects_outputs() -> bool:
    """Whether the call that is running collects the states or weights of single layers."""
    return bool(output_capturing._active_collector.get())


def __getattr__(name: str) -> Any:
    if name not in LIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = LIVE[name].path.partition(":")
    return getattr(importlib.import_module(module), path.partition(".")[0])
