"""The arguments that an encoder takes, and what a call asks for by them."""

import functools
import inspect
from typing import Any

from ..host.transformers import CACHE_NAMES


# Arguments that are tokens or embeddings.
TOKENS = ("input_ids", "inputs_embeds")
# Arguments by which rows read something else than their own tokens.
OTHERS = (
    *CACHE_NAMES,
    "encoder_hidden_states",
    "encoder_attention_mask",
    "cu_seq_lens_q",
    "entity_ids",
    "head_mask",
    "is_causal",
    "mems",
    "perm_mask",
    "target_mapping",
    "input_mask",
    "memory",
    "output_router_logits",
)
# Arguments that mean the same in third-party code. By any other it may read padding, or return what has no rows.
SWITCHES = ("use_cache", "use_mems", "return_dict", "output_hidden_states", "output_attentions")
FAMILIAR = {*TOKENS, *SWITCHES, "attention_mask", "token_type_ids", "position_ids"}


@functools.cache
def parameters_of(forward: Any) -> tuple[tuple[str, ...], bool]:
    """Return the argument names of a forward after `self`, and whether it takes other keywords."""
    found = list(inspect.signature(forward).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes_others = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in found)
    return tuple(each.name for each in found if each.kind in named), takes_others


def wants(encoder: Any, given: dict[str, Any], name: str) -> bool:
    """Whether a call asks for an output, by an argument or else by a field of the configuration."""
    value, field = given.get(name), name
    if name == "use_mems":
        field = "use_mems_train" if encoder.training else "use_mems_eval"
    return bool(getattr(getattr(encoder, "config", None), field, False) if value is None else value)
