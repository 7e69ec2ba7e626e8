"""Recognise the family, positions and head of a checkpoint from config.json and the names of its tensors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.errors import ConversionError, UnsupportedError, abbreviate, conversion_errors
from ..checkpoints.privacy import without_local_paths
from ..checkpoints.weights import tensor_names
from ..models.checks import ARGUMENTS, FIELDS, Rule, check_rules, integer
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import STOCK_SCHEME
from .bert import Own
from .family import LEGACY_TYPES, NAME_OR_NAMES, PRETRAINING, Family, first_class
from .names import is_scheme, is_table
from .registry import FAMILIES, family_of, resemblance


OBJECT = Rule(lambda value: not value or isinstance(value, Mapping), "an object, or null")
# Fields of all families that are computed with before RelPosBertConfig checks the result; `Family.types` has others.
TYPES = {
    **{name: FIELDS[name] for name in ("hidden_size", "num_hidden_layers", "max_position_embeddings")},
    "num_attention_heads": integer(1),
    "model_type": Rule(lambda value: isinstance(value, str), "a string"),
    "architectures": NAME_OR_NAMES,
    "attn_implementation": ARGUMENTS["attn_implementation"],
    "_attn_implementation": ARGUMENTS["_attn_implementation"],
    "rope_parameters": OBJECT,
    "rope_scaling": OBJECT,
}


def recognise(folder: Path, config: Mapping[str, Any], names: Iterable[str] = ()) -> Family:
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
        return Own(config, folder)
    if model_type not in FAMILIES:
        known = ", ".join((*FAMILIES, RelPosBertConfig.model_type))
        reason = f"model_type = {model_type!r} is not read here (`hf-relpos families`)"
        raise UnsupportedError(f"{folder}: {reason}; known: {known}{_hint(folder, config)}")
    names = list(names)
    name, mark = family_of(config, names)
    family = FAMILIES[name]
    with conversion_errors(f"{folder / 'config.json'}: "):
        renamed = {own: {**FIELDS, **TYPES}[ours] for own, ours in family.renamed_fields.items()}
        check_rules({**renamed, **family.types}, config.items())
    spec = family({**family.all_defaults(), **without_local_paths(config)}, folder)
    spec.config |= spec.infer_from_tensors(names)
    if reason := spec.refusal():
        raise UnsupportedError(f"{folder}: {mark}, {reason}")
    kind = config.get("position_embedding_type") or STOCK_SCHEME
    absolute, legacy = spec.positions.absolute, kind in spec.legacy_types
    spec.evidence = f"position_embedding_type = {kind!r}" if absolute or legacy else mark
    if kind not in (STOCK_SCHEME, spec.positions.scheme) and "position_embedding_type" not in spec.only:
        if not absolute:
            other = f"position_embedding_type = {kind!r} something else"
            raise ConversionError(f"{folder}: {mark}, and {other}; correct config.json")
        known = abbreviate(map(repr, [STOCK_SCHEME, *spec.legacy_types]))
        reason = f"of model_type = {model_type!r}, only {known} positions can be converted"
        raise UnsupportedError(f"{folder}: {spec.evidence}; {reason}{_hint(folder, config)}")
    if absolute and not isinstance(pad := spec.padding(), int):
        raise ConversionError(f"{folder}: pad_token_id = {pad!r}; set it in config.json: position ids begin after it")
    _check_names(spec, names)
    return spec


def _hint(folder: Path, config: Mapping[str, Any]) -> str:
    """A sentence about the layout of the weights for the end of an error; empty for an unknown layout."""
    looks = resemblance(tensor_names(folder), folder, config.get("model_type", "bert"))
    return f". {looks}" if looks else ""


def _check_names(spec: Family, names: list[str]) -> None:
    """
    Raises:
        ConversionError: for tensors that a field excludes, missing relative tables, relative tables with an absolute
            configuration, and position tables in a family whose positions are computed.
    """
    for name, (default, part) in spec.implied_fields.items():
        value, found = spec.config.get(name, default), [each for each in names if part in each]
        if found and not value:
            both = f"{name} = {value!r}, but the weights have {abbreviate(found, 1)}"
            raise ConversionError(f"{spec.folder}: {both}; correct config.json or restore the file")
    relative, legacy = [name for name in names if is_scheme(name)], spec.legacy_terms
    if spec.computes_positions:
        if tables := [name for name in names if is_table(name) or is_scheme(name)]:
            reason = f"{spec.evidence}, whose positions are computed, but the weights hold {abbreviate(tables, 1)}"
            raise UnsupportedError(f"{spec.folder}: {reason}; correct config.json or restore the file")
    elif legacy is None and relative:
        reason = f"the weights have tables of distances ({abbreviate(relative, 1)}), so it is relative already"
        remedy = f"set position_embedding_type in config.json to {' or '.join(map(repr, LEGACY_TYPES))}"
        raise ConversionError(f"{spec.folder}: {reason}; {remedy}, whichever it was trained with")
    elif legacy is not None and names and not relative:
        remedy = resemblance(names, spec.folder, spec.config.get("model_type", "bert")) or (
            "Stock Transformers v5 drops them when it loads and saves such a checkpoint: go back to the original files"
        )
        raise ConversionError(f"{spec.folder}: {spec.evidence}, but the weights have no tables of distances. {remedy}")


UNNAMED = "config.json names no class; to keep a head, name its class with architecture (--architecture)"


def choose_head(spec: Family, architecture: str | None = None) -> tuple[Family, str]:
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
    heads, prefixes = spec.heads(), spec.class_prefixes
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
    remedy = f"pass architecture={base!r} to convert the encoder without its head"
    raise ConversionError(f"{spec.folder}: architectures = {named!r} {known}; {remedy}")
