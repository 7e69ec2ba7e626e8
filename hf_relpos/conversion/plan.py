"""The record of a conversion, and choices that its source decides."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..checkpoints.errors import ConversionError
from ..data.text import pair_fields, paths_or_documents
from ..families.family import TOKEN_TYPES, Family
from ..families.names import is_table
from ..families.tensors import Checkpoint
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..schemes.registry import scheme_parts
from .folder import Layout
from .methods import METHODS, Method


Texts = Sequence[tuple[str | Path, str]] | Sequence[str]  # paths with their fields, or documents
# Arguments of `convert` that do not determine the result.
NOT_REPORTED = ("source", "out", "overwrite", "device", "progress")


@dataclass(frozen=True)
class Conversion:
    """A conversion: the source, and what was chosen.

    Attributes:
        given: arguments of `convert` by name.
        method_name: the method, a key of `METHODS`.
        source: the checkpoint.
        renamed: the same with the names of the result, from `rename_relative`.
        layout: folder of the source, in which that of the checkpoint may lie.
        spec: description of the source.
        left_behind: a note on tensors of a head that is dropped; empty for none.
        source_config: the configuration of the source as a RelPosBertConfig.
        config: the configuration of the result.
        options: options of the method.
        texts: paths with their fields, or documents, to learn from; None for a method that does not learn.
        skip_unreadable: whether text files without the field are left out.
        seed: seed of the method.
        device: device of a method that learns from text.
        progress: whether a progress bar is shown.
        details: results of the method for the report, which it adds; JSON values only.
        try_writing: write all files of the result as it is before the method, check them, and remove them. A method
            that trains calls it before its first step, so that nothing is refused after the last.
    """

    given: Mapping[str, Any]
    method_name: str
    source: Checkpoint
    renamed: Checkpoint
    layout: Layout
    spec: Family
    left_behind: str
    source_config: RelPosBertConfig
    config: RelPosBertConfig
    try_writing: Callable[[], None]
    options: SimpleNamespace
    texts: Texts | None
    skip_unreadable: bool
    seed: int
    device: torch.device
    progress: bool
    details: dict[str, Any] = field(default_factory=dict)

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
            longer = f"For longer texts, convert with --texts FILE --method-options length={4 * limit}."
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
        usable = "for a model to use without training, convert with --texts FILE instead of --method drop."
        return f"{made} Its outputs are far from the source's until you train it; {usable}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Scheme, method, options and other arguments that determine the result, for the report; others are left out.

        Files are named without folders; documents given in Python have no names.
        """
        names = [Path(text[0]).name for text in self.texts or () if isinstance(text, tuple)]
        arguments = {name: value for name, value in self.given.items() if name not in NOT_REPORTED}
        arguments |= {"texts": None if self.texts is None else names, "revision": self.layout.revision}
        arguments["method"] = self.method_name
        if not self.method.learns:
            del arguments["seed"]
        plain = {key: dict(value) if isinstance(value, Mapping) else value for key, value in arguments.items()}
        return {key: value for key, value in plain.items() if value is not False and value not in (None, {}, "text")}


def choose_method(given: str | None, has_text: bool, spec: Family) -> str:
    """The given method; without one, the one that learns, or keeps the outputs.

    Raises:
        ConversionError: for a method that does not fit the positions of the source.
    """
    by_text, absolute = "distil" if has_text else "keep", spec.positions.absolute
    name = given or (by_text if absolute else "exact")
    supported = [name for name, each in METHODS.items() if (each.from_absolute if absolute else each.from_relative)]
    if name not in supported:
        needed, present = ("relative", "absolute") if absolute else ("absolute", "relative")
        why = f"requires {needed} positions, but {spec.folder} has {present} ones ({spec.evidence})"
        remedy = f"leave the method out, or choose {' or '.join(supported)}"
        raise ConversionError(f"method = {name!r} {why}; {remedy}")
    return name


def check_text(texts: Any, field: str | Sequence[str], method: str) -> Texts | None:
    """The texts, which can be iterated over several times, paths with their fields; None for none.

    Raises:
        ValueError: for missing texts, texts that the method does not read, and wrong fields.
    """
    learns = METHODS[method].learns
    if learns and texts is None:
        raise ConversionError(f"method = {method!r} requires `texts` (--texts; a few hundred sentences are enough)")
    if not learns and texts is not None:
        raise ConversionError(f"texts: method = {method!r} does not use them; leave them out, or use 'distil'")
    found = None if texts is None else paths_or_documents(texts)
    if found is not None and isinstance(found[0], Path):
        return pair_fields(found, field)
    if field != "text":
        raise ConversionError(f"field = {field!r} (--field) requires files; leave it out, or give texts as paths")
    return found


def choose_device(given: str | None) -> torch.device:
    """The given device; without one, an accelerator if it computes in float64, in which models are compared.

    Raises:
        ConversionError: for a device that cannot be used.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        size = os.environ["WORLD_SIZE"]
        raise ConversionError(f"WORLD_SIZE = {size}: a conversion runs in one process; start it without torchrun")
    name = given or str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    try:
        torch.ones((), dtype=torch.float64, device=name).item()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        if given is None:
            return torch.device("cpu")
        reason = str(error).partition("\n")[0]
        raise ConversionError(f"device = {given!r} cannot be used ({reason}); give another") from error
    return torch.device(name)
