"""BERT with relative positions in self-attention.

All but embeddings, self-attention and masks is inherited from Transformers' BERT. Heads keep their `forward`, and
modules keep their names, so that stock BERT weights load unchanged.
"""

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
    BertPreTrainedModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions,
    BaseModelOutputWithPoolingAndCrossAttentions,
)
from transformers.utils import ModelOutput, logging

from ..attention.call import AttentionCall, LazyMask, SharedTerms
from ..attention.context import AttentionContext, LayerInputs
from ..attention.dispatch import AUTO, run_attention
from ..attention.tracing import has_contents, is_traced
from ..attention.unpadding import RowGroup, UnpaddedBatch
from ..files import apply_umask
from ..host.transformers import (
    ACT2FN,
    ALL_ATTENTION_FUNCTIONS,
    CACHE,
    BertEncoder,
    BertIntermediate,
    BertLayer,
    BertOnlyMLMHead,
    BertOnlyNSPHead,
    BertPooler,
    BertPreTrainingHeads,
    BertSelfAttention,
    BertSelfOutput,
    capture_outputs,
    check_keywords,
    create_bidirectional_mask,
    merge_with_config_defaults,
    one_cache,
)
from ..schemes.registry import build_input, build_scheme, build_shared
from ..schemes.scheme import InputScheme, Scheme, SharedScheme, look_up
from .checks import PROJECTIONS
from .configuration_relpos_bert import RelPosBertConfig
from .installed import INSTALLED
from .recurrence import WITH_MEMORY, SegmentMemory, carries_memory, check_memory, next_memory
from .saved_code.remote_code import CONFIGURATION, MODELING, save_code
from .sequence import PositionInputs, Rows, SequenceMetadata, indexed_sequence, read_sequence


logger = logging.get_logger(__name__)


class RelPosBertEmbeddings(nn.Module):
    """Word and token type embeddings, and vectors that the scheme adds to the input."""

    def __init__(self, config: RelPosBertConfig):
        super().__init__()
        size = config.input_size
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.position_embeddings = build_input(config)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size) if config.type_vocab_size else None
        normed = config.embedding_norm
        self.LayerNorm = nn.LayerNorm(config.norm_size, eps=config.layer_norm_eps) if normed else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.projects_first = config.embedding_projection == "before_norm"
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


