"""ELECTRA (Clark et al., arXiv 2003.10555), generators and discriminators."""

from .family import LEGACY_TYPES, SUMMARY, Family, Layout, copy_of_bert
from .names import Rule


FAMILIES: dict[str, Family] = {
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
        defaults={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "embedding_size": 128},
        dropped_fields=SUMMARY,
        legacy_types=LEGACY_TYPES,
        always_gelu=True,
        title="ELECTRA",
        live=copy_of_bert("ELECTRA", "electra", "Electra"),
        layout=Layout("ELECTRA", (r"(^|\.)(electra|generator_\w+|discriminator_\w+)\.",)),
    ),
}
