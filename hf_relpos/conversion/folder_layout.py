"""Folders of sentence-transformers: an encoder, and modules such as pooling, which are copied unchanged.

`modules.json` lists the modules with their classes and folders. The first is the Transformer, in the folder itself or
in `0_Transformer`. The result loads as a SentenceTransformer, after `import hf_relpos` or with
`trust_remote_code=True`.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..families.checkpoint import (
    CARD,
    CHECKPOINT_FILES,
    PICKLED_FILES,
    TOKENIZER_FILES,
    WEIGHTS,
    check_link,
    download,
    has_safetensors,
    local_folder,
    read_json,
)
from ..families.errors import ConversionError
from ..files import write_json


MODULES = "modules.json"
# Text files in the folder of modules.json, and in the folder of the encoder's config.json.
TOP_FILES = (MODULES, "config_sentence_transformers.json")
ENCODER_FILES = ("sentence_*_config.json",)
TOKENIZER_CONFIG, SENTENCE_CONFIG = "tokenizer_config.json", "sentence_bert_config.json"
MODULE_FILES = (
    "config.json",
    "cnn_config.json",
    "lstm_config.json",
    "phrasetokenizer_config.json",
    "whitespacetokenizer_config.json",
    "wordembedding_config.json",
    "vocab.txt",
    WEIGHTS,
)
# Modules without parameters; all others must have them in safetensors.
WEIGHTLESS = ("Pooling", "Normalize", "Dropout", "WordWeights")


@dataclass(frozen=True)
class Layout:
    """The parts of a checkpoint folder.

    Attributes:
        encoder: relative folder of config.json and the weights; empty for the folder itself.
        modules: relative folders of the other modules; empty except for sentence-transformers.
        listed: whether there is a modules.json.
    """

    encoder: str = ""
    modules: tuple[str, ...] = ()
    listed: bool = False

    def copy(self, source: Path, target: Path) -> tuple[str, ...]:
        """Copy modules.json and the files of its modules byte for byte; returns their relative names."""
        if not self.listed:
            return ()
        patterns: list[tuple[str, Sequence[str]]] = [(folder, MODULE_FILES) for folder in self.modules]
        patterns += [("", TOP_FILES), (self.encoder, ENCODER_FILES)]
        paths = {path for folder, each in patterns for pattern in each for path in (source / folder).glob(pattern)}
        names = [path.relative_to(source) for path in sorted(paths) if path.is_file()]
        for folder in self.modules:  # the folder must exist even without files
            (target / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            check_link(source / name, source)
            shutil.copyfile(source / name, target / name)
        return tuple(name.as_posix() for name in names)

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


def locate(
    source: str | Path, revision: str | None = None, allow_pickle: bool = False
) -> tuple[Path, str | None, Layout]:
    """The folder of a checkpoint, downloaded if it is on the Hub; the commit of the download; and the layout.

    Args:
        source: local folder or Hub repository.
        revision: revision of a repository.
        allow_pickle: download pickled weights from a repository without safetensors.

    Raises:
        ConversionError: for an unknown folder or repository, a failed download, modules whose weights are not in
            safetensors, and as `read_layout`.
    """
    folder, commit = local_folder(source, revision), None
    if folder is None:
        whole = (*CHECKPOINT_FILES, *TOKENIZER_FILES)
        folder, commit = download(str(source), revision, "", (*whole, *TOP_FILES, *ENCODER_FILES, CARD))
        layout = read_layout(folder)
        if layout.encoder:
            download(str(source), commit, layout.encoder, (*whole, *ENCODER_FILES))
        for module in layout.modules:
            download(str(source), commit, module, MODULE_FILES)
        if allow_pickle and not has_safetensors(folder / layout.encoder):
            download(str(source), commit, layout.encoder, PICKLED_FILES)
    layout = read_layout(folder)
    check_modules(folder)
    return folder, commit, layout


def read_layout(source: Path) -> Layout:
    """The layout of a folder.

    Raises:
        ConversionError: for a modules.json without exactly one Transformer, with classes from code of the repository,
            or with paths that lead out of it.
    """
    if not (source / MODULES).is_file():
        return Layout()
    listing = source / MODULES
    encoders: list[tuple[str, str]] = []
    modules: list[tuple[str, str]] = []
    for entry in read_json(listing, list):
        kind, path = str(entry.get("type", "")), str(entry.get("path", ""))
        if not kind.startswith("sentence_transformers."):
            raise ConversionError(
                f"{listing}: type = {kind!r} is code of the repository, which is not run; to convert the encoder "
                "alone, remove modules.json from a copy of the folder"
            )
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
            raise ConversionError(f"{listing}: path = {path!r} leads out of the folder; correct it")
        (encoders if kind.endswith("Transformer") else modules).append((kind, path))
    if len(encoders) != 1:
        raise ConversionError(
            f"{listing}: lists {len(encoders)} modules of type Transformer, not one; to convert an encoder alone, "
            "give its folder, without modules.json"
        )
    own = {"", ".", encoders[0][1]}  # a module without a separate folder has no files
    return Layout(
        encoders[0][1],
        tuple(path for _, path in modules if path not in own),
        listed=True,
    )


def is_sentence_encoder(folder: Path) -> bool:
    """Whether a folder loads as a SentenceTransformer: its modules pool. A CrossEncoder has a modules.json, too."""
    path = folder / MODULES
    return path.is_file() and any(module["type"].endswith("Pooling") for module in read_json(path, list))


def check_modules(source: Path) -> None:
    """Check that the weights of modules are in safetensors.

    Raises:
        ConversionError: for other weights; names the module and the remedy.
    """
    if not (source / MODULES).is_file():
        return
    for entry in read_json(source / MODULES, list):
        kind, path = str(entry["type"]).rsplit(".", 1)[-1], str(entry.get("path", ""))
        if kind not in (*WEIGHTLESS, "Transformer") and not (source / path / WEIGHTS).is_file():
            raise ConversionError(
                f"{source / path}: the module {kind} has no {WEIGHTS}. Pickles are not read, since loading one can "
                "run code. If you trust it, load the folder as a SentenceTransformer and save it again, which writes "
                "safetensors, and convert that"
            )
