"""Registration with the Auto classes of Transformers, and with PEFT where it is installed."""

import logging
import re
import sys
import warnings

import transformers
from transformers import AutoConfig, AutoTokenizer, BertTokenizer
from transformers.utils import is_peft_available

from .attention.backends.kernels import register as register_kernels
from .models.configuration_relpos_bert import RelPosBertConfig
from .models.modeling_relpos_bert import HEADS
from .models.window_mask import register_window_mask


# First line of the report that Transformers logs after loading, and tables of distances in it.
LOAD_REPORT = re.compile(r"(\w+) LOAD REPORT from: (.*)")
COLOUR = re.compile(r"\x1b\[[\d;]*m")
LEFT_OUT = re.compile(r"distance_embedding\..*UNEXPECTED")
# Packages between a filter of that logger and who loads a model.
LOADERS = ("hf_relpos", "logging", "transformers")


def register() -> None:
    """Register `relpos_bert` with the Auto classes and with PEFT. Idempotent; called once after `import hf_relpos`."""
    register_kernels()
    AutoConfig.register(RelPosBertConfig.model_type, RelPosBertConfig, exist_ok=True)
    for auto, head in HEADS.items():
        getattr(transformers, auto).register(RelPosBertConfig, head, exist_ok=True)
    AutoTokenizer.register(RelPosBertConfig, BertTokenizer, exist_ok=True)
    register_window_mask()
    logging.getLogger("transformers.modeling_utils").addFilter(warn_of_left_out_tables)
    if is_peft_available():
        register_adapter_targets()


def warn_of_left_out_tables(record: logging.LogRecord) -> bool:
    """Warn if a class of Transformers has left out the relative positions of a checkpoint.

    Args:
        record: a record of Transformers' loader. It is a filter of this logger, so that no class is changed.

    Returns:
        True: the record is logged.
    """
    text = COLOUR.sub("", record.getMessage())
    if (found := LOAD_REPORT.search(text)) and LEFT_OUT.search(text) and not found[1].startswith("RelPos"):
        ours = f"RelPos{found[1]}"
        known = any(head.__name__ == ours for head in HEADS.values())
        remedy = (
            f"Load it with hf_relpos.{ours}, or inside hf_relpos.patch_transformers()"
            if known
            else f"Convert it with `hf-relpos convert {found[2]} OUT`, and load OUT"
        )
        warnings.warn(
            f"{found[2]}: {found[1]} of Transformers has left out its relative positions (distance_embedding), and "
            f"computes something else than the model that was trained. {remedy}",
            stacklevel=_level_of_the_caller(),
        )
    return True


def _level_of_the_caller() -> int:
    """`stacklevel`, in the function that calls this, of the code that asked Transformers for the model."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LOADERS:
        frame, level = frame.f_back, level + 1
    return level


def register_adapter_targets() -> None:
    """Adapters go on the layers that they go on in BERT, whose names the models keep, unless others are given.

    PEFT has a table for each of its methods, by model type and without another way to add to it. Importing PEFT here
    costs nothing: Transformers does so for its callbacks, of which `hf_relpos` has one.
    """
    from peft.utils import constants

    for name, targets in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(targets, dict) and "bert" in targets:
            targets.setdefault(RelPosBertConfig.model_type, targets["bert"])
