"""Files of a checkpoint: JSON and safetensors, read with errors that name the file.

Transformers itself reads a folder's files only after this has looked at them: its own errors for broken ones do not
say which file it is, and it neither keeps an index inside its folder nor minds weights of an integer type.
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
# No file of a checkpoint is nested as deeply; what is costs Python its stack, in copies and when it is written.
DEEPEST = 100
LFS_POINTER = b"version https://git-lfs"
# Types of safetensors that weights which are not quantized never have.
NO_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "C64")


def read_json(path: str | os.PathLike[str], kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
    """A JSON object, or list of objects.

    Args:
        path: the file.
        kind: dict or list.

    Raises:
        ValueError: for a file that cannot be read or holds something else; names it.
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
    level, depth = [content], 0
    while level:
        parts = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for part in parts for value in part if isinstance(value, dict | list)]
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"{path}: nested more than {DEEPEST} levels deep; restore the file")
    return content


@contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """`safetensors.safe_open` of a file, for PyTorch.

    Raises:
        ValueError: for a file that is cut short or corrupt, or is none; names it.
    """
    try:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: there is no such file; restore it")
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        with open(path, "rb") as start:
            if start.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(
                    f"{path}: is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"
                ) from error
        raise ValueError(
            f"{path}: cut short or corrupt ({' '.join(str(error).split())}); copy or download the file again"
        ) from error


def read_index(path: str | os.PathLike[str]) -> dict[str, str]:
    """The weight_map of an index: name of each tensor to its file, beside the index.

    Raises:
        ValueError: for an index that is broken, or names what is no file in its folder. A link there may lead
            anywhere, as those of the Hub's cache do.
    """
    where = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{path}: weight_map = {where!r} names no tensors; restore the file")
    folder = os.path.dirname(path)
    for name in sorted(set(map(str, where.values()))):
        if os.path.basename(name) != name or "\0" in name or not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f"{path}: names the file {name!r}, which is not in the folder; restore it")
    return {str(tensor): str(file) for tensor, file in where.items()}


def check_config(folder: str | os.PathLike[str], only_if_there: bool = False) -> None:
    """
    Args:
        folder: of a checkpoint.
        only_if_there: whether it may have no config.json.

    Raises:
        ValueError: for a folder without a config.json, or with a broken one.
    """
    path = os.path.join(folder, CONFIG)
    if not os.path.isfile(path):
        if only_if_there:
            return
        raise ValueError(
            f"{os.fspath(folder)}: has no {CONFIG}, so this is not a checkpoint folder; give the folder that "
            "`save_pretrained` wrote"
        )
    read_json(path)


def variant_name(name: str, variant: str | None) -> str:
    """What Transformers calls a file of a variant: model.fp16.safetensors, model.safetensors.index.fp16.json.

    Args:
        name: of the file without a variant.
        variant: as `from_pretrained` takes it.
    """
    stem, ending = name.rsplit(".", 1)
    return f"{stem}.{variant}.{ending}" if variant else name


def weight_files(folder: str | os.PathLike[str], variant: str | None = None) -> list[str]:
    """Paths of a folder's safetensors, of the one file or, by the index, of its shards; none for a folder without.

    Args:
        folder: of the checkpoint.
        variant: as `from_pretrained` takes it, such as `fp16`.

    Raises:
        ValueError: for what `read_index` refuses.
    """
    single, index = (os.path.join(folder, variant_name(name, variant)) for name in (WEIGHTS, INDEX))
    if os.path.isfile(single):
        return [single]
    names = set(read_index(index).values()) if os.path.isfile(index) else ()
    return [os.path.join(folder, name) for name in sorted(names)]


def check_weights(files: Iterable[str]) -> None:
    """Check safetensors by their headers, which is quick, but those of a quantized model.

    Raises:
        ValueError: for a file that is broken, and for weights of integers, which would be taken for numbers; names it.
    """
    for path in files:
        with open_tensors(path) as tensors:
            types = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}
        # BERTs of older releases have buffers in the file, such as embeddings.position_ids; a name without a dot is
        # of no module
        wrong = [n for n, kind in types.items() if kind in NO_WEIGHTS and "." in n and not n.endswith("_ids")]
        config = os.path.join(os.path.dirname(path), CONFIG)
        if wrong and not (os.path.isfile(config) and read_json(config).get("quantization_config")):
            raise ValueError(
                f"{path}: {wrong[0]} has dtype {types[wrong[0]]}, and {CONFIG} no quantization_config; restore the "
                "file"
            )


def check_local(checkpoint: Any, arguments: Mapping[str, Any]) -> None:
    """Check the files of a local folder before `from_pretrained` loads them; does nothing for another checkpoint.

    Args:
        checkpoint: what `from_pretrained` is given.
        arguments: its other arguments.

    Raises:
        ValueError: for files that are broken, as the functions above, and weights without a config.json.
    """
    others = arguments.get("state_dict") is not None or arguments.get("gguf_file") is not None
    if others or arguments.get("use_safetensors") is False or not isinstance(checkpoint, str | os.PathLike):
        return
    subfolder = arguments.get("subfolder")
    folder = os.path.join(checkpoint, subfolder) if subfolder else checkpoint
    files = weight_files(folder, arguments.get("variant"))
    if files and arguments.get("config") is None and not os.path.isfile(os.path.join(folder, CONFIG)):
        check_config(folder)
    check_weights(files)
