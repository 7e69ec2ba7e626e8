"""From a checkpoint to a relpos_bert folder: plan, apply, write, read back, compare, rename.

A method says what becomes of the positions. `METHODS` lists them; a new one is one function and one entry.
"""

import errno
import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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
from ..model.scheme import Scheme
from ..model.schemes import SCHEMES, find_scheme
from ..version import __version__
from .families import TASK_TYPES, Relative, check_relative, choose_head, old_model, recognise
from .names import inverse, is_buffer, is_scheme, is_table
from .source import (
    TOKENIZER_FILES,
    ConversionError,
    Source,
    check_absolute,
    choose_architecture,
    locate,
    normalise,
    read_config,
    read_tensors,
)


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

KINDS = ("reused", "folded", "dropped", "created")

# Outputs are compared in float64, where a difference is an error and not rounding.
TOLERANCE = 1e-6
# Except that a sum of tensors is rounded to the weights' dtype: this many times its precision.
ROUNDING = 32


@dataclass(frozen=True)
class Step:
    """What becomes of one tensor.

    Attributes:
        kind: `reused` (bit for bit), `folded` (its values went into another tensor, or received another's),
            `dropped`, or `created`.
        source: its name in the source's files; None if created.
        target: its name in the result; None if it has none of its own.
        shape: its shape.
        parameters: how many numbers; 0 for a second name of a tensor that is already counted.
        note: in words, where there is something to say.
    """

    kind: str
    source: str | None
    target: str | None
    shape: tuple[int, ...]
    parameters: int
    note: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source: folder or Hub repository.
        revision: commit of the Hub repository.
        out: the folder written.
        architecture: class of the source.
        converted_to: class of the result.
        method: key of `METHODS`.
        position_embedding_type: scheme.
        position_options: its options, with defaults.
        dtype: of the weights.
        steps: one per tensor.
        difference: largest difference of the outputs on a random batch, relative to the largest output, in float64;
            None for a method that changes them.
        files: copied from the source as they are.
        versions: of hf_relpos, transformers and torch.
    """

    source: str
    revision: str | None
    out: str
    architecture: str
    converted_to: str
    method: str
    position_embedding_type: str
    position_options: dict[str, Any]
    dtype: str
    steps: tuple[Step, ...]
    difference: float | None
    files: tuple[str, ...]
    versions: dict[str, str]

    def of_kind(self, kind: str) -> tuple[Step, ...]:
        """The steps of one kind."""
        return tuple(step for step in self.steps if step.kind == kind)

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """Kind to number of tensors and of parameters."""
        kinds = {kind: self.of_kind(kind) for kind in KINDS}
        return {
            kind: {"tensors": len(steps), "parameters": sum(step.parameters for step in steps)}
            for kind, steps in kinds.items()
        }

    def summary(self) -> str:
        """One line: what became of how many tensors, and the difference, if it was measured."""
        parts = [
            f"{total['tensors']:,} tensors {kind} ({total['parameters']:,} parameters)"
            for kind, total in self.totals.items()
            if total["tensors"]
        ]
        if self.difference is not None:
            parts.append(f"largest relative difference of an output {self.difference:.1e}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in conversion.json."""
        content = asdict(self)
        content["steps"] = [{**asdict(step), "shape": list(step.shape)} for step in self.steps]
        content["files"] = list(self.files)
        return {**content, "totals": self.totals}


@dataclass(frozen=True)
class Method:
    """One way to treat the positions.

    Attributes:
        help: one line, for the command line.
        keeps_table: the result has a table of absolute positions, the source's.
        exact: the result computes what the source computes, which is checked.
        from_relative: for sources that are relative already, and not for those with absolute positions.
        apply: changes the result in place, given a model that holds all the source's tensors it has a place for, and
            zero for the scheme's parameters; returns the names it changed, and how, in words.
    """

    help: str
    keeps_table: bool
    exact: bool
    apply: Callable[[PreTrainedModel, Source], dict[str, str]]
    from_relative: bool = False


def _keep(model: PreTrainedModel, source: Source) -> dict[str, str]:
    return {}


def _drop(model: PreTrainedModel, source: Source) -> dict[str, str]:
    """The mean position vector takes the place of all."""
    table = next(tensor for name, tensor in source.tensors.items() if is_table(name))
    return {_add_to_types(model, table.double().mean(0)): "plus the mean of the position vectors"}


def _rename(model: PreTrainedModel, source: Source) -> dict[str, str]:
    """ERNIE's task types are the only tensor that needs more: task 0 is what every token gets when none is given."""
    tasks = [tensor for name, tensor in source.tensors.items() if name.endswith(TASK_TYPES)]
    return {_add_to_types(model, tasks[0][0]): "plus the vector of task type 0"} if tasks else {}


