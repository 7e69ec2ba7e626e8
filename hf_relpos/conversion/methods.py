"""What becomes of the positions. `METHODS` lists the ways; a new one is one function and one entry."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from ..model.configuration_relpos_bert import RelPosBertConfig
from ..model.modeling_relpos_bert import RelPosBertPreTrainedModel
from ..model.scheme import Option, Scheme, choice, is_count
from ..model.schemes import GENERAL_SCHEME, SCHEMES, STOCK_SCHEME, scheme_parts
from .export import refit_tables
from .families import SourceSpec
from .learned import CALIBRATE, DISTIL, calibrate, calibrate_and_distil, can_be_fitted
from .names import is_scheme, is_table
from .report import lost_in_words
from .source import ConversionError, Source
from .stretch import ALPHA, decompose, interpolate
from .verify import ROUNDING


@dataclass(frozen=True)
class ConversionContext:
    """What a method may need beside the model that it changes.

    Attributes:
        source: the checkpoint.
        config: its configuration in our words, positions and all: that of the teacher.
        keep: makes a model of ours, in the dtype of the source and in eval mode, that computes exactly what the source
            computes: the teacher.
        texts: what the caller gave to learn from; None for nothing.
        options: of the method, with its defaults.
        seed: of whatever is drawn at random.
        state: folder for what an interrupted method needs to go on; None for none.
        progress: whether to show how far long work has come.
        details: filled by the method with what the report should say of it; JSON values only.
    """

    source: Source
    config: RelPosBertConfig
    keep: Callable[[], RelPosBertPreTrainedModel]
    texts: Iterable[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    state: Path | None = None
    progress: bool = False
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer of the source lies."""
        return self.source.folder


@dataclass(frozen=True)
class Method:
    """One way to treat the positions.

    Attributes:
        help: one line, for the command line.
        keeps_table: the result has a table of absolute positions, the source's.
        exact: the result computes what the source computes, which is checked.
        apply: changes the result in place, given a model that holds all the source's tensors it has a place for, and
            zero for the scheme's parameters; returns the names it changed, and how, in words.
        targets: why a scheme cannot be the result's, in words; empty for one that can.
        from_relative: for sources that are relative already, and not for those with absolute positions.
        text: whether it learns from text: never, if there is any, or always.
        options: its own options.
        scheme: that it adds to a source unless the caller names another of `targets`; None for relative_key.
        positions: the result's `max_position_embeddings`, from the source's and the resolved options; None where it
            stays.
    """

    help: str
    keeps_table: bool
    exact: bool
    apply: Callable[[PreTrainedModel, ConversionContext], dict[str, str]]
    targets: Callable[[type[Scheme]], str]
    from_relative: bool = False
    text: Literal["unused", "optional", "needed"] = "unused"
    options: Mapping[str, Option] = field(default_factory=dict)
    scheme: str | None = None
    positions: Callable[[int, Mapping[str, Any]], int] | None = None


def starts_neutral(scheme: type[Scheme]) -> str:
    """Refuses a scheme whose parameters at zero have an effect, and one that needs more than text."""
    if scheme.required_inputs:
        return f"this scheme needs inputs that the source does not have ({', '.join(scheme.required_inputs)})"
    if not scheme.zero_is_neutral:
        return "this scheme cannot start without an effect, so the outputs would change at random"
    return ""


def starts_neutral_without_table(scheme: type[Scheme]) -> str:
    """Also refuses a scheme that is a table of absolute positions."""
    if scheme.learned_input_table:
        return "this scheme has absolute positions at the input, which the method removes"
    return starts_neutral(scheme)


def absolute_alone(scheme: type[Scheme]) -> str:
    """Refuses all but a table of absolute positions."""
    return "" if scheme.learned_input_table else "the result of this method has absolute positions and no others"


def has_tables(scheme: type[Scheme]) -> str:
    """Refuses a scheme that is not made of tables of distances."""
    return "" if scheme.has_tables() else "this scheme has no tables to fit"


