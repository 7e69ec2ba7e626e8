"""The plan of a conversion: all choices that are made, and checked, before the weights are read."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..data.seed import check_seed
from ..data.text import TextError, pair_fields, paths_or_documents
from ..families.checkpoint import read_config, tensor_names
from ..families.errors import ConversionError
from ..families.recognition import CheckpointSpec, Head, choose_head, recognise
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..processes import compute_device
from ..schemes.scheme import nearest
from .configurations import source_config, target_config
from .folder import check_apart
from .folder_layout import Layout, locate
from .methods import METHODS, Method
from .presets import DEFAULT_QUALITY, QUALITIES


@dataclass(frozen=True)
class ConversionPlan:
    """The choices of a conversion, checked.

    Attributes:
        top: folder of the source.
        commit: commit of the source's Hub repository; None for a local folder.
        layout: layout of that folder.
        saved: config.json of the encoder.
        spec: description of the source.
        head: head of the source.
        quality: preset, key of `QUALITIES`; None for none.
        method_name: key of `METHODS`.
        options: an instance of the method's `options_type`.
        texts: texts to learn from; None for none.
        device: device of a method that learns from text.
        source_config: the configuration of the source as a RelPosBertConfig.
        config: the configuration of the result.
        arguments: scheme, method and options from the caller or the preset, for the report.
    """

    top: Path
    commit: str | None
    layout: Layout
    saved: dict[str, Any]
    spec: CheckpointSpec
    head: Head
    quality: str | None
    method_name: str
    options: Any
    texts: list[Path] | list[str] | None
    device: torch.device
    source_config: RelPosBertConfig
    config: RelPosBertConfig
    arguments: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of config.json and the weights."""
        return self.top / self.layout.encoder

    @property
    def method(self) -> Method:
        """The method."""
        return METHODS[self.method_name]

    @property
    def new_length(self) -> int | None:
        """Tokens that the result was made for; None if it has the outputs of the source and reads as much as it."""
        length = self.config.max_position_embeddings
        if self.method.exact and length == self.source_config.max_position_embeddings:
            return None
        return max(length, getattr(self.options, "length", None) or 0)

    @property
    def abilities(self) -> str:
        """What the result can and cannot do, in one line."""
        limit, length = self.source_config.max_position_embeddings, self.new_length
        if self.config.has_absolute_table:
            return (
                f"It computes what the source computes, and like it reads {limit:,} tokens and not one more. "
                f"For longer texts convert with --text FILE --method-option length={4 * limit}."
            )
        if self.method_name == "drop":
            return (
                "It reads texts of any length, and its outputs are far from the source's until it is trained. For a "
                "model that can be used as it is, convert with --text FILE instead of --method drop."
            )
        if self.method.exact:
            return f"It computes what the source computes; made for {limit:,} tokens, it reads longer texts, too."
        window = getattr(self.options, "window", None)
        return f"It reads texts of any length and was made for {length or limit:,} tokens" + (
            f", with attention_window = {window} in its configuration."
            if window
            else f"; load it with attention_window={max(1, limit // 2)} for longer ones."
        )


def plan_conversion(
    source: str | Path,
    target: Path,
    *,
    position_embedding_type: str | None,
    position_options: Mapping[str, Any] | None,
    method: str | None,
    method_options: Mapping[str, Any] | None,
    quality: str | None,
    texts: str | Path | Iterable[str | Path] | None,
    field: str | Sequence[str],
    seed: int,
    architecture: str | None,
    revision: str | None,
    allow_pickle: bool,
    device: str | None,
    plots: bool,
) -> ConversionPlan:
    """Check the arguments of `convert` against the source, and complete them.

    Args:
        source: local folder or Hub repository.
        target: the folder to write, with links resolved.

    The others are those of `convert`.

    Raises:
        ConversionError: for an argument that is invalid or does not fit the source.
    """
    if method is not None and method not in METHODS:
        raise ConversionError(
            f"method = {method!r} is unknown{nearest(method, METHODS)}; known methods: {', '.join(METHODS)}"
        )
    try:
        check_seed(seed)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    top, commit, layout = locate(source, revision, allow_pickle)
    check_apart(top, target)  # the cache of the Hub
    folder = top / layout.encoder
    saved = read_config(folder)
    spec = recognise(folder, saved, tensor_names(folder, allow_pickle))
    head = choose_head(spec, folder, architecture)
    spec = spec.with_head(head)
    quality = choose_quality(quality, method, spec, texts is not None)
    name = choose_method(method if quality is None else method or QUALITIES[quality].method, spec, folder)
    found = check_text(name, texts, field)
    if plots:
        check_plots(name)
    if quality is not None:
        position_embedding_type, position_options = QUALITIES[quality].complete_scheme(
            position_embedding_type, position_options
        )
        method_options = QUALITIES[quality].complete_options(METHODS[name].options, method_options)
    options = resolve_options(name, method_options)
    device_found = check_device(name, device)
    own_config = source_config(folder, spec)
    config = target_config(folder, spec, own_config, position_embedding_type, position_options, METHODS[name], options)
    arguments = {
        "position_embedding_type": position_embedding_type,
        "position_options": position_options,
        "method": name,
        "method_options": method_options,
        "texts": text_names(found),
        "field": None if field == "text" else field if isinstance(field, str) else list(field),
        "seed": seed if METHODS[name].learns else None,
        "architecture": architecture,
        "revision": commit,
        "allow_pickle": allow_pickle or None,
    }
    return ConversionPlan(
        top,
        commit,
        layout,
        saved,
        spec,
        head,
        quality,
        name,
        options,
        found,
        device_found,
        own_config,
        config,
        _without_defaults(arguments),
    )


