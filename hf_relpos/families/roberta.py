"""RoBERTa, XLM-RoBERTa and CamemBERT: other names, and position ids that begin after the padding id."""

from typing import Any

from .family import LEGACY_TYPES, MOST, Family, Layout


HEADS = {
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions",
    "classifier.dense": "bert.pooler.dense",
    "classifier.out_proj": "classifier",
}


class Roberta(Family, name="roberta"):
    """RoBERTa."""

    class_prefixes = ("Roberta",)
    suffixes = (*MOST, "ForCausalLM", "ForMultipleChoice")
    title = "RoBERTa"
    parts = {"roberta": "bert", **HEADS}
    always_gelu = True
    legacy_types = LEGACY_TYPES
    layout = Layout("RoBERTa", (r"(^|\.)roberta\.",))

    def padding(self) -> Any:
        """`pad_token_id`."""
        return self.config["pad_token_id"]


class XLMRoberta(Roberta, name="xlm-roberta"):
    """XLM-RoBERTa."""

    class_prefixes = ("XLMRoberta",)
    title = "XLM-RoBERTa"
    stock = "xlm-roberta"


class Camembert(Roberta, name="camembert"):
    """CamemBERT."""

    class_prefixes = ("Camembert",)
    title = "CamemBERT"
    stock = "camembert"
