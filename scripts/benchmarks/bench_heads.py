"""Retrieval models of sentence-transformers on the CPU, called as their users call them, before and after `optimize`.

    python scripts/benchmarks/bench_heads.py --tokenizer all-MiniLM-L6-v2 --data squad.dev.json.xz   # 6 minutes

A bi-encoder, SPLADE, ColBERT and a reranker around a BERT of six layers of base size with random weights, in one
thread. Questions are the queries and paragraphs the documents of SQuAD. Written to docs/results/benchmarks/heads.json
and .md.
"""

import argparse
import copy
import json
import lzma
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from shared.arguments import benchmark_parser, positive_int
from shared.measuring import environment, time_in_turns
from shared.process import start_quietly
from shared.reports import Table, describe, markdown_sections, print_tables, write_report


STOCK, OURS = "sentence-transformers", "optimize"
PROTOCOL = "CPU seconds of one thread; median of rounds in turns, after one to warm up"
INTRODUCTION = """# Retrieval models on the CPU, before and after `optimize`

Each is called as its users call it, with the batches that sentence-transformers makes: texts sorted by length, 32 to a
batch. "One padded batch" holds all questions and eight paragraphs, as a server would call a model. The BERT inside has
six layers of base size and random weights. {texts} questions and as many paragraphs are from SQuAD.

`error` is the largest difference of the outputs, as a share of the largest.
"""


def questions_and_paragraphs(data: Path, count: int) -> tuple[list[str], list[str]]:
    """Questions and paragraphs, as many of each."""
    with lzma.open(data, "rt", encoding="utf-8") as file:
        articles = json.load(file)["data"]
    paragraphs = [each for article in articles for each in article["paragraphs"] if each["qas"]]
    chosen = paragraphs[:: len(paragraphs) // count][:count]
    return [each["qas"][0]["question"] for each in chosen], [each["context"] for each in chosen]


def folder_of(head: str, tokenizer: str, folder: Path) -> str:
    """A checkpoint with random weights."""
    import transformers

    torch.manual_seed(0)
    words = transformers.AutoTokenizer.from_pretrained(tokenizer)
    words.model_max_length = 512
    words.save_pretrained(folder)
    config = transformers.BertConfig(vocab_size=len(words), num_hidden_layers=6, num_labels=1)
    getattr(transformers, head)(config).save_pretrained(folder)
    return str(folder)


def cases(tokenizer: str, data: Path, count: int) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Name, model and call of each case."""
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

    queries, documents = questions_and_paragraphs(data, count)

    def ranked(model: Any) -> torch.Tensor:
        found = model.rank(queries[0], documents, show_progress_bar=False)
        return torch.tensor([each["score"] for each in sorted(found, key=lambda each: each["corpus_id"])])

    def at_once(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(model.preprocess([*queries, *documents[:8]]))["sentence_embedding"]

    def encoded(method: str, texts: list[str]) -> Callable[[Any], Any]:
        return lambda model: getattr(model, method)(texts, show_progress_bar=False)

    of_documents = encoded("encode_document", documents)
    made = (
        ("SentenceTransformer.encode, documents", SentenceTransformer, "BertModel", encoded("encode", documents)),
        ("SparseEncoder (SPLADE), documents", SparseEncoder, "BertForMaskedLM", of_documents),
        ("SparseEncoder (SPLADE), one padded batch", SparseEncoder, "BertForMaskedLM", at_once),
        ("MultiVectorEncoder (ColBERT), queries", MultiVectorEncoder, "BertModel", encoded("encode_query", queries)),
        ("MultiVectorEncoder (ColBERT), documents", MultiVectorEncoder, "BertModel", of_documents),
        ("CrossEncoder.rank, a query with documents", CrossEncoder, "BertForSequenceClassification", ranked),
    )
    for name, kind, head, call in made:
        with tempfile.TemporaryDirectory() as folder:
            model = kind(folder_of(head, tokenizer, Path(folder)), device="cpu")
        yield name, model, call


def flat(outputs: Any) -> torch.Tensor:
    """Vectors, sparse or a list of them, as one tensor."""
    if isinstance(outputs, list):
        return torch.cat([torch.as_tensor(each).flatten() for each in outputs])
    found = torch.as_tensor(outputs)
    return found.to_dense() if found.is_sparse else found


def measured(model: Any, call: Callable[[Any], Any], rounds: int) -> dict[str, Any]:
    """Seconds of a call before and after `optimize`, in turns, and the largest difference of its outputs.

    A copy is optimized, once: to optimize and undo one model in each turn takes longer than some calls.
    """
    import hf_relpos

    ours = copy.deepcopy(model)
    hf_relpos.optimize(ours)
    expected, outputs = flat(call(model)), flat(call(ours))
    error = float((outputs - expected).abs().max() / expected.abs().max())
    return {"seconds": time_in_turns({STOCK: lambda: call(model), OURS: lambda: call(ours)}, rounds), "error": error}


def tables_of(results: dict) -> list[Table]:
    rows = [
        [name, *(f"{each['seconds'][which]:.1f}" for which in (STOCK, OURS)), times, f"{each['error']:.0e}"]
        for name, each in results["cases"].items()
        for times in [f"{each['seconds'][STOCK] / each['seconds'][OURS]:.2f}"]
    ]
    return [("Seconds of a call", ["", STOCK, OURS, "times as fast", "error"], rows)]


def card(results: dict) -> str:
    """heads.md."""
    text = INTRODUCTION.format(texts=results["texts"])
    return f"{text}\n{describe(results['environment'])}{markdown_sections(tables_of(results))}"


def main() -> None:
    parser: argparse.ArgumentParser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="all-MiniLM-L6-v2", help="folder with the tokenizer of a BERT")
    parser.add_argument("--data", type=Path, default=Path("squad.dev.json.xz"), help="SQuAD's file, packed by xz")
    parser.add_argument("--texts", type=positive_int, default=128, help="number of questions, and of paragraphs")
    args = parser.parse_args()
    start_quietly(threads=1)
    results: dict[str, Any] = {"environment": {**environment(), "protocol": PROTOCOL}, "texts": args.texts}
    made = cases(args.tokenizer, args.data, args.texts)
    results["cases"] = {name: measured(model, call, args.rounds) for name, model, call in made}
    write_report(args.out / "heads", results, card(results))
    print_tables(tables_of(results))


if __name__ == "__main__":
    main()
