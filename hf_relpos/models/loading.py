"""What a load may leave to chance: heads and tables asked for by name, and nothing else of the encoder.

Transformers initialises whatever a file lacks, and says so in a report. For a head that is to be trained this is what
one wants; an encoder with a random feed-forward is another model at every load. Here such a load ends in an error,
which says what the file looks like and what reads it.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoint_files import check_config, check_local
from .configuration_relpos_bert import OtherArchitecture
from .installed import installed


TENSORS = "hf_relpos_tensors"  # among arguments: those of a checkpoint of another architecture, under our names
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# Parts of the encoder that a caller may ask for where the file has none, and the fields that ask for them.
POSITION_FIELDS = ("position_embedding_type", "position_options", "absolute_position_embeddings")
FRESH_PARTS = {
    "distance_embedding.": POSITION_FIELDS,
    "embeddings.position_embeddings.": POSITION_FIELDS,
    ".crossattention.": ("add_cross_attention",),
}
# Parts of the encoder that `ignore_mismatched_sizes` may leave fresh.
RESIZED_PARTS = ("embeddings.word_", "embeddings.position_", "embeddings.token_type_", "distance_embedding.")


def load(
    kind: type[PreTrainedModel], from_pretrained: Callable[..., Any], source: Any, args: Any, arguments: dict[str, Any]
) -> Any:
    """`from_pretrained` of our classes: as in Transformers, with checks, and of other architectures.

    config.json is read once.

    Args:
        kind: our class.
        from_pretrained: that of Transformers, bound to it.
        source: folder or Hub repository; None for a `state_dict`.
        args: further positional arguments.
        arguments: keyword arguments.

    Returns:
        The model, and with `output_loading_info=True` its loading info.

    Raises:
        ValueError: for files that are broken, and for what `check_loaded` refuses.
    """
    output_loading_info = arguments.pop("output_loading_info", False)
    check_local(source, arguments)
    model, info = load_prepared(from_pretrained, source, args, _prepared(kind, source, arguments))
    if output_loading_info:
        return model, info
    if model._hf_peft_config_loaded:  # then the info is that of adapters
        info = {"missing_keys": model._missing_from_base, "unexpected_keys": (), "mismatched_keys": ()}
    try:
        check_loaded(model, info, source, arguments)
    except ValueError:
        found = read_other_architecture(kind, source, arguments, by_tensors=True)
        if found is None:
            raise
        model, info = load_prepared(from_pretrained, source, args, found)
        check_loaded(model, info, source, arguments)
    return model


def load_prepared(
    from_pretrained: Callable[..., Any], source: Any, args: Any, arguments: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Model and loading info, by Transformers; arguments may be those that `read_other_architecture` returns."""
    rest = dict(arguments)
    if TENSORS not in rest:
        model, info = from_pretrained(source, *args, output_loading_info=True, **rest)
        return model, info
    tensors = rest.pop(TENSORS)
    model, info = from_pretrained(None, *args, output_loading_info=True, state_dict=tensors, **rest)
    # the model read it off its configuration when there was none yet; PEFT writes it into adapters
    model.config.name_or_path = model.name_or_path = model.base_model.name_or_path = str(source)
    return model, info


def _prepared(kind: type[PreTrainedModel], source: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with a configuration of ours, and the tensors of another architecture, if it is one."""
    config = arguments.get("config")
    if _is_given(source, arguments):
        return arguments
    if config is not None:
        # that of the checkpoint itself, from an Auto class: it has been read, and says that it is one of ours, or is a
        # stock one, which the class refuses
        own = isinstance(config, PreTrainedConfig) and config.name_or_path == str(source)
        own = own and not getattr(config, "converted_from", None)
        return arguments if own else read_other_architecture(kind, source, arguments) or arguments
    try:
        fields, _ = kind.config_class.get_config_dict(source, **_hub_arguments(arguments))
    except (OSError, ValueError):
        if os.path.isdir(source):
            check_config(os.path.join(source, arguments.get("subfolder") or ""), only_if_there=True)
        return arguments  # an adapter's folder, or no checkpoint: Transformers reads it, or says so
    if not fields:  # an adapter's folder, which Transformers before 5.23 raises an OSError for
        return arguments
    if isinstance(fields, OtherArchitecture):
        return read_other_architecture(kind, source, arguments) or arguments
    return _with_config(kind, fields, arguments)


def _is_given(source: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether there are tensors, or a file in another format, instead of a checkpoint."""
    given = any(arguments.get(name) is not None for name in ("state_dict", "gguf_file"))
    return given or not isinstance(source, str | os.PathLike)


def _hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in HUB_ARGUMENTS if arguments.get(name) is not None}


