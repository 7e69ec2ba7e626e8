"""What `optimize` gains on somebody's own texts: seconds and outputs of a model before and after."""

import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import AutoModel

from ..data.records import open_text, text_suffix
from ..data.text import TextError, find_text, pair_fields, read_texts
from ..families.checkpoint import snapshot
from ..families.paths import local_folder
from ..live import optimize
from ..models.checkpoint_files import read_json
from .loading import load_tokenizer, no_such_model, refusing_code


MOST_TEXTS = 64  # they are one batch
PLAIN = (".txt", ".md")
LONGEST = 512  # tokens of a text, where the tokenizer has no limit


def measure_gain(
    name: str,
    text: Sequence[str],
    field: str | Sequence[str] = "text",
    precision: str = "float32",
    padding: str = "zeros",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Measure on the CPU what `optimize` gains on a batch of texts; nothing is written.

    Args:
        name: folder or Hub repository, loaded as sentence-transformers' class that it is of, or else by AutoModel.
        text: sources as of `read_texts`; of plain text each line is a text. `MOST_TEXTS` of them are read.
        field: as of `read_texts`.
        precision, padding: as of `optimize`.

    Returns:
        The model's `name` and class, the `report` of `optimize`, and the fields of its `agreement`.

    Raises:
        ValueError: for an unknown model, and for text that cannot be read or has none.
    """
    texts = list(itertools.islice(_texts(text, field), MOST_TEXTS))
    if not texts:
        raise TextError(f"text = {', '.join(text)}: there is none; give a file with the texts that you compute")
    try:
        with refusing_code(name):
            model, tokenizer = _load(name, trust_remote_code)
    except OSError as error:
        raise ValueError(no_such_model(name, error)) from error
    rows = [(texts[0], each) for each in texts] if type(model).__name__ == "CrossEncoder" else texts
    longest = min(tokenizer.model_max_length, LONGEST)
    sample = tokenizer(rows, return_tensors="pt", padding=True, truncation=True, max_length=longest)
    handle = optimize(model, precision, padding=padding, sample=sample)
    assert handle.agreement is not None, "there is a sample"
    return {"model": f"{name} ({type(model).__name__})", "report": str(handle), **asdict(handle.agreement)}


def _texts(sources: Sequence[str], field: str | Sequence[str]) -> Iterator[str]:
    """Documents, but for a file of plain text, whose lines are texts."""
    for source, own_field in pair_fields(sources, field):
        path = find_text(source)
        if path.is_dir() or text_suffix(path) not in PLAIN:
            yield from read_texts(source, own_field)
        else:
            with open_text(path) as lines:
                yield from filter(None, map(str.strip, lines))


def _load(name: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """The model as its folder says, in evaluation mode, and its tokenizer."""
    folder = local_folder(name) or snapshot(name, ["*.json"])
    kind = _kind(folder) if importlib.util.find_spec("sentence_transformers") else ""
    if not kind:
        return AutoModel.from_pretrained(name, trust_remote_code=trust_remote_code).eval(), load_tokenizer(name)
    import sentence_transformers

    owner = getattr(sentence_transformers, kind)(name, device="cpu", trust_remote_code=trust_remote_code)
    return owner.eval(), owner.tokenizer


def _kind(folder: Path) -> str:
    """The class of sentence-transformers that a folder is of; empty for none of them."""
    config, sentences = (
        read_json(path) if (path := folder / name).is_file() else {}
        for name in ("config.json", "config_sentence_transformers.json")
    )
    if (folder / "modules.json").is_file():
        found: str = sentences.get("model_type", "SentenceTransformer")
        return found
    scores = len(config.get("id2label", ())) == 1 and "Classification" in str(config.get("architectures"))
    return "CrossEncoder" if scores or "sentence_transformers" in config else ""
