"""Families of checkpoints with a body like BERT's: what their tensors, fields, heads and positions are in BERT.

BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE, DistilBERT, ALBERT and MPNet, whose positions are absolute
(MPNet has T5's bias beside them); and those that are relative already: NEZHA in both layouts, the first six with
`relative_key` or `relative_key_query`, as Transformers ≤ 4.57 wrote them. A new family is one entry of
`FAMILIES`; those with a layout of their own are in modules of their own.
"""

from collections.abc import Mapping
from typing import Any

from .alibi import ALIBI_FAMILIES
from .deberta import DEBERTA_FAMILIES
from .family import ALL, SPECIAL_TOKENS, Family, Positions, pad_token, renamed
from .names import Rule
from .roformer import ROPE_FAMILIES
from .xlnet import XLNET_FAMILIES


def albert_layers(config: Mapping[str, Any]) -> list[str]:
    """Prefixes of ALBERT's layers: groups of consecutive layers share the tensors of `inner_group_num` layers."""
    layers, groups = config["num_hidden_layers"], config["num_hidden_groups"]
    return [
        f"encoder.albert_layer_groups.{number * groups // layers}.albert_layers.{inner}."
        for number in range(layers)
        for inner in range(config["inner_group_num"])
    ]


def _nezha_unsupported_reason(config: Mapping[str, Any]) -> str:
    if not config.get("add_cross_attention"):
        return ""
    return (
        "add_cross_attention = True: NEZHA has relative terms in cross-attention too, which stays absolute here; only "
        "its encoders can be converted"
    )


def _albert_unsupported_reason(config: Mapping[str, Any]) -> str:
    if config["embedding_size"] != config["hidden_size"]:
        return ""
    return (
        f"embedding_size = hidden_size = {config['hidden_size']!r}: this ALBERT projects its embeddings all the same, "
        "for which there is no parameter here; only one with a smaller embedding_size can be converted"
    )


# What Transformers computes, whatever the configuration says.
MPNET_BUCKETS = 32


def _mpnet_unsupported_reason(config: Mapping[str, Any]) -> str:
    buckets = config["relative_attention_num_buckets"]
    if buckets == MPNET_BUCKETS:
        return ""
    return (
        f"relative_attention_num_buckets = {buckets!r}: Transformers computes {MPNET_BUCKETS} buckets whatever this "
        "says, so it is not clear which are meant; only one with that number can be converted"
    )


