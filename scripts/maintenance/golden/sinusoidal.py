"""Fixture of sinusoids at the input: DistilBERT's (interleaved) and Transformer-XL's (concatenated).

Original: transformers 4.57.6, models/distilbert/modeling_distilbert.py (create_sinusoidal_embeddings) and
models/deprecated/transfo_xl/modeling_transfo_xl.py (PositionalEmbedding). Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/sinusoidal.py

sinusoidal.safetensors, D = 24:
    positions               (P,), 0 … P − 1
    interleaved, concat     (P, D)
"""

import torch
from originals import check_transformers, write
from transformers.models.deprecated.transfo_xl.modeling_transfo_xl import PositionalEmbedding
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings


LENGTH, WIDTH = 40, 24


def main() -> None:
    check_transformers()
    positions = torch.arange(LENGTH)
    interleaved = torch.empty(LENGTH, WIDTH)
    create_sinusoidal_embeddings(LENGTH, WIDTH, interleaved)
    concat = PositionalEmbedding(WIDTH)(positions.float())[:, 0]
    write("sinusoidal", {"positions": positions, "interleaved": interleaved, "concat": concat}, hidden_size=WIDTH)


if __name__ == "__main__":
    main()
