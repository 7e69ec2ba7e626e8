"""Description of a family of checkpoints: how its tensors, fields, heads and positions correspond to BERT's.

Each family is a file in this folder, and `registry` lists them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .joints import Joint, Tensors


# Terms of the relative self-attention in Transformers ≤ 4.57, which v5 does not have, by scheme: the vectors of the
# distances are added to the keys (A), the queries (B) and the values (V). The first two schemes were values of
# `position_embedding_type` of stock BERT; NEZHA computes the vectors, which are sinusoids.
LEGACY_TERMS = {"relative_key": "A", "relative_key_query": "AB", "nezha": "AV"}
LEGACY_TYPES = ("relative_key", "relative_key_query")
# Heads that most families have, and all of BERT's but the language model's.
MOST = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
ALL = (*MOST, "ForPreTraining", "ForNextSentencePrediction", "ForMultipleChoice")
# BERT's class by the end of the name of a class with the same outputs.
COUNTERPARTS = {
    **{suffix: f"Bert{suffix}" for suffix in (*ALL, "LMHeadModel")},
    "ForCausalLM": "BertLMHeadModel",
    "ForQuestionAnsweringSimple": "BertForQuestionAnswering",
}
# Language modelling heads that always apply GELU, where BERT's applies `hidden_act`.
OWN_ACTIVATION = ("ForMaskedLM", "ForCausalLM")
# Pre-training heads. One that BERT does not have is dropped; a task head that BERT does not have is rejected.
PRETRAINING = ("ForPreTraining", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "WithLMHead")
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
TASK_TYPES = "embeddings.task_type_embeddings.weight"


@dataclass(frozen=True)
class Positions:
    """The positions of a checkpoint.

    Attributes:
        absolute: whether absolute position embeddings are added to the input.
        scheme: key of `hf_relpos.SCHEMES`; None for no relative positions.
        options: options of that scheme.
    """

    absolute: bool = True
    scheme: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """A layout of tensors that is not stock BERT's.

    Attributes:
        name: name of the models with this layout.
        tensors: regular expressions, each of which matches the name of some tensor.
    """

    name: str
    tensors: tuple[str, ...]

    def find(self, names: Iterable[str]) -> str:
        """The first tensor that shows the layout; empty for tensors of another layout."""
        names = list(names)
        found = [next((name for name in names if re.search(pattern, name)), "") for pattern in self.tensors]
        return found[0] if all(found) else ""


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
        class_prefixes: prefixes of the names of its classes.
        suffixes: keys of `COUNTERPARTS`: the heads with the same outputs as BERT's.
        title: name in documents.
        parts: function from a configuration to BERT's names by its own, as for `names.rename`.
        joints: function from a configuration to tensors that do not correspond to BERT's one to one. Names that
            `parts` covers do not change.
        stock: `model_type` of the Transformers class with the same body (with absolute positions for a legacy type);
            None if there is none, so that no outputs can be compared.
        defaults: defaults of its configuration that differ from BERT's, where no class of Transformers has them (see
            `registry.defaults_of`).
        dropped_fields: fields of its config.json that neither ours nor `stock` has, and that mean nothing here (see
            `registry.dropped_fields`).
        renamed_fields: BERT's field by field of its configuration.
        only: fields that have a counterpart here with some values alone, if they are there: these values, and what
            another one means.
        always_gelu: whether its heads are `OWN_ACTIVATION` heads.
        legacy_types: values of `position_embedding_type` in Transformers ≤ 4.57, other than `absolute`.
        positions: function from a configuration to its positions, unless `position_embedding_type` is a legacy type.
        computes_positions: whether no tensors in its files may hold positions.
        token_types: whether it has token type embeddings, if its configuration has a `type_vocab_size`; otherwise
            those of the result are zero.
        pools: whether its encoders have a pooler in their files.
        padding: function from a configuration to the id of the padding token, which is also `padding_idx` of the
            position embeddings; position 0 is the row after it. None if position 0 is row 0.
        layers: function from a configuration to the prefix (`encoder.…`) of each layer's tensors, in order; layers
            that share tensors have the same prefix. None for BERT's prefixes.
        tokenizer: class of its tokenizer, for files that do not name it; None for BERT's.
        fields: function from a configuration to fields of a RelPosBertConfig that BERT's configuration lacks, or that
            follow from several fields of the family.
        unpack: function from configuration and tensors in a file to those that `joints` and the names cover.
        pack: the inverse of `unpack`.
        written: function from a configuration to its own names, where the inverse of `parts` is not what an export
            writes, by parts of BERT's; empty for tensors that it does not have.
        marks: the `model_type` of files that field or tensors mark as of this family.
        marker: field that marks the family, if true, in such a file; None for none.
        not_marking: values of that field that do not mark it, since configurations of this package have them.
        told_by_tensors: whether its layout marks the family in such a file.
        implied_fields: fields that must be true if a tensor's name has a certain part: their default, and the part.
        infer_from_tensors: function from configuration and tensor names to corrected fields of the configuration.
        read_directly: whether `from_pretrained` of our classes reads its checkpoints, as if they had been converted.
        masks_queries: whether padding attends to nothing, so that outputs at padding differ from those here.
        tolerance: largest difference of outputs in float64 that is due to rounding, relative to the largest output;
            more than the default if Transformers computes parts in float32.
        unsupported_reason: function from a configuration to the reason, besides `only`, why it cannot be converted;
            empty if it can.
        published: fields of its published checkpoints that are not defaults of its class.
        layout: layout of its tensors; None for BERT's.
    """

    class_prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    title: str
    parts: Callable[[Mapping[str, Any]], dict[str, str]] = lambda config: {}
    joints: Callable[[Mapping[str, Any]], Iterable[Joint]] = lambda config: ()
    stock: str | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    dropped_fields: tuple[str, ...] = ()
    renamed_fields: dict[str, str] = field(default_factory=dict)
    only: dict[str, tuple[list[Any], str]] = field(default_factory=dict)
    always_gelu: bool = False
    legacy_types: tuple[str, ...] = ()
    positions: Callable[[Mapping[str, Any]], Positions] = lambda config: Positions()
    computes_positions: bool = False
    token_types: bool = True
    pools: bool = True
    padding: Callable[[Mapping[str, Any]], int] | None = None
    layers: Callable[[Mapping[str, Any]], list[str]] | None = None
    tokenizer: str | None = None
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    unpack: Callable[[Mapping[str, Any], Tensors], Tensors] = lambda config, tensors: tensors
    pack: Callable[[Mapping[str, Any], Tensors], Tensors] = lambda config, tensors: tensors
    written: Callable[[Mapping[str, Any]], dict[str, str]] = lambda config: {}
    marks: str = "bert"
    marker: str | None = None
    not_marking: tuple[str, ...] = ()
    told_by_tensors: bool = False
    implied_fields: dict[str, tuple[bool, str]] = field(default_factory=dict)
    infer_from_tensors: Callable[[Mapping[str, Any], list[str]], dict[str, Any]] = lambda config, names: {}
    read_directly: bool = False
    masks_queries: bool = False
    tolerance: float = 1e-6
    unsupported_reason: Callable[[Mapping[str, Any]], str] = lambda config: ""
    published: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None

    def heads(self, config: Mapping[str, Any]) -> dict[str, str]:
        """BERT's class by class of the family, for every head that BERT can compute with this configuration."""
        suffixes = self.suffixes
        if self.always_gelu and config.get("hidden_act", "gelu") != "gelu":
            suffixes = tuple(suffix for suffix in suffixes if suffix not in OWN_ACTIVATION)
        return {stem + suffix: COUNTERPARTS[suffix] for stem in self.class_prefixes for suffix in suffixes}

    def marked(self, config: Mapping[str, Any], names: Iterable[str]) -> str:
        """The field or tensor that marks a checkpoint with another model_type as one of this family; empty for none.

        Args:
            names: names of its tensors.
        """
        if self.marker is not None and config.get(self.marker) and config[self.marker] not in self.not_marking:
            return f"{self.marker} = {config[self.marker]!r}"
        found = self.layout.find(names) if self.told_by_tensors and self.layout else ""
        return f"the tensor {found}" if found else ""

    def refusal(self, config: Mapping[str, Any]) -> str:
        """Why a checkpoint cannot be converted, by its configuration; empty if it can."""
        for name, (values, reason) in self.only.items():
            if name in config and config[name] not in values:
                known = " or ".join(map(repr, values))
                return f"{name} = {config[name]!r}: {reason}; only {known} has a counterpart here"
        return self.unsupported_reason(config)


def first_class(config: Mapping[str, Any]) -> str:
    """The first class that config.json names; empty for none."""
    listed = config.get("architectures") or [""]
    return str(listed if isinstance(listed, str) else listed[0])
