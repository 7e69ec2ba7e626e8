"""Rotary encoders of Transformers whose live models are unpadded: ModernBERT, NomicBERT, GTE, EuroBERT and Jina v3."""

from .family import LiveFamily


# Names in messages, and the prefix of the classes, by the module of Transformers.
NAMES = {
    "modernbert": ("ModernBERT", "ModernBert"),
    "nomic_bert": ("NomicBERT", "NomicBert"),
    "gte": ("GTE", "Gte"),
    "eurobert": ("EuroBERT", "EuroBert"),
    "jina_embeddings_v3": ("Jina embeddings v3", "JinaEmbeddingsV3"),
}
LIVE = tuple(
    LiveFamily(
        name=name,
        stock=f"transformers.models.{module}.modeling_{module}",
        container=f"{prefix}Model",
        attention=f"{prefix}Attention",
        code="rotary",
        unpadding={f"{prefix}{part}": f"Unpadding{prefix}{part}" for part in ("Model", "Attention")},
    )
    for module, (name, prefix) in NAMES.items()
)