class AttentionInputs(NamedTuple):
    """What the layers of a call share about the tokens of a batch, or of a group of its rows.

    Attributes:
        attention_mask: from `SequenceMetadata.mask`.
        context: positions of queries and keys, and the other relations between them.
        shared_terms: terms of the scheme, if they are the same in every layer.
        kept: what a layer finds out for those with the same scheme, by its signature (`AttentionCall.kept`).
    """

    attention_mask: torch.Tensor | LazyMask | BlockMask | None
    context: AttentionContext
    shared_terms: SharedTerms | None
    kept: dict[Hashable, dict[Hashable, Any]]


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
        context: AttentionContext | None = None,
        memory: SegmentMemory | None = None,
        shared_terms: SharedTerms | None = None,
        kept: dict[Hashable, dict[Hashable, Any]] | None = None,
        past_key_values: Cache | None = None,
        unpadded: tuple[UnpaddedBatch, list[AttentionInputs]] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map hidden_states (B, L, D) to (B, L, D) and the attention weights (B, H, L, K), if the backend has them.

        Args:
            context: positions of queries and keys in this call; None for consecutive tokens without a cache.
            memory: recurrence memory of earlier segments. Its keys come first, before those of a cache.
            shared_terms: terms of the scheme, if they are the same in every layer; None to compute the layer's own.
            kept: see `AttentionInputs`.
            unpadded: a batch without its padding, and the inputs of each of its groups. The hidden states, here and
                returned, are then (1, T, D), and the other arguments are not read.
        """
        if unpadded is not None:
            return self._attend_unpadded(hidden_states, *unpadded, kwargs), None
        cache = one_cache(cache, past_key_values)
        states = hidden_states if memory is None else memory.with_segment(hidden_states, self.layer_idx)
        query, key, value = map(self._split_heads, self._project(hidden_states, states))
        numbers = self.distance_embedding.token_numbers(states)
        if numbers is not None:
            numbers = numbers.transpose(1, 2).to(key.dtype)
        if cache is not None:
            before = 0 if memory is None else memory.length
            key, value, numbers = self._with_cache(cache, key, value, numbers, before)
        if context is None:
            context = AttentionContext(query.shape[2], key.shape[2], device=query.device)
        inputs = AttentionInputs(attention_mask, context, shared_terms, {} if kept is None else kept)
        call = self._call(query, key, value, inputs, numbers, kwargs)
        out, weights = run_attention(self.config._attn_implementation, call)
        return out.flatten(2).contiguous(), weights

    def _attend_unpadded(
        self, hidden_states: torch.Tensor, batch: UnpaddedBatch, inputs: list[AttentionInputs], options: dict[str, Any]
    ) -> torch.Tensor:
        """The output for hidden_states (1, T, D) of a batch without its padding; `inputs` of each of its groups."""
        each, longest = iter(inputs), None  # the longest rows come first, and others may share their terms

        def attend(group: RowGroup, *rows: torch.Tensor) -> torch.Tensor:
            nonlocal longest
            query, key, value = map(self._split_heads, rows[:3])
            numbers = rows[3].transpose(1, 2) if len(rows) > 3 else None
            call = self._call(query, key, value, next(each), numbers, options, longest)
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
        inputs: AttentionInputs,
        numbers: torch.Tensor | None,
        options: dict[str, Any],
        longest: SharedTerms | None = None,
    ) -> AttentionCall:
        """The attention of (B, H, L, d) and (B, H, K, d), with token numbers (B, H, K).

        Its terms are those of all layers, those of the longest rows of this layer, or made for the call.
        """
        mask, context, shared, kept = inputs
        signature = self.distance_embedding.signature
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
            mask=mask,
            is_causal=mask is None and self.is_causal and query.shape[2] > 1,
            dropout=self.dropout.p if self.training else 0.0,
            output_weights=bool(options.get("output_attentions", self.config.output_attentions)),
            needs_gradients=torch.is_grad_enabled(),
            shared=shared,
            layer=self,
            options=options,
            kept=None if is_traced() else kept.setdefault(signature, {}),
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
        dtype = torch.promote_types(like.dtype, torch.float32)
        terms = scheme(replace(context, layer=layer, device=like.device, dtype=dtype))
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


def tokens_to_convolve(attention_mask: Any, documents: torch.Tensor | None) -> torch.Tensor | None:
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
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        raise ValueError(
            "attention_mask is not (B, L), which the convolution of conv_kernel_size requires; give (B, L)"
        )
    return attention_mask != 0


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
        use_cache: bool | None = None,
        layer_inputs: list[torch.Tensor] | None = None,
        real_tokens: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """As BertEncoder's.

        Args:
            layer_inputs: a list to which the input of every layer is appended, (B, L, D) each, or None.
            real_tokens: (B, L), false at padding, for a convolution; None without padding or convolution.
        """
        cache = one_cache(cache, past_key_values)
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
        outputs = BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)
        outputs[CACHE] = cache if use_cache else None
        return outputs


class RelPosBertPooler(BertPooler):
    """BERT's pooler, with the activation and the dropout of the configuration."""

    def __init__(self, config: RelPosBertConfig):
        super().__init__(config)
        self.dropout = nn.Dropout(config.pooler_dropout)
        self.activation = ACT2FN[config.pooler_hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map hidden_states (B, L, D) to (B, D), from the first token of each row."""
        return self.activation(self.dense(self.dropout(hidden_states[:, 0])))


class RelPosBertPreTrainedModel(BertPreTrainedModel):
    """Loading, saving and initialisation for all heads."""

    config: RelPosBertConfig
    config_class = RelPosBertConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = True
    _supports_flex_attn = True
    _supports_flash_attn = False
    _supports_context_parallel = False  # it would cut the sequence, and computes causal attention without terms only
    _supports_attention_backend = True
    _no_split_modules = ["RelPosBertEmbeddings", "RelPosBertLayer"]
    # BERT's losses are means over a batch; the Trainer must divide them when it accumulates gradients
    accepts_loss_kwargs = False
    # Transformers ≤ 4.57 saved an unused absolute table, and buffers, with every relative BERT
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_embeddings\.weight", r"embeddings\.position_ids"]

    @property
    def _supports_sdpa(self) -> bool:  # type: ignore[override]  # Transformers only reads it
        capabilities = INSTALLED.capabilities
        return capabilities is None or "sdpa" in capabilities.supported_implementations(self.config)

    def __init__(self, config: RelPosBertConfig):
        if not isinstance(config, PreTrainedConfig) or config.model_type != RelPosBertConfig.model_type:
            raise TypeError(
                f"{type(self).__name__} requires a RelPosBertConfig, not a {type(config).__name__}; "
                "RelPosBertConfig.from_bert(config) converts a BertConfig"
            )
        PreTrainedModel.__init__(self, config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Scheme | SharedScheme):
            module.init_weights(self.config.initializer_range)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise as in Transformers' own models.

        For custom code Transformers skips modules without direct parameters, such as schemes whose parameters are all
        in submodules.
        """
        super()._initialize_weights(module)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """The backend to use: the requested one if it can compute the scheme's terms, or the default for None.

        Raises:
            ValueError: if the requested backend cannot compute the terms; names those that can.
        """
        if requested_attention is not None and requested_attention not in [
            "eager",
            *ALL_ATTENTION_FUNCTIONS.valid_keys(),
        ]:
            return super().get_correct_attn_implementation(requested_attention, is_init_check)  # raises
        capabilities = INSTALLED.capabilities
        if capabilities is not None:
            requested_attention = capabilities.check_attention(self.config, requested_attention)
        return super().get_correct_attn_implementation(requested_attention or AUTO, is_init_check)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in Transformers; also reads BERT checkpoints of Transformers ≤ 4.57 with relative positions.

        The installed package also reads other architectures with relative positions, those families that are
        `read_directly`, and checks checkpoints.

        Raises:
            ValueError: for a local folder with a broken index or broken safetensors, or without a config.json.
            ValueError: for a checkpoint that lacks weights of the encoder, which would be random, such as one of
                another architecture, or one that lost its tables when stock Transformers v5 loaded and saved it. A new
                head is only reported, and so are tables of a `position_embedding_type` that is not the saved one.
                With `output_loading_info=True` the names of missing weights are returned, and nothing is raised.
        """
        if isinstance(kwargs.get("config"), BertConfig):
            kwargs["config"] = RelPosBertConfig.from_bert(kwargs["config"])
        return INSTALLED.loading.load(cls, super().from_pretrained, pretrained_model_name_or_path, args, kwargs)

    def tie_weights(self, missing_keys: set[str] | None = None, *args: Any, **kwargs: Any) -> None:
        """As in Transformers, whose `from_pretrained` calls it with the names of missing weights."""
        super().tie_weights(missing_keys, *args, **kwargs)
        if missing_keys is not None:
            own, used = (f"cls.predictions.{name}" for name in ("bias", "decoder.bias"))
            if used in missing_keys and own not in missing_keys:
                # Transformers ≤ 4.57 saved one bias for both, also with tie_word_embeddings = False
                self.get_parameter(used).data.copy_(self.get_parameter(own).data)
                missing_keys.discard(used)
            self._missing_from_base = frozenset(missing_keys)  # read by `loading.load` for adapters

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """As in Transformers, but also saves the model's code, so that `trust_remote_code=True` loads it anywhere.

        The code is two files, made for this configuration, and `config.auto_map` names every head in them. Set
        `model.config.save_code = False` to omit the code. Checkpoints of the Trainer have none, since the output
        folder has it. With a warning, code and `auto_map` are also omitted if the folder has another file of the same
        name, and for a position scheme of your own.
        """
        saves_code = self.config.save_code
        if saves_code and is_main_process and not os.path.isfile(save_directory):
            saves_code = save_code(self.config, save_directory)
        if saves_code:
            self.config.auto_map = dict(AUTO_MAP)
        elif getattr(self.config, "auto_map", None) is not None:
            del self.config.auto_map
        # classes loaded with `trust_remote_code` would copy their code themselves
        self.config._auto_class = None  # type: ignore[misc]  # of this configuration alone, not of its class
        auto_class = type(self)._auto_class
        type(self)._auto_class = None
        try:
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        finally:
            type(self)._auto_class = auto_class
        if is_main_process:
            apply_umask(Path(save_directory).glob("model*.safetensors"))

    def _get_files_timestamps(self, working_dir: str | os.PathLike[str]) -> dict[str, float]:
        """File times, by which `save_pretrained(push_to_hub=True)` skips old files; the saved code counts as new."""
        times = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in times.items() if name not in (CONFIGURATION, MODELING)}


# Fewer padding tokens than these cost less than taking them out, measured with the shapes of MiniLM and BERT-base.
FEWEST_PADDING = 16
COLLECTED = ("output_hidden_states", "output_attentions")  # states of layers, which have padding


def unpadded_batch(model: "RelPosBertModel", rows: Rows, outputs: Mapping[str, Any]) -> UnpaddedBatch | None:
    """A batch without its padding, or None for a call that keeps it. Returned states have the shape of the batch.

    A position is padding if its mask is 0 and its id is that of the padding token: others may be read, such as the
    query tokens of ColBERT. Of `inputs_embeds` the mask alone tells, and counts if `config.unpad_inputs` is set.
    """
    config, mask, can_unpad = model.config, rows.key_mask, model.can_unpad
    if (
        not (config.unpad_inputs or can_unpad)
        or mask is None
        or config.chunk_size_feed_forward
        or config.conv_kernel_size  # a convolution reads neighbouring tokens
        or any(outputs.get(name, getattr(config, name, False)) for name in COLLECTED)
        or not has_contents(mask, may_wait=True)
        or int((mask == 0).sum()) < FEWEST_PADDING
    ):
        return None
    hidden = mask == 0
    if can_unpad is None or config.unpad_inputs:
        pad = -1 if config.pad_token_id is None else config.pad_token_id
        is_padding = rows.tokens.dim() == 3 or bool((rows.tokens[hidden] == pad).all())
    else:
        is_padding = can_unpad(model.encoder, rows)
    return UnpaddedBatch.of(~hidden) if is_padding else None


class RelPosBertModel(RelPosBertPreTrainedModel, BertModel):
    """BERT's encoder (or decoder) with relative positions."""

    # Whether padding may be taken out of a call, whatever the configuration says; `optimize` sets it on a live model.
    can_unpad: Callable[[nn.Module, Rows], bool] | None = None
    encoder: RelPosBertEncoder

    def __init__(self, config: RelPosBertConfig, add_pooling_layer: bool = True):
        RelPosBertPreTrainedModel.__init__(self, config)
        self.config = config
        self.gradient_checkpointing = False
        self.embeddings = RelPosBertEmbeddings(config)  # type: ignore[assignment]  # of BERT's it is no subclass
        self.encoder = RelPosBertEncoder(config)
        self.pooler = RelPosBertPooler(config) if add_pooling_layer else None
        self.position_inputs = PositionInputs.of(config)
        capabilities = INSTALLED.capabilities
        self.shares_terms = capabilities is not None and capabilities.layers_share_terms(config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        relation_ids: torch.Tensor | None = None,
        memory: SegmentMemory | None = None,
        memory_sink: list[SegmentMemory] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """As BertModel's, with these differences.

        Args:
            position_ids: (B, L). They determine the distances. A new document begins where they stop increasing, and
                no token attends to another document (packed sequences). For schemes on a grid (B, L, 2): row and
                column of each token, negative for tokens outside the grid.
            attention_mask: (B, L), or prepared (B, 1, L, K), boolean (True: may attend) or additive.
            relation_ids: (B, L, L), labels of the edges from i to j, for the schemes that need them.
            memory: recurrence memory from the outputs for the previous segment, if `config.memory_length` is not 0.
                The first document of a row continues it, whatever its first position id; `memory.reset` empties rows.
                It is not changed, and attention_mask does not cover its tokens. With a cache, which then contains this
                segment only, pass the memory in every call; no new memory is returned.
            memory_sink: a list to which the new memory is appended, for heads, which build their own outputs.

        Raises:
            TypeError: for inputs that are not tensors, and for unknown keywords.
            ValueError: for missing inputs that the scheme requires, wrong dtypes and shapes, an empty batch or row,
                a memory of another model or batch, and an `is_causal` other than the configuration's `is_decoder`.
            IndexError: for tokens, token types and absolute positions outside the embedding tables.
        """
        check_keywords(self, kwargs)
        cache = one_cache(cache, past_key_values)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        rows = Rows(tokens, attention_mask, token_type_ids, position_ids, relation_ids)
        self._check_call(rows, inputs_embeds is None, cache is not None, kwargs.pop("is_causal", None))
        if position_ids is None and kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError(
                "cu_seq_lens_q was given without position_ids; give them: they restart with each document"
            )
        if memory is not None:
            check_memory(self.config, memory, rows.batch)
            memory = memory if memory.length else None
        caller_has_cache = cache is not None
        use_cache = bool(self.config.use_cache if use_cache is None else use_cache) and self.config.is_decoder
        if use_cache and not caller_has_cache:
            cache = DynamicCache(config=self.config)
            if encoder_hidden_states is not None:
                cache = EncoderDecoderCache(cache, DynamicCache(config=self.config))
        past_length = 0 if cache is None else cache.get_seq_length()
        if isinstance(past_length, torch.Tensor):
            past_length = past_length.clone()  # a static cache counts in place

        sequence = read_sequence(self.config, self.position_inputs, rows, cache, past_length, memory, caller_has_cache)
        hidden_states = self.embeddings(
            input_ids, token_type_ids, rows.position_ids, inputs_embeds, past_length, attention_mask
        )
        if encoder_attention_mask is not None:
            encoder_attention_mask = create_bidirectional_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=encoder_attention_mask,
                encoder_hidden_states=encoder_hidden_states,
            )
        layer_inputs: list[torch.Tensor] | None = [] if self.config.memory_length and not caller_has_cache else None
        is_alone = all(each is None for each in (cache, encoder_hidden_states, memory, layer_inputs))
        unpadded = unpadded_batch(self, rows, kwargs) if is_alone else None
        if unpadded is None:
            inputs = self._attention_inputs(sequence, rows, hidden_states, cache)._asdict()
        else:
            inputs = {"unpadded": (unpadded, self._inputs_of_groups(unpadded, rows, hidden_states))}
            hidden_states = unpadded.remove(hidden_states)

        outputs = self.encoder(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            cache=cache,
            use_cache=use_cache,
            memory=memory,
            layer_inputs=layer_inputs,
            real_tokens=None if self.encoder.conv is None else tokens_to_convolve(attention_mask, sequence.documents),
            **inputs,
            **kwargs,
        )
        states = outputs.last_hidden_state
        if unpadded is not None:
            states = unpadded.to(states.device).restore(states)
        outputs = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=states,
            pooler_output=self.pooler(states) if self.pooler is not None else None,
            **{CACHE: outputs[CACHE] if CACHE in outputs else None},
        )
        if layer_inputs is None:
            return outputs
        new_memory = next_memory(memory, tuple(layer_inputs), rows, self.config.memory_length)
        if memory_sink is not None:
            memory_sink.append(new_memory)
        return WITH_MEMORY[type(outputs)](**outputs, memory=new_memory)

    def _check_call(self, rows: Rows, are_ids: bool, has_cache: bool, is_causal: bool | None) -> None:
        """Check the arguments of `forward`, in the installed package also by `checks.check_inputs`."""
        if is_causal is not None and bool(is_causal) != self.config.is_decoder:
            raise ValueError(
                f"is_causal = {is_causal} with is_decoder = {self.config.is_decoder}: causality is set by "
                f"config.is_decoder; load the model with is_decoder={bool(is_causal)}"
            )
        if INSTALLED.checks is not None and not is_traced():
            required = self.position_inputs.required
            INSTALLED.checks.check_inputs(self.config, self.dtype, required, rows, are_ids, has_cache)

    def _attention_inputs(
        self,
        sequence: SequenceMetadata,
        rows: Rows,
        states: torch.Tensor,
        cache: Cache | None = None,
        longest: AttentionInputs | None = None,
        length: int | None = None,
    ) -> AttentionInputs:
        """What the layers share.

        Args:
            states: (B, L, D), the input of the first layer; only shape, dtype and device are read.
            longest: of the group with the longest rows, whose terms may hold for these rows, too.
            length: tokens of a row of the batch, if these are some of its rows without padding.
        """
        real = sequence.real_keys(rows) if self.position_inputs.numbers else None
        tokens = sequence.context.tokens._replace(real=real)
        context = replace(sequence.context, device=states.device, longest=length, tokens=tokens)
        # a checkpointed layer is recomputed in the backward pass, and must not use tensors of an outer graph
        checkpointed = self.training and any(layer.gradient_checkpointing for layer in self.encoder.layer)
        terms = None if longest is None else longest.shared_terms
        if terms is None or not terms.holds_for(context):
            terms = None
            if self.encoder.distance_embedding is not None:
                shared = partial(self.encoder.distance_embedding, context)
                context = replace(context, layer=LayerInputs(shared if checkpointed or longest else shared()))
            if self.shares_terms and self.encoder.layer and not checkpointed:
                terms = self._terms_of_all_layers(context, states)
        return AttentionInputs(sequence.mask(self.config, rows, states, cache), context, terms, {})

    def _terms_of_all_layers(self, context: AttentionContext, states: torch.Tensor) -> SharedTerms:
        """The terms of the scheme, and their Toeplitz form, for the device and dtype of states (B, L, D)."""
        device, dtype = states.device, states.dtype
        if device.type != "meta" and torch.is_autocast_enabled(device.type):  # autocast fails on the meta device
            dtype = torch.get_autocast_dtype(device.type)
        layer = cast(RelPosBertSelfAttention, self.encoder.get_submodule("layer.0.attention.self"))
        terms = layer.make_terms(context, torch.empty(0, layer.attention_head_size, device=device, dtype=dtype))
        if not is_traced():  # in a graph nobody reads it
            _ = terms.toeplitz  # made here, and not in a layer
        return terms

    def _inputs_of_groups(self, batch: UnpaddedBatch, rows: Rows, states: torch.Tensor) -> list[AttentionInputs]:
        """`_attention_inputs` of each group of an unpadded batch; rows and states (B, L, D) are the whole batch's."""
        found: list[AttentionInputs] = []
        for group in batch.groups:
            own = rows.of_group(group)
            sequence = read_sequence(self.config, self.position_inputs, own)
            like = states.new_empty(own.batch, own.length, 0)
            longest = found[0] if found else None
            found.append(self._attention_inputs(sequence, own, like, longest=longest, length=rows.length))
        return found


