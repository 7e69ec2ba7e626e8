"""Classes of Transformers that live models subclass, imported when asked for: most models have one architecture."""

import importlib
from typing import Any

from .declarations import LIVE


def __getattr__(name: str) -> Any:
    if name not in LIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, path = LIVE[name].path.partition(":")
    return getattr(importlib.import_module(module), path.partition(".")[0])
