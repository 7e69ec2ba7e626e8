"""Checks of a configuration, which the installed package runs whenever one is made, and of the arguments of `forward`.

Each raises an error that names field or argument, value and remedy. Transformers checks the types of BERT's own fields
only: an invalid value would cause an error of PyTorch that names no field, or a model too large to build.
"""

import reprlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..host.transformers import ACT2FN
from ..schemes.registry import SCHEMES, build_input, parts_with_absolute_table, scheme_parts
from ..schemes.scheme import MAX_COUNT
from .sequence import INDICES, Rows, check_tensor


logger = logging.get_logger(__name__)

# DeepNet (Wang et al. 2022, arXiv 2203.00555) trains 1,000 layers; a million module objects would fill the memory.
MAX_LAYERS = 10_000
MAX_GLOBAL_TOKENS = 1_024  # each one is compared for every pair
MAX_INITIALIZER_RANGE = 1_000

PROJECTIONS = ("query", "key", "value")
FEED_FORWARD_TYPES = ("mlp", "glu")


class Rule(NamedTuple):
    """Valid values of a field: a test, and the end of the sentence `field = value: give …`."""

    accepts: Callable[[Any], bool]
    help: str


def number(low: float, high: float, optional: bool = False, kinds: tuple[type, ...] = (int, float)) -> Rule:
    """A number in a range, or None if it is optional."""
    return Rule(
        lambda value: (value is None and optional) or (type(value) in kinds and low <= value <= high),
        f"{'a number' if float in kinds else 'an integer'} from {low:,} to {high:,}{', or None' * optional}",
    )


def integer(low: int, high: int = MAX_COUNT, optional: bool = False) -> Rule:
    """An integer in a range, or None if it is optional."""
    return number(low, high, optional, (int,))


def one_of(*values: str | None) -> Rule:
    """One of these values."""
    return Rule(lambda value: value in values, f"one of {', '.join(map(repr, values))}")


def _is_dtype(value: Any) -> bool:
    return value is None or isinstance(getattr(torch, value, None) if isinstance(value, str) else value, torch.dtype)


NAMES = Rule(
    lambda value: value is None or (isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)),
    "a list of strings, or None",
)
ACTIVATION = one_of(*sorted(ACT2FN))
DTYPE = Rule(_is_dtype, "the name of a dtype, such as 'float32'")
BACKEND = Rule(
    lambda value: value is None or isinstance(value, str | Mapping), "the name of an attention backend, or None"
)

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "conv_groups")
# Fields of the class. Their types are checked before, by the annotations.
FIELDS: dict[str, Rule] = {
    **dict.fromkeys(SIZES, integer(1)),
    **dict.fromkeys(("embedding_size", "attention_window"), integer(1, optional=True)),
    **dict.fromkeys(("type_vocab_size", "conv_kernel_size", "memory_length", "chunk_size_feed_forward"), integer(0)),
    "num_hidden_layers": integer(0, MAX_LAYERS),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout"), number(0, 1)),
    "classifier_dropout": number(0, 1, optional=True),
    "initializer_range": number(0, MAX_INITIALIZER_RANGE),
    "layer_norm_eps": number(0, 1),
    **dict.fromkeys(("hidden_act", "pooler_hidden_act", "conv_act"), ACTIVATION),
    "embedding_projection": one_of("after_norm", "before_norm"),
    "attention_biases": Rule(
        lambda value: value is None or set(value) <= set(PROJECTIONS),
        f"a list of some of {', '.join(map(repr, PROJECTIONS))}, or None",
    ),
    "feed_forward_type": one_of(*FEED_FORWARD_TYPES),
    "global_tokens": Rule(
        lambda value: value is None or (len(value) <= MAX_GLOBAL_TOKENS and all(map(integer(0).accepts, value))),
        f"at most {MAX_GLOBAL_TOKENS:,} positions, integers from 0 to {MAX_COUNT:,}, or None",
    ),
    "architectures": NAMES,
    "dtype": DTYPE,
    "id2label": Rule(
        lambda value: value is None or (isinstance(value, Mapping) and all(str(key).isdecimal() for key in value)),
        "a dict from numbers of labels to their names, or None",
    ),
    "problem_type": one_of("regression", "single_label_classification", "multi_label_classification", None),
}
# Other arguments that Transformers takes.
ARGUMENTS: dict[str, Rule] = {
    "num_labels": integer(0),
    "torch_dtype": DTYPE,
    "attention_temperature": Rule(lambda value: value in (None, "none"), "'none'; commit c4f20b3 has others"),
    **dict.fromkeys(("attn_implementation", "_attn_implementation", "experts_implementation"), BACKEND),
}


