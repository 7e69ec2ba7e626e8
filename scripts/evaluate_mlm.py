"""How well does a masked language model predict held-out text, and how much of that does it owe to word order?

    python scripts/evaluate_mlm.py --model hf_relpos/demo/bert --text hf_relpos/demo/text/eval.txt.xz
    python scripts/evaluate_mlm.py --model hf_relpos/demo/bert --data DATA --out results.json

The text is cut into windows `[CLS] ... [SEP]` as long as the model reads; 15 % of the tokens of each are replaced by
[MASK] and are to be predicted, the same tokens from the same other tokens in each of

    ordered            the text as it is
    shuffled           the tokens of each window, masked ones included, in random order
    positions_zero     the text as it is, every position id 0
    positions_random   the text as it is, the position ids between [CLS] and [SEP] in random order

and `unigram` is the share of the most frequent token among those to be predicted. In a BERT with absolute positions
`shuffled` and `positions_random` measure the same, in two different random orders.
`--data` is the folder that scripts/pretrain.py reads; its held-out novels and PEPs are used.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_relpos.data.masking import IGNORE_INDEX
from hf_relpos.data.records import read_lines
from hf_relpos.evaluation import masked_accuracy, masked_windows, random_orders
from hf_relpos.files import write_json


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    paragraphs: Sequence[str],
    length: int,
    limit: int,
    seed: int,
) -> dict[str, Any]:
    """The figures of one text."""
    rng = np.random.default_rng(seed)
    inputs, labels = masked_windows(tokenizer, paragraphs, length, limit, rng)
    order, positions = random_orders(*inputs.shape, rng), random_orders(*inputs.shape, rng)
    targets = labels[labels != IGNORE_INDEX]
    return {
        "windows": len(inputs),
        "masked_tokens": len(targets),
        "ordered": masked_accuracy(model, inputs, labels),
        "shuffled": masked_accuracy(model, inputs.gather(1, order), labels.gather(1, order)),
        "positions_zero": masked_accuracy(model, inputs, labels, torch.zeros_like(inputs)),
        "positions_random": masked_accuracy(model, inputs, labels, positions),
        "unigram": {"accuracy": round(100 * targets.bincount().max().item() / len(targets), 2)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="text files, one paragraph per line")
    parser.add_argument("--data", type=Path, help="folder with the pre-training data, for its held-out part")
    parser.add_argument("--length", type=int, help="tokens per window (default: what the model reads)")
    parser.add_argument("--limit", type=int, default=1000, help="windows per text at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    args = parser.parse_args()

    texts = {}
    for path in args.text:
        texts[path.name] = read_lines(path)
    if args.data:
        from pretrain import split

        _, novels, peps = split(args.data)
        texts.update({f"{author}, {title}": novel for (author, title), novel in sorted(novels.items())})
        texts["PEPs"] = peps

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForMaskedLM.from_pretrained(args.model).to(args.device).eval()
    length = args.length or model.config.max_position_embeddings
    results = {}
    for name, paragraphs in texts.items():
        results[name] = evaluate(model, tokenizer, paragraphs, length, args.limit, args.seed)
        print(name, json.dumps(results[name]), flush=True)
    if args.out:
        write_json(args.out, results)


if __name__ == "__main__":
    main()
