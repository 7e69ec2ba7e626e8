"""Find where packed documents begin in a row, from position ids or cumulative lengths."""

import reprlib

import torch
from torch import nn

from .inputs import check_tensor


def packed_position_ids(tokens: torch.Tensor, cu_seq_lens: torch.Tensor) -> torch.Tensor:
    """Position ids of the documents of one packed row, from the output of Transformers' flattening collator.

    Args:
        tokens: (1, L) or (1, L, D); only its shape and device are read.
        cu_seq_lens: starts of the documents, then L, (documents + 1,).

    Returns:
        (1, L), from 0 in every document.

    Raises:
        TypeError: for a value that is not a tensor.
        ValueError: for several rows, and for lengths that do not fit the row (if the host can read them).
    """
    check_tensor("cu_seq_lens_q", cu_seq_lens)
    rows, length = tokens.shape[:2]
    if rows != 1 or cu_seq_lens.dim() != 1 or cu_seq_lens.shape[0] < 2:
        raise ValueError(
            f"cu_seq_lens_q has shape {tuple(cu_seq_lens.shape)} and the input {rows} rows: it describes one row; "
            "give position_ids, which restart with each document"
        )
    if cu_seq_lens.device.type == "cpu" and not torch.compiler.is_compiling():
        if int(cu_seq_lens[-1]) != length:
            raise ValueError(f"cu_seq_lens_q ends at {int(cu_seq_lens[-1])}, and the row has {length} tokens")
        if int(cu_seq_lens[0]) != 0 or bool((cu_seq_lens.diff() < 0).any()):
            raise ValueError(
                f"cu_seq_lens_q = {reprlib.repr(cu_seq_lens.tolist())}: give starts that begin with 0 and rise"
            )
    begins = cu_seq_lens.to(tokens.device)
    indices = torch.arange(length, device=tokens.device)
    return (indices - begins[torch.bucketize(indices, begins[1:], right=True)])[None]


def position_steps(
    position_ids: torch.Tensor, is_token: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The difference of each token's position to that of the previous token, and which tokens have a previous one.

    Args:
        position_ids: (B, L).
        is_token: boolean (B, L), False for padding, which is skipped; None for no padding.

    Returns:
        Steps (B, L), and boolean (B, L). A document begins where a step is not positive.
    """
    if is_token is None:
        steps = nn.functional.pad(position_ids[:, 1:] - position_ids[:, :-1], (1, 0))
        return steps, (torch.arange(position_ids.shape[1], device=position_ids.device) > 0).expand_as(position_ids)
    indices = torch.arange(is_token.shape[1], device=is_token.device)
    last = torch.where(is_token, indices, -1).cummax(-1).values
    previous = nn.functional.pad(last, (1, 0), value=-1)[:, :-1]
    return position_ids - position_ids.gather(1, previous.clamp(min=0)), is_token & (previous >= 0)


def document_numbers(steps: torch.Tensor, follows: torch.Tensor) -> torch.Tensor:
    """The number of each token's document in its row, from 0, (B, L), from the result of `position_steps`."""
    return (follows & (steps <= 0)).long().cumsum(-1)
