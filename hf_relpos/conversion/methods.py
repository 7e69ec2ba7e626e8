"""The methods of conversion, and checks of what the caller chose. A new one is a function and one entry."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.text import TextError, pair_fields, paths_or_documents
from ..families.errors import ConversionError
from ..families.recognition import SourceSpec
from ..processes import compute_device
from ..schemes.registry import GENERAL_SCHEME, SCHEMES, STOCK_SCHEME
from ..schemes.scheme import Option, Scheme, choice, is_count, nearest
from . import absolute, relative
from .calibrated import CALIBRATE, DISTIL, calibrate, calibrate_and_distil
from .context import Method


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


def can_be_fitted(scheme: type[Scheme]) -> str:
    """Refuses a scheme none of whose terms is linear in parameters of a layer; names those that can be fitted."""
    if scheme.linear_parameters:
        return ""
    supported = ", ".join(name for name, candidate in SCHEMES.items() if candidate.linear_parameters)
    return f"nothing of this scheme can be fitted in closed form; the schemes that can: {supported}"


LENGTH = Option(
    default=None,
    help="tokens that the result reads; an integer above the source's max_position_embeddings, or None for 4 times it",
    accepts=lambda value: value is None or is_count(value),
)
OWN_BIAS = choice("keep", "drop", help="what to do with the source's own relative bias, which MPNet has")
POSITIONS = Option(
    None,
    "max_position_embeddings of the result, which is the size of the tables of relative_key; a positive integer, or "
    "None for the source's",
    lambda value: value is None or is_count(value),
)

METHODS: dict[str, Method] = {
    "keep": Method(
        "keep absolute positions; relative terms start at zero. The same outputs, to be trained further",
        keeps_table=True,
        exact=True,
        apply=absolute.keep,
        unsupported_reason=starts_neutral,
    ),
    "drop": Method(
        "replace absolute positions by their mean vector; relative terms start at zero. Needs training",
        keeps_table=False,
        exact=False,
        apply=absolute.drop,
        unsupported_reason=starts_neutral_without_table,
        options={"own_bias": OWN_BIAS},
    ),
    "calibrate": Method(
        "fit relative terms to the source's own attention on text, in closed form. Close to the source's outputs",
        keeps_table=False,
        exact=False,
        apply=calibrate,
        unsupported_reason=can_be_fitted,
        default_scheme=GENERAL_SCHEME,
        from_relative=True,
        text="optional",
        options={**CALIBRATE, "own_bias": OWN_BIAS},
    ),
    "calibrate+distil": Method(
        "calibrate, then train the result for some steps to compute what the source computes. Closer",
        keeps_table=False,
        exact=False,
        apply=calibrate_and_distil,
        unsupported_reason=can_be_fitted,
        default_scheme=GENERAL_SCHEME,
        from_relative=True,
        text="required",
        options={**CALIBRATE, **DISTIL, "own_bias": OWN_BIAS},
    ),
    "interpolate": Method(
        "absolute positions for longer inputs: the table stretched linearly. A baseline; changes all outputs",
        keeps_table=True,
        exact=False,
        apply=absolute.interpolate_table,
        unsupported_reason=absolute_alone,
        default_scheme=STOCK_SCHEME,
        max_positions=absolute.stretched_positions,
        options={"length": LENGTH},
    ),
    "hierarchical": Method(
        "absolute positions for longer inputs: the table, then sums of two of its rows (Su). A baseline; the same "
        "outputs up to the source's length",
        keeps_table=True,
        exact=True,
        apply=absolute.decompose_table,
        unsupported_reason=absolute_alone,
        default_scheme=STOCK_SCHEME,
        max_positions=absolute.stretched_positions,
        options={
            "length": LENGTH,
            "cls": choice(True, False, help="keep row 0 out of the sums, since [CLS] is not a position like others"),
        },
    ),
    "exact": Method(
        "for a checkpoint that is relative already (ours; NEZHA; BERT, RoBERTa, … with relative_key): rename "
        "its weights, or put its tables into a scheme that holds them. The same outputs",
        keeps_table=False,
        exact=True,
        apply=relative.exact,
        unsupported_reason=has_tables,
        from_absolute=False,
        from_relative=True,
        options={"max_position_embeddings": POSITIONS},
    ),
    "refit": Method(
        "for a checkpoint that is relative already: the closest tables of another scheme; says what is lost",
        keeps_table=False,
        exact=False,
        apply=relative.refit,
        unsupported_reason=has_tables,
        from_absolute=False,
        from_relative=True,
        options={"max_position_embeddings": POSITIONS},
    ),
}


def choose_method(requested: str | None, spec: SourceSpec, folder: Path) -> str:
    """The requested method, or by default the one that keeps the outputs.

    Raises:
        ConversionError: for one that does not fit the positions of the source.
    """
    if requested is None:
        return "keep" if spec.absolute else "exact"
    supported = [
        name for name, method in METHODS.items() if (method.from_absolute if spec.absolute else method.from_relative)
    ]
    if requested in supported:
        return requested
    if spec.absolute:
        raise ConversionError(
            f"method = {requested!r}: {folder} has absolute positions, not relative ones to take over; choose "
            f"{' or '.join(supported)}"
        )
    raise ConversionError(
        f"method = {requested!r}: {folder} is relative already ({spec.evidence}) and has no absolute positions to "
        f"{requested}; leave the method out, or choose {' or '.join(supported)}"
    )


def check_scheme(scheme: type[Scheme], method: Method) -> None:
    """Refuse a scheme that the method does not support.

    Raises:
        ConversionError: names the schemes that it supports.
    """
    reason = method.unsupported_reason(scheme)
    if reason:
        supported = [name for name, candidate in SCHEMES.items() if not method.unsupported_reason(candidate)]
        raise ConversionError(
            f"position_embedding_type = {scheme.name!r}: {reason}; this method can start from: {', '.join(supported)}"
        )


def check_text(
    name: str, texts: str | Path | Iterable[str | Path] | None, field: str | Sequence[str] = "text"
) -> list[Path] | list[str] | None:
    """Refuse a method that requires text without any, text that would not be read, and fields that do not fit it.

    Args:
        name: key of `METHODS`.
        texts: as `convert` takes them.
        field: as `convert` takes it.

    Returns:
        The texts, to be iterated over several times; None for none.

    Raises:
        ConversionError: says what to give or to leave out.
    """
    use = METHODS[name].text
    if use == "required" and texts is None:
        raise ConversionError(f"texts = None: method = {name!r} learns from text; give texts, some hundred sentences")
    if use == "unused" and texts is not None:
        others = [repr(other) for other, method in METHODS.items() if method.text != "unused"]
        remedy = f", or choose a method that does: {', '.join(others)}" if others else ""
        raise ConversionError(f"texts were given, but method = {name!r} reads none; leave them out{remedy}")
    try:
        found = None if texts is None else paths_or_documents(texts)
        if field != "text":
            if found is None or not isinstance(found[0], Path):
                raise TextError(
                    f"field = {field!r} was given without files or datasets that have fields (--field); leave it out, "
                    "or give texts as paths"
                )
            pair_fields(found, field)
        return found
    except TextError as error:
        raise ConversionError(str(error)) from error


def text_names(texts: list[Path] | list[str] | None) -> list[str] | None:
    """Names of the texts that `check_text` returned, for the report.

    Returns:
        Names of files, without their folders, and of Hub datasets; [] for documents, None for no texts.
    """
    if texts is None:
        return None
    paths = [text for text in texts if isinstance(text, Path)]
    return [path.name if path.expanduser().exists() else str(path) for path in paths]


def check_plots(name: str) -> None:
    """Refuse plots of what is not measured.

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


