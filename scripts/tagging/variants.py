"""The variants that scripts/train_ner.py compares, and what is claimed of them."""

from typing import Any


# Name to scheme and options; `{init}` is the standard deviation of the word vectors. Vaswani et al. add a sinusoid of
# amplitude 1 to word vectors of standard deviation 1; both are scaled down here by the same factor.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("t5", {}),  # with its table frozen at zero
    "absolute": ("absolute", {}),
    "sinusoidal": ("sinusoidal", {"amplitude": "{init}"}),
    "shaw": ("shaw", {}),
    "transformer_xl": ("transformer_xl", {}),
    "tener": ("tener", {}),
    "tener-scaled": ("tener", {"scale": True}),
}
LABELS = {
    "none": "`none`: no positions at all",
    "absolute": "`absolute`, learnt",
    "tener": "`tener`, un-scaled",
    "tener-scaled": "`tener`, scaled by 1/√d",
}
# (better, worse, claim): what TENER's paper says, and last what follows from Shaw et al.
CLAIMS = [
    ("tener", "sinusoidal", "TENER tags better than the Transformer with sinusoids at its input"),
    ("tener", "tener-scaled", "scores without 1/√d serve better than with it"),
    ("tener-scaled", "sinusoidal", "direction and distance help even with it"),
    ("transformer_xl", "sinusoidal", "so do the relative positions that TENER starts from"),
    ("shaw", "absolute", "relative positions serve better than learnt absolute ones"),
]
