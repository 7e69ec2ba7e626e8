"""Evaluate a model one layer at a time, so that a layer is fitted on the outputs of the layers below it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from ...attention.call import AttentionCall
from ...attention.context import AttentionContext
from ...attention.dispatch import AUTO, run_attention
from ...attention.formula import Terms, attend, content_scale, content_vectors, position_scores
from ...attention.masks import is_visible
from ...models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ...models.sequence import row_metadata
from ...schemes.registry import Combination
from ...schemes.scheme import Scheme
from .batches import Batch


class LayerwiseModel:
    """A model evaluated one layer at a time, part by part."""

    def __init__(self, model: RelPosBertPreTrainedModel):
        self.model = model
        self.body = model.base_model
        self.layers = self.body.encoder.layer
        self.heads = model.config.num_attention_heads

    def embed(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the embeddings' LayerNorm, and its output, each (B, L, D)."""
        captured: list[tuple[torch.Tensor, torch.Tensor]] = []
        norm = self.body.embeddings.LayerNorm
        hook = norm.register_forward_hook(lambda module, inputs, output: captured.append((inputs[0], output)))
        try:
            hidden = self.body.embeddings(input_ids=batch.ids, token_type_ids=batch.types, attention_mask=batch.mask)
        finally:
            hook.remove()
        return captured[0][0], hidden

    def visible(self, batch: Batch, hidden: torch.Tensor) -> torch.Tensor:
        """True where a query may attend to a key, (B, 1, L, L)."""
        length = hidden.shape[1]
        config = self.model.config
        mask = row_metadata(config, hidden, batch.mask).tensor_mask(config, hidden, batch.mask)
        assert not isinstance(mask, BlockMask), "the models are set to eager attention"
        if mask is None:
            return torch.ones(len(hidden), 1, length, length, dtype=torch.bool, device=hidden.device)
        return is_visible(mask).expand(len(hidden), 1, length, length)

    def projections(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v, each (B, H, L, d)."""
        attention = self.layers[layer].attention.self
        query, key, value = (
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (attention.query, attention.key, attention.value)
        )
        return query, key, value

    def scheme(self, layer: int) -> Scheme | None:
        """The scheme of a layer that can be fitted, perhaps one of a combination; None for none."""
        scheme = self.layers[layer].attention.self.distance_embedding
        parts: Iterable[Any] = scheme.parts if isinstance(scheme, Combination) else [scheme]
        return next((part for part in parts if part.linear_parameters), None)

    def terms(self, layer: int, hidden: torch.Tensor, rows: slice = slice(None)) -> tuple[Terms, AttentionContext]:
        """The terms of the scheme in a layer, and their context, for the queries `rows`."""
        attention = self.layers[layer].attention.self
        first, end, _ = rows.indices(hidden.shape[1])
        context = AttentionContext(
            end - first,
            hidden.shape[1],
            first,
            device=hidden.device,
            dtype=hidden.dtype,
            query_projection=attention.query,
            key_projection=attention.key,
        )
        if (shared := self.body.encoder.distance_embedding) is not None:
            context = replace(context, shared=shared(context))
        return attention.distance_embedding(context), context

    def context(
        self, layer: int, batch: Batch, hidden: torch.Tensor, projections: tuple[torch.Tensor, ...] | None = None
    ) -> torch.Tensor:
        """The outputs of the heads, concatenated, (B, L, D).

        Args:
            projections: q, k and v if they are known.
        """
        terms, context = self.terms(layer, hidden)
        module = self.layers[layer].attention.self
        mask = self.visible(batch, hidden)
        query, key, value = projections or self.projections(layer, hidden)
        call = AttentionCall(query, key, value, terms, context, mask=mask, layer=module)
        return run_attention(AUTO, call)[0].flatten(2)

    def weights(
        self, layer: int, batch: Batch, hidden: torch.Tensor, projections: tuple[torch.Tensor, ...], rows: slice
    ) -> torch.Tensor:
        """The attention weights of the m queries `rows`, (B, H, m, L), from q, k and v."""
        query, key, value = projections
        terms, context = self.terms(layer, hidden, rows)
        return attend(query[:, :, rows], key, value, terms, context, self.visible(batch, hidden)[:, :, rows])[1]

    def fixed_scores(
        self, layer: int, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[slice], torch.Tensor]]:
        """q, k and v, rotated if the scheme rotates, and a function from queries to scores without the fitted terms.

        The parameters of the fitted terms must be zero.
        """
        terms, context = self.terms(layer, hidden)
        query, key, value = self.projections(layer, hidden)
        content, query, key = content_vectors(query, key, terms, context)
        scale = content_scale(query, terms)
        fitted_alone = self.scheme(layer) is self.layers[layer].attention.self.distance_embedding
        positional = None if fitted_alone else position_scores(query, key, terms, context)

        def scores(rows: slice) -> torch.Tensor:
            total = torch.matmul(content[:, :, rows], key.transpose(-1, -2)) * scale
            return total if positional is None else total + positional[:, :, rows]

        return query, key, value, scores

    def attention_sum(self, layer: int, context: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the LayerNorm after the attention."""
        return self.layers[layer].attention.output.dense(context) + hidden

    def after_attention(self, layer: int, context: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the feed-forward part."""
        return self.layers[layer].attention.output.LayerNorm(self.attention_sum(layer, context, hidden))

    def inner(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The input of W_2."""
        return self.layers[layer].intermediate(hidden)

    def output_sum(self, layer: int, inner: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the last LayerNorm of the layer."""
        return self.layers[layer].output.dense(inner) + hidden

    def after_output(self, layer: int, hidden: torch.Tensor, inner: torch.Tensor | None = None) -> torch.Tensor:
        """The hidden states after the layer.

        Args:
            inner: the input of W_2 if it is known.
        """
        inner = self.inner(layer, hidden) if inner is None else inner
        return self.layers[layer].output.LayerNorm(self.output_sum(layer, inner, hidden))
