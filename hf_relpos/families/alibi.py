"""BERTs with ALiBi and a gated feed-forward: JinaBERT v2, and MosaicBERT, whose code DNABERT-2 and mRNABERT use, too.

The variant of JinaBERT v2 for code has further LayerNorms, other names and the halves of its gated unit exchanged.
Both have model_type "bert", and Transformers has no class for either. The original code of JinaBERT is named in
`auto_map` (jinaai/jina-bert-implementation), that of MosaicBERT is mosaicml/examples, examples/benchmarks/bert/src.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..models.checks import FEED_FORWARD_TYPES
from .family import ALL, Family, Layout, Positions, Tensors, first_class, renamed
from .fused import exchanged_halves, hidden_size, join, projections, split
from .names import Rule, from_stock


# Activations of the feed-forward; the heads use `hidden_act`.
JINA_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
LANGUAGE_HEADS = ("ForMaskedLM", "ForPreTraining")
GATED_RULES = renamed(
    {"mlp.gated_layers": "intermediate.dense", "mlp.wo": "output.dense", "mlp.layernorm": "output.LayerNorm"}
)
GATED = r"\.mlp\.gated_layers\."
JINA_CODE = ".mlp.up_gated_layer."
# Of the variant for code; its repository is named in `auto_map`.
CODE_RULES = renamed(
    {
        "mlp.down_layer": "output.dense",
        "layer_norm_1": "attention.output.second_norm",
        "layer_norm_2": "output.LayerNorm",
    }
)
CODE_REPOSITORY = "qk-post-norm"
# Fields set in a configuration from the tensors.
ABSOLUTE_TABLE, CODE_VARIANT = "_absolute_table", "_code_variant"
JINA_JOINTS = (exchanged_halves(JINA_CODE, ".intermediate.dense."),)
MOSAIC_JOINTS = (projections(".attention.self.Wqkv.", hidden_size),)


def _alibi(config: Mapping[str, Any]) -> Positions:
    return Positions(absolute=False, scheme="alibi")


def _language_head(config: Mapping[str, Any]) -> str:
    """The class of a language modelling head; empty for other heads."""
    name = first_class(config)
    return name if name.endswith(LANGUAGE_HEADS) else ""


def _other_activation(config: Mapping[str, Any], activation: str) -> str:
    """Why a language modelling head cannot be converted because of its activation; empty if it can."""
    head, own = _language_head(config), config.get("hidden_act", "gelu")
    if not head or own == activation:
        return ""
    return (
        f"hidden_act = {own!r} is the activation of the head of {head} alone, and its feed-forward has "
        f"{activation!r}, where there is one field here for both; set architectures to the encoder's class in "
        "config.json to convert the encoder without its head"
    )


def _jina_by_tensors(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    is_for_code = any(JINA_CODE in name for name in names)
    is_gated = is_for_code or any(re.search(GATED, name) for name in names)
    if is_gated and config.get("feed_forward_type", "original") == "original":
        found["feed_forward_type"] = "geglu"
    if is_for_code:
        found[CODE_VARIANT] = True
    return found | _absolute_table(config, names)


def _absolute_table(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    table = [name for name in names if name.endswith("embeddings.position_embeddings.weight")]
    return {ABSOLUTE_TABLE: table[0]} if table else {}


def _mosaic_by_tensors(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Adds the field that marks an exported model; its value has no effect."""
    return {"alibi_starting_size": config.get("alibi_starting_size", 512), **_absolute_table(config, names)}


def _two_kinds_of_positions(config: Mapping[str, Any]) -> str:
    if ABSOLUTE_TABLE not in config:
        return ""
    return f"the weights hold {config[ABSOLUTE_TABLE]}, and its code adds no positions at the input"


def _jina_unsupported_reason(config: Mapping[str, Any]) -> str:
    kind = config.get("feed_forward_type", "original")
    if kind not in ("original", *JINA_ACTIVATIONS):
        known = ", ".join(map(repr, ("original", *JINA_ACTIVATIONS)))
        return f"feed_forward_type = {kind!r} is unknown; known: {known}"
    if config.get("alibi_scaling") not in (None, 1):
        return f"alibi_scaling = {config['alibi_scaling']!r}: its slopes are not ALiBi's; only 1 can be converted"
    if kind in JINA_ACTIVATIONS and (reason := _other_activation(config, JINA_ACTIVATIONS[kind])):
        return reason
    return _two_kinds_of_positions(config)


