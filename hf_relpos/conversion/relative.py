"""Methods for sources that are relative already: exact, refit."""

import torch

from ..families.errors import ConversionError
from ..families.names import is_scheme
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from .context import ConversionContext, same_positions
from .export import refit_tables
from .report import lost_in_words
from .verify import ROUNDING


def exact(model: RelPosBertPreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Keep the source's tables, or fit tables that hold all of them.

    Raises:
        ConversionError: for tables that cannot hold them.
    """
    changed = refit(model, context)
    rounding = (ROUNDING * torch.finfo(model.dtype).eps) ** 2
    lost = {letter: share for letter, share in context.details.get("lost", {}).items() if share > rounding}
    if lost:
        raise ConversionError(
            f"position_embedding_type = {model.config.position_embedding_type!r}, position_options = "
            f"{model.config.position_options}: this would lose {lost_in_words(lost)} of the source's tables, and "
            "method = 'exact' loses nothing; choose a scheme or options that hold them, or method = 'refit' for the "
            "closest"
        )
    return changed


def refit(model: RelPosBertPreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Fit the closest tables; a model with the source's own keeps them."""
    if same_positions(context.source_config, model.config):
        return {}
    try:
        context.details["lost"] = refit_tables(context.build_teacher(), model)
    except ConversionError as error:
        raise ConversionError(f"{error}; method = 'calibrate' fits to its attention instead") from error
    return {name: "fitted to the source's tables" for name, _ in model.named_parameters() if is_scheme(name)}
