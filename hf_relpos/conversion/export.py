"""From one scheme that is made of tables of distances to another, or to another range, and what is lost on the way.

Every such scheme is read the same way, as the rows of `A`, `B`, `c` and `V` of the formula at every distance, and
written the same way, by least squares: what a parameter of the target adds at each distance is found out by asking it.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..model.configuration_relpos_bert import RelPosBertConfig
from ..model.context import AttentionContext
from ..model.formula import Terms
from ..model.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..model.scheme import Scheme
from ..model.schemes import scheme_parts
from .errors import ConversionError


# Target scheme: for which letters each of its parameters stands.
TARGETS = {
    "relative_key": {"weight": "A"},
    "relative_key_query": {"weight": "AB"},
    "shaw": {"key": "A", "value": "V"},
    "music": {"key_relative_embeddings": "A", "value_relative_embeddings": "V"},
    "tables": {"A": "A", "B": "B", "c": "c", "V": "V"},
}
# Options that set how far a table reaches: the largest distance told apart, but for music, whose m ends before it.
REACHES = ("clip", "max_distance", "max_relative_position", "max_distance")

# Letter to rows, (H or 1, N, d), those of c (H or 1, N); N distances. In float64.
Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ExportReport:
    """What an export or a change of range kept.

    Attributes:
        position_embedding_type: the target.
        lost: for each letter that the source has, the share of the sum of squares of its rows, over layers, heads and
            distances, that the target does not hold: 0 is exact, 1 is all of it. A distance counts as often as it
            occurs in a row of as many tokens as the longer table reaches.
    """

    position_embedding_type: str
    lost: dict[str, float]


@torch.no_grad()
def export_tables(
    model: RelPosBertPreTrainedModel, position_embedding_type: str, position_options: dict[str, Any] | None = None
) -> tuple[RelPosBertPreTrainedModel, ExportReport]:
    """A copy of a model with another scheme, closest in the sense of least squares over the pairs of a row.

    Heads that must share a table get the mean of theirs; so do A and B where the target has one table for both;
    distances that must share a row get the mean of theirs, each as often as it occurs.

    Args:
        model: any head, with a scheme that is made of tables of distances, learned or computed: `tables`, `shaw`,
            `relative_key`, `relative_key_query`, `music`, `nezha`, `t5`, `alibi`, ….
        position_embedding_type: a key of `TARGETS`.
        position_options: options of the target.

    Returns:
        The model, of the same class, and what was lost.

    Raises:
        ConversionError: for another source or target.
    """
    if position_embedding_type not in TARGETS:
        raise ConversionError(
            f"position_embedding_type = {position_embedding_type!r} is no target of an export; known: "
            f"{', '.join(TARGETS)}"
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
    """A copy of a model whose tables tell distances up to `max_distance` apart.

    Args:
        model: any head, with the scheme `relative_key`, `relative_key_query`, `shaw`, `music` or `tables`.
        reach: the largest distance; shorter than now or longer. For `relative_key` and `relative_key_query`,
            `max_position_embeddings` becomes `max_distance` + 1.
        fill: "clip": a row for each distance that both have, and for those past the old range the row of its end.
            "interpolate": the whole table is stretched to the new range, or compressed.

    Returns:
        The model, of the same class, and what it lost of the rows inside the old range.

    Raises:
        ConversionError: for another scheme, a range or fill that is not accepted, and tables whose size is also that
            of a table of absolute positions.
    """
    config, name = model.config, model.config.position_embedding_type
    if isinstance(name, list) or name not in TARGETS:
        raise ConversionError(
            f"position_embedding_type = {name!r}: only one of {', '.join(TARGETS)} has tables of distances to resize"
        )
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or max_distance < 1:
        raise ConversionError(f"reach = {max_distance!r}: give the largest distance to tell apart, a positive integer")
    if fill not in ("clip", "interpolate"):
        raise ConversionError(f"fill = {fill!r} is unknown; choose 'clip' or 'interpolate'")
    options = dict(config.position_options)
    scheme = next(_schemes(model))
    old, fields = scheme.max_distance if name != "shaw" else scheme.clip, {}
    if name.startswith("relative_key"):
        if config.has_absolute_table:
            raise ConversionError(
                f"absolute_position_embeddings = True: with position_embedding_type = {name!r} both tables have the "
                "size of max_position_embeddings; resize a model without absolute positions"
            )
        old, fields["max_position_embeddings"] = scheme.clip, max_distance + 1
        options.pop("clip", None)
    else:
        size = {
            "shaw": ("clip", max_distance),
            "tables": ("max_distance", max_distance),
            "music": ("max_relative_position", max_distance + 1),
        }
        option, value = size[name]
        options[option] = value
    other = _with_positions(model, **fields, position_options=options)
    far = max(old, max_distance)
    places = torch.arange(-far, far + 1, dtype=torch.float64, device=model.device)
    places = places * (old / max_distance) if fill == "interpolate" else places
    low = places.clamp(-old, old).floor()
    share = places.clamp(-old, old) - low
    wanted = []
    for rows in table_rows(model, old):
        left, right = low.long() + old, (low.long() + old + 1).clamp(max=2 * old)
        wanted.append(
            {
                letter: torch.lerp(table[:, left], table[:, right], share.view(-1, *[1] * (table.dim() - 2)))
                for letter, table in rows.items()
            }
        )
    weights = _pairs(far, model.device)
    _fit(other, wanted, far, weights * (torch.arange(-far, far + 1, device=model.device).abs() <= max_distance))
    lost = _lost(table_rows(model, old), table_rows(other, old), _pairs(old, model.device))
    return other, ExportReport(name, lost)


def refit_tables(source: RelPosBertPreTrainedModel, target: RelPosBertPreTrainedModel) -> dict[str, float]:
    """Set the tables of a model to those of another one, as closely as they can.

    Args:
        source: its scheme is made of tables of distances.
        target: its scheme is a key of `TARGETS`; as many layers and heads.

    Returns:
        `ExportReport.lost`.

    Raises:
        ConversionError: for a source that adds something else than tables of distances.
    """
    max_distance = max(_reach(source.config), _reach(target.config))
    weights, rows = _pairs(max_distance, target.device), table_rows(source, max_distance)
    _fit(target, rows, max_distance, weights)
    return _lost(rows, table_rows(target, max_distance), weights)


@torch.no_grad()
def table_rows(model: RelPosBertPreTrainedModel, max_distance: int) -> list[Rows]:
    """What the scheme of a model adds at every distance from −`max_distance` to `max_distance`, layer by layer.

    Raises:
        ConversionError: for a scheme that adds something else than tables of distances, or nothing.
    """
    encoder = model.base_model.encoder
    context = AttentionContext(max_distance + 1, max_distance + 1, device=model.device, dtype=torch.float64)
    shared = None if encoder.distance_embedding is None else encoder.distance_embedding(context)
    found = []
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
        found.append(
            _rows(attention.distance_embedding.terms(call), max_distance, attention.attention_head_size, name)
        )
    return found


def _rows(terms: Terms, max_distance: int, head_size: int, name: str) -> Rows:
    """The rows of the terms of one call, c' as c."""
    tables = {"A": terms.A, "B": terms.B, "c": terms.c, "V": terms.V, "c'": terms.c_outer}
    others = {
        "a scale": terms.scale is not None,
        "u": terms.u is not None,
        "c' in full": terms.dense,
        "a gain": terms.gain or terms.feature_gain is not None,
        "hidden keys": terms.allow,
        "a rotation": terms.rotate is not None,
        "a relation": any(table.relation is not None for each in tables.values() for table in each),
    }
    more = [word for word, present in others.items() if present]
    if more or not any(tables.values()):
        what = f"adds {', '.join(more)}, which is" if more else "adds nothing to the attention, which is"
        raise ConversionError(f"position_embedding_type = {name!r}: it {what} no table of distances to take over")
    found = {}
    for letter, each in tables.items():
        total = sum(
            table.rows.double()[
                :, table.row_of(torch.arange(-max_distance, max_distance + 1, device=table.rows.device))
            ]
            for table in each
        )
        if each:
            place, factor = ("c", head_size**0.5) if letter == "c'" else (letter, 1.0)
            found[place] = found.get(place, 0.0) + total * factor
    return found


