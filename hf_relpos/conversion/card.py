"""The model card of a conversion, README.md, from the template `card.md`; Jinja comes with PyTorch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from ..checkpoints.privacy import last_name
from ..checkpoints.weights import CARD
from ..console import markdown_table
from ..models.configuration_relpos_bert import RelPosBertConfig
from .methods import METHODS
from .report import ConversionReport, has_vocabulary


# Metadata of the source's card that also hold for the result; pipeline_tag only if the head is kept.
KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag")
# The Hub's task name of each head that has one, and the usual name of such a model.
OTHER = (None, "text encoder")
TASKS = {
    "AutoModel": ("feature-extraction", "text encoder"),
    "AutoModelForPreTraining": ("fill-mask", "masked language model"),
    "AutoModelForMaskedLM": ("fill-mask", "masked language model"),
    "AutoModelForCausalLM": ("text-generation", "causal language model"),
    "AutoModelForSequenceClassification": ("text-classification", "text classifier"),
    "AutoModelForTokenClassification": ("token-classification", "token classifier"),
    "AutoModelForQuestionAnswering": ("question-answering", "question answering model"),
}


def source_metadata(folder: Path) -> dict[str, Any]:
    """The metadata of a source's card that are in `KEPT`; {} without a readable card."""
    try:
        metadata = metadata_load(folder / CARD) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}

    def is_text(value: Any) -> bool:
        return all(isinstance(each, str) for each in value) if isinstance(value, list) else isinstance(value, str)

    return {key: metadata[key] for key in KEPT if is_text(metadata.get(key))}


def model_card(
    report: ConversionReport, config: RelPosBertConfig, limit: int, metadata: Mapping[str, Any] | None = None
) -> str:
    """The text of the card, from the template `card.md`.

    Args:
        config: configuration of the result.
        limit: maximum length of the source.
        metadata: from `source_metadata`.
    """
    name = last_name(report.source)
    link = f"[{report.source}](https://huggingface.co/{report.source}) (commit `{(report.revision or '')[:12]}`)"
    entries = [] if report.fidelity is None else report.fidelity.lengths
    masked = any(entry.masked for entry in entries)
    columns = ["tokens", "token", "sentence"]
    columns += ["same prediction, %", "source right, %", "right, %"] if masked else []
    rows = [[f"{entry.length:,}", *entry.cosine_cells, *(entry.masked_cells if masked else ())] for entry in entries]
    card = ModelCard.from_template(
        _metadata(report, metadata or {}),
        template_path=str(Path(__file__).with_name("card.md")),
        report=report,
        config=config,
        limit=limit,
        method=METHODS[report.method],
        command=command(report),
        name=name,
        origin=link if report.revision else f"`{name}`",
        kind="sentence encoder" if report.is_sentence_encoder else TASKS.get(report.auto_class, OTHER)[1],
        arguments='"PATH", trust_remote_code=True' if config.save_code else '"PATH"',
        has_tokenizer=has_vocabulary(report.files) and not report.is_sentence_encoder,
        masked=masked,
        agreement=markdown_table(columns, rows),
        past=[entry for entry in entries if entry.reference != "teacher"],
        texts=", ".join(f"`{text}`" for text in report.arguments.get("texts", [])) or "documents given in Python",
    )
    return f"{card}\n"


def _metadata(report: ConversionReport, source: Mapping[str, Any]) -> ModelCardData:
    """The metadata for the Hub: origin, licence and task.

    There is no model-index, because the agreement with the source is not the result of a task.

    Args:
        source: from `source_metadata`.
    """
    task = "sentence-similarity" if report.is_sentence_encoder else TASKS.get(report.auto_class, OTHER)[0]
    if "architecture" not in report.arguments:
        task = source.get("pipeline_tag", task)
    return ModelCardData(
        base_model=report.source if report.revision else None,
        base_model_relation="finetune" if report.revision else None,  # the Hub's relation for new weights
        library_name="sentence-transformers" if report.is_sentence_encoder else "transformers",
        pipeline_tag=task,
        tags=["hf_relpos", "relative-position"],
        **{key: value for key, value in source.items() if key != "pipeline_tag"},
    )


def command(report: ConversionReport) -> str:
    """The call that repeats the conversion; a local source and files are named without their folders."""
    given = [f"{name}={'documents' if value == [] else repr(value)}" for name, value in report.arguments.items()]
    return f"hf_relpos.convert({', '.join([repr(report.public_source), repr('OUT'), *given])})"
