"""NomicBERT: nomic-embed-text-v1 and v1.5, snowflake-arctic-embed-m-long, CodeRankEmbed.

The original code is named in `auto_map` (nomic-ai/nomic-bert-2048), with GPT-2's names in config.json; Transformers
has the same tensors, and other names there. Post-LN, SwiGLU, hardly any biases, rotations of half a head with the
other half, whose base the original raises for batches of more tokens than it was trained on.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .errors import ConversionError
from .family import Family, Layout, Positions, Tensors, renamed
from .fused import ROPE_FIELDS, Joint, join, other_scaling, other_value, projections, rope_options, split
from .names import Rule, from_stock


THEIRS = {
    "attn.out_proj": "attention.output.dense",
    "mlp.fc2": "output.dense",
    "norm1": "attention.output.LayerNorm",
    "norm2": "output.LayerNorm",
}
HEAD = Rule("cls.predictions.transform.layer_norm.*", "cls.predictions.transform.LayerNorm.*")
LAYER, OUR_LAYER = "encoder.layers.", "encoder.layer."
# Linear layers that have no bias here where it is zero.
BIASED = (".attention.output.dense.", ".output.dense.")
ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
BERTS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
}
# Fields of the original code that have to be false, or this.
ONLY: dict[str, Any] = {
    "prenorm": False,
    "use_rms_norm": False,
    "parallel_block": False,
    "causal": False,
    "mlp_fc1_bias": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "rotary_emb_scale_base": None,
    "num_experts": 0,
}


def _size(config: Mapping[str, Any]) -> int:
    return int(config.get("n_embd", config.get("hidden_size", 768)))


JOINTS = (
    projections(".attn.Wqkv.", _size),
    Joint(
        (".mlp.fc12.", ".mlp.fc11."),
        (".intermediate.dense.",),
        lambda config, name, *halves: [torch.cat(halves)],
        lambda config, name, tensor: tensor.chunk(2),
    ),
)


def _unpack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    found = {name.replace(LAYER, OUR_LAYER): tensor for name, tensor in tensors.items()}
    found = split(JOINTS, config, found)
    for name in [name for name in found if name.endswith((".attn.out_proj.weight", ".mlp.fc2.weight"))]:
        tensor = found[name]
        found.setdefault(f"{name.removesuffix('weight')}bias", tensor.new_zeros(len(tensor)))
    return found


def _pack(config: Mapping[str, Any], tensors: Tensors) -> dict[str, torch.Tensor]:
    rules = (Rule("bert.*" if "n_embd" in config else "nomic_bert.*", "bert.*"), HEAD, *renamed(THEIRS))
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in join(JOINTS, config, tensors).items():
        their = name.replace(OUR_LAYER, LAYER).replace("embeddings.LayerNorm.", "emb_ln.")
        if name.endswith("bias") and any(each in name for each in BIASED) and not _has_bias(config, name):
            if bool(tensor.any()):
                raise ConversionError(f"{name} was trained, and NomicBERT has no such bias; keep the model as it is")
        elif not name.startswith("pooler."):  # which an encoder does not have
            packed[from_stock(their, rules)] = tensor
    return packed


def _has_bias(config: Mapping[str, Any], name: str) -> bool:
    return bool(config.get("qkv_proj_bias" if ".attention." in name else "mlp_fc2_bias", False))


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"feed_forward_type": "glu"}
    if not config.get("qkv_proj_bias", False):
        fields["attention_biases"] = []
    if "activation_function" in config:
        fields["hidden_act"] = ACTIVATIONS[config["activation_function"]]
    return fields


def _positions(config: Mapping[str, Any]) -> Positions:
    options = rope_options(config, config.get("rotary_emb_base", 1000.0))
    if config.get("rotary_emb_interleaved"):
        options["pairing"] = "adjacent"
    if (share := config.get("rotary_emb_fraction", 1.0)) != 1.0:
        options["rope_parameters"]["partial_rotary_factor"] = share
    if factor := config.get("rotary_scaling_factor"):
        options["rope_parameters"] |= {
            "rope_type": "dynamic",
            "factor": float(factor),
            "original_max_position_embeddings": config.get("max_trained_positions", 2048),
        }
    return Positions(absolute=False, scheme="rope", options=options)


def _unsupported_reason(config: Mapping[str, Any]) -> str:
    if config.get("num_experts"):
        return (
            f"num_experts = {config['num_experts']!r}: a mixture of experts has no counterpart here. Its own code "
            "reads it; Transformers' class nomic_bert does not, and starts new feed-forward parts without an error"
        )
    if reason := other_value(config, ONLY):
        return reason
    if config.get("activation_function", "swiglu") not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        return f"activation_function = {config['activation_function']!r}: only {known} have a counterpart here"
    if config.get("rotary_emb_fraction", 1.0) == 0:
        return "rotary_emb_fraction = 0: with absolute positions it is another model, which only its own code reads"
    return other_scaling(config)


FAMILIES: dict[str, Family] = {
    "nomic_bert": Family(
        class_prefixes=("NomicBert",),
        suffixes=("Model", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
        rules=(
            Rule("nomic_bert.*", "bert.*"),
            Rule("emb_ln.*", "bert.emb_ln.*"),
            *renamed(THEIRS),
            Rule("bert.emb_ln.*", "bert.embeddings.LayerNorm.*"),
            HEAD,
        ),
        dropped_fields=(
            *ONLY,
            *ROPE_FIELDS,
            *(
                "activation_function dense_seq_output embd_pdrop fused_bias_fc fused_dropout_add_ln head_dim "
                "max_trained_positions mlp_fc2_bias pad_vocab_size_multiple parallel_block_tied_norm qkv_proj_bias "
                "reorder_and_upcast_attn rotary_emb_base rotary_emb_fraction rotary_emb_interleaved "
                "rotary_scaling_factor use_flash_attn use_xentropy"
            ).split(),
        ),
        renamed_fields=BERTS,
        positions=_positions,
        fields=_fields,
        unpack=_unpack,
        pack=_pack,
        read_directly=True,
        unsupported_reason=_unsupported_reason,
        title="NomicBERT",
        published={"rotary_scaling_factor": 2.0, "n_positions": 8192},
        layout=Layout("NomicBERT", (r"\.attn\.Wqkv\.", r"\.mlp\.fc1[12]\.")),
    )
}