def _fit(target: RelPosBertPreTrainedModel, rows: list[Rows], max_distance: int, weights: torch.Tensor) -> None:
    """Least squares for every parameter of the target's tables.

    Args:
        rows: what is wanted, layer by layer, N = 2·`max_distance` + 1.
        weights: (N,), of each distance.
    """
    heads = target.config.num_attention_heads
    for name, letters in TARGETS[target.config.position_embedding_type].items():
        parameters = [getattr(scheme, name, None) for scheme in _schemes(target)]
        if parameters[0] is None:
            continue
        designs = {letter: _design(next(_schemes(target)), name, letter, max_distance) for letter in letters}
        normal = sum(design.T @ (weights[:, None] * design) for design in designs.values())
        normal.diagonal()[normal.diagonal() == 0] = 1.0  # rows that no distance reads stay at zero
        factor, pivots = torch.linalg.lu_factor(normal)
        for parameter, wanted in zip(parameters, rows, strict=True):
            vectors = parameter.shape[-1:] if letters != "c" else ()
            per_head = parameter.dim() > 1 + len(vectors) and len(parameter) == heads
            right = 0.0
            for letter, design in designs.items():
                if letter in wanted:  # one that the source lacks is zero in it, and pulls a common table towards zero
                    table = wanted[letter].expand(heads, -1, *vectors)
                    table = table if per_head else table.mean(0, keepdim=True)
                    columns = table.reshape(len(table), len(weights), -1)
                    right = right + design.T @ (weights[:, None] * columns)
            if isinstance(right, float):
                parameter.zero_()
            else:
                parameter.copy_(torch.linalg.lu_solve(factor, pivots, right).reshape(parameter.shape))


