"""ALBERT (Lan et al., arXiv 1909.11942): tensors that layers share are copied to each layer."""

from ..models.checks import integer
from .family import MOST, Family, Layout
from .names import of_attention


class Albert(Family, name="albert"):
    """ALBERT."""

    class_prefixes = ("Albert",)
    suffixes = (*MOST, "ForMultipleChoice")
    title = "ALBERT"
    parts = {
        "albert": "bert",
        "encoder.embedding_hidden_mapping_in": "embeddings.embeddings_project",
        "pooler": "pooler.dense",
        "predictions.dense": "predictions.transform.dense",
        "predictions.LayerNorm": "predictions.transform.LayerNorm",
        "predictions": "cls.predictions",
        **of_attention("*.attention.{}", "query", "key", "value", "dense"),
        "*.attention.LayerNorm": "*.attention.output.LayerNorm",
        "*.ffn": "*.intermediate.dense",
        "*.ffn_output": "*.output.dense",
        "*.full_layer_layer_norm": "*.output.LayerNorm",
    }
    # of the published files; Transformers' class ignores them
    dropped_fields = ("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    renamed_fields = {"classifier_dropout_prob": "classifier_dropout"}
    types = {"num_hidden_groups": integer(1), "inner_group_num": integer(1)}
    layout = Layout("ALBERT", (r"\balbert_layer_groups\.",))

    def layers(self) -> list[str]:
        """Groups of consecutive layers share the tensors of `inner_group_num` layers."""
        layers, groups = self.config["num_hidden_layers"], self.config.get("num_hidden_groups", 1)
        return [
            f"encoder.albert_layer_groups.{number * groups // layers}.albert_layers.{inner}."
            for number in range(layers)
            for inner in range(self.config.get("inner_group_num", 1))
        ]

    def unsupported_reason(self) -> str:
        """An `embedding_size` that equals `hidden_size` is not supported."""
        size = self.config["hidden_size"]
        if self.config["embedding_size"] != size:
            return ""
        same = f"embedding_size = hidden_size = {size!r}: this ALBERT projects its embeddings all the same"
        return f"{same}, which ours does not; only one with a smaller embedding_size can be converted"
