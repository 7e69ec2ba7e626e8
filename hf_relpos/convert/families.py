"""Checkpoints that are relative already, with a body like BERT's: recognise them, rename them, run them as they were.

NEZHA in both layouts, and BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA and ERNIE with `relative_key` or
`relative_key_query`, as Transformers ≤ 4.57 wrote them. Their weights are only renamed. A new family is one entry of
`FAMILIES`.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .names import BASE_RULES, RULES, Rule, is_scheme, is_table, to_stock
from .source import ConversionError, Source, some


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
TASK_TYPES = "embeddings.task_type_embeddings.weight"


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
        stems: what the names of its classes begin with.
        suffixes: keys of `COUNTERPARTS`: the heads that compute what BERT's compute.
        rules: its own names, on the left, and BERT's.
        defaults: of its configuration, where they are not BERT's.
        not_kept: fields of its configuration that mean nothing to BERT.
        always_gelu: whether `OWN_ACTIVATION` holds for its heads.
        stock: `model_type` of the Transformers class that has the same body, but absolute positions.
    """

    stems: tuple[str, ...]
    suffixes: tuple[str, ...]
    rules: tuple[Rule, ...]
    stock: str
    defaults: dict[str, Any] = field(default_factory=dict)
    not_kept: tuple[str, ...] = ()
    always_gelu: bool = False

    def heads(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Class of the family to class of BERT, for every head that this configuration lets BERT compute."""
        suffixes = self.suffixes
        if self.always_gelu and config.get("hidden_act", "gelu") != "gelu":
            suffixes = tuple(suffix for suffix in suffixes if suffix not in OWN_ACTIVATION)
        return {stem + suffix: COUNTERPARTS[suffix] for stem in self.stems for suffix in suffixes}

    def naming(self, base: bool) -> tuple[Rule, ...]:
        """All rules from a file to stock BERT; `base` for BertModel, which is the encoder itself."""
        return (*RULES, *self.rules, *(BASE_RULES[len(RULES) :] if base else ()))


ALL = tuple(suffix for suffix in COUNTERPARTS if suffix not in ("ForCausalLM", "LMHeadModel"))
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
    "rules": (
        Rule("roberta.*", "bert.*"),
        Rule("lm_head.dense.*", "cls.predictions.transform.dense.*"),
        Rule("lm_head.layer_norm.*", "cls.predictions.transform.LayerNorm.*"),
        Rule("lm_head.*", "cls.predictions.*"),
        Rule("classifier.dense.*", "bert.pooler.dense.*"),
        Rule("classifier.out_proj.*", "classifier.*"),
    ),
    "always_gelu": True,
}
SPECIAL_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}

# By `model_type`. NEZHA's original layout calls itself "bert" and is told apart by `use_relative_position`.
FAMILIES = {
    "bert": Family(stems=("Bert",), suffixes=(*ALL, "LMHeadModel"), rules=(), stock="bert"),
    "nezha": Family(
        stems=("Nezha", "Bert"),
        suffixes=ALL,
        rules=(Rule("nezha.*", "bert.*"),),
        stock="bert",
        defaults={"vocab_size": 21128, "classifier_dropout": 0.1, "bos_token_id": 2, "eos_token_id": 3},
        not_kept=("use_relative_position", "max_relative_position", "embedding_size"),
    ),
    "roberta": Family(
        stems=("Roberta",), stock="roberta", defaults={"vocab_size": 50265, **SPECIAL_TOKENS}, **ROBERTA
    ),
    "xlm-roberta": Family(stems=("XLMRoberta",), stock="xlm-roberta", defaults=SPECIAL_TOKENS, **ROBERTA),
    "camembert": Family(stems=("Camembert",), stock="camembert", defaults=SPECIAL_TOKENS, **ROBERTA),
    "electra": Family(
        stems=("Electra",),
        suffixes=("Model", "ForMaskedLM", "ForCausalLM", "ForTokenClassification", "ForQuestionAnswering"),
        rules=(
            Rule("electra.*", "bert.*"),
            Rule("generator_predictions.*", "cls.predictions.transform.*"),
            Rule("generator_lm_head.w*", "cls.predictions.decoder.w*"),
            Rule("generator_lm_head.b*", "cls.predictions.b*"),
        ),
        stock="electra",
        defaults={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128},
        not_kept=(
            "embedding_size",
            "summary_activation",
            "summary_last_dropout",
            "summary_type",
            "summary_use_proj",
        ),
        always_gelu=True,
    ),
    "ernie": Family(
        stems=("Ernie",),
        suffixes=(*ALL, "ForCausalLM"),
        rules=(Rule("ernie.*", "bert.*"),),
        stock="ernie",
        defaults={"task_type_vocab_size": 3},
        not_kept=("use_task_id", "task_type_vocab_size"),
    ),
}


@dataclass(frozen=True)
class Relative:
    """A checkpoint that is relative already, as its configuration describes it.

    Attributes:
        family: value of `FAMILIES`.
        evidence: the field that says so, and its value.
        scheme: key of `hf_relpos.SCHEMES`.
        options: of the scheme.
        config: config.json, completed with the family's defaults.
    """

    family: Family
    evidence: str
    scheme: str
    options: dict[str, Any]
    config: dict[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """What BERT's configuration takes over."""
        return {key: value for key, value in self.config.items() if key not in self.family.not_kept}

    @property
    def more(self) -> dict[str, torch.Size]:
        """Stock name, without prefix, and shape of tensors that our model has no place for and that are folded."""
        if not self.config.get("use_task_id"):
            return {}
        return {TASK_TYPES: torch.Size((self.config["task_type_vocab_size"], self.config.get("hidden_size", 768)))}


def recognise(folder: Path, config: Mapping[str, Any]) -> Relative | None:
    """What config.json says of a relative checkpoint; None for BERT with absolute positions.

    Raises:
        ConversionError: for an architecture that is not known, or known only with relative positions; for a NEZHA
            with cross-attention, and an ELECTRA whose embeddings have a size of their own.
    """
    found = config.get("model_type", "bert")  # the first BERT files have none
    if found not in FAMILIES:
        raise ConversionError(
            f"{folder}: model_type = {found!r}; only 'bert' checkpoints can be converted, and "
            f"{some(map(repr, [name for name in FAMILIES if name != 'bert']), 9)} with relative positions"
        )
    kind = config.get("position_embedding_type", "absolute")
    nezha = found == "nezha" or (found == "bert" and bool(config.get("use_relative_position")))
    if nezha:
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
    elif kind in KINDS:
        family, scheme, options = FAMILIES[found], kind, {}
        evidence = f"position_embedding_type = {kind!r}"
    elif found == "bert":
        return None
    else:
        raise ConversionError(
            f"{folder}: model_type = {found!r} with position_embedding_type = {kind!r}; only 'bert' checkpoints can "
            f"be converted from absolute positions, and {found!r} from {' and '.join(map(repr, KINDS))}"
        )
    completed = {**family.defaults, **config}
    if family is FAMILIES["electra"] and completed["embedding_size"] != completed["hidden_size"]:
        raise ConversionError(
            f"{folder}: embedding_size = {completed['embedding_size']!r} and hidden_size = "
            f"{completed['hidden_size']!r}: this ELECTRA projects its embeddings, for which BERT has no place; only "
            "one with both sizes equal can be converted"
        )
    return Relative(family, evidence, scheme, options, completed)


def check_relative(relative: Relative, folder: Path, names: Iterable[str]) -> None:
    """Refuse weights that are not what the configuration claims.

    Args:
        names: names of the tensors in the files.

    Raises:
        ConversionError: for tables of distances that are missing, or positions in a NEZHA, which has none.
    """
    names = list(names)
    if relative.scheme == "nezha":
        wrong = [name for name in names if is_table(name) or is_scheme(name)]
        if wrong:
            raise ConversionError(
                f"{folder}: {relative.evidence}, whose positions are computed, but the weights hold {some(wrong, 1)}: "
                "they belong to another model; correct config.json or restore the file"
            )
    elif not any(map(is_scheme, names)):
        raise ConversionError(
            f"{folder}: {relative.evidence}, but the weights have no tables of distances. Stock Transformers v5 drops "
            "them when it loads and saves such a checkpoint: go back to the original files"
        )


def choose_head(relative: Relative, folder: Path, asked: str | None = None) -> tuple[str, str, str]:
    """The class of the source, that of stock BERT with the same outputs, and a note on a head that is left behind.

    Args:
        asked: either of the two classes; None for the first of `config.architectures`.

    Returns:
        For a head that BERT does not have, the classes without head, and the note; else an empty note.

    Raises:
        ConversionError: for a class that is not the family's, or that BERT does not have although it was asked for.
    """
    family, heads = relative.family, relative.family.heads(relative.config)
    base = f"{family.stems[0]}Model"
    listed = relative.config.get("architectures") or [base]
    found = asked if asked is not None else listed[0] if isinstance(listed, list) else listed
    if found in heads:
        return found, heads[found], ""
    if asked is not None and asked in heads.values():
        return next(own for own, stock in heads.items() if stock == asked), asked, ""
    if asked is None and family.stems != ("Bert",) and str(found).startswith(family.stems):
        return base, "BertModel", f"the head of {found}, which BERT does not have"
    where = "architecture" if asked is not None else f"{folder}: architectures"
    remedy = "" if asked is not None else f"; pass architecture={base!r} to convert the encoder without its head"
    raise ConversionError(f"{where} = {found!r} has no counterpart here; known: {', '.join(heads)}{remedy}")


def old_model(
    relative: Relative, own: str, config: PreTrainedConfig, model: PreTrainedModel, source: Source
) -> PreTrainedModel:
    """The source as it was: its class in Transformers, with the attention that Transformers had until 4.57.

    Independent of the schemes here: the relative terms are spelled out in `OldSelfAttention`.

    Args:
        own: class of the source.
        config: of `relative.family.stock`, with the source's fields.
        model: the result, for the tensors that the source lacks (a fresh pooler).

    Returns:
        A model in float64, eval mode.
    """
    config._attn_implementation = "eager"
    stock = source.architecture if relative.family.stock == "bert" else own
    old = getattr(transformers, stock)(config)
    old.base_model.embeddings.position_embeddings = NoPositions()
    prefix = "" if source.architecture == "BertModel" else "bert."
    for number, layer in enumerate(old.base_model.encoder.layer):
        table = source.tensors.get(f"{prefix}encoder.layer.{number}.attention.self.distance_embedding.weight")
        layer.attention.self = OldSelfAttention(layer.attention.self, relative, table)
    rules = relative.family.naming(base=source.architecture == "BertModel")
    known = {**model.state_dict(), **source.tensors}
    old = old.double().eval()
    old.load_state_dict({name: known[to_stock(name, rules)[0]] for name in old.state_dict()})
    return old


class NoPositions(nn.Module):
    """In the place of a table of absolute positions."""

    def forward(self, position_ids: torch.Tensor) -> float:
        """Nothing."""
        return 0.0


class OldSelfAttention(nn.Module):
    """The relative self-attentions of Transformers 4.57, with a vector for every pair: slow, and easy to read."""

    def __init__(self, stock: nn.Module, relative: Relative, table: torch.Tensor | None):
        super().__init__()
        self.query, self.key, self.value = stock.query, stock.key, stock.value
        self.head_size = stock.attention_head_size
        self.scheme = relative.scheme
        self.reach = relative.options.get("max_relative_position")
        self.stored = None if table is None else table.double()

    def relations(self, length: int) -> torch.Tensor:
        """The vector of every pair i, j: (L, L, d)."""
        place = torch.arange(length)
        if self.scheme != "nezha":
            return self.stored[place[:, None] - place[None] + len(self.stored) // 2]
        row = (place[None] - place[:, None]).clamp(-self.reach, self.reach) + self.reach
        steps = torch.arange(0, self.head_size, 2, dtype=torch.float64)
        angles = row[..., None] * torch.exp(steps * (-math.log(10000.0) / self.head_size))
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states (B, L, D) and an additive mask to (B, L, D) and the weights (B, H, L, L)."""
        query, key, value = (
            linear(hidden_states).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        relations = self.relations(hidden_states.shape[1])
        scores = query @ key.transpose(-1, -2) + torch.einsum("bhid,ijd->bhij", query, relations)
        if self.scheme == "relative_key_query":
            scores = scores + torch.einsum("bhjd,ijd->bhij", key, relations)
        scores = scores / math.sqrt(self.head_size)
        weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
        out = weights @ value
        if self.scheme == "nezha":
            out = out + torch.einsum("bhij,ijd->bhid", weights, relations)
        return out.transpose(1, 2).flatten(2), weights
