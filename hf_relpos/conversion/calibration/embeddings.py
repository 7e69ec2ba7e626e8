"""Add absolute position embeddings to the other embeddings of a student, and fit their LayerNorm."""

from collections.abc import Iterable

import torch
from torch import nn

from ...models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ...processes import Reduce
from .batches import Batch


# Number of positions whose mean is used without text, which tells how often each occurs.
DEFAULT_POSITIONS = 128


@torch.no_grad()
def fold_positions(
    student: RelPosBertPreTrainedModel,
    table: torch.Tensor,
    first_token: int | None,
    counts: torch.Tensor | None = None,
) -> dict[str, str]:
    """Add the position vectors of a teacher to the student's embeddings.

    Args:
        student: a model without absolute position embeddings.
        table: absolute position embeddings of the teacher, (P, D).
        first_token: id of the token at position 0 of every text; position vector 0 is added to its word embedding.
            None if texts begin with different tokens; the mean is then over all positions.
        counts: how often each position occurs, (P,); None to weight the first `DEFAULT_POSITIONS` positions equally.

    Returns:
        A note for each changed tensor, by name.
    """
    embeddings = student.base_model.embeddings
    weight = torch.zeros(len(table), dtype=torch.float64, device=table.device)
    if counts is None:
        weight[:DEFAULT_POSITIONS] = 1
    else:
        weight += counts
    if first_token is not None:
        weight[0] = 0
    mean = (table.double() * (weight / weight.sum())[:, None]).sum(0)
    embeddings.add_everywhere(mean)
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    changed = {names[id(embeddings.token_type_embeddings.weight)]: "plus the mean of the position vectors"}
    if first_token is not None:
        words = embeddings.word_embeddings.weight
        difference = table[0].double() - mean
        words[first_token] = (words[first_token].double() + difference).to(words.dtype)
        changed[names[id(words)]] = f"row {first_token}: plus position vector 0, less the mean of the others"
    return changed


@torch.no_grad()
def fit_layer_norm(norm: nn.LayerNorm, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], reduce: Reduce) -> None:
    """Fit gain and bias to targets, dimension by dimension, by least squares.

    Args:
        norm: changed in place.
        pairs: inputs of the layer norm and targets of its output, each (N, D).
        reduce: sums over processes.
    """
    width = norm.weight.shape[0]
    sums = torch.zeros(5, width, dtype=torch.float64, device=norm.weight.device)
    for inputs, targets in pairs:
        x = nn.functional.layer_norm(inputs, (width,), eps=norm.eps).double()
        y = targets.double()
        count = torch.full_like(x[0], len(x))
        sums += torch.stack([count, x.sum(0), y.sum(0), (x * x).sum(0), (x * y).sum(0)])
    count, x, y, xx, xy = reduce(sums)
    variance = xx - x * x / count
    varies = variance > 1e-9 * count
    gain = torch.where(varies, (xy - x * y / count) / variance.clamp(min=1e-30), norm.weight.double())
    norm.weight.copy_(gain)
    norm.bias.copy_((y - gain * x) / count)


@torch.no_grad()
def correct_first_token_bias(
    student: RelPosBertPreTrainedModel,
    first_token: int,
    original: torch.Tensor,
    batches: Iterable[Batch],
    reduce: Reduce,
) -> None:
    """Correct the logit of the first token, to whose word embedding a position vector was added.

    The output layer is tied to the word embeddings, so position vector 0 in that of [CLS] would raise its logit
    everywhere. The mean increase over the text is subtracted from its bias.

    Args:
        student: changed in place; a model without a tied output layer is not changed.
        first_token: token id.
        original: its word embedding before the addition, (D,).
        batches: batches with the student's last hidden states.
        reduce: sums over processes.
    """
    predictions = getattr(getattr(student, "cls", None), "predictions", None)
    decoder = getattr(predictions, "decoder", None)
    words = student.base_model.embeddings.word_embeddings.weight
    if predictions is None or decoder is None or decoder.weight is not words or decoder.bias is None:
        return
    difference = words[first_token].double() - original.double().to(words.device)
    sums = torch.zeros(2, dtype=torch.float64, device=words.device)
    for batch in batches:
        hidden = batch.real(predictions.transform(batch.student)).double()
        products = hidden @ difference
        sums += torch.stack([products.sum(), torch.ones_like(products).sum()])
    total, count = reduce(sums).tolist()
    decoder.bias[first_token] -= total / count
