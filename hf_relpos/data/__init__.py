"""Text and data sets: documents, records, sentence pairs, tagged sentences; windows, batches and masking of tokens."""

from .text import TextError, read_texts
from .windows import PairLayout, Windows, cut_windows, pair_windows


__all__ = ["PairLayout", "TextError", "Windows", "cut_windows", "pair_windows", "read_texts"]
