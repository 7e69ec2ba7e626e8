"""Checks of a configuration, which the installed package runs whenever one is made.

Each raises a ValueError that names field, value and remedy.
"""

from typing import Any

import torch
from torch import nn

from ..schemes.registry import (
    SCHEMES,
    build_input,
    build_scheme,
    build_shared,
    parts_with_absolute_table,
    scheme_parts,
)
from .configuration_fields import ARGUMENTS, FIELDS, MAX_PARAMETERS, check_rules
from .configuration_fields import check_arguments as check_arguments
from .configuration_fields import check_nesting as check_nesting
from .configuration_fields import without_kernels as without_kernels


TEMPERATURES = ("none", "log")


def check_settings(config: Any) -> None:
    """Check that the settings of a RelPosBertConfig are valid and fit together.

    Raises:
        ValueError: otherwise.
    """
    _check_heads(config)
    _check_position_scheme(config)
    _check_attention_window(config)
    _check_attention_temperature(config)
    check_memory_settings(config)
    _check_convolution(config)
    _check_parameter_count(config)


def check_implementation_name(config: Any) -> None:
    """
    Raises:
        ValueError: for an `attn_implementation` that is not a name.
    """
    check_rules(ARGUMENTS, [("attn_implementation", config._attn_implementation)])  # may have been set since


def check_fields(config: Any) -> None:
    """Fields must have valid values, and the padding token must be in the vocabulary."""
    check_rules(FIELDS, ((name, getattr(config, name)) for name in FIELDS))
    # some configurations have −1; BERT's embeddings count negative ids from the end
    if config.pad_token_id is not None and not -config.vocab_size <= config.pad_token_id < config.vocab_size:
        raise ValueError(
            f"pad_token_id = {config.pad_token_id} with vocab_size = {config.vocab_size}: give a token of the "
            "vocabulary, or None"
        )
    if config.add_cross_attention and not config.is_decoder:
        raise ValueError(
            "add_cross_attention = True with is_decoder = False: only a decoder attends to an encoder; set "
            "is_decoder=True, or leave cross-attention out"
        )


def _check_heads(config: Any) -> None:
    """The number of heads must divide the hidden size."""
    if config.num_attention_heads < 1 or config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"hidden_size = {config.hidden_size} is not a multiple of num_attention_heads = "
            f"{config.num_attention_heads}; choose a number of heads that divides it"
        )


def _check_position_scheme(config: Any) -> None:
    """The schemes must be known, accept their options, and fit together."""
    parts = scheme_parts(config)
    scales: dict[float | None, str] = {}
    for scheme, settings in parts:
        scales.setdefault(scheme.scale_of(settings, config), scheme.name)
    scales.pop(None, None)
    if len(scales) > 1:
        listed = ", ".join(f"{name} {value:.4g}" for value, name in scales.items())
        raise ValueError(f"position_embedding_type = {config.position_embedding_type}: the scales differ ({listed})")
    if sum(scheme.rotates() for scheme, _ in parts) > 1:
        raise ValueError(f"position_embedding_type = {config.position_embedding_type}: two rotations do not combine")
    if len(parts) > 1 and any(scheme.rotates() for scheme, _ in parts):
        from .capabilities import probe_call

        try:
            probe_call(config)
        except ValueError as error:
            raise ValueError(f"position_embedding_type = {config.position_embedding_type}: {error}") from error
    with torch.device("meta"):
        build_input(config)  # raises for two schemes that act on the input


def _check_attention_window(config: Any) -> None:
    """The window must be a positive number of positions; global tokens need a window."""
    if config.attention_window is not None and config.attention_window < 1:
        raise ValueError(f"attention_window = {config.attention_window}: give a positive number of positions, or None")
    if config.global_tokens is not None and (
        config.attention_window is None or min(config.global_tokens, default=0) < 0
    ):
        raise ValueError(
            f"global_tokens = {config.global_tokens} with attention_window = {config.attention_window}: give "
            "positions from 0 on, and a window"
        )


