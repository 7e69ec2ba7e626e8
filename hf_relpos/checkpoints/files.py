"""Read and check the files of a checkpoint, JSON and safetensors, with errors that name the file.

Local files are checked before Transformers reads them: its errors for broken files do not name the file, and it
accepts index entries outside the folder and weights of integer types.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"
# Types of safetensors that only quantized weights have.
NO_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64")


def read_json(path: str | os.PathLike[str], kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
    """Read a JSON object, or a list of objects.

    Raises:
        ValueError: for a file that cannot be read or has other content; names the file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON ({error}); restore the file") from error
    if not isinstance(content, kind):
        expected = "object" if kind is dict else "list"
        raise ValueError(f"{path}: holds a {type(content).__name__}, not a JSON {expected}; restore the file")
    if kind is list and not all(isinstance(entry, dict) for entry in content):
        raise ValueError(f"{path}: holds a list of other things than JSON objects; restore the file")
    return content


@contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """`safetensors.safe_open` of a file, for PyTorch.

    Raises:
        ValueError: for a file that is missing, truncated or corrupt; names the file.
    """
    try:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: there is no such file; restore it")
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        with open(path, "rb") as start:
            if start.read(len(LFS_POINTER)) == LFS_POINTER:
                pointer = "a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"
                raise ValueError(f"{path}: is {pointer}") from error
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: cut short or corrupt ({reason}); copy or download the file again") from error


def read_index(path: str | os.PathLike[str]) -> dict[str, str]:
    """The weight_map of an index: for each tensor, its file in the folder of the index.

    Raises:
        ValueError: for a broken index, and for names that are not files in its folder. Links may lead elsewhere, as
            those of the Hub's cache do.
    """
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{path}: weight_map = {where!r} names no tensors; restore the file")
    folder = os.path.dirname(path)
    for name in sorted(set(map(str, where.values()))):
        if os.path.basename(name) != name or "\0" in name or not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f"{path}: names the file {name!r}, which is not in the folder; restore it")
    return {str(tensor): str(file) for tensor, file in where.items()}


def check_config(folder: str | os.PathLike[str]) -> None:
    """Raise a ValueError for a missing or broken config.json."""
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        raise ValueError(f"{os.fspath(folder)} has no {CONFIG}; give a folder that `save_pretrained` wrote")
    read_json(path)


def variant_name(name: str, variant: str | None) -> str:
    """What Transformers calls a file of a variant: model.fp16.safetensors, model.safetensors.index.fp16.json."""
    stem, ending = name.rsplit(".", 1)
    return f"{stem}.{variant}.{ending}" if variant else name


def weight_files(folder: str | os.PathLike[str], variant: str | None = None) -> list[str]:
    """Paths of a folder's safetensors: one file, or the shards in its index; an empty list without safetensors.

    Raises:
        ValueError: as `read_index`.
    """
    single, index = (os.path.join(folder, variant_name(name, variant)) for name in (WEIGHTS, INDEX))
    if os.path.isfile(single):
        return [single]
    names = set(read_index(index).values()) if os.path.isfile(index) else ()
    return [os.path.join(folder, name) for name in sorted(names)]


def check_weights(files: Iterable[str]) -> None:
    """Check the headers of safetensors, which is fast.

    Raises:
        ValueError: for a broken file, and for integer weights in a model that is not quantized, which would be cast to
            floats; names the file.
    """
    for path in files:
        with open_tensors(path) as tensors:
            types = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}
        # checkpoints of older releases have buffers, such as embeddings.position_ids; names without a dot belong to no
        # module
        wrong = [n for n, kind in types.items() if kind in NO_WEIGHTS and "." in n and not n.endswith("_ids")]
        config = os.path.join(os.path.dirname(path), CONFIG)
        if wrong and not (os.path.isfile(config) and read_json(config).get("quantization_config")):
            found = f"{wrong[0]} has dtype {types[wrong[0]]}, but {CONFIG} has no quantization_config"
            raise ValueError(f"{path}: {found}; restore the file")


def is_checkpoint(source: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether `from_pretrained` is given a checkpoint, instead of tensors or a file in another format."""
    others = arguments.get("state_dict") is not None or arguments.get("gguf_file") is not None
    return isinstance(source, str | os.PathLike) and not others


def check_local(checkpoint: Any, arguments: Mapping[str, Any]) -> None:
    """Check the files of a local folder before `from_pretrained` loads them; does nothing for other checkpoints.

    Raises:
        ValueError: for broken files, and weights without a readable config.json.
    """
    if arguments.get("use_safetensors") is False or not is_checkpoint(checkpoint, arguments):
        return
    subfolder = arguments.get("subfolder")
    folder = os.path.join(checkpoint, subfolder) if subfolder else checkpoint
    files = weight_files(folder, arguments.get("variant"))
    if arguments.get("config") is None and (files or os.path.isfile(os.path.join(folder, CONFIG))):
        check_config(folder)
    check_weights(files)
