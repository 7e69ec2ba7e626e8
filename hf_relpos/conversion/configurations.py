"""Make the configurations of source and result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..families.errors import ConversionError
from ..families.loading import NOT_KEPT
from ..families.recognition import CheckpointSpec
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import DEFAULT_SCHEME, STOCK_SCHEME, find_scheme, scheme_parts
from ..schemes.scheme import Scheme
from .build import same_positions
from .methods import Method, check_scheme


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
    return _from_dict(CONFIG_MAPPING[spec.family.stock], f"{folder / 'config.json'}: ", spec.config)


def source_config(folder: Path, spec: CheckpointSpec) -> RelPosBertConfig:
    """The configuration of the source as a RelPosBertConfig, positions included.

    Raises:
        ConversionError: for values that Transformers or the scheme rejects.
    """
    return _from_dict(
        RelPosBertConfig,
        f"{folder / 'config.json'}: ",
        spec.fields,
        position_embedding_type=spec.scheme or STOCK_SCHEME,
        position_options=spec.options,
        absolute_position_embeddings=spec.absolute and spec.scheme is not None,
    )


def target_config(
    folder: Path,
    spec: CheckpointSpec,
    source: RelPosBertConfig,
    position_embedding_type: str | None,
    position_options: Mapping[str, Any] | None,
    method: Method,
    method_options: Any,
) -> RelPosBertConfig:
    """The configuration of the result.

    Args:
        folder: folder of the source.
        spec: description of the source.
        source: result of `source_config`.
        position_embedding_type: scheme from the caller; None for the default.
        position_options: options of the scheme from the caller.
        method: method of the conversion.
        method_options: an instance of the method's `options_type`.

    Raises:
        ConversionError: for an unknown scheme or option, and a scheme that does not fit the method or the source.
    """
    if position_options is not None and not isinstance(position_options, Mapping):
        raise ConversionError(
            f"position_options = {position_options!r} is not a mapping; give option names and values, such as "
            "{'clip': 32}"
        )
    if source.conv_kernel_size and method.learns:
        raise ConversionError(
            f"conv_kernel_size = {source.conv_kernel_size}: layers are fitted one after the other, and none of them "
            "holds this convolution; convert without a method, which is exact"
        )
    options = dict(position_options or {})
    if not spec.absolute:
        return _relative_config(spec, source, position_embedding_type, options, method, method_options)
    kept = spec.scheme if getattr(method_options, "own_bias", None) != "drop" else None
    name: Any = position_embedding_type or method.default_scheme or kept or DEFAULT_SCHEME
    if name in ([kept] if isinstance(kept, str) else kept or []) and method.learns:
        raise ConversionError(
            f"position_embedding_type = {name!r}: {folder} has this scheme already, and keeps it; choose another one "
            "to fit, or drop its own with method_options = {'own_bias': 'drop'}"
        )
    scheme = None if name == kept else _find_scheme(name)
    if scheme is not None:
        check_scheme(scheme, method)
        options = _options_for_length(scheme, options, source, method, method_options)
    types: str | list[str] = name
    if name == kept:
        if options and {**spec.options, **options} != spec.options:
            raise ConversionError(
                f"position_options = {options}: {folder} has this scheme already, with the options {spec.options}; "
                "leave them out, or drop its own with method = 'drop' and method_options = {'own_bias': 'drop'}"
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
    fields = _with_token_types(spec.fields, method)
    return _from_dict(  # errors are about arguments of the caller
        RelPosBertConfig,
        "",
        fields,
        position_embedding_type=types,
        position_options=options,
        absolute_position_embeddings=method.keeps_table and not (scheme and scheme.learned_input_table),
    )


def _relative_config(
    spec: CheckpointSpec,
    source: RelPosBertConfig,
    position_embedding_type: str | None,
    position_options: dict[str, Any],
    method: Method,
    method_options: Any,
) -> RelPosBertConfig:
    """The configuration of a result whose source is relative already: the source's, or one with other tables.

    Raises:
        ConversionError: for an invalid scheme, option or size.
    """
    name: Any = position_embedding_type or method.default_scheme or spec.scheme
    size = getattr(method_options, "max_position_embeddings", None) or source.max_position_embeddings
    if name != spec.scheme:
        position_options = _options_for_length(_find_scheme(name), position_options, source, method, method_options)
    config = _from_dict(
        RelPosBertConfig,
        "",
        spec.fields if name == spec.scheme else _with_token_types(spec.fields, method),
        position_embedding_type=name,
        position_options=position_options or (spec.options if name == spec.scheme else {}),
        max_position_embeddings=size,
        absolute_position_embeddings=False,
    )
    if same_positions(source, config):
        if not method.learns:
            return source
        raise ConversionError(
            f"position_embedding_type = {name!r}: the source has these positions already, nothing is to be fitted; "
            "choose another scheme or other options"
        )
    check_scheme(_find_scheme(name), method)
    return config


def _options_for_length(
    scheme: type[Scheme],
    options: Mapping[str, Any],
    source: RelPosBertConfig,
    method: Method,
    method_options: Any,
) -> dict[str, Any]:
    """Options of the scheme, extended to rows past the source's maximum length if the method fits such rows."""
    length = getattr(method_options, "length", None)
    if not method.learns or length is None or length <= source.max_position_embeddings:
        return dict(options)
    return scheme.reaching(options, length)


def _with_token_types(fields: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """The fields with at least one token type, to which a method that changes outputs may add a vector."""
    changed = {} if method.exact or fields.get("type_vocab_size") != 0 else {"type_vocab_size": 1}
    return {**fields, **changed}


def _find_scheme(name: Any) -> type[Scheme]:
    """The scheme of that name.

    Raises:
        ConversionError: for an unknown scheme, and several schemes.
    """
    if isinstance(name, list):
        raise ConversionError(f"position_embedding_type = {name!r}: give one scheme, not several")
    try:
        return find_scheme(name)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def resolved_options(config: RelPosBertConfig) -> dict[str, Any]:
    """The options of a scheme with their defaults; for a combination, by scheme."""
    parts = {scheme.name: options for scheme, options in scheme_parts(config)}
    return parts if isinstance(config.position_embedding_type, list) else parts[config.position_embedding_type]
