"""Valid values of the fields of a configuration, beyond their types: ranges of sizes, known names.

Transformers checks the types of BERT's own fields only. Without these rules an invalid value would cause an error of
PyTorch that names no field, or the construction of a model that does not end.
"""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..host.transformers import ACT2FN
from ..schemes.scheme import MAX_COUNT


logger = logging.get_logger(__name__)

# DeepNet (Wang et al. 2022, arXiv 2203.00555) trains 1,000 layers; a million module objects would fill the memory.
MAX_LAYERS = 10_000
MAX_LABELS = 10_000_000
MAX_GLOBAL_TOKENS = 1_024  # each one is compared for every pair
MAX_PARAMETERS = 2**40  # 4 TiB in float32
MAX_NESTING = 100  # Python's own limit is reached at some 300 levels
MAX_INITIALIZER_RANGE = 1_000

EMBEDDING_PROJECTIONS = ("after_norm", "before_norm")
PROJECTIONS = ("query", "key", "value")
FEED_FORWARD_TYPES = ("mlp", "glu")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


class Rule(NamedTuple):
    """Valid values of a field: a test, and the end of the sentence `field = value: give …`."""

    accepts: Callable[[Any], bool]
    help: str


def shown(value: Any) -> str:
    """A value for an error message, shortened if it is long."""
    return reprlib.repr(value)


def integer(low: int, high: int = MAX_COUNT, optional: bool = False) -> Rule:
    """An integer in a range, or None if it is optional."""
    return Rule(
        lambda value: (value is None and optional) or (type(value) is int and low <= value <= high),
        f"an integer from {low:,} to {high:,}" + (", or None" if optional else ""),
    )


def number(low: float, high: float, optional: bool = False) -> Rule:
    """A number in a range, or None if it is optional."""
    return Rule(
        lambda value: (value is None and optional) or (type(value) in (int, float) and low <= value <= high),
        f"a number from {low:,} to {high:,}" + (", or None" if optional else ""),
    )


def _is_labels(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(str(key).isdecimal() for key in value))


def _is_layers(value: Any) -> bool:
    return value is None or (_is_labels(value) and all(isinstance(layer, Mapping) for layer in value.values()))


def _is_dtype(value: Any) -> bool:
    return value is None or isinstance(getattr(torch, value, None) if isinstance(value, str) else value, torch.dtype)


BOOLEAN = Rule(lambda value: value is None or isinstance(value, bool), "True or False")
MAPPING = Rule(lambda value: value is None or isinstance(value, Mapping), "a dict, or None")
NAMES = Rule(
    lambda value: value is None or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)),
    "a list of strings, or None",
)
ACTIVATION = Rule(lambda value: value in ACT2FN, f"one of {', '.join(map(repr, sorted(ACT2FN)))}")
DTYPE = Rule(_is_dtype, "the name of a dtype, such as 'float32'")
BACKEND = Rule(
    lambda value: value is None or isinstance(value, str | Mapping), "the name of an attention backend, or None"
)

