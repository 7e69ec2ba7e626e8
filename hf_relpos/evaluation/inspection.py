"""Read limits and heads of any BERT-like model from its modules and its configuration."""

from torch import nn
from transformers import PreTrainedModel


def has_mlm_head(model: PreTrainedModel) -> bool:
    """Whether a model predicts masked tokens from the context on both sides."""
    return model.get_output_embeddings() is not None and not getattr(model.config, "is_decoder", False)


def _position_table(model: PreTrainedModel) -> nn.Embedding | None:
    """The absolute position embeddings, if they are a plain `nn.Embedding`."""
    embeddings = getattr(model.base_model, "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    return table if isinstance(table, nn.Embedding) else None


def first_position_id(model: PreTrainedModel) -> int:
    """The position id of the first token: 0, or `padding_idx` + 1 in RoBERTa and models derived from it."""
    table = _position_table(model)
    return 0 if table is None or table.padding_idx is None else table.padding_idx + 1


def model_max_length(model: PreTrainedModel) -> int | None:
    """Maximum length in tokens, special tokens included; None for a model without a limit.

    RoBERTa and models derived from it start to count past the padding id, so 514 positions allow 512 tokens.
    """
    table = _position_table(model)
    if table is not None and getattr(table, "out_of_range", "error") == "clip":  # the last row is repeated
        return None
    if table is not None:
        return table.num_embeddings - first_position_id(model)
    # a model of this package has no limit without absolute position embeddings
    if hasattr(model.config, "has_absolute_table") and not model.config.has_absolute_table:
        return None
    return getattr(model.config, "max_position_embeddings", None)
