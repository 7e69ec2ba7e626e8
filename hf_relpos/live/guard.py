"""The mode in which copies of a user's model run: nothing is written to the parameters that they share with it."""

from contextlib import suppress
from typing import Any, Self

import torch
from torch import nn

from ..host.torch import DispatchMode, map_tensors, written_tensors


class WriteError(ValueError):
    """A forward writes to the parameters of its model."""


class Guard(DispatchMode):
    """Operations of this thread that would change a parameter of a model are refused before they begin.

    Writes by NumPy or by others' kernels are not seen. A parameter that is given other memory (`weight.data = …`) gets
    back what it had.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: dict[int, str] = {}  # by address of their memory
        self.held: list[tuple[str, nn.Parameter, torch.Tensor]] = []
        self.written = ""
        for name, each in model.named_parameters():
            with suppress(NotImplementedError, RuntimeError, ValueError):  # of tensors without memory of their own
                if address := each.untyped_storage().data_ptr():
                    self.names[address] = name
                    self.held.append((name, each, each.data))

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
        if name := next(filter(None, map(self._name_of, written_tensors(func, *given))), ""):
            tried = map_tensors(torch.Tensor, torch.clone, given)
            func(*tried[0], **tried[1])
            if not all(map(torch.equal, written_tensors(func, *given), written_tensors(func, *tried))):
                self.written = name
                raise WriteError(f"its forward writes to its weights ({name})")
        return func(*given[0], **given[1])

    def _name_of(self, value: torch.Tensor) -> str:
        """Of the parameter with the memory of a tensor; "" for none."""
        with suppress(NotImplementedError, RuntimeError):
            return self.names.get(value.untyped_storage().data_ptr(), "")
        return ""