def check_device(name: str, device: str | None) -> torch.device:
    """The device that a method computes on.

    Args:
        name: key of `METHODS`.
        device: as `convert` takes it.

    Raises:
        ConversionError: for one that cannot be used, and one for a method that does not learn.
    """
    if METHODS[name].text == "unused":
        if device is not None:
            raise ConversionError(
                f"device = {device!r}: method = {name!r} copies tensors and computes nothing there; leave it out"
            )
        return torch.device("cpu")
    try:
        return compute_device(device)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def resolve_options(name: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of a method, completed with its defaults.

    Args:
        name: key of `METHODS`.
        options: as the caller gave them.

    Raises:
        ConversionError: for an unknown option or a value that is not accepted; names field, value and remedy.
    """
    known = METHODS[name].options
    if options is not None and not isinstance(options, Mapping):
        raise ConversionError(f"method_options = {options!r} is not a mapping; give option names and values")
    options = options or {}
    for key, value in options.items():
        if key not in known:
            remedy = f"known: {', '.join(known)}" if known else "it has none, leave it out"
            raise ConversionError(
                f"method_options[{key!r}] = {value!r}: method = {name!r} has no such option{nearest(key, known)}; "
                f"{remedy}"
            )
        if not known[key].accepts(value):
            raise ConversionError(
                f"method_options[{key!r}] = {value!r} is not accepted by method = {name!r}; {key}: {known[key].help}"
            )
    return {key: options.get(key, option.default) for key, option in known.items()}
