"""DeBERTa v1, v2 and v3, and mDeBERTa, as in Transformers.

Queries at padding attend to nothing there, and to the real tokens here, so outputs at padding differ.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from ..schemes.deberta import KINDS
from .errors import ConversionError
from .family import MOST, OF_DECODERS, Family, Layout, Positions, first_class, renamed
from .fused import Joint, join, split
from .names import Rule


# Configuration fields that follow from other fields here, or have no counterpart.
NOT_KEPT = tuple(
    (
        "attention_head_size cls_dropout embedding_size legacy max_relative_positions norm_rel_ebd pooler_hidden_size "
        "pos_att_type position_biased_input position_buckets relative_attention share_att_key talking_head"
    ).split()
)
RULES = (
    Rule("deberta.*", "bert.*"),
    Rule("bert.encoder.rel_embeddings.*", "bert.encoder.distance_embedding.rel_embeddings.*"),
    Rule("bert.encoder.LayerNorm.*", "bert.encoder.distance_embedding.LayerNorm.*"),
    Rule("bert.embeddings.embed_proj.*", "bert.embeddings.embeddings_project.*"),
    Rule("lm_predictions.lm_head.dense.*", "cls.predictions.transform.dense.*"),
    Rule("lm_predictions.lm_head.LayerNorm.*", "cls.predictions.transform.LayerNorm.*"),
    Rule("lm_predictions.lm_head.b*", "cls.predictions.b*"),
    Rule("lm_predictions.lm_head.w*", "cls.predictions.decoder.w*"),  # a name that 5.14 ties to the word embeddings
)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """`pos_att_type` as in Transformers."""
    value = config.get("pos_att_type") or []
    return [name.strip() for name in value.lower().split("|")] if isinstance(value, str) else list(value)


def _terms(config: Mapping[str, Any]) -> list[str]:
    return [kind for kind in KINDS if kind in _kinds(config)]


def _max_distance(config: Mapping[str, Any]) -> int:
    distance = config.get("max_relative_positions", -1)
    return distance if distance >= 1 else config.get("max_position_embeddings", 512)


def _positions(config: Mapping[str, Any]) -> Positions:
    absolute, terms = bool(config.get("position_biased_input", True)), _terms(config)
    if config.get("relative_attention", False):
        return Positions(absolute, "deberta", {"pos_att_type": terms, "max_distance": _max_distance(config)})
    if absolute and not terms:
        return Positions(absolute)
    return Positions(absolute, "deberta", {"pos_att_type": terms, "relative_attention": False})


def _positions_v2(config: Mapping[str, Any]) -> Positions:
    positions = _positions(config)
    options: dict[str, Any] = {}
    if "layer_norm" in [word.strip() for word in config.get("norm_rel_ebd", "none").lower().split("|")]:
        options["norm_rel_ebd"] = "layer_norm"
    if config.get("relative_attention", False):
        buckets, shared = config.get("position_buckets", -1), bool(config.get("share_att_key", False))
        options |= {"buckets": buckets if buckets > 0 else None, "share_att_key": shared, "pos_key_bias": not shared}
    elif options and positions.scheme is None:  # there is a normalisation without embeddings
        options |= {"pos_att_type": [], "relative_attention": False}
    return Positions(positions.absolute, "deberta" if options else positions.scheme, {**positions.options, **options})


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of heads: token classifiers use the dropout of hidden states, and the newer language head is tied."""
    is_of_tokens = first_class(config).endswith("ForTokenClassification")
    fields = {
        "classifier_dropout": None if is_of_tokens else config.get("cls_dropout"),
        "embedding_projection": "before_norm",
        "embedding_size": config.get("embedding_size"),
    }
    if not config.get("legacy", True):
        fields["tie_word_embeddings"] = True
    return fields


def _fields_v1(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_fields(config), "attention_biases": ["query", "value"], "conv_kernel_size": 0}


def _fields_v2(config: Mapping[str, Any]) -> dict[str, Any]:
    convolution = {
        "conv_kernel_size": max(config.get("conv_kernel_size", 0), 0),
        "conv_groups": config.get("conv_groups", 1),
        "conv_act": config.get("conv_act", "tanh"),
    }
    return {**_fields(config), **convolution}


def _unsupported_reason_v1(config: Mapping[str, Any]) -> str:
    if config.get("talking_head", False):
        return (
            "talking_head = True: scores that are mixed between heads have no counterpart here; AutoModel of "
            "Transformers reads it"
        )
    if len(_kinds(config)) != len(_terms(config)):
        return (
            f"pos_att_type = {config['pos_att_type']!r}: only 'c2p' and 'p2c', once each, have a counterpart; the "
            "scale depends on the number of names"
        )
    return ""


