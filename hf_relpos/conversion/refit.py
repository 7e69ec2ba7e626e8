"""Refit tables of distances: to another scheme, or to another range of distances, with the loss.

The rows of the source's tables at every distance are fitted by least squares. The design matrix comes from the terms
of the target for unit parameters.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..attention.context import AttentionContext
from ..attention.formula import Terms
from ..families.errors import ConversionError
from ..families.names import is_scheme
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..schemes.registry import SCHEMES, scheme_parts
from ..schemes.scheme import RangeOption, Scheme
from .build import same_positions
from .report import lost_in_words
from .run import ConversionRun
from .verify import ROUNDING


# Penalty of the coefficients of Fourier features, relative to their mean curvature; its error is below float32's.
RIDGE = 1e-8
# Rows by letter, (H or 1, N, d) for N distances, (H or 1, N) for c, in float64.
Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ExportReport:
    """The loss of an export or of a change of range.

    Attributes:
        position_embedding_type: scheme of the target.
        lost: for each letter of the source, the share of the sum of squares of its rows, over layers, heads and
            distances, that the target loses, from 0 (exact) to 1. A distance counts as often as it occurs in an input
            of the length of the larger range.
    """

    position_embedding_type: str
    lost: dict[str, float]


def exact(model: RelPosBertPreTrainedModel, run: ConversionRun) -> dict[str, str]:
    """Keep the source's tables, or fit tables that represent them exactly.

    Raises:
        ConversionError: for a scheme that cannot represent them.
    """
    changed = refit(model, run)
    rounding = (ROUNDING * torch.finfo(model.dtype).eps) ** 2
    lost = {letter: share for letter, share in run.details.get("lost", {}).items() if share > rounding}
    if lost:
        raise ConversionError(
            f"position_embedding_type = {model.config.position_embedding_type!r}, position_options = "
            f"{model.config.position_options}: this would lose {lost_in_words(lost)} of the source's tables, and "
            "method = 'exact' loses nothing; choose a scheme or options that hold them, or method = 'refit' for the "
            "closest"
        )
    return changed


def refit(model: RelPosBertPreTrainedModel, run: ConversionRun) -> dict[str, str]:
    """Fit the closest tables; a model with the source's scheme keeps its tables."""
    if same_positions(run.source_config, model.config):
        return {}
    try:
        run.details["lost"] = refit_tables(run.build_teacher(), model)
    except ConversionError as error:
        raise ConversionError(f"{error}; method = 'distil' learns its outputs instead") from error
    return {name: "fitted to the source's tables" for name, _ in model.named_parameters() if is_scheme(name)}


@torch.no_grad()
def export_tables(
    model: RelPosBertPreTrainedModel, position_embedding_type: str, position_options: dict[str, Any] | None = None
) -> tuple[RelPosBertPreTrainedModel, ExportReport]:
    """Copy a model with another scheme, fitted by least squares over the pairs of tokens of an input.

    Heads that share a table get the mean of their tables. So do A and B if the target has one table for both.
    Distances that share a row get the mean of their rows, weighted by how often each occurs.

    Args:
        model: a model with any head and a scheme of distance tables, learned or computed.
        position_embedding_type: a scheme whose `Scheme.has_tables()` is true.
        position_options: options of the target.

    Returns:
        The model, of the same class, and the loss of each table.

    Raises:
        ConversionError: for other sources and targets.
    """
    if position_embedding_type not in _schemes_with_tables():
        raise ConversionError(
            f"position_embedding_type = {position_embedding_type!r} is no target of an export; known: "
            f"{', '.join(_schemes_with_tables())}"
        )
    other = _with_positions(
        model,
        position_embedding_type=position_embedding_type,
        position_options=position_options or {},
        absolute_position_embeddings=model.config.has_absolute_table,
    )
    return other, ExportReport(position_embedding_type, refit_tables(model, other))


