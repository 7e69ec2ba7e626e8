"""From a checkpoint to a relpos_bert folder: plan, apply, write, read back, compare, rename."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..calibration.processes import processes
from ..files import atomic_folder, describe_write_error, write_json
from ..model.configuration_relpos_bert import RelPosBertConfig
from ..model.modeling_relpos_bert import HEADS, RelPosBertPreTrainedModel
from ..model.schemes import DEFAULT_SCHEME, STOCK_SCHEME, find_scheme, scheme_parts
from ..plot import figure_class
from ..version import __version__
from .card import draw, source_metadata, write_card
from .families import TASK_TYPES, TOKEN_TYPES, SourceSpec, check_tables, choose_head, recognise
from .folder import check_target, copy_companions
from .methods import (
    METHODS,
    ConversionContext,
    Method,
    add_to_types,
    check_plots,
    check_scheme,
    check_text,
    choose_method,
    resolve_options,
    same_positions,
    text_names,
)
from .modules import locate
from .names import is_buffer, is_scheme, is_table
from .report import ConversionReport, plan
from .source import ConversionError, Source, normalise, read_config, read_tensors
from .verify import compare_outputs, compare_tensors, source_model


# Stock class to ours: BertForMaskedLM to RelPosBertForMaskedLM, and so on.
ARCHITECTURES = {head.__name__.removeprefix("RelPos"): head for head in HEADS.values()}

# Fields of the source's config.json that describe the source and not the model.
NOT_KEPT = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "position_embedding_type",
    "torch_dtype",
    "transformers_version",
)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    position_embedding_type: str | None = None,
    position_options: Mapping[str, Any] | None = None,
    method: str | None = None,
    method_options: Mapping[str, Any] | None = None,
    texts: Iterable[str] | None = None,
    seed: int = 0,
    architecture: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
    plots: bool = False,
) -> ConversionReport:
    """Write a checkpoint of one of `families.FAMILIES` as a relpos_bert folder with its tokenizer.

    The result is written beside `out`, read back and compared, and only then renamed: after an error `out` is as it
    was before.

    Args:
        source: local folder or Hub repository, with safetensors weights.
        out: folder to write; also gets `conversion.json`, the report, and `README.md`, a model card. That of a
            sentence-transformers folder has its modules, too.
        position_embedding_type: scheme of the result, a key of `hf_relpos.SCHEMES`; None for `relative_key`, for that
            of a source that is relative already, `tables` for `calibrate`, and `absolute` where the method makes
            nothing else. MPNet keeps its own beside it.
        position_options: its options.
        method: `keep` (absolute positions stay, outputs are the source's), `drop` (their mean stays), `calibrate`
            (relative terms are fitted to the source's attention on `texts`), `calibrate+distil` (and then trained to
            its outputs), `interpolate` or `hierarchical` (a longer table of absolute positions, and nothing relative)
            or, for a source that is relative already and for no other, `exact` (its tables stay, or fit into those of
            another scheme; outputs are the source's) and `refit` (the closest tables of another scheme;
            `details["lost"]` says what they do not hold). None for `exact` where it applies and `keep` elsewhere.
        method_options: options of the method: keys of `METHODS[method].options`.
        texts: for a method that learns from text: one path or several (as Path objects), read by
            `hf_relpos.data.read_texts`, each with the same share of the tokens; or documents, strings.
        seed: for a method that draws at random.
        architecture: class whose head to keep; by default the one that config.json names.
        revision: branch, tag or commit of a Hub repository.
        overwrite: replace an existing `out`, after success.
        progress: show how far long work has come.
        plots: for a method that learns from text: draw the fidelity by length (`fidelity.png`) and the tables
            (`tables.png`) into `out`. Needs the extra `plot`.

    Returns:
        What became of every tensor.

    Raises:
        ConversionError: for a source that cannot be converted, a scheme or option that is not known, and a place that
            cannot be written; names what is wrong and what to do.
        ModuleNotFoundError: with `plots`, without matplotlib.
    """
    if method is not None and method not in METHODS:
        raise ConversionError(f"method = {method!r} is unknown; known methods: {', '.join(METHODS)}")
    if plots:
        figure_class()  # raises without matplotlib, before any work
    target = check_target(out, overwrite)
    top, commit, layout = locate(source, revision)
    if top == target or target in top.parents:
        raise ConversionError(f"out = '{out}' is the source or holds it; choose another folder")

    folder = top / layout.encoder
    saved = read_config(folder)
    spec = recognise(folder, saved)
    asked, (own, architecture, left_behind) = architecture, choose_head(spec, folder, architecture)
    method = choose_method(method, spec, folder)
    check_text(method, texts)
    if plots:
        check_plots(method)
    settings = resolve_options(method, method_options)
    same = own_config(folder, spec)
    config = target_config(folder, spec, same, position_embedding_type, position_options, METHODS[method], settings)

    raw = read_tensors(folder)
    check_tables(spec, folder, raw)
    stored = {stock for name in raw for stock in spec.spell(name, base=False)}
    if layout.listed and asked is None and all(name.startswith("bert.") for name in stored):
        # sentence-transformers saves the encoder of a model, under the name of the class that it was read with
        own, architecture, left_behind = choose_head(spec, folder, f"{spec.family.stems[0]}Model")
    base = architecture == "BertModel"
    checkpoint = normalise(
        Source(str(source), folder, commit, saved, architecture),
        raw,
        expected=expected_shapes(spec, architecture, same),
        spell=partial(spec.spell, base=base),
        tied=same.tie_word_embeddings,
        unused=lambda name: is_buffer(name) or (is_table(name) and not spec.absolute),
        cut=spec.cut,
    )
    stock_config = _from_dict(CONFIG_MAPPING[spec.family.stock], f"{folder / 'config.json'}: ", spec.config)
    stock = partial(source_model, spec, own, stock_config)

    process = processes()  # one of several writes; the others take part in what learns from text
    state = target.with_name(f".{target.name}.{method}") if METHODS[method].text != "unused" else None
    context = ConversionContext(
        checkpoint, same, lambda: assemble(same, checkpoint)[0], texts, settings, seed, state, progress
    )
    placed = place(checkpoint, same, config)
    model, changed = build(config, placed, METHODS[method], context)
    report = ConversionReport(
        source=checkpoint.name,
        revision=commit,
        out=str(out),
        architecture=own,
        converted_to=type(model).__name__,
        method=method,
        position_embedding_type=config.position_embedding_type,
        position_options=resolved_options(config),
        method_options=settings,
        asked=request(
            position_embedding_type=position_embedding_type,
            position_options=position_options,
            method=method,
            method_options=method_options,
            texts=text_names(texts),
            seed=None if METHODS[method].text == "unused" else seed,
            architecture=asked,
            revision=commit,
        ),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        steps=plan(model, placed, changed, left_behind),
        difference=None,
        files=(),
        notes=layout.notes(top),
        details=context.details,
        versions={
            "hf_relpos": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
    )
    if not process.is_main_process:
        process.wait_for_everyone()
        return report
    try:
        with atomic_folder(target, overwrite) as unfinished:
            inside = unfinished / layout.encoder
            model.save_pretrained(inside)
            files = [str(Path(layout.encoder, name)) for name in copy_companions(folder, inside, model)]
            reloaded = type(model).from_pretrained(inside, dtype="auto", local_files_only=True)
            compare_tensors(model, reloaded, placed, report.steps)
            difference = None
            if METHODS[method].exact:
                difference = compare_outputs(reloaded, checkpoint, spec, stock, rounded=bool(changed))
            report = replace(report, difference=difference, files=(*files, *layout.copy(top, unfinished)))
            write_json(unfinished / "conversion.json", report.to_dict(), indent=2)
            pictures = draw(reloaded, report, unfinished) if plots else ()
            write_card(unfinished, report, config, same.max_position_embeddings, source_metadata(top), pictures)
    except (OSError, SafetensorError) as error:
        raise ConversionError(describe_write_error(error, target)) from error
    process.wait_for_everyone()
    return report


def request(**arguments: Any) -> dict[str, Any]:
    """What the caller asked for: arguments that are not None, and no empty mapping."""
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in arguments.items()}
    return {key: value for key, value in plain.items() if value is not None and value != {}}


def _from_dict(kind: type[PreTrainedConfig], where: str, saved: Mapping[str, Any], **fields: Any) -> PreTrainedConfig:
    """A configuration with the fields of the source and these; errors begin with `where`."""
    try:
        return kind.from_dict({key: value for key, value in saved.items() if key not in NOT_KEPT} | fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"{where}{error}") from error


def own_config(folder: Path, spec: SourceSpec) -> RelPosBertConfig:
    """The configuration of a source in our words, positions and all.

    Raises:
        ConversionError: for values that Transformers or the scheme refuses.
    """
    return _from_dict(
        RelPosBertConfig,
        f"{folder / 'config.json'}: ",
        spec.fields,
        position_embedding_type=spec.scheme or STOCK_SCHEME,
        position_options=spec.options,
        absolute_position_embeddings=spec.absolute and spec.scheme is not None,
    )


def target_config(
    folder: Path,
    spec: SourceSpec,
    same: RelPosBertConfig,
    position_embedding_type: str | None,
    position_options: Mapping[str, Any] | None,
    method: Method,
    settings: Mapping[str, Any],
) -> RelPosBertConfig:
    """The configuration of the result.

    Args:
        same: that of the source, in our words.
        position_embedding_type: as the caller gave it; None for the default.
        position_options: as the caller gave them.
        settings: the method's options.

    Raises:
        ConversionError: for an unknown scheme or option, and a scheme that does not fit the method or the source.
    """
    if position_options is not None and not isinstance(position_options, Mapping):
        raise ConversionError(
            f"position_options = {position_options!r} is not a mapping; give option names and values, such as "
            "{'clip': 32}"
        )
    options = dict(position_options or {})
    if not spec.absolute:
        return relative_config(spec, same, position_embedding_type, options, method, settings)
    own = spec.scheme if settings.get("own_bias") != "drop" else None
    name = position_embedding_type or method.scheme or own or DEFAULT_SCHEME
    try:
        scheme = find_scheme(name)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    check_scheme(scheme, method)
    if name == own:
        if options and {**spec.options, **options} != spec.options:
            raise ConversionError(
                f"position_options = {options}: {folder} has this scheme already, with the options {spec.options}; "
                "leave them out, or drop its own with method = 'drop' and method_options = {'own_bias': 'drop'}"
            )
        options = spec.options
    elif own is not None:
        name, options = [own, name], {own: spec.options, name: options}
    fields = dict(spec.fields)
    if method.positions is not None:
        fields["max_position_embeddings"] = method.positions(same.max_position_embeddings, settings)
    return _from_dict(  # what is wrong now came from the caller
        RelPosBertConfig,
        "",
        fields,
        position_embedding_type=name,
        position_options=options,
        absolute_position_embeddings=method.keeps_table and not scheme.learned_input_table,
    )


def relative_config(
    spec: SourceSpec,
    same: RelPosBertConfig,
    position_embedding_type: str | None,
    position_options: dict[str, Any],
    method: Method,
    settings: Mapping[str, Any],
) -> RelPosBertConfig:
    """The configuration of a result whose source is relative already: the source's own, or one with other tables.

    Raises:
        ConversionError: for a scheme, option or size that is not accepted.
    """
    name = position_embedding_type or spec.scheme
    positions = settings["max_position_embeddings"] or same.max_position_embeddings
    config = _from_dict(
        RelPosBertConfig,
        "",
        spec.fields,
        position_embedding_type=name,
        position_options=position_options or (spec.options if name == spec.scheme else {}),
        max_position_embeddings=positions,
        absolute_position_embeddings=False,
    )
    if same_positions(same, config):
        return same
    check_scheme(find_scheme(name), method)
    return config


def resolved_options(config: RelPosBertConfig) -> dict[str, Any]:
    """The options of a scheme with their defaults; those of a combination by scheme."""
    parts = {scheme.name: settings for scheme, settings in scheme_parts(config)}
    return parts if isinstance(config.position_embedding_type, list) else parts[config.position_embedding_type]


def expected_shapes(spec: SourceSpec, architecture: str, same: RelPosBertConfig) -> dict[str, torch.Size]:
    """Stock name to shape of every tensor that the source must have.

    Args:
        architecture: class of stock BERT.
        same: the configuration of the source, in our words.
    """
    with torch.device("meta"):
        model = ARCHITECTURES[architecture](same)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if not spec.family.token_types:
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(TOKEN_TYPES)}
    return shapes | spec.more(base=architecture == "BertModel")


def place(source: Source, same: RelPosBertConfig, config: RelPosBertConfig) -> Source:
    """The source with its relative positions under the names that the result has for them; else among its `extra`.

    Args:
        same: the configuration of the source, in our words.
        config: that of the result.
    """
    if same_positions(same, config):
        return source
    kinds = same.position_embedding_type, config.position_embedding_type
    part = kinds[1].index(kinds[0]) if isinstance(kinds[1], list) and kinds[0] in kinds[1] else None
    tensors, origin, extra = dict(source.tensors), dict(source.origin), dict(source.extra)
    for name in filter(is_scheme, source.tensors):
        tensor = tensors.pop(name)
        if part is None:
            extra[name] = tensor
        else:
            there = name.replace(".distance_embedding.", f".distance_embedding.parts.{part}.")
            tensors[there], origin[there] = tensor, origin.pop(name)
    return replace(source, tensors=tensors, origin=origin, extra=extra)


@torch.no_grad()
def assemble(config: RelPosBertConfig, source: Source) -> tuple[RelPosBertPreTrainedModel, dict[str, str]]:
    """A model with all the source's tensors that it has a place for, in the dtype of the source and in eval mode.

    The scheme's other parameters are zero, and so are the token types of a source that has none. A table of another
    length is left to the method.

    Returns:
        The model, and a note on each tensor into which another one went: ERNIE's task 0, which is what every token
        gets when none is given.
    """
    with torch.random.fork_rng(devices=[]):
        # a pooler that the source lacks comes out the same each time; torch.manual_seed would reach other devices too
        torch.default_generator.manual_seed(0)
        model = ARCHITECTURES[source.architecture](config).to(source.dtype).eval()
    for name, parameter in model.named_parameters():
        if is_scheme(name) or name.endswith(TOKEN_TYPES):
            parameter.zero_()
    for name, tensor in model.state_dict().items():
        if name in source.tensors and source.tensors[name].shape == tensor.shape:
            tensor.copy_(source.tensors[name])
    tasks = [tensor for name, tensor in source.tensors.items() if name.endswith(TASK_TYPES)]
    return model, {add_to_types(model, tasks[0][0]): "plus the vector of task type 0"} if tasks else {}


@torch.no_grad()
def build(
    config: RelPosBertConfig, source: Source, method: Method, context: ConversionContext
) -> tuple[RelPosBertPreTrainedModel, dict[str, str]]:
    """The result in memory, and the tensors that were changed, with a note on each.

    Args:
        source: under the names of the result.
    """
    model, folded = assemble(config, source)
    changed = method.apply(model, context)
    notes = {name: ", ".join(each[name] for each in (folded, changed) if name in each) for name in folded | changed}
    return model, notes
