"""Every text model of Transformers, tiny and random, and what `optimize` makes of it."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from encoders import tensors_of
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import hf_relpos


# Kinds of classes, and the mappings of Transformers that name them.
KINDS = {
    "encoder": ("MODEL_MAPPING_NAMES", "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES"),
    "masked LM": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "classifier": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",),
}
# Parts of the configurations of models that read nothing but text.
TEXT_PARTS = {"esmfold_config", "attn_config", "ffn_config", "encoder", "decoder"}
WORDS, LONGEST = 60, 64
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Patterns of fields of configurations, and their largest values; the first that fits is taken.
LARGEST = {
    r"initializer_range|init_std": 0.3,  # as large as in a trained model, or all attention is flat
    r".*vocab_size.*|.*num_hash_buckets": WORDS,
    r"(n_|max_)?(position|seq|source_position|target_position).*|max_.*position_embeddings": LONGEST,
    r"n_ctx|context_length|model_max_length": LONGEST,
    r".*lora_rank|o_lora_rank|.*_rank|mamba_d_state|state_size|ssm_state_size": 8,
    r"qk_head_dim": 16,
    r".*(head_dim|headdim|head_size|d_head|d_kv|kv_channels)|rotary_dim": 8,
    r".*num_.*layers|n_layers?|.*_layers|num_layers": 2,
    r".*(num|n)_.*heads?|n_head|num_query_groups": 2,
    r".*experts_per_tok|moe_topk|top_k.*|n_group|topk_group|.*experts_shared.*": 2,
    r".*experts": 4,
    r"index_topk|keep_window_size": 48,
    r".*(window|chunk|block|landmarks|segment|radius|stride|topk)(?!.*(layers|softcap)).*": 8,
    r"d_model|n_embd|dim|.*(hidden_size|embed_dim|emb_dim|embedding_size|embedding_dim|emb_size|projection_dim)": 16,
    r".*(intermediate|inner|ffn|dff|d_ff|feed_forward|hidden_dim|lru_width|bottleneck).*": 24,
}


SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}}
PART = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
PART |= {"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 8}
HEAD = {"head_dim": 8}
TWO_HEADS = {"num_key_value_heads": 2}
HYBRID = {"num_hidden_layers": 4}  # three layers of one kind, then one of another
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
MAMBA = {**HYBRID, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_expand": 2, "hidden_size": 16}
# Fields for configurations that the patterns do not fit, by `model_type`.
FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lfm3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma"), HYBRID),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), HEAD),
    "bailing_hybrid": {**HYBRID, **EXPERTS, "v_head_dim": 8},
    "kimi_linear": {**HYBRID, **EXPERTS},
    "nemotron": TWO_HEADS,
    "dots1": {**TWO_HEADS, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    **dict.fromkeys(("cosmos3_edge_text", "hy_v4_vl_text", "qwen2_vl_text", "qwen2_5_vl_text"), SECTIONS),
    "bamba": {**MAMBA, "attn_layer_indices": [3]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba"] * 3 + ["attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "glm5_next_text": {"num_hidden_layers": 4, "index_kpool": 4},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4},
    "deepseek_v2": {"topk_group": None, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "esm": {"vocab_size": WORDS, "mask_token_id": 4, "pad_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_n_groups": 1},
    "lilt": {"hidden_size": 24, "num_attention_heads": 2},
    "mobilebert": {"intra_bottleneck_size": 16, "true_hidden_size": 16, "embedding_size": 16},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 8], "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "mamba2": {"num_heads": 4, "n_groups": 1},
    "nemotron_h": {"n_groups": 1, "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "t5gemma": {"encoder": PART, "decoder": PART, "is_encoder_decoder": False},
}


def named() -> Iterator[tuple[str, str]]:
    """Kinds and names of the classes that take tokens and a mask, and read nothing but text; each class once."""
    seen = set()
    for kind, mappings in KINDS.items():
        for mapping in mappings:
            for names in getattr(modeling_auto, mapping).values():
                for name in (names,) if isinstance(names, str) else names:
                    found: Any = getattr(transformers, name, None)
                    if name in seen or not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
                        continue
                    seen.add(name)
                    arguments = inspect.signature(found.forward).parameters
                    others = {*(found.config_class.sub_configs or ())} - TEXT_PARTS
                    if {"input_ids", "attention_mask"} <= {*arguments} and not others:
                        yield kind, name


def small(config: Any) -> dict[str, Any]:
    """Fields that make a configuration small."""
    fields = {}
    for name, value in config.to_dict().items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            largest = next((size for pattern, size in LARGEST.items() if re.fullmatch(pattern, name)), None)
            if largest is not None and value > largest:
                fields[name] = largest
            elif name.endswith("token_id") and value >= WORDS:
                fields[name] = TOKENS.get(name, 4)
            elif "drop" in name:
                fields[name] = 0.0
    return fields


def build(name: str, **changes: Any) -> nn.Module:
    """A model of a class of Transformers, in evaluation.

    Args:
        changes: fields of its configuration.

    Raises:
        Exception: of any kind, from configurations and models that these fields do not fit.
    """
    kind: Any = getattr(transformers, name)
    fields = small(kind.config_class()) | FIELDS.get(kind.config_class.model_type, {}) | changes
    config = kind.config_class(**fields)
    if getattr(config, "pad_token_id", None) is None or config.pad_token_id < 0:
        config.pad_token_id = TOKENS["pad_token_id"]
    with torch.device("meta"):
        millions = sum(each.numel() for each in kind(config).parameters()) / 1e6
    if millions > 3:
        raise ValueError(f"{millions:.0f} million parameters")
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():  # biases begin as zeros
        if parameter.dim() == 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def batches(config: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and masks (B, L) by kind of padding; each row ends with the token for the end of a text."""
    right = torch.arange(40) < torch.tensor([40, 9, 23, 3, 14, 30])[:, None]
    words = torch.randint(10, WORDS, right.shape, generator=torch.Generator().manual_seed(1))
    end = config.eos_token_id if isinstance(getattr(config, "eos_token_id", None), int) else 2
    found = {}
    masks = {"right": right, "left": right.flip(1)}
    masks |= {"one row": right[2:3], "one row, left": right[2:3].flip(1)}
    for name, mask in masks.items():
        last = 39 - mask.flip(1).long().argmax(1)
        ids = torch.where(mask, words[: len(mask)], config.pad_token_id)
        found[name] = ids.scatter(1, last[:, None], end), mask
    return found


