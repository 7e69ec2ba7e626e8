"""Texts of characters or bytes as token ids, in segments that continue each other and in overlapping windows."""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from hf_relpos.data.masking import IGNORE_INDEX
from hf_relpos.data.records import OPENERS
from hf_relpos.training.stream import SegmentDataset


def read_text(path: Path, unit: str) -> bytes | str:
    """A whole file, decompressed by its suffix.

    Raises:
        ValueError: for a file that is missing, cannot be decompressed, is no UTF-8 (as characters), or is empty.
    """
    try:
        with OPENERS.get(path.suffix, open)(path, "rb") as file:
            content = file.read()
        text = content.decode("utf-8") if unit == "character" else content
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as {unit}s ({error}); give a text file") from None
    if not text:
        raise ValueError(f"{path}: is empty; give a file with text")
    return text


class Texts:
    """Training, validation and perhaps test text.

    Attributes:
        parts: {"train", "valid" and perhaps "test": token ids, (N,)}.
        vocabulary: its size.
        unknown: of each part, the fraction of characters that the training text does not have.
    """

    def __init__(self, args: argparse.Namespace):
        """
        Raises:
            ValueError: for files that `read_text` refuses, and a split of more than there is.
        """
        if args.text:
            whole = read_text(args.text, args.unit)
            if sum(args.split) > len(whole):
                raise ValueError(
                    f"--split {' '.join(map(str, args.split))}: {sum(args.split):,} {args.unit}s, and {args.text} has "
                    f"{len(whole):,}; give smaller parts"
                )
            ends = np.cumsum([0, *args.split])
            names = ["train", "valid", "test"][: len(args.split)]
            texts = {name: whole[a:b] for name, a, b in zip(names, ends, ends[1:], strict=False)}
        else:
            paths = {"train": args.train, "valid": args.valid, "test": args.test}
            texts = {name: read_text(path, args.unit) for name, path in paths.items() if path}
        if args.unit == "byte":
            arrays = {name: np.frombuffer(text, np.uint8).astype(np.int64) for name, text in texts.items()}
            self.vocabulary, self.unknown = 256, dict.fromkeys(texts, 0.0)
        else:
            points = {name: np.frombuffer(text.encode("utf-32-le"), np.uint32) for name, text in texts.items()}
            characters = np.unique(points["train"])
            ids = {name: np.searchsorted(characters, each) for name, each in points.items()}
            arrays = {
                name: np.where(characters[each.clip(max=len(characters) - 1)] == points[name], each, len(characters))
                for name, each in ids.items()
            }
            self.vocabulary = len(characters) + 1
            self.unknown = {name: float((each == len(characters)).mean()) for name, each in arrays.items()}
        self.parts = {name: torch.from_numpy(each) for name, each in arrays.items()}


class Segments(SegmentDataset):
    """Segments of one text, all of the same length, such that batches of `rows` of them continue each other.

    With `separate` every segment is a document of its own, so that no memory reaches into it.
    """

    def __init__(self, text: torch.Tensor, rows: int, length: int, separate: bool, name: str):
        """
        Raises:
            ValueError: for a text too short for one segment in each row.
        """
        steps = (len(text) - 1) // (rows * length)
        if not steps:
            raise ValueError(
                f"the {name} text has {len(text):,} tokens, too few for a segment of {length} in each of {rows} rows; "
                "give more text, or a smaller --batch, --eval-batch or --segment"
            )
        text = text[: steps * rows * length + 1]
        super().__init__([text[:-1].tolist()], rows, length)
        self.targets = text[1:]  # the last token has a next one, too
        self.separate = separate

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = super().__getitem__(index)
        if self.separate:
            item["position_ids"] = torch.arange(len(item["input_ids"]))
        return item


class Windows(Dataset):
    """Windows that overlap by half, of which the second half is scored; of the first window, all."""

    def __init__(self, text: torch.Tensor, length: int):
        self.text, self.length, self.step = text, length, max(1, length // 2)

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1 - self.length) // self.step + 1)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.step
        labels = self.text[start + 1 : start + 1 + self.length].clone()
        if index:
            labels[: self.length - self.step] = IGNORE_INDEX
        ids = self.text[start : start + self.length]
        return {"input_ids": ids, "position_ids": torch.arange(self.length), "labels": labels, "shift_labels": labels}
