"""RoBERTa, XLM-RoBERTa and CamemBERT: other names, and position ids that begin after the padding id."""

from typing import Any

from .family import LEGACY_TYPES, MOST, SPECIAL_TOKENS, Family, Layout, copy_of_bert
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
LAYOUT = Layout("RoBERTa", (r"(^|\.)roberta\.",))


FAMILIES: dict[str, Family] = {
    "roberta": Family(
        class_prefixes=("Roberta",),
        stock="roberta",
        defaults={"vocab_size": 50265, **SPECIAL_TOKENS},
        tokenizer="RobertaTokenizer",
        **COMMON,
        title="RoBERTa",
        live=copy_of_bert("RoBERTa", "roberta", "Roberta"),
        layout=LAYOUT,
    ),
    "xlm-roberta": Family(
        class_prefixes=("XLMRoberta",),
        stock="xlm-roberta",
        defaults=SPECIAL_TOKENS,
        tokenizer="XLMRobertaTokenizer",
        **COMMON,
        title="XLM-RoBERTa",
        live=copy_of_bert("XLM-RoBERTa", "xlm_roberta", "XLMRoberta"),
        layout=LAYOUT,
    ),
    "camembert": Family(
        class_prefixes=("Camembert",),
        stock="camembert",
        defaults=SPECIAL_TOKENS,
        tokenizer="CamembertTokenizer",
        **COMMON,
        title="CamemBERT",
        live=copy_of_bert("CamemBERT", "camembert", "Camembert"),
        layout=LAYOUT,
    ),
}
