"""Read the files of a checkpoint of any release: locate, download and check them.

It reads JSON and safetensors, and pickles of tensors if the caller asks for it. It never runs code of a repository.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..models import checkpoint_files
from ..models.checkpoint_files import INDEX, WEIGHTS, variant_name
from ..models.checks import without_kernels
from .errors import ConversionError, abbreviate
from .paths import check_source


# What a configuration raises for its fields.
FIELD_ERRORS = (StrictDataclassError, TypeError, ValueError)
PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
SAFETENSORS_FILES = ("model*.safetensors", INDEX)
CHECKPOINT_FILES = ("config.json", "generation_config.json", *SAFETENSORS_FILES)
PICKLED_FILES = (PICKLED_WEIGHTS, "pytorch_model-*.bin", PICKLED_INDEX)
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
# Files with the words of a tokenizer.
VOCABULARIES = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "bpe.codes",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
)
TOKENIZER_FILES = (*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
CARD = "README.md"


def download(repository: str, revision: str | None, folder: str, patterns: Iterable[str]) -> tuple[Path, str]:
    """Download files of a Hub repository; returns their folder and the commit.

    Args:
        folder: folder of the repository; empty for its top, without subfolders.
        patterns: patterns of the files in that folder.

    Raises:
        ConversionError: for an unknown repository, or a failed download.
    """
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    check_source(repository)
    try:
        downloaded = snapshot(repository, patterns, folder, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        at = "" if revision is None else f" at revision {revision!r}"
        raise ConversionError(
            f"source = {repository!r}: there is no such folder, and no such Hub repository{at} that you may read; "
            "check the spelling, or log in with `hf auth login`"
        ) from error
    except OSError as error:  # no connection, offline mode, errors of the Hub, a full disk
        reason = shorten(str(error), 160, placeholder=" …")
        raise ConversionError(
            f"source = {repository!r}: there is no such folder, and the Hub repository could not be downloaded "
            f"({type(error).__name__}: {reason}). Check the connection and HF_HUB_OFFLINE, or download it elsewhere "
            f"with `hf download {repository} --local-dir FOLDER` and give that folder"
        ) from error
    return downloaded.resolve(), downloaded.name


def snapshot(repository: str, patterns: Iterable[str], folder: str = "", **options: Any) -> Path:
    """Download files in a folder of a Hub repository; returns the repository's own folder in the cache.

    Args:
        patterns: patterns of the files.
        folder: folder of the repository; empty for its top, without subfolders.
        options: of `huggingface_hub.snapshot_download`, whose errors are raised.
    """
    from huggingface_hub import snapshot_download

    prefix = f"{folder}/" if folder else ""
    allowed, ignored = [prefix + pattern for pattern in patterns], [f"{prefix}*/*"]
    logger = logging.getLogger(snapshot_download.__module__)
    logger.addFilter(_no_match)
    try:
        return Path(snapshot_download(repository, allow_patterns=allowed, ignore_patterns=ignored, **options))
    finally:
        logger.removeFilter(_no_match)


def _no_match(record: logging.LogRecord) -> bool:
    # a folder without files of its own is no fault
    return not record.getMessage().startswith("No files matched")


@contextmanager
def conversion_errors(prefix: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Raise errors of a block as a ConversionError, with a prefix; a ConversionError as it is."""
    try:
        yield
    except ConversionError:
        raise
    except kinds as error:
        raise ConversionError(f"{prefix}{error}") from error


