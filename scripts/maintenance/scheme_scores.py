"""The scores that a scheme adds in each layer, and a picture of them: for docs/schemes.md."""

from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn

from hf_relpos.attention.context import AttentionContext
from hf_relpos.attention.formula import (
    Terms,
    allowed,
    content_scale,
    content_vectors,
    featurewise_scores,
    position_scores,
)
from hf_relpos.models.configuration_relpos_bert import RelPosBertConfig
from hf_relpos.models.modeling_relpos_bert import RelPosBertPreTrainedModel


@dataclass(frozen=True)
class LayerCall:
    """The attention call of one layer in a forward pass.

    Attributes:
        query: (B, H, L, d).
        key: (B, H, K, d).
        terms: terms of the scheme.
        context: positions of queries and keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    terms: Terms
    context: AttentionContext


def example_inputs(config: RelPosBertConfig, length: int = 64, batch: int = 4) -> dict[str, torch.Tensor]:
    """Random tokens, and required inputs of the scheme: a square image, edges to the next and the fourth token.

    Args:
        length: number of tokens; limited to P, the maximum length of some schemes.
    """
    length = min(length, config.max_position_embeddings)
    positions = torch.arange(length)
    generator = torch.Generator().manual_seed(0)
    inputs = {"input_ids": torch.randint(config.vocab_size, (batch, length), generator=generator)}
    if "grid" in config.required_inputs:
        width = round(length**0.5)
        inputs["position_ids"] = torch.stack([positions // width, positions % width], dim=-1).expand(batch, -1, -1)
    if "relation_ids" in config.required_inputs:
        r = positions - positions[:, None]
        inputs["relation_ids"] = ((r == 1) | (r == 4)).long().expand(batch, -1, -1)
    return inputs


@torch.no_grad()
def record_calls(
    model: RelPosBertPreTrainedModel, inputs: dict[str, torch.Tensor] | None = None
) -> tuple[list[LayerCall], torch.Tensor | None]:
    """Run a model in eval mode and record the attention calls of its layers.

    Args:
        inputs: arguments of `forward`, without padding; None for `example_inputs`.

    Returns:
        One call for each layer, and the vectors that the scheme adds to the input, (1 or B, L, D), None for a scheme
        that adds none.
    """
    model = model.base_model
    inputs = example_inputs(model.config) if inputs is None else inputs
    layers = [layer.attention.self for layer in model.encoder.layer]
    read: list[tuple[torch.Tensor, AttentionContext]] = []
    added: list[torch.Tensor] = []

    def keep_input(module: nn.Module, args: Any, arguments: Any) -> None:
        read.append((args[0] if args else arguments["hidden_states"], arguments["batch"].groups[0].context))

    hooks = [layer.register_forward_pre_hook(keep_input, with_kwargs=True) for layer in layers]
    if (table := model.embeddings.position_embeddings) is not None:
        hooks.append(table.register_forward_hook(lambda module, args, out: added.append(out)))
    training, calls = model.training, []
    try:
        model.eval()(**{name: tensor.to(model.device) for name, tensor in inputs.items()}, use_cache=False)
        for layer, (hidden, context) in zip(layers, read, strict=True):
            size = (layer.num_attention_heads, layer.attention_head_size)
            query, key = (each(hidden).unflatten(-1, size).transpose(1, 2) for each in (layer.query, layer.key))
            numbers = layer.distance_embedding.token_numbers(hidden)
            made = layer.make_terms(context, query, None if numbers is None else numbers.transpose(1, 2))
            calls.append(LayerCall(query, key, made.terms, context))
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return calls, added[0] if added else None


@torch.no_grad()
def score_map(call: LayerCall) -> torch.Tensor:
    """The score that position adds for a query at i and a key at j, from all terms but V and u (which ignores r).

    Terms that depend on content, q·A and k·B, are evaluated for the mean query and key of the call. Rotations and
    gains are evaluated as the change of the product of a unit vector with itself.

    Args:
        call: from `record_calls`.

    Returns:
        (H, L, K); NaN where the scheme hides the key.
    """
    terms, context = call.terms, call.context
    query, key = (vectors.mean((0, 2))[:, None].expand_as(vectors) for vectors in (call.query, call.key))
    _, rotated_query, rotated_key = content_vectors(query, key, terms, context)
    added = position_scores(rotated_query, rotated_key, terms, context)
    if added is None:
        added = call.query.new_zeros(())
    if terms.rotate is not None or terms.gain or terms.feature_gain is not None:
        unit = torch.ones_like(query) * query.shape[-1] ** -0.5
        _, left, right = content_vectors(unit, unit, terms, context)
        if terms.feature_gain is None:
            content = left @ right.transpose(-1, -2)
        else:
            content = featurewise_scores(left, right, terms.feature_gain, context)
        for table in terms.gain:
            content = content * table.scalars(context)
        added = added + content_scale(query, terms) * (content - 1)
    visible = allowed(terms, context, None)
    if visible is not None:
        added = torch.where(visible, added, torch.nan)
    return added.expand(*call.query.shape[:3], call.key.shape[2])[0].float().cpu()


def plot_layer(model: RelPosBertPreTrainedModel) -> Figure:
    """What positions do in a model of one layer.

    One panel has the scores that they add in every head, for the query in the middle by offset, each head less its
    mean (which the softmax ignores). If vectors are added to the input, another has the cosines of those of each pair
    of positions. Hidden keys are grey.
    """
    (call,), added = record_calls(model)
    scores = score_map(call)
    curves = scores[:, scores.shape[1] // 2]
    heads, length = curves.shape
    has_scores = bool(curves.any()) or added is None
    height = 1.2 + 0.13 * heads if has_scores else 3.4
    figure = Figure(figsize=(8 * has_scores + 4.4 * (added is not None), height), layout="constrained")
    figure.suptitle(model.config.position_scheme_name, fontsize=10)
    panels = figure.subplots(1, has_scores + (added is not None), squeeze=False)[0]
    if has_scores:
        axes = panels[0]
        rows = curves - curves.nanmean(-1, keepdim=True)
        limit = float(rows.nan_to_num().abs().flatten().quantile(0.99)) or 1.0  # without outliers
        first = -(length // 2) - 0.5
        draw_map(figure, axes, rows, limit, aspect="auto", extent=(first, first + length, heads - 0.5, -0.5))
        axes.set_yticks([0.5 * heads - 0.5], ["layer 0"])
        axes.set_xlabel("r = j − i", fontsize=9)
        axes.set_title("added to the score, each head less its mean", fontsize=9)
    if added is not None:
        vectors = torch.nn.functional.normalize(added[0].float().cpu(), dim=-1)
        draw_map(figure, panels[-1], vectors @ vectors.T, 1.0)
        panels[-1].set_xlabel("j", fontsize=9)
        panels[-1].set_ylabel("i", fontsize=9)
        panels[-1].set_title("cosine of the input vectors of i and j", fontsize=9)
    return figure


def draw_map(figure: Figure, axes: Any, values: torch.Tensor, limit: float, **settings: Any) -> None:
    """Draw a heat map: zero is white, NaN is grey."""
    axes.set_facecolor("0.6")
    image = axes.imshow(values.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest", **settings)
    figure.colorbar(image, ax=axes, extend="both").ax.tick_params(labelsize=8)
    axes.tick_params(labelsize=8)
    axes.locator_params("x", integer=True)
