"""Text and data sets: documents, records, sentence pairs, tagged sentences; windows, batches and masking of tokens."""

import importlib
from typing import TYPE_CHECKING

from .text import TextError, read_texts


if TYPE_CHECKING:
    from .windows import PairLayout, Windows, cut_windows, pair_windows


__all__ = ["PairLayout", "TextError", "Windows", "cut_windows", "pair_windows", "read_texts"]


def __getattr__(name: str) -> object:
    if name in __all__:  # needs PyTorch, which the command line imports after it has checked paths
        return getattr(importlib.import_module(".windows", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
