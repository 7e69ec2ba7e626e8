"""A server with a thread for each request, on one core: unchanged, with `optimize`, and with `optimize(…, join=True)`.

    python scripts/benchmarks/bench_join.py --tokenizer all-MiniLM-L6-v2 --data squad.dev.json.xz   # 10 minutes

uvicorn and FastAPI serve a synchronous endpoint, which calls the model with one text. Each client sends its next text
when the last was answered. Outputs of all requests are compared with those of the unchanged model. In the last round
others leave before they are answered, send what raises an error, fork the server, and undo `optimize`. Written to
docs/results/benchmarks/join.json and .md.
"""

import http.client
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from bench_heads import questions_and_paragraphs
from shared.arguments import benchmark_parser, positive_int
from shared.measuring import environment
from shared.reports import Table, describe, markdown_sections, print_tables, write_report


VARIANTS, MODELS = ("unchanged", "optimize", "joined"), ("SentenceTransformer", "CrossEncoder")
FORMS = {"rate": ".0f", "CPU": ".1f", "p50": ".0f", "p99": ".0f", "error": ".0e"}
TROUBLE = ("/again", "/gone", "/wrong", "/fork")
Server = tuple[int, subprocess.Popen[bytes]]  # its port
PROTOCOL = "wall time of requests as clients see them, CPU time of the server; servers in turns, medians of rounds"
INTRODUCTION = """# Callers joined: a server with a thread for each request

A synchronous endpoint of FastAPI calls `encode`, or `predict` with a query, for one question of SQuAD; {model}, one
core. `error` is the largest difference of any answer to the unchanged model's, as a share of the largest value. In
"32, trouble" other clients leave without an answer, send what raises an error, fork the server, and undo `optimize`.
"""


def serve(kind: str, variant: str, model: str, port: int) -> None:
    """Be a server."""
    import sentence_transformers
    import uvicorn
    from fastapi import Body, FastAPI

    import hf_relpos

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.manual_seed(0)  # of a head
    app, made = FastAPI(), getattr(sentence_transformers, kind)(model, device="cpu")
    handles = [] if variant == VARIANTS[0] else [hf_relpos.optimize(made, join=variant == VARIANTS[2])]

    @app.post("/")
    def answer(text: str = Body()) -> list[float]:
        vector = made.encode(text) if kind == MODELS[0] else made.predict([("What is it about?", text)])
        return [float(each) for each in vector]

    @app.post("/wrong")
    def wrong(text: str = Body()) -> None:
        ids = torch.full((1, 9), 10**6)
        with torch.inference_mode():
            made({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    @app.post("/again")
    def again(text: str = Body()) -> list[float]:
        handles.pop().undo()
        handles.append(hf_relpos.optimize(made, join=variant == VARIANTS[2]))
        return answer(text)

    @app.post("/fork")
    def fork(text: str = Body()) -> list[float]:
        if not (child := os.fork()):
            signal.alarm(60)
            os._exit(not answer(text))
        return [float(os.waitpid(child, 0)[1])]

    uvicorn.run(app, port=port, log_level="critical")


def ask(port: int, text: str, path: str = "/") -> tuple[float, Any]:
    """Seconds, and the answer of a server; its status where that is none."""
    start, connection = time.perf_counter(), http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path.replace("gone", ""), json.dumps(text), {"Content-Type": "application/json"})
    if path == "/gone":
        return 0.0, connection.close()
    answer = connection.getresponse()
    return time.perf_counter() - start, json.loads(answer.read()) if answer.status == 200 else answer.status


def load(server: Server, texts: list[str], clients: int, has_trouble: bool = False) -> dict[str, Any]:
    """Rate, latencies, CPU time and answers of clients that send these texts.

    Raises:
        RuntimeError: if other requests are not answered as they have to be.
    """
    answers, (port, process) = [(0.0, None)] * len(texts), server

    def ticks() -> int:
        fields = Path(f"/proc/{process.pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def client(first: int) -> None:
        for number in range(first, len(texts), clients):
            answers[number] = ask(port, texts[number])

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start, before = time.perf_counter(), ticks()
    for thread in threads:
        thread.start()
    while has_trouble and threads[0].is_alive():
        found = [ask(port, texts[0], path)[1] for path in TROUBLE]
        if found != [found[0], None, 500, [0.0]] or isinstance(found[0], int):
            raise RuntimeError(f"the server answered {found}")
    for thread in threads:
        thread.join()
    figures = {"rate": len(texts) / (time.perf_counter() - start)}
    figures["CPU"] = 1000 * (ticks() - before) / os.sysconf("SC_CLK_TCK") / len(texts)
    times = sorted(1000 * taken for taken, _ in answers)
    figures |= {"p50": times[len(times) // 2], "p99": times[int(0.99 * len(times))]}
    return figures | {"answers": torch.tensor([answer for _, answer in answers])}


def measure(kind: str, model: str, texts: list[str], rounds: int) -> Iterator[list[Any]]:
    """Kind, clients and variant, and what was measured."""
    servers: dict[str, Server] = {}
    try:
        for variant in VARIANTS:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            command = [sys.executable, __file__, "--worker", json.dumps([kind, variant, model, port])]
            servers[variant] = port, subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
            answer = None
            while answer is None and servers[variant][1].poll() is None:
                time.sleep(0.2)
                with suppress(ConnectionRefusedError):
                    answer = ask(port, texts[0])
        expected = load(servers[VARIANTS[0]], texts, 1)["answers"]
        for clients, has_trouble in ((1, False), (8, False), (32, False), (32, True)):
            found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS[has_trouble:]}
            for _, variant in itertools.product(range(1 if has_trouble else rounds), found):
                found[variant].append(load(servers[variant], texts, clients, has_trouble))
                apart = (found[variant][-1].pop("answers") - expected).abs().max()
                found[variant][-1]["error"] = float(apart / expected.abs().max())
            for variant, each in found.items():
                figures = {name: statistics.median(one[name] for one in each) for name in FORMS}
                yield [kind, f"{clients}{', trouble' * has_trouble}", variant, figures]
    finally:
        for _, server in servers.values():
            server.terminate()


def tables_of(results: dict) -> list[Table]:
    heads = ["clients", "server", "texts a second", "CPU, ms a text", "p50, ms", "p99, ms", "error"]
    rows = [[*row[:3], *(f"{row[3][name]:{form}}" for name, form in FORMS.items())] for row in results["rows"]]
    return [(kind, heads, [cells for own, *cells in rows if own == kind]) for kind in MODELS]


def card(results: dict) -> str:
    """join.md."""
    text = INTRODUCTION.format(model=results["model"])
    return f"{text}\n{describe(results['environment'])}{markdown_sections(tables_of(results))}"


def main() -> None:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", default="all-MiniLM-L6-v2", help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, default=Path("squad.dev.json.xz"), help="SQuAD's file, packed by xz")
    parser.add_argument("--texts", type=positive_int, default=256, help="number of questions")
    args = parser.parse_args()
    if args.worker:
        return serve(*json.loads(args.worker))
    texts, _ = questions_and_paragraphs(args.data, args.texts)
    results: dict[str, Any] = {"environment": {**environment(), "protocol": PROTOCOL}, "rows": []}
    results["model"] = Path(args.tokenizer).name
    for kind in MODELS:
        for row in measure(kind, args.tokenizer, texts, args.rounds):
            print(json.dumps(row), file=sys.stderr)
            results["rows"].append(row)
    write_report(args.out / "join", results, card(results))
    print_tables(tables_of(results))


if __name__ == "__main__":
    main()
