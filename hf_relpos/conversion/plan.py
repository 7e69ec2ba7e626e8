"""The plan of a conversion: all choices, made and checked before the weights are read."""

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..checkpoints.errors import ConversionError
from ..checkpoints.weights import tensor_names
from ..data.seed import check_seed
from ..data.text import pair_fields, paths_or_documents
from ..families.family import TOKEN_TYPES, Family
from ..families.names import is_table
from ..families.recognition import choose_head, recognise
from ..families.tensors import Checkpoint
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import scheme_parts
from ..schemes.scheme import check_options, nearest
from .configurations import read_config, source_config, target_config
from .folder import Layout, check_apart, locate
from .methods import METHODS, Arguments, Method


# Arguments of `convert` that do not determine the result.
NOT_REPORTED = ("source", "out", "overwrite", "device", "progress")


@dataclass(frozen=True)
class Conversion:
    """A conversion: the source, and what was chosen.

    Attributes:
        given: arguments of `convert`.
        method_name: the method, a key of `METHODS`.
        target: the folder to write, with links resolved.
        source: the checkpoint; without tensors until they are read.
        layout: folder of the source, in which that of the checkpoint may lie.
        spec: description of the source.
        left_behind: a note on tensors of a head that is dropped; empty for none.
        source_config: the configuration of the source as a RelPosBertConfig.
        config: the configuration of the result.
        options: options of the method.
        texts: paths or documents to learn from; None for a method that does not learn.
        device: device of a method that learns from text.
        details: results of the method for the report, which it adds; JSON values only.
        try_writing: write all files of the result as it is before the method, check them, and remove them. A method
            that trains calls it before its first step, so that nothing is refused after the last.
    """

    given: Arguments
    method_name: str
    target: Path
    source: Checkpoint
    layout: Layout
    spec: Family
    left_behind: str
    source_config: RelPosBertConfig
    config: RelPosBertConfig
    options: SimpleNamespace
    texts: list[Path] | list[str] | None
    device: torch.device
    details: dict[str, Any] = field(default_factory=dict)
    try_writing: Callable[[], None] = lambda: None

    @property
    def method(self) -> Method:
        """The method."""
        return METHODS[self.method_name]

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
    def tokens_to_distil(self) -> int:
        """Tokens of text that a distillation reads."""
        return int(self.options.distil_tokens or self.options.steps * self.options.batch_tokens)

    @property
    def abilities(self) -> str:
        """What the result can and cannot do, in one line."""
        limit, window = self.limit, self.config.attention_window
        if self.config.has_absolute_table:
            longer = f"For longer texts, convert with --text FILE --method-option length={4 * limit}."
            return f"Its outputs equal the source's, and it reads at most {limit:,} tokens, like the source. {longer}"
        made = f"It reads texts of any length and was made for {self.new_length or limit:,} tokens"
        if window:
            made += f", with attention_window = {window} in its configuration."
        else:
            made += f"; load it with attention_window={max(1, limit // 2)} for longer texts."
        if self.method.exact:
            return f"Its outputs equal the source's. {made}"
        if self.method.learns:
            return made
        usable = "for a model to use without training, convert with --text FILE instead of --method drop."
        return f"{made} Its outputs are far from the source's until you train it; {usable}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Scheme, method, options and other arguments that determine the result, for the report; others are left out.

        Files are named without folders; documents given in Python have no names.
        """
        names = [text.name for text in self.texts or () if isinstance(text, Path)]
        arguments = {name: value for name, value in vars(self.given).items() if name not in NOT_REPORTED}
        arguments |= {"texts": None if self.texts is None else names, "revision": self.layout.revision}
        arguments["method"] = self.method_name
        if not self.method.learns:
            del arguments["seed"]
        plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in arguments.items()}
        return {key: value for key, value in plain.items() if value is not False and value not in (None, {}, "text")}


def plan_conversion(given: Arguments, target: Path) -> Conversion:
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
    layout = locate(given.source, given.revision, given.allow_pickle)
    check_apart(layout.top, target)  # the cache of the Hub
    folder = layout.top / layout.encoder
    spec = recognise(folder, read_config(folder), tensor_names(folder, given.allow_pickle))
    spec, left_behind = choose_head(spec, given.architecture)
    name = choose_method(given, spec)
    method, chosen = METHODS[name], given.method_options or {}
    texts = check_text(given, name)
    for other, key in itertools.product(METHODS, chosen):
        if key in METHODS[other].options.keys() - method.options.keys():
            reason = f"is an option of method = {other!r}, which takes texts (--text), and not of {name!r}"
            raise ConversionError(f"method_options[{key!r}] = {chosen[key]!r}: it {reason}")
    check_options(chosen, method.options, "method_options", f"method = {name!r}")
    options = {key: option.default for key, option in method.options.items()} | dict(chosen)
    device = choose_device(given.device) if method.learns else torch.device("cpu")
    own = source_config(spec)
    return Conversion(
        given=given,
        method_name=name,
        target=target,
        source=Checkpoint(),
        layout=layout,
        spec=spec,
        left_behind=left_behind,
        source_config=own,
        config=target_config(spec, own, given, method, options),
        options=SimpleNamespace(**options),
        texts=texts,
        device=device,
    )


def choose_method(given: Arguments, spec: Family) -> str:
    """The given method; without one, the one that learns, or keeps the outputs.

    Raises:
        ConversionError: for a method that does not fit the positions of the source.
    """
    by_text, absolute = "keep" if given.texts is None else "distil", spec.positions.absolute
    name = (by_text if absolute else "exact") if given.method is None else given.method
    supported = [
        name for name, method in METHODS.items() if (method.from_absolute if absolute else method.from_relative)
    ]
    if name not in supported:
        needed, present = ("relative", "absolute") if absolute else ("absolute", "relative")
        raise ConversionError(
            f"method = {name!r} requires {needed} positions, but {spec.folder} has {present} ones ({spec.evidence}); "
            f"leave the method out, or choose {' or '.join(supported)}"
        )
    return name


def check_text(given: Arguments, method: str) -> list[Path] | list[str] | None:
    """The texts, which can be iterated over several times; None for none.

    Raises:
        ValueError: for missing texts, texts that the method does not read, and wrong fields.
    """
    texts, fields, learns = given.texts, given.field, METHODS[method].learns
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


def choose_device(given: str | None) -> torch.device:
    """The given device; without one, an accelerator if it computes in float64, in which models are compared.

    Raises:
        ConversionError: for a device that cannot be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConversionError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}: a conversion runs in one process; start it without torchrun"
        )
    name = given or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.ones((), dtype=torch.float64, device=name).item()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        if given is None:
            return torch.device("cpu")
        reason = str(error).partition("\n")[0]
        raise ConversionError(
            f"device = {given!r} cannot be used ({reason}); give another device, such as 'cpu', or leave it out"
        ) from error
    return torch.device(name)
