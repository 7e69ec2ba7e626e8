"""The tensors of a checkpoint under the names of stock BERT, for `convert` and `from_pretrained` of our classes."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..checkpoints.errors import ConversionError, abbreviate, check_shape
from ..models.loading import in_body
from .family import Family
from .joints import Tensors, stored_name
from .names import TIES, Tie, is_buffer, is_table
from .registry import resemblance


PARTS = ("embeddings.", "encoder.", "pooler.")  # of BertModel
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tensors have their stock names.

    Attributes:
        tensors: tensors by stock name.
        origin: name in the file by stock name, also for tensors in `extra`.
        extra: tensors that are not in the architecture, by stock name.
        cut: first rows of tensors, by stock name, which are removed; `tensors` has the other rows.
    """

    tensors: Tensors = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    extra: Tensors = field(default_factory=dict)
    cut: Tensors = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensors, if they have a common one."""
        return next(iter(self.tensors.values())).dtype


def rename_tensors(spec: Family, raw: Mapping[str, torch.Tensor], base: bool) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a checkpoint by stock name, and their names in the file.

    Args:
        spec: its description.
        raw: from `spec.unpack`.
        base: for BertModel, which is the encoder itself.

    Raises:
        ConversionError: for two tensors of one stock name, unless BertModel does without both.
    """
    tensors: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    joints = list(spec.joints())
    for name, tensor in raw.items():
        stored = stored_name(joints, name)
        for stock in spec.rename(name, base):
            if stock in tensors and (not base or stock.startswith(PARTS)):
                both = f"{origin[stock]} and {stored} are two spellings of one tensor"
                raise ConversionError(f"{spec.folder}: {both}; remove one of them")
            tensors[stock], origin[stock] = tensor, stored
    return tensors, origin


def rename_and_validate(
    spec: Family, raw: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], tied: bool
) -> Checkpoint:
    """Rename the tensors of a checkpoint to their stock names, check them, and add both names of tied tensors.

    Args:
        spec: its description.
        raw: from `spec.unpack`.
        expected: shape of every tensor of the architecture with this configuration, by stock name.
        tied: `config.tie_word_embeddings`.

    Returns:
        The checkpoint, whose tensors are of one dtype, and complete but for a missing pooler of BertModel.

    Raises:
        ConversionError: for names that collide, tensors that are missing or not in the architecture, shapes
            that differ from the configuration's, quantised weights, and values that are not finite.
    """
    base, folder = spec.architecture == "BertModel", spec.folder
    renamed, origin = rename_tensors(spec, raw, base)
    for tie in TIES:
        if tie.name in expected and tie.other in expected:
            _complete(folder, renamed, origin, tie, tied)

    tensors = {name: renamed[name] for name in expected if name in renamed}
    extra = {name: tensor for name, tensor in renamed.items() if name not in expected}
    missing = [name for name in expected if name not in renamed]
    if base and all(name.startswith("pooler.") for name in missing) and len(missing) in (0, 2):
        missing = []  # masked language models are saved without it; it is initialised at random, as in stock BERT
    if missing:
        count = f"{len(missing)} of {len(expected)} tensors of {spec.architecture}"
        lack = f"{folder}: the weights lack {count}: {abbreviate(missing)}"
        stored = sorted({*origin.values()})
        if looks := resemblance(stored, folder, spec.config.get("model_type", "bert"), missing):
            raise ConversionError(f"{lack}. {looks}")
        remedy = "restore the file"
        if not any(in_body(name) for name in missing):
            remedy += ", or pass architecture='BertModel' to convert the encoder without its head"
        raise ConversionError(f"{lack}; {remedy} (the file holds {abbreviate(stored, 2)})")
    unused = [name for name in extra if is_buffer(name) or (is_table(name) and not spec.positions.absolute)]
    stray = list(dict.fromkeys(origin[name] for name in extra if in_body(name) and name not in unused))
    if stray:
        reason = "not part of a BERT of this configuration (num_hidden_layers, add_cross_attention)"
        remedy = "correct config.json, or remove the tensors if they are unused"
        raise ConversionError(f"{folder}: {abbreviate(stray)}: {reason}; {remedy}")
    for name, tensor in tensors.items():
        more = spec.cut if is_table(name) else 0
        label = origin[name] if origin[name] == name else f"{origin[name]} (here {name})"
        _check_tensor(f"{folder}: {label}", tensor, torch.Size((expected[name][0] + more, *expected[name][1:])))
    # tensors of mixed dtypes are cast to the common wider one, which changes no value
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()))
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    cut = {name: tensor[: spec.cut] for name, tensor in tensors.items() if spec.cut and is_table(name)}
    tensors |= {name: tensors[name][spec.cut :] for name in cut}
    return Checkpoint(tensors, origin, extra, cut)


def _complete(folder: Path, tensors: Tensors, origin: dict[str, str], tie: Tie, tied: bool) -> None:
    """Add the second name of a tied tensor; reject a tie whose two tensors differ."""
    if tie.name in tensors and tie.other in tensors:
        if tied and not torch.equal(tensors[tie.name], tensors[tie.other]):
            both = f"{origin[tie.name]} and {origin[tie.other]} differ, but tie_word_embeddings = True makes them one"
            raise ConversionError(f"{folder}: {both}; set it to false in config.json, or remove one of the tensors")
    elif tied or tie.always:
        for absent, present in ((tie.name, tie.other), (tie.other, tie.name)):
            if present in tensors:
                tensors[absent], origin[absent] = tensors[present], origin[present]


def _check_tensor(label: str, tensor: torch.Tensor, shape: torch.Size) -> None:
    check_shape(label, tensor.shape, shape)
    if tensor.dtype not in DTYPES:
        remedy = "convert the checkpoint in float32, float16 or bfloat16, and quantise the result"
        raise ConversionError(f"{label} has dtype {tensor.dtype}; {remedy}")
    if bad := int((~torch.isfinite(tensor)).sum()):
        found = f"holds {bad} values that are NaN or infinite, of {tensor.numel()}"
        raise ConversionError(f"{label} {found}; take a checkpoint from before they appeared")