class RelPosBertHead(RelPosBertPreTrainedModel):
    """A relative BERT with a head; `forward` is that of the class of Transformers which a subclass also inherits."""

    pools = True  # whether the head reads the pooled output
    bert: BertModel

    def __init__(self, config: RelPosBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = RelPosBertModel(config, add_pooling_layer=self.pools)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: RelPosBertConfig) -> None:
        """Make the modules of the head."""


def _fit_decoder(head: BertOnlyMLMHead | BertPreTrainingHeads, config: RelPosBertConfig) -> None:
    """Give the decoder, which is tied to the word embeddings, their width, as in ALBERT and ELECTRA."""
    size, predictions = config.input_size, head.predictions
    if size != config.hidden_size:
        predictions.transform.dense = nn.Linear(config.hidden_size, size)
        predictions.transform.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        predictions.decoder = nn.Linear(size, config.vocab_size)


def _classifier(config: RelPosBertConfig, outputs: int) -> tuple[nn.Dropout, nn.Linear]:
    dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
    return nn.Dropout(dropout), nn.Linear(config.hidden_size, outputs)


@carries_memory
class RelPosBertForPreTraining(RelPosBertHead, BertForPreTraining):
    """Masked language modelling and next sentence heads on a relative BERT; `forward` as BertForPreTraining's."""

    def add_head(self, config: RelPosBertConfig) -> None:
        self.cls = BertPreTrainingHeads(config)
        _fit_decoder(self.cls, config)


