"""Families of checkpoints with a body like BERT's: what their tensors, fields, heads and positions are in BERT.

BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE, DistilBERT, ALBERT and MPNet, whose positions are absolute
(MPNet has T5's bias beside them); and those that are relative already: NEZHA in both layouts, and the first six with
`relative_key` or `relative_key_query`, as Transformers ≤ 4.57 wrote them. A new family is one entry of `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .names import BASE_RULES, RULES, Rule


@dataclass(frozen=True)
class LegacyAttention:
    """The relative self-attention of a class in Transformers ≤ 4.57, which v5 does not have.

    Attributes:
        terms: letters of the formula: A is added to the keys, B to the queries, V to the values. All have the same
            vectors.
        stored: whether the vectors are a table in the weights, one for each distance; if not, they are sinusoids,
            clipped at the option `max_relative_position`.
    """

    terms: str
    stored: bool = True


# By scheme; the first two were values of `position_embedding_type` of stock BERT.
LEGACY_ATTENTION = {
    "relative_key": LegacyAttention("A"),
    "relative_key_query": LegacyAttention("AB"),
    "nezha": LegacyAttention("AV", stored=False),
}
LEGACY_TYPES = ("relative_key", "relative_key_query")
COUNTERPARTS = {
    "Model": "BertModel",
    "ForPreTraining": "BertForPreTraining",
    "ForMaskedLM": "BertForMaskedLM",
    "ForCausalLM": "BertLMHeadModel",
    "LMHeadModel": "BertLMHeadModel",
    "ForNextSentencePrediction": "BertForNextSentencePrediction",
    "ForSequenceClassification": "BertForSequenceClassification",
    "ForMultipleChoice": "BertForMultipleChoice",
    "ForTokenClassification": "BertForTokenClassification",
    "ForQuestionAnswering": "BertForQuestionAnswering",
}
# Heads of language modelling that apply GELU whatever `hidden_act` says, where BERT's obeys it.
OWN_ACTIVATION = ("ForMaskedLM", "ForCausalLM")
# A head of these that BERT does not have is left behind; one of a task is what the checkpoint is for, and refused.
PRETRAINING = ("ForPreTraining", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "WithLMHead")
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
TASK_TYPES = "embeddings.task_type_embeddings.weight"


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
        stems: prefixes of the names of its classes.
        suffixes: keys of `COUNTERPARTS`: the heads whose outputs are those of BERT's.
        rules: its own names, on the left, and BERT's.
        stock: `model_type` of the Transformers class that has the same body, but absolute positions.
        defaults: of its configuration, where they differ from BERT's.
        not_kept: fields of its configuration that BERT does not have.
        spellings: field of its configuration to BERT's field.
        always_gelu: whether `OWN_ACTIVATION` holds for its heads.
        legacy_types: values of `position_embedding_type` that Transformers ≤ 4.57 had besides `absolute`.
        absolute: whether it has a table of absolute positions, unless `position_embedding_type` is a legacy one.
        token_types: whether it has token type embeddings; where not, those of the result are zero.
        padding: configuration to the id of the padding token, which is `padding_idx` of the position table, too;
            position 0 is the row after it. None where position 0 is row 0.
        layers: configuration to the prefix (`encoder.…`) of each layer's tensors, in order; layers that share tensors
            have the same. None for BERT's prefixes.
        tokenizer: class of its tokenizer, for files that do not name it; None for BERT's.
        scheme: key of `hf_relpos.SCHEMES`: relative positions of all its checkpoints; None for none.
        options: configuration to options of that scheme.
        marker: field that, set to true, marks it in a file whose `model_type` is "bert"; None for none.
        unsupported_reason: configuration to why it cannot be converted; empty if it can.
    """

    stems: tuple[str, ...]
    suffixes: tuple[str, ...]
    rules: tuple[Rule, ...]
    stock: str
    defaults: dict[str, Any] = field(default_factory=dict)
    not_kept: tuple[str, ...] = ()
    spellings: dict[str, str] = field(default_factory=dict)
    always_gelu: bool = False
    legacy_types: tuple[str, ...] = LEGACY_TYPES
    absolute: bool = True
    token_types: bool = True
    padding: Callable[[Mapping[str, Any]], int] | None = None
    layers: Callable[[Mapping[str, Any]], list[str]] | None = None
    tokenizer: str | None = None
    scheme: str | None = None
    options: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    marker: str | None = None
    unsupported_reason: Callable[[Mapping[str, Any]], str] = lambda config: ""

    def heads(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Class of the family to class of BERT, for every head that this configuration lets BERT compute."""
        suffixes = self.suffixes
        if self.always_gelu and config.get("hidden_act", "gelu") != "gelu":
            suffixes = tuple(suffix for suffix in suffixes if suffix not in OWN_ACTIVATION)
        return {stem + suffix: COUNTERPARTS[suffix] for stem in self.stems for suffix in suffixes}

    def naming(self, base: bool) -> tuple[Rule, ...]:
        """All rules from a file to stock BERT; `base` for BertModel, which is the encoder itself."""
        return (*RULES, *self.rules, *(BASE_RULES[len(RULES) :] if base else ()))


def renamed(names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Rules for weight and bias of modules, old name to new."""
    return tuple(
        Rule(f"*.{old}.{part}", f"*.{new}.{part}") for old, new in names.items() for part in ("weight", "bias")
    )


def pad_token(config: Mapping[str, Any]) -> int:
    """`pad_token_id` of the configuration."""
    return config["pad_token_id"]


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


ALL = tuple(suffix for suffix in COUNTERPARTS if suffix not in ("ForCausalLM", "LMHeadModel"))
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
SPECIAL_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

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
        absolute=False,
        scheme="nezha",
        options=lambda config: {"max_relative_position": config["max_relative_position"]},
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
        scheme="t5",
        options=lambda config: {"buckets": MPNET_BUCKETS, "max_distance": 128},
        unsupported_reason=_mpnet_unsupported_reason,
    ),
}
