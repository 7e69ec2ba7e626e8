"""The plan of a conversion: all choices, made and checked before the weights are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..data.seed import check_seed
from ..data.text import pair_fields, paths_or_documents
from ..families.checkpoint import Checkpoint, conversion_errors, read_config, tensor_names
from ..families.errors import ConversionError
from ..families.family import TOKEN_TYPES
from ..families.names import is_table
from ..families.recognition import CheckpointSpec, Head, choose_head, recognise
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import scheme_parts
from ..schemes.scheme import check_options, nearest
from .configurations import source_config, target_config
from .folder import Layout, check_apart, locate
from .methods import METHODS, Arguments, Method


@dataclass(frozen=True)
class Conversion:
    """A conversion: the source, and what was chosen.

    Attributes:
        given: arguments of `convert`.
        target: the folder to write, with links resolved.
        source: the checkpoint; without tensors until they are read.
        top: folder of the source, in which that of the checkpoint may lie.
        layout: layout of that folder.
        spec: description of the source.
        head: head of the source.
        source_config: the configuration of the source as a RelPosBertConfig.
        config: the configuration of the result.
        options: options of the method, an instance of its `options_type`.
        texts: paths or documents to learn from; None for a method that does not learn.
        device: device of a method that learns from text.
        details: results of the method for the report, which it adds; JSON values only.
    """

    given: Arguments
    target: Path
    source: Checkpoint
    top: Path
    layout: Layout
    spec: CheckpointSpec
    head: Head
    source_config: RelPosBertConfig
    config: RelPosBertConfig
    options: Any
    texts: list[Path] | list[str] | None
    device: torch.device
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> Method:
        """The method."""
        return METHODS[self.given.method]

    @property
    def limit(self) -> int:
        """Tokens that the source reads at once."""
        return self.source_config.max_position_embeddings

    @property
    def source_table(self) -> torch.Tensor:
        """The absolute position embeddings of the source, (P, D), which must have them."""
        return next(tensor for name, tensor in self.source.tensors.items() if is_table(name))

    @property
    def tells_segments_apart(self) -> bool:
        """Whether the source has different embeddings of token types 0 and 1, and no other terms of segments."""
        if any(settings.get("segments") for _, settings in scheme_parts(self.source_config)):
            return False  # XLNet's segment terms, which are not computed layer by layer
        tables = [tensor for name, tensor in self.source.tensors.items() if name.endswith(TOKEN_TYPES)]
        return any(len(table) > 1 and not torch.equal(table[0], table[1]) for table in tables)

    @property
    def new_length(self) -> int | None:
        """Tokens that the result was made for; None if it has the source's outputs and the source's limit."""
        length = self.config.max_position_embeddings
        if self.method.exact and length == self.limit:
            return None
        return max(length, getattr(self.options, "length", None) or 0)

    @property
    def window(self) -> int | None:
        """`attention_window` of the result; half of the source's limit if longer rows are trained on.

        Then all distances are frequent in training, and long rows cost less.
        """
        past = (getattr(self.options, "length", None) or 0) > self.limit
        return getattr(self.options, "window", None) or (max(1, self.limit // 2) if past else None)

    @property
    def abilities(self) -> str:
        """What the result can and cannot do, in one line."""
        limit = self.limit
        if self.config.has_absolute_table:
            return (
                f"Its outputs equal the source's, and it reads at most {limit:,} tokens, like the source. "
                f"For longer texts, convert with --text FILE --method-option length={4 * limit}."
            )
        if self.method.exact:
            return f"Its outputs equal the source's. It was made for {limit:,} tokens and also reads longer texts."
        if not self.method.learns:
            return (
                "It reads texts of any length. Its outputs are far from the source's until you train it. For a model "
                "to use without training, convert with --text FILE instead of --method drop."
            )
        return f"It reads texts of any length and was made for {self.new_length:,} tokens" + (
            f", with attention_window = {self.window} in its configuration."
            if self.window
            else f"; load it with attention_window={max(1, limit // 2)} for longer ones."
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Scheme, method, options and other arguments that determine the result, for the report; others are left out.

        Files are named without folders; documents given in Python have no names.
        """
        given, names = self.given, [text.name for text in self.texts or () if isinstance(text, Path)]
        arguments = {
            "position_embedding_type": given.position_embedding_type,
            "position_options": given.position_options,
            "method": given.method,
            "method_options": given.method_options,
            "texts": None if self.texts is None else names,
            "field": None if given.field == "text" else given.field,
            "seed": given.seed if self.method.learns else None,
            "architecture": given.architecture,
            "revision": self.source.revision,
            "allow_pickle": given.allow_pickle or None,
        }
        plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in arguments.items()}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
        return {key: value for key, value in plain.items() if value is not None and value != {}}


