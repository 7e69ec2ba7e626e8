"""XLNet (Yang et al., arXiv 1906.08237) as an encoder: no permutations, no memory of earlier segments."""

from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoints.errors import check_shape
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


JOINTS = (
    *(
        Joint(
            (f".rel_attn.{name[0]}",),
            (f".attention.self.{name}.weight",),
            lambda config, name, tensor: [_rows(config, name, tensor).T.contiguous()],
            lambda config, name, tensor: [_by_head(config, name, tensor.T).contiguous()],
        )
        for name in ("query", "key", "value")
    ),
    without_bias(".rel_attn.o", ".attention.output.dense", _rows, _by_head),
)


def _unpack(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(MASK)}


def _pack(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The inverse; `mask_emb`, which an encoder does not use, is zero."""
    words = next(name for name in tensors if name.endswith("word_embedding.weight"))
    mask = tensors[words].new_zeros(1, 1, config["d_model"])
    return {**tensors, words.replace("word_embedding.weight", MASK): mask}


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of XLNet: no biases, token types as relations only, one dropout rate, none before a classifier."""
    dropout = config.get("dropout", 0.1)
    return {
        "attention_biases": [],
        "type_vocab_size": 0,
        "embedding_norm": False,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "classifier_dropout": 0.0,
    }


def _positions(config: Mapping[str, Any]) -> Positions:
    clamp = config.get("clamp_len") or -1
    return Positions(absolute=False, scheme="xlnet", options={"clamp_len": clamp if clamp > 0 else None})


FAMILIES: dict[str, Family] = {
    "xlnet": Family(
        class_prefixes=("XLNet",),
        suffixes=("Model", "ForTokenClassification", "ForQuestionAnsweringSimple"),
        title="XLNet",
        parts=lambda config: {
            "transformer": "bert",
            "word_embedding": "embeddings.word_embeddings",
            "layer": "encoder.layer",
            "*.rel_attn.layer_norm": "*.attention.output.LayerNorm",
            "*.rel_attn": "*.attention.self.distance_embedding",  # of what JOINTS leaves
            "*.ff.layer_norm": "*.output.LayerNorm",
            "*.ff.layer_1": "*.intermediate.dense",
            "*.ff.layer_2": "*.output.dense",
        },
        joints=lambda config: JOINTS,
        stock="xlnet",
        renamed_fields={
            "d_model": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "d_inner": "intermediate_size",
            "ff_activation": "hidden_act",
        },
        only={
            "attn_type": (["bi"], "tokens see one side alone"),
            "bi_data": ([False, None], "half of each batch has its positions reversed"),
            "untie_r": ([True, None], "all layers share biases"),
        },
        positions=_positions,
        tokenizer="XLNetTokenizer",
        fields=_fields,
        unpack=_unpack,
        pack=_pack,
        read_directly=True,
        masks_queries=True,
        tolerance=1e-5,  # Transformers rounds the sinusoids to float32
        layout=Layout("XLNet", (r"\.rel_attn\.",)),
    )
}
