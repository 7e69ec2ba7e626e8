"""Registration with the Auto classes of Transformers, and with PEFT where it is installed."""

import transformers
from transformers import AutoConfig, AutoTokenizer, BertTokenizer
from transformers.utils import is_peft_available

from .attention.backends.kernels import register as register_kernels
from .models.configuration_relpos_bert import RelPosBertConfig
from .models.modeling_relpos_bert import HEADS
from .models.window_mask import register_window_mask


def register() -> None:
    """Register `relpos_bert` with the Auto classes and with PEFT. Idempotent; called once after `import hf_relpos`."""
    register_kernels()
    AutoConfig.register(RelPosBertConfig.model_type, RelPosBertConfig, exist_ok=True)
    for auto, head in HEADS.items():
        getattr(transformers, auto).register(RelPosBertConfig, head, exist_ok=True)
    AutoTokenizer.register(RelPosBertConfig, BertTokenizer, exist_ok=True)
    register_window_mask()
    if is_peft_available():
        register_adapter_targets()


def register_adapter_targets() -> None:
    """Adapters go on the layers that they go on in BERT, whose names the models keep, unless others are given.

    PEFT has a table for each of its methods, by model type and without another way to add to it. Importing PEFT here
    costs nothing: Transformers does so for its callbacks, of which `hf_relpos` has one.
    """
    from peft.utils import constants

    for name, targets in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(targets, dict) and "bert" in targets:
            targets.setdefault(RelPosBertConfig.model_type, targets["bert"])
