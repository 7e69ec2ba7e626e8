"""An embedding server on the CPU: requests that wait together are one batch, which `hf_relpos.optimize` makes cheap.

    python scripts/examples/run_server.py --model_name_or_path sentence-transformers/all-MiniLM-L6-v2 --port 8000
    curl -X POST localhost:8000/embed -H "Content-Type: application/json" -d '["a first text", "a second one"]'

Needs `pip install fastapi uvicorn sentence-transformers`. For more cores: `--workers`, threads that share one model.
"""

import argparse
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from sentence_transformers import SentenceTransformer

import hf_relpos


Request = tuple[list[str], "Future[list[list[float]]]"]


def work(waiting: "queue.Queue[Request | None]", encode: Callable[[list[str]], Any], most: int) -> None:
    """Encode what waits, at most so many texts in a batch unless one request has more, until None arrives."""
    while (first := waiting.get()) is not None:
        batch = [first]
        with contextlib.suppress(queue.Empty):
            while sum(len(texts) for texts, _ in batch) < most:
                following = waiting.get_nowait()
                if following is None:
                    waiting.put(None)  # after this batch
                    break
                batch.append(following)
        try:
            vectors = encode([text for texts, _ in batch for text in texts]).tolist()
        except Exception as error:  # the requests fail, the worker goes on
            for _, future in batch:
                future.set_exception(error)
            continue
        for texts, future in batch:
            future.set_result(vectors[: len(texts)])
            del vectors[: len(texts)]


def build(encode: Callable[[list[str]], Any], most: int = 32, workers: int = 1) -> FastAPI:
    """The application.

    Args:
        encode: maps texts to an array (texts, D).
        most: texts in a batch.
        workers: threads that encode. PyTorch computes without Python's lock.
    """
    waiting: queue.Queue[Request | None] = queue.Queue()

    @contextlib.asynccontextmanager
    async def running(app: FastAPI) -> AsyncIterator[None]:
        threads = [threading.Thread(target=work, args=(waiting, encode, most)) for _ in range(workers)]
        for thread in threads:
            thread.start()
        yield
        for _ in threads:
            waiting.put(None)

    app = FastAPI(lifespan=running)

    @app.post("/embed")
    def embed(texts: list[str]) -> list[list[float]]:
        future: Future[list[list[float]]] = Future()
        waiting.put((texts, future))
        return future.result()

    return app


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_name_or_path", required=True, help="folder or name on the Hub")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8", "none"))
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--most", type=int, default=32, help="texts in a batch")
    parser.add_argument("--workers", type=int, default=1, help="threads that encode, with one thread of PyTorch each")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # of each worker
    encoder = SentenceTransformer(args.model_name_or_path, device="cpu")
    if args.dtype != "none":
        print(hf_relpos.optimize(encoder, dtype=args.dtype))
    app = build(lambda texts: encoder.encode(texts, batch_size=args.most), args.most, args.workers)
    uvicorn.run(app, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
