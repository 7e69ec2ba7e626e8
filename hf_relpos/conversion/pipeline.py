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
from .configurations import resolved_options, stock_config
from .folder import check_replaceable, check_target, copy_companions, left_out
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

    The result is written beside `out`, read back and compared, and then renamed. After an error `out` is as it was
    before. A result that fails a threshold of `ConversionReport.failed_thresholds` is written all the same, and a
    `PoorConversionWarning` says so.

    Args:
        source: local folder or Hub repository, with safetensors weights, or pickled ones if `allow_pickle` is set.
        out: folder to write; also gets `conversion.json`, the report, and `README.md`, a model card. That of a
            sentence-transformers folder has its modules, too.
        position_embedding_type: scheme of the result, a key of `hf_relpos.SCHEMES`. None for that of `quality`;
            without a quality for the method's (`tables` for those that calibrate, `absolute` for `interpolate` and
            `hierarchical`), else the source's own relative scheme, else `relative_key`. MPNet keeps its T5 bias
            beside it.
        position_options: options of that scheme.
        method: `keep` (absolute positions stay, outputs are the source's), `drop` (their mean stays), `calibrate`
            (relative terms are fitted to the source's attention on `texts`), `calibrate+distil` (and then trained to
            its outputs), `interpolate` or `hierarchical` (a longer table of absolute positions, and nothing relative)
            or, for a source that is relative already and for no other, `exact` (its tables stay, or fit into those of
            another scheme; outputs are the source's) and `refit` (the closest tables of another scheme;
            `details["lost"]` says what they do not hold). `calibrate` and `calibrate+distil` take absolute and
            relative sources. None for that of `quality`; without a quality for `exact` if the source is relative
            already, else `keep`.
        method_options: options of the method: keys of `METHODS[method].options`.
        quality: a key of `hf_relpos.conversion.QUALITIES`, which chooses scheme, method and their options, as far as
            they are not given: `fast`, `default` or `faithful`. None for `default` where there are `texts` and no
            method, and for no choice elsewhere.
        texts: for a method that learns from text: one path or several (as Path objects), read by
            `hf_relpos.data.read_texts`, each with the same share of the tokens; or documents, strings, of which an
            iterator is read once, up to 100 million characters.
        field: key or column of the text in .jsonl, .tsv and .csv files and Hub datasets; one for all, or one for each
            of `texts`.
        seed: for a method that draws at random, 0 to 2³² − 1.
        architecture: class whose head to keep; by default the one that config.json names.
        revision: branch, tag or commit of a Hub repository.
        allow_pickle: where there are no safetensors, read `pytorch_model.bin` or its shards, and download them, with
            `torch.load(weights_only=True)`, which makes tensors only; for checkpoints whose origin you trust.
        overwrite: replace an existing `out`, after success, if it holds a checkpoint and nothing else.
        device: where a method that learns from text computes, such as "cpu" or "cuda:1"; it must have float64. None
            for the accelerator where there is one, else the CPU.
        progress: show a progress bar; where there is no terminal, a line every half minute.
        plots: for a method that learns from text: draw the fidelity by length (`fidelity.png`) and the tables
            (`tables.png`) into `out`. Needs the extra `plot`.

    Returns:
        The report, as in `conversion.json`.

    Raises:
        ConversionError: for a source that cannot be converted, a scheme or option that is not known, and a folder that
            cannot be written; names what is wrong and what to do.
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
        is_sentence_encoder=plan.layout.pools,
    )
    renamed = rename_relative(checkpoint, plan.source_config, plan.config)
    with spinner("converting", progress and not learns):  # what learns has bars of its own
        model, changed = build_model(plan.config, renamed, plan.method.apply, run)
    reference = _reference(plan) if plan.method.exact else None
    report = _report(plan, checkpoint, str(out), model, list_steps(model, renamed, changed, plan.head.left_behind))
    notes = (*plan.layout.notes(plan.top), *([NOT_COMPARED] if plan.method.exact and reference is None else []))
    report = replace(report, details=run.details, notes=notes)
    process = process_state()  # one of several writes; the others take part in what learns from text
    if process.is_main_process:
        try:
            # a user may have put something there in the meantime
            unchanged = partial(check_replaceable, out)
            with spinner("writing and checking", progress), atomic_folder(target, overwrite, unchanged) as unfinished:
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
    """Read, check and rename the weights; a plan without the head of the configuration where they have none.

    Args:
        plan: before its weights are read.
        name: of the source, as the caller gave it.
        allow_pickle: as `convert` takes it.
        any_head: whether the caller left the choice of the head to the configuration.
    """
    folder, spec, head, config = plan.folder, plan.spec, plan.head, plan.source_config
    raw = spec.unpack(read_tensors(folder, allow_pickle))
    check_tables(spec, folder, raw)
    stock_names = {stock for stored in raw for stock in spec.rename(stored, base=False)}
    if plan.layout.listed and any_head and all(stock.startswith("bert.") for stock in stock_names):
        # sentence-transformers saves the encoder of a model, under the name of the class that it was read with
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
    """Builds the model of the source that outputs are compared with; None where no class computes them."""
    if plan.spec.family is OWN:
        return partial(own_model, ARCHITECTURES[plan.head.stock], plan.folder)
    if plan.spec.family.stock is not None:
        return partial(source_model, plan.spec, plan.head.source, stock_config(plan.folder, plan.spec))
    return None


def _report(
    plan: ConversionPlan, checkpoint: Checkpoint, out: str, model: RelPosBertPreTrainedModel, steps: tuple[Step, ...]
) -> ConversionReport:
    """The report before anything was written or measured."""
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
    """Write the model and copy the files beside it; the report with their names, and the model read back.

    Raises:
        ConversionError: for a tensor that is read back different.
    """
    encoder = folder / plan.layout.encoder
    model.save_pretrained(encoder)
    copied = copy_companions(plan.folder, encoder, model)
    files = [str(Path(plan.layout.encoder, file)) for file in copied]
    reloaded = type(model).from_pretrained(encoder, dtype="auto", local_files_only=True)
    compare_tensors(model, reloaded, source, report.steps)
    files += plan.layout.copy(plan.top, folder)
    others = () if report.revision else left_out(plan.top, plan.layout, files)
    return replace(report, files=tuple(files), left_out=others), reloaded


def _describe(
    folder: Path, plan: ConversionPlan, model: RelPosBertPreTrainedModel, report: ConversionReport, plots: bool
) -> None:
    """Write conversion.json, the plots and the model card."""
    write_json(folder / REPORT, report.to_dict(), indent=2)
    pictures = draw(model, report, folder) if plots else ()
    limit = plan.source_config.max_position_embeddings
    write_card(folder, report, plan.config, limit, source_metadata(plan.top), pictures)