def _check_attention_temperature(config: Any) -> None:
    """The temperature must be known, and the trained length at least 2, since its logarithm is a divisor."""
    if config.attention_temperature not in TEMPERATURES:
        raise ValueError(
            f"attention_temperature = {config.attention_temperature!r} is unknown; known: "
            f"{', '.join(map(repr, TEMPERATURES))}"
        )
    if config.attention_temperature_length is not None and config.attention_temperature == "none":
        raise ValueError(
            f"attention_temperature_length = {config.attention_temperature_length} with attention_temperature = "
            "'none' has no effect; set attention_temperature='log', or leave the length out"
        )
    trained = config.attention_temperature_length
    field = "attention_temperature_length"
    if trained is None:
        trained, field = config.max_position_embeddings, "max_position_embeddings"
    if config.attention_temperature != "none" and trained < 2:
        raise ValueError(
            f"{field} = {trained} with attention_temperature = {config.attention_temperature!r}: give a trained "
            "length of at least 2"
        )


def check_memory_settings(config: Any) -> None:
    """Recurrence memory needs schemes whose distances extend to the left of a segment."""
    if config.memory_length < 0:
        raise ValueError(f"memory_length = {config.memory_length}: give a number of tokens, or 0 for no memory")
    if not config.memory_length:
        return
    for scheme, settings in parts_with_absolute_table(config):
        reason = scheme.memory_unsupported_reason(settings)
        if reason is not None:
            capable = [s.name for s in SCHEMES.values() if s.memory_unsupported_reason(s.defaults()) is None]
            raise ValueError(
                f"memory_length = {config.memory_length} with the position scheme {scheme.name!r}: {reason}. These "
                f"take a memory: {', '.join(capable)}"
            )
    if config.attention_window is not None and config.global_tokens != []:
        raise ValueError(
            f"memory_length = {config.memory_length} with attention_window = {config.attention_window} and "
            f"global_tokens = {config.global_tokens}: global tokens of earlier segments are not kept; set "
            "global_tokens=[], or leave the window out"
        )


def _check_convolution(config: Any) -> None:
    """The convolution must keep the length of a row, and needs an encoder that reads all of its tokens at once."""
    if not config.conv_kernel_size:
        return
    if config.conv_kernel_size % 2 == 0:
        raise ValueError(f"conv_kernel_size = {config.conv_kernel_size}: give an odd number of tokens, or 0 for none")
    if config.hidden_size % config.conv_groups:
        raise ValueError(
            f"conv_groups = {config.conv_groups} does not divide hidden_size = {config.hidden_size}; give a divisor"
        )
    if config.is_decoder or config.memory_length:
        raise ValueError(
            f"conv_kernel_size = {config.conv_kernel_size} with is_decoder = {config.is_decoder} and memory_length = "
            f"{config.memory_length}: the convolution sees tokens to the right, and none of earlier segments; it is "
            "for encoders without a memory"
        )


def _check_parameter_count(config: Any) -> None:
    """The weights must fit into a machine; the scheme's modules are built without data to count their parameters."""
    with torch.device("meta"):
        scheme, others = build_scheme(config), (build_shared(config), build_input(config))
    size, width = config.hidden_size, config.input_size
    layer = 4 * size**2 + (3 if config.is_gated else 2) * size * config.intermediate_size + _count(scheme)
    total = (
        (config.vocab_size + config.type_vocab_size) * width
        + (size * width if width != size else 0)
        + config.num_hidden_layers * layer
        + sum(map(_count, filter(None, others)))
        + size**2 // config.conv_groups * config.conv_kernel_size
    )
    if total > MAX_PARAMETERS:
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings")
        listed = ", ".join(f"{name} = {getattr(config, name)}" for name in (*sizes, "position_options"))
        raise ValueError(
            f"{listed} make some {total:,} parameters, more than {MAX_PARAMETERS:,}, which no machine holds; "
            "choose smaller sizes"
        )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
