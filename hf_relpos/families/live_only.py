"""Encoders of Transformers that are accelerated in live models only: rotary ones, UMT5, T5 and mT5 (arXiv 1910.10683).

All but T5 and mT5 are unpadded, and otherwise stay as they are.
"""

from .family import LONG_INPUTS, LiveFamily


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
T5 = tuple(
    LiveFamily(
        name=f"{name} encoder",
        stock=f"transformers.models.{name.lower()}.modeling_{name.lower()}",
        container=f"{name.upper()}Stack",
        attention=f"{name.upper()}Attention",
        code="t5",
        classes={f"{name.upper()}{part}": f"Accelerated{name.upper()}{part}" for part in ("Attention", "Stack")},
        unpadding={f"{name.upper()}Stack": f"Unpadding{name.upper()}Stack"},
        effect=LONG_INPUTS,
    )
    for name in ("T5", "mT5")
)
LIVE = T5 + tuple(
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
