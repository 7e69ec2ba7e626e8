"""Recognise the family, positions and head of a checkpoint from config.json and the names of its tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..checkpoints.errors import ConversionError, UnsupportedError, abbreviate, conversion_errors
from ..checkpoints.privacy import without_local_paths
from ..checkpoints.weights import tensor_names
from ..models.checks import ARGUMENTS, FIELDS, NAMES, Rule, check_rules, integer, number
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import STOCK_SCHEME
from .family import LEGACY_TERMS, LEGACY_TYPES, PRETRAINING, TASK_TYPES, Family, Positions, first_class
from .joints import Tensors, join, split
from .names import is_scheme, is_table, rename, to_stock
from .registry import FAMILIES, NOT_KEPT, OWN, defaults_of, dropped_fields, family_of, resemblance


# What a configuration raises for its fields.
FIELD_ERRORS = (StrictDataclassError, TypeError, ValueError)
OBJECT = Rule(lambda value: value is None or isinstance(value, Mapping), "an object, or null")
BASE = number(1, 1e12, optional=True)
NAME_OR_NAMES = Rule(lambda value: isinstance(value, str) or NAMES.accepts(value), "a string, or a list of strings")
# Fields of any family that are computed with before RelPosBertConfig checks the result.
TYPES = {
    **{name: FIELDS[name] for name in ("hidden_size", "num_hidden_layers", "max_position_embeddings")},
    **{name: integer(1) for name in ("num_attention_heads", "num_hidden_groups", "inner_group_num")},
    "model_type": Rule(lambda value: isinstance(value, str), "a string"),
    "architectures": NAME_OR_NAMES,
    "attn_implementation": ARGUMENTS["attn_implementation"],
    "_attn_implementation": ARGUMENTS["_attn_implementation"],
    "conv_kernel_size": integer(-1, optional=True),
    "max_relative_positions": integer(-1),
    "clamp_len": integer(-1, optional=True),
    "pos_att_type": NAME_OR_NAMES,
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
    "rope_theta": BASE,
    "rotary_emb_base": BASE,
    "rotary_emb_fraction": number(0, 1),
    "rotary_scaling_factor": number(0, 1e6, optional=True),
}


@dataclass(frozen=True)
class CheckpointSpec:
    """The description of a checkpoint by its family and configuration.

    Attributes:
        folder: folder of the checkpoint, downloaded if it is on the Hub.
        family: value of `FAMILIES`, or `OWN`.
        evidence: the field that determines its positions, and its value.
        absolute: whether absolute position embeddings are added to the input.
        scheme: key of `hf_relpos.SCHEMES`, or several combined schemes; None for no relative positions.
        options: options of the scheme.
        config: config.json, completed with the family's defaults.
    """

    folder: Path
    family: Family
    evidence: str
    absolute: bool
    scheme: str | list[str] | None
    options: dict[str, Any]
    config: dict[str, Any]

    @property
    def legacy_terms(self) -> str | None:
        """Letters of the terms of its self-attention, if Transformers v5 does not have it."""
        if self.family is OWN or self.absolute or not isinstance(self.scheme, str):
            return None
        return LEGACY_TERMS.get(self.scheme)

    @property
    def has_token_types(self) -> bool:
        """Whether its embeddings depend on token types."""
        return self.family.token_types and self.config.get("type_vocab_size", 2) != 0

    @property
    def cut(self) -> int:
        """Number of first rows of the absolute position embeddings that no token with a position uses."""
        return self.family.padding(self.config) + 1 if self.absolute and self.family.padding else 0

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a RelPosBertConfig."""
        family = self.family
        dropped = dropped_fields(family, self.config)
        kept = {key: value for key, value in self.config.items() if key not in {*dropped, *NOT_KEPT}}
        fields = {family.renamed_fields.get(key, key): value for key, value in kept.items()}
        fields["max_position_embeddings"] = fields.get("max_position_embeddings", 512) - self.cut
        own = family.fields(self.config)
        fields |= own
        if family.read_directly:
            others = ("model_type", "tokenizer_class", *dropped, *family.renamed_fields, *own)
            fields["converted_from"] = {name: self.config[name] for name in others if name in self.config}
        if family.layers:
            fields["num_hidden_layers"] = len(family.layers(self.config))
        if family.tokenizer and not fields.get("tokenizer_class"):
            fields["tokenizer_class"] = family.tokenizer
        if fields.get("embedding_size") == fields.get("hidden_size", 768):
            fields.pop("embedding_size", None)
        return {
            **fields,
            "position_embedding_type": self.scheme or STOCK_SCHEME,
            "position_options": self.options,
            "absolute_position_embeddings": self.absolute and self.scheme is not None,
        }

    def folded_shapes(self, base: bool) -> dict[str, torch.Size]:
        """Shapes by stock name of tensors that have no parameter in a RelPosBert and are added to others."""
        if not self.config.get("use_task_id"):
            return {}
        shape = torch.Size((self.config.get("task_type_vocab_size", 3), self.config.get("hidden_size", 768)))
        return {TASK_TYPES if base else f"bert.{TASK_TYPES}": shape}

    def with_head(self, source: str) -> "CheckpointSpec":
        """The same for another head, the class `source` of the family, on which some fields depend."""
        return replace(self, config={**self.config, "architectures": [source]})

    @property
    def head(self) -> str:
        """Its class, by `with_head`."""
        return first_class(self.config)

    @property
    def architecture(self) -> str:
        """The class of stock BERT with the same outputs as its own."""
        return self.family.heads(self.config)[self.head]

    def heads_by_stock(self) -> dict[str, str]:
        """The family's class by class of stock BERT; of two, the first."""
        return {stock: own for own, stock in reversed(self.family.heads(self.config).items())}

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Convert tensors, by their names in a file, to tensors that correspond to BERT's one to one.

        Raises:
            ConversionError: for a shape that does not fit the configuration.
        """
        joints = self.family.joints(self.config)
        return split(joints, self.config, self.family.unpack(self.config, dict(tensors)))

    def pack(self, tensors: Tensors) -> Tensors:
        """The inverse of `unpack`."""
        joints = self.family.joints(self.config)
        return self.family.pack(self.config, join(joints, self.config, tensors))

    def rename(self, name: str, base: bool) -> list[str]:
        """The names in stock BERT for a tensor in a file: one, or one for each layer that shares it.

        Args:
            base: for BertModel, which is the encoder itself.
        """
        names, family = [name], self.family
        if family.layers:
            shared = enumerate(family.layers(self.config))
            names = [name.replace(old, f"encoder.layer.{number}.") for number, old in shared if old in name] or names
        return [to_stock(each, base, family.parts, family.of_layers(self.config)) for each in names]

    def original_name(self, name: str) -> str:
        """The inverse of `rename` after `pack`, for a family without a class in Transformers; empty for none."""
        family, config = self.family, self.config
        if name.startswith("pooler.") and not family.pools:
            return ""
        parts = family.written(config)
        parts |= {new: old for old, new in family.parts.items() if new not in parts}
        if any(not own and f".{ours}." in f".{name}." for ours, own in parts.items()):
            return ""
        return rename(name, parts, {new: old for old, new in family.of_layers(config).items()})


def recognise(folder: Path, config: Mapping[str, Any], names: Iterable[str] = ()) -> CheckpointSpec:
    """Determine family and positions of a checkpoint from config.json, and from tensors if that is misleading.

    Args:
        folder: folder of the checkpoint.
        config: content of config.json.
        names: names of the tensors in its files; () if not known.

    Raises:
        UnsupportedError: for an unknown architecture or kind of positions, and a configuration that the family does
            not support.
        ConversionError: for a configuration that contradicts itself.
    """
    with conversion_errors(f"{folder / 'config.json'}: "):
        check_rules(TYPES, config.items())
    model_type = config.get("model_type", "bert")  # the first BERT files lack it
    if model_type == RelPosBertConfig.model_type:
        return _recognise_own(folder, config)
    if model_type not in FAMILIES:
        known = ", ".join((*FAMILIES, RelPosBertConfig.model_type))
        raise UnsupportedError(
            f"{folder}: model_type = {model_type!r} is not read here (`hf-relpos families`); known: {known}"
            f"{_hint(folder, config)}"
        )
    names = list(names)
    kind_of_files, mark = family_of(config, names)
    family = FAMILIES[kind_of_files]
    with conversion_errors(f"{folder / 'config.json'}: "):
        check_rules({own: {**FIELDS, **TYPES}[ours] for own, ours in family.renamed_fields.items()}, config.items())
    kind = config.get("position_embedding_type") or STOCK_SCHEME
    completed = {**defaults_of(kind_of_files), **without_local_paths(config)}
    completed |= family.infer_from_tensors(completed, names)
    legacy = kind in family.legacy_types
    if reason := family.refusal(completed):
        raise UnsupportedError(f"{folder}: {mark}, {reason}")
    positions = Positions(absolute=False, scheme=kind) if legacy else family.positions(completed)
    absolute = positions.absolute
    evidence = f"position_embedding_type = {kind!r}" if absolute or legacy else mark
    is_known = legacy or kind in (STOCK_SCHEME, positions.scheme) or "position_embedding_type" in family.only
    if not is_known:
        if not absolute:
            raise ConversionError(
                f"{folder}: {mark}, and position_embedding_type = {kind!r} something else; correct config.json"
            )
        known = abbreviate(map(repr, [STOCK_SCHEME, *family.legacy_types]))
        raise UnsupportedError(
            f"{folder}: {evidence}; of model_type = {model_type!r}, only checkpoints with {known} positions can be "
            f"converted{_hint(folder, config)}"
        )
    if absolute and family.padding and not isinstance(pad := family.padding(completed), int):
        raise ConversionError(
            f"{folder}: pad_token_id = {pad!r}, and position ids begin after it; set it in config.json"
        )
    spec = CheckpointSpec(folder, family, evidence, absolute, positions.scheme, positions.options, completed)
    _check_names(spec, names)
    return spec


def _recognise_own(folder: Path, config: Mapping[str, Any]) -> CheckpointSpec:
    """Positions of a checkpoint of this package.

    Raises:
        ConversionError: for an invalid configuration, positions that need other inputs than tokens, and absolute
            position embeddings that are combined with other schemes.
    """
    kept = {key: value for key, value in without_local_paths(config).items() if key != "auto_map"}
    with conversion_errors(f"{folder / 'config.json'}: ", FIELD_ERRORS):
        own = RelPosBertConfig.from_dict(kept)
    name = own.position_embedding_type
    evidence = f"position_embedding_type = {name!r}"
    if own.required_inputs:
        raise ConversionError(
            f"{folder}: {evidence} needs inputs besides the tokens ({', '.join(sorted(own.required_inputs))}), which "
            "no method of conversion has; only one that needs none can be converted"
        )
    if isinstance(name, list) and STOCK_SCHEME in name:
        raise ConversionError(f"{folder}: {evidence}: with {STOCK_SCHEME!r} in a combination it cannot be converted")
    scheme = None if name == STOCK_SCHEME else name
    return CheckpointSpec(
        folder, OWN, evidence, own.has_absolute_table, scheme, dict(own.position_options or {}), kept
    )


def _hint(folder: Path, config: Mapping[str, Any]) -> str:
    """A sentence about the layout of the weights for the end of an error; empty for an unknown layout."""
    looks = resemblance(tensor_names(folder), folder, config.get("model_type", "bert"))
    return f". {looks}" if looks else ""


def _check_names(spec: CheckpointSpec, names: list[str]) -> None:
    """
    Raises:
        ConversionError: for tensors that a field excludes, missing relative tables, relative tables with an absolute
            configuration, and position tables in a family whose positions are computed.
    """
    for name, (default, part) in spec.family.implied_fields.items():
        value, found = spec.config.get(name, default), [each for each in names if part in each]
        if found and not value:
            raise ConversionError(
                f"{spec.folder}: {name} = {value!r}, but the weights have {abbreviate(found, 1)}; correct config.json "
                "or restore the file"
            )
    relative, legacy = [name for name in names if is_scheme(name)], spec.legacy_terms
    if spec.family.computes_positions:
        if tables := [name for name in names if is_table(name) or is_scheme(name)]:
            raise UnsupportedError(
                f"{spec.folder}: {spec.evidence}, whose positions are computed, but the weights hold "
                f"{abbreviate(tables, 1)}: they belong to another model; correct config.json or restore the file"
            )
    elif legacy is None and relative:
        raise ConversionError(
            f"{spec.folder}: the weights have tables of distances ({abbreviate(relative, 1)}), so the checkpoint is "
            "relative already; set position_embedding_type in config.json to "
            f"{' or '.join(map(repr, LEGACY_TYPES))}, whichever it was trained with"
        )
    elif legacy is not None and names and not relative:
        remedy = resemblance(names, spec.folder, spec.config.get("model_type", "bert")) or (
            "Stock Transformers v5 drops them when it loads and saves such a checkpoint: go back to the original files"
        )
        raise ConversionError(f"{spec.folder}: {spec.evidence}, but the weights have no tables of distances. {remedy}")


UNNAMED = "config.json names no class; to keep a head, name its class with architecture (--architecture)"


def choose_head(spec: CheckpointSpec, architecture: str | None = None) -> tuple[CheckpointSpec, str]:
    """The description of the source with the head to convert; a pre-training head that BERT does not have is dropped.

    Args:
        spec: description of the source.
        architecture: class of the source or of stock BERT; None for the first of `config.architectures`.

    Returns:
        The description, and a note on tensors of a head that is dropped; empty for none.

    Raises:
        ConversionError: for a class of another family, a head with other outputs than BERT's, and a given head that
            BERT does not have.
    """
    heads, prefixes = spec.family.heads(spec.config), spec.family.class_prefixes
    known = f"has no counterpart here; known: {', '.join(heads)}"
    if architecture is not None:
        own = architecture if architecture in heads else spec.heads_by_stock().get(architecture)
        if own is None:
            raise ConversionError(f"architecture = {architecture!r} {known}")
        return spec.with_head(own), ""
    named, base = first_class(spec.config), f"{prefixes[0]}Model"
    if not named or named in heads:
        return spec.with_head(named or base), "" if named else UNNAMED
    if prefixes != ("Bert",) and named.startswith(prefixes) and named.endswith(PRETRAINING):
        return spec.with_head(base), f"the head of {named}, which BERT does not have"
    raise ConversionError(
        f"{spec.folder}: architectures = {named!r} {known}; pass architecture={base!r} to convert the encoder without "
        "its head"
    )
