"""From a checkpoint to a relpos_bert folder: plan, apply, write, read back, compare, rename."""

import json
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

from ..model.configuration_relpos_bert import RelPosBertConfig
from ..model.modeling_relpos_bert import HEADS, RelPosBertPreTrainedModel
from ..model.schemes import find_scheme, scheme_parts
from ..version import __version__
from .families import TASK_TYPES, TOKEN_TYPES, Known, check_tables, choose_head, recognise
from .folder import check_target, copy_companions, describe, new_folder
from .methods import (
    METHODS,
    Method,
    Work,
    add_to_types,
    check_scheme,
    check_text,
    choose_method,
    resolve_options,
    same_positions,
)
from .modules import locate
from .names import is_buffer, is_scheme, is_table
from .processes import processes
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
) -> ConversionReport:
    """Write a checkpoint of one of `families.FAMILIES` as a relpos_bert folder with its tokenizer.

    The result is written beside `out`, read back and compared, and only then renamed: after an error `out` is as it
    was before.

    Args:
        source: local folder or Hub repository, with safetensors weights.
        out: folder to write; also gets `conversion.json`, the report. That of a sentence-transformers folder has its
            modules, too.
        position_embedding_type: scheme of the result, a key of `hf_relpos.SCHEMES`; None for `relative_key`, for that
            of a source that is relative already, `tables` for `calibrate`, and `absolute` where the method makes
            nothing else. MPNet keeps its own beside it.
        position_options: its options.
        method: `keep` (absolute positions stay, outputs are the source's), `drop` (their mean stays), `calibrate`
            (relative terms are fitted to the source's attention on `texts`), `calibrate+distil` (and then trained to
            its outputs), `interpolate` or `hierarchical` (a longer table of absolute positions, and nothing
            relative) or, for a source that is
            relative already and for no other, `exact` (its tables stay, or fit into those of another scheme; outputs
            are the source's) and `refit` (the closest tables of another scheme; `details["lost"]` says what they do
            not hold). None for `exact` where it applies and `keep` elsewhere.
        method_options: options of the method: keys of `METHODS[method].options`.
        texts: for a method that learns from text: one path or several (as Path objects), read by
            `hf_relpos.text.read_texts`, each with the same share of the tokens; or documents, strings.
        seed: for a method that draws at random.
        architecture: class whose head to keep; by default the one that config.json names.
        revision: branch, tag or commit of a Hub repository.
        overwrite: replace an existing `out`, after success.
        progress: show how far long work has come.

    Returns:
        What became of every tensor.

    Raises:
        ConversionError: for a source that cannot be converted, a scheme or option that is not known, and a place that
            cannot be written; names what is wrong and what to do.
    """
    if method is not None and method not in METHODS:
        raise ConversionError(f"method = {method!r} is unknown; known methods: {', '.join(METHODS)}")
    target = check_target(out, overwrite)
    top, commit, layout = locate(source, revision)
    if top == target or target in top.parents:
        raise ConversionError(f"out = '{out}' is the source or holds it; choose another folder")

    folder = top / layout.encoder
    saved = read_config(folder)
    known = recognise(folder, saved)
    asked, (own, architecture, left_behind) = architecture, choose_head(known, folder, architecture)
    method = choose_method(method, known, folder)
    check_text(method, texts)
    settings = resolve_options(method, method_options)
    same = own_config(folder, known)
    config = target_config(folder, known, same, position_embedding_type, position_options, METHODS[method], settings)

    raw = read_tensors(folder)
    check_tables(known, folder, raw)
    stored = {stock for name in raw for stock in known.spell(name, base=False)}
    if layout.listed and asked is None and all(name.startswith("bert.") for name in stored):
        # sentence-transformers saves the encoder of a model, under the name of the class that it was read with
        own, architecture, left_behind = choose_head(known, folder, f"{known.family.stems[0]}Model")
    base = architecture == "BertModel"
    checkpoint = normalise(
        Source(str(source), folder, commit, saved, architecture),
        raw,
        expected=expected_shapes(known, architecture, same),
        spell=partial(known.spell, base=base),
        tied=same.tie_word_embeddings,
        unused=lambda name: is_buffer(name) or (is_table(name) and not known.absolute),
        cut=known.cut,
    )
    stock_config = _from_dict(CONFIG_MAPPING[known.family.stock], f"{folder / 'config.json'}: ", known.config)
    stock = partial(source_model, known, own, stock_config)

    process = processes()  # one of several writes; the others take part in what learns from text
    state = target.with_name(f".{target.name}.{method}") if METHODS[method].text != "unused" else None
    work = Work(checkpoint, same, lambda: assemble(same, checkpoint)[0], texts, settings, seed, state, progress)
    placed = place(checkpoint, same, config)
    model, changed = build(config, placed, METHODS[method], work)
    report = ConversionReport(
        source=checkpoint.name,
        revision=commit,
        out=str(out),
        architecture=own,
        converted_to=type(model).__name__,
        method=method,
        position_embedding_type=config.position_embedding_type,
        position_options=resolved_options(config),
        dtype=str(checkpoint.dtype).removeprefix("torch."),
        steps=plan(model, placed, changed, left_behind),
        difference=None,
        files=(),
        notes=layout.notes(top),
        details=work.details,
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
        with new_folder(target, overwrite) as unfinished:
            inside = unfinished / layout.encoder
            model.save_pretrained(inside)
            files = [str(Path(layout.encoder, name)) for name in copy_companions(folder, inside, model)]
            reloaded = type(model).from_pretrained(inside, dtype="auto", local_files_only=True)
            compare_tensors(model, reloaded, placed, report.steps)
            difference = None
            if METHODS[method].exact:
                difference = compare_outputs(reloaded, checkpoint, known, stock, rounded=bool(changed))
            report = replace(report, difference=difference, files=(*files, *layout.copy(top, unfinished)))
            text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
            (unfinished / "conversion.json").write_text(text + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ConversionError(describe(error, target)) from error
    process.wait_for_everyone()
    return report


def _from_dict(kind: type[PreTrainedConfig], where: str, saved: Mapping[str, Any], **fields: Any) -> PreTrainedConfig:
    """A configuration with the fields of the source and these; errors begin with `where`."""
    try:
        return kind.from_dict({key: value for key, value in saved.items() if key not in NOT_KEPT} | fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"{where}{error}") from error


def own_config(folder: Path, known: Known) -> RelPosBertConfig:
    """The configuration of a source in our words, positions and all.

    Raises:
        ConversionError: for values that Transformers or the scheme refuses.
    """
    return _from_dict(
        RelPosBertConfig,
        f"{folder / 'config.json'}: ",
        known.fields,
        position_embedding_type=known.scheme or "absolute",
        position_options=known.options,
        absolute_position_embeddings=known.absolute and known.scheme is not None,
    )


def target_config(
    folder: Path,
    known: Known,
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
    if not known.absolute:
        return relative_config(known, same, position_embedding_type, options, method, settings)
    own = known.scheme if settings.get("own_bias") != "drop" else None
    name = position_embedding_type or method.scheme or own or "relative_key"
    try:
        scheme = find_scheme(name)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    check_scheme(scheme, method)
    if name == own:
        if options and {**known.options, **options} != known.options:
            raise ConversionError(
                f"position_options = {options}: {folder} has this scheme already, with the options {known.options}; "
                "leave them out, or drop its own with method = 'drop' and method_options = {'own_bias': 'drop'}"
            )
        options = known.options
    elif own is not None:
        name, options = [own, name], {own: known.options, name: options}
    fields = dict(known.fields)
    if method.positions is not None:
        fields["max_position_embeddings"] = method.positions(same.max_position_embeddings, settings)
    return _from_dict(  # what is wrong now came from the caller
        RelPosBertConfig,
        "",
        fields,
        position_embedding_type=name,
        position_options=options,
        absolute_position_embeddings=method.keeps_table and scheme.name != "absolute",
    )


def relative_config(
    known: Known,
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
    name = position_embedding_type or known.scheme
    positions = settings["max_position_embeddings"] or same.max_position_embeddings
    config = _from_dict(
        RelPosBertConfig,
        "",
        known.fields,
        position_embedding_type=name,
        position_options=position_options or (known.options if name == known.scheme else {}),
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


def expected_shapes(known: Known, architecture: str, same: RelPosBertConfig) -> dict[str, torch.Size]:
    """Stock name to shape of every tensor that the source must have.

    Args:
        architecture: class of stock BERT.
        same: the configuration of the source, in our words.
    """
    with torch.device("meta"):
        model = ARCHITECTURES[architecture](same)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if not known.family.token_types:
        shapes = {name: shape for name, shape in shapes.items() if not name.endswith(TOKEN_TYPES)}
    return shapes | known.more(base=architecture == "BertModel")


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
    config: RelPosBertConfig, source: Source, method: Method, work: Work
) -> tuple[RelPosBertPreTrainedModel, dict[str, str]]:
    """The result in memory, and the tensors that were changed, with a note on each.

    Args:
        source: under the names of the result.
    """
    model, folded = assemble(config, source)
    changed = method.apply(model, work)
    notes = {name: ", ".join(each[name] for each in (folded, changed) if name in each) for name in folded | changed}
    return model, notes
