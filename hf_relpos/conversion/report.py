"""The report of a conversion, saved as conversion.json: one step per tensor, and measurements."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from transformers import PreTrainedModel

from ..checkpoints.errors import abbreviate
from ..checkpoints.privacy import last_name
from ..checkpoints.weights import VOCABULARIES
from ..evaluation.model_fidelity import Fidelity, failed_thresholds
from ..families.family import TOKEN_TYPES
from ..families.names import is_buffer, is_scheme, is_table
from ..families.tensors import Checkpoint
from ..models.modeling_relpos_bert import HEADS


KINDS = ("reused", "folded", "dropped", "created")


def has_vocabulary(files: Iterable[str]) -> bool:
    """Whether the vocabulary of a tokenizer is among files."""
    return any(PurePath(file).name in VOCABULARIES for file in files)


@dataclass(frozen=True)
class Step:
    """The conversion of one tensor.

    Attributes:
        kind: `reused` (bit for bit), `folded` (changed, or added to another tensor), `dropped`, or `created`.
        source: name in the source's files; None if created.
        target: name in the result; None if it is not in the result.
        shape: shape of the tensor.
        parameters: number of elements; 0 for a second name of a tensor that is already counted.
        note: a remark; empty for none.
    """

    kind: str
    source: str | None
    target: str | None
    shape: tuple[int, ...]
    parameters: int
    note: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """The report of a conversion.

    Attributes:
        source: folder or Hub repository given by the caller.
        revision: commit of the Hub repository.
        out: folder of the result.
        architecture: class of the source.
        converted_to: class of the result.
        method: key of `METHODS`.
        position_embedding_type: scheme, or several combined schemes.
        position_options: options of the scheme, with defaults; for a combination, by scheme.
        method_options: options of the method, with defaults.
        arguments: given arguments of `convert`, and the method. Texts are named without folders; `[]` for
            documents given in Python.
        dtype: dtype of the weights.
        steps: one step per tensor.
        difference: largest difference of the outputs on a random batch, relative to the largest output, in float64;
            None for a method that changes the outputs.
        files: files copied from the source.
        is_sentence_encoder: whether SentenceTransformer loads the result.
        versions: versions of hf_relpos, transformers and torch.
        details: results of the method; {} for none.
        notes: remarks for the caller; the first says what the result can and cannot do.
    """

    source: str
    revision: str | None
    out: str
    architecture: str
    converted_to: str
    method: str
    position_embedding_type: str | list[str]
    position_options: dict[str, Any]
    method_options: dict[str, Any]
    arguments: dict[str, Any]
    dtype: str
    steps: tuple[Step, ...]
    difference: float | None
    files: tuple[str, ...]
    is_sentence_encoder: bool
    versions: dict[str, str]
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def public_source(self) -> str:
        """The Hub repository, or the name of a local folder without its parents."""
        return self.source if self.revision else last_name(self.source)

    @property
    def auto_class(self) -> str:
        """Name of the Auto class of the result."""
        return next(auto for auto, head in HEADS.items() if head.__name__ == self.converted_to)

    def loading(self, arguments: str) -> str:
        """The expression that loads the result."""
        loader = "SentenceTransformer" if self.is_sentence_encoder else f"{self.auto_class}.from_pretrained"
        return f"{loader}({arguments})"

    @property
    def scheme(self) -> str:
        """Name of the scheme, or names of a combination joined by `+`."""
        name = self.position_embedding_type
        return name if isinstance(name, str) else "+".join(name)

    def of_kind(self, kind: str) -> tuple[Step, ...]:
        """The steps of one kind."""
        return tuple(step for step in self.steps if step.kind == kind)

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """Number of tensors and parameters by kind."""
        kinds = {kind: self.of_kind(kind) for kind in KINDS}
        return {
            kind: {"tensors": len(steps), "parameters": sum(step.parameters for step in steps)}
            for kind, steps in kinds.items()
        }

    @property
    def fidelity(self) -> Fidelity | None:
        """Agreement of the result with its source on held-out text; None if it was not measured."""
        measured = self.details.get("fidelity", {})
        return Fidelity.from_dict(measured) if "lengths" in measured else None

    @property
    def verdict(self) -> str | None:
        """Summary of the agreement: up to which length the result can replace the source. None if not measured."""
        return self.details.get("fidelity", {}).get("verdict")

    @property
    def how_close(self) -> str:
        """One sentence on the agreement with the source."""
        if self.verdict:
            return f"Verdict on held-out text: {self.verdict}."
        if self.difference is not None:
            return f"Its outputs equal the source's, to {self.difference:.1e} of the largest output."
        why = self.details.get("fidelity", {}).get("skipped")
        return f"Not measured{f' ({why})' if why else ''}. `hf-relpos compare SOURCE OUT --texts TEXT` measures it."

    @property
    def failed_thresholds(self) -> tuple[str, ...]:
        """The thresholds that the result fails by its own check, in words.

        - Up to the source's limit: a sentence cosine of .85 and a token cosine of .80 (`USABLE`).
        - Past it, for a requested length: a token cosine of .80, on text that fills the length.
        - Text without held-out passages counts as a failure.
        """
        if self.fidelity is not None:
            return tuple(failed_thresholds(self.fidelity))
        return (f"it was not checked: {self.details['fidelity']['skipped']}",) if "text" in self.details else ()

    def __str__(self) -> str:
        """One line: tensors and parameters by kind, and the difference and the verdict if measured."""
        parts = [
            f"{total['tensors']:,} tensors {kind} ({total['parameters']:,} parameters)"
            for kind, total in self.totals.items()
            if total["tensors"]
        ]
        if self.difference is not None:
            parts.append(f"largest relative difference of outputs {self.difference:.1e}")
        return ", ".join(parts) + (f". Verdict: {self.verdict}" if self.verdict else "")

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, as in conversion.json.

        They contain no local paths: a local source is named without folders, and `out` is omitted.
        """
        content = asdict(self) | {"source": self.public_source}
        del content["out"]
        plain: dict[str, Any] = json.loads(json.dumps({**content, "totals": self.totals}))
        return plain


