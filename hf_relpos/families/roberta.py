"""RoBERTa, XLM-RoBERTa and CamemBERT: other names, and position ids that begin after the padding id."""

from typing import Any

from .family import LEGACY_TYPES, MOST, SPECIAL_TOKENS, Family, Layout
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
# `model_type`, prefix of class names, title, defaults.
KINDS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("roberta", "Roberta", "RoBERTa", {"vocab_size": 50265, **SPECIAL_TOKENS}),
    ("xlm-roberta", "XLMRoberta", "XLM-RoBERTa", SPECIAL_TOKENS),
    ("camembert", "Camembert", "CamemBERT", SPECIAL_TOKENS),
)


FAMILIES: dict[str, Family] = {
    stock: Family(
        class_prefixes=(prefix,),
        stock=stock,
        defaults=defaults,
        tokenizer=f"{prefix}Tokenizer",
        **COMMON,
        title=title,
        layout=Layout("RoBERTa", (r"(^|\.)roberta\.",)),
    )
    for stock, prefix, title, defaults in KINDS
}
