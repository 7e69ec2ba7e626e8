"""From a checkpoint to a relpos_bert folder: resolve, read, build, write, read back, compare, rename."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..console import spinner
from ..data.seed import check_seed
from ..evaluation.plot import figure_class
from ..families.errors import ConversionError, PoorConversionWarning
from ..families.names import is_buffer, is_table
from ..families.recognition import Head, SourceSpec, check_tables, choose_head, recognise
from ..families.registry import OWN
from ..families.source import Source, normalise, read_config, read_tensors, tensor_names
from ..files import atomic_folder, describe_write_error, write_json
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..processes import process_state
from ..schemes.scheme import nearest
from ..version import __version__
from .assembly import ARCHITECTURES, assemble, build, expected_shapes, rename_relative
from .card import draw, source_metadata, write_card
from .configs import resolved_options, source_config, stock_config, target_config
from .context import ConversionContext
from .folder import check_apart, check_replaceable, check_target, copy_companions, left_out
from .methods import METHODS, check_device, check_plots, check_text, choose_method, resolve_options, text_names
from .modules import Layout, locate
from .quality import QUALITIES, choose_quality
from .report import REPORT, ConversionReport, plan
from .verify import compare_outputs, compare_tensors, own_model, source_model


NOT_COMPARED = (
    "Transformers has no class for the source, so that no outputs were compared: every tensor was read back from the "
    "result as it was in the source"
)


@dataclass(frozen=True)
class _Conversion:
    """What is known of a conversion before its weights are read.

    Attributes:
        top: folder of the source.
        layout: of that folder.
        saved: config.json of the encoder.
        spec: the source, recognised.
        head: its head.
        method: key of `METHODS`.
        options: of the method, with defaults.
        source_config: the configuration of the source as a RelPosBertConfig.
        config: that of the result.
    """

    top: Path
    layout: Layout
    saved: dict[str, Any]
    spec: SourceSpec
    head: Head
    method: str
    options: dict[str, Any]
    source_config: RelPosBertConfig
    config: RelPosBertConfig

    @property
    def folder(self) -> Path:
        """The folder of config.json and the weights."""
        return self.top / self.layout.encoder


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

    The result is written beside `out`, read back and compared, and only then renamed: after an error `out` is as it
    was before. A result whose own check is poor, by the limits in `ConversionReport.shortfalls`, is written all the
    same, and a `PoorConversionWarning` says so.

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
    if method is not None and method not in METHODS:
        raise ConversionError(
            f"method = {method!r} is unknown{nearest(method, METHODS)}; known methods: {', '.join(METHODS)}"
        )
    if plots:
        figure_class()  # raises without matplotlib, before any work
    try:
        check_seed(seed)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    target = check_target(out, overwrite, source)
    top, commit, layout = locate(source, revision, allow_pickle)
    check_apart(top, target)  # the cache of the Hub
    folder = top / layout.encoder
    saved = read_config(folder)
    spec = recognise(folder, saved, tensor_names(folder, allow_pickle))
    head = choose_head(spec, folder, architecture)
    spec = spec.with_head(head)
    quality = choose_quality(quality, method, spec, texts is not None)
    name = choose_method(method if quality is None else method or QUALITIES[quality].method, spec, folder)
    texts = check_text(name, texts, field)
    if plots:
        check_plots(name)
    if quality is not None:
        position_embedding_type, position_options = QUALITIES[quality].complete_scheme(
            position_embedding_type, position_options
        )
        method_options = QUALITIES[quality].complete_options(name, method_options)
    options = resolve_options(name, method_options)
    computes_on = check_device(name, device)
    own_config = source_config(folder, spec)
    config = target_config(folder, spec, own_config, position_embedding_type, position_options, METHODS[name], options)
    conversion = _Conversion(top, layout, saved, spec, head, name, options, own_config, config)
    with spinner("reading the source", progress):
        raw = read_tensors(folder, allow_pickle)
        conversion, checkpoint = _read(conversion, raw, str(source), commit, any_head=architecture is None)
    reference: Callable[[PreTrainedModel, Source], PreTrainedModel] | None = None
    if spec.family is OWN:
        reference = partial(own_model, ARCHITECTURES[conversion.head.stock], folder)
    elif spec.family.stock is not None:
        reference = partial(source_model, spec, conversion.head.source, stock_config(folder, spec))

    process = process_state()  # one of several writes; the others take part in what learns from text
    learns = METHODS[name].text != "unused"
    context = ConversionContext(
        checkpoint,
        own_config,
        build_teacher=lambda: assemble(own_config, checkpoint)[0],
        texts=texts,
        field=field,
        options=options,
        seed=seed,
        resume_folder=target.with_name(f".{target.name}.{name}") if learns else None,
        device=computes_on,
        progress=progress,
        is_sentence_encoder=layout.pools,
    )
    renamed = rename_relative(checkpoint, own_config, config)
    with spinner("converting", progress and not learns):  # what learns has bars of its own
        model, changed = build(config, renamed, METHODS[name], context)
    report = ConversionReport(
        source=checkpoint.name,
        revision=commit,
        out=str(out),
        architecture=conversion.head.source,
        converted_to=type(model).__name__,
        method=name,
        quality=quality,
        position_embedding_type=config.position_embedding_type,
        position_options=resolved_options(config),
        method_options=options,
        arguments=_without_defaults(
            position_embedding_type=position_embedding_type,
            position_options=position_options,
            method=name,
            method_options=method_options,
            texts=text_names(texts),
            field=None if field == "text" else field if isinstance(field, str) else list(field),
            seed=seed if learns else None,
            architecture=architecture,
            revision=commit,
            allow_pickle=allow_pickle or None,
        ),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        steps=plan(model, renamed, changed, conversion.head.left_behind),
        difference=None,
        files=(),
        notes=(*layout.notes(top), *([NOT_COMPARED] if METHODS[name].exact and reference is None else [])),
        details=context.details,
        versions={
            "hf_relpos": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    )
    if process.is_main_process:
        try:
            # a user may have put something there in the meantime
            unchanged = partial(check_replaceable, out)
            with spinner("writing and checking", progress), atomic_folder(target, overwrite, unchanged) as unfinished:
                report, reloaded = _write(unfinished, conversion, model, renamed, report)
                if METHODS[name].exact and reference is not None:
                    difference = compare_outputs(reloaded, checkpoint, spec, reference, rounded=bool(changed))
                    report = replace(report, difference=difference)
                _describe(unfinished, conversion, reloaded, report, plots)
        except (OSError, SafetensorError) as error:
            raise ConversionError(describe_write_error(error, target)) from error
    process.wait_for_everyone()
    if report.shortfalls and process.is_main_process:
        warnings.warn(f"{out}: {report.warning}", PoorConversionWarning, stacklevel=2)
    return report


def _read(
    conversion: _Conversion, raw: Mapping[str, torch.Tensor], name: str, commit: str | None, any_head: bool
) -> tuple[_Conversion, Source]:
    """Check and rename the weights, and correct the head that the configuration names where the weights have none.

    Args:
        conversion: before its weights are read.
        raw: name in the file to tensor.
        name: of the source, as the caller gave it.
        commit: of a Hub repository.
        any_head: whether the caller left the choice of the head to the configuration.
    """
    folder, spec, head, config = conversion.folder, conversion.spec, conversion.head, conversion.source_config
    raw = spec.unpack(raw)
    check_tables(spec, folder, raw)
    stock_names = {stock for stored in raw for stock in spec.spell(stored, base=False)}
    if conversion.layout.listed and any_head and all(stock.startswith("bert.") for stock in stock_names):
        # sentence-transformers saves the encoder of a model, under the name of the class that it was read with
        head = choose_head(spec, folder, f"{spec.family.stems[0]}Model")
        spec = spec.with_head(head)
    checkpoint = normalise(
        Source(name, folder, commit, conversion.saved, head.stock),
        raw,
        expected=expected_shapes(spec, head.stock, config),
        spell=partial(spec.spell, base=head.stock == "BertModel"),
        tied=config.tie_word_embeddings,
        unused=lambda stock: is_buffer(stock) or (is_table(stock) and not spec.absolute),
        cut=spec.cut,
    )
    return replace(conversion, head=head), checkpoint


def _write(
    folder: Path, conversion: _Conversion, model: RelPosBertPreTrainedModel, source: Source, report: ConversionReport
) -> tuple[ConversionReport, RelPosBertPreTrainedModel]:
    """Write the model and copy the files beside it; the report with their names, and the model read back.

    Raises:
        ConversionError: for a tensor that is read back different.
    """
    encoder = folder / conversion.layout.encoder
    model.save_pretrained(encoder)
    copied = copy_companions(conversion.folder, encoder, model)
    files = [str(Path(conversion.layout.encoder, file)) for file in copied]
    reloaded = type(model).from_pretrained(encoder, dtype="auto", local_files_only=True)
    compare_tensors(model, reloaded, source, report.steps)
    files += conversion.layout.copy(conversion.top, folder)
    others = () if report.revision else left_out(conversion.top, conversion.layout, files)
    return replace(report, files=tuple(files), left_out=others), reloaded


def _describe(
    folder: Path, conversion: _Conversion, model: RelPosBertPreTrainedModel, report: ConversionReport, plots: bool
) -> None:
    """Write conversion.json, the plots and the model card."""
    write_json(folder / REPORT, report.to_dict(), indent=2)
    pictures = draw(model, report, folder) if plots else ()
    limit = conversion.source_config.max_position_embeddings
    write_card(folder, report, conversion.config, limit, source_metadata(conversion.top), pictures)


def _without_defaults(**arguments: Any) -> dict[str, Any]:
    """The arguments that are neither None nor an empty mapping."""
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in arguments.items()}
    return {key: value for key, value in plain.items() if value is not None and value != {}}
