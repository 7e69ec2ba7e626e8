"""The model card of a conversion, README.md."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load

from ..console import markdown_table
from ..families.checkpoint import CARD
from ..families.privacy import last_name
from ..files import write_text
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from .folder import is_sentence_encoder
from .methods import DEFAULT_QUALITY, METHODS, QUALITIES
from .plan import Conversion
from .report import ConversionReport


# Metadata of the source's card that also hold for the result; pipeline_tag only if the head is kept.
KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag")
# The Hub's task name of each head that has one, and the usual name of such a model.
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
    return {
        key: metadata[key]
        for key in KEPT
        if isinstance(metadata.get(key), str)
        or (isinstance(metadata.get(key), list) and all(isinstance(value, str) for value in metadata[key]))
    }


def write_card(
    folder: Path, conversion: Conversion, report: ConversionReport, model: RelPosBertPreTrainedModel
) -> None:
    """Write README.md unless there is one.

    Args:
        folder: folder of the result; modules.json marks a sentence-transformers folder.
        model: the result, which is left on the CPU.
    """
    path, pools = folder / CARD, is_sentence_encoder(folder) and report.has_tokenizer
    if not path.exists():
        metadata = source_metadata(conversion.top)
        write_text(path, model_card(report, model.config, conversion.limit, metadata, pools))


def model_card(
    report: ConversionReport,
    config: RelPosBertConfig,
    limit: int,
    metadata: Mapping[str, Any] | None = None,
    sentence_transformers: bool = False,
) -> str:
    """The text of the card: what it is, its use, the agreement by length, its limits, its origin.

    Args:
        config: configuration of the result.
        limit: maximum length of the source.
        metadata: from `source_metadata`.
        sentence_transformers: whether the result loads as a SentenceTransformer.
    """
    data = _metadata(report, metadata or {}, sentence_transformers)
    parts = [
        f"---\n{data.to_yaml()}\n---",
        *_what(report, sentence_transformers),
        *_use(report, config, limit, sentence_transformers),
        *_fidelity(report),
        "## Limits",
        "\n".join(f"- {line}" for line in _limits(report, config, limit)),
        "## How it was made",
        *_text(report),
        f"```\n{command(report)}\n```",
        " · ".join(f"{name} {version}" for name, version in report.versions.items())
        + ". `conversion.json` has every tensor, option and figure.",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(report: ConversionReport, source: Mapping[str, Any], sentence_transformers: bool) -> ModelCardData:
    """The metadata for the Hub: origin, licence, task and text.

    There is no model-index, because the agreement with the source is not the result of a task.

    Args:
        source: from `source_metadata`.
    """
    task = "sentence-similarity" if sentence_transformers else _task(report)[0]
    if "architecture" not in report.arguments:
        task = source.get("pipeline_tag", task)
    texts = report.arguments.get("texts", [])
    return ModelCardData(
        base_model=report.source if report.revision else None,
        base_model_relation="finetune" if report.revision else None,  # the Hub's relation for new weights
        library_name="sentence-transformers" if sentence_transformers else "transformers",
        pipeline_tag=task,
        datasets=list(dict.fromkeys(name for text in texts if (name := hub_dataset(text)))) or None,
        tags=["hf_relpos", "relative-position"],
        **{key: value for key, value in source.items() if key != "pipeline_tag"},
    )


def hub_dataset(text: str) -> str | None:
    """The Hub repository of a text in a report, `user/name/configuration:split`; None for a file."""
    parts = text.partition(":")[0].split("/")
    return "/".join(parts[:2]) if len(parts) > 1 and all(parts[:2]) else None


def _task(report: ConversionReport) -> tuple[str | None, str]:
    """The Hub's task of the result, if it has one, and what a visitor calls the model."""
    return TASKS.get(report.auto_class, (None, "text encoder"))


