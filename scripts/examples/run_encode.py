"""Encode a data set of any size with a sentence encoder, as a pipeline of Ray Data: on this machine, or on a cluster.

    python scripts/examples/run_encode.py --model_name_or_path encoder --data_files passages.jsonl \\
        --id_column_name id --output_dir embeddings
    RAY_ADDRESS=ray://head:10001 python scripts/examples/run_encode.py …

Files are .jsonl, .csv, .tsv or .parquet, whose ids are unique. The output is Parquet with the columns of the id and
`vector`; the order of the rows is not kept. Every file holds --shard_size rows, and is written at once. The same
command encodes what is missing: after a kill, after a worker was lost (Ray starts another one), or when rows have
been added. A file that a kill cut short is removed first, and an id occurs in one row only.

Each worker has the encoder, with `hf_relpos.optimize` unless `--optimize False` is given, on one CPU core or one GPU.
All machines of a cluster need hf_relpos, sentence-transformers and Ray; this folder of scripts is sent to them.
"""

import ctypes
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray
from ray.data.checkpoint import CheckpointConfig
from recipes.arguments import ModelArguments, check_least, import_file, launch, option
from recipes.data import check_suffix
from recipes.models import load_config
from run_embedding import load_encoder

from hf_relpos.data.records import text_problem
from hf_relpos.files import atomic_file, write_json


logger = logging.getLogger(__name__)

FORMATS = (".jsonl", ".csv", ".tsv", ".parquet")
PRECISIONS = ("float32", "float16")
# What the files of a folder have in common, and where Ray keeps the ids that it has written. By their underscores no
# reader of the folder takes them for rows.
SETTINGS, WRITTEN = "_encoding.json", "_written"
# What Ray runs beside the workers: an actor that leaves out what is written, and a task that reads or writes.
OTHERS = 2


@dataclass
class EncodingArguments:
    """Which texts, and where their vectors go."""

    data_files: list[str] = option("files of one format", [])
    output_dir: str = option("folder for the vectors; on a cluster, one that all machines see", "embeddings")
    text_column_name: str = option("column of the texts", "text")
    id_column_name: str = option("column of ids, each of which occurs once", "id")
    max_seq_length: int | None = option("tokens read of a text; default: what the encoder reads, at most 512")
    shard_size: int = option("rows of a file, which a worker encodes at once, sorted by length", 5_000)
    batch_size: int = option("texts encoded at once", 32)
    precision: str = option("of the stored vectors: float32 or float16", "float32")
    workers: int | None = option("encoders; default: one for each GPU, or without GPUs for each core")

    def __post_init__(self) -> None:
        if not self.data_files:
            raise ValueError("--data_files: give at least one file")
        for path in self.data_files:
            check_suffix(path, FORMATS)
        kinds = {kind for path in self.data_files for kind in FORMATS if kind in Path(path).suffixes}
        if len(kinds) > 1:
            raise ValueError(f"--data_files: are {' and '.join(sorted(kinds))}; give files of one format")
        for name in ("max_seq_length", "shard_size", "batch_size", "workers"):
            check_least(name, getattr(self, name), 1)
        if self.precision not in PRECISIONS:
            raise ValueError(f"--precision {self.precision}: give {' or '.join(PRECISIONS)}")


class TextEncoder:
    """A worker: the encoder, and a batch of rows to a batch with their vectors."""

    def __init__(self, model_args: ModelArguments, args: EncodingArguments):
        if model_args.scheme_file:  # read in the first process, and not yet in this one
            import_file("--scheme_file", model_args.scheme_file)
        self.model, self.args = load_encoder(model_args, args.max_seq_length), args

    def __call__(self, batch: pa.Table) -> pa.Table:
        """
        Raises:
            ValueError: for a row without a text.
        """
        args = self.args
        ids, texts = batch[args.id_column_name], batch[args.text_column_name].to_pylist()
        for name, text in zip(ids, texts, strict=True):
            if problem := text_problem(text):
                raise ValueError(f"{args.id_column_name} {name}: {args.text_column_name!r} {problem}")
        vectors = self.model.encode(texts, batch_size=args.batch_size, show_progress_bar=False)
        with suppress(OSError, AttributeError, TypeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)  # batches without padding differ in size, and leave gaps in the heap
        column = pa.FixedSizeListArray.from_arrays(vectors.astype(args.precision).ravel(), vectors.shape[1])
        return pa.table({args.id_column_name: ids, "vector": column})


def read_files(paths: Sequence[str]) -> ray.data.Dataset:
    """All rows."""
    files = [str(Path(path).resolve()) for path in paths]
    suffixes = Path(files[0]).suffixes
    if ".parquet" in suffixes:
        return ray.data.read_parquet(files)
    if ".jsonl" in suffixes:
        return ray.data.read_json(files)
    options = pyarrow.csv.ParseOptions(delimiter="\t" if ".tsv" in suffixes else ",", newlines_in_values=True)
    return ray.data.read_csv(files, parse_options=options)


def check_columns(args: EncodingArguments, data: ray.data.Dataset) -> None:
    """
    Raises:
        ValueError: for columns that the files do not have.
    """
    columns = data.columns() or []
    for flag in ("text_column_name", "id_column_name"):
        if getattr(args, flag) not in columns:
            raise ValueError(f"--{flag} {getattr(args, flag)}: the data has {', '.join(columns)}; name one of these")


