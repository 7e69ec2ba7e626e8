"""RoBERTa, XLM-RoBERTa and CamemBERT: other names, and position ids that begin after the padding id."""

from .family import LEGACY_TYPES, MOST, Family, Layout


HEADS = {
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions",
    "classifier.dense": "bert.pooler.dense",
    "classifier.out_proj": "classifier",
}


def _family(stock: str, prefix: str, title: str) -> Family:
    return Family(
        class_prefixes=(prefix,),
        suffixes=(*MOST, "ForCausalLM", "ForMultipleChoice"),
        title=title,
        parts=lambda config: {"roberta": "bert", **HEADS},
        stock=stock,
        always_gelu=True,
        legacy_types=LEGACY_TYPES,
        padding=lambda config: config["pad_token_id"],
        tokenizer=f"{prefix}Tokenizer",
        layout=Layout("RoBERTa", (r"(^|\.)roberta\.",)),
    )


FAMILIES: dict[str, Family] = {
    "roberta": _family("roberta", "Roberta", "RoBERTa"),
    "xlm-roberta": _family("xlm-roberta", "XLMRoberta", "XLM-RoBERTa"),
    "camembert": _family("camembert", "Camembert", "CamemBERT"),
}
