"""Meetings found by what was said in them: by windows of a sentence encoder, and by one vector of its conversion.

    hf-relpos convert all-MiniLM-L6-v2 long --texts novels.txt.xz --texts wikidocs.docs.jsonl.xz \\
        --method-options length=2048
    python scripts/benchmarks/bench_documents.py --source all-MiniLM-L6-v2 --converted long --data QMSum

`--data` is a clone of QMSum (Zhong et al. 2021, github.com/Yale-LILY/QMSum). As in LongEmbed (Zhu et al. 2024,
arXiv 2404.12096) the documents are the transcripts of its parts train and val, each turn after its speaker, and the
queries are the summaries, each once, of which the meeting has to be found: 1,527 queries, 197 documents of 10,058
words. Nothing is trained. Beside them: BM25, as in bench_passkeys.py; without `--converted` only that is measured.
Writes OUT/documents.json and .md.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_passkeys import CHUNK, PASSAGE, Windows, by_words, question_vectors, read, row_of, vectors
from shared.arguments import RESULTS, positive_int
from shared.measuring import environment
from shared.process import start_quietly
from shared.reports import Table, machine_and_versions, markdown_sections, print_tables, stored, write_report
from torch import nn

from hf_relpos import optimize
from hf_relpos.evaluation import Encoder, load_encoder


Way = tuple[str, torch.Tensor, float, float]  # name, scores (Q, documents), vectors and CPU seconds of a document
PARTS = ("train", "val")
DRAWS = 2000  # of the bootstrap
LONGEMBED = "https://github.com/dwzhu-pku/LongEmbed/tree/main/results"
MTEB = "https://github.com/embeddings-benchmark/results/tree/main/results"
PUBLISHED = {  # nDCG@10 of `LEMBQMSumRetrieval`, and the folder of the results
    "all-MiniLM-L6-v2, first 256 tokens": (0.163, f"{MTEB}/sentence-transformers__all-MiniLM-L6-v2"),
    "bge-base-en-v1.5, first 512 tokens": (0.224, f"{LONGEMBED}/bge-base-en-v1.5"),
    "e5-base-v2, first 512 tokens": (0.238, f"{LONGEMBED}/e5-base-v2"),
    "e5-base-4k, first 4,096 tokens": (0.356, f"{LONGEMBED}/e5-base-4k-ipt_interpolate"),
}


def read_meetings(folder: Path) -> tuple[list[str], list[str], torch.Tensor]:
    """Transcripts; summaries; and the index of the transcript of each summary."""
    texts: list[str] = []
    queries: dict[str, int] = {}
    for path in itertools.chain.from_iterable(sorted((folder / "data/ALL" / part).glob("*.json")) for part in PARTS):
        meeting = json.loads(path.read_text(encoding="utf-8"))
        for asked in [*meeting["general_query_list"], *meeting["specific_query_list"]]:
            queries.setdefault(asked["answer"].strip(), len(texts))
        texts.append("\n".join(f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"]))
    return texts, list(queries), torch.tensor(list(queries.values()))


def gains(scores: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """nDCG@10 of each query, (Q,), from scores (Q, documents) and its own document (Q,). Ties count as lost."""
    ranks = (scores >= scores.gather(1, own[:, None])).sum(1)
    return torch.where(ranks <= 10, 1 / (1 + ranks.double()).log2(), 0.0)


def mean_and_interval(values: torch.Tensor, own: torch.Tensor, documents: int) -> tuple[float, list[float]]:
    """The mean of values of queries, and its 95 % interval by resampling documents, whose queries are alike."""
    chosen = torch.randint(documents, (DRAWS, documents), generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(DRAWS, documents, dtype=torch.double).scatter_add_(
        1, chosen, torch.ones_like(chosen).double()
    )
    means = (counts[:, own] @ values) / counts[:, own].sum(1)
    return round(float(values.mean()), 4), [round(float(means.quantile(share)), 4) for share in (0.025, 0.975)]


def timed(
    read_one: Callable[[list[int]], torch.Tensor], bodies: Sequence[list[int]]
) -> tuple[list[torch.Tensor], float]:
    """What is read of each document, and CPU seconds of a document."""
    began = time.process_time()
    found = [read_one(body) for body in bodies]
    return found, (time.process_time() - began) / len(bodies)


def best_and_mean(asked: torch.Tensor, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Scores (Q, documents) by the best of each document's vectors, and by their mean."""
    means = nn.functional.normalize(torch.stack([own.mean(0) for own in parts]), dim=-1)
    return {"best": torch.stack([(asked @ own.T).amax(1) for own in parts], 1), "mean": asked @ means.T}


