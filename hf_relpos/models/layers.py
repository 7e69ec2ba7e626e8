"""The layers of a relative BERT, from embeddings to pooler: modules of Transformers' BERT with terms of a scheme.

Modules keep their names, so that stock BERT weights load unchanged.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ..attention.call import AttentionCall, SharedTerms
from ..attention.context import AttentionContext, LayerInputs, precise
from ..attention.dispatch import run_attention
from ..attention.unpadding import Batch, RowGroup
from ..host.tracing import is_traced
from ..host.transformers import (
    ACT2FN,
    CACHE,
    BertEncoder,
    BertIntermediate,
    BertLayer,
    BertPooler,
    BertSelfAttention,
    BertSelfOutput,
    one_cache,
)
from ..schemes.registry import build_input, build_scheme, build_shared
from ..schemes.scheme import InputScheme, look_up
from .checks import PROJECTIONS
from .configuration_relpos_bert import RelPosBertConfig
from .recurrence import SegmentMemory
from .sequence import Rows


class RelPosBertEmbeddings(nn.Module):
    """Word and token type embeddings, and vectors that the scheme adds to the input."""

    def __init__(self, config: RelPosBertConfig):
        super().__init__()
        size = config.input_size
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.position_embeddings = build_input(config)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size) if config.type_vocab_size else None
        self.projects_first = config.embedding_projection == "before_norm"
        width = config.hidden_size if self.projects_first else size
        normed = config.embedding_norm
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps) if normed else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.embeddings_project = None
        if size != config.hidden_size:
            self.embeddings_project = nn.Linear(size, config.hidden_size, bias=not self.projects_first)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_length: int | torch.Tensor = 0,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map input_ids, token_type_ids, position_ids (B, L) or inputs_embeds (B, L, E) to embeddings (B, L, D).

        E is D, or `config.embedding_size`.

        Args:
            position_ids: (B, L, 2) for a grid; modules that do not take grids count the tokens of a row instead.

        Raises:
            ValueError: for an input longer than the absolute position embeddings, if there are any.
            IndexError: for ids outside an embedding table.
        """
        if inputs_embeds is None:
            assert input_ids is not None  # the model has checked it
            inputs_embeds = look_up(self.word_embeddings, input_ids, "input_ids", "vocab_size", self.config.vocab_size)
        length = inputs_embeds.shape[1]
        embeddings = inputs_embeds
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
            table, size = self.token_type_embeddings, self.config.type_vocab_size
            embeddings = embeddings + look_up(table, token_type_ids, "token_type_ids", "type_vocab_size", size)
        module = self.position_embeddings
        if module is not None:
            takes_grid = isinstance(module, InputScheme) and module.takes_grid
            if position_ids is None or (position_ids.dim() == 3 and not takes_grid):
                check_length = getattr(module, "check_length", None)  # of a table with a maximum length
                if check_length is not None:
                    check_length(length if isinstance(past_length, torch.Tensor) else past_length + length)
                position_ids = (torch.arange(length, device=inputs_embeds.device) + past_length)[None]
            more = (embeddings, attention_mask) if isinstance(module, InputScheme) else ()
            embeddings = embeddings + module(position_ids, *more).to(embeddings.dtype)
        if self.embeddings_project is None:
            return self.dropout(self.LayerNorm(embeddings))
        if self.projects_first:
            return self.dropout(self.LayerNorm(self.embeddings_project(embeddings)))
        return self.embeddings_project(self.dropout(self.LayerNorm(embeddings)))


