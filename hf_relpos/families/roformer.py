"""RoFormer (Su et al., arXiv 2104.09864): BERT's body with rotary positions in adjacent pairs, without a pooler."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..checkpoints.errors import ConversionError
from ..host.declarations import ROFORMER_CAUSAL_MASK
from .family import MOST, Family, Layout, Positions
from .joints import Tensors


TABLE = "encoder.embed_positions.weight"
# Tolerance between a table of sinusoids in float32 or bfloat16 and its formula.
ROUNDED = 1e-2


def position_table(length: int, width: int) -> torch.Tensor:
    """The fixed table of RoFormer's class, bit for bit: sines of all angles, then their cosines, (length, width)."""
    periods = np.array([np.power(10000, 2 * (j // 2) / width) for j in range(width)])
    angles = np.arange(length)[:, None] / periods
    return torch.from_numpy(np.concatenate([np.sin(angles[:, 0::2]), np.cos(angles[:, 1::2])], axis=1)).float()


class RoFormer(Family, name="roformer"):
    """RoFormer."""

    class_prefixes = ("RoFormer",)
    suffixes = (*MOST, "ForCausalLM")
    title = "RoFormer"
    parts = {
        "roformer": "bert",
        "embeddings_project": "embeddings.embeddings_project",
        "classifier.dense": "pooler.dense",
        "classifier.out_proj": "classifier",
    }
    only = {"rotary_value": ([False, None], "rotated values depend on absolute positions; AutoModel reads it")}
    read_directly = True
    tolerance = 1e-5  # Transformers rounds the sinusoids to float32
    layout = Layout("RoFormer", (r"(^|\.)(roformer\.|encoder\.embed_positions\.)",))

    def find_positions(self) -> Positions:
        """Rotations of adjacent pairs."""
        return Positions(absolute=False, scheme="rope", options={"pairing": "adjacent"})

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Remove the table, which is computed here."""
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(TABLE)}
        for name in tensors.keys() - kept.keys():
            stored = tensors[name]
            if stored.is_meta:  # only the names are needed
                continue
            right = position_table(*stored.shape) if stored.dim() == 2 else None
            if right is None or not torch.allclose(stored.float(), right, rtol=0, atol=ROUNDED):
                raise ConversionError(f"{name}: not RoFormer's sinusoids, its only table; restore the file")
        return kept

    def pack(self, tensors: Tensors) -> Tensors:
        """The inverse of `unpack`."""
        word = next(name for name in tensors if name.endswith("embeddings.word_embeddings.weight"))
        prefix = word.removesuffix("embeddings.word_embeddings.weight")
        width = self.config["hidden_size"] // self.config["num_attention_heads"]
        table = position_table(self.config["max_position_embeddings"], width)
        return {**tensors, f"{prefix}{TABLE}": table.to(tensors[word].dtype)}

    def more_fields(self) -> dict[str, Any]:
        """Fields of its classifier, a pooler with the activation of the layers between two dropouts."""
        if not self.head.endswith("ForSequenceClassification"):
            return {}
        dropout = self.config.get("hidden_dropout_prob", 0.1)
        activation = self.config.get("hidden_act", "gelu")
        return {"pooler_hidden_act": activation, "pooler_dropout": dropout, "classifier_dropout": dropout}

    def unsupported_reason(self) -> str:
        """A decoder is not supported on releases of Transformers that compute it without a causal mask."""
        if self.config.get("is_decoder", False) and ROFORMER_CAUSAL_MASK.lack():
            remedy = "install a newer one, or set is_decoder to false"
            return f"is_decoder = True: in this release of Transformers it sees the tokens to come; {remedy}"
        return ""
