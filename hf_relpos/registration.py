"""Registration with the Auto classes of Transformers, and with PEFT where it is installed."""

import logging
import re
import warnings
from importlib import import_module

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from transformers import AutoConfig, AutoTokenizer, BertTokenizer
from transformers.utils import is_peft_available

from .host.loader import LOGGER, left_out, level_of_the_loader, note_allocation, register_targets
from .models import capabilities, checks, loading
from .models.configuration_relpos_bert import RelPosBertConfig
from .models.installed import INSTALLED
from .models.modeling_relpos_bert import HEADS
from .models.saved_code import bundle


REMOTE = "transformers_modules"  # the package that Transformers puts remote code into
# Repositories of code for architectures that are read here; Transformers replaces hyphens in the names of modules.
READ_HERE = re.compile(r"new.{1,8}impl|nomic.{1,8}bert|xlm.{1,8}roberta.{1,8}flash|jina.{1,8}bert")
# Tables of distances in the report that Transformers logs after loading.
TABLES = re.compile(r"distance_embedding\.")


def register() -> None:
    """Register `relpos_bert` with the Auto classes and with PEFT. Idempotent; called once after `import hf_relpos`."""
    INSTALLED.bundle, INSTALLED.capabilities, INSTALLED.checks = bundle, capabilities, checks
    INSTALLED.loading = loading
    INSTALLED.families = lambda: import_module(".families.loading", __package__)  # when a checkpoint is read
    AutoConfig.register(RelPosBertConfig.model_type, RelPosBertConfig, exist_ok=True)
    for auto, head in HEADS.items():
        getattr(transformers, auto).register(RelPosBertConfig, head, exist_ok=True)
    AutoTokenizer.register(RelPosBertConfig, BertTokenizer, exist_ok=True)
    LOGGER.addFilter(warn_of_left_out_tables)
    register_module_buffer_registration_hook(watch_buffers)
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
        remedy = f"Convert it with `hf-relpos convert {source} OUT`, and load OUT"
        if known:
            remedy = f"Load it with hf_relpos.{ours}, or inside hf_relpos.patch_transformers()"
        lost = f"{source}: {stock} of Transformers dropped its relative positions (distance_embedding)"
        warnings.warn(f"{lost}, so its outputs are wrong. {remedy}", stacklevel=level_of_the_loader())
    return True


_warned: set[str] = set()


def watch_buffers(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
    """Note what Transformers' loader allocates, and warn, once for each file of remote code, that it leaves it so.

    It is a hook of PyTorch for each buffer that a module registers; no class is changed.
    """
    if not note_allocation(module, name, buffer):
        return
    kind = type(module)
    filled_again = "RotaryEmbedding" in kind.__name__ and hasattr(module, "original_inv_freq")  # by Transformers
    if not kind.__module__.startswith(REMOTE) or kind.__module__ in _warned or filled_again:
        return
    _warned.add(kind.__module__)
    place = f"{kind.__name__} (remote code) computes the buffer {name} in __init__"
    left = "Transformers 5 leaves such buffers uninitialised, unless the code fills them itself"
    remedy = "After loading, run hf_relpos.initialize_buffers(model), which names and fills them"
    if READ_HERE.search(kind.__module__):
        remedy += "; hf_relpos reads this architecture without that code, inside hf_relpos.patch_transformers()"
    warnings.warn(f"{place}; {left}. {remedy}", stacklevel=level_of_the_loader())