def by_windows(source: Encoder, bodies: Sequence[list[int]], queries: list[str], size: int) -> Iterator[Way]:
    """Documents in windows of so many tokens."""
    found, seconds = timed(lambda body: Windows(source).of(body, size, size - 2), bodies)
    asked, by_cls = question_vectors(source, queries)
    count = sum(map(len, found)) / len(found)
    first = torch.stack([own[0, 0] for own in found])
    yield f"source, first {size} tokens", asked @ first.T, 1, seconds / count
    for state, question, name in ((0, asked, ""), (1, by_cls, ", by [CLS]")):
        for kind, scores in best_and_mean(question, [own[:, state] for own in found]).items():
            yield f"source, {kind} of windows of {size}{name}", scores, count if kind == "best" else 1, seconds


def by_conversion(converted: Encoder, bodies: Sequence[list[int]], queries: list[str]) -> Iterator[Way]:
    """Documents that the converted model reads as a whole."""
    asked, by_cls = question_vectors(converted, queries)
    cls, sep = converted.tokenizer.cls_token_id, converted.tokenizer.sep_token_id

    def whole(body: list[int]) -> torch.Tensor:
        (states,) = read(converted, [row_of(converted.tokenizer, body)])
        passages = [part.mean(0) for part in states[1:-1].split(PASSAGE)]
        return torch.cat([vectors(converted, states)[:1], nn.functional.normalize(torch.stack(passages), dim=-1)])

    def marked(body: list[int]) -> torch.Tensor:
        chunks = [[cls, *body[start : start + CHUNK]] for start in range(0, len(body), CHUNK)]
        (states,) = read(converted, [[*itertools.chain(*chunks), sep]])
        return states[: -1 : CHUNK + 1]

    found, seconds = timed(whole, bodies)
    yield "converted, one vector", asked @ torch.stack([own[0] for own in found]).T, 1, seconds
    passages = [own[1:] for own in found]
    count = sum(map(len, passages)) / len(passages)
    late = f"converted, best passage of {PASSAGE} tokens (late chunking)"
    yield late, best_and_mean(asked, passages)["best"], count, seconds
    found, seconds = timed(marked, bodies)
    yield f"converted, mean of [CLS] each {CHUNK} tokens", best_and_mean(by_cls, found)["mean"], 1, seconds


def tables(content: dict[str, Any]) -> list[Table]:
    """What was measured, and what was published."""
    lines = []
    for name, row in content["rows"].items():
        low, high = row["interval"]
        cells = [f"{row['ndcg']:.3f} ({low:.3f}–{high:.3f})", "–"]
        if name != content["best"]:
            low, high = row["less_interval"]
            cells[1] = f"{row['less']:+.3f} ({low:+.3f} … {high:+.3f})"
        lines.append([name, *cells, f"{row['vectors']:.0f}", f"{row['seconds']:.2f}"])
    columns = ["", "nDCG@10 (95 % interval)", "less the best", "vectors a document", "CPU s a document"]
    beside = content["beside"]
    others = [[name, "{:.3f} ({:.3f}–{:.3f})".format(row["ndcg"], *row["interval"])] for name, row in beside.items()]
    published = [[f"[{name}]({folder})", f"{score:.3f}"] for name, (score, folder) in PUBLISHED.items()]
    made = [("Measured", columns, lines), ("Other than by vectors", columns[:2], others)]
    return [*made, ("Published", ["", "nDCG@10"], published)]