def _design(scheme: Scheme, name: str, letter: str, max_distance: int) -> torch.Tensor:
    """What one row of a parameter adds at each distance, (2·`max_distance` + 1, rows), in every head and feature."""
    probe = copy.deepcopy(scheme).double()
    for parameter in probe.parameters():
        parameter.zero_()
    parameter = getattr(probe, name)
    context = AttentionContext(max_distance + 1, max_distance + 1, device=parameter.device, dtype=torch.float64)
    scalar = letter == "c"
    count, width = (parameter.shape[-1], 1) if scalar else parameter.shape[-2:]
    columns = []
    for start in range(0, count, width):  # as many rows at once as there are features to tell them apart
        numbers = torch.arange(start, min(start + width, count), device=parameter.device)
        places = (..., numbers) if scalar else (..., numbers, numbers - start)
        parameter[places] = 1.0
        found = _rows(probe.terms(context), max_distance, scheme.head_size, scheme.name)[letter][0]
        columns.append(found[:, None] if scalar else found[:, : len(numbers)])
        parameter[places] = 0.0
    return torch.cat(columns, 1)


def _lost(source: list[Rows], target: list[Rows], weights: torch.Tensor) -> dict[str, float]:
    """`ExportReport.lost`."""
    lost = {}
    for letter in source[0]:
        whole = missed = 0.0
        for mine, theirs in zip(source, target, strict=True):
            other = theirs.get(letter, torch.zeros_like(mine[letter]))
            heads = max(len(mine[letter]), len(other))  # of tables that all heads share there is one
            column = weights.view(-1, *[1] * (mine[letter].dim() - 2))
            whole += float((column * mine[letter].square()).sum()) * heads / len(mine[letter])
            missed += float((column * (mine[letter] - other).square()).sum())
        lost[letter] = missed / whole if whole else 0.0
    return lost


def _pairs(max_distance: int, device: torch.device) -> torch.Tensor:
    """How many pairs of a row of `max_distance` + 1 tokens have each distance, as a share of the most."""
    return 1.0 - torch.arange(-max_distance, max_distance + 1, device=device).abs().double() / (max_distance + 1)


def _reach(config: RelPosBertConfig) -> int:
    """The largest distance that matters: the longest row, or what a table tells apart, if that is more."""
    named = [settings.get(option) for _, settings in scheme_parts(config) for option in REACHES]
    return max(config.max_position_embeddings - 1, 1, *(value for value in named if isinstance(value, int)))


def _schemes(model: RelPosBertPreTrainedModel) -> Iterator[Any]:
    """The scheme of every layer."""
    return (layer.attention.self.distance_embedding for layer in model.base_model.encoder.layer)


def _with_positions(model: RelPosBertPreTrainedModel, **fields: Any) -> RelPosBertPreTrainedModel:
    """A copy of the model with these fields of the configuration; the parameters of its scheme are fresh.

    Raises:
        ConversionError: for options that the scheme refuses.
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
