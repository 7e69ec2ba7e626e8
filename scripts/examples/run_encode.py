"""Encode a data set of any size with a sentence encoder: shard by shard, in several processes, resumable.

    python scripts/examples/run_encode.py --model_name_or_path encoder --data_files passages.jsonl \\
        --id_column_name id --output_dir embeddings

Files are .jsonl, .json, .csv, .tsv, .parquet or .arrow; `datasets` maps them into memory. Rows are encoded in shards
of --shard_size. Each shard is two files, written under another name and renamed: `00003-of-00100.npy`, which
`numpy.load(…, mmap_mode="r")` maps into memory, and `00003-of-00100.json`, the id of each vector (without
--id_column_name the number of the row). A run that was stopped goes on with the first shard that is missing.

Several processes take every n-th shard each: `accelerate launch --multi_gpu --num_processes 4 …`, without GPUs
too, or with a scheduler of your own `--shard 0/4`, `--shard 1/4`, … They need not run at the same time.
`hf_relpos.optimize` is applied unless `--optimize False` is given.

With --late_chunking every line of a text that has a letter is a passage, and its vector is the mean of its tokens'
states, read in the context of the whole text. Its id is [id of the row, first character, character after the last].
"""

import ctypes
import itertools
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from recipes.arguments import ModelArguments, check_least, launch, option
from recipes.data import check_suffix
from run_embedding import load_encoder
from sentence_transformers import SentenceTransformer

from hf_relpos.data.records import text_problem
from hf_relpos.evaluation import Encoder, passage_vectors
from hf_relpos.files import atomic_file, write_json


logger = logging.getLogger(__name__)

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
PRECISIONS = ("float32", "float16")
# A passage of --late_chunking.
LINE = re.compile(r"[^\n]*\w[^\n]*")
# After so many batches the gaps of the heap are given back, which takes 7 milliseconds.
BATCHES = 16
# What the shards of a folder have in common.
SETTINGS = "encoding.json"


@dataclass
class EncodingArguments:
    """Which texts, and where their vectors go."""

    data_files: list[str] = option("files of one format", [])
    output_dir: str = option("folder for the shards", "embeddings")
    text_column_name: str = option("column of the texts", "text")
    id_column_name: str | None = option("column of ids; default: the number of the row, from 0 on")
    max_seq_length: int | None = option("tokens read of a text; default: what the encoder reads, at most 512")
    shard_size: int = option("rows of a shard", 10_000)
    batch_size: int = option("texts encoded at once, those of a shard sorted by length", 32)
    precision: str = option("of the stored vectors: float32 or float16", "float32")
    late_chunking: bool = option("a vector for each line, in the context of its text", False)
    shard: str | None = option("i/n: this process takes shards i, i + n, …; default: from accelerate launch, or all")

    def __post_init__(self) -> None:
        if not self.data_files:
            raise ValueError("--data_files: give at least one file")
        for path in self.data_files:
            check_suffix(path, FORMATS)
        kinds = {_format(path) for path in self.data_files}
        if len(kinds) > 1:
            raise ValueError(f"--data_files: are {' and '.join(sorted(kinds))}; give files of one format")
        for name in ("max_seq_length", "shard_size", "batch_size"):
            check_least(name, getattr(self, name), 1)
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision {self.precision}: give {' or '.join(PRECISIONS)}")
        _ = self.process

    @property
    def process(self) -> tuple[int, int]:
        """Number of this process, and of all of them."""
        if self.shard is None:  # torchrun and accelerate launch set both
            return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        found = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if found is None or int(found[1]) >= int(found[2]):
            raise ValueError(f"--shard {self.shard}: write i/n with 0 ≤ i < n")
        return int(found[1]), int(found[2])


def _format(path: str) -> str:
    return next(kind for suffix, kind in FORMATS.items() if suffix in Path(path).suffixes)


def read_rows(args: EncodingArguments, cache_dir: str | None) -> Dataset:
    """All rows, mapped into memory, with the columns of texts and ids.

    Raises:
        ValueError: for files that cannot be read, and columns that they do not have.
    """
    options = {"delimiter": "\t"} if ".tsv" in Path(args.data_files[0]).suffixes else {}
    try:
        data = load_dataset(
            _format(args.data_files[0]), data_files=args.data_files, split="train", cache_dir=cache_dir, **options
        )
    except Exception as error:  # each format has its own
        cause = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"--data_files {args.data_files[0]}: cannot be read ({cause}); check the file") from error
    columns = {"text_column_name": args.text_column_name, "id_column_name": args.id_column_name}
    for flag, column in columns.items():
        if column is not None and column not in data.column_names:
            raise ValueError(f"--{flag} {column}: the data has {', '.join(data.column_names)}; name one of these")
    return data.select_columns([column for column in columns.values() if column is not None])


