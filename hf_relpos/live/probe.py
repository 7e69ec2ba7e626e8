"""Probe batches: sequences of random tokens for an encoder, and the comparison of its outputs."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .arguments import parameters_of
from .foreign import modules_in
from .guard import Guard
from .shadow import shadow


# Arguments that ask for keys and values, or XLNet's memory. The third-party code may not look at the configuration.
MEMORIES = ("use_cache", "use_mems")
# Where padding stands.
SIDES: tuple[str, ...] = ("right", "left")
# Largest difference, as a share of the largest value. Models in half precision are compared in float32; then in their
# own dtype, where rounding is this large.
TOLERANCE, TOLERANCE_OF_HALF = 1e-5, 3e-2


class Probe:
    """A padded batch of random tokens for an encoder.

    Attributes:
        ids: (B, L).
        real: (B, L), False for padding.
        inputs: arguments of the forward of an encoder.
        sides: where padding stands; with two of them rows take turns.
    """

    def __init__(
        self,
        encoder: Any,
        lengths: Sequence[int],
        pads: tuple[int, ...],
        sides: tuple[str, ...],
        trusts_mask: bool = False,
        length: int | None = None,
    ) -> None:
        """
        Args:
            lengths: of the rows, the longest first.
            pads: ids of the padding token.
            trusts_mask: whether any token may stand there, since the mask alone says what is padding.
            length: L; None for the longest row's, which is the first.
        """
        generator = torch.Generator().manual_seed(0)
        config = getattr(encoder, "config", None)
        words, length = vocabulary_of(encoder), length or lengths[0]
        columns, sizes = torch.arange(length), torch.tensor(lengths)[:, None]
        is_left = torch.tensor([sides[row % len(sides)] == "left" for row in range(len(lengths))])[:, None]
        self.real, self.sides = torch.where(is_left, columns >= length - sizes, columns < sizes), sides
        special = [*pads, *(getattr(config, name, None) for name in ("eos_token_id", "bos_token_id", "unk_token_id"))]
        common = torch.arange(min(words // 4, 1000), words)
        plain = common[~torch.isin(common, torch.tensor([each for each in special if isinstance(each, int)]))]
        common = plain if len(plain) else common
        ids = common[torch.randint(len(common), self.real.shape, generator=generator)]
        hidden = ids.clone() if trusts_mask else torch.full_like(ids, pads[0])
        mask_token = getattr(config, "mask_token_id", None)
        if isinstance(mask_token, int) and mask_token < words:
            ids[0, columns == length - 2] = mask_token  # encoders that look for it do so in each row by itself
            if trusts_mask:
                hidden[:, ::2] = mask_token  # ESM-2 counts those that the mask hides, too
        self.ids = torch.where(self.real, ids, hidden)
        names, _ = parameters_of(type(encoder).forward)
        self.inputs: dict[str, Any] = {"input_ids": self.ids, "attention_mask": self.real.long()}
        self.inputs |= {name: False for name in MEMORIES if name in names}

    def agreement(
        self, model: Any, expected: dict[str, Any], *inputs: Any, everywhere: bool = False, own_dtype: bool = False
    ) -> tuple[tuple[str, ...], float]:
        """Return the padding sides on which the outputs match.

        Args:
            everywhere: at padding, too.
            own_dtype: as of `outputs_of`.

        Returns:
            The sides, and the largest difference there, as a share of the largest value; on no side, the least of one.
        """
        try:
            worst = differences(outputs_of(model, *inputs, own_dtype=own_dtype), expected, self.real | everywhere)
        except Exception:  # of third-party code, which may expect what the model no longer gives
            return (), float("inf")
        by_side = {side: float(worst[at :: len(self.sides)].max()) for at, side in enumerate(self.sides)}
        tolerance = TOLERANCE_OF_HALF if own_dtype else TOLERANCE
        sides = tuple(side for side in self.sides if by_side[side] <= tolerance)
        return sides, max(by_side[side] for side in sides) if sides else min(by_side.values())


def vocabulary_of(encoder: Any) -> int:
    """Return the vocabulary size of an encoder, from its configuration or its first embedding table.

    Raises:
        StopIteration: if it has none.
    """
    try:
        table = encoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        table = None
    if not isinstance(getattr(table, "weight", None), torch.Tensor):
        table = next(part for part in encoder.modules() if isinstance(part, nn.Embedding))
    return int(table.weight.shape[0])


def padding_tokens(tokenizer: Any, encoder: Any) -> tuple[int, ...]:
    """Return the pad token ids of the configuration and of the tokenizer that came with the model.

    Where neither names one, those that people take in its place: zero, and the end of a text.
    """
    config = getattr(encoder, "config", None)
    sources = (getattr(config, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None))
    ends = getattr(config, "eos_token_id", None)
    others = [0, *(ends if isinstance(ends, list | tuple) else (ends,))]
    found = [each for each in sources if isinstance(each, int) and each >= 0] or others
    return tuple(dict.fromkeys(each for each in found if isinstance(each, int)))


def outputs_of(
    model: Any, inputs: dict[str, Any], *args: Any, seed: int | None = None, own_dtype: bool = False
) -> dict[str, torch.Tensor]:
    """Return the output tensors of a copy of a model by name; in float32 for half precision.

    Args:
        seed: for other random numbers than a call without a seed draws.
        own_dtype: whether one in half precision computes in that.

    Raises:
        WriteError: if its forward writes to its parameters, which it then has not done.
    """
    inputs, args = copy.deepcopy((inputs, args))  # which the model may change
    with (
        Guard(model, own_dtype),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        torch.autocast("cpu", enabled=False),
    ):
        if seed is not None:
            torch.manual_seed(seed)
        return dict(tensors_in(model(*args, **inputs)))


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Return the tensors in the outputs of a model, with names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping | tuple | list):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from tensors_in(each, f"{name}.{key}")


def differences(found: dict[str, Any], expected: dict[str, Any], real: torch.Tensor) -> torch.Tensor:
    """Return the largest relative difference of each sequence, (B,); infinite for outputs of other shapes or names.

    Tensors (B, L, …) are compared at tokens, all others as a whole.
    """
    worst = torch.zeros(len(real), dtype=torch.float64)
    if found.keys() != expected.keys():
        return worst + float("inf")
    for name, want in expected.items():
        got = found[name]
        if got.shape != want.shape or not want.numel():
            return worst + float("inf")
        got, want = (each.detach().double() for each in (got, want))
        if want.shape[:2] == real.shape:
            hidden = ~real.reshape(*real.shape, *(1,) * (want.dim() - 2))
            got, want = got.masked_fill(hidden, 0), want.masked_fill(hidden, 0)
        apart = (got - want).abs().nan_to_num(float("inf")) / want.abs().max().clamp(min=1e-30)
        if want.shape[:1] == real.shape[:1]:
            worst = worst.maximum(apart.reshape(len(real), -1).amax(1))
        else:
            worst = worst.maximum(apart.max())
    return worst


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a weight-sharing copy in training mode with dropout 0."""
    made: nn.Module = shadow(model).train()
    for part in modules_in(made):
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for holder in (part, vars(part).get("config")):
            # classes and Python files are no configurations of this copy alone
            fields = {} if isinstance(holder, type | ModuleType) else getattr(holder, "__dict__", {})
            for name, value in fields.items():
                if "drop" in name and isinstance(value, float):
                    fields[name] = 0.0  # also in frozen dataclasses
    return made