@carries_memory
class RelPosBertForMaskedLM(RelPosBertHead, BertForMaskedLM):
    """Masked language modelling head on a relative BERT; `forward` as BertForMaskedLM's."""

    pools = False

    def add_head(self, config: RelPosBertConfig) -> None:
        if config.is_decoder:
            logger.warning("RelPosBertForMaskedLM with config.is_decoder = True masks the future; set it to False.")
        self.cls = BertOnlyMLMHead(config)
        _fit_decoder(self.cls, config)


@carries_memory
class RelPosBertLMHeadModel(RelPosBertHead, BertLMHeadModel):
    """Causal language modelling head on a relative BERT; `forward` and `generate` as BertLMHeadModel's."""

    pools = False
    accepts_loss_kwargs = True  # its loss takes `num_items_in_batch`

    def add_head(self, config: RelPosBertConfig) -> None:
        if not config.is_decoder:
            logger.warning("RelPosBertLMHeadModel with config.is_decoder = False sees the future; set it to True.")
        self.loss_type = "ForCausalLM"  # Transformers derives it from class names, but not from BERT's
        self.cls = BertOnlyMLMHead(config)
        _fit_decoder(self.cls, config)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, *args: Any, memory: SegmentMemory | None = None, **kwargs: Any
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        """As in Transformers, which does not expand a memory: each beam gets that of its row."""
        expand = super()._expand_inputs_for_generation  # type: ignore[misc]  # its `self` is typed by a protocol
        input_ids, kwargs = expand(expand_size, *args, **kwargs)
        if memory is not None:
            rows = torch.arange(memory.mask.shape[0], device=memory.mask.device)
            kwargs["memory"] = memory.select(rows.repeat_interleave(expand_size))
        return input_ids, kwargs

    @staticmethod
    def create_masks_for_generate(
        config: PreTrainedConfig,
        inputs_embeds: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | BlockMask | None:
        """The mask that `generate` prepares for a static cache; that of Transformers lacks attention windows."""
        cache, rows = one_cache(cache, past_key_values), Rows(inputs_embeds, attention_mask)
        return indexed_sequence(config, rows, cache).tensor_mask(config, rows, inputs_embeds, cache)


@carries_memory
class RelPosBertForNextSentencePrediction(RelPosBertHead, BertForNextSentencePrediction):
    """Next sentence head on a relative BERT; `forward` as BertForNextSentencePrediction's."""

    def add_head(self, config: RelPosBertConfig) -> None:
        self.cls = BertOnlyNSPHead(config)


@carries_memory
class RelPosBertForSequenceClassification(RelPosBertHead, BertForSequenceClassification):
    """Sequence classification or regression on a relative BERT; `forward` as BertForSequenceClassification's."""

    def add_head(self, config: RelPosBertConfig) -> None:
        self.dropout, self.classifier = _classifier(config, len(config.id2label or ()))


@carries_memory
class RelPosBertForMultipleChoice(RelPosBertHead, BertForMultipleChoice):
    """Multiple choice on a relative BERT; `forward` as BertForMultipleChoice's."""

    def add_head(self, config: RelPosBertConfig) -> None:
        self.dropout, self.classifier = _classifier(config, 1)


@carries_memory
class RelPosBertForTokenClassification(RelPosBertHead, BertForTokenClassification):
    """Token classification on a relative BERT; `forward` as BertForTokenClassification's."""

    pools = False

    def add_head(self, config: RelPosBertConfig) -> None:
        self.dropout, self.classifier = _classifier(config, len(config.id2label or ()))


@carries_memory
class RelPosBertForQuestionAnswering(RelPosBertHead, BertForQuestionAnswering):
    """Extractive question answering on a relative BERT; `forward` as BertForQuestionAnswering's."""

    pools = False

    def add_head(self, config: RelPosBertConfig) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, len(config.id2label or ()))


# The Auto class of each head: registration and `auto_map` read it from here.
HEADS: dict[str, type[RelPosBertPreTrainedModel]] = {
    "AutoModel": RelPosBertModel,
    "AutoModelForPreTraining": RelPosBertForPreTraining,
    "AutoModelForMaskedLM": RelPosBertForMaskedLM,
    "AutoModelForCausalLM": RelPosBertLMHeadModel,
    "AutoModelForNextSentencePrediction": RelPosBertForNextSentencePrediction,
    "AutoModelForSequenceClassification": RelPosBertForSequenceClassification,
    "AutoModelForMultipleChoice": RelPosBertForMultipleChoice,
    "AutoModelForTokenClassification": RelPosBertForTokenClassification,
    "AutoModelForQuestionAnswering": RelPosBertForQuestionAnswering,
}
AUTO_MAP: dict[str, str] = {
    "AutoConfig": "configuration_relpos_bert.RelPosBertConfig",
    **{auto: f"modeling_relpos_bert.{head.__name__}" for auto, head in HEADS.items()},
}

__all__ = ["AUTO_MAP", "HEADS", "RelPosBertPreTrainedModel", *sorted(head.__name__ for head in HEADS.values())]
