"""BERT with relative positions in self-attention.

The model prepares positions, masks and terms for the layers (`layers.py`). Heads keep the `forward` of Transformers'
BERT.
"""

import os
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

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
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.utils import logging

from ..attention.call import SharedTerms
from ..attention.context import AttentionContext, LayerInputs
from ..attention.dispatch import AUTO
from ..attention.unpadding import Batch, RowGroup, take_batch
from ..files import apply_umask
from ..host.tracing import has_contents, is_traced
from ..host.transformers import (
    CACHE,
    BertOnlyMLMHead,
    BertOnlyNSPHead,
    BertPreTrainingHeads,
    capture_outputs,
    check_keywords,
    create_bidirectional_mask,
    merge_with_config_defaults,
    one_cache,
)
from ..schemes.scheme import Scheme, SharedScheme
from .configuration_relpos_bert import RelPosBertConfig
from .installed import INSTALLED
from .layers import (
    RelPosBertEmbeddings,
    RelPosBertEncoder,
    RelPosBertPooler,
    RelPosBertSelfAttention,
    tokens_to_convolve,
)
from .recurrence import WITH_MEMORY, SegmentMemory, check_memory, next_memory, with_memory
from .saved_code.remote_code import CONFIGURATION, MODELING, save_code
from .sequence import PositionInputs, Rows, SequenceMetadata, indexed_sequence, read_sequence


logger = logging.get_logger(__name__)


class RelPosBertPreTrainedModel(BertPreTrainedModel):
    """Loading, saving and initialisation for all heads."""

    config: RelPosBertConfig
    config_class = RelPosBertConfig
    _supports_flash_attn = False
    _supports_context_parallel = False  # it would cut the sequence, and computes causal attention without terms only
    _no_split_modules = ["RelPosBertEmbeddings", "RelPosBertLayer"]
    # BERT's losses are means over a batch; the Trainer must divide them when it accumulates gradients
    accepts_loss_kwargs = False
    # Transformers ≤ 4.57 saved an unused absolute table, and buffers, with every relative BERT
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.position_embeddings\.weight", r"embeddings\.position_ids"]

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
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            apply_umask(Path(save_directory).glob("model*.safetensors"))

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Do nothing, since `save_pretrained` writes the code that Transformers would then copy."""

    def _get_files_timestamps(self, working_dir: str | os.PathLike[str]) -> dict[str, float]:
        """File times, by which `save_pretrained(push_to_hub=True)` skips old files; the saved code counts as new."""
        times = super()._get_files_timestamps(working_dir)
        return {name: time for name, time in times.items() if name not in (CONFIGURATION, MODELING)}


# Fewer padding tokens than these cost less than taking them out, measured with the shapes of MiniLM and BERT-base.
FEWEST_PADDING = 16
COLLECTED = ("output_hidden_states", "output_attentions")  # states of layers, which have padding


def unpadded_batch(model: "RelPosBertModel", rows: Rows, outputs: Mapping[str, Any]) -> Batch | None:
    """A batch without its padding, or None for a call that keeps it. Returned states have the shape of the batch.

    A position is padding if its mask is 0 and its id is that of the padding token: others may be read, such as the
    query tokens of ColBERT. Of `inputs_embeds` the mask alone tells. `optimize` decides itself, and gives the batch.
    """
    if (batch := take_batch()) is not None:
        return batch
    config, mask = model.config, rows.key_mask
    if (
        not config.unpad_inputs
        or mask is None
        or config.chunk_size_feed_forward
        or config.conv_kernel_size  # a convolution reads neighbouring tokens
        or any(outputs.get(name, getattr(config, name, False)) for name in COLLECTED)
        or not has_contents(mask, may_wait=True)
        or int((mask == 0).sum()) < FEWEST_PADDING
    ):
        return None
    hidden = mask == 0
    pad = -1 if config.pad_token_id is None else config.pad_token_id
    is_padding = rows.tokens.dim() == 3 or bool((rows.tokens[hidden] == pad).all())
    return Batch.of(~hidden) if is_padding else None


class RelPosBertModel(RelPosBertPreTrainedModel, BertModel):
    """BERT's encoder (or decoder) with relative positions."""

    encoder: RelPosBertEncoder

    def __init__(self, config: RelPosBertConfig, add_pooling_layer: bool = True):
        RelPosBertPreTrainedModel.__init__(self, config)
        self.gradient_checkpointing = False
        self.embeddings = RelPosBertEmbeddings(config)  # type: ignore[assignment]  # of BERT's it is no subclass
        self.encoder = RelPosBertEncoder(config)
        self.pooler = RelPosBertPooler(config) if add_pooling_layer else None
        self.position_inputs = PositionInputs.of(config)
        capabilities = INSTALLED.capabilities
        self.shares_terms = capabilities is not None and capabilities.layers_share_terms(config)
        self.post_init()

    @property
    def unpads(self) -> bool:
        """Whether it takes padding out by itself. An encoder that says so computes a batch that it is given, too."""
        return bool(self.config.unpad_inputs)

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
    ) -> BaseModelOutputWithPoolingAndCrossAttentions:  # whose fields sentence-transformers reads
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
            TypeError: for inputs that are not tensors, and for a misspelt keyword.
            ValueError: for missing inputs that the scheme requires, wrong dtypes and shapes, an empty batch or row,
                a memory of another model or batch, and an `is_causal` other than the configuration's `is_decoder`.
            IndexError: for tokens, token types and absolute positions outside the embedding tables.
        """
        if not is_traced():
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
        batch = unpadded_batch(self, rows, kwargs) if is_alone else None
        if batch is None:
            group = self._prepared(RowGroup(sequence.context), sequence, hidden_states)
            batch = Batch(rows.batch, rows.length, (group,))
        else:
            batch = replace(batch, groups=self._prepared_groups(batch, sequence, hidden_states))
            hidden_states = batch.remove(hidden_states)
        states = self.encoder(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            cache=cache,
            layer_inputs=layer_inputs,
            real_tokens=None if self.encoder.conv is None else tokens_to_convolve(rows, sequence.visibility.documents),
            batch=batch,
            memory=memory,
            **kwargs,
        ).last_hidden_state
        if batch.indices is not None:
            states = batch.restore(states)
        cached: dict[str, Any] = {CACHE: cache if use_cache else None}
        outputs = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=states, pooler_output=self.pooler(states) if self.pooler is not None else None, **cached
        )
        if layer_inputs is None:
            return outputs
        new_memory = next_memory(memory, tuple(layer_inputs), rows, self.config.memory_length)
        if memory_sink is not None:
            memory_sink.append(new_memory)
        kind: Any = WITH_MEMORY[type(outputs)]  # a subclass of it, made at import
        return kind(**outputs, memory=new_memory)

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

    def _prepared(
        self, group: RowGroup, sequence: SequenceMetadata, states: torch.Tensor, longest: RowGroup | None = None
    ) -> RowGroup:
        """A group with what the layers share about its rows.

        Args:
            sequence: its rows.
            states: (b, l, D), the input of the first layer; only shape, dtype and device are read.
            longest: the group with the longest rows, whose terms may hold for these rows, too.
        """
        kept: dict[Hashable, Any] | None = None if is_traced() else {}
        context = replace(sequence.context, device=states.device, longest=group.context.longest, kept=kept)
        # a checkpointed layer is recomputed in the backward pass, and must not use tensors of an outer graph
        checkpointed = self.training and any(layer.gradient_checkpointing for layer in self.encoder.layer)
        terms = None if longest is None else longest.terms
        if terms is None or not terms.holds_for(context):
            terms = None
            if self.encoder.distance_embedding is not None:
                shared = partial(self.encoder.distance_embedding, context)
                context = replace(context, layer=LayerInputs(shared if checkpointed or longest else shared()))
            if self.shares_terms and self.encoder.layer and not checkpointed:
                terms = self._terms_of_all_layers(context, states)
        return replace(group, context=context, mask=sequence.mask(states), terms=terms)

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

    def _prepared_groups(self, batch: Batch, sequence: SequenceMetadata, states: torch.Tensor) -> tuple[RowGroup, ...]:
        """The groups of an unpadded batch, `_prepared`; sequence and states (B, L, D) are the whole batch's."""
        found: list[RowGroup] = []
        for group in batch.groups:
            like = states.new_empty(len(group.rows), group.length, 0)
            # read anew: without padding the rows of a group often are simpler
            own = read_sequence(self.config, self.position_inputs, sequence.rows.of_group(group))
            found.append(self._prepared(group, own, like, found[0] if found else None))
        return tuple(found)