def _add_to_types(model: PreTrainedModel, vector: torch.Tensor) -> str:
    """Add to every token type, of which each token has one and no output layer is tied to them; the table's name."""
    types = model.base_model.embeddings.token_type_embeddings.weight
    types.copy_(types.double() + vector.double())
    return next(name for name, parameter in model.named_parameters() if parameter is types)


METHODS = {
    "keep": Method(
        "keep absolute positions; relative terms start at zero. The same outputs, to be trained further",
        keeps_table=True,
        exact=True,
        apply=_keep,
    ),
    "drop": Method(
        "replace absolute positions by their mean vector; relative terms start at zero. Needs training",
        keeps_table=False,
        exact=False,
        apply=_drop,
    ),
    "exact": Method(
        "for a checkpoint that is relative already (NEZHA; BERT, RoBERTa, ELECTRA, ERNIE with relative_key): rename "
        "its weights. The same outputs",
        keeps_table=False,
        exact=True,
        apply=_rename,
        from_relative=True,
    ),
}


def convert(
    source: str | Path,
    out: str | Path,
    *,
    position_embedding_type: str | None = None,
    position_options: Mapping[str, Any] | None = None,
    method: str | None = None,
    architecture: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
) -> ConversionReport:
    """Write a BERT checkpoint, or a relative one of `families.FAMILIES`, as a relpos_bert folder with its tokenizer.

    The result is written beside `out`, read back and compared, and only then renamed: after an error `out` is as it
    was before.

    Args:
        source: local folder or Hub repository, with safetensors weights.
        out: folder to write; also gets `conversion.json`, the report.
        position_embedding_type: scheme of the result, a key of `hf_relpos.SCHEMES`; None for `relative_key`, and for
            that of a source that is relative already.
        position_options: its options.
        method: `keep` (absolute positions stay, outputs are the source's), `drop` (their mean stays) or, for a source
            that is relative already and for no other, `exact` (weights are renamed, outputs are the source's). None
            for `exact` where it applies and `keep` elsewhere.
        architecture: class whose head to keep; by default the one that config.json names.
        revision: branch, tag or commit of a Hub repository.
        overwrite: replace an existing `out`, after success.

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
    if relative is None:
        architecture = own = choose_architecture(saved, folder, ARCHITECTURES, architecture)
        left_behind = ""
        position_embedding_type = position_embedding_type or "relative_key"
        config = make_config(folder, saved, position_embedding_type, position_options, METHODS[method])
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

    model, changed = build(config, checkpoint, METHODS[method])
    steps = plan(model, checkpoint, changed, left_behind)
    try:
        with new_folder(target, overwrite) as partial:
            model.save_pretrained(partial)
            files = copy_companions(folder, partial, model)
            reloaded = type(model).from_pretrained(partial, dtype="auto", local_files_only=True)
            compare_tensors(model, reloaded, checkpoint, steps)
            difference = None
            if METHODS[method].exact:
                tolerance = TOLERANCE
                if changed:
                    tolerance = max(tolerance, ROUNDING * torch.finfo(checkpoint.dtype).eps)
                difference = compare_outputs(reloaded, checkpoint, stock, tolerance)
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
                versions={
                    "hf_relpos": __version__,
                    "transformers": transformers.__version__,
                    "torch": torch.__version__,
                },
            )
            text = json.dumps(report.to_dict(), indent=2, ensure_ascii=False)
            (partial / "conversion.json").write_text(text + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise ConversionError(_describe(error, target)) from error
    return report


def choose_method(asked: str | None, relative: Relative | None, folder: Path) -> str:
    """The method asked for, or the one that keeps the outputs.

    Raises:
        ConversionError: for one that does not fit the positions of the source.
    """
    if asked is None:
        return "keep" if relative is None else "exact"
    if METHODS[asked].from_relative and relative is None:
        raise ConversionError(
            f"method = {asked!r}: {folder} has absolute positions, not relative ones to take over; choose keep or drop"
        )
    if relative is not None and not METHODS[asked].from_relative:
        raise ConversionError(
            f"method = {asked!r}: {folder} is relative already ({relative.evidence}) and has no absolute positions to "
            f"{asked}; leave the method out, or choose exact"
        )
    return asked


def shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Name to shape of every tensor."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def check_target(out: str | Path, overwrite: bool) -> Path:
    """The folder to write, with links resolved.

    Raises:
        ConversionError: for one that exists, unless it is a checkpoint and may be overwritten.
    """
    target = Path(out).expanduser().resolve()
    if target.exists():
        if not target.is_dir():
            raise ConversionError(f"out = '{out}' is a file; choose a folder")
        if not overwrite:
            raise ConversionError(
                f"out = '{out}' exists; choose another folder, or replace it with overwrite=True (--overwrite)"
            )
        if not (target / "config.json").is_file() and any(target.iterdir()):
            raise ConversionError(
                f"out = '{out}' holds no config.json: only a checkpoint is overwritten, never another folder; choose "
                "another one"
            )
    return target


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
) -> RelPosBertConfig:
    """The source's configuration with the scheme.

    Raises:
        ConversionError: for an unknown scheme or option, a scheme that does not fit the method, and values that
            Transformers refuses.
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
    _from_dict(RelPosBertConfig, f"{folder / 'config.json'}: ", saved, position_embedding_type="absolute")
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