def without_kernels(fields: Mapping[str, Any], where: Any) -> dict[str, Any]:
    """The fields of a file without an attention kernel of a repository, which Transformers would download and import.

    A warning names it. To use it, pass `from_pretrained(…, attn_implementation=…)`.
    """
    kept = {}
    for name, value in fields.items():
        given = value.values() if isinstance(value, Mapping) else [value]
        if ARGUMENTS.get(name) is BACKEND and any("/" in each for each in given if isinstance(each, str)):
            ignored = f"{where}: {name} = {value!r} is ignored, because it would download and run code"
            logger.warning(f"{ignored}; if you trust it, pass attn_implementation={value!r}")
        else:
            kept[name] = value
    return kept


def warn_of_misspelt(given: Iterable[str], known: Iterable[str]) -> None:
    """Warn about arguments that look like a misspelt field, because Transformers accepts any name."""
    for name in given:
        for field in get_close_matches(name, set(known) - {name}, n=1, cutoff=0.95):
            logger.warning(f"{name} is not a field of RelPosBertConfig and has no effect; did you mean {field}?")


def check_rules(rules: Mapping[str, Rule], values: Iterable[tuple[str, Any]]) -> None:
    """Raise a ValueError for a value that its rule rejects; names without a rule are skipped."""
    for name, value in values:
        rule = rules.get(name)
        if rule is not None and not rule.accepts(value):
            raise ValueError(f"{name} = {reprlib.repr(value)}: give {rule.help}")


def _listed(config: Any, *fields: str) -> str:
    return ", ".join(f"{name} = {getattr(config, name)}" for name in fields)


def check_settings(config: Any) -> None:
    """Raise a ValueError if the settings of a RelPosBertConfig are invalid or do not fit together."""
    if config.num_attention_heads < 1 or config.hidden_size % config.num_attention_heads:
        sizes = _listed(config, "hidden_size", "num_attention_heads")
        raise ValueError(f"{sizes}: the size is not a multiple of the number of heads; give one that divides it")
    if config.global_tokens is not None and config.attention_window is None:
        fields = _listed(config, "global_tokens", "attention_window")
        raise ValueError(f"{fields}: global tokens require a window; set it, or leave global_tokens out")
    _check_position_scheme(config)
    check_memory_settings(config)
    _check_convolution(config)


def check_fields(config: Any) -> None:
    """Fields must have valid values, and the padding token must be in the vocabulary."""
    check_rules(FIELDS, ((name, getattr(config, name)) for name in FIELDS))
    # some configurations have −1; BERT's embeddings count negative ids from the end
    if config.pad_token_id is not None and not -config.vocab_size <= config.pad_token_id < config.vocab_size:
        ids = _listed(config, "pad_token_id", "vocab_size")
        raise ValueError(f"{ids}: the id is outside of the vocabulary; give a token id, or None")
    if config.add_cross_attention and not config.is_decoder:
        raise ValueError("add_cross_attention = True requires is_decoder = True; set it, or leave cross-attention out")


def _check_position_scheme(config: Any) -> None:
    """The schemes must be known, accept their options, and fit together."""
    parts, field = scheme_parts(config), f"position_embedding_type = {config.position_embedding_type}"
    if sum(scheme.has_token_numbers() for scheme, _ in parts) > 1:
        raise ValueError(f"{field}: two schemes with `token_numbers` cannot be combined; leave one of them out")
    with torch.device("meta"):
        build_input(config)  # raises for two schemes that act on the input
    if len(parts) > 1:
        from .capabilities import probe_call

        try:
            probe_call(config)
        except ValueError as error:
            raise ValueError(f"{field}: {error}") from error


def check_memory_settings(config: Any) -> None:
    """Recurrence memory needs schemes whose distances extend to the left of a segment."""
    if not config.memory_length:
        return
    for scheme, settings in parts_with_absolute_table(config):
        reason = scheme.memory_unsupported_reason(settings)
        if reason is not None:
            capable = [s.name for s in SCHEMES.values() if s.memory_unsupported_reason(s.defaults()) is None]
            known = f"{scheme.name!r} does not support a memory: {reason}. Schemes that do: {', '.join(capable)}"
            raise ValueError(f"memory_length = {config.memory_length}: the position scheme {known}")
    if config.attention_window is not None and config.global_tokens != []:
        fields = _listed(config, "memory_length", "attention_window", "global_tokens")
        remedy = "set global_tokens=[], or leave the window out"
        raise ValueError(f"{fields}: a memory stores no global tokens of earlier segments; {remedy}")


