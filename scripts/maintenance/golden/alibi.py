"""Fixture of ALiBi: slopes, and the additive mask of a causal layer, from the authors' fork of fairseq.

Original: github.com/ofirpress/attention_with_linear_biases, commit 4b92f28a005ead2567abe2359f633e73e08f3833,
fairseq/models/transformer.py (TransformerDecoder). Environment: Python 3.11, torch 2.13.0.

    python scripts/maintenance/golden/alibi.py --repo PATH

alibi.safetensors:
    slopes.<H>    (H,), H = 1 … 16
    mask.<H>      (H, L, L), L = 9, H = 4 and 12: −inf above the diagonal, m_h · j elsewhere
"""

import argparse
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from originals import find, run, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    source = parser.parse_args().repo / "fairseq" / "models" / "transformer.py"
    fill = SimpleNamespace(fill_with_neg_inf=lambda tensor: tensor.fill_(-math.inf))  # fairseq.utils, of the same name
    names = {"math": math, "torch": torch, "utils": fill}
    body = find(source, "TransformerDecoder.__init__").body
    first = next(i for i, node in enumerate(body) if getattr(node, "name", None) == "get_slopes")
    run(source, [find(source, "TransformerDecoder.buffered_future_mask")], names)
    tensors = {}
    for heads in range(1, 17):
        length = 9
        args = SimpleNamespace(tokens_per_sample=length, max_tokens=length, decoder_attention_heads=heads)
        decoder = SimpleNamespace(args=args, _future_mask=torch.empty(0))
        run(source, body[first:], names | {"self": decoder, "args": args})
        tensors[f"slopes.{heads}"] = decoder.slopes
        if heads in (4, 12):
            hidden = torch.zeros(1, length, 8)
            tensors[f"mask.{heads}"] = names["buffered_future_mask"](decoder, hidden)
    write("alibi", tensors, length=9)


if __name__ == "__main__":
    main()
