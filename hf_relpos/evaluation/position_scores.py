"""The scores that a scheme adds in a layer, for all pairs (i, j) or by offset r = j − i."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import (
    Terms,
    allowed,
    attend,
    content_scale,
    content_vectors,
    featurewise_scores,
    position_scores,
)
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import RelPosBertModel, RelPosBertPreTrainedModel


# Fields of Terms, and their letters in the formula.
LETTERS = {
    "query_table": "A",
    "key_table": "B",
    "content_bias": "u",
    "scaled_bias": "c",
    "bias": "c'",
    "dense": "dense c'",
    "value_table": "V",
    "gain": "gain",
    "feature_gain": "gain",
    "allow": "allow",
    "rotate": "rotate",
}


@dataclass(frozen=True)
class LayerCall:
    """The attention call of one layer in a forward pass.

    Attributes:
        query: (B, H, L, d).
        key: (B, H, K, d).
        terms: terms of the scheme.
        context: positions of queries and keys.
        added_to_input: output of the scheme's input module, (1 or B, L, D); None without one.
    """

    query: torch.Tensor
    key: torch.Tensor
    terms: Terms
    context: AttentionContext
    added_to_input: torch.Tensor | None

    @property
    def letters(self) -> list[str]:
        """Letters of the terms present, in the order of the formula; `input` is last."""
        present = [letter for field, letter in LETTERS.items() if getattr(self.terms, field) not in (None, ())]
        return list(dict.fromkeys(present)) + ["input"] * (self.added_to_input is not None)


def example_inputs(config: RelPosBertConfig, length: int = 64, batch: int = 4) -> dict[str, torch.Tensor]:
    """Random tokens, and required inputs of the scheme: a square image, edges to the next and the fourth token.

    Args:
        length: number of tokens; limited to P, the maximum length of some schemes.
    """
    return inputs_of_length(config, min(length, config.max_position_embeddings), batch)


def inputs_of_length(config: RelPosBertConfig, length: int, batch: int) -> dict[str, torch.Tensor]:
    """`example_inputs` with exactly that many tokens."""
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
def record_layer(
    model: RelPosBertPreTrainedModel | RelPosBertConfig, layer: int = 0, inputs: dict[str, torch.Tensor] | None = None
) -> LayerCall:
    """Run a model and record the attention call of one of its layers.

    Args:
        model: a model, or a configuration, from which a model is initialised with seed 0.
        layer: number of the layer.
        inputs: arguments of `forward`; None for `example_inputs`.

    Raises:
        ValueError: for a layer that the model does not have.
    """
    if isinstance(model, RelPosBertConfig):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = RelPosBertModel(model, add_pooling_layer=False)
    model = model.base_model
    count = len(model.encoder.layer)
    if not 0 <= layer < count:
        raise ValueError(f"layer = {layer}: the model has layers 0 to {count - 1}")
    attention = model.encoder.layer[layer].attention.self
    inputs = example_inputs(model.config) if inputs is None else inputs
    recorded: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            recorded.setdefault(name, out)  # a scheme may call the module again for something else

        return hook

    def keep_context(module: nn.Module, args: Any, arguments: Any) -> None:
        recorded["context"] = arguments["context"]

    modules = {"query": attention.query, "key": attention.key, "input": model.embeddings.position_embeddings}
    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items() if module is not None]
    hooks.append(attention.register_forward_pre_hook(keep_context, with_kwargs=True))
    training = model.training
    try:
        model.eval()(**{name: tensor.to(model.device) for name, tensor in inputs.items()}, use_cache=False)
        heads = (attention.num_attention_heads, attention.attention_head_size)
        query, key = (recorded[name].unflatten(-1, heads).transpose(1, 2) for name in ("query", "key"))
        context = attention.layer_context(recorded["context"], query, key.shape[2])
        terms = attention.distance_embedding(context)  # while dropout is off
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return LayerCall(query, key, terms, context, recorded.get("input"))


@torch.no_grad()
def attention_maps(
    model: RelPosBertPreTrainedModel, layer: int, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention weights of one layer, with and without positions in that layer.

    Without positions the weights are the softmax of the content product of the same queries and keys, so the layers
    below keep their positions. For a scheme that acts on the input, its vectors are replaced by their mean over the
    positions, which also removes positions from the layers below.

    Args:
        model: an encoder whose attention has no window.
        layer: number of the layer.
        inputs: arguments of `forward`: one row, without padding.

    Returns:
        Both weights, (H, L, L), float32 on the CPU; each row is a query and sums to 1.

    Raises:
        ValueError: for a layer that the model does not have, and for attention that does not cover all pairs.
    """
    for field in ("attention_window", "is_decoder"):
        if value := getattr(model.config, field, None):
            raise ValueError(f"{field} = {value!r}: only attention from every token to every token is shown")
    call = bare = record_layer(model, layer, inputs)
    if call.added_to_input is not None:
        with _mean_input_vectors(model.base_model.embeddings.position_embeddings):
            bare = record_layer(model, layer, inputs)
    value = torch.zeros_like(call.key)
    _, weights = attend(call.query, call.key, value, call.terms, call.context)
    _, content = attend(bare.query, bare.key, value, Terms(scale=call.terms.scale), call.context)
    return weights[0].float().cpu(), content[0].float().cpu()


@contextmanager
def _mean_input_vectors(module: nn.Module) -> Iterator[None]:
    """Context in which the output of a module, (1 or B, L, D), is replaced by its mean over positions."""
    handle = module.register_forward_hook(lambda module, args, out: out.mean(1, keepdim=True).expand_as(out))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def score_map(call: LayerCall) -> torch.Tensor:
    """The score that position adds for a query at i and a key at j, from all terms but V and u (which ignores r).

    Terms that depend on content, q·A and k·B, are evaluated for the mean query and key of the call. Rotations and
    gains are evaluated as the change of the product of a unit vector with itself.

    Args:
        call: result of `record_layer`.

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


def input_map(call: LayerCall) -> torch.Tensor | None:
    """Cosine of the vectors that the scheme adds to the input at i and j, (L, L); None without an input module."""
    if call.added_to_input is None:
        return None
    vectors = torch.nn.functional.normalize(call.added_to_input[0].float(), dim=-1)
    return (vectors @ vectors.T).cpu()


def offset_curves(model: RelPosBertPreTrainedModel, inputs: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
    """The score that position adds for the query in the middle, by offset, for every layer and head.

    Args:
        model: a model whose terms depend on r = j − i.
        inputs: arguments of `forward`; None for `example_inputs`. Their length sets the range of offsets.

    Returns:
        (layers, H, L): entry n is for r = n − L // 2. Terms that depend on content are for the mean query and key of
        the layer, as in `score_map`. NaN where the scheme hides the key.
    """
    layers = range(len(model.base_model.encoder.layer))
    maps = (score_map(record_layer(model, layer, inputs)) for layer in layers)
    return torch.stack([added[:, added.shape[1] // 2] for added in maps])
