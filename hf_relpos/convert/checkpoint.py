"""From a checkpoint to a relpos_bert folder: plan, apply, write, read back, compare, rename."""

import json
from collections.abc import Iterable, Mapping
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, BertConfig, PreTrainedConfig, PreTrainedModel

from ..model.configuration_relpos_bert import RelPosBertConfig
from ..model.modeling_relpos_bert import HEADS, RelPosBertPreTrainedModel
from ..model.schemes import find_scheme
from ..version import __version__
from .families import Relative, check_relative, choose_head, old_model, recognise
from .folder import check_target, copy_companions, describe, new_folder
from .methods import METHODS, Method, Work, check_scheme, check_text, choose_method, resolve_options
from .names import is_buffer, is_scheme, is_table
from .report import ConversionReport, plan
from .source import (
    ConversionError,
    Source,
    check_absolute,
    choose_architecture,
    locate,
    normalise,
    read_config,
    read_tensors,
)
from .verify import compare_outputs, compare_tensors, stock_model


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
    """Write a BERT checkpoint, or a relative one of `families.FAMILIES`, as a relpos_bert folder with its tokenizer.

    The result is written beside `out`, read back and compared, and only then renamed: after an error `out` is as it
    was before.

    Args:
        source: local folder or Hub repository, with safetensors weights.
        out: folder to write; also gets `conversion.json`, the report.
        position_embedding_type: scheme of the result, a key of `hf_relpos.SCHEMES`; None for `relative_key`, for that
            of a source that is relative already, and for `absolute` where the method makes nothing else.
        position_options: its options.
        method: `keep` (absolute positions stay, outputs are the source's), `drop` (their mean stays), `interpolate`
            or `hierarchical` (a longer table of absolute positions, and nothing relative) or, for a source that is
            relative already and for no other, `exact` (weights are renamed, outputs are the source's). None for
            `exact` where it applies and `keep` elsewhere.
        method_options: options of the method: keys of `METHODS[method].options`.
        texts: for a method that learns from text.
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
    folder, commit = locate(source, revision)
    if folder == target or target in folder.parents:
        raise ConversionError(f"out = '{out}' is the source or holds it; choose another folder")

    saved = read_config(folder)
    relative = recognise(folder, saved)
    method = choose_method(method, relative, folder)
    check_text(method, texts)
    settings = resolve_options(method, method_options)
    if relative is None:
        architecture = own = choose_architecture(saved, folder, ARCHITECTURES, architecture)
        left_behind = ""
        position_embedding_type = position_embedding_type or METHODS[method].scheme
        config = make_config(folder, saved, position_embedding_type, position_options, METHODS[method], settings)
        stock_config = _from_dict(BertConfig, f"{folder / 'config.json'}: ", saved)
        with torch.device("meta"):
            expected = shapes(getattr(transformers, architecture)(stock_config))
        raw = read_tensors(folder)
        check_absolute(saved, folder, raw, architecture)
        tensors, origin, extra = normalise(folder, raw, expected, architecture, stock_config.tie_word_embeddings)
        stock = bind(stock_model, stock_config)
    else:
        own, architecture, left_behind = choose_head(relative, folder, architecture)
        config = make_relative_config(folder, relative, position_embedding_type, position_options)
        position_embedding_type = relative.scheme
        stock_config = _from_dict(
            CONFIG_MAPPING[relative.family.stock], f"{folder / 'config.json'}: ", relative.config
        )
        with torch.device("meta"):
            expected = shapes(ARCHITECTURES[architecture](config))
        prefix = "" if architecture == "BertModel" else "bert."
        expected |= {prefix + name: shape for name, shape in relative.more.items()}
        raw = read_tensors(folder)
        check_relative(relative, folder, raw)
        tensors, origin, extra = normalise(
            folder,
            raw,
            expected,
            architecture,
            config.tie_word_embeddings,
            rules=relative.family.naming(base=architecture == "BertModel"),
            unused=lambda name: is_buffer(name) or is_table(name),
        )
        stock = bind(old_model, relative, own, stock_config)
    checkpoint = Source(str(source), folder, commit, saved, architecture, tensors, origin, extra)

    same = config if relative else RelPosBertConfig.from_bert(stock_config)
    work = Work(checkpoint, bind(assemble, same, checkpoint), texts, settings, seed, progress)
    model, changed = build(config, METHODS[method], work)
    steps = plan(model, checkpoint, changed, left_behind)
    try:
        with new_folder(target, overwrite) as partial:
            model.save_pretrained(partial)
            files = copy_companions(folder, partial, model)
            reloaded = type(model).from_pretrained(partial, dtype="auto", local_files_only=True)
            compare_tensors(model, reloaded, checkpoint, steps)
            difference = None
            if METHODS[method].exact:
                difference = compare_outputs(reloaded, checkpoint, stock, rounded=bool(changed))
            report = ConversionReport(
                source=checkpoint.name,
                revision=commit,
                out=str(out),
                architecture=own,
                converted_to=type(model).__name__,
                method=method,
                position_embedding_type=position_embedding_type,
                position_options=find_scheme(position_embedding_type).resolve(config.position_options, config),
                dtype=str(checkpoint.dtype).removeprefix("torch."),
                steps=steps,
                difference=difference,
                files=files,
                details=work.details,
                versions={
                    "hf_relpos": __version__,
                    "transformers": transformers.__version__,
                    "torch": torch.__version__,
                },
            )
            text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
            (partial / "conversion.json").write_text(text + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ConversionError(describe(error, target)) from error
    return report


def shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Name to shape of every tensor."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _from_dict(kind: type[PreTrainedConfig], where: str, saved: Mapping[str, Any], **fields: Any) -> PreTrainedConfig:
    """A configuration with the fields of the source and these; errors begin with `where`."""
    try:
        return kind.from_dict({key: value for key, value in saved.items() if key not in NOT_KEPT} | fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"{where}{error}") from error


def make_config(
    folder: Path,
    saved: Mapping[str, Any],
    position_embedding_type: str,
    position_options: Mapping[str, Any] | None,
    method: Method,
    settings: Mapping[str, Any],
) -> RelPosBertConfig:
    """The source's configuration with the scheme.

    Args:
        settings: options of the method.

    Raises:
        ConversionError: for an unknown scheme or option, a scheme or length that does not fit the method, and values
            that Transformers refuses.
    """
    try:
        scheme = find_scheme(position_embedding_type)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    check_scheme(scheme, method)
    if position_options is not None and not isinstance(position_options, Mapping):
        raise ConversionError(
            f"position_options = {position_options!r} is not a mapping; give option names and values, such as "
            "{'clip': 32}"
        )
    own = _from_dict(RelPosBertConfig, f"{folder / 'config.json'}: ", saved, position_embedding_type="absolute")
    if method.positions is not None:
        saved = {**saved, "max_position_embeddings": method.positions(own.max_position_embeddings, settings)}
    return _from_dict(  # what is wrong now came from the caller
        RelPosBertConfig,
        "",
        saved,
        position_embedding_type=position_embedding_type,
        position_options=dict(position_options or {}),
        absolute_position_embeddings=method.keeps_table and scheme.name != "absolute",
    )


def make_relative_config(
    folder: Path,
    relative: Relative,
    position_embedding_type: str | None,
    position_options: Mapping[str, Any] | None,
) -> RelPosBertConfig:
    """The configuration of a source that is relative already, in our words.

    Raises:
        ConversionError: for another scheme or other options than the source's, and for values that Transformers or
            the scheme refuses.
    """
    if position_embedding_type not in (None, relative.scheme):
        raise ConversionError(
            f"position_embedding_type = {position_embedding_type!r}: {folder} is relative already "
            f"({relative.evidence}), and its weights fit the scheme {relative.scheme!r} alone; leave it out"
        )
    if position_options and position_options != relative.options:
        raise ConversionError(
            f"position_options = {position_options!r}: {folder} is relative already ({relative.evidence}), with the "
            f"options {relative.options}; leave them out, and set others when you load the result"
        )
    return _from_dict(
        RelPosBertConfig,
        f"{folder / 'config.json'}: ",
        relative.fields,
        position_embedding_type=relative.scheme,
        position_options=relative.options,
        absolute_position_embeddings=False,
    )


@torch.no_grad()
def assemble(config: RelPosBertConfig, source: Source) -> RelPosBertPreTrainedModel:
    """A model with all the source's tensors that it has a place for, and zero for the scheme's other parameters.

    A table of another length is left to the method. It is in the dtype of the source and in eval mode.
    """
    with torch.random.fork_rng(devices=[]):
        # a pooler that the source lacks comes out the same each time; torch.manual_seed would reach other devices too
        torch.default_generator.manual_seed(0)
        model = ARCHITECTURES[source.architecture](config).to(source.dtype).eval()
    for name, parameter in model.named_parameters():
        if is_scheme(name):
            parameter.zero_()
    for name, tensor in model.state_dict().items():
        if name in source.tensors and source.tensors[name].shape == tensor.shape:
            tensor.copy_(source.tensors[name])
    return model


@torch.no_grad()
def build(config: RelPosBertConfig, method: Method, work: Work) -> tuple[RelPosBertPreTrainedModel, dict[str, str]]:
    """The result in memory, and the tensors that the method changed, with a note on each."""
    model = assemble(config, work.source)
    return model, method.apply(model, work)
