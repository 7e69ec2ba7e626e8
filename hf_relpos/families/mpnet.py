"""MPNet (Song et al., arXiv 2004.09297): absolute positions and T5's bias."""

from .family import MOST, Family, Layout, Positions
from .names import of_attention
from .roberta import HEADS


# Number of buckets in Transformers, which ignores the configuration.
BUCKETS = 32


class MPNet(Family, name="mpnet"):
    """MPNet."""

    class_prefixes = ("MPNet",)
    suffixes = (*MOST, "ForMultipleChoice")
    title = "MPNet"
    parts = {
        "mpnet": "bert",
        "encoder.relative_attention_bias": "encoder.distance_embedding.relative_attention_bias",
        **HEADS,
        **of_attention("*.attention.attn.{}", "q", "k", "v", "o"),
        "*.attention.LayerNorm": "*.attention.output.LayerNorm",
    }
    only = {"relative_attention_num_buckets": ([BUCKETS, None], f"Transformers computes {BUCKETS} all the same")}
    always_gelu = True
    token_types = False
    layout = Layout("MPNet", (r"\.attention\.attn\.q\.",))

    def find_positions(self) -> Positions:
        """T5's bias beside absolute positions."""
        return Positions(absolute=True, scheme="t5", options={"buckets": BUCKETS, "max_distance": 128})

    def padding(self) -> int:
        """1, since Transformers ignores the configuration."""
        return 1