def command(report: ConversionReport) -> str:
    """A command line that repeats the conversion; a local source and files are named without their folders."""
    arguments = report.arguments
    words = ["hf-relpos", "convert", _name(report, full=True), "OUT"]
    options, scheme = arguments.get("method_options", {}), arguments.get("position_embedding_type")
    if report.quality is None:
        words += ["--method", arguments["method"]]
    else:  # by the preset, and what differs from it
        words += [f"--{report.quality}"] * (report.quality != DEFAULT_QUALITY)
        preset = QUALITIES[report.quality]
        options = {key: value for key, value in options.items() if preset.method_options.get(key) != value}
        scheme = None if scheme == preset.scheme else scheme
    words += ["--scheme", scheme] if scheme else []
    words += _options("--option", arguments.get("position_options", {}))
    words += _options("--method-option", options)
    if "texts" in arguments:
        words += [word for name in arguments["texts"] or ["TEXT"] for word in ("--text", name)]
    fields = arguments.get("field", [])
    words += [word for name in ([fields] if isinstance(fields, str) else fields) for word in ("--field", name)]
    for key in ("seed", "architecture", "revision"):
        if key in arguments:
            words += [f"--{key}", str(arguments[key])]
    words += [flag for flag in ("--skip-unreadable", "--allow-pickle") if flag[2:].replace("-", "_") in arguments]
    return shlex.join(words)


def _options(flag: str, options: Mapping[str, Any]) -> list[str]:
    """Options for the command line, such as `["--option", "clip=32"]`."""
    return [word for key, value in options.items() for word in (flag, f"{key}={_as_json(value)}")]


def _as_json(value: Any) -> str:
    """A value as JSON; text that is not valid JSON is not quoted."""
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, ensure_ascii=False)


def _name(report: ConversionReport, full: bool = False) -> str:
    """The Hub repository, or the name of the folder; without `full` only the repository's name."""
    if report.revision and full:
        return report.source
    return last_name(report.source)


def _what(report: ConversionReport, sentence_transformers: bool) -> list[str]:
    """Title, one sentence, and how close, how long and how fast."""
    source = f"`{_name(report)}`"
    if report.revision:
        source = f"[{report.source}](https://huggingface.co/{report.source}) (commit `{report.revision[:12]}`)"
    kind = "sentence encoder" if sentence_transformers else _task(report)[1]
    lines = [("How close", _how_close(report)), ("How long", report.notes[0] if report.notes else "")]
    if (speed := report.details.get("speed")) is not None:
        took, source_took = (f"{1e3 * speed[name]:,.0f} ms" for name in ("result", "source"))
        lines.append(
            (
                "How fast",
                f"{speed['result'] / speed['source']:.2f} × the time of the source: {took} for {speed['tokens']:,} "
                f"tokens; the source takes {source_took} ({speed['device']}).",
            )
        )
    return [
        f"# {_name(report)} with relative positions",
        f"A {kind}: {source}, converted by hf_relpos to relative positions (scheme `{report.scheme}`).",
        "\n".join(f"- **{title}.** {text}" for title, text in lines if text),
    ]


def _how_close(report: ConversionReport) -> str:
    """One sentence on the agreement with the source."""
    if report.fidelity is not None:
        inside = [entry for entry in report.fidelity.lengths if entry.reference == "teacher"]
        ends = list({entry.length: entry for entry in (*inside[:1], *inside[-1:])}.values())
        figures = " and ".join(f"{entry.sentence_cosine:.3f} at {entry.length:,} tokens" for entry in ends)
        cosine = f"Cosine of its sentence vectors to the source's on held-out text: {figures}. " if ends else ""
        return f"{cosine}Verdict: {report.verdict}."
    if report.difference is not None:
        return f"Its outputs equal the source's, to {report.difference:.1e} of the largest output."
    return f"Not measured: {METHODS[report.method].help}."


def _use(report: ConversionReport, config: RelPosBertConfig, limit: int, sentence_transformers: bool) -> list[str]:
    """The section about loading the model; arguments as in `model_card`."""
    auto = report.auto_class
    load, imported = f"{auto}.from_pretrained", f"from transformers import {auto}"
    if sentence_transformers:
        load, imported = "SentenceTransformer", "from sentence_transformers import SentenceTransformer"
    loads = {"model": load}
    if not sentence_transformers and report.has_tokenizer:
        imported += ", AutoTokenizer"
        loads["tokenizer"] = "AutoTokenizer.from_pretrained"

    def lines(arguments: str, note: str) -> list[str]:
        first, *rest = (f'{name} = {call}("PATH"{arguments})' for name, call in loads.items())
        return [imported, "", f"{first}  # {note}", *rest]

    here = _python(["import hf_relpos", *lines("", "this folder, or its name on the Hub")])
    parts = ["## Use", here]
    if not (config.has_absolute_table or config.attention_window):
        argument = f"attention_window={max(1, limit // 2)}"
        if sentence_transformers:
            argument = f'config_kwargs={{"attention_window": {max(1, limit // 2)}}}'
        long = f"For texts beyond that length, load it with `{argument}`"
        parts.append(long + (" and raise `model.max_seq_length`." if sentence_transformers else "."))
    if not config.save_code:
        return [*parts, "It requires hf_relpos."]
    # the tokenizer runs no such code, but it reads the model's configuration, which needs the argument
    elsewhere = lines(", trust_remote_code=True", "runs the code saved with the weights")
    return [*parts, "Without hf_relpos:", _python(elsewhere)]