def list_steps(
    model: PreTrainedModel, source: Checkpoint, changed: Mapping[str, str], left_behind: str = ""
) -> tuple[Step, ...]:
    """One step for each tensor of the result, and for each tensor of the source that the result lacks.

    Args:
        model: the result.
        source: the source, with the names of the result.
        changed: tensors of the result that the method changed, with a note on each.
        left_behind: note on tensors that the architecture does not have; empty for the default.
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
        elif is_scheme(name) or name.endswith(TOKEN_TYPES):
            kind, note = "created", "zero"
        else:
            kind, note = "created", "random, as in Transformers' BERT: the source lacks it"
        if first != name:
            note = f"the same tensor as {first}"
        steps.append(Step(kind, origin, name, tuple(tensor.shape), tensor.numel() if first == name else 0, note))
    folded = ("folded", f"into {abbreviate(changed)}") if changed else ("dropped", "")
    # absolute position embeddings
    lost = [(name, tensor, *folded) for name, tensor in source.tensors.items() if name not in weights]
    for name, front in source.cut.items():
        lost.append((name, front, "dropped", f"rows 0 to {len(front) - 1}, which only padding uses"))
    for name, tensor in source.extra.items():
        note = left_behind or f"not a part of {type(model).__name__.removeprefix('RelPos')}"
        kind = "dropped"
        if is_buffer(name):
            note = "a buffer of an older release"
        elif is_table(name):
            note = "unused with relative positions"
        elif is_scheme(name):
            fitted = any(map(is_scheme, changed))
            kind, note = ("folded", "into the tables") if fitted else (kind, "the relative positions of the source")
        lost.append((name, tensor, kind, note))
    for name, tensor, kind, note in lost:
        steps.append(Step(kind, source.origin[name], None, tuple(tensor.shape), tensor.numel(), note))
    return tuple(steps)
