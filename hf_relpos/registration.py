"""Registration with the Auto classes of Transformers, and with PEFT where it is installed."""

import logging
import re
import warnings

import transformers
from transformers import AutoConfig, AutoTokenizer, BertTokenizer
from transformers.utils import is_peft_available

from .host.adapters import register_targets
from .host.loader import LOGGER, left_out, level_of_the_loader
from .models.configuration_relpos_bert import RelPosBertConfig
from .models.modeling_relpos_bert import HEADS
from .models.window_mask import register_window_mask


# Tables of distances in the report that Transformers logs after loading.
TABLES = re.compile(r"distance_embedding\.")


def register() -> None:
    """Register `relpos_bert` with the Auto classes and with PEFT. Idempotent; called once after `import hf_relpos`."""
    AutoConfig.register(RelPosBertConfig.model_type, RelPosBertConfig, exist_ok=True)
    for auto, head in HEADS.items():
        getattr(transformers, auto).register(RelPosBertConfig, head, exist_ok=True)
    AutoTokenizer.register(RelPosBertConfig, BertTokenizer, exist_ok=True)
    register_window_mask()
    LOGGER.addFilter(warn_of_left_out_tables)
    if is_peft_available():
        register_targets(RelPosBertConfig.model_type, like="bert")


def warn_of_left_out_tables(record: logging.LogRecord) -> bool:
    """Warn if a class of Transformers has left out the relative positions of a checkpoint.

    Args:
        record: a record of Transformers' loader. It is a filter of this logger, so that no class is changed.

    Returns:
        True: the record is logged.
    """
    stock, source = left_out(record, TABLES) or ("RelPos", "")
    if not stock.startswith("RelPos"):
        ours = f"RelPos{stock}"
        known = any(head.__name__ == ours for head in HEADS.values())
        remedy = (
            f"Load it with hf_relpos.{ours}, or inside hf_relpos.patch_transformers()"
            if known
            else f"Convert it with `hf-relpos convert {source} OUT`, and load OUT"
        )
        warnings.warn(
            f"{source}: {stock} of Transformers has left out its relative positions (distance_embedding), and "
            f"computes something else than the model that was trained. {remedy}",
            stacklevel=level_of_the_loader(),
        )
    return True
