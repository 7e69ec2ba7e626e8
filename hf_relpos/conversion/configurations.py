"""Make the configurations of source and result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..families.checkpoint import conversion_errors
from ..families.errors import ConversionError
from ..families.loading import NOT_KEPT
from ..families.recognition import CheckpointSpec
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import DEFAULT_SCHEME, PLAIN_SCHEME, find_scheme, scheme_parts
from ..schemes.scheme import Scheme
from .methods import METHODS, Arguments, check_scheme


def _from_dict(kind: type[PreTrainedConfig], where: str, saved: Mapping[str, Any], **fields: Any) -> Any:
    """A configuration with the saved fields and the given ones; errors begin with `where`."""
    try:
        return kind.from_dict({key: value for key, value in saved.items() if key not in NOT_KEPT} | fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"{where}{error}") from error


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
    folder: Path, spec: CheckpointSpec, source: RelPosBertConfig, given: Arguments, method_options: Any
) -> RelPosBertConfig:
    """The configuration of the result.

    Args:
        folder: folder of the source.
        spec: description of the source.
        source: result of `source_config`.
        given: arguments of `convert` with the method.
        method_options: an instance of the method's `options_type`.

    Raises:
        ConversionError: for an unknown scheme or option, and a scheme that does not fit the method or the source.
    """
    method, given_options = METHODS[given.method], given.position_options
    if given_options is not None and not isinstance(given_options, Mapping):
        raise ConversionError(
            f"position_options = {given_options!r} is not a mapping; give names and values, such as {{'clip': 32}}"
        )
    if source.conv_kernel_size and method.learns:
        raise ConversionError(
            f"conv_kernel_size = {source.conv_kernel_size}: this convolution is not part of any layer, so distil "
            "cannot train it; convert without a method, which is exact"
        )
    name: Any = given.position_embedding_type or (PLAIN_SCHEME if method.learns else None)
    if not spec.absolute:
        return _relative_config(spec, source, name or spec.scheme, given, method_options)
    kept = spec.scheme
    name = name or kept or DEFAULT_SCHEME
    if name in ([kept] if isinstance(kept, str) else kept or []) and method.learns:
        raise ConversionError(
            f"position_embedding_type = {name!r}: {folder} has this scheme already and keeps it; choose another one "
            "to train"
        )
    scheme = None if name == kept else _find_scheme(name)
    options, types = dict(given_options or {}), name
    if scheme is not None:
        check_scheme(scheme, method)
        options = _for_length(scheme, options, source, method_options)
    if name == kept:
        if options and {**spec.options, **options} != spec.options:
            raise ConversionError(
                f"position_options = {options}: {folder} has this scheme already, with the options {spec.options}; "
                "leave position_options out"
            )
        options = spec.options
    elif isinstance(kept, list):
        if name in kept:
            raise ConversionError(
                f"position_embedding_type = {name!r}: {folder} has this scheme already, in {kept}; choose another one"
            )
        types, options = [*kept, name], {**spec.options, name: options}
    elif kept is not None:
        types, options = [kept, name], {kept: spec.options, name: options}
    return _from_dict(  # errors are about arguments of the caller
        RelPosBertConfig,
        "",
        _with_token_types(spec.fields, method.exact),
        position_embedding_type=types,
        position_options=options,
        absolute_position_embeddings=method.keeps_table and not (scheme and scheme.learned_input_table),
    )


def _relative_config(
    spec: CheckpointSpec, source: RelPosBertConfig, name: Any, given: Arguments, method_options: Any
) -> RelPosBertConfig:
    """The configuration of a result whose source is relative already: the source's, or one with terms to learn.

    Args:
        name: scheme of the result.

    The others are those of `target_config`.

    Raises:
        ConversionError: for an invalid scheme, option or size.
    """
    method, is_own = METHODS[given.method], name == spec.scheme
    options = dict(given.position_options or {})
    if not is_own:
        options = _for_length(_find_scheme(name), options, source, method_options)
    config = _from_dict(
        RelPosBertConfig,
        "",
        spec.fields if is_own else _with_token_types(spec.fields, method.exact),
        position_embedding_type=name,
        position_options=options or (spec.options if is_own else {}),
        absolute_position_embeddings=False,
    )
    if same_positions(source, config):
        if not method.learns:
            return source
        raise ConversionError(
            f"position_embedding_type = {name!r}: the source has these positions already, so there is nothing to "
            "train; choose another scheme or other options"
        )
    if not method.learns:
        raise ConversionError(
            f"position_embedding_type = {name!r}, position_options = {options}: method = {given.method!r} keeps the "
            f"source's scheme {source.position_embedding_type!r}; method = 'distil' learns another one from text"
        )
    check_scheme(_find_scheme(name), method)
    return config


def _for_length(
    scheme: type[Scheme], options: dict[str, Any], source: RelPosBertConfig, method_options: Any
) -> dict[str, Any]:
    """Options of the scheme, extended to rows past the source's maximum length if such rows are learnt from."""
    length = getattr(method_options, "length", None) or 0
    return scheme.options_for_length(options, length) if length > source.max_position_embeddings else options


def _with_token_types(fields: Mapping[str, Any], exact: bool) -> dict[str, Any]:
    """The fields with at least one token type, to which a method that changes outputs may add a vector."""
    changed = {} if exact or fields.get("type_vocab_size") != 0 else {"type_vocab_size": 1}
    return {**fields, **changed}


def _find_scheme(name: Any) -> type[Scheme]:
    """The scheme of that name.

    Raises:
        ConversionError: for an unknown scheme, and several schemes.
    """
    if isinstance(name, list):
        raise ConversionError(f"position_embedding_type = {name!r}: give one scheme, not a list")
    with conversion_errors():
        return find_scheme(name)


def same_positions(one: RelPosBertConfig, other: RelPosBertConfig) -> bool:
    """Whether two configurations have the same scheme with tables of the same shapes."""
    return all(
        value(one) == value(other)
        for value in (
            lambda config: config.position_embedding_type,
            lambda config: config.max_position_embeddings,
            lambda config: [settings for _, settings in scheme_parts(config)],
        )
    )


def resolved_options(config: RelPosBertConfig) -> dict[str, Any]:
    """The options of a scheme with their defaults; for a combination, by scheme."""
    parts = {scheme.name: options for scheme, options in scheme_parts(config)}
    return parts if isinstance(config.position_embedding_type, list) else parts[config.position_embedding_type]
