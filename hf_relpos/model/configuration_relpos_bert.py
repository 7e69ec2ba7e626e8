"""Configuration of BERT with relative positions."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import BertConfig

from .schemes import find_scheme


@strict
class RelPosBertConfig(BertConfig):
    r"""BERT's configuration, and which position scheme its self-attention uses.

    Args:
        position_embedding_type (`str`, defaults to `"relative_key"`):
            Name of the scheme: a key of `hf_relpos.SCHEMES`.
        position_options (`dict`, *optional*):
            Options of the scheme, which checks them itself; those not given take the scheme's defaults.
        absolute_position_embeddings (`bool`, defaults to `False`):
            Also add a learned table of absolute positions at the input, as stock BERT does: the hybrid that a
            converter with `method="keep"` starts from. Limits inputs to `max_position_embeddings` tokens.
        save_code (`bool`, defaults to `True`):
            Whether `save_pretrained` and `push_to_hub` of a model put its code beside the weights, for loading with
            `trust_remote_code=True` where hf_relpos is not installed.
        max_position_embeddings (`int`, defaults to 512):
            P. Size of an absolute table, and trained range of the schemes whose tables cover 2P − 1 offsets.

    Raises:
        ValueError: for an unknown scheme, an unknown option, or an option value that the scheme refuses; and for a
            `hidden_size` that `num_attention_heads` does not divide.

    Example:

    ```python
    >>> from hf_relpos import RelPosBertConfig, RelPosBertModel

    >>> config = RelPosBertConfig(position_embedding_type="shaw", position_options={"clip": 32})
    >>> model = RelPosBertModel(config)
    ```
    """

    model_type = "relpos_bert"

    position_embedding_type: str = "relative_key"
    position_options: dict[str, Any] | None = None
    absolute_position_embeddings: bool = False
    save_code: bool = True

    # BERT has no plans of its own, and the defaults of Transformers look for `layers.*`
    base_model_tp_plan = {
        "encoder.layer.*.attention.self.query": "colwise",
        "encoder.layer.*.attention.self.key": "colwise",
        "encoder.layer.*.attention.self.value": "colwise",
        "encoder.layer.*.attention.output.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        "encoder.layer.*.output.dense": "rowwise",
    }
    base_model_fsdp_plan = {"encoder.layer.*": "free_full_weight"}

    def __post_init__(self, **kwargs: Any) -> None:
        self.position_options = dict(self.position_options or {})
        super().__post_init__(**kwargs)
        # here as plain ValueErrors; Transformers runs them again before it writes a configuration
        self.validate_heads()
        self.validate_position_scheme()

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """As in Transformers; the configuration of a stock BERT becomes one of ours.

        One without `position_embedding_type` (Transformers v5 no longer writes it) is absolute.

        Raises:
            ValueError: for another architecture, and for the original layout of NEZHA, which calls itself BERT.
        """
        config, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        found = config.get("model_type", cls.model_type)
        if found == "bert":
            if config.get("use_relative_position"):
                raise ValueError(
                    f"{pretrained_model_name_or_path}: use_relative_position = True marks a NEZHA checkpoint, not a "
                    "BERT; its scheme is not among those known here"
                )
            config = {
                **config,
                "model_type": cls.model_type,
                "position_embedding_type": config.get("position_embedding_type", "absolute"),
            }
        elif found != cls.model_type and not any(
            isinstance(part, dict) and part.get("model_type") == cls.model_type for part in config.values()
        ):
            raise ValueError(
                f"{pretrained_model_name_or_path}: model_type = {found!r}; only 'bert' and {cls.model_type!r} "
                "checkpoints can be read"
            )
        return config, kwargs

    def validate_heads(self) -> None:
        """Heads must divide the hidden size."""
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_attention_heads = "
                f"{self.num_attention_heads}; choose a number of heads that divides it"
            )

    def validate_position_scheme(self) -> None:
        """The scheme must be known and must accept its options."""
        find_scheme(self.position_embedding_type).resolve(self.position_options, self)

    @property
    def has_absolute_table(self) -> bool:
        """Whether the embeddings hold a table of absolute positions."""
        return self.absolute_position_embeddings or find_scheme(self.position_embedding_type).absolute_input

    @property
    def has_value_term(self) -> bool:
        """Whether the scheme adds vectors to the values, which limits the attention backends."""
        return find_scheme(self.position_embedding_type).has_value_term(self.position_options)


__all__ = ["RelPosBertConfig"]
