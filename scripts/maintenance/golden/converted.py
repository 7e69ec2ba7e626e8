"""A tiny BERT, converted, with options under their old names, and its outputs: tests/fixtures/converted.

Run with the package of commit e2d8e64, the last one with these names: `python converted.py OUT`; config.json,
model.safetensors and outputs.safetensors of OUT are the fixture.
"""

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

import hf_relpos


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(35))]


def main(out: Path) -> None:
    """Write the converted model and what it computes to `out`."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as source:
        Path(source, "vocab.txt").write_text("\n".join(WORDS))
        config = BertConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=32,
        )
        BertForMaskedLM(config).eval().save_pretrained(source)
        BertTokenizer(str(Path(source, "vocab.txt"))).save_pretrained(source)
        hf_relpos.convert(
            source,
            out,
            position_embedding_type="tables",
            position_options={"reach": 12, "beyond": "zero", "dense": 4},
            method="calibrate",
            method_options={"tokens": 3000},
        )
    model = hf_relpos.RelPosBertForMaskedLM.from_pretrained(out).eval()
    ids = torch.randint(5, len(WORDS), (2, 48))
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits
    save_file({"input_ids": ids, "attention_mask": mask, "logits": logits}, out / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
