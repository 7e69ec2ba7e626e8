"""Loading with checks: a model whose encoder would have random weights is rejected.

Transformers initialises all weights that a file lacks, and lists them in a report. That is right for a head that is to
be trained, but an encoder with random weights is a different model at every load. Here such a load raises an error
with the likely cause and remedy. Only heads, and tables that the caller asked for, may be initialised.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import BertConfig, PreTrainedConfig, PreTrainedModel

from ..checkpoints.errors import abbreviate
from ..checkpoints.files import check_local, is_checkpoint
from ..host.loader import named_in_reports
from .installed import INSTALLED
from .modeling_relpos_bert import RelPosBertPreTrainedModel


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# Parts of the encoder that may be initialised if the caller sets certain fields.
POSITION_FIELDS = ("position_embedding_type", "position_options", "absolute_position_embeddings")
FRESH_PARTS = {
    "distance_embedding.": POSITION_FIELDS,
    "embeddings.position_embeddings.": POSITION_FIELDS,
    ".crossattention.": ("add_cross_attention",),
}
# Parts of the encoder that `ignore_mismatched_sizes` may initialise.
RESIZED_PARTS = ("embeddings.word_", "embeddings.position_", "embeddings.token_type_", "distance_embedding.")


def load(kind: Any, from_pretrained: Callable[..., Any], source: Any, args: Any, arguments: dict[str, Any]) -> Any:
    """`from_pretrained` of a BERT: as in Transformers, with checks, and for other architectures, too.

    Args:
        kind: our class.
        from_pretrained: the method of Transformers, bound to that class or to Transformers' own; its other
            arguments follow.

    Returns:
        The model, and with `output_loading_info=True` its loading info.

    Raises:
        ValueError: for broken files, and as `check_encoder`.
    """
    output_loading_info = arguments.pop("output_loading_info", False)
    check_local(source, arguments)
    found = load_other_architecture(kind, source, args, arguments)
    model, info = found or from_pretrained(source, *args, output_loading_info=True, **arguments)
    if output_loading_info:
        return model, info
    if not isinstance(model, kind) and type(model.config) is not BertConfig:  # a subclass is its author's
        return model
    if model._hf_peft_config_loaded:  # the info is about the adapters
        missing = getattr(model, "_missing_from_base", ())
        info = {"missing_keys": missing, "unexpected_keys": (), "mismatched_keys": ()}
    try:
        check_encoder(model, info, source, arguments)
    except ValueError:
        found = load_other_architecture(kind, source, args, arguments, by_tensors=True)
        if found is None:
            raise
        model, _ = found
    return model


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say where on the Hub the files are."""
    return {name: arguments[name] for name in HUB_ARGUMENTS if arguments.get(name) is not None}


def load_other_architecture(
    kind: Any, source: Any, args: Any, arguments: Mapping[str, Any], by_tensors: bool = False
) -> tuple[Any, Any] | None:
    """Model and loading info of a checkpoint of another architecture; None for one that Transformers can read.

    Args:
        kind, source, args, arguments: as of `load`.
        by_tensors: also recognise another architecture with BERT's model_type by its tensors, and check the encoder.

    Raises:
        ValueError: for a checkpoint that is not supported, or broken, and as `check_encoder`.
    """
    if not is_checkpoint(source, arguments):
        return None
    try:
        stored, _ = PreTrainedConfig.get_config_dict(source, **hub_arguments(arguments))
        if stored.get("model_type") == kind.config_class.model_type:  # without an import of the families
            return None
        found = INSTALLED.families().state_dict(source, kind.__name__.removeprefix("RelPos"), arguments, by_tensors)
    except OSError:  # an adapter's folder, or no checkpoint: left to Transformers
        return None
    if found is None:
        return None
    fields, tensors = found
    rest = dict(arguments)
    config = rest.pop("config", None)
    if config is None or (by_tensors and isinstance(config, str | os.PathLike)):
        # arguments of loading, which are also fields of a configuration
        own = {name: rest.pop(name) for name in ("dtype", "torch_dtype", "quantization_config") if name in rest}
        config, rest = kind.config_class.from_dict(fields, return_unused_kwargs=True, **rest)
        rest |= own
    elif by_tensors:  # which say more than the configuration that was made without them
        config = kind.config_class.from_bert(config, **{name: fields[name] for name in LAYOUT_FIELDS & fields.keys()})
    load_tensors = super(RelPosBertPreTrainedModel, kind).from_pretrained
    with named_in_reports(source):
        model, info = load_tensors(None, *args, output_loading_info=True, state_dict=tensors, config=config, **rest)
    # the model read it off its configuration when there was none yet; PEFT writes it into adapters
    model.config.name_or_path = model.name_or_path = model.base_model.name_or_path = str(source)
    if by_tensors:
        check_encoder(model, info, source, arguments)
    return model, info


# Fields that follow from the tensors of another architecture.
LAYOUT_FIELDS = {*POSITION_FIELDS, "feed_forward_type", "extra_attention_norms", "hidden_act"}
LAYOUT_FIELDS |= {"max_position_embeddings", "converted_from"}


def in_body(name: str) -> bool:
    """Whether a tensor of that name, in stock BERT or here, belongs to the encoder, up to the last hidden state."""
    return name.removeprefix("bert.").startswith(("embeddings.", "encoder."))


