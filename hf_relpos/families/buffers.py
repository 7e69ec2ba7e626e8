"""Tables of remote code that Transformers 5 leaves unfilled: `unfilled_buffers` finds them, `fill_buffers` fills them.

Transformers 5 builds a model without memory, on the meta device, and then gives every buffer that is in no checkpoint
new memory, with whatever it held (`PreTrainedModel._move_missing_keys_from_meta_to_device`). Its own classes fill such
buffers again. Remote code that computes cosines, inverse frequencies, positions or slopes in `__init__` computes with
garbage: an index out of bounds, NaN, or wrong outputs without a word. Here the class is built once more, with memory
for its buffers alone, and each buffer is compared with what it should hold.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from .family import module_of


# Buffers in a state dict that newer checkpoints leave out, and that hold the same in every model.
COUNTED = ("position_ids", "token_type_ids")
# Largest difference that is rounding, as a share of the largest value: some tables are computed in half precision.
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-5}
ROUNDING_OF_HALF = 2e-2


def unfilled_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Buffers of a loaded model that do not hold what its code computes for them.

    The class is built once more from the configuration as it is now. Its parameters are never written to, so that this
    takes no second copy of the weights. Buffers in the checkpoint are not looked at, nor those that the class does not
    have when it is built.

    Args:
        model: a PreTrainedModel, or a module or pipeline with one inside, such as a SentenceTransformer.

    Returns:
        What each of them should hold, by its name in `model`; empty for a sound model.

    Raises:
        TypeError: if there is no PreTrainedModel in `model`.
        ValueError: for a class that cannot be built from its configuration alone; for a buffer that is wrong, and
            random or changed in shape by a forward, so that it cannot be rebuilt.

    Example:

    ```python
    >>> model = AutoModel.from_pretrained("some/remote-code", trust_remote_code=True)
    >>> list(hf_relpos.unfilled_buffers(model))
    ['encoder.layers.0.attn.rotary_emb.inv_freq']
    ```
    """
    found: dict[str, torch.Tensor] = {}
    for prefix, inner in _models_in(model):
        fresh = _built_again(inner)
        wrong = dict(_compare(inner, fresh))
        if wrong:
            _check_not_random(inner, wrong)
        found.update({f"{prefix}{name}": right for name, right in wrong.items()})
    return found


def fill_buffers(model: Any) -> list[str]:
    """Give the buffers that Transformers 5 has left unfilled what the model's code computes for them, in place.

    Args:
        model: as of `unfilled_buffers`.

    Returns:
        Names of the buffers that were filled; empty for a sound model, which is unchanged.

    Raises:
        TypeError, ValueError: as of `unfilled_buffers`, before anything is changed.
    """
    found, root = unfilled_buffers(model), module_of(model, "fill_buffers")
    with torch.no_grad():
        for name, right in found.items():
            path, _, last = name.rpartition(".")
            module = root.get_submodule(path)
            now = getattr(module, last)
            if now.is_meta:
                setattr(module, last, right.clone())
            else:
                now.copy_(right)
    return list(found)


def _models_in(model: Any) -> Iterator[tuple[str, PreTrainedModel]]:
    """The outermost models of Transformers inside, with the prefix of their names."""
    root = module_of(model, "unfilled_buffers")
    names: list[str] = []
    for name, module in root.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer in names)
        if isinstance(module, PreTrainedModel) and not inside:
            names.append(name)
            yield f"{name}." if name else "", module
    if not names:
        raise TypeError(f"there is no PreTrainedModel in a {type(model).__name__}; give the loaded model")


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


def _built_again(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The same class with its buffers as its code computes them, and parameters without values."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind = type(model)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), _parameters_on_meta(), torch.no_grad():
            torch.manual_seed(seed)
            return kind(config)
    except Exception as error:  # whatever the code of others raises
        raise ValueError(
            f"{kind.__name__} cannot be built from its configuration alone ({type(error).__name__}: {error}), so that "
            "nobody knows what its buffers should hold; load it with the Transformers that its code was written for"
        ) from error


def _compare(model: PreTrainedModel, fresh: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of what is wrong in a model, and what it should be."""
    others = dict(fresh.named_modules())
    for path, module in model.named_modules():
        other = others.get(path)
        if other is None:
            continue
        left = module._non_persistent_buffers_set
        names = [name for name in module._buffers if name in left or name in COUNTED]
        # tensors that are no buffers stay without memory
        names += [name for name, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta]
        for name in names:
            now, right = getattr(module, name), getattr(other, name, None)
            if isinstance(now, torch.Tensor) and isinstance(right, torch.Tensor) and not right.is_meta:
                full = f"{path}.{name}" if path else name
                if not _is_filled(full, now, right):
                    yield full, right


def _is_filled(name: str, now: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a buffer holds what it should.

    Raises:
        ValueError: if it does not, and has another shape than it was made with.
    """
    if now.is_meta:
        return False
    shape = now.shape
    if shape != right.shape:  # a forward has made it longer, or shorter
        if now.dim() != right.dim():
            return True
        part = tuple(slice(0, min(sizes)) for sizes in zip(shape, right.shape, strict=True))
        now, right = now[part], right[part]
    right = right.to(now.device)
    if now.is_floating_point() or now.is_complex():
        bound = ROUNDING.get(now.dtype, ROUNDING_OF_HALF)
        bound = bound * float(right.abs().nan_to_num(0.0, 0.0, 0.0).max()) if right.numel() else 0.0
        same = torch.allclose(now.to(right.dtype), right, rtol=0.0, atol=bound, equal_nan=True)
    else:
        same = torch.equal(now.to(right.dtype), right)
    if not same and shape != now.shape:
        raise ValueError(
            f"{name} is wrong, and a forward has changed its shape to {tuple(shape)}; load the model again, and fill "
            "its buffers before the first call"
        )
    return same


def _check_not_random(model: PreTrainedModel, wrong: dict[str, torch.Tensor]) -> None:
    """Reject buffers that are others each time the class is built: `wrong` has what one of them holds."""
    again = _built_again(model, seed=1)
    for name, right in wrong.items():
        path, _, last = name.rpartition(".")
        if not torch.equal(getattr(again.get_submodule(path), last).nan_to_num(), right.nan_to_num()):
            raise ValueError(
                f"{name} is drawn at random when {type(model).__name__} is built, and is in no checkpoint: what it "
                "held in training is lost"
            )
