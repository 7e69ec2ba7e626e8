"""BERT with absolute or relative positions, checkpoints of this package, and copies of BERT.

Stock BERT had `relative_key` and `relative_key_query` up to Transformers 4.57. NEZHA (Wei et al., arXiv
1909.00204) has the layout of Transformers ≤ 4.57 or its original one. ELECTRA (Clark et al., arXiv 2003.10555) has
generators and discriminators. ERNIE (Sun et al., arXiv 1904.09223) is BERT with another prefix; later versions also
have task types.
"""

from collections.abc import Mapping
from typing import Any

from .family import ALL, LEGACY_TYPES, SUMMARY, Family, Layout, Positions
from .names import Rule


# Checkpoints of this package, whose configuration names their positions.
OWN = Family(class_prefixes=("RelPosBert",), suffixes=(*ALL, "LMHeadModel"), rules=(), stock="bert", title="hf_relpos")


def _nezha_unsupported_reason(config: Mapping[str, Any]) -> str:
    if not config.get("add_cross_attention"):
        return ""
    return (
        "add_cross_attention = True: NEZHA has relative terms in cross-attention too, which stays absolute here; only "
        "its encoders can be converted"
    )


FAMILIES: dict[str, Family] = {
    "bert": Family(
        class_prefixes=("Bert",),
        suffixes=(*ALL, "LMHeadModel"),
        rules=(),
        stock="bert",
        dropped_fields=("embedding_size",),
        legacy_types=LEGACY_TYPES,
        title="BERT",
    ),
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
    "electra": Family(
        class_prefixes=("Electra",),
        suffixes=("Model", "ForMaskedLM", "ForCausalLM", "ForTokenClassification", "ForQuestionAnswering"),
        rules=(
            Rule("electra.*", "bert.*"),
            Rule("embeddings_project.*", "bert.embeddings_project.*"),
            Rule("bert.embeddings_project.*", "bert.embeddings.embeddings_project.*"),
            Rule("generator_predictions.*", "cls.predictions.transform.*"),
            Rule("generator_lm_head.w*", "cls.predictions.decoder.w*"),
            Rule("generator_lm_head.b*", "cls.predictions.b*"),
        ),
        stock="electra",
        dropped_fields=SUMMARY,
        legacy_types=LEGACY_TYPES,
        always_gelu=True,
        title="ELECTRA",
        layout=Layout("ELECTRA", (r"(^|\.)(electra|generator_\w+|discriminator_\w+)\.",)),
    ),
    "ernie": Family(
        class_prefixes=("Ernie",),
        suffixes=(*ALL, "ForCausalLM"),
        rules=(Rule("ernie.*", "bert.*"),),
        stock="ernie",
        dropped_fields=("use_task_id", "task_type_vocab_size", "embedding_size"),
        legacy_types=LEGACY_TYPES,
        title="ERNIE",
        layout=Layout("ERNIE", (r"(^|\.)(ernie\.|embeddings\.task_type_embeddings\.)",)),
    ),
}
