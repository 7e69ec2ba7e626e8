"""Make the configurations of source and result."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..families.checkpoint import FIELD_ERRORS, conversion_errors
from ..families.errors import ConversionError
from ..families.recognition import CheckpointSpec
from ..families.registry import NOT_KEPT
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import DEFAULT_SCHEME, PLAIN_SCHEME, find_scheme, scheme_parts
from ..schemes.scheme import Scheme
from .methods import METHODS, check_scheme


def _from_dict(kind: type[PreTrainedConfig], where: str, saved: Mapping[str, Any], **fields: Any) -> Any:
    """A configuration with the saved fields and the given ones; errors begin with `where`."""
    with conversion_errors(where, FIELD_ERRORS):
        return kind.from_dict({key: value for key, value in saved.items() if key not in NOT_KEPT} | fields)


def stock_config(folder: Path, spec: CheckpointSpec) -> PreTrainedConfig:
    """The configuration of the source for the Transformers class with the same body.

    Raises:
        ConversionError: for values that Transformers rejects.
    """
    return _from_dict(CONFIG_MAPPING[str(spec.family.stock)], f"{folder / 'config.json'}: ", spec.config)


def source_config(folder: Path, spec: CheckpointSpec) -> RelPosBertConfig:
    """The configuration of the source as a RelPosBertConfig, positions included.

    Raises:
        ConversionError: for values that Transformers or the scheme rejects.
    """
    return _from_dict(RelPosBertConfig, f"{folder / 'config.json'}: ", spec.fields, **spec.position_fields)


def target_config(
    folder: Path, spec: CheckpointSpec, source: RelPosBertConfig, given: SimpleNamespace, length: int
) -> RelPosBertConfig:
    """The configuration of the result: one with terms to learn or, for a relative source, perhaps the source's.

    Args:
        folder: folder of the source.
        spec: description of the source.
        source: result of `source_config`.
        given: arguments of `convert` with the method.
        length: tokens of the longest rows that are learnt from; 0 for none.

    Raises:
        ConversionError: for an unknown scheme or option, and a scheme that does not fit the method or the source.
    """
    method, kept = METHODS[given.method], spec.scheme
    if source.conv_kernel_size and method.learns:
        raise ConversionError(
            f"conv_kernel_size = {source.conv_kernel_size}: distil cannot train this convolution; leave the method out"
        )
    name: Any = given.position_embedding_type or (PLAIN_SCHEME if method.learns else kept or DEFAULT_SCHEME)
    scheme = None if name == kept else _find_scheme(name)
    types, options, has_table = name, dict(given.position_options or {}), False
    if scheme is not None and length > source.max_position_embeddings:  # such rows are learnt from
        options = scheme.options_for_length(options, length)
    if spec.absolute:
        known = kept if isinstance(kept, list) else [kept] if kept else []
        if name in known and (method.learns or scheme is not None):
            raise ConversionError(
                f"position_embedding_type = {name!r}: {folder} has this scheme already and keeps it; choose another "
                "one"
            )
        if scheme is None and {**spec.options, **options} != spec.options:
            raise ConversionError(
                f"position_options = {options}: {folder} has this scheme already, with {spec.options}; leave them out"
            )
        if scheme is not None:
            check_scheme(scheme, method)
        if scheme is not None and known:  # a scheme beside the absolute positions stays
            beside: dict[Any, Any] = spec.options if isinstance(kept, list) else {kept: spec.options}
            types, options = [*known, name], {**beside, name: options}
        has_table = method.keeps_table and not (scheme and scheme.learned_input_table)
    fields = spec.fields
    # a method that changes the outputs may add a vector to the embeddings of all tokens
    is_exact = method.exact or (scheme is None and not spec.absolute)
    if fields.get("type_vocab_size") == 0 and not is_exact:
        fields["type_vocab_size"] = 1
    config: RelPosBertConfig = _from_dict(  # errors are about arguments of the caller
        RelPosBertConfig,
        "",
        fields,
        position_embedding_type=types,
        position_options=spec.options if scheme is None and (spec.absolute or not options) else options,
        absolute_position_embeddings=has_table,
    )
    if spec.absolute:
        return config
    if same_positions(source, config):
        if not method.learns:
            return source
        raise ConversionError(
            f"position_embedding_type = {name!r}: the source has it already; choose another scheme or other options"
        )
    if not method.learns:
        raise ConversionError(
            f"position_embedding_type = {name!r}, position_options = {options}: method = {given.method!r} keeps the "
            f"source's scheme {source.position_embedding_type!r}; method = 'distil' learns another one from text"
        )
    check_scheme(scheme or _find_scheme(name), method)
    return config


def _find_scheme(name: Any) -> type[Scheme]:
    """The scheme of that name.

    Raises:
        ValueError: for an unknown scheme, and several schemes.
    """
    if isinstance(name, list):
        raise ConversionError(f"position_embedding_type = {name!r}: give one scheme, not a list")
    return find_scheme(name)


def same_positions(one: RelPosBertConfig, other: RelPosBertConfig) -> bool:
    """Whether two configurations have the same scheme with tables of the same shapes."""

    def positions(config: RelPosBertConfig) -> tuple[Any, ...]:
        settings = [settings for _, settings in scheme_parts(config)]
        return config.position_embedding_type, config.max_position_embeddings, settings

    return positions(one) == positions(other)


def resolved_options(config: RelPosBertConfig) -> dict[str, Any]:
    """The options of a scheme with their defaults; for a combination, by scheme."""
    parts = {scheme.name: options for scheme, options in scheme_parts(config)}
    return parts if isinstance(config.position_embedding_type, list) else parts[config.position_embedding_type]
