"""Encoders of Transformers whose live models are unpadded and otherwise stay as they are: rotary ones, and UMT5."""

from .family import LiveFamily


# Module of Transformers, name in messages, classes of the model around the layers and of their attention.
CLASSES = (
    ("modernbert", "ModernBERT", "ModernBertModel", "ModernBertAttention"),
    ("nomic_bert", "NomicBERT", "NomicBertModel", "NomicBertAttention"),
    ("gte", "GTE", "GteModel", "GteAttention"),
    ("eurobert", "EuroBERT", "EuroBertModel", "EuroBertAttention"),
    ("jina_embeddings_v3", "Jina embeddings v3", "JinaEmbeddingsV3Model", "JinaEmbeddingsV3Attention"),
    ("esm", "ESM-2", "EsmEncoder", "EsmSelfAttention"),
    ("umt5", "UMT5 encoder", "UMT5Stack", "UMT5Attention"),
)
LIVE = tuple(
    LiveFamily(
        name=name,
        stock=f"transformers.models.{module}.modeling_{module}",
        container=container,
        attention=attention,
        code="rotary",
        unpadding={stock: f"Unpadding{stock}" for stock in (container, attention)},
    )
    for module, name, container, attention in CLASSES
)
