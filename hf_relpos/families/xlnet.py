"""XLNet (Yang et al., arXiv 1906.08237) as an encoder: no permutations, no memory of earlier segments."""

from collections.abc import Mapping
from typing import Any

import torch

from .errors import ConversionError
from .family import OF_DECODERS, SUMMARY, Family, Layout, Positions, Tensors, renamed
from .names import Rule


# Projections (D, H, d) in a file, by the linear layer here.
INPUTS = {".rel_attn.q": "query", ".rel_attn.k": "key", ".rel_attn.v": "value"}
OUTPUT = ".rel_attn.o"
SELF, DENSE = ".attention.self.", ".attention.output.dense."
SCHEME = ("r", "r_w_bias", "r_r_bias", "r_s_bias", "seg_embed")
# Used in permutation language modelling only, but in the state dict of every XLNet.
MASK = "mask_emb"


def _check(config: Mapping[str, Any], name: str, tensor: torch.Tensor) -> None:
    size, heads = config["d_model"], config["n_head"]
    if tensor.shape != (size, heads, size // heads):
        raise ConversionError(
            f"{name} has shape {tuple(tensor.shape)}, and config.json makes it {(size, heads, size // heads)}; "
            "correct config.json or take the weights that belong to it"
        )


def _unpack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """Convert projections (D, H, d) to weights (H·d, D) and (D, H·d), the latter with a zero bias."""
    layers: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem, end = name[:-2], name[-2:]
        part = INPUTS.get(f".rel_attn{end}") if stem.endswith(".rel_attn") else None
        if part is not None:
            _check(config, name, tensor)
            layers[f"{stem.removesuffix('.rel_attn')}{SELF}{part}.weight"] = tensor.flatten(1).T.contiguous()
        elif name.endswith(OUTPUT):
            _check(config, name, tensor)
            dense = name.removesuffix(OUTPUT) + DENSE
            layers[f"{dense}weight"] = tensor.flatten(1)
            layers[f"{dense}bias"] = tensor.new_zeros(len(tensor))
        elif name.rpartition(".")[2] != MASK:
            layers[name] = tensor
    return layers


def _pack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    """The inverse; `mask_emb`, which an encoder does not use, is zero."""
    size, heads = config["d_model"], config["n_head"]
    projections: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found = next((old for old, part in INPUTS.items() if name.endswith(f"{SELF}{part}.weight")), None)
        if found is not None:
            stem = name[: name.index(SELF)]
            projections[stem + found] = tensor.T.reshape(size, heads, -1).contiguous()
        elif name.endswith(f"{DENSE}weight"):
            projections[name.removesuffix(f"{DENSE}weight") + OUTPUT] = tensor.reshape(size, heads, -1)
        elif name.endswith(f"{DENSE}bias"):
            if tensor.any():
                raise ConversionError(f"{name} is not zero, and XLNet has no such bias; it was trained here")
        else:
            projections[name] = tensor
            if name.endswith("word_embedding.weight"):
                projections[name.replace("word_embedding.weight", MASK)] = tensor.new_zeros(1, 1, size)
    return projections


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
        defaults={
            "vocab_size": 32000,
            "d_model": 1024,
            "n_layer": 24,
            "n_head": 16,
            "d_inner": 4096,
            "ff_activation": "gelu",
            "pad_token_id": 5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
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
