"""The model card of a conversion, README.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load

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
    """The text of the card: what it is, its use, the agreement by length, its limits, its origin.

    Args:
        config: configuration of the result.
        limit: maximum length of the source.
        metadata: from `source_metadata`.
    """
    parts = [
        f"---\n{_metadata(report, metadata or {}).to_yaml()}\n---",
        *_what(report),
        *_use(report, config, limit),
        *_fidelity(report),
        "## Limits",
        "\n".join(f"- {line}" for line in _limits(report, config, limit)),
        "## How it was made",
        _text(report),
        f"```python\n{command(report)}\n```",
        " · ".join(f"{name} {version}" for name, version in report.versions.items())
        + ". `conversion.json` has every tensor, option and figure.",
    ]
    return "\n\n".join(parts) + "\n"


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


def _what(report: ConversionReport) -> list[str]:
    """Title, one sentence, and how close, how long and how fast."""
    name = last_name(report.source)
    source = f"`{name}`"
    if report.revision:
        source = f"[{report.source}](https://huggingface.co/{report.source}) (commit `{report.revision[:12]}`)"
    kind = "sentence encoder" if report.is_sentence_encoder else TASKS.get(report.auto_class, OTHER)[1]
    points = [f"- **How close.** {report.how_close}", *(f"- **How long.** {note}" for note in report.notes[:1])]
    if (speed := report.details.get("speed")) is not None:
        took, source_took = (f"{1e3 * speed[name]:,.0f} ms" for name in ("result", "source"))
        points.append(
            f"- **How fast.** {speed['result'] / speed['source']:.2f} × the time of the source: {took} for "
            f"{speed['tokens']:,} tokens; the source takes {source_took} ({speed['device']})."
        )
    return [
        f"# {name} with relative positions",
        f"A {kind}: {source}, converted by hf_relpos to relative positions (scheme `{report.scheme}`).",
        "\n".join(points),
    ]


def _use(report: ConversionReport, config: RelPosBertConfig, limit: int) -> list[str]:
    """The section about loading the model; config and limit as in `model_card`."""
    arguments = '"PATH", trust_remote_code=True' if config.save_code else '"PATH"'
    has_tokenizer = has_vocabulary(report.files) and not report.is_sentence_encoder
    used = f"transformers import {report.auto_class}{', AutoTokenizer' if has_tokenizer else ''}"
    if report.is_sentence_encoder:
        used = "sentence_transformers import SentenceTransformer"
    code = [] if config.save_code else ["import hf_relpos"]
    code += [f"from {used}", "", f"model = {report.loading(arguments)}"]
    if has_tokenizer:  # it runs no such code, but it reads the model's configuration, which needs the argument
        code.append(f"tokenizer = AutoTokenizer.from_pretrained({arguments})")
    parts = ["## Use", "\n".join(["```python", *code, "```"])]
    runs = "Loading it runs the code saved with the weights, unless hf_relpos was imported before."
    needs = runs if config.save_code else "It requires hf_relpos."
    parts.append(f"PATH is this folder, or its name on the Hub. {needs}")
    if report.is_sentence_encoder and not (config.has_absolute_table or config.attention_window):
        window = f'config_kwargs={{"attention_window": {max(1, limit // 2)}}}'
        parts.append(f"For longer texts, load it with `{window}` and raise `model.max_seq_length`.")
    return parts


def _text(report: ConversionReport) -> str:
    """The method, and the text that it learnt from."""
    lines = [f"Method `{report.method}`: {METHODS[report.method].help}."]
    if (text := report.details.get("text")) is not None:
        names = ", ".join(f"`{name}`" for name in report.arguments.get("texts", [])) or "documents given in Python"
        lines.append(
            f"Trained on {text['tokens']:,} tokens in {text['windows']:,} windows of {names}; "
            f"{100 * text['unknown_share']:.1f} % of the tokens are unknown to the tokenizer."
        )
        if (distilled := report.details.get("distillation")) is not None:
            computed = report.details["computed"]
            lines.append(
                f"Distilled for {distilled['steps']:,} steps on {distilled['tokens']:,} tokens, the student in "
                f"{computed['student']}, the source in {computed['teacher']}, on {computed['on']}."
            )
        lines += [f"Note: {note}." for note in text["notes"]]
    return "\n".join(lines)


def _fidelity(report: ConversionReport) -> list[str]:
    """The section with the agreement by length, if it was measured."""
    if report.fidelity is None:
        return []
    entries = report.fidelity.lengths
    masked = any(entry.masked for entry in entries)
    columns = ["tokens", "token", "sentence"]
    columns += ["same prediction, %", "source right, %", "right, %"] if masked else []
    rows = [[f"{entry.length:,}", *entry.cosine_cells, *(entry.masked_cells if masked else ())] for entry in entries]
    pairs = report.details["fidelity"].get("pairs")
    return [
        "## How close it is",
        "Cosine of the hidden states of tokens, and of sentence vectors, to those of the source, on passages of the "
        "text below that were not trained on."
        + (" The last columns are about predictions of masked tokens." if masked else ""),
        markdown_table(columns, rows),
        *([] if pairs is None else [_pairs(report, pairs)]),
    ]


def _pairs(report: ConversionReport, measured: Mapping[str, Any]) -> str:
    """The agreement on segment pairs, and why none were trained."""
    first, second = measured["token_cosine_by_segment"]
    line = (
        f"Pairs of segments, {measured['length']} tokens: token cosine {first:.3f} in the first segment, "
        f"{second:.3f} in the second."
    )
    if report.details["text"]["pair_windows"]:
        return line
    if report.method_options["pairs"]:
        return f"{line} No pairs were trained: every window was too short, or beyond the source's limit."
    return f"{line} No pairs were trained: for tasks with two texts in a row, convert with --method-options pairs=0.5."


def _limits(report: ConversionReport, config: RelPosBertConfig, limit: int) -> list[str]:
    lines = []
    if report.of_kind("folded"):
        lines.append("Adapters (such as LoRA) that were trained on the source's weights do not fit this model.")
    if "text" in report.details:
        lines.append("On text of another kind or language than the training text it may be further from the source.")
    if config.has_absolute_table:
        return [*lines, f"It reads at most {config.max_position_embeddings:,} tokens."]
    past = [] if report.fidelity is None else [e for e in report.fidelity.lengths if e.reference != "teacher"]
    lines += [
        f"The source reads {limit:,} tokens. At {entry.length:,} tokens, where the source reads overlapping windows, "
        f"the token cosine to it is {entry.token_cosine:.2f}."
        for entry in past
    ]
    longest = max([limit, *(entry.length for entry in past)])
    return [*lines, f"It was not checked beyond {longest:,} tokens; test it on your task there."]
