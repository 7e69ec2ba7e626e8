"""Read a checkpoint of any release: locate it, check it, rename its tensors as in stock BERT.

It reads JSON and safetensors, and pickles of tensors if the caller asks for it. It never runs code of a repository.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from ..models import checkpoint_files
from ..models.checkpoint_files import INDEX, WEIGHTS, variant_name
from ..models.checks import without_kernels
from ..models.loading import WITHOUT_POSITIONS, in_body
from .errors import ConversionError, abbreviate, check_shape
from .names import TIES, Tie, is_buffer, is_table
from .paths import check_source
from .registry import resemblance


PICKLED_WEIGHTS = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
SAFETENSORS_FILES = ("model*.safetensors", INDEX)
CHECKPOINT_FILES = ("config.json", "generation_config.json", *SAFETENSORS_FILES)
PICKLED_FILES = (PICKLED_WEIGHTS, "pytorch_model-*.bin", PICKLED_INDEX)
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = tuple(
    (
        "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.txt vocab.json "
        "merges.txt bpe.codes sentencepiece.bpe.model sentencepiece.model spiece.model spm.model tokenizer.model"
    ).split()
)
CARD = "README.md"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors have their stock names.

    Attributes:
        name: name given by the caller.
        folder: local folder, downloaded if the checkpoint is on the Hub.
        revision: commit of the Hub repository; None for a local folder.
        config: content of config.json.
        architecture: stock class.
        tensors: tensors by stock name, of one dtype, complete except for a missing pooler of BertModel.
        origin: name in the file by stock name, also for tensors in `extra`.
        extra: tensors that are not in the architecture, by stock name.
        cut: first rows of tensors, by stock name, which are removed; `tensors` has the other rows.
    """

    name: str
    folder: Path
    revision: str | None
    config: dict[str, Any]
    architecture: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    cut: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The common dtype of the tensors."""
        return next(iter(self.tensors.values())).dtype


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
def conversion_errors(prefix: str = "") -> Iterator[None]:
    """Raise a ValueError of the block as a ConversionError, with a prefix."""
    try:
        yield
    except ValueError as error:
        raise ConversionError(f"{prefix}{error}") from error


@conversion_errors()
def read_json(path: Path, kind: type[dict[str, Any]] | type[list[Any]] = dict) -> Any:
    """As `checkpoint_files.read_json`, with a ConversionError."""
    return checkpoint_files.read_json(path, kind)


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
        ConversionError: for a folder without config.json, and a quantised model.
    """
    path = folder / "config.json"
    with conversion_errors():
        checkpoint_files.check_config(folder)
    config = without_kernels(read_json(path), path)
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
        ConversionError: for a folder without readable weights, and for files that are missing, truncated or corrupt.
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
    names: list[str] = []
    try:
        if allow_pickle and not has_safetensors(folder, variant):
            return list(read_tensors(folder, allow_pickle, variant))
        for path in checkpoint_files.weight_files(folder, variant):
            with checkpoint_files.open_tensors(path) as tensors:
                names += tensors.keys()
    except ValueError:
        return []
    return names


