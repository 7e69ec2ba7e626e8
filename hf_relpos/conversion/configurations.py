"""The configurations of source and result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.errors import ConversionError, conversion_errors
from ..checkpoints.files import check_config, read_json
from ..families.family import FIELD_ERRORS, Family
from ..models.checks import without_kernels
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import DEFAULT_SCHEME, PLAIN_SCHEME, find_scheme, scheme_parts
from ..schemes.scheme import Scheme
from .methods import Method, check_scheme


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint.

    Raises:
        ValueError: for a folder without a readable config.json, and a quantised model.
    """
    path, adapter = folder / "config.json", folder / "adapter_config.json"
    if adapter.is_file() and not path.is_file():
        what = f"{folder}: is an adapter (LoRA) of {read_json(adapter).get('base_model_name_or_path')}"
        raise ConversionError(f"{what}; merge it first, by PEFT's merge_and_unload(), and save the model")
    check_config(folder)
    config = without_kernels(read_json(path), path)
    if config.get("quantization_config"):
        raise ConversionError(f"{folder}: quantization_config is set; convert the checkpoint that it was made from")
    return config


def source_config(spec: Family) -> RelPosBertConfig:
    """The configuration of the source as a RelPosBertConfig, positions included.

    Raises:
        ConversionError: for values that Transformers or the scheme rejects.
    """
    with conversion_errors(f"{spec.folder / 'config.json'}: ", FIELD_ERRORS):
        config: RelPosBertConfig = RelPosBertConfig.from_dict(spec.fields)
    return config


def target_config(
    spec: Family,
    source: RelPosBertConfig,
    name: Any,
    position_options: Mapping[str, Any] | None,
    method: Method,
    method_options: Mapping[str, Any],
) -> RelPosBertConfig:
    """The configuration of the result: one with terms to learn or, for a relative source, perhaps the source's.

    Args:
        spec: description of the source.
        source: result of `source_config`.
        name: `position_embedding_type` of `convert`.
        position_options: likewise.
        method: the method.
        method_options: its options, with defaults.

    Raises:
        ConversionError: for an unknown scheme or option, and a scheme that does not fit the method or the source.
    """
    positions, limit = spec.positions, source.max_position_embeddings
    kept = positions.scheme
    length = method_options.get("length") or limit
    if source.conv_kernel_size and method.learns:
        size = source.conv_kernel_size
        raise ConversionError(f"conv_kernel_size = {size}: distil cannot train it; leave the method out")
    name = name or (PLAIN_SCHEME if method.learns else kept or DEFAULT_SCHEME)
    scheme = None if name == kept else _find_scheme(name)
    has_it = f"position_embedding_type = {name!r}: {spec.folder} has it already; choose another scheme, or options"
    types, options, has_table = name, dict(position_options or {}), False
    if scheme is not None and length > limit:  # such rows are learnt from
        options = scheme.options_for_length(options, length)
    if positions.absolute:
        known = kept if isinstance(kept, list) else [kept] if kept else []
        if name in known and (method.learns or scheme is not None):
            raise ConversionError(has_it)
        if scheme is None and {**positions.options, **options} != positions.options:
            raise ConversionError(f"position_options = {options}: the source has {positions.options}; leave them out")
        if scheme is not None:
            check_scheme(scheme, method)
        if scheme is not None and known:  # a scheme beside the absolute positions stays
            beside: dict[Any, Any] = positions.options if isinstance(kept, list) else {kept: positions.options}
            types, options = [*known, name], {**beside, name: options}
        has_table = method.exact and not (scheme and scheme.learned_input_table)
    fields = spec.fields
    # a method that changes the outputs may add a vector to the embeddings of all tokens
    is_exact = method.exact or (scheme is None and not positions.absolute)
    if fields.get("type_vocab_size") == 0 and not is_exact:
        fields["type_vocab_size"] = 1
    fields |= {"position_embedding_type": types, "absolute_position_embeddings": has_table}
    if scheme is not None or (options and not positions.absolute):
        fields["position_options"] = options
    if method_options.get("window") or length > limit:
        # with a window, all distances are frequent in the training on long rows, which cost less
        fields["attention_window"] = method_options["window"] or max(1, limit // 2)
    with conversion_errors(kinds=FIELD_ERRORS):  # about arguments of the caller
        config: RelPosBertConfig = RelPosBertConfig.from_dict(fields)
    if positions.absolute:
        return config
    if same_positions(source, config):
        if not method.learns:
            return source
        raise ConversionError(has_it)
    if not method.learns:
        kept = f"method = 'exact' keeps the source's {source.position_embedding_type!r}"
        given = f"position_embedding_type = {name!r}, position_options = {options}"
        raise ConversionError(f"{given}: {kept}; method = 'distil' learns another from text")
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
    fields = ("position_embedding_type", "max_position_embeddings")
    alike = all(getattr(one, name) == getattr(other, name) for name in fields)
    return alike and scheme_parts(one) == scheme_parts(other)


def resolved_options(config: RelPosBertConfig) -> dict[str, Any]:
    """The options of a scheme with their defaults; for a combination, by scheme."""
    parts = {scheme.name: options for scheme, options in scheme_parts(config)}
    return parts if isinstance(config.position_embedding_type, list) else parts[config.position_embedding_type]