@torch.no_grad()
def call(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that a model returns."""
    names = inspect.signature(model.forward).parameters
    given = {name: False for name in ("use_cache", "use_mems") if name in names}
    if "decoder_input_ids" in names and "ForSequence" not in type(model).__name__:  # these read the end of the text
        given["decoder_input_ids"] = ids[:, :2]
    torch.manual_seed(0)
    return dict(tensors_of(model(input_ids=ids.clone(), attention_mask=mask.long(), **given)))


def difference(found: dict[str, Any], expected: dict[str, Any], mask: torch.Tensor) -> float:
    """The largest at tokens, and of outputs without a length, as a share of an output's largest value."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, want in expected.items():
        got = found[name]
        assert got.shape == want.shape and got.dtype == want.dtype
        got, want = (each[mask] if each.shape[:2] == mask.shape else each for each in (got.double(), want.double()))
        worst = max(worst, float((got - want).abs().nan_to_num(1.0).max() / want.abs().max().clamp(min=1e-30)))
    return worst


def measure(name: str, **changes: Any) -> dict[str, Any]:
    """What `optimize` makes of a class.

    Returns:
        "level", "" for left alone, None for a model that cannot be built of these sizes, or called with text alone;
        "padding", where it is taken out; "reason" for the latter two; and "difference", the largest of all batches.
    """
    try:
        model = build(name, **changes)
        inputs = batches(model.config)
        expected = {each: call(model, *given) for each, given in inputs.items()}
    except Exception as error:  # of configurations of all kinds
        return {"level": None, "reason": f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:80]}
    report = hf_relpos.optimize(model)
    worst = max(difference(call(model, *given), expected[each], given[1]) for each, given in inputs.items())
    if not report.encoders:
        return {"level": "", "reason": report.skipped[0].reason.partition(" (")[0], "difference": worst}
    (level,) = {each.level for each in report.encoders}
    where = "on the right" if any("padding on the right" in each.effect for each in report.encoders) else "anywhere"
    return {"level": level, "padding": where, "difference": worst}
