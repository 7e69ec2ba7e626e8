"""BERT with absolute positions, `relative_key` or `relative_key_query`, and checkpoints of this package."""

from .family import ALL, LEGACY_TYPES, Family, copy_of_bert


# Checkpoints of this package, whose configuration names their positions.
OWN = Family(
    class_prefixes=("RelPosBert",),
    suffixes=(*ALL, "LMHeadModel"),
    rules=(),
    stock="bert",
    title="hf_relpos",
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
        live=copy_of_bert("BERT", "bert", "Bert"),
    ),
}
