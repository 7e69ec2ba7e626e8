"""A checkpoint of a family: how its tensors, fields, heads and positions correspond to BERT's.

Each family is a class in a file of this folder, and `registry` lists them.
"""

import copy
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields as fields_of
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..host.transformers import TOKENIZER_MAPPING_NAMES
from ..models.checks import NAMES, Rule
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import STOCK_SCHEME
from .joints import Joint, Tensors, join, split
from .names import rename, to_stock


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
NAME_OR_NAMES = Rule(lambda value: isinstance(value, str) or NAMES.accepts(value), "a string, or a list of strings")
# What a configuration raises for its fields.
FIELD_ERRORS = (StrictDataclassError, TypeError, ValueError)
# Fields of config.json that do not describe the model.
NOT_KEPT = {"_name_or_path", "architectures", "auto_map", "dtype", "model_type", "position_embedding_type"}
NOT_KEPT |= {"torch_dtype", "transformers_version"}
# Fields of any family that Transformers and sentence-transformers read, for heads and quantised weights.
OF_HEADS = ("num_labels", "quantization_config", "sbert_ce_default_activation_function", "sentence_transformers")


@dataclass(frozen=True)
class Positions:
    """The positions of a checkpoint.

    Attributes:
        absolute: whether absolute position embeddings are added to the input.
        scheme: key of `hf_relpos.schemes.SCHEMES`, or several combined schemes; None for no relative positions.
        options: options of the scheme.
    """

    absolute: bool = True
    scheme: str | list[str] | None = None
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


