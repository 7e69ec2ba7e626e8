"""Methods for sources with absolute positions that need no text: keep, drop, interpolate, hierarchical."""

from collections.abc import Mapping
from typing import Any

import torch

from ..families.errors import ConversionError
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from .context import ConversionContext, add_to_token_types, parameter_name
from .stretch import ALPHA, decompose, interpolate


def keep(model: RelPosBertPreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Keep everything: the tensors of the source are in the model already."""
    return {}


def drop(model: RelPosBertPreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Replace the position vectors by their mean."""
    name = add_to_token_types(model, context.source_table.double().mean(0))
    return {name: "plus the mean of the position vectors"}


def interpolate_table(model: RelPosBertPreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Stretch the table to more positions, linearly."""
    table, length = context.source_table, model.config.max_position_embeddings
    context.details["positions"] = {"source": len(table), "result": length, "kept": 1}
    note = f"rows 1 to {len(table) - 1} of {len(table)} stretched over 1 to {length - 1}, linear in between"
    return _replace_table(model, interpolate(table, length), note)


def decompose_table(model: RelPosBertPreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Keep the table, and continue it with sums of two of its rows."""
    table, length, cls = context.source_table, model.config.max_position_embeddings, context.options["cls"]
    count = len(table)
    context.details["positions"] = {"source": count, "result": length, "kept": count, "alpha": ALPHA, "cls": cls}
    note = f"{count} rows, and {length - count} sums of two, by block ({ALPHA}) and index in it"
    return _replace_table(model, decompose(table, length, cls), note)


def stretched_positions(positions: int, options: Mapping[str, Any]) -> int:
    """Rows of a stretched table.

    Args:
        positions: `max_position_embeddings` of the source.
        options: `length`, and `cls` where the method has it.

    Raises:
        ConversionError: for a table too small to stretch, and a length that is not longer or exceeds the limit of the
            decomposition.
    """
    if positions < 2:
        raise ConversionError(f"max_position_embeddings = {positions}: a table of one row cannot be stretched")
    kept = int(options.get("cls", False))
    limit = kept + (positions - kept) ** 2 if "cls" in options else None
    length = options["length"]
    if length is None:
        return 4 * positions if limit is None else min(4 * positions, limit)
    if length <= positions:
        raise ConversionError(
            f"method_options['length'] = {length}: the source reads {positions} tokens already; give more, or choose "
            "another method"
        )
    if limit is not None and length > limit:
        raise ConversionError(
            f"method_options['length'] = {length}: the decomposition of {positions} positions ends at {limit:,}; give "
            "fewer, or method='interpolate'"
        )
    return length


def _replace_table(model: RelPosBertPreTrainedModel, rows: torch.Tensor, note: str) -> dict[str, str]:
    table = model.base_model.embeddings.position_embeddings.weight
    table.copy_(rows)
    return {parameter_name(model, table): note}
