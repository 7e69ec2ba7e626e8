"""ERNIE (Sun et al., arXiv 1904.09223): BERT with another prefix; later versions also have task types."""

from .family import ALL, LEGACY_TYPES, Family, Layout, copy_of_bert
from .names import Rule


FAMILIES: dict[str, Family] = {
    "ernie": Family(
        class_prefixes=("Ernie",),
        suffixes=(*ALL, "ForCausalLM"),
        rules=(Rule("ernie.*", "bert.*"),),
        stock="ernie",
        defaults={"task_type_vocab_size": 3},
        dropped_fields=("use_task_id", "task_type_vocab_size", "embedding_size"),
        legacy_types=LEGACY_TYPES,
        title="ERNIE",
        live=copy_of_bert("ERNIE", "ernie", "Ernie"),
        layout=Layout("ERNIE", (r"(^|\.)(ernie\.|embeddings\.task_type_embeddings\.)",)),
    ),
}
