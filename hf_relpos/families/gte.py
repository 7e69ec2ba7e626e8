"""GTE (`new`): gte-multilingual-base, gte-*-en-v1.5, their rerankers, stella and what was tuned from them.

The original code is named in `auto_map` (Alibaba-NLP/new-impl); Transformers has it as `gte`, in the same layout of
tensors. Post-LN, a GLU whose second half is activated, and rotations of half a head with the other half.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .family import MOST, Family, Layout, Positions
from .joints import Joint, exchanged_halves, projections
from .rotary import SCALINGS, other_scaling, rope_options


OWN_CODE = "its own code alone reads this"


def _joints(config: Mapping[str, Any]) -> Iterable[Joint]:
    halves = exchanged_halves(".mlp.up_gate_proj.", ".intermediate.dense.")
    return [halves, projections(".attention.qkv_proj.")] if config.get("pack_qkv", True) else [halves]


def _unsupported_reason(config: Mapping[str, Any]) -> str:
    if (scaling := config.get("rope_scaling") or {}).get("mixed_b") is not None:
        return f"rope_scaling = {scaling!r}: scalings without mixed_b are read here"
    return other_scaling(config, (*SCALINGS, "ntk"))


def _family(title: str, prefix: str, defaults: dict[str, Any], base: float, published: dict[str, Any]) -> Family:
    return Family(
        class_prefixes=(prefix,),
        suffixes=(*MOST, "ForMultipleChoice"),
        title=title,
        parts=lambda config: {
            prefix.lower(): "bert",
            "lm_head.dense": "cls.predictions.transform.dense",
            "lm_head.norm": "cls.predictions.transform.LayerNorm",
            "lm_head.decoder": "cls.predictions.decoder",
            "*.attention.q_proj": "*.attention.self.query",
            "*.attention.k_proj": "*.attention.self.key",
            "*.attention.v_proj": "*.attention.self.value",
            "*.attention.o_proj": "*.attention.output.dense",
            "*.attn_ln": "*.attention.output.LayerNorm",
            "*.mlp.down_proj": "*.output.dense",
            "*.mlp_ln": "*.output.LayerNorm",
        },
        joints=_joints,
        defaults=defaults,
        only={
            "position_embedding_type": (["rope"], OWN_CODE),
            "layer_norm_type": (["layer_norm", None], OWN_CODE),
            "logn_attention_scale": ([False, None], OWN_CODE),
            "logn_attention_clip1": ([False, None], OWN_CODE),
        },
        positions=lambda config: Positions(absolute=False, scheme="rope", options=rope_options(config, base)),
        fields=lambda config: {"feed_forward_type": "glu"},
        written=lambda config: {"cls.predictions.bias": ""},  # once, as the decoder's
        pools=False,
        implied_fields={"pack_qkv": (True, ".attention.qkv_proj.")},
        read_directly=True,
        unsupported_reason=_unsupported_reason,
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