def _python(lines: Sequence[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _text(report: ConversionReport) -> list[str]:
    preset = "" if report.quality is None else f"Quality `{report.quality}`: {QUALITIES[report.quality].help}."
    lines = [*filter(None, [preset]), f"Method `{report.method}`: {METHODS[report.method].help}."]
    if (text := report.details.get("text")) is not None:
        lines.append(f"{report.text_in_words} to the tokenizer.")
        if (distilled := report.details.get("distillation")) is not None:
            computed = report.details.get("computed", {})
            lines.append(
                f"Distilled for {distilled['steps']:,} steps on {distilled['tokens']:,} tokens"
                + (
                    ", the student in {student}, the source in {teacher}, on {on}.".format(**computed)
                    if computed
                    else "."
                )
            )
        lines += [f"Note: {note}." for note in text["notes"]]
    return ["\n".join(lines)]


def _fidelity(report: ConversionReport) -> list[str]:
    lines = ["## How close it is"]
    measured = report.fidelity
    if measured is not None:
        masked = any(entry.masked for entry in measured.lengths)
        columns = ["tokens", "token", "sentence"]
        columns += ["same prediction, %", "source right, %", "right, %"] if masked else []
        rows = []
        for entry in measured.lengths:
            rows.append([f"{entry.length:,}", *entry.cosine_cells, *(entry.masked_cells if masked else ())])
        lines += [
            "Cosine of the hidden states of tokens, and of sentence vectors, to those of the source, on passages of "
            "the text below that were not trained on."
            + (" The last columns are about predictions of masked tokens." if masked else ""),
            markdown_table(columns, rows),
            *([f"{report.pairs_in_words}."] if report.pairs_in_words else []),
            f"**Verdict: {report.verdict}.**",
        ]
    elif report.difference is not None:
        lines.append(
            f"Its outputs equal the source's: the largest difference on a random batch is {report.difference:.1e} of "
            "the largest output."
        )
    else:
        why = report.details.get("fidelity", {}).get("skipped")
        lines.append(
            f"Not measured{f' ({why})' if why else ''}. "
            "`hf-relpos compare SOURCE OUT --text held-out.txt` measures it."
        )
    return lines


def _limits(report: ConversionReport, config: RelPosBertConfig, limit: int) -> list[str]:
    lines = []
    if report.of_kind("folded"):
        lines.append("Adapters (such as LoRA) that were trained on the source's weights do not fit this model.")
    if "text" in report.details:
        lines.append("On text of another kind or language than the training text it may be further from the source.")
    if config.has_absolute_table:
        lines.append(f"It reads at most {config.max_position_embeddings:,} tokens.")
        return lines
    past = [] if report.fidelity is None else [e for e in report.fidelity.lengths if e.reference != "teacher"]
    lines += [
        f"The source reads {limit:,} tokens. At {entry.length:,} tokens, where the source reads overlapping windows, "
        f"the token cosine to it is {entry.token_cosine:.2f}."
        for entry in past
    ]
    longest = max([limit, *(entry.length for entry in past)])
    line = f"It reads inputs of any length, but beyond {longest:,} tokens it was not checked. "
    if config.attention_window is not None:
        line += f"Its configuration has `attention_window = {config.attention_window}`; test it on your task there."
    else:
        line += (
            f"There, load it with `attention_window={max(1, limit // 2)}`, so that all distances are within the "
            "trained range, and test it on your task."
        )
    return [*lines, line]
