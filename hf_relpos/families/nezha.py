"""NEZHA (Wei et al., arXiv 1909.00204), in the layout of Transformers ≤ 4.57 and in the original one."""

from collections.abc import Mapping
from typing import Any

from .family import ALL, Family, Layout, Positions
from .names import Rule


def _nezha_unsupported_reason(config: Mapping[str, Any]) -> str:
    if not config.get("add_cross_attention"):
        return ""
    return (
        "add_cross_attention = True: NEZHA has relative terms in cross-attention too, which stays absolute here; only "
        "its encoders can be converted"
    )


FAMILIES: dict[str, Family] = {
    "nezha": Family(
        class_prefixes=("Nezha", "Bert"),
        suffixes=ALL,
        rules=(Rule("nezha.*", "bert.*"),),
        stock="bert",
        defaults={
            "vocab_size": 21128,
            "classifier_dropout": 0.1,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "max_relative_position": 64,
        },
        dropped_fields=("use_relative_position", "max_relative_position", "embedding_size"),
        positions=lambda config: Positions(
            absolute=False, scheme="nezha", options={"max_relative_position": config["max_relative_position"]}
        ),
        marker="use_relative_position",  # in the original layout
        unsupported_reason=_nezha_unsupported_reason,
        title="NEZHA",
        layout=Layout("NEZHA", (r"(^|\.)nezha\.|\.relative_positions_encoding\.",)),
    ),
}
