"""Encode a corpus on the CPU: run_encode.py of the examples beside plain `SentenceTransformer.encode`; its memory.

    python scripts/benchmarks/bench_corpus.py --model all-MiniLM-L6-v2 --data acl_abstracts.jsonl.xz   # ten minutes

Speed: abstracts, encoded by both in turns in one process, by one thread. The vectors are compared before any time is
taken. Memory: titles, which are short so that 50,000 rows take minutes; each number of rows in a process of its own.
Written to docs/results/benchmarks/corpus.json and .md.
"""

import argparse
import functools
import json
import lzma
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from shared.arguments import ROOT, benchmark_parser
from shared.measuring import environment, peak_memory, run_worker, time_in_turns
from shared.process import start_quietly
from shared.reports import Table, describe, markdown_sections, print_tables, write_report


sys.path.append(str(ROOT / "scripts" / "examples"))

PLAIN, OURS = "SentenceTransformer.encode(batch_size=32)", "run_encode.py"
LARGEST_ERROR = 1e-5
PASSAGES = 1_000_000
PROTOCOL = (
    "CPU seconds of the process (time.process_time), tokenization included; both in turns in one process; the median "
    "of the rounds after the first"
)
INTRODUCTION = """# A corpus on the CPU

[`run_encode.py`](../../serve.md#a-corpus) encodes a data set in shards with `hf_relpos.optimize`. Here it is compared
with plain sentence-transformers, for {model}. Tokens are counted without padding.

- Speed: {texts} abstracts of the ACL anthology, on average {length:.0f} tokens. The vectors differ by at most
  {error:.0e} of the largest number. Linear layers ran by {library} ([products](../../live.md#products)).
- Memory: the largest resident size of a process that encodes so many titles, in shards of {shard:,} rows.

Limits: one machine, one thread, one model. Differences below a tenth are noise.
"""


def read_column(data: str, column: str, count: int) -> list[str]:
    """The first texts of a column, over and over until there are so many."""
    with lzma.open(data, "rt", encoding="utf-8") as file:
        found = [record[column] for record in map(json.loads, file) if record[column]]
    return (found * -(-count // len(found)))[:count]


def speed(args: argparse.Namespace) -> dict:
    """Tokens per CPU second of both."""
    import run_encode
    from recipes.arguments import ModelArguments
    from sentence_transformers import SentenceTransformer

    from hf_relpos.attention.cpu_gemm import linear_library

    texts = read_column(args.data, "abstract", args.texts)
    model = SentenceTransformer(args.model, device="cpu")
    optimized = run_encode.load_encoder(ModelArguments(args.model, optimize=True), None)
    optimized.max_seq_length = model.max_seq_length
    encode = functools.partial(model.encode, texts, batch_size=32, show_progress_bar=False)
    ours = functools.partial(optimized.encode, texts, batch_size=32, show_progress_bar=False)
    read = run_encode.TokenCount(model)
    expected = encode()
    tokens = read.tokens
    error = float(np.abs(ours() - expected).max() / np.abs(expected).max())
    if not error <= LARGEST_ERROR:
        raise SystemExit(f"the vectors differ by {error:.1e}; no times are shown")
    seconds = time_in_turns({PLAIN: encode, OURS: ours}, args.rounds, clock=time.process_time)
    library = "oneDNN" if linear_library().is_used else "PyTorch's own"
    return {"texts": len(texts), "tokens": tokens, "error": error, "seconds": seconds, "library": library}


def memory(model: str, data: str, rows: int, shard: int) -> dict:
    """The largest resident size of a run, MB, and what the run returns."""
    import run_encode

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "titles.jsonl")
        with file.open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"text": title}) + "\n" for title in read_column(data, "title", rows))
        words = ["--model_name_or_path", model, "--data_files", file, "--output_dir", Path(folder, "out")]
        done = run_encode.main([*words, "--shard_size", shard, "--cache_dir", Path(folder, "cache")])
    return {"rows": rows, "tokens": done["tokens"], "peak_mb": round(peak_memory())}


def tables_of(results: dict) -> list[Table]:
    run = results["speed"]
    rates = {name: run["tokens"] / seconds for name, seconds in run["seconds"].items()}
    hours = {name: PASSAGES * run["seconds"][name] / run["texts"] / 3600 for name in rates}
    rows = [[name, f"{rate:,.0f}", f"{rate / rates[PLAIN]:.2f}", f"{hours[name]:.1f}"] for name, rate in rates.items()]
    columns = ["", "tokens a CPU second", "× plain", "core hours of a million passages (extrapolated)"]
    grown = [[f"{each['rows']:,}", f"{each['tokens']:,}", f"{each['peak_mb']:,}"] for each in results["memory"]]
    return [("Speed", columns, rows), ("Memory", ["rows", "tokens", "largest resident size, MB"], grown)]


def card(results: dict) -> str:
    """corpus.md."""
    run = results["speed"]
    about = {**run, "length": run["tokens"] / run["texts"], "model": results["model"], "shard": results["shard"]}
    text = INTRODUCTION.format(**about)
    return f"{text}\n{describe(results['environment'])}{markdown_sections(tables_of(results))}"


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--model", default="all-MiniLM-L6-v2", help="folder of a SentenceTransformer")
    parser.add_argument("--data", default="acl_abstracts.jsonl.xz", help="JSON lines (.xz) with `title`, `abstract`")
    parser.add_argument("--texts", type=int, default=320, help="abstracts whose encoding is timed")
    parser.add_argument("--rows", type=int, nargs="+", default=[5_000, 50_000], help="titles whose memory is measured")
    parser.add_argument("--shard_size", type=int, default=2_500, help="rows of a shard")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    start_quietly(threads=1)
    if args.worker:
        print(json.dumps(memory(**json.loads(args.worker))))
        return
    results = {"environment": {**environment(), "protocol": PROTOCOL}, "model": Path(args.model).name}
    results |= {"shard": args.shard_size, "speed": speed(args), "memory": []}
    for rows in args.rows:
        request = {"model": args.model, "data": args.data, "rows": rows, "shard": args.shard_size}
        results["memory"].append(run_worker(sys.executable, __file__, "--worker", json.dumps(request)))
    write_report(args.out / "corpus", results, card(results))
    print_tables(tables_of(results))


if __name__ == "__main__":
    main()