@conversion_errors()
def _read_shards(folder: Path, index: str, read: Callable[[Path], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Read all tensors of the files in an index by the function that reads one of them."""
    where = checkpoint_files.read_index(folder / index)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(set(where.values())):
        path = folder / shard
        inside = read(path)
        names = [name for name, file in where.items() if file == shard]
        lost = [name for name in names if name not in inside]
        if lost:
            raise ConversionError(f"{path}: lacks {abbreviate(lost)}, which {index} expects there; restore the file")
        tensors.update((name, inside[name]) for name in names)
    return tensors


@conversion_errors()
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


def rename_and_validate(
    source: Checkpoint,
    raw: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Size],
    rename: Callable[[str], list[str]],
    tied: bool,
    unused: Callable[[str], bool] = is_buffer,
    cut: int = 0,
) -> Checkpoint:
    """Rename the tensors of a source to their stock names, check them, and add both names of tied tensors.

    Args:
        source: the source without tensors.
        raw: tensors by name in the file.
        expected: shape of every tensor of the architecture with this configuration, by stock name.
        rename: maps a name in the file to stock names: one, or several for a tensor that layers share.
        tied: `config.tie_word_embeddings`.
        unused: whether a stock name in the body may be ignored.
        cut: number of first rows of the absolute position embeddings to remove.

    Returns:
        The source with its tensors.

    Raises:
        ConversionError: for names that collide, tensors that are missing or not in the architecture, shapes
            that differ from the configuration's, quantised weights, and values that are not finite.
    """
    folder, base = source.folder, source.architecture == "BertModel"
    renamed: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    for name, tensor in raw.items():
        for stock in rename(name):
            if stock in renamed:
                raise ConversionError(
                    f"{folder}: {origin[stock]} and {name} are two spellings of one tensor; remove one of them"
                )
            renamed[stock], origin[stock] = tensor, name
    for tie in TIES:
        if tie.name in expected and tie.other in expected:
            _complete(folder, renamed, origin, tie, tied)

    tensors = {name: renamed[name] for name in expected if name in renamed}
    extra = {name: tensor for name, tensor in renamed.items() if name not in expected}
    missing = [name for name in expected if name not in renamed]
    if base and all(name.startswith("pooler.") for name in missing) and len(missing) in (0, 2):
        missing = []  # masked language models are saved without it; it is initialised at random, as in stock BERT
    if missing:
        lack = (
            f"{folder}: the weights lack {len(missing)} of {len(expected)} tensors of {source.architecture}: "
            f"{abbreviate(missing)}"
        )
        if looks := resemblance(raw, folder, source.config.get("model_type", "bert")):
            raise ConversionError(f"{lack}. {looks}")
        if all(is_table(name) for name in missing):
            raise ConversionError(f"{lack}. {WITHOUT_POSITIONS.format(source=folder)}")
        remedy = "restore the file"
        if not any(in_body(name) for name in missing):
            remedy += ", or pass architecture='BertModel' to convert the encoder without its head"
        raise ConversionError(f"{lack}; {remedy} (the file holds {abbreviate(sorted(raw), 2)})")
    stray = list(dict.fromkeys(origin[name] for name in extra if in_body(name) and not unused(name)))
    if stray:
        raise ConversionError(
            f"{folder}: {abbreviate(stray)}: not part of a BERT of this "
            "configuration (num_hidden_layers, add_cross_attention); leaving weights out would change the outputs. "
            "Correct config.json, or remove the tensors if they are unused"
        )
    for name, tensor in tensors.items():
        more = cut if is_table(name) else 0
        _check_tensor(folder, origin[name], tensor, torch.Size((expected[name][0] + more, *expected[name][1:])))
    # tensors of mixed dtypes are cast to the common wider one, which changes no value
    dtype = next(iter(tensors.values())).dtype
    for tensor in tensors.values():
        dtype = torch.promote_types(dtype, tensor.dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    front = {name: tensor[:cut] for name, tensor in tensors.items() if cut and is_table(name)}
    tensors |= {name: tensors[name][cut:] for name in front}
    return replace(source, tensors=tensors, origin=origin, extra=extra, cut=front)


def _complete(folder: Path, tensors: dict[str, torch.Tensor], origin: dict[str, str], tie: Tie, tied: bool) -> None:
    """Add the second name of a tied tensor; reject a tie whose two tensors differ."""
    if tie.name in tensors and tie.other in tensors:
        if tied and not torch.equal(tensors[tie.name], tensors[tie.other]):
            raise ConversionError(
                f"{folder}: {origin[tie.name]} and {origin[tie.other]} differ, but tie_word_embeddings = True makes "
                "them one tensor; set tie_word_embeddings to false in config.json to keep both, or remove one of them"
            )
    elif tied or tie.always:
        for absent, present in ((tie.name, tie.other), (tie.other, tie.name)):
            if present in tensors:
                tensors[absent], origin[absent] = tensors[present], origin[present]


def _check_tensor(folder: Path, name: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    check_shape(f"{folder}: {name}", tensor.shape, shape)
    if tensor.dtype not in DTYPES:
        raise ConversionError(
            f"{folder}: {name} has dtype {tensor.dtype}; convert the checkpoint in float32, float16 or bfloat16, and "
            "quantise the result"
        )
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise ConversionError(
            f"{folder}: {name} holds {bad} values that are NaN or infinite, of {tensor.numel()}; take a checkpoint "
            "from before they appeared"
        )