def plan_conversion(given: Arguments, target: Path) -> Conversion:
    """Check the arguments of `convert` against the source, and complete them.

    Args:
        given: the arguments.
        target: the folder to write, with links resolved.

    Raises:
        ConversionError: for an argument that is invalid or does not fit the source.
    """
    if given.method is not None and given.method not in METHODS:
        raise ConversionError(
            f"method = {given.method!r} is unknown{nearest(given.method, METHODS)}; known methods: "
            f"{', '.join(METHODS)}"
        )
    with conversion_errors():
        check_seed(given.seed)
    top, commit, layout = locate(given.source, given.revision, given.allow_pickle)
    check_apart(top, target)  # the cache of the Hub
    folder = top / layout.encoder
    saved = read_config(folder)
    spec = recognise(folder, saved, tensor_names(folder, given.allow_pickle))
    head = choose_head(spec, folder, given.architecture)
    spec = spec.with_head(head.source)
    given = choose_method(given, spec, folder)
    texts = check_text(given)
    options, device = resolve_options(given), check_device(given)
    own = source_config(folder, spec)
    config = target_config(folder, spec, own, given, options)
    checkpoint = Checkpoint(str(given.source), folder, commit, saved, head.stock)
    return Conversion(given, target, checkpoint, top, layout, spec, head, own, config, options, texts, device)


def choose_method(given: Arguments, spec: CheckpointSpec, folder: Path) -> Arguments:
    """Complete the arguments by the method: the given one; by default the one that learns, or keeps the outputs.

    Raises:
        ConversionError: for a method that does not fit the positions of the source.
    """
    if given.method is None:
        by_text = "keep" if given.texts is None else "distil"
        return replace(given, method=by_text if spec.absolute else "exact")
    supported = [
        name for name, method in METHODS.items() if (method.from_absolute if spec.absolute else method.from_relative)
    ]
    if given.method in supported:
        return given
    if spec.absolute:
        raise ConversionError(
            f"method = {given.method!r} requires relative positions, but {folder} has absolute ones; choose "
            f"{' or '.join(supported)}"
        )
    raise ConversionError(
        f"method = {given.method!r} requires absolute positions, but {folder} has relative ones ({spec.evidence}); "
        f"leave the method out, or choose {' or '.join(supported)}"
    )


def check_text(given: Arguments) -> list[Path] | list[str] | None:
    """The texts, which can be iterated over several times; None for none.

    Raises:
        ConversionError: for missing texts, texts that the method does not read, and wrong fields.
    """
    method, texts, fields = given.method, given.texts, given.field
    learns = METHODS[str(method)].learns
    if learns and texts is None:
        raise ConversionError(f"method = {method!r} requires `texts` (--text; a few hundred sentences are enough)")
    if not learns and texts is not None:
        raise ConversionError(
            f"texts were given, but method = {method!r} does not use them; leave them out, or use method = 'distil'"
        )
    with conversion_errors():
        found = None if texts is None else paths_or_documents(texts)
        if fields != "text":
            if found is None or not isinstance(found[0], Path):
                raise ConversionError(
                    f"field = {fields!r} (--field) requires files with fields; leave it out, or give texts as paths"
                )
            pair_fields(found, fields)
    return found


def check_device(given: Arguments) -> torch.device:
    """The device of a method that learns; the CPU for others.

    Raises:
        ConversionError: for a device that cannot be used.
    """
    if not METHODS[given.method].learns:
        return torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConversionError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}: a conversion runs in one process; start it without accelerate "
            "launch or torchrun"
        )
    name = given.device or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.ones((), dtype=torch.float64, device=name).item()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        if given.device is None:  # an accelerator without float64, in which models are compared
            return torch.device("cpu")
        reason = str(error).partition("\n")[0]
        raise ConversionError(
            f"device = {given.device!r} cannot be used ({reason}); give another device, such as 'cpu', or leave it out"
        ) from error
    return torch.device(name)


def resolve_options(given: Arguments) -> Any:
    """The options of the method with its defaults: an instance of its `options_type`.

    Raises:
        ConversionError: for an unknown option or an invalid value; names field, value and remedy.
    """
    method, options = METHODS[given.method], given.method_options
    if options is not None and not isinstance(options, Mapping):
        raise ConversionError(f"method_options = {options!r} is not a mapping; give option names and values")
    options = options or {}
    with conversion_errors():
        check_options(options, method.options, "method_options", f"method = {given.method!r}")
    return method.options_type(**options)
