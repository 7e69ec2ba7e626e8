"""Verify a loaded model against its checkpoint: `verify_weights`."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..deprecation import rename_arguments
from ..families.registry import resemblance
from .buffers import find_differences, initialised_by_stock, initialize_buffers, models_in
from .stored import find_weights, stored_tensors


# Tensors that files of older releases have, and that the loader passes over.
PASSED_OVER = re.compile(r"(^|\.)(position_ids|token_type_ids|rotary_emb\.inv_freq)$")


class Finding(NamedTuple):
    """Why a tensor of a model is not the checkpoint's.

    Attributes:
        cause: what happened to it.
        remedy: what repairs it.
    """

    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


@rename_arguments(mend=("repair", {}))
def verify_weights(model: Any, source: Any = None, repair: bool = False) -> dict[str, Finding]:
    """Compare each parameter and buffer of a model with the checkpoint that it was loaded from.

    Call it right after a load. Transformers reports missing and unexpected tensors only, and not those that it leaves
    uninitialised or that `_init_weights` of remote code overwrites. The files are read tensor by tensor, renamed and
    converted as by Transformers' loader, so that this takes no second copy of the weights. A cast of the weights is no
    difference. Buffers that are in no file are compared with those of a new model, as by `uninitialized_buffers`.

    Args:
        model: a PreTrainedModel, or a module or pipeline with one inside, such as a SentenceTransformer.
        source: folder, safetensors file or Hub repository of the weights, which is looked for in the cache alone; by
            default where the model says that it comes from.
        repair: copy what differs from the file, which undoes any training, and fill uninitialised buffers.

    Returns:
        Cause and remedy by the name of each tensor that is not the checkpoint's, and of tensors in the file that have
        no place in a part of the model; what is left after a repair. Empty for a sound model.

    Raises:
        TypeError: if there is no PreTrainedModel in `model`.
        ValueError: for a model without safetensors to compare with, for one with adapters or quantised weights, and as
            `uninitialized_buffers`.

    Example:

    ```python
    >>> model = AutoModel.from_pretrained("some/remote-code", trust_remote_code=True)
    >>> for name, finding in hf_relpos.verify_weights(model).items():
    ...     print(name, finding)
    rotary.inv_freq left uninitialised by a load or `to_empty`; hf_relpos.initialize_buffers(model)
    ```
    """
    found: dict[str, Finding] = {}
    for prefix, inner in models_in(model):
        found |= {f"{prefix}{name}": finding for name, finding in _weights(inner, source, repair)}
    if repair:
        initialize_buffers(model)
    for name, each in find_differences(model).items():
        if not each.left:
            found[name] = Finding("left uninitialised by a load or `to_empty`", "hf_relpos.initialize_buffers(model)")
        elif each.right is None:
            found[name] = Finding(each.left, "set it yourself")
        else:
            remedy = f"initialize_buffers(model, force=[{name!r}])"
            found[name] = Finding(f"other than in a new model: {each.left}", remedy)
    return found


def _weights(model: PreTrainedModel, source: Any, repair: bool) -> Iterator[tuple[str, Finding]]:
    """What is the matter with the tensors in a model's state dict."""
    config, state = model.config, model.state_dict(keep_vars=True)
    kind, name_or_path = type(model).__name__, str(source or model.name_or_path)
    if getattr(config, "quantization_config", None) or any(".base_layer." in name for name in state):
        raise ValueError(f"{kind} has adapters or quantised weights; check it before they are added")
    stocks = initialised_by_stock(model)
    given: set[int] = set()
    left_out: dict[str, str] = {}
    for target, names, made in stored_tensors(model, find_weights(model, source)):
        left_out |= {} if made else {target: names[0]}
        for name, value in made.items():
            if (now := state.get(name)) is None:
                continue
            given.add(id(now))
            if now.shape != value.shape:
                cause = f"started at random: its shape is {tuple(now.shape)}, and {tuple(value.shape)} in the file"
                yield name, Finding(cause, "correct config.json, or train it")
            elif now.is_meta:
                yield name, Finding("without contents, or not on this machine", "load the model without a device_map")
            elif _is_same(now, value):
                continue
            elif repair:
                with torch.no_grad():
                    now.copy_(value)
            elif stocks.get(name.rpartition(".")[0], stocks[""]):
                yield name, Finding("changed since it was loaded", "hf_relpos.verify_weights(model, repair=True)")
            else:
                cause = f"overwritten by `_init_weights` of {kind} after it was loaded, or changed since"
                yield name, Finding(cause, "hf_relpos.verify_weights(model, repair=True)")
    saved = " or ".join(getattr(config, "architectures", None) or ("the class that was saved",))
    remedy = f"load {saved}"
    if getattr(config, "auto_map", None) and stocks[""]:
        remedy = f"load its own code: AutoModel.from_pretrained({name_or_path!r}, trust_remote_code=True)"
    for name in _missing(model, given, stocks):
        place = name.rpartition(".")[0].rpartition(".")[0]
        instead = next((stored for target, stored in left_out.items() if place and target.startswith(f"{place}.")), "")
        cause = "started at random: it is in no file" + (f", which has {instead} there" if instead else "")
        yield name, Finding(cause, remedy if instead else f"train it, or {remedy}")
    for target in _strays(model, left_out):
        looks = resemblance(left_out.values(), name_or_path, getattr(config, "model_type", ""))
        yield target, Finding(f"in the file as {left_out[target]}, and {kind} has no place for it", looks or remedy)