def check_scheme(scheme: type[Scheme], method: Method) -> None:
    """Refuse a scheme that has no neutral start, and one that needs the table where the method removes it.

    Raises:
        ConversionError: names the schemes that fit.
    """
    fitting = [
        name
        for name, each in SCHEMES.items()
        if each.zero_is_neutral and not each.requires and (method.keeps_table or name != "absolute")
    ]
    if scheme.name in fitting:
        return
    if scheme.requires:
        reason = f"this scheme needs inputs that the source does not have ({', '.join(scheme.requires)})"
    elif scheme.zero_is_neutral:
        reason = "this scheme has absolute positions at the input, which the method removes"
    else:
        reason = "this scheme cannot start without an effect, so the outputs would change at random"
    raise ConversionError(
        f"position_embedding_type = {scheme.name!r}: {reason}; this method can start from: {', '.join(fitting)}"
    )


@torch.no_grad()
def build(
    config: RelPosBertConfig, source: Source, method: Method
) -> tuple[RelPosBertPreTrainedModel, dict[str, str]]:
    """The result in memory, and the tensors that the method changed, with a note on each."""
    with torch.random.fork_rng(devices=[]):
        # a pooler that the source lacks comes out the same each time; torch.manual_seed would reach other devices too
        torch.default_generator.manual_seed(0)
        model = ARCHITECTURES[source.architecture](config).to(source.dtype).eval()
    for name, parameter in model.named_parameters():
        if is_scheme(name):
            parameter.zero_()
    for name, tensor in model.state_dict().items():
        if name in source.tensors:
            tensor.copy_(source.tensors[name])
    return model, method.apply(model, source)


def plan(
    model: PreTrainedModel, source: Source, changed: Mapping[str, str], left_behind: str = ""
) -> tuple[Step, ...]:
    """What becomes of every tensor of the source and where every tensor of the result comes from.

    Args:
        changed: tensors of the result that the method changed, and how.
        left_behind: what the tensors are that have no place in the result; empty for what is not known.
    """
    weights = model.state_dict()
    steps = []
    first_names: dict[int, str] = {}
    for name, tensor in weights.items():
        first = first_names.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        origin = source.origin.get(name) if name in source.tensors else None
        if first in changed:
            kind, note = ("folded" if origin else "created"), changed[first]
        elif origin:
            kind, note = "reused", ""
        elif is_scheme(name):
            kind, note = "created", "zero"
        else:
            kind, note = "created", "random, as in stock BERT: the source lacks it"
        if first != name:
            note = f"the same tensor as {first}"
        steps.append(Step(kind, origin, name, tuple(tensor.shape), tensor.numel() if first == name else 0, note))
    for name, tensor in source.tensors.items():
        if name not in weights:  # the table of absolute positions
            kind, note = ("folded", f"into {', '.join(changed)}") if changed else ("dropped", "")
            steps.append(Step(kind, source.origin[name], None, tuple(tensor.shape), tensor.numel(), note))
    for name, tensor in source.extra.items():
        note = left_behind or f"not a part of {source.architecture}"
        if is_buffer(name):
            note = "a buffer of an older release"
        elif is_table(name):
            note = "unused beside relative positions"
        steps.append(Step("dropped", source.origin[name], None, tuple(tensor.shape), tensor.numel(), note))
    return tuple(steps)


def copy_companions(folder: Path, partial: Path, model: PreTrainedModel) -> tuple[str, ...]:
    """Copy the files of the tokenizer, and those of generation, byte for byte; their names."""
    wanted = (*TOKENIZER_FILES, *(["generation_config.json"] if model.can_generate() else []))
    files = sorted({path for pattern in wanted for path in folder.glob(pattern) if path.is_file()})
    for path in files:
        shutil.copyfile(path, partial / path.name)
    return tuple(path.name for path in files)


