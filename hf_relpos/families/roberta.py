"""RoBERTa, XLM-RoBERTa and CamemBERT: other names, and position ids that begin after the padding id."""

from typing import Any

from .family import LEGACY_TYPES, MOST, Family, Layout
from .names import Rule


HEADS = (
    Rule("lm_head.dense.*", "cls.predictions.transform.dense.*"),
    Rule("lm_head.layer_norm.*", "cls.predictions.transform.LayerNorm.*"),
    Rule("lm_head.*", "cls.predictions.*"),
    Rule("classifier.dense.*", "bert.pooler.dense.*"),
    Rule("classifier.out_proj.*", "classifier.*"),
)
COMMON: dict[str, Any] = {
    "suffixes": (*MOST, "ForCausalLM", "ForMultipleChoice"),
    "rules": (Rule("roberta.*", "bert.*"), *HEADS),
    "dropped_fields": ("embedding_size",),
    "legacy_types": LEGACY_TYPES,
    "always_gelu": True,
    "padding": lambda config: config["pad_token_id"],
}
# `model_type`, prefix of class names, title.
KINDS = (
    ("roberta", "Roberta", "RoBERTa"),
    ("xlm-roberta", "XLMRoberta", "XLM-RoBERTa"),
    ("camembert", "Camembert", "CamemBERT"),
)


FAMILIES: dict[str, Family] = {
    stock: Family(
        class_prefixes=(prefix,),
        stock=stock,
        tokenizer=f"{prefix}Tokenizer",
        **COMMON,
        title=title,
        layout=Layout("RoBERTa", (r"(^|\.)roberta\.",)),
    )
    for stock, prefix, title in KINDS
}
