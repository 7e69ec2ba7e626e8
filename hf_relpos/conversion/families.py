"""Checkpoints with a body like BERT's: recognise them, and say what their tensors, fields and heads are in BERT.

BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE, DistilBERT, ALBERT and MPNet, whose positions are absolute
(MPNet has T5's bias beside them); and those that are relative already: NEZHA in both layouts, and the first six with
`relative_key` or `relative_key_query`, as Transformers ≤ 4.57 wrote them. A new family is one entry of `FAMILIES`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .names import BASE_RULES, RULES, Rule, is_scheme, is_table, to_stock
from .source import ConversionError, some


KINDS = ("relative_key", "relative_key_query")
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
        stems: what the names of its classes begin with.
        suffixes: keys of `COUNTERPARTS`: the heads that compute what BERT's compute.
        rules: its own names, on the left, and BERT's.
        stock: `model_type` of the Transformers class that has the same body, but absolute positions.
        defaults: of its configuration, where they are not BERT's.
        not_kept: fields of its configuration that mean nothing to BERT.
        spellings: fields of its configuration that BERT spells differently.
        always_gelu: whether `OWN_ACTIVATION` holds for its heads.
        relative: whether Transformers had it with the relative positions of `KINDS`, too.
        token_types: whether it has them; where not, BERT's are zero.
        padding: given the configuration, the token that takes no position: its id is the row of its own in the table
            of positions, in which those of the others begin one row later. None where rows are positions.
        layers: given the configuration, what the names of each layer's tensors begin with (`encoder.…`), in order and
            with repetitions, where layers share tensors. None for BERT's own, one for each.
        tokenizer: class of its tokenizer, for files that do not say it; None for BERT's.
        own_scheme: key of `hf_relpos.SCHEMES`: what its attention adds beside absolute positions; None for nothing.
        own_options: options of that.
    """

    stems: tuple[str, ...]
    suffixes: tuple[str, ...]
    rules: tuple[Rule, ...]
    stock: str
    defaults: dict[str, Any] = field(default_factory=dict)
    not_kept: tuple[str, ...] = ()
    spellings: dict[str, str] = field(default_factory=dict)
    always_gelu: bool = False
    relative: bool = True
    token_types: bool = True
    padding: Callable[[Mapping[str, Any]], int] | None = None
    layers: Callable[[Mapping[str, Any]], list[str]] | None = None
    tokenizer: str | None = None
    own_scheme: str | None = None
    own_options: dict[str, Any] = field(default_factory=dict)

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
    """Rules for the weight and the bias of modules, of which each layer has one."""
    return tuple(
        Rule(f"*.{old}.{part}", f"*.{new}.{part}") for old, new in names.items() for part in ("weight", "bias")
    )


def pad_token(config: Mapping[str, Any]) -> int:
    """The padding token, as the configuration names it."""
    return config["pad_token_id"]


def albert_layers(config: Mapping[str, Any]) -> list[str]:
    """Groups of consecutive layers share one set of tensors, of `inner_group_num` layers that are passed in turn."""
    layers, groups = config["num_hidden_layers"], config["num_hidden_groups"]
    return [
        f"encoder.albert_layer_groups.{number * groups // layers}.albert_layers.{inner}."
        for number in range(layers)
        for inner in range(config["inner_group_num"])
    ]


