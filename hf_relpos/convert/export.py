"""From the general scheme, `tables`, to a smaller one, and what is lost on the way."""

from dataclasses import dataclass
from typing import Any

import torch

from ..model.configuration_relpos_bert import RelPosBertConfig
from ..model.modeling_relpos_bert import RelPosBertPreTrainedModel
from .source import ConversionError


# Target scheme: which letter of `tables` each of its parameters holds.
TARGETS = {
    "relative_key": {"weight": "A"},
    "relative_key_query": {"weight": "AB"},
    "shaw": {"key": "A", "value": "V"},
}


@dataclass(frozen=True)
class ExportReport:
    """What an export kept.

    Attributes:
        position_embedding_type: the target.
        lost: for each letter that the source has, the share of the sum of squares of its rows, over layers, heads and
            the distances told apart by the source, that the target does not hold: 0 is exact, 1 is all of it.
    """

    position_embedding_type: str
    lost: dict[str, float]


@torch.no_grad()
def export_tables(
    model: RelPosBertPreTrainedModel, position_embedding_type: str, position_options: dict[str, Any] | None = None
) -> tuple[RelPosBertPreTrainedModel, ExportReport]:
    """A copy of a model whose scheme is `tables` with a smaller scheme, closest in the sense of least squares.

    Heads that must share a table get the mean of theirs; so do A and B where the target has one table for both;
    distances past the target's clip get its last row.

    Args:
        model: any head, `position_embedding_type` "tables".
        position_embedding_type: a key of `TARGETS`.
        position_options: options of the target.

    Returns:
        The model, of the same class, and what was lost.

    Raises:
        ConversionError: for another source or target.
    """
    config = model.config
    if config.position_embedding_type != "tables":
        raise ConversionError(
            f"position_embedding_type = {config.position_embedding_type!r}: only models with 'tables' are exported"
        )
    if position_embedding_type not in TARGETS:
        raise ConversionError(
            f"position_embedding_type = {position_embedding_type!r} is no target of an export; known: "
            f"{', '.join(TARGETS)}"
        )
    fields = {
        key: value for key, value in config.to_dict().items() if key not in ("model_type", "auto_map", "architectures")
    }
    fields |= {"position_embedding_type": position_embedding_type, "position_options": position_options or {}}
    smaller = type(model)(RelPosBertConfig(**fields)).to(model.dtype).to(model.device)
    state = {name: tensor for name, tensor in model.state_dict().items() if ".distance_embedding." not in name}
    smaller.load_state_dict(state, strict=False)

    squares: dict[str, float] = {}
    missed: dict[str, float] = {}
    for mine, theirs in zip(model.base_model.encoder.layer, smaller.base_model.encoder.layer, strict=True):
        source, target = mine.attention.self.distance_embedding, theirs.attention.self.distance_embedding
        offsets = torch.arange(-source.reach, source.reach + 1, device=model.device)
        rows = {
            letter: source.expand(table, offsets).expand(config.num_attention_heads, -1, *table.shape[2:])
            for letter, table in source.named_parameters()
        }
        kept = {letter: torch.zeros_like(table) for letter, table in rows.items()}
        for name, letters in TARGETS[position_embedding_type].items():
            parameter = getattr(target, name)
            reach = (parameter.shape[-2] - 1) // 2
            within = torch.arange(-reach, reach + 1, device=model.device).clamp(-source.reach, source.reach)
            wanted = [rows[letter][:, within + source.reach] for letter in letters if letter in rows]
            if not wanted:
                parameter.zero_()
                continue
            # a letter that the source lacks is zero in it, and pulls a common table towards zero
            table = sum(wanted) / len(letters)
            table = table if parameter.dim() == 3 else table.mean(0)
            backwards = position_embedding_type != "shaw"  # their rows are in the order of i − j
            parameter.copy_(table.flip(-2) if backwards else table)
            held = table.expand(config.num_attention_heads, *table.shape[-2:])
            for letter in letters:
                if letter in rows:
                    kept[letter] = held[:, offsets.clamp(-reach, reach) + reach]
        for letter, table in rows.items():
            squares[letter] = squares.get(letter, 0.0) + float(table.double().square().sum())
            missed[letter] = missed.get(letter, 0.0) + float((table - kept[letter]).double().square().sum())
    lost = {letter: missed[letter] / squares[letter] if squares[letter] else 0.0 for letter in squares}
    return smaller.train(model.training), ExportReport(position_embedding_type, lost)
