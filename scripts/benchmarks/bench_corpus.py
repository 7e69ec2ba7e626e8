"""Encode a corpus on the CPU: run_encode.py of the examples beside sentence-transformers; memory of its workers.

    python scripts/benchmarks/bench_corpus.py --model all-MiniLM-L6-v2 --data acl_abstracts.jsonl.xz   # 25 minutes

Speed: abstracts, by `SentenceTransformer.encode` in one process, by its pool of two processes, and by run_encode.py
with two workers, each in a process of its own. Two numbers of texts are encoded: their difference is the rate, without
the start, which is shown, too. Memory: titles, which are short so that 50,000 rows take minutes.
Written to docs/results/benchmarks/corpus.json and .md.
"""

import argparse
import json
import lzma
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from shared.arguments import ROOT, benchmark_parser
from shared.measuring import environment, run_worker
from shared.process import start_quietly
from shared.reports import Table, describe, markdown_sections, print_tables, write_report


sys.path.append(str(ROOT / "scripts" / "examples"))

PLAIN, POOL = "SentenceTransformer.encode, two threads", "pool of sentence-transformers, two processes"
OURS = "run_encode.py, two workers"
PASSAGES = 1_000_000
PROTOCOL = "wall time; each run in a process of its own"
INTRODUCTION = """# A corpus on the CPU

[`run_encode.py`](../../serve.md#encode-a-corpus) encodes a data set with Ray Data and `hf_relpos.optimize`. It is
compared with sentence-transformers, for {model}. Tokens are counted without padding.

- Speed: {texts} abstracts of the ACL anthology. `start` is the fixed time of a run: models, processes, Ray.
- Memory: the peak of a worker that encodes titles, in files of {shard:,} rows, without shared pages.

Limits: one machine, two cores, one model. Differences below a tenth are noise.
"""


def read_column(data: str, column: str, count: int) -> list[str]:
    """The first texts of a column, over and over until there are so many."""
    with lzma.open(data, "rt", encoding="utf-8") as file:
        found = [record[column] for record in map(json.loads, file) if record[column]]
    return (found * -(-count // len(found)))[:count]


class WorkerMemory(threading.Thread):
    """Looks at the memory of Ray's workers."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        while True:
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if "TextEncoder" in " ".join(process.cmdline()):
                        found = process.memory_info()
                        self.peak = max(self.peak, found.rss - found.shared)  # without pages of Ray's object store
            time.sleep(0.5)


def run_ours(model: str, texts: list[str], shard: int) -> dict:
    """Seconds of a run, and the largest size of a worker, MB."""
    import run_encode

    memory = WorkerMemory()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "texts.jsonl")
        lines = (json.dumps({"id": number, "text": text}) for number, text in enumerate(texts))
        file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        words = ["--model_name_or_path", model, "--data_files", file, "--output_dir", Path(folder, "out")]
        words += ["--max_seq_length", "512", "--shard_size", shard, "--workers", "2"]
        begin = time.perf_counter()
        done = run_encode.main([str(word) for word in words])
        seconds = time.perf_counter() - begin
    if done["after"] != len(texts):
        raise SystemExit(f"{done['after']} vectors of {len(texts)} texts")
    return {"seconds": seconds, "peak_mb": round(memory.peak / 2**20)}


def run_theirs(model: str, texts: list[str], pool: bool) -> dict:
    """Seconds of a run with the processes of a pool, or with two threads."""
    import torch
    from sentence_transformers import SentenceTransformer

    begin = time.perf_counter()
    torch.set_num_threads(1 if pool else 2)
    encoder = SentenceTransformer(model, device="cpu")
    encoder.max_seq_length = 512
    processes = encoder.start_multi_process_pool(["cpu"] * 2) if pool else None
    encoder.encode(texts, pool=processes, batch_size=32, show_progress_bar=False)
    if processes:
        encoder.stop_multi_process_pool(processes)
    return {"seconds": time.perf_counter() - begin}


def work(way: str, model: str, data: str, column: str, rows: int, shard: int) -> dict:
    """One run, with its number of tokens."""
    from transformers import AutoTokenizer

    texts = read_column(data, column, rows)
    found = run_ours(model, texts, shard) if way == OURS else run_theirs(model, texts, way == POOL)
    ids = AutoTokenizer.from_pretrained(model)(texts, truncation=True, max_length=512)["input_ids"]
    return {"rows": rows, "tokens": sum(map(len, ids)), **found}


def tables_of(results: dict) -> list[Table]:
    found = {}
    for way, (few, many) in results["speed"].items():
        seconds, tokens, rows = (many[name] - few[name] for name in ("seconds", "tokens", "rows"))
        start = few["seconds"] - few["rows"] * seconds / rows
        found[way] = tokens / seconds, start, PASSAGES * seconds / rows / 1800
    plain = found[PLAIN][0]
    rows = [
        [way, f"{a:,.0f}", f"{a / plain:.2f}", f"{max(0.0, b):.0f}", f"{c:.1f}"] for way, (a, b, c) in found.items()
    ]
    columns = ["", "tokens a second", "× plain", "start, s", "core hours of a million passages (extrapolated)"]
    grown = [[f"{each['rows']:,}", f"{each['tokens']:,}", f"{each['peak_mb']:,}"] for each in results["memory"]]
    return [("Speed", columns, rows), ("Memory", ["rows", "tokens", "largest worker, MB"], grown)]


def card(results: dict) -> str:
    """corpus.md."""
    texts = " and ".join(f"{run['rows']:,}" for run in results["speed"][PLAIN])
    text = INTRODUCTION.format(texts=texts, model=results["model"], shard=results["shard"])
    return f"{text}\n{describe(results['environment'])}{markdown_sections(tables_of(results))}"


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="folder of a SentenceTransformer")
    parser.add_argument("--data", default="acl_abstracts.jsonl.xz", help="JSON lines (.xz) with `title`, `abstract`")
    parser.add_argument("--texts", type=int, nargs=2, default=[1_000, 4_000], help="abstracts")
    parser.add_argument("--rows", type=int, nargs="+", default=[5_000, 50_000], help="titles whose memory is measured")
    parser.add_argument("--shard_size", type=int, default=500, help="rows of a file")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.worker:
        start_quietly(threads=2)
        print(json.dumps(work(**json.loads(args.worker))))
        return

    def measure(way: str, column: str, rows: int) -> dict:
        request = {"way": way, "model": args.model, "data": args.data, "column": column, "rows": rows}
        return run_worker(sys.executable, __file__, "--worker", json.dumps({**request, "shard": args.shard_size}))

    results = {"environment": {**environment(), "protocol": PROTOCOL}, "model": Path(args.model).name}
    results |= {"shard": args.shard_size}
    results["speed"] = {way: [measure(way, "abstract", rows) for rows in args.texts] for way in (PLAIN, POOL, OURS)}
    results["memory"] = [measure(OURS, "title", rows) for rows in args.rows]
    write_report(args.out / "corpus", results, card(results))
    print_tables(tables_of(results))


if __name__ == "__main__":
    main()
