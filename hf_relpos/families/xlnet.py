"""XLNet (Yang et al., arXiv 1906.08237) as an encoder: no permutations, no memory of earlier segments."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .errors import ConversionError
from .family import OF_DECODERS, SUMMARY, Family, Layout, Positions, Tensors, renamed
from .fused import Joint, join, split
from .names import Rule


SCHEME = ("r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")
# Used in permutation language modelling only, but in the state dict of every XLNet.
MASK = "mask_emb"


def _rows(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A projection (D, H, d) as (D, H·d)."""
    size, heads = config["d_model"], config["n_head"]
    if tensor.shape != (size, heads, size // heads):
        raise ConversionError(
            f"{name} has shape {tuple(tensor.shape)}, and config.json makes it {(size, heads, size // heads)}; "
            "correct config.json or take the weights that belong to it"
        )
    return tensor.flatten(1)


def _by_head(config: Mapping[str, Any], tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(config["d_model"], config["n_head"], -1)


def _output(config: Mapping[str, Any], name: str, weight: torch.Tensor, bias: torch.Tensor) -> Iterable[torch.Tensor]:
    if bias.any():
        raise ConversionError(
            f"{name.removesuffix('weight')}bias is not zero, and XLNet has no such bias; it was trained here"
        )
    return [_by_head(config, weight)]


JOINTS = (
    *(
        Joint(
            (f".rel_attn.{name[0]}",),
            (f".attention.self.{name}.weight",),
            lambda config, name, tensor: [_rows(config, name, tensor).T.contiguous()],
            lambda config, name, tensor: [_by_head(config, tensor.T).contiguous()],
        )
        for name in ("query", "key", "value")
    ),
    Joint(
        (".rel_attn.o",),
        (".attention.output.dense.weight", ".attention.output.dense.bias"),
        lambda config, name, tensor: [_rows(config, name, tensor), tensor.new_zeros(len(tensor))],
        _output,
    ),
)


def _unpack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    return split(JOINTS, config, {name: tensor for name, tensor in tensors.items() if not name.endswith(MASK)})


def _pack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """The inverse; `mask_emb`, which an encoder does not use, is zero."""
    words = next(name for name in tensors if name.endswith("word_embedding.weight"))
    mask = tensors[words].new_zeros(1, 1, config["d_model"])
    return {**join(JOINTS, config, tensors), words.replace("word_embedding.weight", MASK): mask}


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


def _unsupported_reason(config: Mapping[str, Any]) -> str:
    if config.get("attn_type", "bi") != "bi":
        return f"attn_type = {config['attn_type']!r}: only 'bi', whose tokens see both sides, has a counterpart here"
    if config.get("bi_data"):
        return "bi_data = True: half of each batch has its positions reversed, which has no counterpart here"
    if config.get("untie_r") is False:
        return "untie_r = False: biases that all layers share have no counterpart here"
    return ""


FAMILIES: dict[str, Family] = {
    "xlnet": Family(
        class_prefixes=("XLNet",),
        suffixes=("Model", "ForTokenClassification", "ForQuestionAnsweringSimple"),
        rules=(
            Rule("word_embedding.*", "transformer.word_embedding.*"),
            Rule("layer.*", "transformer.layer.*"),
            Rule("transformer.word_embedding.*", "bert.embeddings.word_embeddings.*"),
            Rule("transformer.layer.*", "bert.encoder.layer.*"),
            *(Rule(f"*.rel_attn.{name}", f"*.attention.self.distance_embedding.{name}") for name in SCHEME),
            *renamed(
                {
                    "rel_attn.layer_norm": "attention.output.LayerNorm",
                    "ff.layer_norm": "output.LayerNorm",
                    "ff.layer_1": "intermediate.dense",
                    "ff.layer_2": "output.dense",
                }
            ),
        ),
        stock="xlnet",
        dropped_fields=(
            *SUMMARY,
            *OF_DECODERS,
            *(
                "attn_type bi_data clamp_len d_head dropout embedding_size end_n_top mem_len n_token reuse_len "
                "same_length start_n_top untie_r use_mems_eval use_mems_train"
            ).split(),
        ),
        renamed_fields={
            "d_model": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "d_inner": "intermediate_size",
            "ff_activation": "hidden_act",
        },
        tokenizer="XLNetTokenizer",
        positions=_positions,
        fields=_fields,
        unpack=_unpack,
        pack=_pack,
        masks_queries=True,
        read_directly=True,
        tolerance=1e-5,  # Transformers rounds the sinusoids to float32
        unsupported_reason=_unsupported_reason,
        title="XLNet",
        layout=Layout("XLNet", (r"\.rel_attn\.",)),
    )
}
