"""XLNet (Yang et al., arXiv 1906.08237) as an encoder: no permutations, no memory of earlier segments."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..checkpoints.errors import check_shape
from ..models.checks import integer
from .family import Family, Layout, Positions
from .joints import Joint, Tensors, without_bias


# Used in permutation language modelling only, but in the state dict of every XLNet.
MASK = "mask_emb"


def _rows(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A projection (D, H, d) as (D, H·d)."""
    size, heads = config["d_model"], config["n_head"]
    check_shape(name, tensor.shape, (size, heads, size // heads))
    return tensor.flatten(1)


def _by_head(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(config["d_model"], config["n_head"], -1)


class XLNet(Family, name="xlnet"):
    """XLNet."""

    class_prefixes = ("XLNet",)
    suffixes = ("Model", "ForTokenClassification", "ForQuestionAnsweringSimple")
    title = "XLNet"
    parts = {
        "transformer": "bert",
        "word_embedding": "embeddings.word_embeddings",
        "layer": "encoder.layer",
        "*.rel_attn.layer_norm": "*.attention.output.LayerNorm",
        **{
            f"*.rel_attn.{name}": f"*.attention.self.distance_embedding.{name}"
            for name in ("r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")
        },
        "*.ff.layer_norm": "*.output.LayerNorm",
        "*.ff.layer_1": "*.intermediate.dense",
        "*.ff.layer_2": "*.output.dense",
    }
    renamed_fields = {
        "d_model": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "d_inner": "intermediate_size",
        "ff_activation": "hidden_act",
    }
    types = {"clamp_len": integer(-1, optional=True)}
    only = {
        "attn_type": (["bi"], "tokens see one side alone"),
        "bi_data": ([False, None], "half of each batch has its positions reversed"),
        "untie_r": ([True, None], "all layers share biases"),
    }
    read_directly = True
    masks_queries = True
    tolerance = 1e-5  # Transformers rounds the sinusoids to float32
    layout = Layout("XLNet", (r"\.rel_attn\.",))

    def joints(self) -> Iterable[Joint]:
        """Projections in three dimensions, from the hidden size to the heads."""
        for name in ("query", "key", "value"):
            yield Joint(
                (f".rel_attn.{name[0]}",),
                (f".attention.self.{name}.weight",),
                lambda config, name, tensor: [_rows(config, name, tensor).T.contiguous()],
                lambda config, name, tensor: [_by_head(config, name, tensor.T).contiguous()],
            )
        yield without_bias(".rel_attn.o", ".attention.output.dense", _rows, _by_head)

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """Remove `mask_emb`, which an encoder does not use."""
        return super().unpack({name: tensor for name, tensor in tensors.items() if not name.endswith(MASK)})

    def pack(self, tensors: Tensors) -> Tensors:
        """The inverse; `mask_emb` is zero."""
        packed = super().pack(tensors)
        words = next(name for name in packed if name.endswith("word_embedding.weight"))
        mask = packed[words].new_zeros(1, 1, self.config["d_model"])
        return {**packed, words.replace("word_embedding.weight", MASK): mask}

    def more_fields(self) -> dict[str, Any]:
        """No biases, token types as relations only, one dropout rate, none before a classifier."""
        rates = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        fields = dict.fromkeys(rates, self.config.get("dropout", 0.1)) | {"classifier_dropout": 0.0}
        return {**fields, "attention_biases": [], "type_vocab_size": 0, "embedding_norm": False}

    def find_positions(self) -> Positions:
        """XLNet's, up to `clamp_len`."""
        clamp = self.config.get("clamp_len") or -1
        return Positions(absolute=False, scheme="xlnet", options={"clamp_len": clamp if clamp > 0 else None})
