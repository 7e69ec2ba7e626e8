"""Rows of random tokens for an encoder, and the comparison of its outputs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .arguments import parameters_of
from .foreign import modules_in
from .shadow import shadow


# Where padding stands.
SIDES = ("right", "left")
# Arguments that ask for keys and values, or XLNet's memory.
MEMORIES = ("use_cache", "use_mems")
# Largest difference, as a share of the largest value: float32 and float64, and half precision.
TOLERANCE, TOLERANCE_OF_HALF = 1e-5, 3e-2


class Probe:
    """Rows of random tokens for an encoder.

    Attributes:
        ids: (B, L).
        real: (B, L), False for padding.
        sides: where padding stands; with two of them rows take turns.
    """

    def __init__(
        self,
        encoder: Any,
        lengths: Iterable[int],
        pads: tuple[int, ...],
        sides: tuple[str, ...],
        trusts_mask: bool = False,
    ) -> None:
        """
        Args:
            lengths: of the rows, the longest first.
            pads: ids of the padding token.
            trusts_mask: whether any token may stand there, since the mask alone says what is padding.
        """
        sizes, self.sides = list(lengths), sides
        generator = torch.Generator().manual_seed(0)
        config = getattr(encoder, "config", None)
        words = vocabulary_of(encoder)
        columns, length = torch.arange(sizes[0]), sizes[0]
        rows = [
            columns < size if sides[row % len(sides)] == "right" else columns >= length - size
            for row, size in enumerate(sizes)
        ]
        self.real = torch.stack(rows)
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

    def differences(self, found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
        """By side the largest difference of outputs as a share of the largest value."""
        worst, turns = differences(found, expected, self.real), len(self.sides)
        return {side: float(worst[index::turns].max()) for index, side in enumerate(self.sides)}

    def inputs(self, encoder: Any) -> dict[str, Any]:
        """Arguments of the forward of an encoder, or of a model around it."""
        names, _ = parameters_of(type(encoder).forward)
        given: dict[str, Any] = {"input_ids": self.ids.clone(), "attention_mask": self.real.long()}
        given |= {name: False for name in MEMORIES if name in names}
        return given


def vocabulary_of(encoder: Any) -> int:
    """How many tokens an encoder knows; of a module that does not say so, by its first table of embeddings.

    Raises:
        StopIteration: if it has none.
    """
    try:
        table = encoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        table = None
    if not isinstance(getattr(table, "weight", None), torch.Tensor):
        table = next(part for part in encoder.modules() if isinstance(part, nn.Embedding))
    count: int = table.weight.shape[0]
    return count


def padding_tokens(tokenizer: Any, encoder: Any) -> tuple[int, ...]:
    """Ids of the padding token: of the configuration, and of the tokenizer that came with the model, if any.

    Where neither names one, those that people take in its place: zero, and the end of a text.
    """
    config = getattr(encoder, "config", None)
    sources = (getattr(config, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None))
    named = [each for each in sources if isinstance(each, int) and each >= 0]
    if named:
        return tuple(dict.fromkeys(named))
    ends = getattr(config, "eos_token_id", None)
    found = [0, *(ends if isinstance(ends, list | tuple) else (ends,))]
    return tuple(dict.fromkeys(each for each in found if isinstance(each, int)))


def outputs_of(model: Any, inputs: dict[str, Any], *args: Any, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Tensors of what a model returns, by names; with other random numbers than a call without a seed draws."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        if seed is not None:
            torch.manual_seed(seed)
        return dict(_tensors("", model(*map(_copied, args), **_copied(inputs))))


def _copied(inputs: Any) -> Any:
    """Inputs that a model may change."""
    if isinstance(inputs, torch.Tensor):
        return inputs.clone()
    return {name: _copied(value) for name, value in inputs.items()} if isinstance(inputs, dict) else inputs


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}", each)
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}.{index}", each)


def differences(found: dict[str, Any], expected: dict[str, Any], real: torch.Tensor) -> torch.Tensor:
    """The largest difference in each row as a share of the largest value, (B,); infinite where outputs are others.

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


def tolerance_of(module: nn.Module) -> float:
    """The largest difference that is rounding, in the dtype of a module's parameters."""
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
    return TOLERANCE if dtype in (torch.float32, torch.float64) else TOLERANCE_OF_HALF


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a shadow in training mode with dropout 0."""
    made: nn.Module = shadow(model).train()
    for part in modules_in(made):
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for holder in filter(None, (part, vars(part).get("config"))):
            for name, value in list(vars(holder).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
    return made
