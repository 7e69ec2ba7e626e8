"""NomicBERT: nomic-embed-text-v1 and v1.5, snowflake-arctic-embed-m-long, CodeRankEmbed.

The original code is named in `auto_map` (nomic-ai/nomic-bert-2048), with GPT-2's names in config.json; Transformers
has the same tensors, and other names there. Post-LN, SwiGLU, hardly any biases, rotations of half a head with the
other half, whose base the original raises for batches of more tokens than it was trained on.
"""

from collections.abc import Iterable
from typing import Any

import torch

from ..models.checks import number
from .family import Family, Layout, Positions
from .gte import OWN_CODE
from .joints import Joint, projections, without_bias
from .rotary import BASE, other_scaling, rope_options


ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
UNSET: tuple[list[Any], str] = ([False, None], OWN_CODE)


class NomicBert(Family, name="nomic_bert"):
    """NomicBERT."""

    class_prefixes = ("NomicBert",)
    suffixes = ("Model", "ForPreTraining", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    title = "NomicBERT"
    parts = {
        "nomic_bert": "bert",
        "emb_ln": "embeddings.LayerNorm",
        "layers": "layer",
        "cls.predictions.transform.layer_norm": "cls.predictions.transform.LayerNorm",
        "*.attn.out_proj": "*.attention.output.dense",
        "*.mlp.fc2": "*.output.dense",
        "*.norm1": "*.attention.output.LayerNorm",
        "*.norm2": "*.output.LayerNorm",
    }
    stock = None
    renamed_fields = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
        "resid_pdrop": "hidden_dropout_prob",
        "attn_pdrop": "attention_probs_dropout_prob",
    }
    types = {
        "rope_theta": BASE,
        "rotary_emb_base": BASE,
        "rotary_emb_fraction": number(0, 1),
        "rotary_scaling_factor": number(0, 1e6, optional=True),
    }
    only = {
        "num_experts": ([0, None], f"{OWN_CODE}; Transformers starts new feed-forward parts without an error"),
        "activation_function": (list(ACTIVATIONS), OWN_CODE),
        **dict.fromkeys(("prenorm", "use_rms_norm", "parallel_block", "causal", "mlp_fc1_bias"), UNSET),
        "scale_attn_by_inverse_layer_idx": UNSET,
        "scale_attn_weights": ([True, None], OWN_CODE),
        "rotary_emb_scale_base": ([None], OWN_CODE),
    }
    pools = False
    implied_fields = {"qkv_proj_bias": (False, ".attn.out_proj.bias"), "mlp_fc2_bias": (False, ".mlp.fc2.bias")}
    read_directly = True
    published = {"rotary_scaling_factor": 2.0, "n_positions": 8192}
    layout = Layout("NomicBERT", (r"\.attn\.Wqkv\.", r"\.mlp\.fc1[12]\."))

    def joints(self) -> Iterable[Joint]:
        """One projection of queries, keys and values, the gated unit, and linear layers without a bias."""
        yield projections(".attn.Wqkv.")
        yield Joint(
            (".mlp.fc12.", ".mlp.fc11."),
            (".intermediate.dense.",),
            lambda config, name, *halves: [torch.cat(halves)],
            lambda config, name, tensor: tensor.chunk(2),
        )
        if not self.config.get("qkv_proj_bias", False):
            yield without_bias(".attn.out_proj.weight", ".attention.output.dense")
        if not self.config.get("mlp_fc2_bias", False):
            yield without_bias(".mlp.fc2.weight", ".output.dense")

    def more_fields(self) -> dict[str, Any]:
        """A gated unit and its activation, and which projections have biases."""
        fields: dict[str, Any] = {"feed_forward_type": "glu"}
        if not self.config.get("qkv_proj_bias", False):
            fields["attention_biases"] = []
        if "activation_function" in self.config:
            fields["hidden_act"] = ACTIVATIONS[self.config["activation_function"]]
        return fields

    def find_positions(self) -> Positions:
        """Rotations, with dynamic NTK scaling in the original code."""
        config = self.config
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

    def written(self) -> dict[str, str]:
        """The original code calls the encoder `bert`, too."""
        return {"bert": "bert"} if "n_embd" in self.config else {}

    def unsupported_reason(self) -> str:
        """A model without rotations and unknown scalings are not supported."""
        if self.config.get("rotary_emb_fraction", 1.0) == 0:
            return "rotary_emb_fraction = 0: positions are absolute, which only its own code reads"
        return other_scaling(self.config)
