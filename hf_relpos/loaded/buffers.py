"""Find and initialise buffers that were left uninitialised: `uninitialized_buffers`, `initialize_buffers`.

Transformers 5 builds a model on the meta device, and then gives every buffer that is in no checkpoint new memory, with
whatever it held (`PreTrainedModel._move_missing_keys_from_meta_to_device`). Its own classes fill such buffers again.
Remote code that computes cosines, inverse frequencies, positions or slopes in `__init__` computes with garbage: an
index out of bounds, NaN, or wrong outputs without a message. So does any class, Transformers' own too, that somebody
builds on the meta device and gives memory with `to_empty`, as for FSDP. Here the class is built once more, with memory
for its buffers alone, and each buffer is compared with what it should hold.

A buffer that differs may also have been changed on purpose. `initialize_buffers` writes only to one that still holds
the former contents of the memory: while this package is imported, a hook notes what each buffer held when it was
allocated, and its name then, or that it was built on the meta device (`host.loader.note_allocation`).
"""

import copy
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel

from ..host.loader import allocations, loaded_configurations
from ..host.transformers import rotations_after_calls


# A difference of so many units in the last place is rounding, as is this share of a buffer's largest value.
ROUNDING, NOTHING = 8, 1e-9
# Why a buffer is left that may have been written to.
CHANGED = "changed since it was loaded or built, or loaded before hf_relpos was imported"
ABSENT = "not there when the class is built"


class Difference(NamedTuple):
    """A buffer that does not hold what its class computes when it is built.

    Attributes:
        module: module of the buffer.
        attribute: its name there.
        right: what it should hold; None if nobody can know.
        left: why `initialize_buffers` leaves it; empty if it fills it.
    """

    module: nn.Module
    attribute: str
    right: torch.Tensor | None
    left: str


def uninitialized_buffers(model: Any) -> dict[str, torch.Tensor | None]:
    """Return the buffers of a model that do not hold what its code computes for them.

    The class is built once more from the configuration that the model was loaded with. Its parameters are never
    written to, so that this takes no second copy of the weights. Left out are buffers in the checkpoint and those that
    the class does not have when it is built. What a call changes is right as calls leave it, as dynamic RoPE is.

    Args:
        model: a PreTrainedModel, or a module or pipeline with one inside, such as a SentenceTransformer.

    Returns:
        What each of them should hold, by its name in `model`; None if nobody can know, since it is random or computed
        from a weight: one that is uninitialised, or was filled before hf_relpos was imported. Else empty for a sound
        model. A buffer that was changed on purpose is among them.

    Raises:
        TypeError: if there is no PreTrainedModel in `model`.
        ValueError: for remote code that cannot be built from its configuration alone. Buffers of such a class of
            Transformers are None.

    Example:

    ```python
    >>> import hf_relpos  # before the load, so that it sees what buffers hold
    >>> model = AutoModel.from_pretrained("some/remote-code", trust_remote_code=True)
    >>> list(hf_relpos.uninitialized_buffers(model))
    ['encoder.layers.0.attn.rotary_emb.inv_freq']
    ```
    """
    return {name: found.right for name, found in find_differences(model).items()}


def initialize_buffers(model: Any, force: Collection[str] = ()) -> list[str]:
    """Initialise, in place, the buffers that a load or `to_empty` has left uninitialised.

    A buffer that somebody may have changed on purpose, or that cannot be judged, is left as it is, and a warning
    names it. Import hf_relpos before the model is built: else all are left.

    Args:
        model: as of `uninitialized_buffers`.
        force: names of buffers to fill whoever has written to them.

    Returns:
        Names of the buffers that were filled; empty for a sound model, which is unchanged.

    Raises:
        TypeError, ValueError: as of `uninitialized_buffers`; a ValueError for a name in `force` that is not there, or
            whose contents nobody can know. Nothing is changed then.
    """
    found = find_differences(model)
    for name in force:
        if name not in found and not isinstance(_value(module_of(model), name), torch.Tensor):
            raise ValueError(f"force = {name!r}: no such buffer; those that differ: {', '.join(found) or 'none'}")
        if name in found and found[name].right is None:
            raise ValueError(f"force = {name!r}: {found[name].left}; set it yourself")
    filled = [name for name, each in found.items() if not each.left or name in force]
    with torch.no_grad():
        for name in filled:
            _fill(found[name])
    if left := {name: each for name, each in found.items() if name not in filled}:
        reasons = "; ".join(f"{name} ({each.left})" for name, each in left.items())
        forced = [name for name, each in left.items() if each.right is not None]
        kept = f"left as they are, although not known to be those of a new {type(model).__name__}: {reasons}"
        remedy = "load the model again, and fill its buffers before the first call"
        if forced:
            remedy += f"; initialize_buffers(model, force={forced}) overwrites what their code computes anew"
        warnings.warn(f"{kept}. If that is not on purpose, {remedy}", stacklevel=2)
    return filled


