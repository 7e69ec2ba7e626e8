"""The model card of a converted and trained model: the Trainer's card with the card of the conversion."""

import shutil
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, metadata_load
from huggingface_hub.utils import yaml_dump

from ..families.checkpoint import CARD, TOKENIZER_FILES, read_json
from ..families.errors import ConversionError
from ..files import write_text
from ..models.modeling_relpos_bert import HEADS
from .card import KEPT, PICTURES, TASKS, usage
from .folder_layout import MODULES
from .report import REPORT


HEADING = "## The conversion it was trained from"
# The Trainer writes the first sentence for a model that is not from the Hub; it is replaced by the second one.
SCRATCH = "This model was trained from scratch on"
CONVERTED = "This model is a fine-tuned version of the converted checkpoint described below on"
BEFORE = "What follows was measured before the training."
# Sections of a conversion's card that do not apply to the trained model.
LEFT_OUT = ("## Use",)


def merge_card(converted: str | Path, trained: str | Path) -> None:
    """Add the text of the conversion's card to the card of a trained model; `Trainer.create_model_card` drops it.

    Licence, language, base model, task and datasets are added if the card of the trained model lacks them; lists are
    joined. The text of the conversion follows under a separate heading, with its pictures and conversion.json, and
    code that loads the trained model. Its evaluation results are in that text only, not in the metadata, since they
    were measured before the training. A second call changes nothing.

    Args:
        converted: folder that `convert` wrote.
        trained: folder of the trained model, with README.md; `trainer.args.output_dir`.

    Raises:
        ConversionError: if either README.md is missing or its metadata cannot be read. Nothing is written then.
    """
    source, target = Path(converted).expanduser(), Path(trained).expanduser()
    theirs, text = _read(source, "converted", "give the folder that hf_relpos.convert wrote")
    own, body = _read(target, "trained", "call trainer.create_model_card() first")
    head = _auto_class(target)
    data = _metadata(own, theirs, _auto_class(source), head)
    if HEADING not in body.splitlines():
        use = [] if head is None else _use(target, head)
        body = "\n\n".join([body.strip().replace(SCRATCH, CONVERTED), *use, HEADING, BEFORE, _sections(text)])
    for name in (REPORT, *(name for name in PICTURES if f"({name})" in body)):
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    write_text(target / CARD, f"---\n{yaml_dump(data, sort_keys=False)}---\n\n{body.strip()}\n")


def _read(folder: Path, field: str, remedy: str) -> tuple[dict[str, Any], str]:
    """Read metadata and text of a card."""
    path = folder / CARD
    if not path.is_file():
        raise ConversionError(f"{field} = '{folder}' has no {CARD}; {remedy}")
    try:
        metadata = metadata_load(path) or {}
    except (ValueError, yaml.YAMLError) as error:
        raise ConversionError(f"{field} = '{folder}': the metadata of {CARD} cannot be read; correct it") from error
    return metadata, ModelCard(path.read_text("utf-8"), ignore_metadata_errors=True).text


def _auto_class(folder: Path) -> str | None:
    """The Auto class of a checkpoint; None for other folders, such as adapters."""
    path = folder / "config.json"
    names = read_json(path).get("architectures") if path.is_file() else None
    return next((auto for auto, head in HEADS.items() if names and head.__name__ == names[0]), None)


def _metadata(
    own: dict[str, Any], theirs: dict[str, Any], auto_before: str | None, auto: str | None
) -> dict[str, Any]:
    """The metadata of a trained model.

    Args:
        own: metadata of its card.
        theirs: metadata of the conversion's card.
        auto_before: Auto class of the conversion.
        auto: Auto class of the trained model, which sets the task if the head is another one.
    """
    inherited = {key: theirs[key] for key in KEPT if key in theirs}
    if auto != auto_before:
        inherited.pop("pipeline_tag", None)
        if auto in TASKS:
            inherited["pipeline_tag"] = TASKS[auto]
    if "license" in own:
        inherited = {key: value for key, value in inherited.items() if not key.startswith("license")}
    if "base_model" not in own:
        inherited |= {key: theirs[key] for key in ("base_model", "base_model_relation") if key in theirs}
    found = {**own, **{key: value for key, value in inherited.items() if key not in own}}
    for key in ("tags", "datasets"):
        if joined := list(dict.fromkeys([*_listed(theirs.get(key)), *_listed(own.get(key))])):
            found[key] = joined
    return found


def _listed(value: Any) -> list[Any]:
    """A list of one value or several."""
    return list(value) if isinstance(value, list) else [value] if value else []


def _sections(text: str) -> str:
    """The text of a conversion's card without title and `LEFT_OUT`, with headings one level lower."""
    lines: list[str] = []
    fenced = skipped = False
    for line in text.strip().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif line.startswith("#") and not fenced:
            if line.startswith(("# ", "## ")):
                skipped = line in LEFT_OUT
            line = "" if line.startswith("# ") else f"#{line}"
        if not skipped:
            lines.append(line)
    return "\n".join(lines).strip()


def _use(folder: Path, auto: str) -> list[str]:
    """The section about loading the trained model."""
    tokenizer = any(path.match(kind) for path in folder.iterdir() for kind in TOKENIZER_FILES)
    saves_code = bool(read_json(folder / "config.json").get("auto_map"))
    return usage(auto, tokenizer, saves_code, (folder / MODULES).is_file())