def compare_tensors(
    model: PreTrainedModel, reloaded: PreTrainedModel, source: Source, steps: tuple[Step, ...]
) -> None:
    """Every tensor read back is the one written, and every reused one is the source's, under its stock name.

    Raises:
        ConversionError: names the first one that is not.
    """
    written, read = model.state_dict(), reloaded.state_dict()
    restored = {**read, **inverse(read)}
    reused = {step.target for step in steps if step.kind == "reused"}
    for name in written.keys() | read.keys():
        right = name in written and name in read and same(written[name], read[name])
        if not right or (name in reused and not same(restored[name], source.tensors[name])):
            raise ConversionError(
                f"{name} came back from the disk different from what was written, so the result was removed; check "
                "the disk, and report this if it happens again"
            )


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same type, shape and values."""
    return one.dtype == other.dtype and torch.equal(one, other)


@torch.no_grad()
def compare_outputs(
    model: PreTrainedModel,
    source: Source,
    stock: Callable[[PreTrainedModel, Source], PreTrainedModel],
    tolerance: float,
) -> float:
    """Run the source and the result on one random batch, both in float64.

    Args:
        model: the result; comes back in float64.
        stock: makes the source's model, in float64 and eval mode, from the result and the source's tensors.
        tolerance: largest difference that is accepted.

    Returns:
        Largest difference of an output, relative to the largest value of that output.

    Raises:
        ConversionError: for one above `tolerance`.
    """
    config = model.config
    length = min(16, config.max_position_embeddings)
    # the last row is padded
    shape = (1, 2, length) if source.architecture == "BertForMultipleChoice" else (2, length)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        original = stock(model, source)
        batch = {
            "input_ids": torch.randint(config.vocab_size, shape),
            "token_type_ids": torch.randint(config.type_vocab_size, shape),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            # whatever the configuration asks for
            "return_dict": True,
            "output_attentions": False,
            "output_hidden_states": False,
        }
        batch["attention_mask"][..., -1, length // 2 + 1 :] = 0
        if config.is_decoder:
            batch["use_cache"] = False
            if config.add_cross_attention:
                batch["encoder_hidden_states"] = torch.randn(2, 5, config.hidden_size, dtype=torch.float64)
    wanted = original(**batch)
    del original  # so that only one model in float64 is held at a time
    found = model.double().eval()(**batch)
    worst = max(
        float((one - found[name]).abs().max() / one.abs().max().clamp_min(1e-30)) for name, one in wanted.items()
    )
    if not worst <= tolerance:
        raise ConversionError(
            f"the result's outputs differ from the source's by {worst:.1e}, relative, although the method keeps them, "
            "so it was removed; please report this"
        )
    return worst


def stock_model(config: BertConfig, model: PreTrainedModel, source: Source) -> PreTrainedModel:
    """Stock BERT with the source's tensors, and the result's where the source has none; in float64, eval mode."""
    stock = getattr(transformers, source.architecture)(config).double().eval()
    stock.load_state_dict({**inverse(model.state_dict()), **source.tensors})
    return stock


@contextmanager
def new_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder that becomes `target` when the block ends, and vanishes when it does not end well.

    It lies beside `target`, on the same file system, so that the change is one renaming. An existing `target` is moved
    aside first, and removed at the very end.

    Raises:
        FileExistsError: when `target` came into being meanwhile and may not be overwritten.
    """
    mark = uuid.uuid4().hex[:8]
    partial = target.with_name(f".{target.name}.{mark}.partial")
    aside = target.with_name(f".{target.name}.{mark}.old")
    missing = [parent for parent in target.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        try:
            if target.exists():
                if not overwrite:
                    raise FileExistsError(errno.EEXIST, "it appeared during the conversion", str(target))
                target.rename(aside)
            partial.rename(target)
        finally:
            if aside.exists() and not target.exists():
                aside.rename(target)
            shutil.rmtree(aside, ignore_errors=True)
    except BaseException:  # KeyboardInterrupt too
        shutil.rmtree(partial, ignore_errors=True)
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()
        raise
    if aside.exists():
        warnings.warn(f"the replaced folder could not be removed and lies in {aside}", stacklevel=2)


def _describe(error: Exception, target: Path) -> str:
    """An error of the file system, in words."""
    text = " ".join(str(error).split())
    # safetensors reports the system's errors in words only
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in text
    remedy = "free some space or choose another disk" if full else "check that the place can be written"
    return f"{target}: could not be written ({text}); nothing was left behind. To go on, {remedy}"
