"""Several processes of one conversion, as `accelerate launch` starts them: each reads its part of the text."""

import os
from collections.abc import Callable

import torch
from accelerate import PartialState


def processes() -> PartialState:
    """This process among the others; without a launcher it is alone."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # accelerate does not connect processes on a machine without an accelerator unless it is told so
    return PartialState(cpu=True) if launched and not torch.accelerator.is_available() else PartialState()


def sum_over(state: PartialState) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that adds a tensor up over processes; of a process alone it is the tensor itself."""
    if state.num_processes == 1:
        return lambda tensor: tensor

    def total(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(state.device, copy=True)
        torch.distributed.all_reduce(moved)
        return moved.to(tensor.device)

    return total