def _keep(model: PreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Nothing is left to do."""
    return {}


def _drop(model: PreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """The mean position vector takes the place of all."""
    return {add_to_types(model, _source_table(context).double().mean(0)): "plus the mean of the position vectors"}


def _exact(model: PreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """Tables that hold all of the source's, or its own."""
    changed = _refit(model, context)
    held = (ROUNDING * torch.finfo(model.dtype).eps) ** 2
    lost = {letter: share for letter, share in context.details.get("lost", {}).items() if share > held}
    if lost:
        raise ConversionError(
            f"position_embedding_type = {model.config.position_embedding_type!r}, position_options = "
            f"{model.config.position_options}: this would lose {lost_in_words(lost)} of the source's tables, and "
            "method = 'exact' loses nothing; choose a scheme or options that hold them, or method = 'refit' for the "
            "closest"
        )
    return changed


def _refit(model: PreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """The closest tables; nothing for a model that has the source's own."""
    if same_positions(context.config, model.config):
        return {}
    context.details["lost"] = refit_tables(context.keep(), model)
    return {name: "fitted to the source's tables" for name, _ in model.named_parameters() if is_scheme(name)}


def same_positions(one: RelPosBertConfig, other: RelPosBertConfig) -> bool:
    """Whether two configurations have the same scheme, down to the shapes of its tables."""
    kinds = [each.position_embedding_type for each in (one, other)]
    sizes = [each.max_position_embeddings for each in (one, other)]
    options = [[settings for _, settings in scheme_parts(each)] for each in (one, other)]
    return all(pair[0] == pair[1] for pair in (kinds, sizes, options))


def add_to_types(model: PreTrainedModel, vector: torch.Tensor) -> str:
    """Add to what every token gets; the name of the table that holds it then."""
    embeddings = model.base_model.embeddings
    embeddings.add_everywhere(vector.double())
    types = embeddings.token_type_embeddings.weight
    return next(name for name, parameter in model.named_parameters() if parameter is types)


def longer(positions: int, options: Mapping[str, Any]) -> int:
    """Rows of a stretched table.

    Args:
        positions: those of the source.
        options: `length`, and `cls` where the method has it.

    Raises:
        ConversionError: for a table too small to stretch, and a length that is not longer or not to be had.
    """
    if positions < 2:
        raise ConversionError(f"max_position_embeddings = {positions}: a table of one row cannot be stretched")
    kept = int(options.get("cls", False))
    limit = kept + (positions - kept) ** 2 if "cls" in options else None
    if options["length"] is None:
        return 4 * positions if limit is None else min(4 * positions, limit)
    length = options["length"]
    if length <= positions:
        raise ConversionError(
            f"method_options['length'] = {length}: the source reads {positions} tokens already; give more, or choose "
            "another method"
        )
    if limit is not None and length > limit:
        raise ConversionError(
            f"method_options['length'] = {length}: the decomposition of {positions} positions ends at {limit:,}; give "
            "fewer, or method='interpolate'"
        )
    return length


def _replace_table(model: PreTrainedModel, rows: torch.Tensor, note: str) -> dict[str, str]:
    table = model.base_model.embeddings.position_embeddings.weight
    table.copy_(rows)
    return {next(name for name, parameter in model.named_parameters() if parameter is table): note}


def _source_table(context: ConversionContext) -> torch.Tensor:
    return next(tensor for name, tensor in context.source.tensors.items() if is_table(name))


def _interpolate(model: PreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """The rows of the table drawn apart, and new ones between them."""
    table, length = _source_table(context), model.config.max_position_embeddings
    context.details["positions"] = {"source": len(table), "result": length, "kept": 1}
    note = f"rows 1 to {len(table) - 1} of {len(table)} stretched over 1 to {length - 1}, linear in between"
    return _replace_table(model, interpolate(table, length), note)


def _decompose(model: PreTrainedModel, context: ConversionContext) -> dict[str, str]:
    """The rows of the table, and sums of two of them for the places beyond."""
    table, length, cls = _source_table(context), model.config.max_position_embeddings, context.options["cls"]
    count = len(table)
    context.details["positions"] = {"source": count, "result": length, "kept": count, "alpha": ALPHA, "cls": cls}
    note = f"{count} rows, and {length - count} sums of two, by block ({ALPHA}) and place in it"
    return _replace_table(model, decompose(table, length, cls), note)


LENGTH = Option(
    default=None,
    help="tokens that the result reads; an integer above the source's max_position_embeddings, or None for 4 times it",
    accepts=lambda value: value is None or is_count(value),
)
OWN_BIAS = choice("keep", "drop", help="what becomes of the source's own relative bias, which MPNet has")
POSITIONS = Option(
    None,
    "max_position_embeddings of the result, which is the size of the tables of relative_key; a positive integer, or "
    "None for the source's",
    lambda value: value is None or is_count(value),
)

METHODS = {
    "keep": Method(
        "keep absolute positions; relative terms start at zero. The same outputs, to be trained further",
        keeps_table=True,
        exact=True,
        apply=_keep,
        targets=starts_neutral,
    ),
    "drop": Method(
        "replace absolute positions by their mean vector; relative terms start at zero. Needs training",
        keeps_table=False,
        exact=False,
        apply=_drop,
        targets=starts_neutral_without_table,
        options={"own_bias": OWN_BIAS},
    ),
    "calibrate": Method(
        "fit relative terms to the source's own attention on text, in closed form. Close to the source's outputs",
        keeps_table=False,
        exact=False,
        apply=calibrate,
        targets=can_be_fitted,
        scheme=GENERAL_SCHEME,
        text="optional",
        options={**CALIBRATE, "own_bias": OWN_BIAS},
    ),
    "calibrate+distil": Method(
        "calibrate, then train the result for some steps to compute what the source computes. Closer",
        keeps_table=False,
        exact=False,
        apply=calibrate_and_distil,
        targets=can_be_fitted,
        scheme=GENERAL_SCHEME,
        text="needed",
        options={**CALIBRATE, **DISTIL, "own_bias": OWN_BIAS},
    ),
    "interpolate": Method(
        "absolute positions for longer inputs: the table stretched linearly. A baseline; changes all outputs",
        keeps_table=True,
        exact=False,
        apply=_interpolate,
        targets=absolute_alone,
        scheme=STOCK_SCHEME,
        positions=longer,
        options={"length": LENGTH},
    ),
    "hierarchical": Method(
        "absolute positions for longer inputs: the table, then sums of two of its rows (Su). A baseline; the same "
        "outputs up to the source's length",
        keeps_table=True,
        exact=True,
        apply=_decompose,
        targets=absolute_alone,
        scheme=STOCK_SCHEME,
        positions=longer,
        options={
            "length": LENGTH,
            "cls": choice(True, False, help="keep row 0 out of the sums, for [CLS] is no place like others"),
        },
    ),
    "exact": Method(
        "for a checkpoint that is relative already (NEZHA; BERT, RoBERTa, ELECTRA, ERNIE with relative_key): rename "
        "its weights, or put its tables into a scheme that holds them. The same outputs",
        keeps_table=False,
        exact=True,
        apply=_exact,
        targets=has_tables,
        from_relative=True,
        options={"max_position_embeddings": POSITIONS},
    ),
    "refit": Method(
        "for a checkpoint that is relative already: the closest tables of another scheme; says what is lost",
        keeps_table=False,
        exact=False,
        apply=_refit,
        targets=has_tables,
        from_relative=True,
        options={"max_position_embeddings": POSITIONS},
    ),
}


def choose_method(asked: str | None, spec: SourceSpec, folder: Path) -> str:
    """The method asked for, or the one that keeps the outputs.

    Raises:
        ConversionError: for one that does not fit the positions of the source.
    """
    if asked is None:
        return "keep" if spec.absolute else "exact"
    fitting = [name for name, method in METHODS.items() if method.from_relative != spec.absolute]
    if asked in fitting:
        return asked
    if spec.absolute:
        raise ConversionError(
            f"method = {asked!r}: {folder} has absolute positions, not relative ones to take over; choose "
            f"{' or '.join(fitting)}"
        )
    raise ConversionError(
        f"method = {asked!r}: {folder} is relative already ({spec.evidence}) and has no absolute positions to "
        f"{asked}; leave the method out, or choose {' or '.join(fitting)}"
    )


def check_scheme(scheme: type[Scheme], method: Method) -> None:
    """Refuse a scheme that the method cannot aim at.

    Raises:
        ConversionError: names the schemes that fit.
    """
    reason = method.targets(scheme)
    if reason:
        fitting = [name for name, each in SCHEMES.items() if not method.targets(each)]
        raise ConversionError(
            f"position_embedding_type = {scheme.name!r}: {reason}; this method can start from: {', '.join(fitting)}"
        )


def check_text(name: str, texts: Iterable[str] | None) -> None:
    """Refuse a method that needs text without any, and text that would not be read.

    Args:
        name: key of `METHODS`.

    Raises:
        ConversionError: says what to give or to leave out.
    """
    use = METHODS[name].text
    if use == "needed" and texts is None:
        raise ConversionError(f"texts = None: method = {name!r} learns from text; give texts, some hundred sentences")
    if use == "unused" and texts is not None:
        readers = [repr(other) for other, method in METHODS.items() if method.text != "unused"]
        instead = f", or choose a method that does: {', '.join(readers)}" if readers else ""
        raise ConversionError(f"texts were given, but method = {name!r} reads none; leave them out{instead}")


def text_names(texts: str | Path | Iterable[str | Path] | None) -> list[str] | None:
    """What a report calls the texts that `convert` was given.

    Returns:
        Names of files, without their folders, and of Hub datasets; [] for documents, None for no texts.
    """
    if texts is None:
        return None
    if isinstance(texts, str | Path):
        texts = [Path(texts)]
    if not isinstance(texts, Sequence) or not all(isinstance(each, Path) for each in texts):
        return []
    return [path.name if path.expanduser().exists() else str(path) for path in texts]


def check_plots(name: str) -> None:
    """Refuse pictures of what is not measured.

    Args:
        name: key of `METHODS`.

    Raises:
        ConversionError: says what to do instead.
    """
    if METHODS[name].text == "unused":
        raise ConversionError(
            f"plots = True: method = {name!r} measures nothing that could be drawn; leave it out, and draw the result "
            "with `hf-relpos plot --all` or `hf-relpos compare --plot`"
        )


def resolve_options(name: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of a method, completed with its defaults.

    Args:
        name: key of `METHODS`.

    Raises:
        ConversionError: for an unknown option or a value that is not accepted; names field, value and remedy.
    """
    spec = METHODS[name].options
    if given is not None and not isinstance(given, Mapping):
        raise ConversionError(f"method_options = {given!r} is not a mapping; give option names and values")
    for key, value in (given or {}).items():
        if key not in spec:
            listed = f"known: {', '.join(spec)}" if spec else "it has none, leave it out"
            raise ConversionError(
                f"method_options[{key!r}] = {value!r}: method = {name!r} has no such option; {listed}"
            )
        if not spec[key].accepts(value):
            raise ConversionError(
                f"method_options[{key!r}] = {value!r} is not accepted by method = {name!r}; {key}: {spec[key].help}"
            )
    return {key: (given or {}).get(key, option.default) for key, option in spec.items()}