class Family:
    """One kind of checkpoint. A family is a subclass, an instance describes one checkpoint of it.

    What is the same in all checkpoints of a family is an attribute; what follows from a configuration is a method.

    Attributes:
        name: `model_type`, or another name if its model_type is that of others; empty for a base of families.
        class_prefixes: prefixes of the names of its classes.
        suffixes: keys of `COUNTERPARTS`: the heads with the same outputs as BERT's.
        title: name in documents.
        parts: BERT's names by its own, as for `names.rename`.
        stock: `model_type` of the Transformers class with the same body (with absolute positions for a legacy type),
            by default its name, or the `stock` of the family that it extends; None if there is none, so that no
            outputs can be compared.
        defaults: defaults of its configuration that differ from BERT's, where no class of Transformers has them.
        dropped_fields: fields of its config.json that neither ours nor `stock` has, and that mean nothing here (see
            `ignored_fields`).
        renamed_fields: BERT's field by field of its configuration.
        types: rules for fields of its own that its methods compute with.
        only: fields that have a counterpart here with some values alone, if they are there: these values, and what
            another one means.
        always_gelu: whether its heads are `OWN_ACTIVATION` heads.
        legacy_types: values of `position_embedding_type` in Transformers ≤ 4.57, other than `absolute`.
        computes_positions: whether no tensors in its files may hold positions.
        token_types: whether it has token type embeddings, if its configuration has a `type_vocab_size`; otherwise
            those of the result are zero.
        pools: whether its encoders have a pooler in their files.
        marks: the `model_type` of files that field or tensors mark as of this family.
        marker: field that marks the family, if true, in such a file; None for none.
        not_marking: values of that field that do not mark it, since configurations of this package have them.
        told_by_tensors: whether its layout marks the family in such a file.
        implied_fields: fields that must be true if a tensor's name has a certain part: their default, and the part.
        read_directly: whether `from_pretrained` of our classes reads its checkpoints, as if they had been converted.
        masks_queries: whether padding attends to nothing, so that outputs at padding differ from those here.
        tolerance: largest difference of outputs in float64 that is due to rounding, relative to the largest output;
            more than the default if Transformers computes parts in float32.
        published: fields of its published checkpoints that are not defaults of its class.
        layout: layout of its tensors; None for BERT's.
        config: of a checkpoint: its config.json, completed with the family's defaults.
        folder: of a checkpoint, downloaded if it is on the Hub.
        evidence: the field that determines the positions of a checkpoint, and its value.
    """

    name = ""
    class_prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    title: str
    parts: dict[str, str] = {}
    stock: str | None
    defaults: dict[str, Any] = {}
    dropped_fields: tuple[str, ...] = ()
    renamed_fields: dict[str, str] = {}
    types: dict[str, Rule] = {}
    only: dict[str, tuple[list[Any], str]] = {}
    always_gelu = False
    legacy_types: tuple[str, ...] = ()
    computes_positions = False
    token_types = True
    pools = True
    marks = "bert"
    marker: str | None = None
    not_marking: tuple[str, ...] = ()
    told_by_tensors = False
    implied_fields: dict[str, tuple[bool, str]] = {}
    read_directly = False
    masks_queries = False
    tolerance = 1e-6
    published: dict[str, Any] = {}
    layout: Layout | None = None
    evidence = ""

    def __init_subclass__(cls, name: str = "") -> None:
        super().__init_subclass__()
        cls.name = name
        if name and not hasattr(cls, "stock"):
            cls.stock = name

    def __init__(self, config: Mapping[str, Any], folder: Path = Path()) -> None:
        self.config, self.folder = dict(config), folder

    # What families say of their checkpoints.

    def joints(self) -> Iterable[Joint]:
        """Tensors that do not correspond to BERT's one to one. Names that `parts` covers do not change."""
        return ()

    def find_positions(self) -> Positions:
        """Its positions; by default relative ones of a legacy type, or absolute ones."""
        kind = self.config.get("position_embedding_type")
        return Positions(absolute=False, scheme=kind) if kind in self.legacy_types else Positions()

    def padding(self) -> Any:
        """The row of the position embeddings before that of position 0: the id of the padding token; −1 for none."""
        return -1

    def layers(self) -> list[str]:
        """The prefix (`encoder.…`) of each layer's tensors, in order; empty for BERT's prefixes.

        Layers that share tensors have the same prefix.
        """
        return []

    def more_fields(self) -> dict[str, Any]:
        """Fields of a RelPosBertConfig that BERT's configuration lacks, or that follow from several of the family."""
        return {}

    def written(self) -> dict[str, str]:
        """The family's own names, where the inverse of `parts` is not what an export writes, by parts of BERT's.

        They are empty for tensors that it does not have.
        """
        return {}

    def infer_from_tensors(self, names: list[str]) -> dict[str, Any]:
        """Corrected fields of the configuration, from the names of the tensors."""
        return {}

    def unsupported_reason(self) -> str:
        """The reason, besides `only`, why it cannot be converted; empty if it can."""
        return ""

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Convert tensors, by their names in a file, to tensors that correspond to BERT's one to one.

        Raises:
            ConversionError: for a shape that does not fit the configuration.
        """
        return split(self.joints(), self.config, dict(tensors))

    def pack(self, tensors: Tensors) -> Tensors:
        """The inverse of `unpack`."""
        return join(self.joints(), self.config, tensors)

    # What follows from that.

    @classmethod
    @functools.cache
    def all_defaults(cls) -> dict[str, Any]:
        """What its configuration means where it leaves a field out: the defaults of its class in Transformers."""
        if cls.defaults or cls.name not in CONFIG_MAPPING:
            return cls.defaults
        ours, of_all = ({field.name for field in fields_of(kind)} for kind in (RelPosBertConfig, PreTrainedConfig))
        own = CONFIG_MAPPING[cls.name]().to_dict()
        known = {field: value for field, value in own.items() if field in {*ours - of_all, *cls.renamed_fields}}
        if known.get("embedding_size") == known.get("hidden_size"):  # RoFormer's is the hidden size, whatever that is
            known.pop("embedding_size", None)
        return known

    @classmethod
    def ignored_fields(cls, config: Iterable[str]) -> set[str]:
        """Fields of its configuration that ours does not have, and fields of ours that the family ignores.

        Args:
            config: config.json. Without a class in Transformers, all its fields but `OF_HEADS` are the family's, and
                the family ignores the fields that ours adds to BERT's. `save_code` stays: it may be set for the
                result.
        """
        stock, ours = CONFIG_MAPPING[cls.stock or "bert"], RelPosBertConfig().to_dict().keys()
        known = {*stock().to_dict(), *stock.attribute_map, "save_code"}
        own = known if cls.stock else {*config} - {*NOT_KEPT, *OF_HEADS}
        foreign = {*own, *cls.only} - ours
        return {*cls.dropped_fields, *foreign, *(ours - known)} - cls.renamed_fields.keys()

    @classmethod
    def marked(cls, config: Mapping[str, Any], names: Iterable[str]) -> str:
        """The field or tensor that marks a checkpoint with another model_type as one of this family; empty for none.

        Args:
            names: names of its tensors.
        """
        if cls.marker is not None and config.get(cls.marker) and config[cls.marker] not in cls.not_marking:
            return f"{cls.marker} = {config[cls.marker]!r}"
        found = cls.layout.find(names) if cls.told_by_tensors and cls.layout else ""
        return f"the tensor {found}" if found else ""

    def refusal(self) -> str:
        """Why it cannot be converted, by its configuration; empty if it can."""
        for name, (values, reason) in self.only.items():
            if name in self.config and self.config[name] not in values:
                known = " or ".join(map(repr, values))
                return f"{name} = {self.config[name]!r}: {reason}; only {known} has a counterpart here"
        return self.unsupported_reason()

    @functools.cached_property
    def positions(self) -> Positions:
        """Its positions."""
        return self.find_positions()

    @property
    def legacy_terms(self) -> str | None:
        """Letters of the terms of its self-attention, if Transformers v5 does not have it."""
        scheme = self.positions.scheme
        return None if self.positions.absolute or not isinstance(scheme, str) else LEGACY_TERMS.get(scheme)

    @property
    def has_token_types(self) -> bool:
        """Whether its embeddings depend on token types."""
        return self.token_types and self.config.get("type_vocab_size", 2) != 0

    @property
    def cut(self) -> int:
        """Number of first rows of the absolute position embeddings that no token with a position uses."""
        return int(self.padding() + 1) if self.positions.absolute else 0

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a RelPosBertConfig."""
        ignored, positions = self.ignored_fields(self.config), self.positions
        kept = {key: value for key, value in self.config.items() if key not in {*ignored, *NOT_KEPT}}
        fields = {self.renamed_fields.get(key, key): value for key, value in kept.items()}
        fields["max_position_embeddings"] = fields.get("max_position_embeddings", 512) - self.cut
        more = self.more_fields()
        fields |= more
        if self.read_directly:
            others = {"model_type", "tokenizer_class", *ignored, *self.renamed_fields, *more} & self.config.keys()
            fields["converted_from"] = {name: self.config[name] for name in sorted(others)}
        if layers := self.layers():
            fields["num_hidden_layers"] = len(layers)
        tokenizer = TOKENIZER_MAPPING_NAMES.get(str(self.stock), "BertTokenizer")  # of files that do not name it
        if tokenizer != "BertTokenizer" and not fields.get("tokenizer_class"):
            fields["tokenizer_class"] = tokenizer
        if fields.get("embedding_size") == fields.get("hidden_size", 768):
            fields.pop("embedding_size", None)
        return {
            **fields,
            "position_embedding_type": positions.scheme or STOCK_SCHEME,
            "position_options": positions.options,
            "absolute_position_embeddings": positions.absolute and positions.scheme is not None,
        }

    def folded_shapes(self, base: bool) -> dict[str, torch.Size]:
        """Shapes by stock name of tensors that have no parameter in a RelPosBert and are added to others."""
        if not self.config.get("use_task_id"):
            return {}
        shape = torch.Size((self.config.get("task_type_vocab_size", 3), self.config.get("hidden_size", 768)))
        return {TASK_TYPES if base else f"bert.{TASK_TYPES}": shape}

    def heads(self) -> dict[str, str]:
        """BERT's class by class of the family, for every head that BERT can compute with this configuration."""
        suffixes = self.suffixes
        if self.always_gelu and self.config.get("hidden_act", "gelu") != "gelu":
            suffixes = tuple(suffix for suffix in suffixes if suffix not in OWN_ACTIVATION)
        return {stem + suffix: COUNTERPARTS[suffix] for stem in self.class_prefixes for suffix in suffixes}

    def heads_by_stock(self) -> dict[str, str]:
        """The family's class by class of stock BERT; of two, the first."""
        return {stock: own for own, stock in reversed(self.heads().items())}

    def with_head(self, source: str) -> Self:
        """The same for another head, the class `source` of the family, on which some fields depend."""
        other = copy.copy(self)
        other.config = {**self.config, "architectures": [source]}
        return other

    @property
    def head(self) -> str:
        """Its class, by `with_head`."""
        return first_class(self.config)

    @property
    def architecture(self) -> str:
        """The class of stock BERT with the same outputs as its own."""
        return self.heads()[self.head]

    def rename(self, name: str, base: bool) -> list[str]:
        """The names in stock BERT for a tensor in a file: one, or one for each layer that shares it.

        Args:
            base: for BertModel, which is the encoder itself.
        """
        layers = enumerate(self.layers())
        names = [name.replace(old, f"encoder.layer.{number}.") for number, old in layers if old in name] or [name]
        return [to_stock(each, base, self.parts) for each in names]

    def original_name(self, name: str) -> str:
        """The inverse of `rename` after `pack`, for a family without a class in Transformers; empty for none."""
        if name.startswith("pooler.") and not self.pools:
            return ""
        parts = self.written()
        parts |= {new: old for old, new in self.parts.items() if new not in parts}
        if any(not own and f".{ours}." in f".{name}." for ours, own in parts.items()):
            return ""
        return rename(name, parts)


def first_class(config: Mapping[str, Any]) -> str:
    """The first class that config.json names; empty for none."""
    listed = config.get("architectures") or [""]
    return str(listed if isinstance(listed, str) else listed[0])