def release_gaps(module: torch.nn.Module) -> None:
    """Let a module give memory back that is free inside the heap of the C library, if that is glibc.

    Batches without padding differ in size, and so leave gaps, in which later ones do not fit.
    """
    batches = itertools.count(1)

    def release(*_: Any) -> None:
        if next(batches) % BATCHES == 0:
            with suppress(OSError, AttributeError, TypeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)

    module.register_forward_pre_hook(release)


class TokenCount:
    """Counts the real tokens that a module reads, as a hook before its forward pass."""

    def __init__(self, module: torch.nn.Module):
        self.tokens = 0
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        features = args[0] if args else kwargs  # of a SentenceTransformer, of a model
        self.tokens += int(features["attention_mask"].sum())


def encode(
    model: SentenceTransformer, args: EncodingArguments, texts: Sequence[str], ids: Sequence[Any]
) -> tuple[np.ndarray, list[Any]]:
    """Vectors, (texts or passages, D), and their ids."""
    if not args.late_chunking:
        return model.encode(texts, batch_size=args.batch_size, show_progress_bar=False), list(ids)
    encoder = Encoder(model.transformers_model, model.tokenizer, max_length=model.max_seq_length)
    found, names = [np.zeros((0, model.transformers_model.config.hidden_size), np.float32)], []
    for name, text in zip(ids, texts, strict=True):
        borders = [line.span() for line in LINE.finditer(text)]
        vectors = passage_vectors(encoder, text, borders)
        if any(type(module).__name__ == "Normalize" for module in model):
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        found.append(vectors.float().numpy())
        names += [[name, *border] for border in borders]
    return np.concatenate(found), names


def check_settings(args: EncodingArguments, model: str, rows: int) -> None:
    """Write the settings of the folder; or compare them with those of an earlier run or another process.

    Raises:
        ValueError: for a folder of other settings.
    """
    folder = Path(args.output_dir)
    shared = ("text_column_name", "id_column_name", "max_seq_length", "shard_size", "precision", "late_chunking")
    settings = {"model": model, "data_files": [Path(path).name for path in args.data_files], "rows": rows}
    settings |= {name: getattr(args, name) for name in shared}
    stored = _read_json(folder / SETTINGS)
    if stored is None and folder.is_dir() and any(folder.glob("*.npy")):
        raise ValueError(f"--output_dir {folder}: has .npy files and no {SETTINGS}; give another folder")
    for name, value in settings.items():
        if stored is not None and stored.get(name) != value:
            raise ValueError(
                f"--output_dir {folder}: was begun with {name} = {stored.get(name)!r}, and this run has {value!r}; "
                "give another folder"
            )
    if stored is None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SETTINGS, settings)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def encode_shards(model_args: ModelArguments, args: EncodingArguments) -> dict[str, Any]:
    """Encode the shards of this process that are missing, and return what was done.

    Raises:
        ValueError: for flags, data and models that cannot be used, and a row without a text.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, level="INFO")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    data = read_rows(args, model_args.cache_dir)
    model = load_encoder(model_args, args.max_seq_length)
    check_settings(args, str(model_args.model_name_or_path), len(data))
    count, (process, processes) = math.ceil(len(data) / args.shard_size), args.process
    reader = model.transformers_model if args.late_chunking else model
    read = TokenCount(reader)
    release_gaps(reader)
    done, begin, cpu = 0, time.perf_counter(), time.process_time()
    for number in range(process, count, processes):
        path = Path(args.output_dir, f"{number:05d}-of-{count:05d}.npy")
        if path.is_file() and path.with_suffix(".json").is_file():
            continue
        first = number * args.shard_size
        rows = data[first : first + args.shard_size]
        texts = rows[args.text_column_name]
        for row, text in enumerate(texts, first):
            if problem := text_problem(text):
                raise ValueError(f"{args.data_files[0]}, row {row}: {args.text_column_name!r} {problem}")
        ids = rows[args.id_column_name] if args.id_column_name else range(first, first + len(texts))
        vectors, names = encode(model, args, texts, ids)
        with atomic_file(path) as partial:
            np.save(partial, vectors.astype(args.precision))
        write_json(path.with_suffix(".json"), names, indent=None)  # last: with both, the shard is complete
        done += 1
        rate = read.tokens / (time.perf_counter() - begin)
        logger.info(f"{path.name}: {len(names)} vectors; {rate:,.0f} tokens a second")
    seconds = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
    rates = {f"tokens_per_{name[:-1]}": read.tokens / value for name, value in seconds.items()}
    found = {"shards": done, "shards_of_all": count, "tokens": read.tokens, **seconds, **rates}
    logger.info(", ".join(f"{name} {value:,.0f}" for name, value in found.items()))
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe with these arguments, or those of the command line."""
    return launch(encode_shards, (ModelArguments, EncodingArguments), __doc__, arguments, optimize=True)


if __name__ == "__main__":
    main()
