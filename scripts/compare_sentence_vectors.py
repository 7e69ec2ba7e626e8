"""How far do the sentence vectors of a converted model lie from those of its source?

    python scripts/compare_sentence_vectors.py SOURCE CONVERTED --texts sentences.txt
    python scripts/compare_sentence_vectors.py SOURCE CONVERTED --texts stsb.tsv --columns sentence1 sentence2

A sentence vector is the mean of the last hidden states over the tokens that are not padding. Printed is the cosine
between the two models' vectors of a sentence: mean, smallest, and the sentence it belongs to. The texts are lines, or,
with --columns, fields of a tab-separated file with a header.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import hf_relpos  # noqa: F401  the Auto classes learn relpos_bert


def read_texts(path, columns):
    """The texts of a file, in order, each once."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if columns:
        header = lines[0].split("\t")
        places = [header.index(column) for column in columns]
        texts = [fields[place] for fields in (line.split("\t") for line in lines[1:]) for place in places]
    else:
        texts = lines
    return list(dict.fromkeys(text for text in texts if text.strip()))


@torch.inference_mode()
def sentence_vectors(folder, texts, batch):
    """(texts, D), float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    vectors = []
    for at in range(0, len(texts), batch):
        inputs = tokenizer(
            texts[at : at + batch],
            padding=True,
            truncation=True,
            max_length=model.config.max_position_embeddings,
            return_tensors="pt",
        )
        mask = inputs["attention_mask"][..., None].float()
        vectors.append((model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(vectors)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("converted")
    parser.add_argument("--texts", type=Path, required=True, help="file with one text per line")
    parser.add_argument("--columns", nargs="+", help="columns of a tab-separated file, by their names in its header")
    parser.add_argument("--limit", type=int, help="texts at most, the first ones")
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()

    texts = read_texts(args.texts, args.columns)[: args.limit]
    one, other = (sentence_vectors(folder, texts, args.batch) for folder in (args.source, args.converted))
    cosines = torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1)
    worst = int(cosines.argmin())
    print(
        json.dumps(
            {
                "texts": len(texts),
                "mean": round(float(cosines.mean()), 9),
                "min": round(float(cosines[worst]), 9),
                "text_of_min": texts[worst],
            },
            ensure_ascii=False,
        )
    )


if __name__ == "__main__":
    main()