def _without_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are neither None nor an empty mapping."""
    plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in arguments.items()}
    return {key: value for key, value in plain.items() if value is not None and value != {}}


def choose_quality(requested: str | None, method: str | None, spec: CheckpointSpec, has_text: bool) -> str | None:
    """The requested preset; the default preset if there is text but no method; otherwise None.

    Args:
        requested: preset given by the caller of `convert`.
        method: method given by the caller.
        spec: description of the source. A relative source is converted exactly by default.
        has_text: whether there is text to learn from.

    Raises:
        ConversionError: for an unknown preset, a method that does not learn, and a preset that lacks text.
    """
    if requested is None:
        return DEFAULT_QUALITY if has_text and method is None and spec.absolute else None
    if requested not in QUALITIES:
        raise ConversionError(
            f"quality = {requested!r} is unknown{nearest(requested, QUALITIES)}; known: {', '.join(QUALITIES)}"
        )
    if method is not None and not METHODS[method].learns:
        raise ConversionError(
            f"quality = {requested!r}: method = {method!r} learns nothing, and has no qualities; leave one of them out"
        )
    if not has_text:
        raise ConversionError(f"quality = {requested!r}: learns from text; give texts, some hundred sentences")
    return requested


def choose_method(requested: str | None, spec: CheckpointSpec, folder: Path) -> str:
    """The requested method, or by default the method that keeps the outputs.

    Raises:
        ConversionError: for a method that does not fit the positions of the source.
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


def check_text(
    name: str, texts: str | Path | Iterable[str | Path] | None, field: str | Sequence[str] = "text"
) -> list[Path] | list[str] | None:
    """Check that texts and fields fit the method.

    Args:
        name: key of `METHODS`.
        texts: as in `convert`.
        field: as in `convert`.

    Returns:
        The texts, which can be iterated over several times; None for none.

    Raises:
        ConversionError: for missing texts, texts that the method does not read, and wrong fields.
    """
    learns = METHODS[name].learns
    if learns and texts is None:
        raise ConversionError(f"texts = None: method = {name!r} learns from text; give texts, some hundred sentences")
    if not learns and texts is not None:
        others = [repr(other) for other, method in METHODS.items() if method.learns]
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
    """Names of the texts from `check_text`, for the report.

    Returns:
        Names of files, without folders, and of Hub datasets; [] for documents, None for no texts.
    """
    if texts is None:
        return None
    paths = [text for text in texts if isinstance(text, Path)]
    return [path.name if os.path.exists(path.expanduser()) else str(path) for path in paths]


def check_plots(name: str) -> None:
    """Check that the method measures something to plot.

    Args:
        name: key of `METHODS`.

    Raises:
        ConversionError: otherwise.
    """
    if not METHODS[name].learns:
        raise ConversionError(
            f"plots = True: method = {name!r} measures nothing that could be drawn; leave it out, and draw the result "
            "with `hf-relpos plot --all` or `hf-relpos compare --plot`"
        )


def check_device(name: str, device: str | None) -> torch.device:
    """The device of a method.

    Args:
        name: key of `METHODS`.
        device: as in `convert`.

    Raises:
        ConversionError: for a device that cannot be used, and a device given to a method that does not learn.
    """
    if not METHODS[name].learns:
        if device is not None:
            raise ConversionError(
                f"device = {device!r}: method = {name!r} copies tensors and computes nothing there; leave it out"
            )
        return torch.device("cpu")
    try:
        return compute_device(device)
    except ValueError as error:
        raise ConversionError(str(error)) from error


def resolve_options(name: str, options: Mapping[str, Any] | None) -> Any:
    """The options of a method with its defaults: an instance of its `options_type`.

    Args:
        name: key of `METHODS`.
        options: options given by the caller.

    Raises:
        ConversionError: for an unknown option or an invalid value; names field, value and remedy.
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
    return METHODS[name].options_type(**options)
