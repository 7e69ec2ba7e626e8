"""GLiNER with and without `hf_relpos.accelerate_attention`: the same entities, with the same scores.

    pip install --no-deps gliner==0.2.29 && pip install sentencepiece
    python scripts/maintenance/check_gliner.py

GLiNER 0.2.29 asks for transformers < 5.17, and so cannot be among the packages that the tests of this repository, made
with a later one, install; without its dependencies it runs. The model is a small random one, and nothing is
downloaded. Compared are single texts, a padded batch, a packed batch (`InferencePackingConfig`: several texts in a row
under a block-diagonal mask), the loss of a training batch and its gradients.
"""

import sys
import tempfile
from pathlib import Path

import gliner
import torch
import transformers
from gliner import GLiNER, GLiNERConfig, InferencePackingConfig
from gliner.data_processing.collator import SpanDataCollator

from hf_relpos import accelerate_attention


TOLERANCE = 1e-5
TEXTS = ["the cat sat on the big house .", "a dog ran .", "the old bird saw the red sun and the sky was blue ."]
LABELS = ["cat", "house", "sky"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({word for text in TEXTS for word in text.split()})]
ENCODER = {
    "model_type": "deberta-v2",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "initializer_range": 0.3,
}


def random_gliner(folder: Path) -> torch.nn.Module:
    """A GLiNER without dropout, on a random DeBERTa-v3 and a tokenizer of a few words."""
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"vocab_size": len(WORDS) + 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = ENCODER | sizes
    transformers.DebertaV2Config(**encoder).save_pretrained(folder)
    torch.manual_seed(0)
    config = GLiNERConfig(
        model_name=str(folder), encoder_config=encoder, hidden_size=64, max_width=3, max_len=64, dropout=0.0
    )
    return GLiNER.from_config(config, backbone_from_pretrained=False)


def entities(model: torch.nn.Module, texts: list[str], **options) -> list[tuple]:
    found = model.inference(texts, LABELS, threshold=0.0, flat_ner=False, **options)
    return sorted((i, e["start"], e["end"], e["label"], e["score"]) for i, row in enumerate(found) for e in row)


def loss_and_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    """The loss of one batch, and the gradients of all parameters."""
    rows = [
        {"tokenized_text": text.split(), "ner": [[1, 1, LABELS[0]], [3, 3, LABELS[1]]], "ner_labels": LABELS}
        for text in TEXTS
    ]
    collator = SpanDataCollator(model.config, data_processor=model.data_processor, prepare_labels=True)
    model.zero_grad()
    loss = model(**collator(rows)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def run(model: torch.nn.Module) -> dict[str, list]:
    model.eval()
    packing = InferencePackingConfig(max_length=64)
    results = {
        "one text": entities(model, TEXTS[:1]),
        "padded batch": entities(model, TEXTS, batch_size=3),
        "packed batch": entities(model, TEXTS, batch_size=3, packing_config=packing),
    }
    return results | {"loss and gradients": loss_and_gradients(model)}


def difference(ours: list, theirs: list) -> float:
    """Largest difference of a score, or of a number of a tensor as a share of the largest of all tensors.

    Raises:
        SystemExit: when the entities are not the same.
    """
    if isinstance(ours[0], torch.Tensor):
        largest = max(float(tensor.abs().max()) for tensor in theirs)
        return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest
    if [row[:4] for row in ours] != [row[:4] for row in theirs]:
        raise SystemExit("the entities differ")
    return max(abs(a[4] - b[4]) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = random_gliner(Path(folder))
    before = run(model)
    handle = accelerate_attention(model)
    print(f"gliner {gliner.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    print(handle)
    if not handle.accelerated:
        sys.exit("nothing was accelerated")
    after = run(model)
    worst = 0.0
    for name, results in before.items():
        found = difference(after[name], results)
        worst = max(worst, found)
        print(f"{name}: {len(results)} results, largest difference {found:.1e}")
    handle.undo()
    if run(model)["padded batch"] != before["padded batch"]:
        sys.exit("undone, the model gives other numbers than before")
    if not worst <= TOLERANCE:
        sys.exit(f"a difference is above {TOLERANCE}")


if __name__ == "__main__":
    main()
