"""The conversion of a checkpoint into a relpos_bert folder: plan, read, build, learn, verify, write."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..console import spinner
from ..evaluation.plot import figure_class
from ..families.checkpoint import Checkpoint, read_tensors, rename_and_validate
from ..families.errors import ConversionError, PoorConversionWarning
from ..families.names import is_buffer, is_table
from ..families.recognition import check_tables, choose_head
from ..families.registry import OWN
from ..files import atomic_folder, describe_write_error, write_json
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..processes import process_state
from ..version import __version__
from .build import ARCHITECTURES, assemble, build_model, expected_shapes, rename_relative
from .card import draw, source_metadata, write_card
from .card_example import example
from .configurations import resolved_options, stock_config
from .folder import check_replaceable, check_target, copy_companions, left_out
from .folder_layout import is_sentence_encoder
from .learn import resumable
from .plan import ConversionPlan, plan_conversion
from .report import REPORT, ConversionReport, Step, list_steps
from .run import ConversionRun
from .verify import compare_outputs, compare_tensors, own_model, source_model


NOT_COMPARED = (
    "Transformers has no class for the source, so that no outputs were compared: every tensor was read back from the "
    "result as it was in the source"
)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    position_embedding_type: str | None = None,
    position_options: Mapping[str, Any] | None = None,
    method: str | None = None,
    method_options: Mapping[str, Any] | None = None,
    quality: str | None = None,
    texts: str | Path | Iterable[str | Path] | None = None,
    field: str | Sequence[str] = "text",
    seed: int = 0,
    architecture: str | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    device: str | None = None,
    progress: bool = False,
    plots: bool = False,
) -> ConversionReport:
    """Write a checkpoint of one of `families.FAMILIES` or of this package as a relpos_bert folder with its tokenizer.

    The result is written to a temporary folder, read back, compared, and renamed to `out`. After an error `out` is
    unchanged. A result that fails a threshold of `ConversionReport.failed_thresholds` is written with a
    `PoorConversionWarning`.

    Args:
        source: local folder or Hub repository, with safetensors weights, or pickled ones if `allow_pickle` is set.
        out: folder to write. It also gets a report, `conversion.json`, a model card, `README.md`, and the modules of a
            sentence-transformers folder.
        position_embedding_type: scheme of the result, a key of `hf_relpos.SCHEMES`. None for that of `quality`;
            without a quality, `harmonic` for `distil`, else the source's relative scheme, else `relative_key`. MPNet
            also keeps its T5 bias.
        position_options: options of that scheme.
        method: `keep` (keep absolute positions and all outputs), `drop` (keep only the mean of absolute positions),
            `distil` (train a model whose relative terms start at zero to the source's outputs on `texts`; also for
            relative sources), `exact` (for relative sources alone: keep the tables, or move them into another scheme
            that holds them; the outputs are the source's). None for that of `quality`; without a quality, `exact` for
            a relative source, else `keep`.
        method_options: options of the method: keys of `METHODS[method].options`.
        quality: a preset, key of `hf_relpos.conversion.QUALITIES`, which sets scheme, method and their options if they
            are not given: `fast`, `default` or `faithful`. None for `default` if there are `texts` and no method,
            otherwise for no preset.
        texts: for a method that learns from text: one path or several, read by `hf_relpos.data.read_texts`, each with
            the same share of the tokens; or documents (strings). Of several, strings that name existing files are
            paths; a Hub dataset is one as a Path. An iterator of documents is read once, up to 100 million characters.
        field: key or column of the text in .jsonl, .tsv and .csv files and Hub datasets; one for all, or one for each
            of `texts`.
        seed: random seed, 0 to 2³² − 1.
        architecture: class with the head to keep; by default the class in config.json.
        revision: branch, tag or commit of a Hub repository.
        allow_pickle: if there are no safetensors, read (and download) `pytorch_model.bin` or its shards with
            `torch.load(weights_only=True)`, which makes tensors only; for checkpoints whose origin you trust.
        overwrite: replace an existing `out`, after success, if it holds only a checkpoint.
        device: device of a method that learns from text, such as "cpu" or "cuda:1", with float64 support. None for an
            accelerator if there is one, else the CPU.
        progress: show a progress bar; without a terminal, a line every half minute.
        plots: for a method that learns from text: draw the agreement by length (`fidelity.png`) and the tables
            (`tables.png`) into `out`. Needs the extra `plot`.

    Returns:
        The report, as in `conversion.json`.

    Raises:
        ConversionError: for a source that cannot be converted, an unknown scheme or option, and a folder that cannot
            be written; names the cause and the remedy.
        ModuleNotFoundError: with `plots`, without matplotlib.
    """
    if plots:
        figure_class()  # raises without matplotlib, before any work
    target = check_target(out, overwrite, source)
    plan = plan_conversion(
        source,
        target,
        position_embedding_type=position_embedding_type,
        position_options=position_options,
        method=method,
        method_options=method_options,
        quality=quality,
        texts=texts,
        field=field,
        seed=seed,
        architecture=architecture,
        revision=revision,
        allow_pickle=allow_pickle,
        device=device,
        plots=plots,
    )
    with spinner("reading the source", progress):
        plan, checkpoint = _read(plan, str(source), allow_pickle, any_head=architecture is None)
    learns = plan.method.learns
    run = ConversionRun(
        checkpoint,
        plan.source_config,
        build_teacher=lambda: assemble(plan.source_config, checkpoint)[0],
        texts=plan.texts,
        field=field,
        options=plan.options,
        seed=seed,
        resume_folder=target.with_name(f".{target.name}.{plan.method_name}") if learns else None,
        device=plan.device,
        progress=progress,
    )
    process = process_state()  # all processes take part in learning; one writes
    with resumable(run.resume_folder if process.is_main_process else None):
        renamed = rename_relative(checkpoint, plan.source_config, plan.config)
        with spinner("converting", progress and not learns):  # learning has its own progress bars
            model, changed = build_model(plan.config, renamed, plan.method.apply, run)
        reference = _reference(plan) if plan.method.exact else None
        report = _report(plan, checkpoint, str(out), model, list_steps(model, renamed, changed, plan.head.left_behind))
        notes = (plan.abilities, *([NOT_COMPARED] if plan.method.exact and reference is None else []))
        left = plan.head.left_behind
        parts = {str(step.source).partition(".")[0] for step in report.steps if left and step.note == left}
        if parts:
            notes += (f"left out {', '.join(sorted(parts))}: {left}",)
        report = replace(report, details=run.details, notes=notes)
        if process.is_main_process:
            try:
                # a user may have added files in the meantime
                unchanged = partial(check_replaceable, out)
                with (
                    spinner("writing and checking", progress),
                    atomic_folder(target, overwrite, unchanged) as unfinished,
                ):
                    report, reloaded = _write(unfinished, plan, model, renamed, report)
                    if reference is not None:
                        difference = compare_outputs(reloaded, checkpoint, plan.spec, reference, rounded=bool(changed))
                        report = replace(report, difference=difference)
                    _describe(unfinished, plan, reloaded, report, plots)
            except (OSError, SafetensorError) as error:
                raise ConversionError(describe_write_error(error, target)) from error
        process.wait_for_everyone()
    if report.failed_thresholds and process.is_main_process:
        warnings.warn(f"{out}: {report.warning}", PoorConversionWarning, stacklevel=2)
    return report


def _read(plan: ConversionPlan, name: str, allow_pickle: bool, any_head: bool) -> tuple[ConversionPlan, Checkpoint]:
    """Read, check and rename the weights; if they have no head, the returned plan has none.

    Args:
        plan: the plan before weights are read.
        name: name of the source given by the caller.
        allow_pickle: as in `convert`.
        any_head: whether the caller did not choose the head.
    """
    folder, spec, head, config = plan.folder, plan.spec, plan.head, plan.source_config
    raw = spec.unpack(read_tensors(folder, allow_pickle))
    check_tables(spec, folder, raw)
    stock_names = {stock for stored in raw for stock in spec.rename(stored, base=False)}
    if plan.layout.listed and any_head and all(stock.startswith("bert.") for stock in stock_names):
        # sentence-transformers saves only the encoder, but with the class name of the original model
        head = choose_head(spec, folder, f"{spec.family.class_prefixes[0]}Model")
        spec = spec.with_head(head)
    checkpoint = rename_and_validate(
        Checkpoint(name, folder, plan.commit, plan.saved, head.stock),
        raw,
        expected=expected_shapes(spec, head.stock, config),
        rename=partial(spec.rename, base=head.stock == "BertModel"),
        tied=config.tie_word_embeddings,
        unused=lambda stock: is_buffer(stock) or (is_table(stock) and not spec.absolute),
        cut=spec.cut,
    )
    return replace(plan, head=head), checkpoint


def _reference(plan: ConversionPlan) -> Callable[[PreTrainedModel, Checkpoint], PreTrainedModel] | None:
    """Function that builds the source's model, for comparison of outputs; None if there is no class for it."""
    if plan.spec.family is OWN:
        return partial(own_model, ARCHITECTURES[plan.head.stock], plan.folder)
    if plan.spec.family.stock is not None:
        return partial(source_model, plan.spec, plan.head.source, stock_config(plan.folder, plan.spec))
    return None


def _report(
    plan: ConversionPlan, checkpoint: Checkpoint, out: str, model: RelPosBertPreTrainedModel, steps: tuple[Step, ...]
) -> ConversionReport:
    """The report before files are written and the result is measured."""
    return ConversionReport(
        source=checkpoint.name,
        revision=plan.commit,
        out=out,
        architecture=plan.head.source,
        converted_to=type(model).__name__,
        method=plan.method_name,
        quality=plan.quality,
        position_embedding_type=plan.config.position_embedding_type,
        position_options=resolved_options(plan.config),
        method_options=asdict(plan.options),
        arguments=plan.arguments,
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        steps=steps,
        difference=None,
        files=(),
        versions={
            "hf_relpos": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    )


def _write(
    folder: Path, plan: ConversionPlan, model: RelPosBertPreTrainedModel, source: Checkpoint, report: ConversionReport
) -> tuple[ConversionReport, RelPosBertPreTrainedModel]:
    """Write the model and copy other files; returns the report with their names, and the reloaded model.

    Raises:
        ConversionError: for a tensor that differs after reloading.
    """
    encoder = folder / plan.layout.encoder
    model.save_pretrained(encoder)
    copied = copy_companions(plan.folder, encoder, model)
    files = [str(Path(plan.layout.encoder, file)) for file in copied]
    reloaded = type(model).from_pretrained(encoder, dtype="auto", local_files_only=True)
    compare_tensors(model, reloaded, source, report.steps)
    files += plan.layout.copy(plan.top, folder)
    if plan.new_length is not None:
        plan.layout.write_length(folder, plan.new_length)
    others = () if report.revision else left_out(plan.top, plan.layout, files)
    return replace(report, files=tuple(files), left_out=others), reloaded


def _describe(
    folder: Path, plan: ConversionPlan, model: RelPosBertPreTrainedModel, report: ConversionReport, plots: bool
) -> None:
    """Write conversion.json, the plots and the model card."""
    write_json(folder / REPORT, report.to_dict(), indent=2)
    pictures = draw(model, report, folder) if plots else ()
    limit = plan.source_config.max_position_embeddings
    shown = example(model, folder, folder / plan.layout.encoder, is_sentence_encoder(folder))
    write_card(folder, report, model.config, limit, source_metadata(plan.top), pictures, shown)
