"""RoFormer (Su et al., arXiv 2104.09864): BERT's body with rotary positions in adjacent pairs, without a pooler."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..checkpoints.errors import ConversionError
from ..host.declarations import ROFORMER_CAUSAL_MASK
from .family import MOST, Family, Layout, Positions, first_class
from .joints import Tensors


TABLE = "encoder.embed_positions.weight"
# Tolerance between a table of sinusoids in float32 or bfloat16 and its formula.
ROUNDED = 1e-2


def position_table(length: int, width: int) -> torch.Tensor:
    """The fixed table of RoFormer's class, bit for bit: sines of all angles, then their cosines, (length, width)."""
    periods = np.array([np.power(10000, 2 * (j // 2) / width) for j in range(width)])
    angles = np.arange(length)[:, None] / periods
    return torch.from_numpy(np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)).float()


def _unpack(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Remove the table, which is computed here."""
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(TABLE)}
    for name in tensors.keys() - kept.keys():
        stored = tensors[name]
        if stored.is_meta:  # only the names are needed
            continue
        if stored.dim() != 2 or not torch.allclose(
            stored.float(), position_table(*stored.shape), rtol=0, atol=ROUNDED
        ):
            raise ConversionError(
                f"{name}: not RoFormer's sinusoids, and rotary positions have no table here; restore the file"
            )
    return kept


def _pack(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    word = next(name for name in tensors if name.endswith("embeddings.word_embeddings.weight"))
    prefix = word.removesuffix("embeddings.word_embeddings.weight")
    table = position_table(config["max_position_embeddings"], config["hidden_size"] // config["num_attention_heads"])
    return {**tensors, f"{prefix}{TABLE}": table.to(tensors[word].dtype)}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of its classifier, a pooler with the activation of the layers between two dropouts."""
    if not first_class(config).endswith("ForSequenceClassification"):
        return {}
    dropout = config.get("hidden_dropout_prob", 0.1)
    activation = config.get("hidden_act", "gelu")
    return {"pooler_hidden_act": activation, "pooler_dropout": dropout, "classifier_dropout": dropout}


def _unsupported_reason(config: Mapping[str, Any]) -> str:
    if config.get("is_decoder", False) and ROFORMER_CAUSAL_MASK.lack():
        return (
            "is_decoder = True: RoFormer's decoder sees the tokens to come in this release of Transformers, and ours "
            "does not; install a newer one, or set is_decoder to false"
        )
    return ""


FAMILIES: dict[str, Family] = {
    "roformer": Family(
        class_prefixes=("RoFormer",),
        suffixes=(*MOST, "ForCausalLM"),
        title="RoFormer",
        parts=lambda config: {
            "roformer": "bert",
            "embeddings_project": "embeddings.embeddings_project",
            "classifier.dense": "pooler.dense",
            "classifier.out_proj": "classifier",
        },
        stock="roformer",
        only={
            "rotary_value": (
                [False, None],
                "with rotated values the outputs depend on absolute positions, which AutoModel of Transformers reads",
            )
        },
        positions=lambda config: Positions(absolute=False, scheme="rope", options={"pairing": "adjacent"}),
        tokenizer="RoFormerTokenizer",
        fields=_fields,
        unpack=_unpack,
        pack=_pack,
        read_directly=True,
        tolerance=1e-5,  # Transformers rounds the sinusoids to float32
        unsupported_reason=_unsupported_reason,
        layout=Layout("RoFormer", (r"(^|\.)(roformer\.|encoder\.embed_positions\.)",)),
    )
}
