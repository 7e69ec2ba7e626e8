"""Readers: a model with a way to read a text longer than it was trained on, to one vector or several."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_relpos import RelPosBertModel
from hf_relpos.conversion.refit import table_rows
from hf_relpos.evaluation import Encoder, hidden_states, load_encoder, pool
from hf_relpos.evaluation.encoder import pad_batch
from hf_relpos.evaluation.retrieval import pieces


Row = Sequence[int]


@dataclass(frozen=True)
class Reader:
    """A way to read long rows.

    Attributes:
        label: in the tables.
        student: its folder's name; None for the source.
        pieces: read in pieces as long as the source was trained on: `mean` or `max` over them; `first` reads only that
            one.
        positions: position ids for a row of so many tokens, from the so many that there are.
        config: fields of the configuration.
    """

    label: str
    student: str | None = None
    pieces: str | None = None
    positions: Callable[[int, int], torch.Tensor] | None = None
    config: dict[str, Any] = field(default_factory=dict)


def grouped(length: int, trained: int) -> torch.Tensor:
    """Position ids that several tokens in a row have in common, [CLS] its own (grouped positions of LongEmbed)."""
    size = -(-(length - 1) // (trained - 1))
    return torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(length - 1) // size])


def recurrent(length: int, trained: int) -> torch.Tensor:
    """Position ids that begin anew past the last one, at that of the first word (recurrent positions of LongEmbed)."""
    return torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(length - 1) % (trained - 1)])


def source_readers(trained: int) -> dict[str, Reader]:
    """Of the source as it is, which was trained to read so many tokens."""
    return {
        "truncate": Reader(f"source, first {trained} tokens", pieces="first"),
        "mean": Reader(f"source, mean of windows of {trained}", pieces="mean"),
        "max": Reader(f"source, best of windows of {trained}", pieces="max"),
        "grouped": Reader("source, grouped positions", positions=grouped),
        "recurrent": Reader("source, recurrent positions", positions=recurrent),
    }


def variants(trained: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Suffixes of the names of readers, to what they are called and fields of the configuration."""
    window = trained // 2
    log = {"attention_window": None, "attention_temperature": "log", "attention_temperature_length": trained}
    return {
        "": ("all keys", {"attention_window": None}),  # students of long rows have one
        "+log": ("all keys, log temperature", log),
        "+window": (f"window {window} and [CLS]", {"attention_window": window}),
        "+window-global": (f"window {window} alone", {"attention_window": window, "global_tokens": []}),
    }


@dataclass(frozen=True)
class Student:
    """A conversion of the source.

    Attributes:
        label: in the tables.
        options: of the method.
        method: of the conversion; None for the default quality, which learns from text.
        grouped: this student with its distances grouped; nothing is converted.
        reach: tokens up to which it can tell distances apart; None for any number.
    """

    label: str
    options: dict[str, Any] = field(default_factory=dict)
    method: str | None = None
    grouped: str | None = None
    reach: int | None = None


def students(longest: int, trained: int) -> dict[str, Student]:
    """By name.

    Args:
        longest: tokens of the longest row that is read.
        trained: tokens that the source was trained to read; students of long rows learn from rows four times as long.
    """
    far, window = 4 * trained, trained // 2
    in_window = {"length": far, "window": window}
    return {
        "interpolated": Student("positions interpolated", {"length": longest}, "interpolate"),
        "hierarchical": Student("hierarchical positions", {"length": longest}, "hierarchical"),
        "converted": Student("converted"),
        "extended": Student("converted, distances grouped", grouped="converted", reach=far),
        "converted-long": Student(f"converted on rows of {far}", {"length": far}, reach=far),
        "converted-window": Student(f"converted on rows of {far} in a window {window}", in_window),
    }


def group_distances(model: RelPosBertModel, reach: int, trained: int) -> RelPosBertModel:
    """A copy of a relative model that meets no new distance: SelfExtend (Jin et al. 2024, arXiv 2401.01325).

    Distances up to `trained` // 4 stay; those beyond are in groups of one size, so that in a row of `reach` tokens the
    farthest is that of a row of `trained`. Its terms are written into `tables` with a row for each distance.
    """
    config = copy.deepcopy(model.config)
    config.position_embedding_type = "tables"
    config.position_options = {"max_distance": reach - 1, "storage": "rows"}
    grouped = RelPosBertModel(config).eval()
    weights = {name: tensor for name, tensor in model.state_dict().items() if "distance_embedding" not in name}
    grouped.load_state_dict(weights, strict=False)
    distance, near = torch.arange(1 - reach, reach), trained // 4
    size = -(-(reach - near) // (trained - 1 - near))
    far = near + (distance.abs() - near) // size
    read = distance.sign() * torch.where(distance.abs() <= near, distance.abs(), far) + trained - 1
    with torch.no_grad():
        for layer, rows in zip(grouped.encoder.layer, table_rows(model, trained - 1), strict=True):
            scheme = layer.attention.self.distance_embedding
            for letter in "ABcV":
                getattr(scheme, letter).copy_(rows[letter][:, read])
    return grouped


def readers(known: Mapping[str, Student], trained: int) -> dict[str, Reader]:
    """Those of the source, and of each student with all its keys, a temperature, in a window, and in pieces."""
    found, possible = source_readers(trained), variants(trained)
    for name, student in known.items():
        for suffix, (words, config) in possible.items():
            if not (student.grouped and suffix):
                found[f"{name}{suffix}"] = Reader(f"{student.label}, {words}", name, config=config)
        found[f"{name}+mean"] = Reader(f"{student.label}, mean of windows of {trained}", name, pieces="mean")
    return found


class Reading:
    """Vectors of rows of tokens by one reader."""

    def __init__(self, reader: Reader, source: Encoder, trained: int, folder: Path | None, grouped: int | None = None):
        """
        Args:
            source: with absolute positions.
            trained: tokens that it was trained to read.
            folder: of the student, where it is one.
            grouped: group its distances, for rows of so many tokens.
        """
        self.reader, self.trained = reader, trained
        encoder = source if folder is None else load_encoder(folder, pooling=source.pooling)
        if grouped is not None:
            encoder = replace(encoder, model=group_distances(encoder.model, grouped, trained))
        for name, value in reader.config.items():
            setattr(encoder.model.config, name, value)
        self.encoder = encoder

    def document(self, row: Row) -> torch.Tensor:
        """Vectors of a document, (n, D): n is 1 unless the best of its pieces counts."""
        if self.reader.pieces is None or len(row) <= self.trained:
            return self._vectors([row])
        cut = pieces(row, self.trained)
        if self.reader.pieces == "first":
            return self._vectors(cut[:1])
        vectors = self._vectors(cut)
        if self.reader.pieces == "max":
            return vectors
        weights = torch.tensor([len(piece) - 2 for piece in cut], dtype=vectors.dtype)
        return (vectors * weights[:, None]).sum(0, keepdim=True) / weights.sum()

    def _vectors(self, rows: Sequence[Row]) -> torch.Tensor:
        if self.reader.positions is None:
            return self.encoder.encode_rows(rows)
        vectors = []
        for row in rows:
            ids, mask = pad_batch([row], self.encoder.model)
            positions = None if len(row) <= self.trained else self.reader.positions(len(row), self.trained)[None]
            vectors.append(pool(hidden_states(self.encoder.model, ids, mask, positions), mask, self.encoder.pooling))
        return torch.cat(vectors)
