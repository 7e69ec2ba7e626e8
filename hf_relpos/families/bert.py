"""BERT with absolute or relative positions, checkpoints of this package, and copies of BERT.

Stock BERT had `relative_key` and `relative_key_query` up to Transformers 4.57. NEZHA (Wei et al., arXiv
1909.00204) has the layout of Transformers ≤ 4.57 or its original one. ELECTRA (Clark et al., arXiv 2003.10555) has
generators and discriminators. ERNIE (Sun et al., arXiv 1904.09223) is BERT with another prefix; later versions also
have task types.
"""

from .family import ALL, LEGACY_TYPES, Family, Layout, Positions


# Checkpoints of this package, whose configuration names their positions.
OWN = Family(class_prefixes=("RelPosBert",), suffixes=(*ALL, "LMHeadModel"), stock="bert", title="hf_relpos")
FAMILIES: dict[str, Family] = {
    "bert": Family(
        class_prefixes=("Bert",), suffixes=(*ALL, "LMHeadModel"), title="BERT", stock="bert", legacy_types=LEGACY_TYPES
    ),
    "nezha": Family(
        class_prefixes=("Nezha", "Bert"),
        suffixes=ALL,
        title="NEZHA",
        parts=lambda config: {"nezha": "bert"},
        stock="bert",
        defaults={
            "vocab_size": 21128,
            "classifier_dropout": 0.1,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "max_relative_position": 64,
        },
        dropped_fields=("use_relative_position", "max_relative_position"),
        only={
            "add_cross_attention": (
                [False, None],
                "NEZHA has relative terms in cross-attention too, which stays absolute here",
            )
        },
        positions=lambda config: Positions(
            absolute=False, scheme="nezha", options={"max_relative_position": config["max_relative_position"]}
        ),
        computes_positions=True,
        marker="use_relative_position",  # in the original layout
        layout=Layout("NEZHA", (r"(^|\.)nezha\.|\.relative_positions_encoding\.",)),
    ),
    "electra": Family(
        class_prefixes=("Electra",),
        suffixes=("Model", "ForMaskedLM", "ForCausalLM", "ForTokenClassification", "ForQuestionAnswering"),
        title="ELECTRA",
        parts=lambda config: {
            "electra": "bert",
            "embeddings_project": "embeddings.embeddings_project",
            "generator_predictions": "cls.predictions.transform",
            "generator_lm_head.weight": "cls.predictions.decoder.weight",
            "generator_lm_head.bias": "cls.predictions.bias",
        },
        stock="electra",
        legacy_types=LEGACY_TYPES,
        always_gelu=True,
        layout=Layout("ELECTRA", (r"(^|\.)(electra|generator_\w+|discriminator_\w+)\.",)),
    ),
    "ernie": Family(
        class_prefixes=("Ernie",),
        suffixes=(*ALL, "ForCausalLM"),
        title="ERNIE",
        parts=lambda config: {"ernie": "bert"},
        stock="ernie",
        legacy_types=LEGACY_TYPES,
        layout=Layout("ERNIE", (r"(^|\.)(ernie\.|embeddings\.task_type_embeddings\.)",)),
    ),
}