def hash_weights(model_args: ModelArguments) -> str:
    """SHA-256 of the weights and settings in a folder, or the commit of a Hub repository.

    Raises:
        ValueError: for a model that is not there.
    """
    commit = getattr(load_config(model_args), "_commit_hash", None)
    if commit:
        return str(commit)
    digest, folder = hashlib.sha256(), Path(str(model_args.model_name_or_path))
    for path in sorted(each for kind in ("safetensors", "bin", "json") for each in folder.rglob(f"*.{kind}")):
        digest.update(str(path.relative_to(folder)).encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def check_settings(args: EncodingArguments, model_args: ModelArguments) -> None:
    """Write the settings of the folder; or compare them with those of an earlier run.

    Raises:
        ValueError: for a folder of other settings, or a model that is not there.
    """
    folder, shared = Path(args.output_dir), ("id_column_name", "max_seq_length", "precision")
    settings = {"model": model_args.model_name_or_path, "weights": hash_weights(model_args)}
    settings["text_column_name"] = args.text_column_name
    settings |= {name: value for name, value in asdict(args).items() if name in shared}
    path = folder / SETTINGS
    if not path.is_file():
        if any(folder.glob("*.parquet")):
            raise ValueError(f"--output_dir {folder}: has .parquet files and no {SETTINGS}; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    stored = json.loads(path.read_text("utf-8"))
    for name, value in settings.items():
        if stored.get(name) != value:
            begun = f"--output_dir {folder}: was begun with {name} = {stored.get(name)!r}"
            raise ValueError(f"{begun}, and this run has {value!r}; give another folder")


def start_ray(args: EncodingArguments) -> dict[str, Any]:
    """Connect to a cluster, or start Ray on this machine; the settings of the pool of workers."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default, behind all else that runs here
    here = {"runtime_env": {"working_dir": str(Path(__file__).parent)}, "log_to_driver": False}
    if not ray.is_initialized():
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**here)
        else:
            cores = args.workers or os.cpu_count() or 1
            ray.init(num_cpus=cores + OTHERS, include_dashboard=False, **here)
    resources = ray.cluster_resources()
    if gpus := int(resources.get("GPU", 0)):
        return {"num_gpus": 1, "compute": ray.data.ActorPoolStrategy(size=args.workers or gpus)}
    cores = max(1, int(resources["CPU"]) - OTHERS)
    return {"num_cpus": 1, "compute": ray.data.ActorPoolStrategy(size=args.workers or cores)}


def encode_rows(model_args: ModelArguments, args: EncodingArguments) -> dict[str, int]:
    """Encode the rows that are missing, and return how many there were before and are now.

    Raises:
        ValueError: for flags, data and models that cannot be used, and a row without a text.
    """
    if (folder := Path(model_args.model_name_or_path or "")).is_dir():
        model_args.model_name_or_path = str(folder.resolve())
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    out = str(Path(args.output_dir).resolve())
    pool = start_ray(args)
    context = ray.data.DataContext.get_current()
    try:
        check_columns(args, read_files(args.data_files))
        check_settings(args, model_args)
        before = repair(args)
        context.checkpoint_config = CheckpointConfig(
            args.id_column_name, str(Path(out, WRITTEN)), delete_checkpoint_on_success=False
        )
        rows = read_files(args.data_files).select_columns([args.id_column_name, args.text_column_name])
        rows = rows.repartition(target_num_rows_per_block=args.shard_size)
        settings = {"fn_constructor_args": (model_args, args), "batch_size": None, "batch_format": "pyarrow"}
        rows.map_batches(TextEncoder, **settings, **pool).write_parquet(out)
    except (ray.exceptions.RayError, ValueError) as error:
        found = re.search(r"^ValueError: (.+)$", str(error.__cause__ or error), re.MULTILINE)  # of a worker, as text
        if found is None:
            raise
        raise ValueError(found[1]) from error
    finally:
        context.checkpoint_config = None
    return {"before": before, "after": repair(args)}


def repair(args: EncodingArguments) -> int:
    """Remove from the output what a kill cut short and rows whose id is there already; the number of rows.

    The files of vectors say which ids are written. The ids that Ray keeps are made anew from them: a kill can cut
    these short, too, or leave vectors without them.
    """
    folder, name = Path(args.output_dir), args.id_column_name
    seen: set[Any] = set()
    written: list[pa.Table] = []
    for partial in folder.glob(".*.parquet"):  # of an `atomic_file` that was killed
        partial.unlink()
    for path in sorted(folder.glob("*.parquet")):
        try:
            ids = pyarrow.parquet.read_table(path, columns=[name])
        except (pa.ArrowInvalid, OSError) as error:
            if getattr(error, "errno", None):  # the file may be whole, and cannot be read now
                raise
            logger.warning(f"{path}: removed, because it is not whole ({error})")
            path.unlink()
            continue
        is_new = []
        for each in ids[name].to_pylist():
            is_new.append(each not in seen)
            seen.add(each)
        if not all(is_new):
            logger.warning(f"{path}: {is_new.count(False)} rows removed, because their {name} occurs before")
            if not any(is_new):
                path.unlink()
                continue
            with atomic_file(path) as partial:
                pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).filter(pa.array(is_new)), partial)
        written.append(ids.filter(pa.array(is_new)))
    shutil.rmtree(folder / WRITTEN, ignore_errors=True)
    if seen:
        (folder / WRITTEN).mkdir()
        pyarrow.parquet.write_table(pa.concat_tables(written), folder / WRITTEN / "ids.parquet")
    return len(seen)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe with these arguments, or those of the command line."""
    return launch(encode_rows, (ModelArguments, EncodingArguments), __doc__, arguments, optimize=True)


if __name__ == "__main__":
    main()