ALL = tuple(suffix for suffix in COUNTERPARTS if suffix not in ("ForCausalLM", "LMHeadModel"))
ROBERTA_HEADS = (
    Rule("lm_head.dense.*", "cls.predictions.transform.dense.*"),
    Rule("lm_head.layer_norm.*", "cls.predictions.transform.LayerNorm.*"),
    Rule("lm_head.*", "cls.predictions.*"),
    Rule("classifier.dense.*", "bert.pooler.dense.*"),
    Rule("classifier.out_proj.*", "classifier.*"),
)
ROBERTA = {
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

# By `model_type`. NEZHA's original layout calls itself "bert" and is told apart by `use_relative_position`.
FAMILIES = {
    "bert": Family(
        stems=("Bert",), suffixes=(*ALL, "LMHeadModel"), rules=(), stock="bert", not_kept=("embedding_size",)
    ),
    "nezha": Family(
        stems=("Nezha", "Bert"),
        suffixes=ALL,
        rules=(Rule("nezha.*", "bert.*"),),
        stock="bert",
        defaults={"vocab_size": 21128, "classifier_dropout": 0.1, "bos_token_id": 2, "eos_token_id": 3},
        not_kept=("use_relative_position", "max_relative_position", "embedding_size"),
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
        relative=False,
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
        relative=False,
        layers=albert_layers,
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
        defaults={"vocab_size": 30527, "relative_attention_num_buckets": 32, **SPECIAL_TOKENS},
        not_kept=("relative_attention_num_buckets", "embedding_size"),
        always_gelu=True,
        relative=False,
        token_types=False,
        padding=lambda config: 1,  # whatever the configuration says
        tokenizer="MPNetTokenizer",
        own_scheme="t5",
        own_options={"buckets": 32, "max_distance": 128},
    ),
}


@dataclass(frozen=True)
class SourceSpec:
    """A checkpoint of one of the families, as its configuration describes it.

    Attributes:
        family: value of `FAMILIES`.
        evidence: the field that says so, and its value.
        absolute: it adds a table of absolute positions at the input.
        scheme: key of `hf_relpos.SCHEMES`, of what is relative in it; None for nothing.
        options: of the scheme.
        config: config.json, completed with the family's defaults.
    """

    family: Family
    evidence: str
    absolute: bool
    scheme: str | None
    options: dict[str, Any]
    config: dict[str, Any]

    @property
    def cut(self) -> int:
        """Rows in front of the table of absolute positions that no token with a position reads."""
        return self.family.padding(self.config) + 1 if self.absolute and self.family.padding else 0

    @property
    def fields(self) -> dict[str, Any]:
        """What BERT's configuration takes over."""
        family = self.family
        fields = {
            family.spellings.get(key, key): value for key, value in self.config.items() if key not in family.not_kept
        }
        fields["max_position_embeddings"] = fields.get("max_position_embeddings", 512) - self.cut
        if family.layers:
            fields["num_hidden_layers"] = len(family.layers(self.config))
        if family.tokenizer and not fields.get("tokenizer_class"):
            fields["tokenizer_class"] = family.tokenizer
        if fields.get("embedding_size") == fields.get("hidden_size", 768):
            fields.pop("embedding_size", None)
        return fields

    def more(self, base: bool) -> dict[str, torch.Size]:
        """Stock name and shape of tensors that our model has no place for and that are folded."""
        if not self.config.get("use_task_id"):
            return {}
        shape = torch.Size((self.config["task_type_vocab_size"], self.config.get("hidden_size", 768)))
        return {TASK_TYPES if base else f"bert.{TASK_TYPES}": shape}

    def spell(self, name: str, base: bool) -> list[str]:
        """The names in stock BERT of a tensor in a file: one, or one for each layer that shares it.

        Args:
            base: for BertModel, which is the encoder itself.
        """
        names = [name]
        if self.family.layers:
            shared = enumerate(self.family.layers(self.config))
            names = [name.replace(old, f"encoder.layer.{number}.") for number, old in shared if old in name] or names
        return [to_stock(each, self.family.naming(base))[0] for each in names]


def recognise(folder: Path, config: Mapping[str, Any]) -> SourceSpec:
    """What config.json says of a checkpoint.

    Raises:
        ConversionError: for an architecture or kind of positions that is not known; a NEZHA with cross-attention, an
            ALBERT that projects its embeddings to their own size, and an MPNet with other buckets than it computes.
    """
    found = config.get("model_type", "bert")  # the first BERT files have none
    if found not in FAMILIES:
        raise ConversionError(
            f"{folder}: model_type = {found!r}; only {some(map(repr, FAMILIES), 20)} checkpoints can be converted"
        )
    kind = config.get("position_embedding_type") or "absolute"
    family, evidence = FAMILIES[found], f"position_embedding_type = {kind!r}"
    absolute, scheme, options = False, kind, {}
    if found == "nezha" or (found == "bert" and bool(config.get("use_relative_position"))):
        evidence = (
            "model_type = 'nezha'"
            if found == "nezha"
            else f"use_relative_position = {config['use_relative_position']!r} marks a NEZHA"
        )
        if kind != "absolute":
            raise ConversionError(
                f"{folder}: {evidence}, and position_embedding_type = {kind!r} something else; correct config.json"
            )
        if config.get("add_cross_attention"):
            raise ConversionError(
                f"{folder}: add_cross_attention = True: NEZHA has relative terms in cross-attention too, which stays "
                "absolute here; only its encoders can be converted"
            )
        family, scheme = FAMILIES["nezha"], "nezha"
        options = {"max_relative_position": config.get("max_relative_position", 64)}
    elif kind == "absolute":
        absolute, scheme, options = True, family.own_scheme, family.own_options
    elif kind not in KINDS or not family.relative:
        kinds = ["absolute", *(KINDS if family.relative else ())]
        raise ConversionError(
            f"{folder}: {evidence}; of model_type = {found!r}, only checkpoints with {some(map(repr, kinds))} "
            "positions can be converted"
        )
    completed = {**family.defaults, **config}
    if found == "albert" and completed["embedding_size"] == completed["hidden_size"]:
        raise ConversionError(
            f"{folder}: embedding_size = hidden_size = {completed['hidden_size']!r}: this ALBERT projects its "
            "embeddings all the same, for which there is no place here; only one with a smaller embedding_size can be "
            "converted"
        )
    buckets = completed.get("relative_attention_num_buckets")
    if found == "mpnet" and buckets != family.own_options["buckets"]:
        raise ConversionError(
            f"{folder}: relative_attention_num_buckets = {buckets!r}: Transformers computes "
            f"{family.own_options['buckets']} buckets whatever this says, so it is not clear which are meant; only "
            "one with that number can be converted"
        )
    return SourceSpec(family, evidence, absolute, scheme, options, completed)


def check_tables(spec: SourceSpec, folder: Path, names: Iterable[str]) -> None:
    """Refuse weights that are not what the configuration claims.

    Args:
        names: names of the tensors in the files.

    Raises:
        ConversionError: for tables of distances that are missing, or there although the configuration is absolute, and
            positions in a NEZHA, which has none.
    """
    names = list(names)
    tables = [name for name in names if is_scheme(name)]
    if spec.absolute:
        if tables:
            raise ConversionError(
                f"{folder}: the weights have tables of distances ({some(tables, 1)}), so the checkpoint is relative "
                "already; set position_embedding_type in config.json to 'relative_key' or 'relative_key_query', "
                "whichever it was trained with"
            )
    elif spec.scheme == "nezha":
        wrong = [name for name in names if is_table(name) or is_scheme(name)]
        if wrong:
            raise ConversionError(
                f"{folder}: {spec.evidence}, whose positions are computed, but the weights hold {some(wrong, 1)}: "
                "they belong to another model; correct config.json or restore the file"
            )
    elif not tables:
        raise ConversionError(
            f"{folder}: {spec.evidence}, but the weights have no tables of distances. Stock Transformers v5 drops "
            "them when it loads and saves such a checkpoint: go back to the original files"
        )


def choose_head(spec: SourceSpec, folder: Path, asked: str | None = None) -> tuple[str, str, str]:
    """The class of the source, that of stock BERT with the same outputs, and a note on a head that is left behind.

    Args:
        asked: either of the two classes; None for the first of `config.architectures`.

    Returns:
        For a pre-training head that BERT does not have, the classes without head, and the note; else an empty note.

    Raises:
        ConversionError: for a class that is not the family's, one whose head computes something else than BERT's, and
            one that BERT does not have although it was asked for.
    """
    family, heads = spec.family, spec.family.heads(spec.config)
    base = f"{family.stems[0]}Model"
    listed = spec.config.get("architectures") or [base]
    found = asked if asked is not None else listed[0] if isinstance(listed, list) else listed
    if found in heads:
        return found, heads[found], ""
    if asked is not None and asked in heads.values():
        return next(own for own, stock in heads.items() if stock == asked), asked, ""
    ours = family.stems != ("Bert",) and str(found).startswith(family.stems)
    if asked is None and ours and str(found).endswith(PRETRAINING):
        return base, "BertModel", f"the head of {found}, which BERT does not have"
    where = "architecture" if asked is not None else f"{folder}: architectures"
    remedy = "" if asked is not None else f"; pass architecture={base!r} to convert the encoder without its head"
    raise ConversionError(f"{where} = {found!r} has no counterpart here; known: {', '.join(heads)}{remedy}")
