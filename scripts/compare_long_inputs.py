"""How far does a model that reads long texts at once lie from its source, which reads them in windows?

    python scripts/compare_long_inputs.py SOURCE MODEL --texts novels.txt --length 2048
    python scripts/compare_long_inputs.py SOURCE MODEL --texts novels.txt --set attention_window=256

SOURCE is the checkpoint with absolute positions. It reads each document in windows of its own length, which overlap by
half and all begin with [CLS]; each token is taken from the window in whose middle it is most. MODEL reads the document
at once. Printed is the cosine between the two vectors of a token, mean over the tokens of each quarter of the
documents, without [CLS] and [SEP]. Documents start at equally spaced positions of the text files.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging

from hf_relpos.cli import parse_options
from hf_relpos.data.records import iterate_lines
from hf_relpos.evaluation import windowed_hidden_states


CHARACTERS = 12  # of text for a token, more than enough


def documents(path: Path, tokenizer, count: int, length: int) -> torch.Tensor:
    """Token ids (count, length) with [CLS] and [SEP], from a text file, plain or compressed.

    Raises:
        SystemExit: for a file with too little text.
    """
    text = "\n".join(iterate_lines(path))
    rows = []
    for number in range(count):
        start = len(text) * number // count
        start = text.find("\n", start) + 1 if number else 0
        ids = tokenizer(text[start : start + CHARACTERS * length], truncation=True, max_length=length)["input_ids"]
        if len(ids) < length:
            raise SystemExit(f"{path}: too little text for {count} documents of {length} tokens; ask for fewer")
        rows.append(ids)
    return torch.tensor(rows)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="checkpoint with absolute positions")
    parser.add_argument("model", nargs="+", help="folders to compare with it")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="text files, plain or compressed")
    parser.add_argument("--documents", type=int, default=5, help="from each file")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a document")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the models' configuration"
    )
    args = parser.parse_args()
    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(args.source)
    ids = torch.cat([documents(path, tokenizer, args.documents, args.length) for path in args.texts])
    teacher = AutoModel.from_pretrained(args.source, dtype=torch.float32).eval()
    targets = [windowed_hidden_states(teacher, row.tolist())[1:-1] for row in ids]
    settings = parse_options(args.set)
    for folder in args.model:
        config = AutoConfig.from_pretrained(folder, **settings)
        model = AutoModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        cosines = []
        for row, vectors in zip(ids, targets, strict=True):
            states = model(row[None]).last_hidden_state[0, 1:-1]
            cosines.append(torch.nn.functional.cosine_similarity(states.double(), vectors.double(), dim=-1))
        quarters = [round(float(quarter.mean()), 4) for quarter in torch.stack(cosines).chunk(4, dim=-1)]
        print(json.dumps({"model": folder, **settings, "documents": len(ids), "quarters": quarters}), flush=True)


if __name__ == "__main__":
    main()
