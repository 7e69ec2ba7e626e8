"""Build the scheme, or the combination of schemes, of a configuration."""

import reprlib
from collections.abc import Hashable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext, LayerInputs
from ..attention.formula import Terms, position_scores
from .scheme import SCHEMES, Scheme, SharedScheme, nearest


# The scheme of a stock BERT configuration. It need not name one: Transformers v5 no longer writes the field.
STOCK_SCHEME = "absolute"
# The default of a RelPosBertConfig.
DEFAULT_SCHEME = "relative_key"
# The end of the error about an unknown scheme; the code of a saved model, which has only those it needs, says another.
MORE_SCHEMES = ". To use a scheme of your own, import the module that defines it first"
# All tables as plain attention, which every kernel computes. Converters fit this one by default.
PLAIN_SCHEME = "harmonic"


def find_scheme(name: Any) -> type[Scheme]:
    """Return the scheme of that name.

    Raises:
        ValueError: for an unknown name. It suggests the nearest name and lists the known ones.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        raise ValueError(
            f"position_embedding_type = {reprlib.repr(name)} is unknown{nearest(name, SCHEMES)}; known schemes: "
            f"{', '.join(sorted(SCHEMES))}{MORE_SCHEMES}"
        )
    return SCHEMES[name]


def scheme_parts(config: Any) -> list[tuple[type[Scheme], dict[str, Any]]]:
    """Return the schemes of a configuration, one or a combination, each with its resolved options.

    For a combination, `position_options` is a dict of dicts, by scheme name.

    Raises:
        ValueError: as `find_scheme` and `Scheme.resolve`; for a combination that is empty or repeats a name; for
            options of a scheme that is not in the combination.
    """
    name = config.position_embedding_type
    options = config.position_options or {}
    if isinstance(name, str):
        scheme = find_scheme(name)
        return [(scheme, scheme.resolve(options, config))]
    if not isinstance(name, list | tuple) or not name or len(set(map(str, name))) < len(name):
        raise ValueError(
            f"position_embedding_type = {reprlib.repr(name)}: give one scheme's name, or a list of different names"
        )
    schemes = [find_scheme(each) for each in name]
    for key, value in options.items():
        if key not in name or not isinstance(value, Mapping):
            raise ValueError(
                f"position_options[{reprlib.repr(key)}] = {reprlib.repr(value)}: for a combination, give one dict for "
                f"each of its schemes: {', '.join(name)}"
            )
    return [(scheme, scheme.resolve(options.get(scheme.name), config)) for scheme in schemes]


def parts_with_absolute_table(config: Any) -> list[tuple[type[Scheme], dict[str, Any]]]:
    """Return `scheme_parts`, plus the stock scheme if the field `absolute_position_embeddings` adds its table."""
    parts = scheme_parts(config)
    if config.absolute_position_embeddings and not any(scheme.learned_input_table for scheme, _ in parts):
        stock = find_scheme(STOCK_SCHEME)
        parts.append((stock, stock.resolve({}, config)))
    return parts


class Combination(nn.Module):
    """Several schemes at once: the sum of their terms, in the order of `position_embedding_type`."""

    def __init__(self, schemes: list[Scheme]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(schemes)
        self.signature: Hashable = tuple(scheme.signature for scheme in schemes)  # as in Scheme

    def token_numbers(self, states: torch.Tensor) -> torch.Tensor | None:
        """Return those of the part that has some."""
        schemes: list[Any] = list(self.parts)
        each = (scheme.token_numbers(states) for scheme in schemes)
        return next((numbers for numbers in each if numbers is not None), None)

    def forward(self, context: AttentionContext) -> Terms:
        """Return the sum of the terms of all parts."""
        shared = context.layer.shared or (None,) * len(self.parts)
        total = Terms()
        for part, of_part in zip(self.parts, shared, strict=True):
            total = combined(total, part(replace(context, layer=context.layer._replace(shared=of_part))))
        return total


def combined(one: Terms, other: Terms) -> Terms:
    """Return the terms of both. At most one of them may set a scale, a rotation or a feature_gain.

    A rotated vector depends on its own position, and so would its product with a vector of an offset, or with a
    gain by feature.

    Raises:
        ValueError: if both set the same one of these; equal scales are allowed. If one rotates and the other has
            u, A, B or a feature_gain.
    """
    merged = {}
    for name in (each.name for each in fields(one)):
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, tuple):
            merged[name] = mine + theirs
        elif mine is None or theirs is None:
            merged[name] = theirs if mine is None else mine
        elif name == "content_bias":
            merged[name] = mine + theirs
        elif name == "scale" and mine == theirs:
            merged["scale"] = mine
        else:
            raise ValueError(f"two schemes that both set `{name}` cannot be combined; leave one of them out")
    if (one.rotate is None) != (other.rotate is None):
        still = other if one.rotate is not None else one
        vectors = still.content_bias is not None or still.feature_gain is not None
        if vectors or still.query_table or still.key_table:
            raise ValueError(
                "a rotation cannot be combined with vectors that are multiplied by queries or keys: the scores would "
                "depend on absolute positions. Combine the rotation with biases only"
            )
    return Terms(**merged)


class SharedParts(nn.Module):
    """The shared modules of a combination's parts, in their order."""

    def __init__(self, modules: list[nn.Module | None]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Identity() if module is None else module for module in modules)

    def forward(self, context: AttentionContext) -> tuple[Any, ...]:
        """Return one entry per part; None for parts that share nothing."""
        return tuple(part(context) if isinstance(part, SharedScheme) else None for part in self.parts)


