"""GTE (`new`): gte-multilingual-base, gte-*-en-v1.5, their rerankers, stella and what was tuned from them.

The original code is named in `auto_map` (Alibaba-NLP/new-impl); Transformers has it as `gte`, in the same layout of
tensors. Post-LN, a GLU whose second half is activated, and rotations of half a head with the other half.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from .family import MOST, Family, Layout, Positions, Tensors, renamed
from .fused import (
    ROPE_FIELDS,
    SCALINGS,
    exchanged_halves,
    hidden_size,
    join,
    other_scaling,
    other_value,
    projections,
    rope_options,
    split,
)
from .names import Rule, from_stock


JOINTS = (
    exchanged_halves(".mlp.up_gate_proj.", ".intermediate.dense."),
    projections(".attention.qkv_proj.", hidden_size),  # where `pack_qkv` says so
)
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


def _rules(model_type: str) -> tuple[Rule, ...]:
    heads = (Rule(f"{their}.*", f"cls.predictions.{our}.*") for their, our in HEAD.items())
    return (Rule(f"{model_type}.*", "bert.*"), *renamed(SEPARATE | THEIRS), *heads)


def _pack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    rules = _rules(config["model_type"])
    joined = join(JOINTS if config.get("pack_qkv", True) else JOINTS[:1], config, tensors)
    return {
        from_stock(name, rules): tensor
        for name, tensor in joined.items()
        if name != "cls.predictions.bias" and not name.startswith("pooler.")  # an encoder has no pooler
    }


def _unsupported_reason(config: Mapping[str, Any]) -> str:
    if reason := other_value(config, ONLY):
        return reason
    if config.get("position_embedding_type") == "absolute":
        return "position_embedding_type = 'absolute': only 'rope' has a counterpart here; its own code reads the other"
    if (scaling := config.get("rope_scaling") or {}).get("mixed_b") is not None:
        return f"rope_scaling = {scaling!r}: scalings without mixed_b are read here"
    return other_scaling(config, (*SCALINGS, "ntk"))


def _family(title: str, prefix: str, defaults: dict[str, Any], base: float, published: dict[str, Any]) -> Family:
    return Family(
        class_prefixes=(prefix,),
        suffixes=(*MOST, "ForMultipleChoice"),
        rules=_rules(prefix.lower()),
        defaults=defaults,
        dropped_fields=(
            *ONLY,
            "pack_qkv",
            "position_embedding_type",
            *ROPE_FIELDS,
            "unpad_inputs",
            "use_memory_efficient_attention",
        ),
        positions=lambda config: Positions(absolute=False, scheme="rope", options=rope_options(config, base)),
        position_types=("rope",),
        fields=lambda config: {"feed_forward_type": "glu"},
        unpack=partial(split, JOINTS),
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