def check_link(path: Path, folder: Path) -> None:
    """Reject a link out of its checkpoint folder, since the copy could be any file of this machine.

    Weights are read as tensors and not copied, so they may be anywhere. In the cache of the Hub every file is a link
    to one of its `blobs`.

    Raises:
        ConversionError: for such a link; names the link and its target.
    """
    real, top = path.resolve(), folder.resolve()
    places = [top, *(above.parent / "blobs" for above in (top, *top.parents) if above.name == "snapshots")]
    if not any(place in real.parents for place in places):
        raise ConversionError(
            f"{path}: a link out of the folder, to {real}, which would be copied into the result; put the file itself "
            "there, or remove the link"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint.

    Raises:
        ValueError: for a folder without a readable config.json, and a quantised model.
    """
    path = folder / "config.json"
    checkpoint_files.check_config(folder)
    config = without_kernels(checkpoint_files.read_json(path), path)
    if config.get("quantization_config"):
        raise ConversionError(
            f"{folder}: quantization_config is set; convert the checkpoint it was made from, and quantise the result"
        )
    return config


def has_safetensors(folder: Path, variant: str | None = None) -> bool:
    """Whether a folder has weights in safetensors, in one file or in shards."""
    return any((folder / variant_name(name, variant)).is_file() for name in (WEIGHTS, INDEX))


def read_tensors(folder: Path, allow_pickle: bool = False, variant: str | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a folder, under the names in its files.

    Args:
        folder: of the checkpoint.
        allow_pickle: read `pytorch_model.bin`, or its shards, where there are no safetensors.
        variant: as `from_pretrained` takes it, such as `fp16`.

    Raises:
        ValueError: for a folder without readable weights, and for files that are missing, truncated or corrupt.
    """
    readers = {WEIGHTS: _read_file, INDEX: _read_file}
    if allow_pickle:
        readers |= {PICKLED_WEIGHTS: _read_pickle, PICKLED_INDEX: _read_pickle}
    for file, read in readers.items():
        name = variant_name(file, variant)
        if (folder / name).is_file():
            return _read_shards(folder, name, read) if file in (INDEX, PICKLED_INDEX) else read(folder / name)
    missing = f"{folder}: no {', '.join(variant_name(file, variant) for file in readers)}"
    if allow_pickle:
        raise ConversionError(f"{missing}; give a folder with weights")
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    raise ConversionError(
        f"{missing}{', only ' if pickles else ''}{abbreviate(pickles)}; give a folder with safetensors weights. "
        "Pickles are not read unasked, since loading one can run code. If you trust where it comes from, pass "
        f"allow_pickle=True (--allow-pickle), which reads {variant_name(PICKLED_WEIGHTS, variant)} or its shards, and "
        "from them tensors only"
    )


def tensor_names(folder: Path, allow_pickle: bool = False, variant: str | None = None) -> list[str]:
    """Names of the tensors of a folder; only headers of safetensors are read. Empty if they cannot be read.

    Args:
        folder: folder of the checkpoint.
        allow_pickle, variant: as for `read_tensors`.
    """
    with suppress(ValueError):
        if allow_pickle and not has_safetensors(folder, variant):
            return list(read_tensors(folder, allow_pickle, variant))
        names: list[str] = []
        for path in checkpoint_files.weight_files(folder, variant):
            with checkpoint_files.open_tensors(path) as tensors:
                names += tensors.keys()
        return names
    return []


def _read_shards(folder: Path, index: str, read: Callable[[Path], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Read all tensors of the files in an index by the function that reads one of them."""
    where = checkpoint_files.read_index(folder / index)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(where.values())):
        tensors |= {name: tensor for name, tensor in read(folder / shard).items() if where.get(name) == shard}
    if lost := [name for name in where if name not in tensors]:
        path = folder / where[lost[0]]
        raise ConversionError(f"{path}: lacks {abbreviate(lost)}, which {index} expects there; restore the file")
    return tensors


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    with checkpoint_files.open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a `torch.save` file with PyTorch's unpickler for tensors only."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a corrupt pickle may raise any error
        reason = shorten(" ".join(str(error).split()), 160, placeholder=" …")
        raise ConversionError(
            f"{path}: corrupt, or holds other things than tensors, which are not read since they could run code "
            f"({type(error).__name__}: {reason}); copy or download the file again, or take safetensors"
        ) from error
    if not isinstance(content, dict):
        raise ConversionError(
            f"{path}: holds a {type(content).__name__}, not the tensors of a model by their names; save its state_dict"
        )
    others = [
        name
        for name, value in content.items()
        if not (isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided)
    ]
    if others:
        raise ConversionError(
            f"{path}: {abbreviate(map(repr, others))}: not a plain tensor under its name; save the model's state_dict "
            "alone"
        )
    return {name: tensor.detach() for name, tensor in content.items()}