def check_encoder(
    model: PreTrainedModel, info: Mapping[str, Iterable[Any]], source: Any, arguments: Mapping[str, Any]
) -> None:
    """Reject a model whose encoder differs from the checkpoint. With an empty `state_dict` all weights may be new.

    Args:
        model: a BERT, stock or ours, from `from_pretrained`.
        info: its loading info: `missing_keys`, `unexpected_keys` and `mismatched_keys`.
        source: checkpoint that was loaded; None for a `state_dict`.
        arguments: keyword arguments of `from_pretrained`.

    Raises:
        ValueError: for missing weights of the encoder, except `FRESH_PARTS` that the caller asked for; for weights of
            other sizes, except `RESIZED_PARTS`; and for tables of distances and layers that the configuration lacks.
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
    # the base model of an adapter is in another folder
    saved = _saved_config(type(model.config), source and model.config.name_or_path, arguments)
    missing = [name for name in missing if not _asked_for(name, model.config, saved)]
    if missing:
        raise ValueError(f"{name}: {_reason(model, missing, body, unexpected, source)}")
    if surplus and "num_hidden_layers" not in arguments and not _changed(("num_hidden_layers",), model.config, saved):
        count = model.config.num_hidden_layers
        more = f"num_hidden_layers = {count} in config.json, but the weights have more ({abbreviate(surplus, 3)})"
        raise ValueError(f"{name}: {more}; correct config.json, or pass num_hidden_layers={count} to drop these")
    tables = [name for name in tables if name not in surplus]
    if tables and not _changed(POSITION_FIELDS, model.config, saved):
        scheme = f"position_embedding_type = {getattr(model.config, 'position_embedding_type', None)!r}"
        found = f"the weights have distance tables ({abbreviate(tables, 3)}), which {scheme} does not use"
        remedy = "set it in config.json to the scheme that they were trained with, or pass it as a keyword"
        raise ValueError(f"{name}: {found}; {remedy}. To drop them on purpose, pass another than that of config.json")


def _check_sizes(name: str, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Reject tensors of other sizes, except those for which `ignore_mismatched_sizes` is meant."""
    wrong = [each for each in sorted(mismatched) if in_body(each[0]) and not any(p in each[0] for p in RESIZED_PARTS)]
    if wrong:
        tensor, stored, expected = wrong[0]
        first = f"{tensor} with {tuple(stored)} instead of {tuple(expected)}"
        found = f"{len(wrong)} tensors of the encoder do not have the size of the configuration, such as {first}"
        remedy = "ignore_mismatched_sizes is for heads, vocabularies and position tables, since it leaves them random"
        raise ValueError(f"{name}: {found}. Correct the configuration; {remedy}")


def _saved_config(kind: type[PreTrainedConfig], source: Any, arguments: Mapping[str, Any]) -> PreTrainedConfig | None:
    """The configuration saved with the weights; None if there is none that can be read."""
    if source is None:
        return None
    try:
        return kind.from_pretrained(source, **hub_arguments(arguments))
    except (OSError, ValueError, StrictDataclassError):
        return None


def _changed(fields: Iterable[str], config: PreTrainedConfig, saved: PreTrainedConfig | None) -> bool:
    """Whether the caller set one of the fields; true without a saved configuration."""
    return saved is None or any(getattr(config, field, None) != getattr(saved, field, None) for field in fields)


def _asked_for(name: str, config: PreTrainedConfig, saved: PreTrainedConfig | None) -> bool:
    return any(part in name and _changed(fields, config, saved) for part, fields in FRESH_PARTS.items())


def _reason(model: PreTrainedModel, missing: list[str], body: list[str], unexpected: list[str], source: Any) -> str:
    """Why weights are missing of those in the encoder, its body, and the remedy."""
    config = model.config
    if all("distance_embedding." in name for name in missing):
        scheme, lost = config.position_embedding_type, f"{abbreviate(missing, 3)} ({len(missing)} tensors)"
        cause = "Transformers 5 drops these tables when it loads and saves such a checkpoint"
        remedy = "use the original files, or pass another position_embedding_type to start with new tables"
        return f"position_embedding_type = {scheme!r} requires tables, but the weights lack {lost}. {cause}: {remedy}"
    facts = f"the weights lack {len(missing)} of the encoder's {len(body)} tensors ({abbreviate(missing, 3)})"
    if unexpected:
        facts += f" and have others that {type(model).__name__} does not use ({abbreviate(unexpected, 3)})"
    if looks := INSTALLED.families().resemblance(unexpected, source, missing=missing):
        return f"{facts}. {looks}"
    anew = f"create a {type(model).__name__} from its configuration and call load_state_dict(…, strict=False)"
    return f"{facts}. {_correction(missing, body, unexpected, config)}. To start from random weights, {anew}"


def _correction(missing: list[str], body: list[str], unexpected: list[str], config: PreTrainedConfig) -> str:
    """Likely remedy for a checkpoint of unknown layout."""
    prefix = _common_prefix(missing, unexpected)
    if prefix:
        return f"Its names have a prefix; pass key_mapping={{{f'^{re.escape(prefix)}'!r}: ''}} to remove it"
    stored = {layer for name in body if name not in missing and (layer := _layer(name)) is not None}
    if stored and not {_layer(name) for name in missing} & {None, *stored}:
        return f"num_hidden_layers = {config.num_hidden_layers}, but the file has {len(stored)}; correct config.json"
    return "Restore the file, or correct config.json, which describes another model"


def _layer(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None for tensors outside layers."""
    match = re.search(r"encoder\.layer\.(\d+)\.", name)
    return int(match[1]) if match else None


def _common_prefix(missing: list[str], unexpected: list[str]) -> str:
    """The prefix of all missing names in the file; empty if there is no common prefix."""
    # position tables are not reported as unexpected, since old files have unused ones
    cores = [name.removeprefix("bert.") for name in missing if not any(part in name for part in FRESH_PARTS)]
    for name in sorted(unexpected) if cores else ():
        prefix = name.removesuffix(cores[0])
        if prefix.endswith(".") and {f"{prefix}{core}" for core in cores} <= set(unexpected):
            return prefix.removesuffix("bert.")
    return ""
