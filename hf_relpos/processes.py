"""Several processes of one conversion, as `accelerate launch` starts them: each reads its part of the text."""

import os
from collections.abc import Callable

import torch
from accelerate import PartialState


# Sums a tensor over processes; the result may be the tensor itself.
Reduce = Callable[[torch.Tensor], torch.Tensor]


def local_sum(tensor: torch.Tensor) -> torch.Tensor:
    """`Reduce` of a single process."""
    return tensor


def process_state() -> PartialState:
    """The state of this process; without a launcher it is the only one."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # accelerate connects processes on a machine without an accelerator only if `cpu` is set
    return PartialState(cpu=True) if launched and not torch.accelerator.is_available() else PartialState()


def sum_over(state: PartialState) -> Reduce:
    """The sum over the processes of `state`."""
    if state.num_processes == 1:
        return local_sum

    def total(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(state.device, copy=True)
        torch.distributed.all_reduce(moved)
        return moved.to(tensor.device)

    return total
