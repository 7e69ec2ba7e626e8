"""What becomes of absolute position embeddings: kept, dropped, or folded into other embeddings."""

import torch

from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from .build import add_to_token_types
from .run import ConversionRun


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
    weight = counts.double().clone()
    if first_token is not None:
        weight[0] = 0
    mean = (table.double() * (weight / weight.sum())[:, None]).sum(0)
    add_to_token_types(model, mean)
    if first_token is not None:
        words = model.base_model.embeddings.word_embeddings.weight
        words[first_token] = (words[first_token].double() + table[0].double() - mean).to(words.dtype)
