"""MPNet (Song et al., arXiv 2004.09297): absolute positions and T5's bias."""

from .family import MOST, Family, Layout, Positions
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
        "*.attention.attn.q": "*.attention.self.query",
        "*.attention.attn.k": "*.attention.self.key",
        "*.attention.attn.v": "*.attention.self.value",
        "*.attention.attn.o": "*.attention.output.dense",
        "*.attention.LayerNorm": "*.attention.output.LayerNorm",
    }
    only = {
        "relative_attention_num_buckets": (
            [BUCKETS, None],
            f"Transformers computes {BUCKETS} buckets whatever this says, so it is not clear which are meant",
        )
    }
    always_gelu = True
    token_types = False
    layout = Layout("MPNet", (r"\.attention\.attn\.q\.",))

    def find_positions(self) -> Positions:
        """T5's bias beside absolute positions."""
        return Positions(absolute=True, scheme="t5", options={"buckets": BUCKETS, "max_distance": 128})

    def padding(self) -> int:
        """1, since Transformers ignores the configuration."""
        return 1