ROBERTA_HEADS = (
    Rule("lm_head.dense.*", "cls.predictions.transform.dense.*"),
    Rule("lm_head.layer_norm.*", "cls.predictions.transform.LayerNorm.*"),
    Rule("lm_head.*", "cls.predictions.*"),
    Rule("classifier.dense.*", "bert.pooler.dense.*"),
    Rule("classifier.out_proj.*", "classifier.*"),
)
ROBERTA: dict[str, Any] = {
    "suffixes": (
        "Model",
        "ForMaskedLM",
        "ForCausalLM",
        "ForSequenceClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    ),
    "rules": (Rule("roberta.*", "bert.*"), *ROBERTA_HEADS),
    "not_kept": ("embedding_size",),
    "always_gelu": True,
    "padding": pad_token,
}

# This package's own, whose positions are what its configuration says.
OWN = Family(stems=("RelPosBert",), suffixes=(*ALL, "LMHeadModel"), rules=(), stock="bert", legacy_types=())
# All others, by `model_type`.
FAMILIES: dict[str, Family] = {
    "bert": Family(
        stems=("Bert",), suffixes=(*ALL, "LMHeadModel"), rules=(), stock="bert", not_kept=("embedding_size",)
    ),
    "nezha": Family(
        stems=("Nezha", "Bert"),
        suffixes=ALL,
        rules=(Rule("nezha.*", "bert.*"),),
        stock="bert",
        defaults={
            "vocab_size": 21128,
            "classifier_dropout": 0.1,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "max_relative_position": 64,
        },
        not_kept=("use_relative_position", "max_relative_position", "embedding_size"),
        legacy_types=(),
        positions=lambda config: Positions(
            absolute=False, scheme="nezha", options={"max_relative_position": config["max_relative_position"]}
        ),
        marker="use_relative_position",  # of the original layout
        unsupported_reason=_nezha_unsupported_reason,
    ),
    "roberta": Family(
        stems=("Roberta",),
        stock="roberta",
        defaults={"vocab_size": 50265, **SPECIAL_TOKENS},
        tokenizer="RobertaTokenizer",
        **ROBERTA,
    ),
    "xlm-roberta": Family(
        stems=("XLMRoberta",),
        stock="xlm-roberta",
        defaults=SPECIAL_TOKENS,
        tokenizer="XLMRobertaTokenizer",
        **ROBERTA,
    ),
    "camembert": Family(
        stems=("Camembert",), stock="camembert", defaults=SPECIAL_TOKENS, tokenizer="CamembertTokenizer", **ROBERTA
    ),
    "electra": Family(
        stems=("Electra",),
        suffixes=("Model", "ForMaskedLM", "ForCausalLM", "ForTokenClassification", "ForQuestionAnswering"),
        rules=(
            Rule("electra.*", "bert.*"),
            Rule("embeddings_project.*", "bert.embeddings_project.*"),
            Rule("bert.embeddings_project.*", "bert.embeddings.embeddings_project.*"),
            Rule("generator_predictions.*", "cls.predictions.transform.*"),
            Rule("generator_lm_head.w*", "cls.predictions.decoder.w*"),
            Rule("generator_lm_head.b*", "cls.predictions.b*"),
        ),
        stock="electra",
        defaults={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128},
        not_kept=("summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"),
        always_gelu=True,
    ),
    "ernie": Family(
        stems=("Ernie",),
        suffixes=(*ALL, "ForCausalLM"),
        rules=(Rule("ernie.*", "bert.*"),),
        stock="ernie",
        defaults={"task_type_vocab_size": 3},
        not_kept=("use_task_id", "task_type_vocab_size", "embedding_size"),
    ),
    "distilbert": Family(
        stems=("DistilBert",),
        suffixes=("Model", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering"),
        rules=(
            Rule("distilbert.*", "bert.*"),
            Rule("transformer.*", "bert.transformer.*"),
            Rule("bert.transformer.*", "bert.encoder.*"),
            *renamed(
                {
                    "attention.q_lin": "attention.self.query",
                    "attention.k_lin": "attention.self.key",
                    "attention.v_lin": "attention.self.value",
                    "attention.out_lin": "attention.output.dense",
                    "sa_layer_norm": "attention.output.LayerNorm",
                    "ffn.lin1": "intermediate.dense",
                    "ffn.lin2": "output.dense",
                    "output_layer_norm": "output.LayerNorm",
                }
            ),
            Rule("vocab_transform.*", "cls.predictions.transform.dense.*"),
            Rule("vocab_layer_norm.*", "cls.predictions.transform.LayerNorm.*"),
            Rule("vocab_projector.w*", "cls.predictions.decoder.w*"),
            Rule("vocab_projector.b*", "cls.predictions.b*"),
        ),
        stock="distilbert",
        defaults={
            "dim": 768,
            "hidden_dim": 3072,
            "n_heads": 12,
            "n_layers": 6,
            "activation": "gelu",
            "dropout": 0.1,
            "attention_dropout": 0.1,
        },
        not_kept=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_", "embedding_size"),
        spellings={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "activation": "hidden_act",
            "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        },
        legacy_types=(),
        token_types=False,
    ),
    "albert": Family(
        stems=("Albert",),
        suffixes=(
            "Model",
            "ForMaskedLM",
            "ForSequenceClassification",
            "ForMultipleChoice",
            "ForTokenClassification",
            "ForQuestionAnswering",
        ),
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
        defaults={
            "vocab_size": 30000,
            "embedding_size": 128,
            "hidden_size": 4096,
            "num_hidden_layers": 12,
            "num_hidden_groups": 1,
            "inner_group_num": 1,
            "num_attention_heads": 64,
            "intermediate_size": 16384,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout_prob": 0.1,
            "bos_token_id": 2,
            "eos_token_id": 3,
        },
        not_kept=(
            "num_hidden_groups",
            "inner_group_num",
            "gap_size",
            "net_structure_type",
            "num_memory_blocks",
            "down_scale_factor",
        ),
        spellings={"classifier_dropout_prob": "classifier_dropout"},
        legacy_types=(),
        layers=albert_layers,
        unsupported_reason=_albert_unsupported_reason,
        tokenizer="AlbertTokenizer",
    ),
    "mpnet": Family(
        stems=("MPNet",),
        suffixes=tuple(suffix for suffix in ROBERTA["suffixes"] if suffix != "ForCausalLM"),
        rules=(
            Rule("mpnet.*", "bert.*"),
            *renamed(
                {
                    "attention.attn.q": "attention.self.query",
                    "attention.attn.k": "attention.self.key",
                    "attention.attn.v": "attention.self.value",
                    "attention.attn.o": "attention.output.dense",
                    "attention.LayerNorm": "attention.output.LayerNorm",
                }
            ),
            Rule(
                "bert.encoder.relative_attention_bias.*",
                "bert.encoder.distance_embedding.relative_attention_bias.*",
            ),
            *ROBERTA_HEADS,
        ),
        stock="mpnet",
        defaults={"vocab_size": 30527, "relative_attention_num_buckets": MPNET_BUCKETS, **SPECIAL_TOKENS},
        not_kept=("relative_attention_num_buckets", "embedding_size"),
        always_gelu=True,
        legacy_types=(),
        token_types=False,
        padding=lambda config: 1,  # whatever the configuration says
        tokenizer="MPNetTokenizer",
        positions=lambda config: Positions(
            absolute=True, scheme="t5", options={"buckets": MPNET_BUCKETS, "max_distance": 128}
        ),
        unsupported_reason=_mpnet_unsupported_reason,
    ),
    **ALIBI_FAMILIES,
    **DEBERTA_FAMILIES,
    **ROPE_FAMILIES,
    **XLNET_FAMILIES,
}
