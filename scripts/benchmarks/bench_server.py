"""Latency of the embedding server of the examples on the CPU, with and without `hf_relpos.optimize`.

    python scripts/benchmarks/bench_server.py --model all-MiniLM-L6-v2 --data stsb.dev.tsv   # five minutes

Each variant is a server in a process of its own, one after the other. Clients send one text at a time, the next when
the last was answered; texts are sentences, every eighth several of them in a row. Written to
docs/results/benchmarks/server.json and .md.
"""

import argparse
import http.client
import json
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from shared.arguments import ROOT, benchmark_parser
from shared.measuring import environment
from shared.reports import Table, describe, markdown_sections, print_tables, write_report


VARIANTS = ("stock", "float32", "int8")
CLIENTS = (1, 8, 32)
PROTOCOL = "wall time of a request as its client sees it; variants one after the other, each warmed up before"
INTRODUCTION = """# A server on the CPU

[`run_server.py`](../../serve.md#a-server) with {model}; one thread encodes, clients and server share {cores} cores.
Texts have {least} to {most} words. "stock" is sentence-transformers alone, in the same server.
"""


def texts_of(path: Path, count: int = 400) -> list[str]:
    """Sentences of a table with the columns score, sentence, sentence; every eighth text is six of them in a row."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    sentences = [each for row in rows for each in row[1:3]]
    random.Random(0).shuffle(sentences)
    return [" ".join(sentences[at : at + (6 if at % 8 == 0 else 1)]) for at in range(count)]


def ask(port: int, text: str) -> float:
    """Seconds until the answer of the server."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/embed", json.dumps([text]), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    if answer.status != 200 or len(found) != 1:
        raise RuntimeError(f"the server answered {answer.status}: {found}")
    return time.perf_counter() - start


def measure(args: argparse.Namespace, variant: str, texts: list[str]) -> dict:
    """Start-up, memory and latencies of one server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = ROOT / "scripts" / "examples" / "run_server.py"
    flags = ["--model_name_or_path", args.model, "--precision", variant, "--port", str(port)]
    start = time.perf_counter()
    server = subprocess.Popen([sys.executable, script, *flags], stdout=subprocess.DEVNULL)
    try:
        while True:
            try:
                ask(port, texts[0])
                break
            except ConnectionRefusedError:
                if server.poll() is not None:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.1)
        found = {"variant": variant, "start": round(time.perf_counter() - start, 1), "clients": {}}
        for text in texts[:64]:
            ask(port, text)
        for clients in CLIENTS:
            taken: list[float] = []

            def client(own: list[str], taken: list[float] = taken) -> None:
                taken.extend(ask(port, text) for text in own)

            threads = [threading.Thread(target=client, args=(texts[n::clients],)) for n in range(clients)]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rate, taken = len(texts) / (time.perf_counter() - start), sorted(taken)
            at = {
                name: round(1000 * taken[int(share * (len(taken) - 1))], 1)
                for name, share in (("p50", 0.5), ("p95", 0.95))
            }
            found["clients"][str(clients)] = {**at, "texts_per_second": round(rate, 1)}
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
        found["memory"] = int(status.split("VmHWM:")[1].split()[0]) // 1024
        return found
    finally:
        server.terminate()
        server.wait()


def tables(rows: list[dict]) -> list[Table]:
    """Latencies by the number of clients."""
    lines = []
    for row in rows:
        cells = [f"{of['p50']:.0f} / {of['p95']:.0f} / {of['texts_per_second']:.0f}" for of in row["clients"].values()]
        lines.append([row["variant"], f"{row['start']:.1f}", str(row["memory"]), *cells])
    heads = [f"{each} client{'s' * (each > 1)}" for each in CLIENTS]
    return [("Latency: p50 / p95 in ms / texts a second", ["", "start, s", "MB", *heads], lines)]


def card(results: dict) -> str:
    """server.md."""
    about = results["environment"]
    text = INTRODUCTION.format(cores=about["cores"], **results["texts"])
    return f"{text}\n{describe(about)}{markdown_sections(tables(results['rows']))}"


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a sentence encoder, folder or name on the Hub")
    parser.add_argument("--data", required=True, type=Path, help="lines of score TAB sentence TAB sentence")
    args = parser.parse_args()
    texts, rows = texts_of(args.data), []
    words = sorted(len(text.split()) for text in texts)
    for variant in VARIANTS:
        rows.append(measure(args, variant, texts))
        print(json.dumps(rows[-1]), file=sys.stderr)
    about = {**environment(), "threads": 1, "protocol": PROTOCOL}
    said = {"model": Path(args.model).name, "least": words[0], "most": words[-1]}
    results = {"environment": about, "texts": said, "rows": rows}
    write_report(args.out / "server", results, card(results))
    print_tables(tables(rows))


if __name__ == "__main__":
    main()