TEXT = """\
# Meetings found by their summaries

**{verdict}** BM25, without a model: nDCG@10 {bm25:.3f}. Best by vectors: "{best}", {best_score:.3f} with
{best_vectors:.0f} vectors a document. Best with one vector a document: "{one}", {one_score:.3f}.

QMSum as in LongEmbed (arXiv 2404.12096): {documents} transcripts of {tokens:,} tokens on average, to be found by
{queries:,} summaries of parts of them. The source is {source}. Nothing was trained for it.

{machine}

`{command}`

BM25: {beside_machine}

`{beside_command}`

Intervals are those of {draws:,} resamples of the documents. CPU seconds are of one thread, with `hf_relpos.optimize`.
"""


def card(content: dict[str, Any]) -> str:
    """documents.md."""
    rows, best, about = content["rows"], content["best"], content["environment"]
    one = max((name for name in rows if rows[name]["vectors"] == 1), key=lambda name: rows[name]["ndcg"])
    verdict = "Windows beat one vector." if best.startswith("source") else "The converted model beats windows."
    if not any(name.startswith("converted") for name in rows):
        verdict = "Of vectors, only windows of the source were measured."
    scores = {"best_score": rows[best]["ndcg"], "best_vectors": rows[best]["vectors"], "one_score": rows[one]["ndcg"]}
    where = {"machine": machine_and_versions(about), "command": about["command"], "draws": DRAWS}
    later = content["beside_environment"]
    where |= {"beside_machine": machine_and_versions(later), "beside_command": later["command"]}
    scores["bm25"] = content["beside"]["BM25"]["ndcg"]
    return TEXT.format(**content, **scores, **where, one=one, verdict=verdict) + markdown_sections(tables(content))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, help="sentence encoder with absolute positions")
    parser.add_argument("--converted", help="its conversion; without it the other rows of OUT stay")
    parser.add_argument("--data", required=True, type=Path, help="a clone of QMSum")
    parser.add_argument("--windows", type=positive_int, nargs="+", default=(512, 256), help="tokens of windows")
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks")
    args = parser.parse_args(arguments)
    start_quietly(args.threads)
    encoders = [load_encoder(each) for each in (args.source, args.converted) if each]
    source, about = encoders[0], environment()
    for encoder in encoders:
        optimize(encoder.model)
    texts, queries, own = read_meetings(args.data)
    if not texts:
        parser.error(f"--data {args.data}: there are no meetings in its data/ALL/train and val; give a clone of QMSum")
    bodies = source.tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    content: dict[str, Any] = stored(args.out / "documents")
    if args.converted:
        content = {"source": Path(args.source).name, "documents": len(texts), "queries": len(queries)}
        content |= {"tokens": sum(map(len, bodies)) // len(bodies), "rows": {}, "environment": about}
    elif not content:
        parser.error(f"--out {args.out}: there are no results to add to; give --converted")
    content |= {"beside": {}, "beside_environment": about}
    ndcg, interval = mean_and_interval(gains(by_words(source, bodies, queries), own), own, len(texts))
    content["beside"]["BM25"] = {"ndcg": ndcg, "interval": interval}
    ways: Iterator[Way] = iter(())
    if args.converted:
        windows = itertools.chain.from_iterable(by_windows(source, bodies, queries, size) for size in args.windows)
        ways = itertools.chain(windows, by_conversion(encoders[1], bodies, queries))
    values: dict[str, torch.Tensor] = {}
    for name, scores, count, seconds in ways:
        values[name] = gains(scores, own)
        content["rows"][name] = {"vectors": round(count, 1), "seconds": round(seconds, 3)}
        content["best"] = best = max(values, key=lambda way: float(values[way].mean()))
        for way, row in content["rows"].items():
            row["ndcg"], row["interval"] = mean_and_interval(values[way], own, len(texts))
            row["less"], row["less_interval"] = mean_and_interval(values[way] - values[best], own, len(texts))
        print(name, content["rows"][name]["ndcg"], flush=True)
    write_report(args.out / "documents", content, card(content))
    print_tables(tables(content))


if __name__ == "__main__":
    main()
