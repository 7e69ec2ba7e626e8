"""GTE (`new`): gte-multilingual-base, gte-*-en-v1.5, their rerankers, stella and what was tuned from them.

The original code is named in `auto_map` (Alibaba-NLP/new-impl); Transformers has it as `gte`, in the same layout of
tensors. Post-LN, a GLU whose second half is activated, and rotations of half a head with the other half.
"""

from collections.abc import Iterable
from typing import Any

from .family import MOST, Family, Layout, Positions
from .joints import Joint, exchanged_halves, projections
from .names import of_attention
from .rotary import BASE, SCALINGS, other_scaling, rope_options


OWN_CODE = "its own code alone reads this"
PARTS = {
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "lm_head.decoder": "cls.predictions.decoder",
    **of_attention("*.attention.{}_proj", "q", "k", "v", "o"),
    "*.attn_ln": "*.attention.output.LayerNorm",
    "*.mlp.down_proj": "*.output.dense",
    "*.mlp_ln": "*.output.LayerNorm",
}


class New(Family, name="new"):
    """GTE, as its original code has it."""

    class_prefixes = ("New",)
    suffixes = (*MOST, "ForMultipleChoice")
    title = "GTE, stella"
    parts = {"new": "bert", **PARTS}
    stock = None
    types = {"rope_theta": BASE}
    defaults = {"max_position_embeddings": 2048, "type_vocab_size": 1, "attention_probs_dropout_prob": 0.0}
    only = {
        "position_embedding_type": (["rope"], OWN_CODE),
        "layer_norm_type": (["layer_norm", None], OWN_CODE),
        "logn_attention_scale": ([False, None], OWN_CODE),
        "logn_attention_clip1": ([False, None], OWN_CODE),
    }
    pools = False
    implied_fields = {"pack_qkv": (True, ".attention.qkv_proj.")}
    read_directly = True
    published = {"rope_theta": 20000, "rope_scaling": {"type": "ntk", "factor": 8.0}, "max_position_embeddings": 8192}
    layout = Layout("GTE (`new`)", (r"\.attention\.(qkv|o)_proj\.", r"\.mlp\.up_gate_proj\."))
    base = 10000.0  # the default of `rope_theta`

    def joints(self) -> Iterable[Joint]:
        """The gated unit and, with `pack_qkv`, one projection of queries, keys and values."""
        yield exchanged_halves(".mlp.up_gate_proj.", ".intermediate.dense.")
        if self.config.get("pack_qkv", True):
            yield projections(".attention.qkv_proj.")

    def find_positions(self) -> Positions:
        """Rotations of half a head with the other half."""
        return Positions(absolute=False, scheme="rope", options=rope_options(self.config, self.base))

    def more_fields(self) -> dict[str, Any]:
        """Its feed-forward part is a gated unit."""
        return {"feed_forward_type": "glu"}

    def written(self) -> dict[str, str]:
        """The bias of predictions once, as the decoder's."""
        return {"cls.predictions.bias": ""}

    def unsupported_reason(self) -> str:
        """Scalings with `mixed_b` and unknown ones are not supported."""
        if (scaling := self.config.get("rope_scaling") or {}).get("mixed_b") is not None:
            return f"rope_scaling = {scaling!r}: scalings without mixed_b are read here"
        return other_scaling(self.config, (*SCALINGS, "ntk"))


class Gte(New, name="gte"):
    """GTE, as Transformers has it."""

    class_prefixes = ("Gte",)
    title = "GTE of Transformers"
    parts = {"gte": "bert", **PARTS}
    defaults = {**New.defaults, "vocab_size": 250048, "max_position_embeddings": 8192, "pad_token_id": 1}
    published = {}
    base = 160000.0
