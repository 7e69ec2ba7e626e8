"""Read limits and heads of any BERT-like model from its modules and its configuration."""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel


def has_mlm_head(model: PreTrainedModel) -> bool:
    """Whether a model predicts masked tokens from the context on both sides."""
    return model.get_output_embeddings() is not None and not getattr(model.config, "is_decoder", False)


def check_sizes(teacher: PreTrainedModel, student: PreTrainedModel, names: Iterable[str]) -> None:
    """
    Raises:
        ValueError: for a field that both configurations have, with different values.
    """
    for name in names:
        one, other = (getattr(model.base_model.config, name, None) for model in (teacher, student))
        if None not in (one, other) and one != other:
            both = f"{name} = {one} in the teacher, but {other} in the student"
            raise ValueError(f"{both}; give a student that was converted from this teacher")


def model_max_length(model: PreTrainedModel) -> int | None:
    """Maximum length in tokens, special tokens included; None for a model without a limit.

    RoBERTa and models derived from it start to count past the padding id, so 514 positions allow 512 tokens.
    """
    embeddings = getattr(model.base_model, "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    if isinstance(table, nn.Embedding):
        if getattr(table, "out_of_range", "error") == "clip":  # the last row is repeated
            return None
        return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    # a model of this package has no limit without absolute position embeddings
    if hasattr(model.config, "has_absolute_table") and not model.config.has_absolute_table:
        return None
    return getattr(model.config, "max_position_embeddings", None)
