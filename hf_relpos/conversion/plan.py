"""The plan of a conversion: all choices, made and checked before the weights are read."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..data.seed import check_seed
from ..data.text import pair_fields, paths_or_documents
from ..families.checkpoint import read_config, tensor_names
from ..families.errors import ConversionError
from ..families.family import TOKEN_TYPES
from ..families.names import is_table
from ..families.recognition import CheckpointSpec, choose_head, recognise
from ..families.tensors import Checkpoint
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import scheme_parts
from ..schemes.scheme import check_options, nearest
from .configurations import source_config, target_config
from .folder import Layout, check_apart, locate
from .methods import METHODS, Method


# Arguments of `convert` that do not determine the result.
NOT_REPORTED = ("source", "out", "overwrite", "device", "progress")


@dataclass(frozen=True)
class Conversion:
    """A conversion: the source, and what was chosen.

    Attributes:
        given: arguments of `convert`.
        target: the folder to write, with links resolved.
        source: the checkpoint; without tensors until they are read.
        top: folder of the source, in which that of the checkpoint may lie.
        revision: commit of the Hub repository; None for a local folder.
        layout: layout of that folder.
        spec: description of the source.
        left_behind: a note on tensors of a head that is dropped; empty for none.
        source_config: the configuration of the source as a RelPosBertConfig.
        config: the configuration of the result.
        options: options of the method.
        texts: paths or documents to learn from; None for a method that does not learn.
        device: device of a method that learns from text.
        details: results of the method for the report, which it adds; JSON values only.
    """

    given: SimpleNamespace
    target: Path
    source: Checkpoint
    top: Path
    revision: str | None
    layout: Layout
    spec: CheckpointSpec
    left_behind: str
    source_config: RelPosBertConfig
    config: RelPosBertConfig
    options: SimpleNamespace
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
    def asked_length(self) -> int:
        """Option `length` of the method; 0 if it is not given."""
        return getattr(self.options, "length", None) or 0

    @property
    def new_length(self) -> int | None:
        """Tokens that the result was made for; None if it has the source's outputs and the source's limit."""
        length = self.config.max_position_embeddings
        if self.method.exact and length == self.limit:
            return None
        return max(length, self.asked_length)

    @property
    def window(self) -> int | None:
        """`attention_window` of the result; half of the source's limit if longer rows are trained on.

        Then all distances are frequent in training, and long rows cost less.
        """
        past = self.asked_length > self.limit
        return getattr(self.options, "window", None) or (max(1, self.limit // 2) if past else None)

    @property
    def tokens_to_distil(self) -> int:
        """Tokens of text that a distillation reads."""
        return int(self.options.distil_tokens or self.options.steps * self.options.batch_tokens)

    @property
    def abilities(self) -> str:
        """What the result can and cannot do, in one line."""
        limit = self.limit
        if self.config.has_absolute_table:
            longer = f"For longer texts, convert with --text FILE --method-option length={4 * limit}."
            return f"Its outputs equal the source's, and it reads at most {limit:,} tokens, like the source. {longer}"
        if self.method.exact:
            return f"Its outputs equal the source's. It was made for {limit:,} tokens and also reads longer texts."
        if not self.method.learns:
            usable = "For a model to use without training, convert with --text FILE instead of --method drop."
            return f"It reads texts of any length. Its outputs are far from the source's until you train it. {usable}"
        made = f"It reads texts of any length and was made for {self.new_length:,} tokens"
        if self.window:
            return f"{made}, with attention_window = {self.window} in its configuration."
        return f"{made}; load it with attention_window={max(1, limit // 2)} for longer ones."

    @property
    def arguments(self) -> dict[str, Any]:
        """Scheme, method, options and other arguments that determine the result, for the report; others are left out.

        Files are named without folders; documents given in Python have no names.
        """
        names = [text.name for text in self.texts or () if isinstance(text, Path)]
        arguments = {name: value for name, value in vars(self.given).items() if name not in NOT_REPORTED}
        arguments |= {"texts": None if self.texts is None else names, "revision": self.revision}
        arguments |= {"field": None if self.given.field == "text" else self.given.field}
        if not self.method.learns:
            del arguments["seed"]
        plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in arguments.items()}
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}
        return {key: value for key, value in plain.items() if value is not False and value not in (None, {})}


def plan_conversion(given: SimpleNamespace, target: Path) -> Conversion:
    """Check the arguments of `convert` against the source, and complete them.

    Args:
        given: the arguments.
        target: the folder to write, with links resolved.

    Raises:
        ValueError: for an argument that is invalid or does not fit the source.
    """
    if given.method is not None and given.method not in METHODS:
        known = ", ".join(METHODS)
        raise ConversionError(f"method = {given.method!r} is unknown{nearest(given.method, METHODS)}; known: {known}")
    for name, example in (("position_options", {"clip": 32}), ("method_options", {"steps": 100})):
        if not isinstance(options := getattr(given, name), Mapping | None):
            raise ConversionError(f"{name} = {options!r} is not a mapping; give names and values, such as {example}")
    check_seed(given.seed)
    top, commit, layout = locate(given.source, given.revision, given.allow_pickle)
    check_apart(top, target)  # the cache of the Hub
    folder = top / layout.encoder
    spec = recognise(folder, read_config(folder), tensor_names(folder, given.allow_pickle))
    spec, left_behind = choose_head(spec, folder, given.architecture)
    choose_method(given, spec, folder)
    texts = check_text(given)
    options, device = resolve_options(given), check_device(given)
    own = source_config(folder, spec)
    config = target_config(folder, spec, own, given, getattr(options, "length", None) or 0)
    source = Checkpoint(folder)
    return Conversion(
        given, target, source, top, commit, layout, spec, left_behind, own, config, options, texts, device
    )


def choose_method(given: SimpleNamespace, spec: CheckpointSpec, folder: Path) -> None:
    """Check the given method; without one, choose the one that learns, or keeps the outputs.

    Raises:
        ConversionError: for a method that does not fit the positions of the source.
    """
    if given.method is None:
        by_text = "keep" if given.texts is None else "distil"
        given.method = by_text if spec.absolute else "exact"
    supported = [
        name for name, method in METHODS.items() if (method.from_absolute if spec.absolute else method.from_relative)
    ]
    if given.method not in supported:
        needed, present = ("relative", "absolute") if spec.absolute else ("absolute", "relative")
        raise ConversionError(
            f"method = {given.method!r} requires {needed} positions, but {folder} has {present} ones "
            f"({spec.evidence}); leave the method out, or choose {' or '.join(supported)}"
        )


def check_text(given: SimpleNamespace) -> list[Path] | list[str] | None:
    """The texts, which can be iterated over several times; None for none.

    Raises:
        ValueError: for missing texts, texts that the method does not read, and wrong fields.
    """
    method, texts, fields = given.method, given.texts, given.field
    learns = METHODS[str(method)].learns
    if learns and texts is None:
        raise ConversionError(f"method = {method!r} requires `texts` (--text; a few hundred sentences are enough)")
    if not learns and texts is not None:
        raise ConversionError(
            f"texts were given, but method = {method!r} does not use them; leave them out, or use method = 'distil'"
        )
    found = None if texts is None else paths_or_documents(texts)
    if found is not None and isinstance(found[0], Path):
        pair_fields(found, fields)
    elif fields != "text":
        raise ConversionError(
            f"field = {fields!r} (--field) requires files with fields; leave it out, or give texts as paths"
        )
    return found


def check_device(given: SimpleNamespace) -> torch.device:
    """The device of a method that learns; the CPU for others.

    Raises:
        ConversionError: for a device that cannot be used.
    """
    if not METHODS[given.method].learns:
        return torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConversionError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}: a conversion runs in one process; start it without torchrun"
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


def resolve_options(given: SimpleNamespace) -> SimpleNamespace:
    """The options of the method with its defaults.

    Raises:
        ValueError: for an unknown option or an invalid value; names field, value and remedy.
    """
    known, options = METHODS[given.method].options, given.method_options or {}
    check_options(options, known, "method_options", f"method = {given.method!r}")
    return SimpleNamespace(**{name: option.default for name, option in known.items()} | dict(options))
