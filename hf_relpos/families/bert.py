"""BERT, as it is and with `relative_key` or `relative_key_query`; and what this package writes itself."""

from .family import ALL, Family, copy_of_bert


# This package's own, whose positions are what its configuration says.
OWN = Family(
    class_prefixes=("RelPosBert",),
    suffixes=(*ALL, "LMHeadModel"),
    rules=(),
    stock="bert",
    title="hf_relpos",
    legacy_types=(),
)


FAMILIES: dict[str, Family] = {
    "bert": Family(
        class_prefixes=("Bert",),
        suffixes=(*ALL, "LMHeadModel"),
        rules=(),
        stock="bert",
        dropped_fields=("embedding_size",),
        title="BERT",
        live=copy_of_bert("BERT", "bert", "Bert"),
    ),
}