@torch.no_grad()
def resize_tables(
    model: RelPosBertPreTrainedModel, max_distance: int, fill: str = "clip"
) -> tuple[RelPosBertPreTrainedModel, ExportReport]:
    """Copy a model with tables that have an embedding for each distance up to `max_distance`.

    Args:
        model: a model with any head and a scheme with a range whose `Scheme.has_tables()` is true.
        max_distance: the largest distance with its own embedding, smaller or larger than now. If the size of the
            tables is `max_position_embeddings`, that becomes `max_distance` + 1.
        fill: "clip": distances in both ranges keep their rows, those past the old range get its last row.
            "interpolate": the whole table is interpolated to the new range.

    Returns:
        The model, of the same class, and the loss of its rows inside the old range.

    Raises:
        ConversionError: for another scheme, an invalid range or fill, and tables whose size is also that of absolute
            position embeddings.
    """
    config, name = model.config, model.config.position_embedding_type
    with_range = [other for other in _schemes_with_tables() if SCHEMES[other].range_option is not None]
    if isinstance(name, list) or name not in with_range:
        raise ConversionError(
            f"position_embedding_type = {name!r}: only one of {', '.join(with_range)} has tables of distances "
            "to resize"
        )
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or max_distance < 1:
        raise ConversionError(
            f"max_distance = {max_distance!r}: give the largest distance with an embedding of its own, a positive "
            "integer"
        )
    if fill not in ("clip", "interpolate"):
        raise ConversionError(f"fill = {fill!r} is unknown; choose 'clip' or 'interpolate'")
    ((scheme, settings),) = scheme_parts(config)
    range_option = cast(RangeOption, scheme.range_option)
    if range_option.within_table and config.has_absolute_table:
        raise ConversionError(
            f"absolute_position_embeddings = True: with position_embedding_type = {name!r} both tables have the "
            "size of max_position_embeddings; resize a model without absolute positions"
        )
    old = range_option.max_distance(settings, config)
    resized = _with_positions(model, **range_option.resized(config.position_options or {}, max_distance))
    larger = max(old, max_distance)
    offsets = torch.arange(-larger, larger + 1, device=model.device)
    in_old_table = offsets.double() * (old / max_distance) if fill == "interpolate" else offsets.double()
    in_old_table = in_old_table.clamp(-old, old)
    low = in_old_table.floor()
    weight_of_right = in_old_table - low
    left, right = low.long() + old, (low.long() + old + 1).clamp(max=2 * old)
    target_rows = [
        {
            letter: torch.lerp(table[:, left], table[:, right], weight_of_right.view(-1, *[1] * (table.dim() - 2)))
            for letter, table in rows.items()
        }
        for rows in table_rows(model, old)
    ]
    _fit(resized, target_rows, larger, _pair_weights(larger, model.device) * (offsets.abs() <= max_distance))
    lost = _lost(table_rows(model, old), table_rows(resized, old), _pair_weights(old, model.device))
    return resized, ExportReport(name, lost)


def refit_tables(source: RelPosBertPreTrainedModel, target: RelPosBertPreTrainedModel) -> dict[str, float]:
    """Set the tables of a model as close as possible to those of another model.

    Args:
        source: a model with a scheme of distance tables.
        target: a model with as many layers and heads, whose `Scheme.has_tables()` is true.

    Returns:
        `ExportReport.lost`.

    Raises:
        ConversionError: for a source with other terms than distance tables.
    """
    max_distance = max(_max_distance(source.config), _max_distance(target.config))
    weights, rows = _pair_weights(max_distance, target.device), table_rows(source, max_distance)
    _fit(target, rows, max_distance, weights)
    return _lost(rows, table_rows(target, max_distance), weights)


