"""The interface of a method of conversion, and helpers that several methods share."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..families.family import TOKEN_TYPES
from ..families.names import is_table
from ..families.source import Source
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..schemes.registry import scheme_parts
from ..schemes.scheme import Option, Scheme


@dataclass(frozen=True)
class ConversionContext:
    """The context of a method: everything but the model that it changes.

    Attributes:
        source: the checkpoint.
        source_config: its configuration as a RelPosBertConfig, positions included: that of the teacher.
        build_teacher: builds a RelPosBert model, in the dtype of the source and in eval mode, that computes exactly
            what the source computes.
        texts: to learn from, paths or documents; None for none.
        field: key or column of the text in files and datasets, one for all or one for each.
        options: of the method, with its defaults.
        seed: of random choices.
        resume_folder: where an interrupted method finds what it had computed; None for a method that starts afresh.
        device: where a method that learns from text computes.
        progress: whether to show a progress bar.
        details: filled by the method for the report; JSON values only.
        is_sentence_encoder: whether the source is a SentenceTransformer that pools, and so reads one text at a time.
    """

    source: Source
    source_config: RelPosBertConfig
    build_teacher: Callable[[], RelPosBertPreTrainedModel]
    texts: list[Path] | list[str] | None = None
    field: str | Sequence[str] = "text"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0
    resume_folder: Path | None = None
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    progress: bool = False
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_sentence_encoder: bool = False

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with the tokenizer of the source."""
        return self.source.folder

    @property
    def tells_segments_apart(self) -> bool:
        """Whether the source has embeddings of the token types 0 and 1 that differ, and no other terms of segments."""
        if any(settings.get("segments") for _, settings in scheme_parts(self.source_config)):
            return False  # XLNet's, which are not known a layer at a time
        tables = [tensor for name, tensor in self.source.tensors.items() if name.endswith(TOKEN_TYPES)]
        return any(len(table) > 1 and not torch.equal(table[0], table[1]) for table in tables)

    @property
    def source_table(self) -> torch.Tensor:
        """The absolute position embeddings of the source, (P, D), which must have them."""
        return next(tensor for name, tensor in self.source.tensors.items() if is_table(name))


@dataclass(frozen=True)
class Method:
    """A method of conversion: how the positions are treated.

    Attributes:
        help: one line, for the command line.
        keeps_table: the result has a table of absolute positions, the source's.
        exact: the result computes what the source computes, which is verified.
        apply: changes the result in place, given a model with all the tensors of the source that it has parameters
            for, and zeros in the scheme's parameters; returns the names of the tensors it changed, with a note on
            each.
        unsupported_reason: why a scheme cannot be the result's; empty for one that can.
        from_absolute: whether it is for sources with absolute positions.
        from_relative: whether it is for sources that are relative already.
        text: whether it learns from text.
        options: its own options.
        default_scheme: scheme of the result unless the caller names one; None for `DEFAULT_SCHEME`.
        max_positions: the result's `max_position_embeddings`, from the source's and the resolved options; None where
            it stays.
    """

    help: str
    keeps_table: bool
    exact: bool
    apply: Callable[[RelPosBertPreTrainedModel, ConversionContext], dict[str, str]]
    unsupported_reason: Callable[[type[Scheme]], str]
    from_absolute: bool = True
    from_relative: bool = False
    text: Literal["unused", "optional", "required"] = "unused"
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    default_scheme: str | None = None
    max_positions: Callable[[int, Mapping[str, Any]], int] | None = None


def same_positions(one: RelPosBertConfig, other: RelPosBertConfig) -> bool:
    """Whether two configurations have the same scheme, down to the shapes of its tables."""
    return all(
        value(one) == value(other)
        for value in (
            lambda config: config.position_embedding_type,
            lambda config: config.max_position_embeddings,
            lambda config: [settings for _, settings in scheme_parts(config)],
        )
    )


def parameter_name(model: RelPosBertPreTrainedModel, parameter: torch.Tensor) -> str:
    """The name of a parameter in its model."""
    return next(name for name, candidate in model.named_parameters() if candidate is parameter)


def add_to_token_types(model: RelPosBertPreTrainedModel, vector: torch.Tensor) -> str:
    """Add a vector to the embedding of every token, in the table of token types; the name of that table."""
    embeddings = model.base_model.embeddings
    embeddings.add_everywhere(vector.double())
    return parameter_name(model, embeddings.token_type_embeddings.weight)
