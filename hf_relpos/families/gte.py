"""GTE (`new`): gte-multilingual-base, gte-*-en-v1.5, their rerankers, stella and what was tuned from them.

The original code is named in `auto_map` (Alibaba-NLP/new-impl); Transformers has it as `gte`, in the same layout of
tensors. Post-LN, a GLU whose second half is activated, and rotations of half a head with the other half.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .family import Family, Layout, Positions, Tensors, renamed
from .fused import PROJECTIONS, join_rows, rope_options, rope_scaling, split_rows
from .names import Rule


FUSED, GATED, DENSE = ".attention.qkv_proj.", ".mlp.up_gate_proj.", ".intermediate.dense."
SEPARATE = {f"attention.{name[0]}_proj": f"attention.self.{name}" for name in ("query", "key", "value")}
THEIRS = {
    "attention.o_proj": "attention.output.dense",
    "attn_ln": "attention.output.LayerNorm",
    "mlp.down_proj": "output.dense",
    "mlp_ln": "output.LayerNorm",
}
HEAD = {"lm_head.dense": "transform.dense", "lm_head.norm": "transform.LayerNorm", "lm_head.decoder": "decoder"}
# Fields of the original code whose value must be this, if they are there.
ONLY = {"layer_norm_type": "layer_norm", "logn_attention_scale": False, "logn_attention_clip1": False}
KINDS = (None, "linear", "ntk")


def _unpack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    size = config.get("hidden_size", 768)
    split = split_rows(tensors, FUSED, PROJECTIONS, size)
    # our first half is activated
    return {name.replace(GATED, DENSE): t.roll(len(t) // 2, 0) if GATED in name else t for name, t in split.items()}


def _pack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    prefix = f"{config['model_type']}."
    is_encoder = not any(name.startswith("bert.") for name in tensors)
    kept = {name: t for name, t in tensors.items() if name != "cls.predictions.bias"}
    if is_encoder:  # without a pooler
        kept = {name: t for name, t in kept.items() if not name.startswith("pooler.")}
    if config.get("pack_qkv", True):
        kept = join_rows(kept, FUSED, PROJECTIONS)
    packed = {}
    ours = {f".{our}.": f".{their}." for their, our in (SEPARATE | THEIRS).items()}
    ours |= {f"cls.predictions.{our}.": f"{their}." for their, our in HEAD.items()}
    for name, tensor in kept.items():
        their = f"{prefix}{name.removeprefix('bert.')}" if name.startswith("bert.") else name
        if DENSE in their:
            tensor, their = tensor.roll(len(tensor) // 2, 0), their.replace(DENSE, GATED)
        else:
            our = next((each for each in ours if each in their), "")
            their = their.replace(our, ours[our]) if our else their
        packed[their] = tensor
    return packed


def _unsupported_reason(config: Mapping[str, Any]) -> str:
    for name, value in ONLY.items():
        if config.get(name) not in (None, value):
            return f"{name} = {config[name]!r}: only {value!r} has a counterpart here; its own code reads the others"
    if config.get("position_embedding_type") == "absolute":
        return "position_embedding_type = 'absolute': only 'rope' has a counterpart here; its own code reads the other"
    kind, _ = rope_scaling(config)
    if kind not in KINDS or (config.get("rope_scaling") or {}).get("mixed_b") is not None:
        scaling = config.get("rope_scaling") or config.get("rope_parameters")
        known = ", ".join(map(repr, KINDS[1:]))
        return f"rope_scaling = {scaling!r}: of the scalings {known}, without mixed_b, are read here"
    return ""


def _family(title: str, prefix: str, defaults: dict[str, Any], base: float, published: dict[str, Any]) -> Family:
    return Family(
        class_prefixes=(prefix,),
        suffixes=(
            "Model",
            "ForMaskedLM",
            "ForSequenceClassification",
            "ForTokenClassification",
            "ForMultipleChoice",
            "ForQuestionAnswering",
        ),
        rules=(
            Rule(f"{prefix.lower()}.*", "bert.*"),
            *renamed(SEPARATE | THEIRS),
            *(Rule(f"{their}.*", f"cls.predictions.{our}.*") for their, our in HEAD.items()),
        ),
        stock=None,
        defaults=defaults,
        dropped_fields=(
            *ONLY,
            "pack_qkv",
            "position_embedding_type",
            "rope_theta",
            "rope_scaling",
            "rope_parameters",
            "unpad_inputs",
            "use_memory_efficient_attention",
        ),
        legacy_types=(),
        positions=lambda config: Positions(absolute=False, scheme="rope", options=rope_options(config, base)),
        position_types=("rope",),
        fields=lambda config: {"feed_forward_type": "glu"},
        unpack=_unpack,
        pack=_pack,
        read_directly=True,
        unsupported_reason=_unsupported_reason,
        title=title,
        published=published,
        layout=Layout("GTE (`new`)", (r"\.attention\.(qkv|o)_proj\.", r"\.mlp\.up_gate_proj\.")),
    )


FAMILIES: dict[str, Family] = {
    "new": _family(
        "GTE, stella",
        "New",
        {"max_position_embeddings": 2048, "type_vocab_size": 1, "attention_probs_dropout_prob": 0.0},
        10000.0,
        {"rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0}, "max_position_embeddings": 8192},
    ),
    "gte": _family(
        "GTE of Transformers",
        "Gte",
        {
            "vocab_size": 250048,
            "max_position_embeddings": 8192,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "attention_probs_dropout_prob": 0.0,
        },
        160000.0,
        {},
    ),
}
