"""`exact`: keep the tables of a relative source, or move them into another scheme that holds them."""

import copy
import dataclasses
from collections.abc import Iterator

import torch

from ..attention.context import AttentionContext
from ..attention.formula import TABLE_FIELDS, Terms
from ..families.errors import ConversionError
from ..families.names import is_scheme
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..schemes.scheme import Scheme
from .build import build_teacher
from .configurations import same_positions
from .plan import Conversion
from .verify import ROUNDING


# Rows by letter, (H or 1, N, d) for N offsets, (H or 1, N, 1) for c, in float64.
Rows = dict[str, torch.Tensor]
# Distance up to which the last row of a table is looked for.
FAR = 8192


def exact(model: RelPosBertPreTrainedModel, conversion: Conversion) -> dict[str, str]:
    """Keep the source's tables if the positions are the same; otherwise move them into the scheme of the model.

    Raises:
        ConversionError: for a source with other terms than tables, and a scheme that does not hold them.
    """
    if same_positions(conversion.source_config, model.config):
        return {}
    source, generator = build_teacher(conversion), torch.Generator().manual_seed(0)
    parameters = {name: parameter for name, parameter in model.named_parameters() if is_scheme(name)}
    for parameter in parameters.values():
        parameter.uniform_(generator=generator)  # no two rows are equal, so that the last one is found
    try:
        distance = max(_last_distance(source), _last_distance(model))
        wanted = list(table_rows(source, distance))
        for layer, rows in zip(model.base_model.encoder.layer, wanted, strict=True):
            _move(layer.attention.self.distance_embedding, rows, distance)
        lost = _lost(wanted, list(table_rows(model, distance)), ROUNDING * torch.finfo(model.dtype).eps)
    except ConversionError as error:
        raise ConversionError(f"{error}; method = 'distil' learns its outputs instead") from error
    if lost:
        raise ConversionError(
            f"position_embedding_type = {model.config.position_embedding_type!r}, position_options = "
            f"{model.config.position_options}: it does not hold the source's tables of {', '.join(lost)}; choose a "
            "scheme or options that do, or method = 'distil', which learns the outputs from text"
        )
    return dict.fromkeys(parameters, "fitted to the source's tables")


@torch.no_grad()
def table_rows(model: RelPosBertPreTrainedModel, distance: int) -> Iterator[Rows]:
    """The rows of a model's tables at every offset from −`distance` to `distance`, layer by layer.

    Raises:
        ConversionError: for a scheme with other terms than tables of distances, or without terms.
    """
    encoder = model.base_model.encoder
    context = _context(distance, model.device)
    shared = None if encoder.distance_embedding is None else encoder.distance_embedding(context)
    for layer in encoder.layer:
        attention = layer.attention.self
        projections = {"query_projection": attention.query, "key_projection": attention.key}
        terms = attention.distance_embedding(dataclasses.replace(context, shared=shared, **projections))
        try:
            yield _rows(terms, distance, attention.attention_head_size)
        except ValueError as error:
            name = model.config.position_scheme_name
            raise ConversionError(f"position_embedding_type = {name!r}: {error}") from error


def _context(distance: int, device: torch.device) -> AttentionContext:
    return AttentionContext(distance + 1, distance + 1, device=device, dtype=torch.float64)


def _rows(terms: Terms, distance: int, head_size: int) -> Rows:
    """The rows of the terms of one call; c' is included in c.

    Raises:
        ValueError: for terms that are not tables of distances.
    """
    fields = {field.name: getattr(terms, field.name) for field in dataclasses.fields(terms)}
    tables = {letter: fields.pop(name) for letter, name in TABLE_FIELDS.items()}
    tables["c'"] = fields.pop("bias")
    others = [
        name for name, value in fields.items() if value is not None and not (isinstance(value, tuple) and not value)
    ]
    if any(table.relation is not None for each in tables.values() for table in each):
        others.append("a table by another index than the offset")
    if others or not any(tables.values()):
        raise ValueError(f"its terms ({', '.join(others) or 'none'}) are not tables of distances")
    rows: Rows = {}
    for letter, each in tables.items():
        for table in each:
            found = table.rows.double()[:, table.row_of(torch.arange(-distance, distance + 1, device=table.device))]
            found = found.reshape(*found.shape[:2], -1)
            name, found = ("c", found * head_size**0.5) if letter == "c'" else (letter, found)
            rows[name] = rows[name] + found if name in rows else found
    return rows


def _last_distance(model: RelPosBertPreTrainedModel) -> int:
    """The largest distance with a row of its own, or the largest in an input of trained length if that is larger."""
    trained, last = max(model.config.max_position_embeddings - 1, 1), 0
    next(table_rows(model, 1))  # raises before anything large is computed
    for rows in next(table_rows(model, FAR)).values():
        changes = (rows[:, 1:] != rows[:, :-1]).any(-1).any(0).nonzero()
        if len(changes):
            last = max(last, int(changes.max()) + 1 - FAR, FAR - int(changes.min()))
    return trained if last == FAR else max(trained, last)  # rows without an end are computed for any distance


@torch.enable_grad()
def _move(scheme: Scheme, wanted: Rows, distance: int) -> None:
    """Set every row of a scheme's parameters to the mean of the wanted rows w at the offsets that read it.

    Rows are linear in the parameters p. The mean is Jᵀ w / Jᵀ J 1, with the Jacobian J of the rows at p = 1.
    """
    probe = copy.deepcopy(scheme).double()
    parameters = list(probe.parameters())
    if not parameters:
        return
    for parameter in parameters:
        parameter.data.fill_(1.0)
    rows = _rows(probe(_context(distance, parameters[0].device)), distance, probe.head_size)
    rows = {letter: each.expand(probe.num_heads, -1, -1) for letter, each in rows.items()}
    of_wanted = torch.stack([(each * wanted.get(letter, 0.0)).sum() for letter, each in rows.items()])
    of_rows = torch.stack([(each * each.detach()).sum() for each in rows.values()])
    sums, counts = (
        torch.autograd.grad(each.sum(), parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
        for each in (of_wanted, of_rows)
    )
    for parameter, each, count in zip(scheme.parameters(), sums, counts, strict=True):
        parameter.data.copy_(torch.where(count == 0, 0.0, each / count))


def _lost(wanted: list[Rows], found: list[Rows], precision: float) -> list[str]:
    """The letters of tables that differ by more than this share of their largest entry, in any layer."""
    lost = set()
    for one, other in zip(wanted, found, strict=True):
        for letter in one.keys() | other.keys():
            left, right = (rows.get(letter, torch.zeros(1, 1, 1)) for rows in (one, other))
            if not (left - right).abs().max() <= precision * left.abs().max():  # NaN is a difference, too
                lost.add(letter)
    return sorted(lost)
