"""Write correlations into a model card: its metadata, where the Hub reads them, and its text."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.constants import REPOCARD_NAME

from ..console import markdown_table
from ..files import write_text


SIMILARITY = "## Similarity of sentences"
WORDS = "Spearman correlation × 100 of cosines with the scores of people, both models measured in one run."


def read_card(folder: str | Path) -> ModelCard:
    """Read the model card of a folder.

    Raises:
        ValueError: for a missing folder, a folder without a card, and a card whose metadata cannot be read.
    """
    path = Path(folder, REPOCARD_NAME)
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such model card to update; `hf-relpos convert` writes one, and so does "
            "Trainer.create_model_card"
        )
    try:
        return ModelCard(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: its metadata cannot be read ({' '.join(str(error).split())}); mend it") from error


def check_names(files: Sequence[str | Path]) -> None:
    """Check that the data files have different names, which tell their results apart in a card.

    Raises:
        ValueError: for two files of the same name.
    """
    stems = [Path(path).stem for path in files]
    for path, stem in zip(files, stems, strict=True):
        if stems.count(stem) > 1:
            raise ValueError(
                f"--sts: {path} and another file are called {stem!r}, which is their name in the card; rename one"
            )


def update_card(folder: str | Path, similarity: Mapping[str, Mapping[str, Any]]) -> Path:
    """Put correlations into a model card, replacing earlier ones: into its metadata, and as a section of its text.

    Args:
        folder: folder of the model, with its card.
        similarity: the entry `similarity` of the result of `compare_models`. The card gets file names without folders.

    Returns:
        Path of the card.

    Raises:
        ValueError: as `read_card`, and for a card that cannot be written.
    """
    card, path = read_card(folder), Path(folder, REPOCARD_NAME)
    results = {
        Path(name).stem: EvalResult(
            task_type="sentence-similarity",
            dataset_type=Path(name).stem,  # tells the results of a card apart
            dataset_name=f"{Path(name).name}, {found['pairs']:,} pairs",
            metric_type="spearman_cosine",
            metric_name="Spearman Cosine",
            metric_value=round(found["student"] / 100, 4),
            verified=False,
        )
        for name, found in similarity.items()
    }
    data: Any = card.data
    earlier = [
        each
        for each in data.eval_results or []
        if each.metric_type != "spearman_cosine" or each.dataset_type not in results
    ]
    data.eval_results = [*earlier, *results.values()]
    data.model_name = data.model_name or Path(folder).resolve().name
    rows = [
        (Path(name).name, f"{found['pairs']:,}", f"{found['teacher']:.2f}", f"{found['student']:.2f}")
        for name, found in similarity.items()
    ]
    section = f"{SIMILARITY}\n\n{WORDS}\n\n{markdown_table(('data', 'pairs', 'its source', 'this model'), rows)}\n"
    parts = re.split(r"^(?=## )", card.text, flags=re.MULTILINE)
    kept = [part for part in parts if not part.startswith(f"{SIMILARITY}\n")]
    places = [number for number, part in enumerate(kept) if part.startswith("## What is not promised")]
    at = places[0] if places else len(kept)
    before, after = "".join(kept[:at]).rstrip("\n"), "".join(kept[at:])
    card.text = f"{before}\n\n{section}" + (f"\n{after}" if after else "")
    try:
        write_text(path, str(card))
    except OSError as error:
        raise ValueError(f"{path}: could not be written ({error.strerror}); make it writable") from error
    return path
