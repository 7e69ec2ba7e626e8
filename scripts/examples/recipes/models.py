"""Tokenizer and model of a recipe."""

import logging
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_relpos import optimize
from hf_relpos.evaluation import loading, model_max_length
from hf_relpos.evaluation.loading import check_folder, load_quietly, loading_errors, refuse_missing

from .arguments import ModelArguments


logger = logging.getLogger(__name__)


def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    """
    Raises:
        ValueError: when there is none, or one without the offsets that these recipes need.
    """
    name = args.tokenizer_name or args.model_name_or_path
    hub = {**args.hub, "revision": "main"} if args.tokenizer_name else args.hub
    tokenizer = loading.load_tokenizer(name, **hub)
    if not tokenizer.is_fast:
        raise ValueError(f"{name}: its tokenizer is not a fast one; save it with `use_fast=True`")
    return tokenizer


def load_model(
    auto: Any, args: ModelArguments, tokenizer: PreTrainedTokenizerBase, trains: bool = True, **fields: Any
) -> PreTrainedModel:
    """The model of the flags: a checkpoint, or a new one.

    Args:
        auto: class, such as AutoModelForMaskedLM.
        trains: a head that the checkpoint lacks, or has for another number of labels, may start at random.
        fields: of the configuration, such as `num_labels`.

    Raises:
        ValueError: for a checkpoint that is not there, lacks weights, has another scheme than the flags say, or
            other tokens than the tokenizer; and fields that a new configuration does not have.
    """
    if args.attn_implementation:
        fields["attn_implementation"] = args.attn_implementation
    model = _load(auto, args, trains, fields) if args.model_name_or_path else _create(auto, args, tokenizer, fields)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"--tokenizer_name: {len(tokenizer)} tokens, but vocab_size = {model.config.vocab_size}; give its own"
        )
    freeze(model, args.freeze_layers)
    if args.optimize:
        optimize(model)
    return model


def load_config(args: ModelArguments) -> Any:
    """The configuration of the checkpoint.

    Raises:
        ValueError: for one that is not there, or has files that are broken.
    """
    check_folder(args.model_name_or_path)
    with loading_errors(args.model_name_or_path):
        return AutoConfig.from_pretrained(args.model_name_or_path, **args.hub)


def _load(auto: Any, args: ModelArguments, trains: bool, fields: dict[str, Any]) -> PreTrainedModel:
    name = args.model_name_or_path
    check_window(args, load_config(args).model_type)
    if args.attention_window is not None:
        fields["attention_window"] = args.attention_window
    model, missing = load_quietly(auto, name, new_head=True, **args.hub, **fields)
    prefix = f"{model.base_model_prefix}."
    refuse_missing(name, {key for key in missing if key.startswith(prefix)})
    if missing and not trains:
        raise ValueError(f"{name}: has no {', '.join(sorted(missing))} that fit; train it first: --do_train")
    if missing:
        logger.warning(f"{name} has no {', '.join(sorted(missing))} that fit: they start at random")
    check_scheme(args, model.config)
    return model


def check_window(args: ModelArguments, model_type: str) -> None:
    """
    Raises:
        ValueError: for a window in a model that has none.
    """
    if args.attention_window is not None and model_type != "relpos_bert":
        window = f"--attention_window {args.attention_window}: a {model_type} model has none"
        raise ValueError(f"{window}; convert it first: hf-relpos convert")


def check_scheme(args: ModelArguments, config: Any) -> None:
    """
    Raises:
        ValueError: for a checkpoint with another scheme than --position_embedding_type.
    """
    found = getattr(config, "position_embedding_type", None) or "absolute"
    if args.scheme is not None and found != args.scheme:
        names = " ".join(args.position_embedding_type)
        raise ValueError(
            f"--position_embedding_type {names}: {args.model_name_or_path} has {found!r}. Convert it first: hf-relpos "
            f"convert {args.model_name_or_path} OUT --position-embedding-type {names}; or "
            "give --tokenizer_name alone, for a new model"
        )


def _create(
    auto: Any, args: ModelArguments, tokenizer: PreTrainedTokenizerBase, fields: dict[str, Any]
) -> PreTrainedModel:
    if args.model_type not in CONFIG_MAPPING:
        raise ValueError(f"--model_type {args.model_type}: no such architecture; give relpos_bert, bert, …")
    check_window(args, args.model_type)
    known = vars(CONFIG_MAPPING[args.model_type]())
    unknown = sorted(set(args.overrides) - set(known))
    if unknown:
        raise ValueError(f"--config_overrides {unknown[0]}: {args.model_type} has no such field; correct the name")
    position = {"position_embedding_type": args.scheme, "position_options": args.options}
    position = {name: value for name, value in position.items() if value}
    if position and args.model_type != "relpos_bert":
        raise ValueError(f"--{next(iter(position))}: --model_type {args.model_type} has none; give relpos_bert")
    if args.attention_window is not None:
        position["attention_window"] = args.attention_window
    attention = {key: fields.pop(key) for key in ("attn_implementation",) if key in fields}
    config = AutoConfig.for_model(
        args.model_type,
        **{"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **position, **fields},
        **args.overrides,
    )
    return auto.from_config(config, **attention)


def freeze(model: PreTrainedModel, count: int) -> None:
    """Train neither the embeddings nor the lowest layers; parameters that they share with others are trained.

    Args:
        count: of layers; 0 trains everything.

    Raises:
        ValueError: for a model without so many, or without BERT's modules.
    """
    if not count:
        return
    layers = getattr(getattr(model.base_model, "encoder", None), "layer", None)
    if layers is None or count > len(layers):
        found = "no encoder.layer" if layers is None else f"{len(layers)} layers"
        raise ValueError(f"--freeze_layers {count}: the model has {found}; give a smaller number")
    lower = [model.base_model.embeddings, *layers[:count]]
    frozen = {id(parameter) for module in lower for parameter in module.parameters()}
    kept = {id(parameter) for layer in layers[count:] for parameter in layer.parameters()}
    for parameter in model.parameters():
        if id(parameter) in frozen - kept:
            parameter.requires_grad = False


def sequence_length(length: int | None, model: PreTrainedModel, default: int) -> int:
    """Tokens of a row.

    Args:
        length: --max_seq_length, or None.
        default: without it, if the model reads as many.

    Raises:
        ValueError: for more than the model reads.
    """
    limit = model_max_length(model)
    if length is not None and limit is not None and length > limit:
        raise ValueError(f"--max_seq_length {length}: the model reads {limit} tokens; give fewer, or convert it first")
    return length or min(default, limit or default)