def _check_convolution(config: Any) -> None:
    """The convolution must keep the length of a row, and needs an encoder that reads all of its tokens at once."""
    if not config.conv_kernel_size:
        return
    if config.conv_kernel_size % 2 == 0:
        raise ValueError(f"conv_kernel_size = {config.conv_kernel_size} is not odd; give an odd number, or 0 for none")
    if config.hidden_size % config.conv_groups:
        sizes = _listed(config, "conv_groups", "hidden_size")
        raise ValueError(f"{sizes}: the groups do not divide the size; give a divisor")
    if config.is_decoder or config.memory_length:
        fields = _listed(config, "conv_kernel_size", "is_decoder", "memory_length")
        raise ValueError(f"{fields}: a convolution is for encoders without a memory; set conv_kernel_size=0")


# Arguments of `forward`: kinds, dtypes and shapes, never the contents of tensors on a device; not in graphs.

LABELS = (*INDICES, torch.int16, torch.int8, torch.uint8)
VECTORS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_inputs(
    config: PreTrainedConfig, dtype: torch.dtype, required: frozenset[str], rows: Rows, are_ids: bool, has_cache: bool
) -> None:
    """Check the arguments of `forward` against each other and the configuration.

    Args:
        config: a RelPosBertConfig.
        dtype: dtype of the model.
        required: inputs that the scheme reads: `relation_ids`.
        are_ids: whether the tokens of `rows` are input_ids, not inputs_embeds.
        has_cache: whether a mask also covers keys of earlier calls.

    Raises:
        TypeError: for values that are not tensors.
        ValueError: for wrong dtypes and shapes; names the argument and its valid values.
    """
    tokens, attention_mask, token_type_ids, position_ids, relation_ids = rows
    if are_ids:
        check_tensor("input_ids", tokens)
        if tokens.dim() != 2 or not tokens.numel():
            raise ValueError(
                f"input_ids has shape {tuple(tokens.shape)}; give (batch, length), both at least 1"
                + (": a row alone as input_ids[None]" if tokens.dim() == 1 else "")
            )
    else:
        check_tensor("inputs_embeds", tokens, VECTORS)
        if tokens.dim() != 3 or not tokens.numel() or tokens.shape[2] != config.input_size:
            wanted = f"(batch, length, {config.input_size}), the width of the word embeddings"
            raise ValueError(f"inputs_embeds has shape {tuple(tokens.shape)}; give {wanted}, all at least 1")
    batch, length = tokens.shape[:2]
    if token_type_ids is not None:
        check_tensor("token_type_ids", token_type_ids)
        _check_shape("token_type_ids", token_type_ids, (batch, length))
    if position_ids is not None:
        check_tensor("position_ids", position_ids)
    if relation_ids is not None and "relation_ids" in required:
        check_tensor("relation_ids", relation_ids, LABELS)
        _check_shape("relation_ids", relation_ids, (batch, length, length))
    if attention_mask is not None and not isinstance(attention_mask, BlockMask):
        _check_mask(config, dtype, attention_mask, batch, length, has_cache)


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Reject a tensor of another shape, (B, L, …), unless all rows share it."""
    if tuple(tensor.shape) not in (shape, (1, *shape[1:])):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {shape[0]} rows of {shape[1]} tokens need {shape}")


def _check_mask(config: Any, dtype: torch.dtype, mask: Any, batch: int, length: int, has_cache: bool) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attention_mask is a {type(mask).__name__}; give a tensor, or None")
    keys = mask.shape[-1] if has_cache and mask.dim() else length
    prepared = mask.dim() == 4
    known = ((1, batch), (1, config.num_attention_heads), (1, length), (keys,)) if prepared else ((batch,), (keys,))
    fits = mask.dim() == len(known) and all(size in sizes for size, sizes in zip(mask.shape, known, strict=True))
    if not fits:
        needs = f"({batch}, {keys}), nonzero for tokens, or, prepared, ({batch}, 1, {length}, {keys})"
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; {batch} rows of {length} tokens need {needs}")
    if prepared and mask.dtype not in (torch.bool, torch.float32, dtype):
        kinds = f"boolean, True: may attend, or is added to the scores, in float32 or the model's {dtype}"
        found = f"shape {tuple(mask.shape)} and dtype {mask.dtype}"
        raise ValueError(f"attention_mask has {found}; a prepared mask is {kinds}")
