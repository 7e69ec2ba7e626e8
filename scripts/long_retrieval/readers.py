"""Readers: a model with a way to read a text longer than it was trained on, to one vector or several."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hf_relpos import RelPosBertModel
from hf_relpos.conversion.export import table_rows
from hf_relpos.evaluation import Encoder, hidden_states, load_encoder, pool
from hf_relpos.evaluation.encoder import pad_batch
from hf_relpos.evaluation.retrieval import pieces


Row = Sequence[int]
TRAINED = 512  # tokens that the source was trained to read


@dataclass(frozen=True)
class Reader:
    """A way to read long rows.

    Attributes:
        label: in the tables.
        student: its folder's name; None for the source.
        pieces: read in pieces of `TRAINED` tokens: `mean` or `max` over them; `first` reads only that one.
        positions: position ids for a row of so many tokens, from those that there are.
        config: fields of the configuration.
    """

    label: str
    student: str | None = None
    pieces: str | None = None
    positions: Callable[[int], torch.Tensor] | None = None
    config: dict[str, Any] = field(default_factory=dict)


def grouped(length: int) -> torch.Tensor:
    """Position ids that several tokens in a row have in common, [CLS] its own (grouped positions of LongEmbed)."""
    size = -(-(length - 1) // (TRAINED - 1))
    return torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(length - 1) // size])


def recurrent(length: int) -> torch.Tensor:
    """Position ids that begin anew past the last one, at that of the first word (recurrent positions of LongEmbed)."""
    return torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(length - 1) % (TRAINED - 1)])


WINDOW = 256
SOURCE_READERS = {
    "truncate": Reader("source, first 512 tokens", pieces="first"),
    "mean": Reader("source, mean of windows of 512", pieces="mean"),
    "max": Reader("source, best of windows of 512", pieces="max"),
    "grouped": Reader("source, grouped positions", positions=grouped),
    "recurrent": Reader("source, recurrent positions", positions=recurrent),
}
# Fields of the configuration to what they are called.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "": ("all keys", {"attention_window": None}),  # students of long rows have one
    "+log": (
        "all keys, log temperature",
        {"attention_window": None, "attention_temperature": "log", "attention_temperature_length": TRAINED},
    ),
    "+window": (f"window {WINDOW} and [CLS]", {"attention_window": WINDOW}),
    "+window-global": (f"window {WINDOW} alone", {"attention_window": WINDOW, "global_tokens": []}),
}


FAR = 4 * TRAINED  # tokens of the rows that students of long rows learn from


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


def students(longest: int) -> dict[str, Student]:
    """By name.

    Args:
        longest: tokens of the longest row that is read.
    """
    return {
        "interpolated": Student("positions interpolated", {"length": longest}, "interpolate"),
        "hierarchical": Student("hierarchical positions", {"length": longest}, "hierarchical"),
        "converted": Student("converted"),
        "extended": Student("converted, distances grouped", grouped="converted", reach=FAR),
        "converted-long": Student("converted on long rows", {"length": FAR}, reach=FAR),
        "converted-window": Student(f"converted on long rows in a window {WINDOW}", {"length": FAR, "window": WINDOW}),
    }


def group_distances(model: RelPosBertModel, reach: int) -> RelPosBertModel:
    """A copy of a relative model that meets no new distance: SelfExtend (Jin et al. 2024, arXiv 2401.01325).

    Distances up to `TRAINED` // 4 stay; those beyond are in groups of one size, so that in a row of `reach` tokens the
    farthest is that of a row of `TRAINED`. Its terms are written into `tables` with a row for each distance.
    """
    config = copy.deepcopy(model.config)
    config.position_embedding_type = "tables"
    config.position_options = {"max_distance": reach - 1, "storage": "rows"}
    grouped = RelPosBertModel(config).eval()
    weights = {name: tensor for name, tensor in model.state_dict().items() if "distance_embedding" not in name}
    grouped.load_state_dict(weights, strict=False)
    distance, near = torch.arange(1 - reach, reach), TRAINED // 4
    size = -(-(reach - near) // (TRAINED - 1 - near))
    far = near + (distance.abs() - near) // size
    read = distance.sign() * torch.where(distance.abs() <= near, distance.abs(), far) + TRAINED - 1
    with torch.no_grad():
        for layer, rows in zip(grouped.encoder.layer, table_rows(model, TRAINED - 1), strict=True):
            scheme = layer.attention.self.distance_embedding
            for letter in "ABcV":
                getattr(scheme, letter).copy_(rows[letter][:, read])
    return grouped


def readers(known: Mapping[str, Student]) -> dict[str, Reader]:
    """Those of the source, and of each student with all its keys, a temperature, in a window, and in pieces."""
    found = dict(SOURCE_READERS)
    for name, student in known.items():
        variants = {"": VARIANTS[""]} if student.grouped else VARIANTS
        for suffix, (words, config) in variants.items():
            found[f"{name}{suffix}"] = Reader(f"{student.label}, {words}", name, config=config)
        found[f"{name}+mean"] = Reader(f"{student.label}, mean of windows of 512", name, pieces="mean")
    return found


class Reading:
    """Vectors of rows of tokens by one reader."""

    def __init__(self, reader: Reader, source: Encoder, folder: Path | None, grouped: int | None = None):
        """
        Args:
            source: with absolute positions.
            folder: of the student, where it is one.
            grouped: group its distances, for rows of so many tokens.
        """
        self.reader = reader
        encoder = source if folder is None else load_encoder(folder, pooling=source.pooling)
        if grouped is not None:
            encoder = replace(encoder, model=group_distances(encoder.model, grouped))
        for name, value in reader.config.items():
            setattr(encoder.model.config, name, value)
        self.encoder = encoder

    def document(self, row: Row) -> torch.Tensor:
        """Vectors of a document, (n, D): n is 1 unless the best of its pieces counts."""
        if self.reader.pieces is None or len(row) <= TRAINED:
            return self._vectors([row])
        cut = pieces(row, TRAINED)
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
            positions = None if len(row) <= TRAINED else self.reader.positions(len(row))[None]
            vectors.append(pool(hidden_states(self.encoder.model, ids, mask, positions), mask, self.encoder.pooling))
        return torch.cat(vectors)
