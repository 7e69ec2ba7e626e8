"""ALBERT (Lan et al., arXiv 1909.11942): tensors that layers share are copied to each layer."""

from collections.abc import Mapping
from typing import Any

from .family import MOST, OF_DECODERS, Family, Layout, renamed
from .names import Rule


def albert_layers(config: Mapping[str, Any]) -> list[str]:
    """Prefixes of ALBERT's layers: groups of consecutive layers share the tensors of `inner_group_num` layers."""
    layers, groups = config["num_hidden_layers"], config.get("num_hidden_groups", 1)
    return [
        f"encoder.albert_layer_groups.{number * groups // layers}.albert_layers.{inner}."
        for number in range(layers)
        for inner in range(config.get("inner_group_num", 1))
    ]


def _albert_unsupported_reason(config: Mapping[str, Any]) -> str:
    if config["embedding_size"] != config["hidden_size"]:
        return ""
    return (
        f"embedding_size = hidden_size = {config['hidden_size']!r}: this ALBERT projects its embeddings all the same, "
        "for which there is no parameter here; only one with a smaller embedding_size can be converted"
    )


FAMILIES: dict[str, Family] = {
    "albert": Family(
        class_prefixes=("Albert",),
        suffixes=(*MOST, "ForMultipleChoice"),
        rules=(
            Rule("albert.*", "bert.*"),
            Rule("bert.encoder.embedding_hidden_mapping_in.*", "bert.embeddings.embeddings_project.*"),
            *renamed(
                {
                    "attention.query": "attention.self.query",
                    "attention.key": "attention.self.key",
                    "attention.value": "attention.self.value",
                    "attention.dense": "attention.output.dense",
                    "attention.LayerNorm": "attention.output.LayerNorm",
                    "ffn": "intermediate.dense",
                    "ffn_output": "output.dense",
                    "full_layer_layer_norm": "output.LayerNorm",
                }
            ),
            Rule("bert.pooler.w*", "bert.pooler.dense.w*"),
            Rule("bert.pooler.b*", "bert.pooler.dense.b*"),
            Rule("predictions.dense.*", "cls.predictions.transform.dense.*"),
            Rule("predictions.LayerNorm.*", "cls.predictions.transform.LayerNorm.*"),
            Rule("predictions.*", "cls.predictions.*"),
        ),
        stock="albert",
        dropped_fields=(
            *("num_hidden_groups", "inner_group_num", "gap_size", "net_structure_type", "num_memory_blocks"),
            *("down_scale_factor", *OF_DECODERS),
        ),
        renamed_fields={"classifier_dropout_prob": "classifier_dropout"},
        layers=albert_layers,
        unsupported_reason=_albert_unsupported_reason,
        tokenizer="AlbertTokenizer",
        title="ALBERT",
        layout=Layout("ALBERT", (r"\balbert_layer_groups\.",)),
    )
}
