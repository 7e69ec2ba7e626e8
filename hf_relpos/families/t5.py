"""T5 and mT5 (Raffel et al., arXiv 1910.10683): only encoders of live models; checkpoints are not read."""

from .family import LONG_INPUTS, LiveFamily


LIVE = tuple(
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
