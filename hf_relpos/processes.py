"""Several processes of one conversion, as `accelerate launch` starts them: each reads its part of the text."""

import os

import torch
from accelerate import PartialState


def process_state() -> PartialState:
    """The state of this process; without a launcher it is the only one."""
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    # accelerate connects processes on a machine without an accelerator only if `cpu` is set
    return PartialState(cpu=True) if launched and not torch.accelerator.is_available() else PartialState()


def compute_device(requested: str | None = None) -> torch.device:
    """The device to compute on, which must have float64: that of this process, or the requested one.

    Args:
        requested: such as "cpu" or "cuda:1"; None for the accelerator of this process where there is one that has
            float64, else the CPU.

    Raises:
        ValueError: for one that cannot be used.
    """
    own = process_state().device
    if requested is None:
        return torch.device("cpu") if _unusable(own) else own
    try:
        device = torch.device(requested)
        reason = _unusable(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error)
    if reason:
        raise ValueError(
            f"device = {requested!r}: cannot be computed on ({reason.partition(chr(10))[0]}); give another one, such "
            "as 'cpu', or leave it out"
        )
    return own if device.index is None and device.type == own.type else device


def _unusable(device: torch.device) -> str:
    """Why float64 cannot be computed on a device; empty where it can."""
    try:
        torch.ones((), dtype=torch.float64, device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        return str(error) or type(error).__name__
    return ""
