"""Write correlations into a model card: its metadata, where the Hub reads them, and its text."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME

from ..console import markdown_table
from ..files import write_text


SIMILARITY = "## Similarity of sentences"


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


def similarity_results(similarity: Mapping[str, Mapping[str, Any]]) -> list[EvalResult]:
    """Spearman correlations as `EvalResult`s, with the metric names of sentence-transformers and values up to 1.

    Args:
        similarity: the entry `similarity` of the result of `compare_models`. The card gets file names without folders.
    """
    return [
        EvalResult(
            task_type="sentence-similarity",
            dataset_type=Path(path).stem,  # tells the results of a card apart
            dataset_name=f"{Path(path).name}, {found['pairs']:,} pairs",
            metric_type="spearman_cosine",
            metric_name="Spearman Cosine",
            metric_value=round(found["student"] / 100, 4),
            verified=False,
        )
        for path, found in similarity.items()
    ]


def similarity_section(similarity: Mapping[str, Mapping[str, Any]]) -> str:
    """A section with Spearman correlations of a source and what was made from it.

    Args:
        similarity: the entry `similarity` of the result of `compare_models`.
    """
    rows = [
        (Path(path).name, f"{found['pairs']:,}", f"{found['teacher']:.2f}", f"{found['student']:.2f}")
        for path, found in similarity.items()
    ]
    words = "Spearman correlation × 100 of cosines with the scores of people, both models measured in one run."
    table = markdown_table(("data", "pairs", "its source", "this model"), rows)
    return f"{SIMILARITY}\n\n{words}\n\n{table}\n"


def with_section(text: str, section: str) -> str:
    """A card's text with a section before its limits, or at the end, in place of an earlier one of that heading."""
    heading = section.partition("\n")[0]
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [part for part in parts if part.partition("\n")[0] != heading]
    places = [number for number, part in enumerate(kept) if part.startswith("## What is not promised")]
    at = places[0] if places else len(kept)
    before, after = "".join(kept[:at]).rstrip("\n"), "".join(kept[at:])
    return f"{before}\n\n{section}" + (f"\n{after}" if after else "")


def update_card(folder: str | Path, results: list[EvalResult], section: str = "") -> Path:
    """Put results into the metadata of a model card, replacing earlier results of the same data and metric.

    Args:
        folder: folder of the model, with its card.
        section: for the card's text, by `similarity_section`; empty for none.

    Returns:
        Path of the card.

    Raises:
        ValueError: as `read_card`, and for a card that cannot be written.
    """

    def measured(result: EvalResult) -> tuple[Any, ...]:
        return (*result.unique_identifier, result.metric_type)

    card = read_card(folder)
    new = {measured(result) for result in results}
    data = card.data
    assert isinstance(data, ModelCardData)
    data.eval_results = [each for each in data.eval_results or [] if measured(each) not in new] + results
    data.model_name = data.model_name or Path(folder).resolve().name
    if section:
        card.text = with_section(card.text, section)
    path = Path(folder, REPOCARD_NAME)
    try:
        write_text(path, str(card))
    except OSError as error:
        raise ValueError(f"{path}: could not be written ({error.strerror}); make it writable") from error
    return path
