"""What becomes of absolute position embeddings: kept, dropped, folded into other embeddings, or extended."""

import torch

from ..families.errors import ConversionError
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from .build import add_to_token_types, parameter_name
from .options import HierarchicalOptions, LengthOptions
from .run import ConversionRun


# α of Su's decomposition: the weight of a position's block; its index in the block has weight 1 − α
ALPHA = 0.4


def keep(model: RelPosBertPreTrainedModel, run: ConversionRun) -> dict[str, str]:
    """Keep all tensors of the source, which are in the model already."""
    return {}


def drop(model: RelPosBertPreTrainedModel, run: ConversionRun) -> dict[str, str]:
    """Replace the position vectors by their mean."""
    name = add_to_token_types(model, run.source_table.double().mean(0))
    return {name: "plus the mean of the position vectors"}


def fold(model: RelPosBertPreTrainedModel, table: torch.Tensor, counts: torch.Tensor, first_token: int | None) -> None:
    """Add position vectors to the embeddings of a model without them: their mean to all tokens, p₀ to [CLS].

    Args:
        model: changed in place.
        table: absolute position embeddings, (P, D).
        counts: how often each position occurs, (P,).
        first_token: id of the token at position 0 of every text; position vector 0 is added to its word embedding.
            None if texts begin with different tokens; the mean is then over all positions.
    """
    embeddings = model.base_model.embeddings
    weight = counts.double().clone()
    if first_token is not None:
        weight[0] = 0
    mean = (table.double() * (weight / weight.sum())[:, None]).sum(0)
    embeddings.add_everywhere(mean)
    if first_token is not None:
        words = embeddings.word_embeddings.weight
        words[first_token] = (words[first_token].double() + table[0].double() - mean).to(words.dtype)


def interpolate_table(model: RelPosBertPreTrainedModel, run: ConversionRun) -> dict[str, str]:
    """Stretch the table to more positions by linear interpolation."""
    table, length = run.source_table, model.config.max_position_embeddings
    run.details["positions"] = {"source": len(table), "result": length, "kept": 1}
    note = f"rows 1 to {len(table) - 1} of {len(table)} stretched over 1 to {length - 1}, linear in between"
    return _replace_table(model, interpolate(table, length), note)


def decompose_table(model: RelPosBertPreTrainedModel, run: ConversionRun) -> dict[str, str]:
    """Keep the table, and extend it with sums of two of its rows."""
    table, length, cls = run.source_table, model.config.max_position_embeddings, run.options.cls
    count = len(table)
    run.details["positions"] = {"source": count, "result": length, "kept": count, "alpha": ALPHA, "cls": cls}
    note = f"{count} rows, and {length - count} sums of two, by block ({ALPHA}) and index in it"
    return _replace_table(model, decompose(table, length, cls), note)


def stretched_positions(positions: int, options: LengthOptions) -> int:
    """Number of rows of an extended table.

    Args:
        positions: `max_position_embeddings` of the source.
        options: options of the method.

    Raises:
        ConversionError: for a table too small to stretch, and a length that is not longer or exceeds the limit of the
            decomposition.
    """
    if positions < 2:
        raise ConversionError(f"max_position_embeddings = {positions}: a table of one row cannot be stretched")
    limit = None
    if isinstance(options, HierarchicalOptions):
        limit = options.cls + (positions - options.cls) ** 2
    length = options.length
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


def interpolate(table: torch.Tensor, length: int) -> torch.Tensor:
    """Stretch rows 1 to n − 1 over positions 1 to length − 1 by linear interpolation; row 0, for [CLS], is kept.

    This is position interpolation (Chen et al. 2023, arXiv 2306.15595) for a learned table. Neighbouring positions are
    closer than in training. Row 0 is excluded, since it represents [CLS] rather than a neighbour of row 1.

    Args:
        table: (n, D), n ≥ 2.
        length: N ≥ 2.

    Returns:
        (N, D) in float64.
    """
    rows = table[1:].double()
    position = torch.linspace(0, len(rows) - 1, length - 1, dtype=torch.float64)
    left = position.floor().long()
    right = (left + 1).clamp(max=len(rows) - 1)
    share = (position - left)[:, None]
    return torch.cat([table[:1].double(), torch.lerp(rows[left], rows[right], share)])


def decompose(table: torch.Tensor, length: int, cls: bool) -> torch.Tensor:
    """Su's hierarchical decomposition: p of position i·n + j is α u_i + (1 − α) u_j, with u = (p − α p₀) / (1 − α).

    Su 2020, kexue.fm/archives/7947. The first n rows are those of the table. It covers n² positions.

    Args:
        table: (n, D).
        length: N.
        cls: exclude row 0, for [CLS], from the sums, which then count positions from row 1.

    Returns:
        (N, D) in float64.

    Raises:
        ValueError: for more than n² positions.
    """
    if cls:
        return torch.cat([table[:1].double(), decompose(table[1:], length - 1, cls=False)])
    rows, count = table.double(), len(table)
    if length > count**2:
        raise ValueError(f"{count} rows make {count**2:,} positions, not {length:,}")
    parts = (rows - ALPHA * rows[0]) / (1 - ALPHA)
    position = torch.arange(length)
    extended = ALPHA * parts[position // count] + (1 - ALPHA) * parts[position % count]
    extended[:count] = rows[:length]  # without rounding
    return extended
