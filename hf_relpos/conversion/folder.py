"""Folders of checkpoints: what belongs to one, how it is laid out, and what is copied to the result.

A folder of sentence-transformers holds an encoder, and modules such as pooling, which are copied unchanged.
`modules.json` lists the modules with their classes and folders. The first is the Transformer, in the folder itself or
in `0_Transformer`. The result loads as a SentenceTransformer, after `import hf_relpos` or with
`trust_remote_code=True`.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..checkpoints.errors import ConversionError, abbreviate
from ..checkpoints.files import read_json
from ..checkpoints.hub import download
from ..checkpoints.paths import check_free, local_folder
from ..checkpoints.privacy import without_local_paths
from ..checkpoints.weights import (
    CARD,
    CHECKPOINT_FILES,
    INDEX,
    PICKLED_FILES,
    TOKENIZER_FILES,
    WEIGHTS,
    has_safetensors,
)
from ..files import atomic_folder, check_writable, describe_write_error, write_json
from ..models.saved_code.remote_code import own_files


REPORT = "conversion.json"
MODULES = "modules.json"
# Text files in the folder of modules.json, and in the folder of the encoder's config.json.
TOP_FILES = (MODULES, "config_sentence_transformers.json")
ENCODER_FILES = ("sentence_*_config.json",)
TOKENIZER_CONFIG, SENTENCE_CONFIG = "tokenizer_config.json", "sentence_bert_config.json"
MODULE_KINDS = ("cnn", "lstm", "phrasetokenizer", "whitespacetokenizer", "wordembedding")
MODULE_FILES = ("config.json", *(f"{kind}_config.json" for kind in MODULE_KINDS), "vocab.txt", WEIGHTS)
# A relative path of plain names, which every file system can have.
MODULE_PATH = re.compile(r"\.|(\w[\w .-]{0,60}/)*(\w[\w .-]{0,60})?")
# Modules without parameters; all others must have them in safetensors.
WEIGHTLESS = ("Pooling", "Normalize", "Dropout", "WordWeights")
# Files that a conversion and `save_pretrained` of a model and a tokenizer write, and .gitattributes.
MODEL_FILES = ("config.json", "generation_config.json", WEIGHTS, "model-?????-of-?????.safetensors", INDEX)
KNOWN = (*MODEL_FILES, *TOKENIZER_FILES, *TOP_FILES, *ENCODER_FILES, CARD, REPORT, ".gitattributes")


@dataclass(frozen=True)
class Layout:
    """The parts of a checkpoint folder.

    Attributes:
        top: the folder.
        revision: commit of the Hub repository that it was downloaded from; None for a local folder.
        encoder: relative folder of config.json and the weights; empty for the folder itself.
        modules: class by relative folder of the other modules; empty except for sentence-transformers.
        listed: whether there is a modules.json.
        pools: whether the modules make a SentenceTransformer. A CrossEncoder has a modules.json, too.
    """

    top: Path
    revision: str | None = None
    encoder: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    listed: bool = False
    pools: bool = False

    def copy(self, target: Path, model: PreTrainedModel) -> tuple[str, ...]:
        """Copy the files beside config.json and the weights byte for byte; returns their relative names.

        They are those of the tokenizer, of generation if the model generates, and of the modules. Fields of
        tokenizer_config.json with local paths are removed.
        """
        patterns: dict[str, Sequence[str]] = {folder: MODULE_FILES for folder in self.modules}
        patterns[self.encoder] = (*TOKENIZER_FILES, *(["generation_config.json"] if model.can_generate() else []))
        if self.listed:
            patterns[self.encoder] = (*patterns[self.encoder], *ENCODER_FILES)
            patterns[""] = (*patterns.get("", ()), *TOP_FILES)
        paths = {path for folder, each in patterns.items() for name in each for path in (self.top / folder).glob(name)}
        files = sorted(path for path in paths if path.is_file())
        for folder in patterns:  # that of a module must exist even without files
            (target / folder).mkdir(parents=True, exist_ok=True)
        for path in files:
            check_link(path, self.top)
            copied = target / path.relative_to(self.top)
            content = read_json(path) if path.name == TOKENIZER_CONFIG else {}
            if (kept := without_local_paths(content)) != content:
                write_json(copied, kept, indent=2)
            else:
                shutil.copyfile(path, copied)
        return tuple(path.relative_to(self.top).as_posix() for path in files)

    def write_length(self, target: Path, length: int) -> None:
        """Write the number of tokens that the encoder reads into the files by which tokenizers cut texts.

        Args:
            target: folder of the result, with the copied files.
            length: value of `model_max_length`, and of `max_seq_length` in a folder of sentence-transformers.
        """
        folder = target / self.encoder
        paths = [path for path in (folder / TOKENIZER_CONFIG,) if path.is_file()]
        if self.listed:  # without max_seq_length, a SentenceTransformer takes max_position_embeddings
            paths += sorted(folder.glob(ENCODER_FILES[0])) or [folder / SENTENCE_CONFIG]
        for path in paths:
            field = "model_max_length" if path.name == TOKENIZER_CONFIG else "max_seq_length"
            write_json(path, {**(read_json(path) if path.is_file() else {}), field: length}, indent=2)


def locate(source: str | Path, revision: str | None = None, allow_pickle: bool = False) -> Layout:
    """The folder of a checkpoint, downloaded if it is on the Hub.

    Args:
        source: local folder or Hub repository.
        revision: revision of a repository.
        allow_pickle: download pickled weights from a repository without safetensors.

    Raises:
        ValueError: for an unknown folder or repository, a failed download, modules whose weights are not in
            safetensors, and as `read_layout`.
    """
    folder, commit = local_folder(source, revision), None
    if folder is None:
        whole = (*CHECKPOINT_FILES, *TOKENIZER_FILES)
        folder = download(str(source), revision, "", (*whole, *TOP_FILES, *ENCODER_FILES, CARD))
        layout, commit = read_layout(folder), folder.name
        if layout.encoder:
            download(str(source), commit, layout.encoder, (*whole, *ENCODER_FILES))
        for module in layout.modules:
            download(str(source), commit, module, MODULE_FILES)
        if allow_pickle and not has_safetensors(folder / layout.encoder):
            download(str(source), commit, layout.encoder, PICKLED_FILES)
    layout = read_layout(folder)
    for path, kind in layout.modules.items():
        if kind not in WEIGHTLESS and not (folder / path / WEIGHTS).is_file():
            remedy = "if you trust its pickle, load it as a SentenceTransformer, save it again, and convert that"
            raise ConversionError(f"{folder / path}: the module {kind} has no {WEIGHTS}; {remedy}")
    return replace(layout, revision=commit)


def read_layout(source: Path) -> Layout:
    """The layout of a folder.

    Raises:
        ValueError: for a modules.json that is broken, without exactly one Transformer, with classes from code of the
            repository, or with paths that name no folder in it.
    """
    listing = source / MODULES
    if not listing.is_file():
        return Layout(source)
    kinds: list[tuple[str, str]] = []
    for entry in read_json(listing, list):
        kind, path = str(entry.get("type", "")), entry.get("path")
        if not kind.startswith("sentence_transformers."):
            remedy = "to convert the encoder alone, remove modules.json from a copy of the folder"
            raise ConversionError(f"{listing}: type = {kind!r} is remote code, which is not run; {remedy}")
        if not isinstance(path, str) or not MODULE_PATH.fullmatch(path):
            raise ConversionError(f"{listing}: path = {path!r} names no folder in it; give the module's relative path")
        kinds.append((path, kind.rpartition(".")[2]))
    encoders = [path for path, kind in kinds if kind.endswith("Transformer")]
    if len(encoders) != 1:
        count = f"{len(encoders)} modules have the type Transformer, not one"
        raise ConversionError(f"{listing}: {count}; give an encoder's folder")
    own = {"", ".", encoders[0]}  # a module without a separate folder has no files
    modules = {path: kind for path, kind in kinds if path not in own}
    pools = any(kind.endswith("Pooling") for _, kind in kinds)
    return Layout(source, encoder=encoders[0], modules=modules, listed=True, pools=pools)


def check_target(out: str | Path, overwrite: bool, source: str | Path | None = None) -> Path:
    """Check and return the folder to write, with links resolved: a link to a folder is kept, and the folder replaced.

    Args:
        source: folder or Hub repository of the source; None for none.

    Raises:
        ConversionError: for an existing folder, unless it holds only a checkpoint and may be overwritten; and as
            `check_apart`.
    """
    try:
        target = Path(out).expanduser().resolve()
    except (OSError, RuntimeError) as error:  # circular links
        raise ConversionError(f"out = '{out}' cannot be resolved ({error}); choose another folder") from error
    if source is not None:
        check_apart(source, target)
    check_free(out, overwrite)
    if target.exists():
        check_replaceable(out, target)
        if os.path.ismount(target):
            raise ConversionError(f"out = '{out}' is where a disk is mounted; choose a folder in it")
    try:  # now, not after minutes of training
        check_writable(next(parent for parent in target.parents if parent.exists()) / target.name)
    except OSError as error:
        raise ConversionError(describe_write_error(error, target)) from error
    return target


@contextmanager
def new_folder(out: str | Path, target: Path, overwrite: bool, keep: bool = True) -> Iterator[Path]:
    """`atomic_folder` for `check_target`, in which a user may have added files in the meantime.

    Args:
        keep: False for a trial, as there.

    Raises:
        ConversionError: for a folder that cannot be written, and as `check_replaceable`.
    """
    try:
        with atomic_folder(target, overwrite, partial(check_replaceable, out), keep) as unfinished:
            yield unfinished
    except (OSError, SafetensorError) as error:
        raise ConversionError(describe_write_error(error, target)) from error


def check_replaceable(out: str | Path, folder: Path) -> None:
    """Check that a folder to replace holds only a checkpoint.

    Args:
        out: name of the folder, for messages.
        folder: its current path.

    Raises:
        ConversionError: for files that do not belong to a checkpoint, and a folder without a checkpoint.
    """
    encoder, others = folder / _layout(folder).encoder, other_files(folder)
    files = sorted(path.name for path in folder.iterdir())
    if others:
        why = f"it has other files than a checkpoint ({abbreviate(others, 10)})"
    elif files and not ((encoder / "config.json").is_file() and has_safetensors(encoder)):
        why = f"its files ({abbreviate(files, 10)}) are not a checkpoint: config.json or safetensors are missing"
    else:
        return
    raise ConversionError(f"out = '{out}' is not overwritten: {why}. Move them, or choose another folder")


def check_apart(source: str | Path, target: Path) -> None:
    """Check that the result is not written into the source, or over it.

    Args:
        source: folder or Hub repository given by the caller.
        target: the folder to write, with links resolved.

    Raises:
        ConversionError: if the folders are the same, or one contains the other.
    """
    if not os.path.exists(os.path.expanduser(source)):  # unlike Path's, false for a name that is too long
        return
    folder = Path(source).expanduser().resolve()
    if target in (folder, *folder.parents):
        raise ConversionError(f"out = '{target}' is the source or holds it; choose another folder")
    if folder in target.parents:
        raise ConversionError(f"out = '{target}' lies in the source, '{source}'; choose a folder outside of it")


def other_files(folder: Path) -> list[str]:
    """Relative paths, sorted, of files in a folder that do not belong to a checkpoint."""
    layout = _layout(folder)
    known = {folder / name: [*MODULE_FILES] for name in layout.modules}
    known |= {each: [*KNOWN, *own_files(each)] for each in (folder, folder / layout.encoder)}
    places = {place for each in known for place in (each, *each.parents)}

    def others(place: Path) -> Iterator[str]:
        for path in place.iterdir():
            name = path.relative_to(folder).as_posix()
            if path.is_dir() and not path.is_symlink():
                yield from others(path) if path in places else [f"{name}/"]
            elif not any(fnmatch(path.name, pattern) for pattern in known.get(place, ())):
                yield name

    return sorted(others(folder))


def _layout(folder: Path) -> Layout:
    """The layout of a folder; a plain layout if modules.json cannot be read."""
    with suppress(ValueError):
        return read_layout(folder)
    return Layout(folder)


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
        raise ConversionError(f"{path}: a link out of the folder, to {real}; put the file there, or remove the link")