def _fill(found: Difference) -> None:
    right, now = found.right, getattr(found.module, found.attribute)
    assert right is not None
    if now.is_meta or now.is_inference() or now.shape != right.shape:
        device = next((each.device for each in found.module.parameters() if not each.is_meta), right.device)
        setattr(found.module, found.attribute, right.to(device if now.is_meta else now.device, now.dtype, copy=True))
    else:
        now.copy_(right)


def find_differences(model: Any) -> dict[str, Difference]:
    """`uninitialized_buffers` with the reason why each is left.

    Raises:
        TypeError, ValueError: as `uninitialized_buffers`.
    """
    return {f"{prefix}{name}": found for prefix, inner in models_in(model) for name, found in _differences_in(inner)}


def module_of(model: Any) -> nn.Module:
    """A module, or that of a pipeline.

    Raises:
        TypeError: for anything else.
    """
    root = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(root, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module, or a pipeline that has one")
    return root


def models_in(model: Any) -> Iterator[tuple[str, PreTrainedModel]]:
    """The outermost models of Transformers inside, with the prefix of their names."""
    root = module_of(model)
    prefixes: list[str] = []
    for name, module in root.named_modules():
        if isinstance(module, PreTrainedModel) and not name.startswith(tuple(prefixes)):
            prefixes.append(f"{name}." if name else "")
            yield prefixes[-1], module
    if not prefixes:
        raise TypeError(f"there is no PreTrainedModel in a {type(model).__name__}; give the loaded model")


def is_stock(kind: type) -> bool:
    """Whether a class builds and initialises itself by code of Transformers or of this package."""
    code = (getattr(getattr(kind, name), "__module__", "") for name in ("__init__", "_init_weights"))
    return all(module.partition(".")[0] in ("transformers", "hf_relpos") for module in code)


def initialised_by_stock(model: PreTrainedModel) -> dict[str, bool]:
    """Whether the innermost model around a module is of a class for which `is_stock` holds, by name of the module."""
    found: dict[str, bool] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        is_model = isinstance(module, PreTrainedModel)
        found[path] = is_stock(type(module)) if is_model else found.get(path.rpartition(".")[0], False)
    return found


def _differences_in(model: PreTrainedModel) -> Iterator[tuple[str, Difference]]:
    candidates = list(_candidates(model))
    if not candidates:
        return
    config, failure = loaded_configurations.get(model, model.config), ""
    try:
        builds = _builds(type(model), config, model.dtype)
    except ValueError as error:
        if not is_stock(type(model)):
            raise
        builds, failure = [], str(error)
    again = None
    for module, attribute, name in candidates:
        now, noted = getattr(module, attribute), allocations.get(module, {}).get(attribute)
        is_root, known_as = model in loaded_configurations, noted.name if noted is not None else ""
        is_moved = known_as != "" and not is_root and not f".{known_as}".endswith(f".{name}")
        origin = known_as if known_as and is_root else name
        expected = [value for each in builds if isinstance(value := _value(each, origin), torch.Tensor)]
        rights = [value for value in expected if not value.is_meta]
        if any(_is_same(now, right) for right in rights):
            continue
        if rights and (called := rotations_after_calls(module, attribute)) is not None and _is_same(now, called):
            continue
        unknown = "" if rights else "computed from a weight" if expected else failure or ABSENT
        if rights:
            again = again or _build(type(model), config, torch.get_default_dtype(), seed=1)
            if not any(torch.equal(right.nan_to_num(), _value(again, origin).nan_to_num()) for right in rights):
                unknown = "drawn at random when it is built"
        is_untouched = now.is_meta or (noted is not None and noted.is_untouched(now))
        if unknown:
            if is_untouched:
                yield name, Difference(module, attribute, None, f"uninitialised, and {unknown}")
            elif module not in allocations and unknown != ABSENT:
                yield name, Difference(module, attribute, None, f"filled where nobody saw it, and {unknown}")
            continue
        right = next((each for each in rights if each.dtype == now.dtype), rights[0])
        left = "it was in another place when it was loaded" if is_moved else ""
        yield name, Difference(module, attribute, right, left if is_untouched else CHANGED)


def _candidates(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str, str]]:
    """Module, attribute and name of the tensors that may have been left uninitialised."""
    stocks = initialised_by_stock(model)
    for path, module in model.named_modules():
        noted = {} if stocks[path] else allocations.get(module, {})
        for attribute, value in (*module._buffers.items(), *vars(module).items()):
            name = f"{path}.{attribute}" if path else attribute
            if not isinstance(value, torch.Tensor) or (attribute in vars(module) and not value.is_meta):
                continue
            is_persistent = attribute in module._buffers and attribute not in module._non_persistent_buffers_set
            if is_persistent and (attribute not in noted or noted[attribute].contents is None):  # it is in the file
                continue
            yield module, attribute, name


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that this thread builds have their parameters on the meta device, where Transformers builds them, too.

    A parameter is moved before its module writes values to it, so that its pages are never touched.
    """
    thread = threading.get_ident()

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None  # as it is
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()


def _builds(kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> list[PreTrainedModel]:
    """A class built in the dtype of the weights, as by a load in that dtype, and in float32, as before a cast."""
    default, builds = torch.get_default_dtype(), []
    if dtype.is_floating_point and dtype != default:
        with suppress(ValueError):  # some functions are not there in half precision
            builds.append(_build(kind, config, dtype))
    return [*builds, _build(kind, config, default)]


def _build(kind: Any, config: PreTrainedConfig, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model with its buffers as its code computes them, and parameters without values.

    Raises:
        ValueError: for a class that cannot be built from its configuration alone.
    """
    config, default = copy.deepcopy(config), torch.get_default_dtype()
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        torch.set_default_dtype(dtype)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), _parameters_on_meta(), torch.no_grad():
            torch.manual_seed(seed)
            model: PreTrainedModel = kind(config)
            return model
    except Exception as error:  # whatever the code of others raises
        reason = f"cannot be built from its configuration alone ({type(error).__name__}: {error})"
        remedy = "load it with the Transformers that its code was written for"
        raise ValueError(f"{kind.__name__} {reason}, so its buffers cannot be checked; {remedy}") from error
    finally:
        torch.set_default_dtype(default)