def _unsupported_reason_v2(config: Mapping[str, Any]) -> str:
    size = config.get("attention_head_size")
    if size is not None and size * config["num_attention_heads"] != config["hidden_size"]:
        return (
            f"attention_head_size = {size!r} with num_attention_heads = {config['num_attention_heads']} and "
            f"hidden_size = {config['hidden_size']}: only heads that add up to hidden_size have a counterpart here"
        )
    buckets, distance = config.get("position_buckets", -1), _max_distance(config)
    if config.get("relative_attention", False) and buckets > 0 and (buckets < 2 or distance - 1 <= buckets // 2):
        return (
            f"position_buckets = {buckets} with a largest distance of {distance} (max_relative_positions, or "
            "max_position_embeddings if that is below 1) leaves nothing for the logarithmic scale; correct config.json"
        )
    return ""


def _infer_from_tensors(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The published v3 has the newer language head, but no field for it."""
    newer = any(name.startswith("lm_predictions.") for name in names)
    return {"legacy": False} if newer and not any(name.startswith("cls.predictions.") for name in names) else {}


def _split_heads(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Split in_proj (3D, D), with q, k and v of each head in turn, into three projections (D, D)."""
    heads, size = config["num_attention_heads"], config["hidden_size"]
    if tensor.shape != (3 * size, size) or size % heads:
        raise ConversionError(
            f"{name} has shape {tuple(tensor.shape)}, and config.json makes it {(3 * size, size)} for {heads} "
            "heads; correct config.json or take the weights that belong to it"
        )
    return [rows.flatten(0, 1) for rows in tensor.unflatten(0, (heads, 3, -1)).unbind(1)]


def _join_heads(config: Mapping[str, Any], name: str, *parts: torch.Tensor) -> Iterable[torch.Tensor]:
    heads = config["num_attention_heads"]
    return [torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)]


SEPARATE = tuple(f".attention.self.{name}_proj." for name in ("query", "key", "value"))
JOINTS = (Joint((".attention.self.in_proj.",), SEPARATE, _split_heads, _join_heads),)
COMMON: dict[str, Any] = {
    "dropped_fields": (*NOT_KEPT, *OF_DECODERS),
    "infer_from_tensors": _infer_from_tensors,
    "read_directly": True,
    "masks_queries": True,
    "tolerance": 1e-5,  # Transformers rounds the scale, and in v1 inputs of LayerNorms, to float32
}
PROJECTIONS = {f"attention.self.{name}_proj": f"attention.self.{name}" for name in ("query", "key", "value")}

FAMILIES: dict[str, Family] = {
    "deberta-v2": Family(
        class_prefixes=("DebertaV2",),
        suffixes=(*MOST, "ForMultipleChoice"),
        rules=(
            *RULES,
            *renamed(PROJECTIONS),
            *renamed(
                {
                    f"attention.self.{name}": f"attention.self.distance_embedding.{name}"
                    for name in ("pos_key_proj", "pos_query_proj")
                }
            ),
        ),
        stock="deberta-v2",
        tokenizer="DebertaV2Tokenizer",
        positions=_positions_v2,
        fields=_fields_v2,
        unsupported_reason=_unsupported_reason_v2,
        **COMMON,
        title="DeBERTa v2 and v3, mDeBERTa",
        published={"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]},
        layout=Layout("DeBERTa v2 or v3", (r"\.attention\.self\.query_proj\.",)),
    ),
    "deberta": Family(
        class_prefixes=("Deberta",),
        suffixes=MOST,
        rules=(
            *RULES,
            *renamed(PROJECTIONS),
            *renamed(
                {
                    "attention.self.pos_proj": "attention.self.distance_embedding.pos_key_proj",
                    "attention.self.pos_q_proj": "attention.self.distance_embedding.pos_query_proj",
                }
            ),
            Rule("*.attention.self.q_bias", "*.attention.self.query.bias"),
            Rule("*.attention.self.v_bias", "*.attention.self.value.bias"),
        ),
        stock="deberta",
        tokenizer="DebertaTokenizer",
        positions=_positions,
        fields=_fields_v1,
        unsupported_reason=_unsupported_reason_v1,
        unpack=partial(split, JOINTS),
        pack=partial(join, JOINTS),
        **COMMON,
        title="DeBERTa v1",
        published={"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"]},
        layout=Layout("DeBERTa v1", (r"\.attention\.self\.in_proj\.",)),
    ),
}