# Fields of the class.
FIELDS: dict[str, Rule] = {
    "vocab_size": integer(1),
    "hidden_size": integer(1),
    "num_hidden_layers": integer(0, MAX_LAYERS),
    "intermediate_size": integer(1),
    "max_position_embeddings": integer(1),
    "type_vocab_size": integer(0),
    "conv_kernel_size": integer(0),
    "conv_groups": integer(1),
    "conv_act": ACTIVATION,
    "embedding_size": integer(1, optional=True),
    "attention_window": integer(1, optional=True),
    "attention_temperature_length": integer(1, optional=True),
    "memory_length": integer(0),
    "chunk_size_feed_forward": integer(0),
    "hidden_dropout_prob": number(0, 1),
    "attention_probs_dropout_prob": number(0, 1),
    "pooler_dropout": number(0, 1),
    "classifier_dropout": number(0, 1, optional=True),
    "initializer_range": number(0, MAX_INITIALIZER_RANGE),
    "layer_norm_eps": number(0, 1),
    "hidden_act": ACTIVATION,
    "pooler_hidden_act": ACTIVATION,
    "embedding_projection": Rule(
        lambda value: value in EMBEDDING_PROJECTIONS, f"one of {', '.join(map(repr, EMBEDDING_PROJECTIONS))}"
    ),
    "attention_biases": Rule(
        lambda value: value is None or (isinstance(value, list) and all(name in PROJECTIONS for name in value)),
        f"a list of some of {', '.join(map(repr, PROJECTIONS))}, or None",
    ),
    "converted_from": MAPPING,
    "feed_forward_type": Rule(
        lambda value: value in FEED_FORWARD_TYPES, f"one of {', '.join(map(repr, FEED_FORWARD_TYPES))}"
    ),
    "global_tokens": Rule(
        lambda value: (
            value is None
            or (len(value) <= MAX_GLOBAL_TOKENS and all(integer(0).accepts(position) for position in value))
        ),
        f"at most {MAX_GLOBAL_TOKENS:,} positions, integers from 0 to {MAX_COUNT:,}, or None",
    ),
    "architectures": NAMES,
    "output_hidden_states": BOOLEAN,
    "return_dict": BOOLEAN,
    "is_encoder_decoder": BOOLEAN,
    "dtype": DTYPE,
    "id2label": Rule(_is_labels, "a dict from numbers of labels to their names, or None"),
    "label2id": MAPPING,
    "problem_type": Rule(
        lambda value: value is None or value in PROBLEM_TYPES, f"one of {', '.join(map(repr, PROBLEM_TYPES))}, or None"
    ),
}
# Other arguments that Transformers takes.
ARGUMENTS: dict[str, Rule] = {
    "num_labels": integer(0, MAX_LABELS),
    "torch_dtype": DTYPE,
    "output_attentions": BOOLEAN,
    "attn_implementation": BACKEND,
    "_attn_implementation": BACKEND,
    "experts_implementation": BACKEND,
    "layer_types": NAMES,
    "mlp_layer_types": NAMES,
    "rope_scaling": MAPPING,
    "rope_parameters": MAPPING,
    "per_layer_config": Rule(_is_layers, "a dict from numbers of layers to dicts of their fields, or None"),
    "quantization_config": Rule(
        lambda value: value is None or isinstance(value, Mapping) or hasattr(value, "to_dict"),
        "a dict or a quantization configuration of Transformers, or None",
    ),
}


def without_kernels(fields: Mapping[str, Any], where: Any) -> dict[str, Any]:
    """The fields of a file without an attention kernel of a repository, which Transformers would download and import.

    A warning names it. A caller may name it: `from_pretrained(…, attn_implementation=…)`.

    Args:
        fields: of a configuration.
        where: the file or folder, for the warning.
    """
    kept = {}
    for name, value in fields.items():
        given = value.values() if isinstance(value, Mapping) else [value]
        if ARGUMENTS.get(name) is BACKEND and any("/" in each for each in given if isinstance(each, str)):
            logger.warning(
                f"{where}: {name} = {shown(value)} would download and import code, and is left out; if you trust it, "
                f"give attn_implementation={shown(value)} yourself"
            )
        else:
            kept[name] = value
    return kept


def check_rules(rules: Mapping[str, Rule], values: Iterable[tuple[str, Any]]) -> None:
    """
    Args:
        values: names and values; names without a rule are skipped.

    Raises:
        ValueError: for a value that its rule rejects.
    """
    for name, value in values:
        rule = rules.get(name)
        if rule is not None and not rule.accepts(value):
            raise ValueError(f"{name} = {shown(value)}: give {rule.help}")


def check_arguments(config_class: type, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a configuration that are not fields, before Transformers sets them as attributes.

    Raises:
        ValueError: for an invalid value, and for the name of another attribute of the class.
    """
    check_rules(ARGUMENTS, arguments.items())
    for name, value in arguments.items():
        if not isinstance(name, str) or not hasattr(config_class, name):
            continue
        own = inspect.getattr_static(config_class, name)
        if own.fset is None if isinstance(own, property) else own != value:
            raise ValueError(
                f"{name} = {shown(value)}: {config_class.__name__} has an attribute of this name that no "
                "configuration sets; leave it out"
            )


def check_nesting(arguments: Mapping[str, Any]) -> None:
    """Check the nesting depth of lists and dicts, since functions that print them recurse as deep.

    Raises:
        ValueError: for more than `MAX_NESTING` levels; names the argument.
    """
    for name, value in arguments.items():
        level = [value]
        for _ in range(MAX_NESTING):
            inner = [each for each in level if isinstance(each, list | tuple | dict)]
            # visits an object once, even if it occurs several times
            unique = {id(each): each for each in inner}.values()
            level = [item for each in unique for item in (each.values() if isinstance(each, dict) else each)]
            if not level:
                break
        else:
            raise ValueError(f"{name}: lists and dicts are nested more than {MAX_NESTING} levels deep; give fewer")
