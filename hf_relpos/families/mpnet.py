"""MPNet (Song et al., arXiv 2004.09297): absolute positions and T5's bias."""

from collections.abc import Mapping
from typing import Any

from .family import MOST, OF_DECODERS, Family, Layout, Positions, renamed
from .names import Rule
from .roberta import HEADS


# Number of buckets in Transformers, which ignores the configuration.
MPNET_BUCKETS = 32


def _mpnet_unsupported_reason(config: Mapping[str, Any]) -> str:
    buckets = config.get("relative_attention_num_buckets", MPNET_BUCKETS)
    if buckets == MPNET_BUCKETS:
        return ""
    return (
        f"relative_attention_num_buckets = {buckets!r}: Transformers computes {MPNET_BUCKETS} buckets whatever this "
        "says, so it is not clear which are meant; only one with that number can be converted"
    )


FAMILIES: dict[str, Family] = {
    "mpnet": Family(
        class_prefixes=("MPNet",),
        suffixes=(*MOST, "ForMultipleChoice"),
        rules=(
            Rule("mpnet.*", "bert.*"),
            *renamed(
                {
                    "attention.attn.q": "attention.self.query",
                    "attention.attn.k": "attention.self.key",
                    "attention.attn.v": "attention.self.value",
                    "attention.attn.o": "attention.output.dense",
                    "attention.LayerNorm": "attention.output.LayerNorm",
                }
            ),
            Rule(
                "bert.encoder.relative_attention_bias.*", "bert.encoder.distance_embedding.relative_attention_bias.*"
            ),
            *HEADS,
        ),
        stock="mpnet",
        dropped_fields=("relative_attention_num_buckets", "embedding_size", *OF_DECODERS),
        always_gelu=True,
        token_types=False,
        padding=lambda config: 1,  # Transformers ignores the configuration
        tokenizer="MPNetTokenizer",
        positions=lambda config: Positions(
            absolute=True, scheme="t5", options={"buckets": MPNET_BUCKETS, "max_distance": 128}
        ),
        unsupported_reason=_mpnet_unsupported_reason,
        title="MPNet",
        layout=Layout("MPNet", (r"\.attention\.attn\.q\.",)),
    )
}
