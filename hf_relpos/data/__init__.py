"""Text and data sets: documents, records, sentence pairs, tagged sentences; windows, batches and masking of tokens."""

from .text import TextError, read_texts
from .windows import Windows, cut_windows


__all__ = ["TextError", "Windows", "cut_windows", "read_texts"]
