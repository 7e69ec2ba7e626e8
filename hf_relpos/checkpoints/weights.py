"""The tensors of a folder in safetensors, and in pickles of tensors if the caller asks for them.

It also has the names of all files of a checkpoint. No code of a repository is run.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from textwrap import shorten

import torch

from .errors import ConversionError, abbreviate
from .files import INDEX, WEIGHTS, open_tensors, read_index, variant_name, weight_files


PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
SAFETENSORS_FILES = ("model*.safetensors", INDEX)
CHECKPOINT_FILES = ("config.json", "adapter_config.json", "generation_config.json", *SAFETENSORS_FILES)
PICKLED_FILES = (PICKLED_WEIGHTS, "pytorch_model-*.bin", PICKLED_INDEX)
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
# Files with the words of a tokenizer.
SENTENCEPIECE = ("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model", "spm.model", "tokenizer.model")
VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "bpe.codes", *SENTENCEPIECE)
TOKENIZER_FILES = (*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
CARD = "README.md"


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
    found = f"{missing}{', only ' if pickles else ''}{abbreviate(pickles)}; give a folder with safetensors weights"
    file = variant_name(PICKLED_WEIGHTS, variant)
    remedy = f"allow_pickle=True (--allow-pickle) reads the tensors in {file} or its shards"
    raise ConversionError(f"{found}. Pickles are not read unasked, since they can run code; if you trust it, {remedy}")


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
        for path in weight_files(folder, variant):
            with open_tensors(path) as tensors:
                names += tensors.keys()
        return names
    return []


def _read_shards(folder: Path, index: str, read: Callable[[Path], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Read all tensors of the files in an index by the function that reads one of them."""
    where = read_index(folder / index)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(where.values())):
        tensors |= {name: tensor for name, tensor in read(folder / shard).items() if where.get(name) == shard}
    if lost := [name for name in where if name not in tensors]:
        path = folder / where[lost[0]]
        raise ConversionError(f"{path}: lacks {abbreviate(lost)}, which {index} expects there; restore the file")
    return tensors


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def _read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a `torch.save` file with PyTorch's unpickler for tensors only."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a corrupt pickle may raise any error
        reason = shorten(" ".join(str(error).split()), 160, placeholder=" …")
        found = f"corrupt, or holds other things than tensors, which could run code ({type(error).__name__}: {reason})"
        raise ConversionError(f"{path}: {found}; copy or download it again, or take safetensors") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: holds a {type(content).__name__}, not tensors by name; save a state_dict")
    others = [
        name
        for name, value in content.items()
        if not (isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided)
    ]
    if others:
        wrong = f"{abbreviate(map(repr, others))}: not a plain tensor under its name"
        raise ConversionError(f"{path}: {wrong}; save the model's state_dict alone")
    return {name: tensor.detach() for name, tensor in content.items()}