@torch.no_grad()
def table_rows(model: RelPosBertPreTrainedModel, max_distance: int) -> list[Rows]:
    """The rows of a model's tables at every distance from −`max_distance` to `max_distance`, by layer.

    Raises:
        ConversionError: for a scheme with other terms than distance tables, or without terms.
    """
    encoder = model.base_model.encoder
    context = AttentionContext(max_distance + 1, max_distance + 1, device=model.device, dtype=torch.float64)
    shared = None if encoder.distance_embedding is None else encoder.distance_embedding(context)
    layers = []
    for layer in encoder.layer:
        attention = layer.attention.self
        call = AttentionContext(
            max_distance + 1,
            max_distance + 1,
            shared=shared,
            query_projection=attention.query,
            key_projection=attention.key,
            device=model.device,
            dtype=torch.float64,
        )
        name = model.config.position_scheme_name
        layers.append(_rows(attention.distance_embedding(call), max_distance, attention.attention_head_size, name))
    return layers


def _rows(terms: Terms, max_distance: int, head_size: int, name: str) -> Rows:
    """The rows of the terms of one call; c' is included in c."""
    tables = {
        "A": terms.query_table,
        "B": terms.key_table,
        "c": terms.scaled_bias,
        "V": terms.value_table,
        "c'": terms.bias,
    }
    other_terms = {
        "a scale": terms.scale is not None,
        "u": terms.content_bias is not None,
        "a dense bias": terms.dense,
        "a gain": terms.gain or terms.feature_gain is not None,
        "hidden keys": terms.allow,
        "a rotation": terms.rotate is not None,
        "a relation": any(table.relation is not None for each in tables.values() for table in each),
    }
    present = [word for word, is_present in other_terms.items() if is_present]
    if present or not any(tables.values()):
        added = ", ".join(present) if present else "nothing to the attention"
        raise ConversionError(
            f"position_embedding_type = {name!r}: it adds {added}, which tables of distances cannot represent"
        )
    offsets = torch.arange(-max_distance, max_distance + 1)
    rows: Rows = {}
    for letter, each in tables.items():
        key, factor = ("c", head_size**0.5) if letter == "c'" else (letter, 1.0)
        for table in each:
            of_table = factor * table.rows.double()[:, table.row_of(offsets.to(table.rows.device))]
            rows[key] = rows[key] + of_table if key in rows else of_table
    return rows


def _fit(target: RelPosBertPreTrainedModel, rows: list[Rows], max_distance: int, weights: torch.Tensor) -> None:
    """Fit every parameter of the target's tables by least squares.

    Args:
        rows: the rows to fit, by layer, N = 2·`max_distance` + 1.
        weights: weight of each distance, (N,).
    """
    heads = target.config.num_attention_heads
    for name, declared in next(_schemes(target)).linear_parameters.items():
        letters = declared.letters
        parameters: list[Any] = [getattr(scheme, name, None) for scheme in _schemes(target)]
        if parameters[0] is None:
            continue
        designs = {letter: _design(next(_schemes(target)), name, letter, max_distance) for letter in letters}
        normal = torch.stack([design.T @ (weights[:, None] * design) for design in designs.values()]).sum(0)
        normal.diagonal()[normal.diagonal() == 0] = 1.0  # rows without a distance stay at zero
        if declared.is_fourier:  # similar features would get huge opposite coefficients
            normal.diagonal().add_(RIDGE * normal.diagonal().mean())
        factor, pivots = torch.linalg.lu_factor(normal)
        for parameter, layer_rows in zip(parameters, rows, strict=True):
            vectors = parameter.shape[-1:] if letters != "c" else ()
            per_head = parameter.dim() > 1 + len(vectors) and len(parameter) == heads
            right = None
            for letter, design in designs.items():
                if letter in layer_rows:  # a missing table counts as zero in a shared one
                    table = layer_rows[letter].expand(heads, -1, *vectors)
                    table = table if per_head else table.mean(0, keepdim=True)
                    columns = table.reshape(len(table), len(weights), -1)
                    added = design.T @ (weights[:, None] * columns)
                    right = added if right is None else right + added
            if right is None:
                parameter.zero_()
            else:
                parameter.copy_(torch.linalg.lu_solve(factor, pivots, right).reshape(parameter.shape))


