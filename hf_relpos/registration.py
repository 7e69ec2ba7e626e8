"""Registration with the Auto classes of Transformers."""

import transformers
from transformers import AutoConfig, AutoTokenizer, BertTokenizer

from .model.configuration_relpos_bert import RelPosBertConfig
from .model.modeling_relpos_bert import HEADS


def register() -> None:
    """Register `relpos_bert` with the Auto classes. Idempotent; called once by `import hf_relpos`."""
    AutoConfig.register(RelPosBertConfig.model_type, RelPosBertConfig, exist_ok=True)
    for auto, head in HEADS.items():
        getattr(transformers, auto).register(RelPosBertConfig, head, exist_ok=True)
    AutoTokenizer.register(RelPosBertConfig, BertTokenizer, exist_ok=True)
