"""Run copies of a user's model in float32, without writes to the parameters that they share."""

from contextlib import suppress
from typing import Any, Self

import torch
from torch import nn

from ..host.torch import DispatchMode, map_tensors, written_tensors
from ..products.cpu_gemm import HALF
from ..products.weight_cache import PRIVATE
from .foreign import modules_in


# Layers that compare the dtypes of their input and weights, before an operation can cast them.
CHECKING = (nn.RNNBase, nn.modules.conv._ConvNd)


class WriteError(ValueError):
    """A forward writes to the parameters of its model."""


class Guard(DispatchMode):
    """Refuses operations of this thread that would change a parameter of a model.

    Writes by NumPy or by others' kernels are not seen. A parameter that is given other memory (`weight.data = …`) gets
    back what it had.

    A model in half precision computes in float32, since its rounding would hide small differences. Operations cast the
    weights that they read, so that this takes the memory of one weight.
    """

    def __init__(self, model: nn.Module, own_dtype: bool = False) -> None:
        """
        Args:
            model: a copy, whose convolutions and recurrent layers get weights of their own in float32.
            own_dtype: whether it computes in half precision if its weights have that.
        """
        super().__init__()
        self.casts = not own_dtype and is_half(model)
        self.names: dict[int, str] = {}  # by address of their memory
        self.held: list[tuple[str, nn.Parameter, torch.Tensor]] = []
        self.written = ""
        for name, each in model.named_parameters():
            with suppress(NotImplementedError, RuntimeError, ValueError):  # of tensors without memory of their own
                if address := each.untyped_storage().data_ptr():
                    self.names[address] = name
                    self.held.append((name, each, each.data))
        for part in modules_in(model) if self.casts else ():
            if isinstance(part, CHECKING):
                widen(part)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """
        Raises:
            WriteError: if there was a write, also where the model has caught the error, or raised another.
        """
        super().__exit__(kind, error, trace)
        for name, parameter, data in self.held:
            if not parameter.is_set_to(data):
                parameter.data, self.written = data, name
        if self.written:
            raise WriteError(f"its forward writes to its weights ({self.written})") from error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if self.casts:
            if func is torch.ops.aten.embedding.default:  # of a large table few rows are read
                return func(*args, **given[1]).float()
            if not any(each.dtype in HALF for each in written_tensors(func, *given)):
                given = map_tensors(torch.Tensor, in_float32, given)
            if given[1].get("dtype") in HALF:
                given[1]["dtype"] = torch.float32
        if name := next(filter(None, map(self._name_of, written_tensors(func, *given))), ""):
            tried = map_tensors(torch.Tensor, torch.clone, given)
            func(*tried[0], **tried[1])
            if not all(map(torch.equal, written_tensors(func, *given), written_tensors(func, *tried))):
                self.written = name
                raise WriteError(f"its forward writes to its weights ({name})")
        return func(*given[0], **given[1])

    def _name_of(self, value: torch.Tensor) -> str:
        """Return the name of the parameter that shares a tensor's memory; "" for none."""
        with suppress(NotImplementedError, RuntimeError):
            return self.names.get(value.untyped_storage().data_ptr(), "")
        return ""


def widen(part: Any) -> None:
    """Cast weights and buffers of a part of a copy to float32."""
    for own in (part._parameters, part._buffers):
        halves = {name: each for name, each in own.items() if each is not None and each.dtype in HALF}
        for name, each in halves.items():
            own[name] = nn.Parameter(each.float(), False)
            setattr(own[name], PRIVATE, True)
    if isinstance(part, nn.RNNBase):
        part._flat_weights = [part._parameters[name] for name in part._flat_weights_names]


def in_float32(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor; in float32 if it has half precision."""
    return value.float() if value.dtype in HALF else value


def is_half(model: nn.Module) -> bool:
    """Whether a model has parameters in half precision."""
    return any(each.dtype in HALF for each in model.parameters())