def planned_load(model: PreTrainedModel, files: list[str]) -> tuple[list[str], list[str], list[str]]:
    """What a load would do, by the names and shapes in files, whose tensors are not read.

    Args:
        model: of the class to load; it may be on the meta device.

    Returns:
        Parameters that would start at random, tensors of the files that would be left out of a part of the model, and
        parameters of another size than in the files, which are an error.
    """
    state = model.state_dict(keep_vars=True)
    shapes: dict[str, torch.Size] = {}
    left_out: dict[str, str] = {}
    for target, names, made in stored_tensors(model, files, contents=False):
        left_out |= {} if made else {target: names[0]}
        shapes |= {name: value.shape for name, value in made.items() if name in state}
    missing = _missing(model, {id(state[name]) for name in shapes}, initialised_by_stock(model))
    other_sizes = [name for name, shape in shapes.items() if state[name].shape != shape]
    return list(missing), [left_out[target] for target in _strays(model, left_out)], other_sizes


def _missing(model: PreTrainedModel, given: set[int], stocks: dict[str, bool]) -> Iterator[str]:
    """Names of the parameters that no file gives, without those that a class of Transformers computes."""
    ignored = "|".join(model._keys_to_ignore_on_load_missing or [])
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_computed = ignored and stocks[name.rpartition(".")[0]] and re.search(ignored, name)
        if id(parameter) not in given and not is_computed:
            yield name


def _strays(model: PreTrainedModel, left_out: Iterable[str]) -> Iterator[str]:
    """The tensors without a place that belong to a part of the model, and that the loader does not pass over."""
    parts = {name for name, module in model.named_children() if any(True for _ in module.parameters())}
    ignored = "|".join(model._keys_to_ignore_on_load_unexpected or [])
    buffers = dict(model.named_buffers())
    for target in left_out:
        body = target.removeprefix(f"{model.base_model_prefix}.")
        if {target.partition(".")[0], body.partition(".")[0]} & parts and not (
            target in buffers or PASSED_OVER.search(target) or (ignored and re.search(ignored, target))
        ):
            yield target


def _is_same(now: torch.Tensor, stored: torch.Tensor) -> bool:
    """Whether a tensor is that of the file, perhaps rounded by casts on the way."""
    stored = stored.to(now.device)
    if torch.equal(now, stored.to(now.dtype)):
        return True
    if not now.is_floating_point():
        return False
    kinds = (stored.dtype, torch.float16, torch.bfloat16)
    return any(torch.equal(now.nan_to_num(), stored.to(kind).to(now.dtype).nan_to_num()) for kind in kinds)