def _jina_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("feed_forward_type", "original")
    if kind not in JINA_ACTIVATIONS:
        return {"feed_forward_type": "mlp"}
    norms = {"extra_attention_norms": True} if _is_for_code(config) else {}
    return {"feed_forward_type": "glu", "hidden_act": JINA_ACTIVATIONS[kind], **norms}


def _is_for_code(config: Mapping[str, Any]) -> bool:
    return bool(config.get(CODE_VARIANT)) or CODE_REPOSITORY in str(config.get("auto_map"))


def _pack_jina(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    if not _is_for_code(config):
        return _gated_names(config, tensors)
    joined = join(JINA_JOINTS, config, tensors)
    return {_their_name(name, CODE_RULES): tensor for name, tensor in joined.items()}


def _mosaic_unsupported_reason(config: Mapping[str, Any]) -> str:
    if reason := _other_activation(config, "gelu"):
        return reason
    eps = config.get("layer_norm_eps", 1e-12)
    if _language_head(config) and eps != 1e-12:
        return (
            f"layer_norm_eps = {eps!r}: the head of {_language_head(config)} has 1e-12 all the same, where there is "
            "one field here for both; set architectures to ['BertModel'] in config.json to convert the encoder alone"
        )
    return _two_kinds_of_positions(config)


def _their_name(name: str, rules: tuple[Rule, ...]) -> str:
    """The name of the original code for a part of the feed-forward, whose names in BERT end as the attention's do."""
    return name if re.search(r"\.attention\.output\.(dense|LayerNorm)\.", name) else from_stock(name, rules)


def _gated_names(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    if _jina_fields(config)["feed_forward_type"] == "mlp" and "alibi_starting_size" not in config:
        return dict(tensors)
    return {_their_name(name, GATED_RULES): tensor for name, tensor in tensors.items()}


def _pack_mosaic(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    tensors = _gated_names(config, tensors)
    if "cls.predictions.decoder.bias" in tensors:  # the original head has one bias
        tensors.pop("cls.predictions.bias", None)
    return join(MOSAIC_JOINTS, config, tensors)


FAMILIES: dict[str, Family] = {
    "jinabert": Family(
        class_prefixes=("JinaBert", "Bert"),
        suffixes=ALL,
        rules=(*GATED_RULES, *CODE_RULES),
        dropped_fields=(
            *(CODE_VARIANT, ABSOLUTE_TABLE),
            *"feed_forward_type emb_pooler attn_implementation alibi_scaling embedding_model embedding_size".split(),
        ),
        positions=_alibi,
        position_types=("alibi",),
        fields=_jina_fields,
        unpack=partial(split, JINA_JOINTS),
        pack=_pack_jina,
        marker="feed_forward_type",
        not_marking=FEED_FORWARD_TYPES,
        signature_tensors=(rf"{GATED}|\.mlp\.up_gated_layer\.", r"\.attention\.self\.query\."),
        infer_from_tensors=_jina_by_tensors,
        read_directly=True,
        unsupported_reason=_jina_unsupported_reason,
        title="JinaBERT v2: embeddings, rerankers",
        published={"feed_forward_type": "geglu", "position_embedding_type": "alibi"},
        layout=Layout(
            "JinaBERT v2: a gated feed-forward and ALiBi",
            (r"\.mlp\.(gated_layers|up_gated_layer)\.", r"\.mlp\.(wo|down_layer)\."),
        ),
    ),
    "mosaicbert": Family(
        class_prefixes=("Bert",),
        suffixes=("Model", "ForMaskedLM", "ForSequenceClassification"),
        rules=GATED_RULES,
        defaults={"attention_probs_dropout_prob": 0.0},
        dropped_fields=("alibi_starting_size", "embedding_size", ABSOLUTE_TABLE),
        positions=_alibi,
        position_types=("alibi",),
        fields=lambda config: {"feed_forward_type": "glu", "hidden_act": "gelu"},
        unpack=partial(split, MOSAIC_JOINTS),
        pack=_pack_mosaic,
        marker="alibi_starting_size",
        signature_tensors=(GATED, r"\.attention\.self\.Wqkv\."),
        infer_from_tensors=_mosaic_by_tensors,
        read_directly=True,
        unsupported_reason=_mosaic_unsupported_reason,
        title="MosaicBERT, DNABERT-2, DNABERT-S, mRNABERT",
        published={"alibi_starting_size": 512},
        layout=Layout(
            "MosaicBERT or DNABERT-2: one projection of queries, keys and values, a gated feed-forward and ALiBi",
            (r"\.attention\.self\.Wqkv\.", r"\.mlp\.gated_layers\.", r"\.mlp\.wo\."),
        ),
    ),
}