class RelPosBertHead(RelPosBertPreTrainedModel):
    """A relative BERT with a head; `forward` is that of the class of Transformers which a subclass also inherits."""

    pools = True  # whether the head reads the pooled output
    bert: BertModel

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if RelPosBertHead in cls.__bases__:  # what inherits from one of these inherits its forward
            cls.forward = with_memory(cls.forward)

    def __init__(self, config: RelPosBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = RelPosBertModel(config, add_pooling_layer=self.pools)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: RelPosBertConfig) -> None:
        """Make the modules of the head: by default a classifier of the configuration's labels."""
        self.dropout, self.classifier = _classifier(config, len(config.id2label or ()))


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


class RelPosBertForPreTraining(RelPosBertHead, BertForPreTraining):
    """Masked language modelling and next sentence heads on a relative BERT; `forward` as BertForPreTraining's."""

    def add_head(self, config: RelPosBertConfig) -> None:
        self.cls = BertPreTrainingHeads(config)
        _fit_decoder(self.cls, config)


class RelPosBertForMaskedLM(RelPosBertHead, BertForMaskedLM):
    """Masked language modelling head on a relative BERT; `forward` as BertForMaskedLM's."""

    pools = False

    def add_head(self, config: RelPosBertConfig) -> None:
        if config.is_decoder:
            logger.warning("RelPosBertForMaskedLM with config.is_decoder = True masks the future; set it to False.")
        self.cls = BertOnlyMLMHead(config)
        _fit_decoder(self.cls, config)


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
        return indexed_sequence(config, rows, cache).tensor_mask(inputs_embeds)


class RelPosBertForNextSentencePrediction(RelPosBertHead, BertForNextSentencePrediction):
    """Next sentence head on a relative BERT; `forward` as BertForNextSentencePrediction's."""

    def add_head(self, config: RelPosBertConfig) -> None:
        self.cls = BertOnlyNSPHead(config)


class RelPosBertForSequenceClassification(RelPosBertHead, BertForSequenceClassification):
    """Sequence classification or regression on a relative BERT; `forward` as BertForSequenceClassification's."""


class RelPosBertForMultipleChoice(RelPosBertHead, BertForMultipleChoice):
    """Multiple choice on a relative BERT; `forward` as BertForMultipleChoice's."""

    def add_head(self, config: RelPosBertConfig) -> None:
        self.dropout, self.classifier = _classifier(config, 1)


class RelPosBertForTokenClassification(RelPosBertHead, BertForTokenClassification):
    """Token classification on a relative BERT; `forward` as BertForTokenClassification's."""

    pools = False


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
