"""What models and attention use of Transformers beyond its documented interface, and how it hands them a call.

Transformers renames arguments in minor releases: 5.24 calls `cache` what was `past_key_values`. Arguments of its
functions are passed by the name in the signature that is there. A forward of ours takes both names; a third one is an
error at import.
"""

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.activations import ACT2FN
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    create_bidirectional_mask,
    create_causal_mask,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.models.bert.modeling_bert import (
    BertEncoder,
    BertForPreTrainingOutput,
    BertIntermediate,
    BertLayer,
    BertOnlyMLMHead,
    BertOnlyNSPHead,
    BertPooler,
    BertPreTrainingHeads,
    BertSelfAttention,
    BertSelfOutput,
)
from transformers.utils import output_capturing
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_fake_tensor
from transformers.utils.output_capturing import capture_outputs


# Names of the cache of keys and values in calls and outputs, the newest first.
CACHE_NAMES = ("cache", "past_key_values")


def rotations_after_calls(module: torch.nn.Module, attribute: str) -> torch.Tensor | None:
    """What calls leave in `inv_freq` of a module of RoPE that changes with the length; None for any other buffer."""
    layer_type = attribute.removesuffix("inv_freq").rstrip("_")
    prefix, kind = f"{layer_type}_" if layer_type else "", getattr(module, "rope_type", None)
    kind = kind.get(layer_type) if isinstance(kind, dict) else kind
    if kind not in ("dynamic", "longrope") or not hasattr(module, f"{prefix}original_inv_freq"):
        return None
    # the last prefix is that of releases such as 5.5, where a module without kinds of layers has None for its kind
    longest = max(getattr(module, f"{each}max_seq_len_cached", 0) for each in (prefix, "", f"{layer_type or None}_"))
    options = {"layer_type": layer_type} if layer_type else {}
    # longrope has two tables, for rows up to some length and for any longer ones
    length = int(longest) if kind == "dynamic" else sys.maxsize
    angles: torch.Tensor = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=length, **options)[0]
    return angles


def parameter_name(function: Callable[..., Any], names: Iterable[str]) -> str:
    """The first of some names of one argument that a function of Transformers has in its signature.

    Raises:
        TypeError: if it has none of them.
    """
    parameters = inspect.signature(function).parameters
    found = next((name for name in names if name in parameters), None)
    if found is None:
        place = f"{function.__module__}.{function.__qualname__} of this release of Transformers"
        remedy = "install a release that CHANGELOG.md names, and run `hf-relpos doctor --check`"
        raise TypeError(f"{place} has no argument {' or '.join(names)}; {remedy}")
    return found


# The name of the cache in calls of BERT's modules and in their outputs, and in calls of the functions that make masks.
CACHE = parameter_name(BertSelfAttention.forward, CACHE_NAMES)
MASK_CACHE = parameter_name(create_causal_mask, CACHE_NAMES)


def one_cache(cache: Any, past_key_values: Any) -> Any:
    """The cache of a call, which came under either of its names.

    Raises:
        ValueError: if it came under both.
    """
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument; give one of them")
    return past_key_values if cache is None else cache


def collects_outputs() -> bool:
    """Whether the call that is running collects the states or weights of single layers."""
    return bool(output_capturing._active_collector.get())


def check_keywords(module: Any, given: Iterable[str]) -> None:
    """Reject keywords that are nearly the name of an argument, which `**kwargs` would swallow.

    Others are passed on, as in Transformers: its decorators, Trainer and PEFT hand their own through a forward.

    Args:
        module: the module that was called.
        given: names of keywords that its forward does not name.

    Raises:
        TypeError: for the first misspelt one; names the argument.
    """
    for name in given:
        if meant := _nearest(type(module).forward, name):
            raise TypeError(f"{type(module).__name__}.forward has no keyword {name!r}; did you mean {meant!r}?")


@functools.cache  # half a millisecond for two keywords, in every call
def _nearest(function: Callable[..., Any], name: str) -> str:
    """The argument of a function that has nearly this name; empty for none."""
    return "".join(difflib.get_close_matches(name, inspect.signature(function).parameters, n=1, cutoff=0.85))