def _with_config(
    kind: type[PreTrainedModel], fields: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments with a configuration made of the fields of a file and of those among the arguments."""
    rest = dict(arguments)
    # these are of the loading, and a configuration has them, too
    own = {name: rest.pop(name) for name in ("dtype", "torch_dtype", "quantization_config") if name in rest}
    config, rest = kind.config_class.from_dict(dict(fields), return_unused_kwargs=True, **rest)
    return {**rest, **own, "config": config}


def read_other_architecture(
    kind: type[PreTrainedModel], source: Any, arguments: Mapping[str, Any], by_tensors: bool = False
) -> dict[str, Any] | None:
    """What `from_pretrained` of Transformers is to be given to load a checkpoint of another architecture.

    Args:
        kind: our class.
        source: folder or Hub repository.
        arguments: of `from_pretrained`.
        by_tensors: whether one that calls itself a BERT may be told by its tensors.

    Returns:
        The arguments for `load_prepared`, with a configuration of ours and the tensors under our names; None for a
        checkpoint that Transformers reads by itself.

    Raises:
        ValueError: for a checkpoint that is not supported, or broken.
    """
    families = installed("families")
    if families is None or _is_given(source, arguments):
        return None
    try:
        found = families.state_dict(source, kind.__name__.removeprefix("RelPos"), arguments, by_tensors)
    except OSError:  # no such checkpoint, or an adapter's folder: Transformers says so, or reads it
        return None
    if found is None:
        return None
    fields, tensors = found
    if arguments.get("config") is not None:
        return {**arguments, TENSORS: tensors}
    return {**_with_config(kind, fields, arguments), TENSORS: tensors}


def in_body(name: str) -> bool:
    """Whether a tensor of that name, stock BERT's or ours, is between the inputs and the last hidden state."""
    return name.removeprefix("bert.").startswith(("embeddings.", "encoder."))


def check_loaded(
    model: PreTrainedModel, info: Mapping[str, Iterable[Any]], source: Any, arguments: Mapping[str, Any]
) -> None:
    """Refuse a model whose encoder is not what the checkpoint holds. An empty `state_dict` asks for a fresh model.

    Args:
        model: a BERT, stock or ours, as `from_pretrained` returned it.
        info: its loading info: `missing_keys`, `unexpected_keys` and `mismatched_keys`.
        source: what was loaded; None for a `state_dict`.
        arguments: keyword arguments of `from_pretrained`.

    Raises:
        ValueError: for weights of the encoder that the file lacks, unless they are `FRESH_PARTS` that the caller asked
            for, or has in other sizes, unless they are `RESIZED_PARTS`; and for tables of distances and layers that
            the configuration has no place for.
    """
    if source is None and not arguments.get("state_dict"):
        return
    parameters = [name.replace(".base_layer.", ".") for name, _ in model.named_parameters()]
    body = [name for name in parameters if in_body(name)]
    missing_keys, unexpected = set(info["missing_keys"]), sorted(info["unexpected_keys"])
    missing = [name for name in body if name in missing_keys]
    tables = [name for name in unexpected if "distance_embedding." in name]
    surplus = [name for name in unexpected if (_layer(name) or 0) >= model.config.num_hidden_layers]
    name = "state_dict" if source is None else str(source)
    _check_sizes(name, info["mismatched_keys"])
    if not missing and not tables and not surplus:
        return
    # of an adapter's folder, the base model is elsewhere
    saved = _saved_config(type(model.config), source and model.config.name_or_path, arguments)
    missing = [name for name in missing if not _asked_for(name, model.config, saved)]
    if missing:
        raise ValueError(f"{name}: {_reason(model, missing, body, unexpected, source)}")
    if surplus and "num_hidden_layers" not in arguments and not _changed(("num_hidden_layers",), model.config, saved):
        count = model.config.num_hidden_layers
        raise ValueError(
            f"{name}: config.json says num_hidden_layers = {count}, and the weights have more layers "
            f"({_listed(surplus)}); correct config.json, or pass num_hidden_layers={count} to leave these out"
        )
    tables = [name for name in tables if name not in surplus]
    if tables and not _changed(POSITION_FIELDS, model.config, saved):
        raise ValueError(
            f"{name}: the weights hold tables of distances ({_listed(tables)}), which position_embedding_type = "
            f"{getattr(model.config, 'position_embedding_type', None)!r} has no place for; set it in config.json to "
            "the scheme that they were trained with, or pass it as a keyword. To leave them out on purpose, load with "
            "another position_embedding_type than config.json's"
        )


def _check_sizes(name: str, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse other sizes of what `ignore_mismatched_sizes` is not for.

    Args:
        name: of the checkpoint.
        mismatched: name, size in the file and size in the model of each tensor whose sizes differ.
    """
    wrong = [each for each in sorted(mismatched) if in_body(each[0]) and not any(p in each[0] for p in RESIZED_PARTS)]
    if wrong:
        tensor, stored, expected = wrong[0]
        raise ValueError(
            f"{name}: {len(wrong)} tensors of the encoder have other sizes than the configuration says, such as "
            f"{tensor} with {tuple(stored)} instead of {tuple(expected)}; ignore_mismatched_sizes would leave them "
            "random, which is for heads, vocabularies and tables of positions only. Correct the configuration"
        )


def _saved_config(kind: type[PreTrainedConfig], source: Any, arguments: Mapping[str, Any]) -> PreTrainedConfig | None:
    """The configuration beside the weights; None where there is none that can be read."""
    if source is None:
        return None
    hub = {name: arguments[name] for name in HUB_ARGUMENTS if name in arguments}
    try:
        return kind.from_pretrained(source, **hub)
    except (OSError, ValueError, StrictDataclassError):
        return None


def _changed(fields: Iterable[str], config: PreTrainedConfig, saved: PreTrainedConfig | None) -> bool:
    """Whether the caller set one of the fields: all are the caller's where there is no saved configuration."""
    return saved is None or any(getattr(config, field, None) != getattr(saved, field, None) for field in fields)


def _asked_for(name: str, config: PreTrainedConfig, saved: PreTrainedConfig | None) -> bool:
    return any(part in name and _changed(fields, config, saved) for part, fields in FRESH_PARTS.items())


def _reason(model: PreTrainedModel, missing: list[str], body: list[str], unexpected: list[str], source: Any) -> str:
    """Why these weights are missing, and what to do about it.

    Args:
        missing: names of missing weights of the encoder.
        body: names of all its weights.
        unexpected: names in the file that the model has no place for.
        source: what was loaded.
    """
    config = model.config
    if all("distance_embedding." in name for name in missing):
        return (
            f"config.json says position_embedding_type = {config.position_embedding_type!r}, but the weights lack "
            f"{_listed(missing)} ({len(missing)} tensors). Stock Transformers v5 drops these tables when it loads and "
            "saves such a checkpoint: go back to the original files, or pass another position_embedding_type to start "
            "from fresh tables"
        )
    facts = f"the weights lack {len(missing)} of the encoder's {len(body)} tensors ({_listed(missing)})"
    if unexpected:
        facts += f" and hold others that {type(model).__name__} has no place for ({_listed(unexpected)})"
    families = installed("families")
    if families is not None and (looks := families.resemblance(unexpected, source)):
        return f"{facts}. {looks}"
    return (
        f"{facts}. {_correction(missing, body, unexpected, config)}. To start from random weights on purpose, make a "
        f"{type(model).__name__} of its configuration and call load_state_dict(…, strict=False)"
    )


def _correction(missing: list[str], body: list[str], unexpected: list[str], config: PreTrainedConfig) -> str:
    """What may be wrong with a checkpoint of no known layout."""
    prefix = _common_prefix(missing, unexpected)
    if prefix:
        return f"Its names have a prefix; pass key_mapping={{{f'^{re.escape(prefix)}'!r}: ''}} to take it off"
    stored = {layer for name in body if name not in missing and (layer := _layer(name)) is not None}
    if stored and not {_layer(name) for name in missing} & {None, *stored}:
        return f"num_hidden_layers = {config.num_hidden_layers}, and the file has {len(stored)}; correct config.json"
    return "Restore the file, or correct config.json, which describes another model"


def _layer(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None for one that is in none."""
    match = re.search(r"encoder\.layer\.(\d+)\.", name)
    return int(match[1]) if match else None


def _common_prefix(missing: list[str], unexpected: list[str]) -> str:
    """What stands before each of the missing names in the file; empty for nothing, or not the same."""
    # a position table is not reported, since old files hold one that nothing uses
    cores = [name.removeprefix("bert.") for name in missing if not any(part in name for part in FRESH_PARTS)]
    if not cores:
        return ""
    found = {name.removesuffix(cores[0]) for name in unexpected if name.endswith(f".{cores[0]}")}
    for prefix in sorted(found):
        if {f"{prefix}{core}" for core in cores} <= set(unexpected):
            return prefix.removesuffix("bert.")
    return ""


def _listed(names: Iterable[str], limit: int = 3) -> str:
    """The first names, of those that differ in the number of a layer only one, and how many more there are."""
    names = list(names)
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(re.sub(r"\.\d+\.", ".*.", name), name)
    shown = list(first.values())[:limit]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