def _design(scheme: Scheme, name: str, letter: str, max_distance: int) -> torch.Tensor:
    """The contribution of each row of a parameter at each distance, (2·`max_distance` + 1, rows), in every head."""
    probe = copy.deepcopy(scheme).double()
    for parameter in probe.parameters():
        parameter.zero_()
    parameter = getattr(probe, name)
    context = AttentionContext(max_distance + 1, max_distance + 1, device=parameter.device, dtype=torch.float64)
    scalar = letter == "c"
    count, width = (parameter.shape[-1], 1) if scalar else parameter.shape[-2:]
    columns = []
    for start in range(0, count, width):  # each feature carries one row
        numbers = torch.arange(start, min(start + width, count), device=parameter.device)
        entries = (..., numbers) if scalar else (..., numbers, numbers - start)
        parameter[entries] = 1.0
        added = _rows(probe(context), max_distance, scheme.head_size, scheme.name)[letter][0]
        columns.append(added[:, None] if scalar else added[:, : len(numbers)])
        parameter[entries] = 0.0
    return torch.cat(columns, 1)


def _lost(source: list[Rows], target: list[Rows], weights: torch.Tensor) -> dict[str, float]:
    """`ExportReport.lost`."""
    lost = {}
    for letter in source[0]:
        whole = missed = 0.0
        for source_rows, target_rows in zip(source, target, strict=True):
            rows = source_rows[letter]
            fitted = target_rows.get(letter, torch.zeros_like(rows))
            heads = max(len(rows), len(fitted))  # a shared table counts for all heads
            column = weights.view(-1, *[1] * (rows.dim() - 2))
            whole += float((column * rows.square()).sum()) * heads / len(rows)
            missed += float((column * (rows - fitted).square()).sum())
        lost[letter] = missed / whole if whole else 0.0
    return lost


def _pair_weights(max_distance: int, device: torch.device) -> torch.Tensor:
    """Number of pairs with each offset among `max_distance` + 1 tokens, divided by that of offset 0.

    Returns:
        (2·`max_distance` + 1,).
    """
    return 1.0 - torch.arange(-max_distance, max_distance + 1, device=device).abs().double() / (max_distance + 1)


def _max_distance(config: RelPosBertConfig) -> int:
    """The largest distance in an input of trained length, or the largest with its own embedding if that is larger."""
    options = [(scheme.range_option, settings) for scheme, settings in scheme_parts(config)]
    ranges = [option.max_distance(settings, config) for option, settings in options if option is not None]
    return max(config.max_position_embeddings - 1, 1, *ranges)


def _schemes_with_tables() -> list[str]:
    """Names of the schemes with learned distance tables, which can be targets."""
    return [name for name, scheme in SCHEMES.items() if scheme.has_tables()]


def _schemes(model: RelPosBertPreTrainedModel) -> Iterator[Any]:
    """The scheme of every layer."""
    return (layer.attention.self.distance_embedding for layer in model.base_model.encoder.layer)


def _with_positions(model: RelPosBertPreTrainedModel, **fields: Any) -> RelPosBertPreTrainedModel:
    """Copy a model with other fields of the configuration; the parameters of its scheme are initialised.

    Raises:
        ConversionError: for options that the scheme rejects.
    """
    own = ("model_type", "auto_map", "architectures")
    kept = {key: value for key, value in model.config.to_dict().items() if key not in own}
    try:
        config = RelPosBertConfig(**{**kept, **fields})
    except ValueError as error:
        raise ConversionError(str(error)) from error
    other = type(model)(config).to(model.dtype).to(model.device)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".distance_embedding." not in name}
    other.load_state_dict(state, strict=False)
    return other.train(model.training)
