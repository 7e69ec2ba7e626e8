"""Configuration of BERT with relative positions."""

import os
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from ..host.transformers import ALL_ATTENTION_FUNCTIONS
from ..schemes.registry import DEFAULT_SCHEME, STOCK_SCHEME, parts_with_absolute_table, scheme_parts
from .installed import INSTALLED


# Some stock BERT files have these fields, which stock BERT does not read.
NOT_STOCK = {"embedding_size": None, "feed_forward_type": "mlp", "extra_attention_norms": False}


@strict
class RelPosBertConfig(BertConfig):
    r"""BERT's configuration with the position scheme of its self-attention.

    Args:
        position_embedding_type (`str` or list of `str`, defaults to `"relative_key"`):
            Name of the scheme: a key of `hf_relpos.schemes.SCHEMES`. A list combines schemes: their terms are added.
        position_options (`dict`, *optional*):
            Options of the scheme; missing options have the scheme's defaults. For a combination, a dict of such dicts
            by scheme name.
        attention_window (`int`, *optional*):
            w: a token attends to tokens at most w positions away, and to global tokens. None for no window.
        global_tokens (`list[int]`, *optional*):
            Positions that attend to all tokens and are attended to by all, despite the window; None for `[0]`, the
            [CLS] token. In packed rows they count within each document, in rows padded on the left from the first
            token.
        absolute_position_embeddings (`bool`, defaults to `False`):
            Also add learned absolute position embeddings to the input, as stock BERT does. `convert` with
            `method="keep"` makes such a model. Limits inputs to `max_position_embeddings` tokens.
        embedding_size (`int`, *optional*):
            Width of the embeddings, which a linear layer projects to `hidden_size`, as in ALBERT and ELECTRA; None for
            `hidden_size` and no such layer.
        embedding_norm (`bool`, defaults to `True`):
            Whether the embeddings are normalised; XLNet's are not.
        embedding_projection (`str`, defaults to `"after_norm"`):
            Place of that linear layer: `"after_norm"`, as in ALBERT and ELECTRA, or `"before_norm"` and without a
            bias, as in DeBERTa; the normalisation then has width `hidden_size`.
        attention_biases (`list[str]`, *optional*):
            Projections of self-attention with a bias: some of `"query"`, `"key"` and `"value"`; None for all.
        pooler_hidden_act (`str`, defaults to `"tanh"`):
            Activation of the pooler.
        pooler_dropout (`float`, defaults to 0.0):
            Probability of dropout on the input of the pooler.
        conv_kernel_size (`int`, defaults to 0):
            k, odd: a convolution over k tokens parallel to the first layer, as in DeBERTa v2-xlarge; 0 for none.
        conv_groups (`int`, defaults to 1):
            Groups of the channels of that convolution, as in `torch.nn.Conv1d`.
        conv_act (`str`, defaults to `"tanh"`):
            Activation after that convolution.
        type_vocab_size (`int`, defaults to 2):
            Number of token type embeddings. With 0 only the scheme `xlnet` reads token types.
        feed_forward_type (`str`, defaults to `"mlp"`):
            `"mlp"`: W₂ act(W₁ x + b₁) + b₂, as in BERT. `"glu"`: W₂ (act(W x) ∘ V x) + b₂, a gated linear unit
            (Shazeer, arXiv 2002.05202) as in MosaicBERT and JinaBERT v2; `intermediate.dense` is then W above V,
            (2·`intermediate_size`, D), without a bias, and dropout follows the product instead of W₂. The activation
            is `hidden_act` in both.
        extra_attention_norms (`bool`, defaults to `False`):
            Whether queries and keys are normalised, each over all heads, and the output of attention a second time
            after the input is added again: LN(LN(x + W attention) + x), as in jina-embeddings-v2-base-code.
        unpad_inputs (`bool`, defaults to `False`):
            Whether the layers compute only the real tokens of a padded batch, in inference and in training. The output
            is then zero at padding, except by the code of a saved model. A position is padding if its mask is 0 and
            its id is `pad_token_id`; in `inputs_embeds`, if its mask is 0. Batches with fewer than 16 such positions,
            with a cache, a memory or cross-attention are not unpadded.
        memory_length (`int`, defaults to 0):
            M: outputs have a `memory`, the layer inputs of the last M tokens of each row, which `forward` takes with
            the next segment of the same texts (Transformer-XL, Dai et al., arXiv 1901.02860). 0 for none. It may be
            changed at any time, and may be larger in evaluation than in training.
        converted_from (`dict`, *optional*):
            For weights from another architecture: its `model_type`, and the fields of its configuration that this one
            lacks. `hf_relpos.export_checkpoint` reads it.
        save_code (`bool`, defaults to `True`):
            Whether `save_pretrained` and `push_to_hub` of a model also save its code, for loading with
            `trust_remote_code=True` where hf_relpos is not installed.
        max_position_embeddings (`int`, defaults to 512):
            P: size of absolute position embeddings, and trained range of schemes whose tables cover 2P − 1 offsets.

    Raises:
        ValueError: for an unknown scheme or option, an invalid value of an option, a `hidden_size` that
            `num_attention_heads` does not divide, and other invalid values, such as a size that is not positive.
        StrictDataclassFieldValidationError: (of huggingface_hub) for a field of another type.

    Example:

    ```python
    >>> from hf_relpos import RelPosBertConfig, RelPosBertModel

    >>> config = RelPosBertConfig(position_embedding_type="shaw", position_options={"clip": 32})
    >>> model = RelPosBertModel(config)
    ```
    """

    model_type = "relpos_bert"
    keys_to_ignore_at_inference = ["memory"]

    position_embedding_type: str | list[str] = DEFAULT_SCHEME
    position_options: dict[str, Any] | None = None
    attention_window: int | None = None
    global_tokens: list[int] | None = None
    absolute_position_embeddings: bool = False
    embedding_size: int | None = None
    embedding_norm: bool = True
    embedding_projection: str = "after_norm"
    attention_biases: list[str] | None = None
    pooler_hidden_act: str = "tanh"
    pooler_dropout: float | int = 0.0
    conv_kernel_size: int = 0
    conv_groups: int = 1
    conv_act: str = "tanh"
    converted_from: dict[str, Any] | None = None
    feed_forward_type: str = "mlp"
    extra_attention_norms: bool = False
    unpad_inputs: bool = False
    memory_length: int = 0
    save_code: bool = True

    # the default of Transformers looks for `layers.*`
    base_model_fsdp_plan = {"encoder.layer.*": "free_full_weight"}

    def __post_init__(self, **kwargs: Any) -> None:
        checks = INSTALLED.checks
        if checks is not None:
            checks.check_rules(checks.ARGUMENTS, kwargs.items())
            checks.warn_of_misspelt(kwargs, vars(self))
            checks.check_fields(self)
        self.position_options = dict(self.position_options or {})
        super().__post_init__(**kwargs)
        # raises plain ValueErrors here; Transformers runs it again before it writes a configuration
        self.validate_settings()

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in Transformers, but also reads stock BERT and, with the installed package, other relative architectures.

        A configuration without `position_embedding_type` (Transformers v5 no longer writes it) is absolute.

        Raises:
            ValueError: for another architecture, and for the original layout of NEZHA, whose model_type is BERT's.
        """
        config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        source = pretrained_model_name_or_path
        # the first BERT files name no type
        model_type = config.get("model_type") or ("bert" if config else cls.model_type)
        parts = [part for part in config.values() if isinstance(part, dict)]
        if model_type == cls.model_type or any(part.get("model_type") == cls.model_type for part in parts):
            return config, kwargs
        if fields := INSTALLED.families().config_fields(source, config):
            return fields, kwargs
        if model_type != "bert":
            remedy = INSTALLED.families().conversion_of(model_type, source)
            raise ValueError(f"{source}: model_type = {model_type!r} cannot be loaded as {cls.model_type}: {remedy}")
        config = {"position_embedding_type": STOCK_SCHEME, **config, "model_type": cls.model_type, **NOT_STOCK}
        return config, kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers, but without an attention kernel that a file would have it download."""
        return super().from_dict(INSTALLED.checks.without_kernels(config_dict, "config.json"), **kwargs)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> "RelPosBertConfig":
        """As in Transformers, but without an attention kernel that a file would have it download."""
        return cls(**INSTALLED.checks.without_kernels(cls._dict_from_json_file(json_file), json_file))

    @classmethod
    def from_bert(cls, config: Any, **changes: Any) -> "RelPosBertConfig":
        """Convert a BertConfig to a RelPosBertConfig, with its origin and attention backend.

        A backend that would be downloaded, as `user/repository`, is left out with a warning: it may be the file's.

        Args:
            config: a BertConfig, or a RelPosBertConfig, which is returned itself if there are no changes.
            changes: fields to set in a copy.

        Raises:
            ValueError: as RelPosBertConfig.
        """
        own = config.model_type == cls.model_type  # of this class, or of the copy of it in a saved model's code
        if own and not changes:
            return config
        values = {"position_embedding_type": STOCK_SCHEME, **config.to_dict()}
        backend = config._attn_implementation
        if not own:
            # stock classes read any name from a file; whether a caller gave this one cannot be seen here
            given = {"_attn_implementation": backend}
            given = INSTALLED.checks.without_kernels(given, config.name_or_path or "BertConfig")
            backend = given.get("_attn_implementation")
            other = INSTALLED.families().config_fields(config.name_or_path, values)
            values = other or {**values, **NOT_STOCK}
            # or a name of the checkpoint's own code, such as JinaBERT's "torch"
            if other and backend not in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()):
                backend = None
        values |= {**changes, "model_type": cls.model_type}
        converted = cls(**{**values, "attn_implementation": backend})
        converted.name_or_path = config.name_or_path
        return converted

    def validate_settings(self) -> None:
        """Check that the settings fit together. Only the installed package does so."""
        if INSTALLED.checks is not None:
            INSTALLED.checks.check_settings(self)

    @property
    def input_size(self) -> int:
        """Width of the embeddings, and of vectors that schemes add to them."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward part of a layer is a gated linear unit."""
        return self.feed_forward_type == "glu"

    @property
    def position_scheme_name(self) -> str:
        """Name of the scheme, or names of a combination joined by `+`."""
        name = self.position_embedding_type
        return name if isinstance(name, str) else "+".join(name)

    @property
    def required_inputs(self) -> frozenset[str]:
        """Inputs of `forward` that the schemes require: `grid`, `relation_ids`."""
        return frozenset().union(*(scheme.required_inputs for scheme, _ in scheme_parts(self)))

    @property
    def has_absolute_table(self) -> bool:
        """Whether the model has learned absolute position embeddings."""
        return any(scheme.learned_input_table for scheme, _ in parts_with_absolute_table(self))


__all__ = ["RelPosBertConfig"]
