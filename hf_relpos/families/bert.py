"""BERT, as it is and with `relative_key` or `relative_key_query`; and what this package writes itself."""

from .family import ALL, Family


# This package's own, whose positions are what its configuration says.
OWN = Family(
    stems=("RelPosBert",), suffixes=(*ALL, "LMHeadModel"), rules=(), stock="bert", title="hf_relpos", legacy_types=()
)


FAMILIES: dict[str, Family] = {
    "bert": Family(
        stems=("Bert",),
        suffixes=(*ALL, "LMHeadModel"),
        rules=(),
        stock="bert",
        not_kept=("embedding_size",),
        title="BERT",
    ),
}
