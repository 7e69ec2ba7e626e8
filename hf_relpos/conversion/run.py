"""The inputs of a conversion method, in addition to the model that it changes."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..families.checkpoint import Checkpoint
from ..families.family import TOKEN_TYPES
from ..families.names import is_table
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..schemes.registry import scheme_parts
from .options import NoOptions


@dataclass(frozen=True)
class ConversionRun:
    """The inputs of a method.

    Attributes:
        source: the checkpoint.
        source_config: configuration of the source, and of the teacher, as a RelPosBertConfig with positions.
        build_teacher: function that builds a RelPosBert model with the outputs of the source, in its dtype and in eval
            mode.
        texts: paths or documents to learn from; None for a method that does not learn.
        field: key or column of the text in files and datasets, one for all or one for each.
        options: options of the method: an instance of its `Method.options_type`.
        seed: random seed.
        resume_folder: folder with the checkpoints of an interrupted run; None for a method that cannot resume.
        device: device of a method that learns from text.
        progress: whether to show a progress bar.
        details: results of the method for the report; JSON values only.
    """

    source: Checkpoint
    source_config: RelPosBertConfig
    build_teacher: Callable[[], RelPosBertPreTrainedModel]
    texts: list[Path] | list[str] | None = None
    field: str | Sequence[str] = "text"
    options: Any = dataclasses.field(default_factory=NoOptions)
    seed: int = 0
    resume_folder: Path | None = None
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    progress: bool = False
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with the tokenizer of the source."""
        return self.source.folder

    @property
    def tells_segments_apart(self) -> bool:
        """Whether the source has different embeddings of token types 0 and 1, and no other terms of segments."""
        if any(settings.get("segments") for _, settings in scheme_parts(self.source_config)):
            return False  # XLNet's segment terms, which are not computed layer by layer
        tables = [tensor for name, tensor in self.source.tensors.items() if name.endswith(TOKEN_TYPES)]
        return any(len(table) > 1 and not torch.equal(table[0], table[1]) for table in tables)

    @property
    def source_table(self) -> torch.Tensor:
        """The absolute position embeddings of the source, (P, D), which must have them."""
        return next(tensor for name, tensor in self.source.tensors.items() if is_table(name))


# A method changes the model in place, and returns the names of changed tensors with a note on each.
Apply = Callable[[RelPosBertPreTrainedModel, ConversionRun], dict[str, str]]