def _value(model: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    with suppress(AttributeError):
        return getattr(model.get_submodule(path), attribute, None)
    return None


def _is_same(now: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a buffer holds what it should, up to rounding, as far as both have the same places."""
    if now.is_meta or now.dim() != right.dim():
        return not now.is_meta
    part = tuple(slice(0, min(sizes)) for sizes in zip(now.shape, right.shape, strict=True))
    now, right = now[part], right[part].to(now.device)
    if not (now.is_floating_point() or now.is_complex()):
        return torch.equal(now, right.to(now.dtype))
    kinds = [torch.finfo(each.dtype) for each in (now, right) if each.is_floating_point() or each.is_complex()]
    coarse = max(kinds, key=lambda kind: kind.eps)
    wide = torch.promote_types(now.dtype, torch.float64)
    largest = float(right.abs().nan_to_num(0.0, 0.0, 0.0).max()) if right.numel() else 0.0
    floor = max(NOTHING * largest, coarse.tiny * coarse.eps)
    casts = (torch.float16, torch.bfloat16) if right.is_floating_point() else ()  # of the model, and back
    return any(
        torch.allclose(now.to(wide), right.to(kind).to(now.dtype).to(wide), ROUNDING * coarse.eps, floor, True)
        for kind in (right.dtype, *casts)
    )