def build_scheme(config: Any, layer: int = 0) -> "Scheme | Combination":
    """Build the module `attention.self.distance_embedding` of one layer."""
    parts = scheme_parts(config)
    schemes = [scheme(config, scheme.settings_of_layer(settings, layer)) for scheme, settings in parts]
    return schemes[0] if isinstance(config.position_embedding_type, str) else Combination(schemes)


def build_shared(config: Any) -> nn.Module | None:
    """Build the module `encoder.distance_embedding`; return None if the layers share nothing."""
    modules = [scheme.shared_module(config, settings) for scheme, settings in scheme_parts(config)]
    if all(module is None for module in modules):
        return None
    return modules[0] if isinstance(config.position_embedding_type, str) else SharedParts(modules)


def build_input(config: Any) -> nn.Module | None:
    """Build the module `embeddings.position_embeddings`; return None if no scheme acts on the input.

    Raises:
        ValueError: if more than one scheme acts on the input.
    """
    parts = parts_with_absolute_table(config)
    made = {scheme.name: scheme.input_module(config, settings) for scheme, settings in parts}
    modules = {name: module for name, module in made.items() if module is not None}
    if len(modules) > 1:
        raise ValueError(
            f"position_embedding_type = {config.position_embedding_type!r} with absolute_position_embeddings = "
            f"{config.absolute_position_embeddings}: {' and '.join(modules)} both act on the input; choose one of them"
        )
    return next(iter(modules.values()), None)


def position_bias(
    scheme: Any,
    query_length: int,
    key_length: int,
    shared: nn.Module | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return what a scheme adds to the scores s·q_i·k_j, for the attention of any model: its additive mask.

    Args:
        scheme: from `build_scheme`, or `attention.self.distance_embedding` of a layer.
        query_length: L; the queries are the last tokens of the keys.
        key_length: K.
        shared: from `build_shared`, or `encoder.distance_embedding`.
        device: of the scheme; None for the default device.

    Returns:
        (H, L, K).

    Raises:
        ValueError: for a scheme that is more than a bias, and for one without its `shared`.
    """
    parts: list[Scheme] = list(getattr(scheme, "parts", [scheme]))
    names = " + ".join(part.name for part in parts)

    def refuse(*_: Any) -> Any:
        raise ValueError(
            f"position_bias: the scheme {names!r} adds more than a bias of each head and pair of positions, or needs "
            "more than the lengths. Use RelPosBertModel, or hf_relpos.schemes.attend with its terms"
        )

    if any(part.required_inputs or part.has_token_numbers() for part in parts):
        refuse()
    context = AttentionContext(query_length, key_length, key_length - query_length, device=device, dtype=dtype)
    found = None if shared is None else shared(context)
    terms = scheme(replace(context, layer=LayerInputs(found, None, refuse, refuse)))
    if None in (*terms.dense, *(table.rows for table in terms.bias)):
        raise ValueError(f"position_bias: layers share a module of the scheme {names!r}; give it as `shared`")
    if terms != Terms(scale=terms.scale, scaled_bias=terms.scaled_bias, bias=terms.bias, dense=terms.dense):
        refuse()
    query, key = torch.empty(2, 1, parts[0].num_heads, key_length, parts[0].head_size, device=device, dtype=dtype)
    bias = position_scores(query[:, :, :query_length], key, terms, context)
    return refuse() if bias is None else bias[0].expand(parts[0].num_heads, -1, -1)
