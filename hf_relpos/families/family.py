"""What a family of checkpoints is: how its tensors, fields, heads and positions are spelled in BERT's words.

Each family is a file beside this one, and `registry` lists them.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .names import BASE_RULES, RULES, Rule


Tensors = Mapping[str, torch.Tensor]


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
    "ForQuestionAnsweringSimple": "BertForQuestionAnswering",
}
# Heads of language modelling that apply GELU whatever `hidden_act` says, where BERT's obeys it.
OWN_ACTIVATION = ("ForMaskedLM", "ForCausalLM")
# A head of these that BERT does not have is left behind; one of a task is what the checkpoint is for, and refused.
PRETRAINING = ("ForPreTraining", "ForMaskedLM", "ForCausalLM", "LMHeadModel", "WithLMHead")
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
TASK_TYPES = "embeddings.task_type_embeddings.weight"


@dataclass(frozen=True)
class Positions:
    """Where the positions of a checkpoint come from.

    Attributes:
        absolute: whether a table of absolute positions is added at the input.
        scheme: key of `hf_relpos.SCHEMES`; None for no relative positions.
        options: of that scheme.
    """

    absolute: bool = True
    scheme: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """A layout of tensors that is not stock BERT's.

    Attributes:
        name: of the models that have it.
        tensors: regular expressions, each of which the name of some tensor matches.
    """

    name: str
    tensors: tuple[str, ...]

    def fits(self, names: Iterable[str]) -> bool:
        """Whether tensors of these names have the layout."""
        return all(any(re.search(pattern, name) for name in names) for pattern in self.tensors)


# What `LiveFamily.effect` says of several, from the measurements of the benchmark of live models.
LONG_INPUTS = "faster from 1,024 tokens, as fast below; attention in memory linear in the length"
ALREADY_ACCELERATED = "it is accelerated already"


@dataclass(frozen=True)
class LiveFamily:
    """An architecture of Transformers whose attention can be accelerated in a live model.

    Classes are given by name, so that modules are imported only for models that are there.

    Attributes:
        name: for people.
        stock: the module of Transformers that has the stock classes.
        container: the stock class around the attention modules, which prepares what they share.
        attention: the stock class of the attention modules.
        code: the module of `families.live` that has our classes.
        effect: what is gained.
        classes: stock class to ours, which is a subclass of it; none where attention alone is not faster.
        unpadding: the same of the classes that take padding out of a batch; others are those of `classes`.
        unsupported: a function in `code`, from a container to reasons to leave it as it is; None for none.
    """

    name: str
    stock: str
    container: str
    attention: str
    code: str
    effect: str = ""
    classes: dict[str, str] = field(default_factory=dict)
    unpadding: dict[str, str] = field(default_factory=dict)
    unsupported: str | None = None

    @property
    def is_imported(self) -> bool:
        """Whether there can be a model of it: somebody has imported its classes."""
        return self.stock in sys.modules

    def stock_class(self, name: str) -> type[nn.Module]:
        """A class of Transformers."""
        found: type[nn.Module] = getattr(importlib.import_module(self.stock), name)
        return found

    def replacements(self, unpad: bool = False) -> dict[type[nn.Module], type[nn.Module]]:
        """Stock class to ours.

        Args:
            unpad: whether padding is to be taken out as well.
        """
        code = importlib.import_module(f".live.{self.code}", __package__)
        names = {**self.classes, **(self.unpadding if unpad else {})}
        return {self.stock_class(stock): getattr(code, ours) for stock, ours in names.items()}

    def unsupported_reason(self, container: nn.Module) -> str | None:
        """Why a container of this family stays as it is; None for one that can be changed."""
        ours = (*self.replacements().values(), *self.replacements(unpad=True).values())
        expected, attention = self.stock_class(self.container), self.stock_class(self.attention)
        if any(type(module) in ours for module in container.modules()):
            return ALREADY_ACCELERATED
        if type(container) is not expected:
            return f"{type(container).__name__} is a subclass of {expected.__name__} with code of its own"
        found = [module for module in container.modules() if isinstance(module, attention)]
        if not found:
            return f"it has no {attention.__name__}"
        for module in found:
            if type(module) is not attention:
                return f"{type(module).__name__} is a subclass of {attention.__name__} with code of its own"
        if any("forward" in vars(module) for module in (container, *found)):
            return "other code has replaced the forward method of its modules"
        if self.unsupported is None:
            return None
        reasons = getattr(importlib.import_module(f".live.{self.code}", __package__), self.unsupported)(container)
        return "; ".join(reasons) or None


def copy_of_bert(name: str, module: str, prefix: str, encoder: str = "Encoder") -> LiveFamily:
    """The entry of an encoder with absolute positions whose code in Transformers is a copy of BERT's.

    Args:
        name: for people.
        module: such as "xlm_roberta".
        prefix: of the names of its classes, such as "XLMRoberta".
        encoder: the name of the container, without the prefix.
    """
    container = encoder if encoder != "Encoder" else f"{prefix}Encoder"
    return LiveFamily(
        name=name,
        stock=f"transformers.models.{module}.modeling_{module}",
        container=container,
        attention=f"{prefix}SelfAttention",
        code="bert",
        unpadding={container: f"Unpadding{prefix}Encoder", f"{prefix}SelfAttention": f"Fast{prefix}SelfAttention"},
        unsupported="decoder",
    )


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
        class_prefixes: prefixes of the names of its classes.
        suffixes: keys of `COUNTERPARTS`: the heads whose outputs are those of BERT's.
        rules: its own names, on the left, and BERT's.
        stock: `model_type` of the Transformers class that has the same body, with absolute positions where it has a
            legacy type; None where Transformers has none, and no outputs can be compared.
        title: its name for people.
        defaults: of its configuration, where they differ from BERT's.
        dropped_fields: fields of its configuration that BERT does not have.
        renamed_fields: field of its configuration to BERT's field.
        always_gelu: whether `OWN_ACTIVATION` holds for its heads.
        legacy_types: values of `position_embedding_type` that Transformers ≤ 4.57 had besides `absolute`.
        positions: configuration to its positions, unless `position_embedding_type` is a legacy type.
        position_types: values of `position_embedding_type` that mean the same as `positions`, besides `absolute` where
            that is what they are.
        token_types: whether it has token type embeddings, where its configuration has a `type_vocab_size`; where not,
            those of the result are zero.
        padding: configuration to the id of the padding token, which is `padding_idx` of the position table, too;
            position 0 is the row after it. None where position 0 is row 0.
        layers: configuration to the prefix (`encoder.…`) of each layer's tensors, in order; layers that share tensors
            have the same. None for BERT's prefixes.
        tokenizer: class of its tokenizer, for files that do not name it; None for BERT's.
        fields: configuration to fields of a RelPosBertConfig that BERT's configuration does not have, or that follow
            from several of the family's.
        unpack: configuration and tensors under their names in a file to tensors that are one to one with BERT's, for
            projections that are stored as one, say; names that need no more than `rules` stay. None where all do.
        pack: the inverse of `unpack`.
        marker: field that, set to true, marks it in a file whose `model_type` is "bert"; None for none.
        not_marking: values of that field that mark nothing, since configurations of this package have them.
        signature_tensors: regular expressions, each of which the name of some tensor matches, that mark it in a file
            whose `model_type` is "bert"; () for none.
        told_by_tensors: configuration and names of tensors to fields of the configuration that these correct.
        read_directly: whether `from_pretrained` of our classes reads its checkpoints, as if they had been converted.
        masks_queries: whether a token of padding attends to nothing, so that outputs at padding are others than here.
        tolerance: of outputs in float64, relative to the largest, where Transformers computes parts in float32;
            None where it does not.
        unsupported_reason: configuration to why it cannot be converted; empty if it can.
        since: the first release that reads it.
        published: fields that its published checkpoints have and the defaults of its class have not.
        layout: of its tensors, for messages about checkpoints that say nothing of their family; None for BERT's.
        live: how its live models are accelerated; None if they are not.
    """

    class_prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    rules: tuple[Rule, ...]
    stock: str | None
    title: str
    defaults: dict[str, Any] = field(default_factory=dict)
    dropped_fields: tuple[str, ...] = ()
    renamed_fields: dict[str, str] = field(default_factory=dict)
    always_gelu: bool = False
    legacy_types: tuple[str, ...] = LEGACY_TYPES
    positions: Callable[[Mapping[str, Any]], Positions] = lambda config: Positions()
    position_types: tuple[str, ...] = ()
    token_types: bool = True
    padding: Callable[[Mapping[str, Any]], int] | None = None
    layers: Callable[[Mapping[str, Any]], list[str]] | None = None
    tokenizer: str | None = None
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    unpack: Callable[[Mapping[str, Any], Tensors], dict[str, torch.Tensor]] | None = None
    pack: Callable[[Mapping[str, Any], Tensors], dict[str, torch.Tensor]] | None = None
    marker: str | None = None
    not_marking: tuple[str, ...] = ()
    signature_tensors: tuple[str, ...] = ()
    told_by_tensors: Callable[[Mapping[str, Any], list[str]], dict[str, Any]] = lambda config, names: {}
    read_directly: bool = False
    masks_queries: bool = False
    tolerance: float | None = None
    unsupported_reason: Callable[[Mapping[str, Any]], str] = lambda config: ""
    since: str = "0.1.0"
    published: dict[str, Any] = field(default_factory=dict)
    layout: Layout | None = None
    live: LiveFamily | None = None

    def heads(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Class of the family to class of BERT, for every head that this configuration lets BERT compute."""
        suffixes = self.suffixes
        if self.always_gelu and config.get("hidden_act", "gelu") != "gelu":
            suffixes = tuple(suffix for suffix in suffixes if suffix not in OWN_ACTIVATION)
        return {stem + suffix: COUNTERPARTS[suffix] for stem in self.class_prefixes for suffix in suffixes}

    def marked(self, config: Mapping[str, Any], names: Iterable[str]) -> str:
        """What marks a checkpoint that calls itself a BERT as one of this family, in words; empty for nothing.

        Args:
            names: of its tensors.
        """
        if self.marker is not None and config.get(self.marker) and config[self.marker] not in self.not_marking:
            return f"{self.marker} = {config[self.marker]!r}"
        names = list(names)
        found = [next((name for name in names if re.search(mark, name)), None) for mark in self.signature_tensors]
        return f"the tensor {found[0]}" if found and None not in found else ""

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


ALL = tuple(
    suffix for suffix in COUNTERPARTS if suffix not in ("ForCausalLM", "LMHeadModel", "ForQuestionAnsweringSimple")
)

SPECIAL_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
