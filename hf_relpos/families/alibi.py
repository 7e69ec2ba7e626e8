"""BERTs with ALiBi and a gated feed-forward: JinaBERT v2, and MosaicBERT, whose code DNABERT-2 and mRNABERT use, too.

The variant of JinaBERT v2 for code has further LayerNorms, other names and the halves of its gated unit exchanged.
Both have model_type "bert", and Transformers has no class for either. The original code of JinaBERT is named in
`auto_map` (jinaai/jina-bert-implementation), that of MosaicBERT is mosaicml/examples, examples/benchmarks/bert/src.
"""

from collections.abc import Mapping
from typing import Any

from ..models.checks import FEED_FORWARD_TYPES
from .family import ALL, Family, Layout, Positions, first_class
from .joints import exchanged_halves, projections


# Activations of the feed-forward by its type; the heads use `hidden_act`. "original" is a feed-forward without a gate.
ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
BERT_DEFAULTS = {"hidden_act": "gelu", "layer_norm_eps": 1e-12}
GATED = {
    "*.mlp.gated_layers": "*.intermediate.dense",
    "*.mlp.wo": "*.output.dense",
    "*.mlp.layernorm": "*.output.LayerNorm",
}
# Of the variant for code, which its repository or the field that its tensors set tells.
FOR_CODE = {
    "*.mlp.down_layer": "*.output.dense",
    "*.layer_norm_1": "*.attention.output.second_norm",
    "*.layer_norm_2": "*.output.LayerNorm",
}
CODE_GATE, CODE_REPOSITORY, CODE_VARIANT = ".mlp.up_gated_layer.", "qk-post-norm", "_code_variant"


def _head_refusal(config: Mapping[str, Any], part: str, name: str, value: Any) -> str:
    """Why a language modelling head cannot be converted; empty for other heads, and if it can.

    Args:
        part: the part of the model that has a value of its own, whatever the field says.
        name: the field.
        value: that value.
    """
    head, own = first_class(config), config.get(name, BERT_DEFAULTS[name])
    if own == value or not head.endswith(("ForMaskedLM", "ForPreTraining")):
        return ""
    return (
        f"{name} = {own!r}: {part} of {head} has {value!r} all the same, where there is one field here for both; set "
        "architectures to the encoder's class in config.json to convert the encoder without its head"
    )


def _jina_by_tensors(config: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    is_for_code = any(CODE_GATE in name for name in names)
    is_gated = is_for_code or any(".mlp.gated_layers." in name for name in names)
    found: dict[str, Any] = {CODE_VARIANT: True} if is_for_code else {}
    if is_gated and config.get("feed_forward_type", "original") == "original":
        found["feed_forward_type"] = "geglu"
    return found


def _jina_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("feed_forward_type", "original")
    if kind not in ACTIVATIONS:
        return {"feed_forward_type": "mlp"}
    norms = {"extra_attention_norms": True} if _is_for_code(config) else {}
    return {"feed_forward_type": "glu", "hidden_act": ACTIVATIONS[kind], **norms}


def _is_for_code(config: Mapping[str, Any]) -> bool:
    return bool(config.get(CODE_VARIANT)) or CODE_REPOSITORY in str(config.get("auto_map"))


def _jina_parts(config: Mapping[str, Any]) -> dict[str, str]:
    if _is_for_code(config):
        return FOR_CODE
    return GATED if config.get("feed_forward_type", "original") in ACTIVATIONS else {}


def _jina_unsupported_reason(config: Mapping[str, Any]) -> str:
    kind = config.get("feed_forward_type", "original")
    return _head_refusal(config, "the feed-forward", "hidden_act", ACTIVATIONS[kind]) if kind in ACTIVATIONS else ""


def _mosaic_unsupported_reason(config: Mapping[str, Any]) -> str:
    head = _head_refusal(config, "the head", "layer_norm_eps", BERT_DEFAULTS["layer_norm_eps"])
    return head or _head_refusal(config, "the feed-forward", "hidden_act", "gelu")


# MosaicBERT first, whose tensors have all that shows JinaBERT.
FAMILIES: dict[str, Family] = {
    "mosaicbert": Family(
        class_prefixes=("Bert",),
        suffixes=("Model", "ForMaskedLM", "ForSequenceClassification"),
        title="MosaicBERT, DNABERT-2, DNABERT-S, mRNABERT",
        parts=lambda config: GATED,
        joints=lambda config: [projections(".attention.self.Wqkv.")],
        # the field marks an exported model; its value has no effect
        defaults={"attention_probs_dropout_prob": 0.0, "alibi_starting_size": 512},
        positions=lambda config: Positions(absolute=False, scheme="alibi"),
        computes_positions=True,
        fields=lambda config: {"feed_forward_type": "glu", "hidden_act": "gelu"},
        written=lambda config: {"cls.predictions.bias": ""},  # once, as the decoder's
        marker="alibi_starting_size",
        told_by_tensors=True,
        read_directly=True,
        unsupported_reason=_mosaic_unsupported_reason,
        published={"alibi_starting_size": 512},
        layout=Layout(
            "MosaicBERT or DNABERT-2: one projection of queries, keys and values, a gated feed-forward and ALiBi",
            (r"\.mlp\.gated_layers\.", r"\.mlp\.wo\.", r"\.attention\.self\.Wqkv\."),
        ),
    ),
    "jinabert": Family(
        class_prefixes=("JinaBert", "Bert"),
        suffixes=ALL,
        title="JinaBERT v2: embeddings, rerankers",
        parts=_jina_parts,
        joints=lambda config: [exchanged_halves(CODE_GATE, ".intermediate.dense.")] if _is_for_code(config) else [],
        only={
            "feed_forward_type": (["original", *ACTIVATIONS], "it is unknown"),
            "alibi_scaling": ([1, None], "its slopes are not ALiBi's"),
        },
        positions=lambda config: Positions(absolute=False, scheme="alibi"),
        computes_positions=True,
        fields=_jina_fields,
        marker="feed_forward_type",
        not_marking=FEED_FORWARD_TYPES,
        told_by_tensors=True,
        infer_from_tensors=_jina_by_tensors,
        read_directly=True,
        unsupported_reason=_jina_unsupported_reason,
        published={"feed_forward_type": "geglu", "position_embedding_type": "alibi"},
        layout=Layout(
            "JinaBERT v2: a gated feed-forward and ALiBi",
            (r"\.mlp\.(gated_layers|up_gated_layer)\.", r"\.mlp\.(wo|down_layer)\."),
        ),
    ),
}