class RelPosBertSelfAttention(BertSelfAttention):
    """BERT's self-attention with the terms of a position scheme, its module `distance_embedding`."""

    def __init__(self, config: RelPosBertConfig, is_causal: bool = False, layer_idx: int | None = None):
        super().__init__(config, is_causal=is_causal, layer_idx=layer_idx)
        if config.attention_biases is not None:
            for name in set(PROJECTIONS) - set(config.attention_biases):
                setattr(self, name, nn.Linear(config.hidden_size, self.all_head_size, bias=False))
        size, eps = self.all_head_size, config.layer_norm_eps
        self.layer_norm_q, self.layer_norm_k = (
            nn.LayerNorm(size, eps=eps) if config.extra_attention_norms else nn.Identity() for _ in range(2)
        )
        self.distance_embedding = build_scheme(config, layer_idx or 0)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        batch: Batch | None = None,
        past_key_values: Cache | None = None,
        memory: SegmentMemory | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map hidden_states (B, L, D) to (B, L, D) and the attention weights (B, H, L, K), if the backend has them.

        Args:
            attention_mask: read without a batch only.
            batch: what the layers share; None for consecutive tokens without a cache.
            memory: of earlier segments. Its keys come first, before those of a cache.
        """
        if batch is not None and batch.indices is not None:
            return self._attend_unpadded(hidden_states, batch, kwargs), None
        cache = one_cache(cache, past_key_values)
        states = hidden_states if memory is None else memory.with_segment(hidden_states, self.layer_idx)
        query, key, value = map(self._split_heads, self._project(hidden_states, states))
        numbers = self.distance_embedding.token_numbers(states)
        if numbers is not None:
            numbers = numbers.transpose(1, 2).to(key.dtype)
        if cache is not None:
            before = 0 if memory is None else memory.length
            key, value, numbers = self._with_cache(cache, key, value, numbers, before)
        if batch is None:
            group = RowGroup(AttentionContext(query.shape[2], key.shape[2]), attention_mask)
        else:
            group = batch.groups[0]
        call = self._call(query, key, value, group, numbers, kwargs)
        out, weights = run_attention(self.config._attn_implementation, call)
        return out.flatten(2).contiguous(), weights

    def _attend_unpadded(self, hidden_states: torch.Tensor, batch: Batch, options: dict[str, Any]) -> torch.Tensor:
        """The output for hidden_states (1, T, D) of a batch without its padding."""
        longest: SharedTerms | None = None  # the longest rows come first, and others may share their terms

        def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
            nonlocal longest
            query, key, value = map(self._split_heads, rows[:3])
            numbers = rows[3].transpose(1, 2) if len(rows) > 3 else None
            call = self._call(query, key, value, group, numbers, options, longest)
            longest = longest or call.shared
            return run_attention(self.config._attn_implementation, call)[0].flatten(2)

        numbers = self.distance_embedding.token_numbers(hidden_states)
        more = () if numbers is None else (numbers,)
        return batch.by_group(attend, *self._project(hidden_states, hidden_states), *more)

    def _project(self, states: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of states (B, L, D), keys and values of states (B, K, D); each (…, H·d)."""
        return self.layer_norm_q(self.query(states)), self.layer_norm_k(self.key(keys)), self.value(keys)

    def _split_heads(self, vectors: torch.Tensor) -> torch.Tensor:
        """(B, L, H·d) as (B, H, L, d)."""
        return vectors.unflatten(-1, (-1, self.attention_head_size)).transpose(1, 2)

    def _with_cache(
        self, cache: Cache, key: torch.Tensor, value: torch.Tensor, numbers: torch.Tensor | None, before: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys, values and token numbers with those of a cache after the first `before`, which stay out of it."""
        if numbers is not None:  # cached, reordered and cropped as part of the key
            key = torch.cat([key, numbers[..., None]], dim=-1)
        (old_key, key), (old_value, value) = (states.tensor_split([before], dim=2) for states in (key, value))
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        key, value = cache.update(key, value, self.layer_idx)
        if before:
            key, value = torch.cat([old_key, key], dim=2), torch.cat([old_value, value], dim=2)
        return (key, value, None) if numbers is None else (key[..., :-1], value, key[..., -1])

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: RowGroup,
        numbers: torch.Tensor | None,
        options: dict[str, Any],
        longest: SharedTerms | None = None,
    ) -> AttentionCall:
        """The attention of (B, H, L, d) and (B, H, K, d), with token numbers (B, H, K).

        Its terms are those of all layers, those of the longest rows of this layer, or made for the call.
        """
        context, shared, signature = group.context, group.terms, self.distance_embedding.signature
        if shared is None or (shared.device, shared.signature) != (query.device, signature):
            if longest is not None and longest.holds_for(context):
                shared = longest
            else:
                shared = self.make_terms(context, query, numbers)
        return AttentionCall(
            query,
            key,
            value,
            shared.terms,
            context,
            mask=group.mask,
            is_causal=group.mask is None and self.is_causal and query.shape[2] > 1,
            dropout=self.dropout.p if self.training else 0.0,
            output_weights=bool(options.get("output_attentions", self.config.output_attentions)),
            needs_gradients=torch.is_grad_enabled(),
            shared=shared,
            layer=self,
            options=options,
            kept=None if is_traced() else group.kept.setdefault(signature, {}),
        )

    def make_terms(
        self, context: AttentionContext, like: torch.Tensor, numbers: torch.Tensor | None = None
    ) -> SharedTerms:
        """The terms of this layer's scheme for a context.

        Args:
            like: (…, d), of the device and dtype of the queries.
            numbers: token numbers (B, H, K) of this layer; or None.
        """
        scheme, shared = self.distance_embedding, context.layer.shared
        layer = LayerInputs(shared() if callable(shared) else shared, numbers, self.query, self.key)
        terms = scheme(replace(context, layer=layer, device=like.device, dtype=precise(like.dtype)))
        return SharedTerms(terms, scheme.signature, context, like)


class RelPosBertGatedIntermediate(BertIntermediate):
    """act(W x) ∘ V x; `dense` is W above V."""

    def __init__(self, config: RelPosBertConfig):
        nn.Module.__init__(self)
        self.dense = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.intermediate_act_fn = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden_states (B, L, D) to (B, L, I)."""
        gate, value = self.dense(hidden_states).chunk(2, dim=-1)
        return self.dropout(self.intermediate_act_fn(gate) * value)


class RelPosBertTwiceNormedOutput(BertSelfOutput):
    """The end of attention with a second LayerNorm, after the input is added once more."""

    def __init__(self, config: RelPosBertConfig):
        super().__init__(config)
        self.second_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Map the output of attention and the input of the layer, both (B, L, D), to (B, L, D)."""
        return self.second_norm(super().forward(hidden_states, input_tensor) + input_tensor)


class RelPosBertLayer(BertLayer):
    """BERT's layer. Cross-attention has no relative positions, since its queries and keys are of two sequences."""

    def __init__(self, config: RelPosBertConfig, layer_idx: int | None = None):
        super().__init__(config, layer_idx=layer_idx)
        self.attention.self = RelPosBertSelfAttention(config, is_causal=config.is_decoder, layer_idx=layer_idx)
        if config.extra_attention_norms:
            self.attention.output = RelPosBertTwiceNormedOutput(config)
        if config.is_gated:
            self.intermediate = RelPosBertGatedIntermediate(config)
            self.output.dropout = nn.Dropout(0.0)  # dropout is applied to the product


class FirstLayerConvolution(nn.Module):
    """DeBERTa v2's convolution parallel to the first layer (He et al., arXiv 2006.03654, §A.5).

    LayerNorm(y + act(dropout(conv(x)))) for the input x and the output y of that layer.

    Parameters: conv.weight (D, D / groups, k), conv.bias (D,); LayerNorm.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(size, size, kernel, padding=(kernel - 1) // 2, groups=config.conv_groups)
        self.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.activation = ACT2FN[config.conv_act]

    def forward(self, inputs: torch.Tensor, outputs: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """Map inputs and outputs of the layer, (B, L, D), to (B, L, D).

        Args:
            real: (B, L), false at padding, whose inputs count as zero; None without padding.
        """
        if real is not None:
            inputs = inputs * real.to(inputs)[..., None]
        mixed = self.conv(inputs.transpose(1, 2)).transpose(1, 2)
        return self.LayerNorm(outputs + self.activation(self.dropout(mixed)))


def tokens_to_convolve(rows: Rows, documents: torch.Tensor | None) -> torch.Tensor | None:
    """Which tokens are not padding, (B, L); None for all.

    Raises:
        ValueError: for several documents in a row, which the convolution would mix, and for a mask that does not tell
            which tokens are padding.
    """
    if documents is not None:
        raise ValueError(
            "position_ids restart within a row: the convolution of conv_kernel_size would mix the documents; give "
            "each document its own row"
        )
    if rows.attention_mask is not None and rows.key_mask is None:
        raise ValueError(
            "attention_mask is not (B, L), which the convolution of conv_kernel_size requires; give (B, L)"
        )
    return None if rows.key_mask is None else rows.key_mask != 0


class RelPosBertEncoder(BertEncoder):
    """BERT's stack of layers."""

    def __init__(self, config: RelPosBertConfig):
        nn.Module.__init__(self)
        self.config = config
        self.layer = nn.ModuleList([RelPosBertLayer(config, layer_idx=i) for i in range(config.num_hidden_layers)])
        self.distance_embedding = build_shared(config)
        self.conv = FirstLayerConvolution(config) if config.conv_kernel_size else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        layer_inputs: list[torch.Tensor] | None = None,
        real_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """As BertEncoder's, without the cache in its outputs.

        Args:
            layer_inputs: a list to which the input of every layer is appended, (B, L, D) each, or None.
            kwargs: of the layers, with their `Batch` and the memory.
            real_tokens: (B, L), false at padding, for a convolution; None without padding or convolution.
        """
        embeddings = hidden_states
        for number, layer in enumerate(self.layer):
            if layer_inputs is not None:
                layer_inputs.append(hidden_states)
            hidden_states = layer(
                hidden_states,
                attention_mask,
                encoder_hidden_states,  # positional, since gradient checkpointing drops gradients of keywords
                encoder_attention_mask=encoder_attention_mask,
                **{CACHE: cache},
                **kwargs,
            )
            if number == 0 and self.conv is not None:
                hidden_states = self.conv(embeddings, hidden_states, real_tokens)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)


class RelPosBertPooler(BertPooler):
    """BERT's pooler, with the activation and the dropout of the configuration."""

    def __init__(self, config: RelPosBertConfig):
        super().__init__(config)
        self.dropout = nn.Dropout(config.pooler_dropout)
        self.activation = ACT2FN[config.pooler_hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden_states (B, L, D) to (B, D), from the first token of each row."""
        return self.activation(self.dense(self.dropout(hidden_states[:, 0])))
