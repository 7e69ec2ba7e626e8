"""Kernels show that they are right before a model gets their numbers: once in a process for every kind of call.

The kernels are proven in Triton's interpreter, but what a driver, a device or another version of Triton makes of them
is known only where they run. So the first call of a kind is preceded by a small random one of that kind, forward and
backward, beside `formula.attend` in the same dtype and in float64. It takes milliseconds, and the time to compile,
which the call would take anyway. Kernels that are further from float64 than rounding explains, or that raise, are out
for that kind for as long as the process lives.

Not covered: calls so large that `ops.chunks` divides their queries, which run the same kernels piece by piece.
"""

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers.utils import logging

from ...call import AttentionCall
from ...context import AttentionContext
from ...formula import Table, Terms, attend, content_vectors, position_values
from ...sliding_window import SlidingWindowMask
from ...toeplitz import to_toeplitz
from . import dropout, ops
from .window import kernel_mask


logger = logging.get_logger(__name__)

# Queries and keys of the small calls: beyond one tile with keys before the first query; and whole tiles.
LENGTHS = ((150, 170), (256, 256))
# Under a window: so long that rows of pair matrices overlap in memory (`ops.numbers_per_row`).
WINDOW_LENGTHS = ((900, 1030), (1024, 1024))
BATCH, HEADS, CLIP, DROPOUT, SEED = 2, 2, 9, 0.25, 20
WINDOW, GLOBAL_TOKENS = 7, (0, 9)
# Kernels may be this many times as far from float64 as eager, or as the precision below.
TIMES = 4.0
# Of one result after rounding, relative; in float32 with room for the device's own exp2.
PRECISIONS = {"ieee": 2e-6, "tf32": 2.0**-10, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Kind(NamedTuple):
    """What decides which code of the kernels a call runs.

    Attributes:
        device: with its index.
        size: of heads.
        terms: letters of the formula, with "1" after a table that all heads share, and "allow" for hidden offsets.
        mask: "none", "keys" (the same for every query), "window", "window and keys", or "pairs" (packed sequences, and
            windows that are no narrow band).
        precision: of products of float32, "ieee" or "tf32".
    """

    device: torch.device
    dtype: torch.dtype
    size: int
    terms: tuple[str, ...]
    mask: str
    causal: bool
    dropout: bool
    precision: str

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        words = [f"{dtype} on {self.device}", f"heads of {self.size}", f"terms {' '.join(self.terms) or 'none'}"]
        if self.mask != "none":
            words.append(f"a {self.mask}" if "window" in self.mask else f"a mask of {self.mask}")
        return ", ".join(words + ["causal"] * self.causal + ["dropout"] * self.dropout)


@dataclass(frozen=True)
class Outcome:
    """What a check found; `words` say it to a user."""

    passed: bool
    words: str


OUTCOMES: dict[Kind, Outcome] = {}
_lock = threading.Lock()


def kind_of(call: AttentionCall) -> Kind:
    """The kind of a call that the kernels take."""
    terms, mask, device = call.terms, kernel_mask(call), call.device
    if device.type == "cuda" and device.index is None:
        device = torch.device(device.type, torch.cuda.current_device())
    groups = {
        "A": terms.query_table,
        "B": terms.key_table,
        "c": (*terms.scaled_bias, *terms.bias),
        "V": terms.value_table,
        "allow": terms.allow,
    }
    letters = [
        letter + "1" * all(table.rows.shape[0] == 1 for table in tables) for letter, tables in groups.items() if tables
    ]
    if terms.content_bias is not None:
        letters.append("u")
    return Kind(
        device,
        call.dtype,
        call.query.shape[-1],
        tuple(letters),
        _kind_of_mask(mask),
        mask.is_causal if isinstance(mask, SlidingWindowMask) else call.is_causal,
        call.dropout > 0,
        ops.precision(device),
    )


def _kind_of_mask(mask: torch.Tensor | SlidingWindowMask | None) -> str:
    if isinstance(mask, SlidingWindowMask):
        return "window" if mask.is_token is None else "window and keys"
    return "none" if mask is None else "keys" if ops.is_mask_of_keys(mask) else "pairs"


def check(kind: Kind, attention: Callable[..., torch.Tensor]) -> Outcome:
    """The outcome for a kind, from a check now if there was none; a failure is logged.

    It runs in a thread of its own, which knows nothing of the caller's modes: autocast, inference, hooks of activation
    checkpointing, fake tensors, a default device. Random states stay as they are.

    Args:
        attention: as `backend.attention`.

    Raises:
        torch.OutOfMemoryError: of the device, which says nothing of the kernels.
    """
    with _lock:
        if kind not in OUTCOMES:
            found: list[Outcome | torch.OutOfMemoryError] = []
            thread = threading.Thread(target=lambda: found.append(_try(kind, attention)), name="hf_relpos self-check")
            thread.start()
            thread.join()
            if isinstance(found[0], torch.OutOfMemoryError):
                raise found[0]
            OUTCOMES[kind] = found[0]
            if not found[0].passed:
                logger.warning(
                    f"The Triton kernels of attention failed their check ({kind}): {found[0].words}. This process "
                    "computes such calls without them. HF_RELPOS_KERNELS=0 leaves the kernels out from the start."
                )
        return OUTCOMES[kind]


def _try(kind: Kind, attention: Callable[..., torch.Tensor]) -> Outcome | torch.OutOfMemoryError:
    on_device = torch.cuda.device(kind.device) if kind.device.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device:
            sizes = WINDOW_LENGTHS if "window" in kind.mask else LENGTHS
            cases = [(by_row, *lengths) for by_row in _forms(kind) for lengths in sizes]
            return max((_compare(kind, attention, *case) for case in cases), key=_by_ratio)[1]
    except torch.OutOfMemoryError as error:
        return error
    except Exception as error:  # Triton's are of no kind of their own
        lines = str(error).strip().splitlines() or [""]
        return Outcome(False, f"{type(error).__name__}: {lines[-1]}")


def _forms(kind: Kind) -> tuple[bool, ...]:
    """Whether tables are read by row: both ways, for calls of one kind may be of either."""
    return (False, True) if any(term[0] in "ABV" for term in kind.terms) else (False,)


def _by_ratio(found: tuple[float, Outcome]) -> float:
    return found[0] if math.isfinite(found[0]) else math.inf


def _compare(
    kind: Kind, attention: Callable[..., torch.Tensor], by_row: bool, length: int, keys: int
) -> tuple[float, Outcome]:
    """Error ÷ limit of the output or gradient that is worst, and the outcome that follows."""
    case = _Case(kind, by_row, length, keys)
    exact = case.results(torch.float64, case.by_formula)
    eager = case.results(kind.dtype, case.by_formula)
    ours = case.results(kind.dtype, lambda leaves: case.by_kernels(leaves, attention))
    unit = PRECISIONS[kind.precision if kind.dtype == torch.float32 else kind.dtype]
    worst: tuple[float, Outcome] = (-1.0, Outcome(True, ""))
    for name, truth in exact.items():
        error, usual = (_distance(results[name], truth) for results in (ours, eager))
        ratio = error / (TIMES * max(usual, unit))
        if not ratio <= worst[0]:
            what = "the output" if name == "out" else f"the gradient of {name}"
            words = f"{what} is off by {error:.1e} of its size, with eager by {usual:.1e}"
            worst = ratio, Outcome(ratio <= 1, words)
        if not math.isfinite(ratio):
            break
    return worst


def _distance(result: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of the truth."""
    return float((result.double() - truth).norm() / truth.norm().clamp(min=1e-30))


class _Case:
    """A random call of a kind."""

    def __init__(self, kind: Kind, by_row: bool, length: int, keys: int):
        self.kind, self.by_row, self.start = kind, by_row, keys - length
        self.context = AttentionContext(length, keys, self.start, device=kind.device)
        self.random = torch.Generator().manual_seed(SEED)
        self.leaves = {
            "query": self.normal(BATCH, HEADS, length, kind.size),
            "key": self.normal(BATCH, HEADS, keys, kind.size),
            "value": self.normal(BATCH, HEADS, keys, kind.size),
        }
        for term in kind.terms:
            letter, heads = term.removesuffix("1"), 1 if term.endswith("1") else HEADS
            if letter == "u":
                self.leaves["u"] = self.normal(HEADS, kind.size)
            elif letter == "c":
                self.leaves["c"] = self.normal(heads, 2 * CLIP + 1)
            elif letter != "allow":
                self.leaves[letter] = 0.5 * self.normal(heads, 2 * CLIP + 1, kind.size)
        self.allow = None
        self.mask: torch.Tensor | SlidingWindowMask | None = None
        if {"allow", "allow1"} & set(kind.terms):
            heads = 1 if "allow1" in kind.terms else HEADS
            self.allow = (torch.rand(heads, 2 * CLIP + 1, generator=self.random) > 0.25).to(kind.device)
        if "window" in kind.mask:
            self.mask = self.band()
        elif kind.mask != "none":
            rows = 1 if kind.mask == "keys" else length
            mask = torch.rand(BATCH, 1, rows, keys, generator=self.random) > 0.25
            mask[1, :, :, keys // 3 :] = False  # padding
            mask[1, :, 0] = False  # and a query that sees no key, if not all of them
            self.mask = mask.to(kind.device)
        self.dropout = round(DROPOUT * 65536) if kind.dropout else 0
        self.seed = torch.tensor([SEED], device=kind.device) if kind.dropout else None
        self.gradient = self.normal(BATCH, length, HEADS, kind.size)

    def band(self) -> SlidingWindowMask:
        """A window; with keys, the one row begins and the other ends with padding."""
        keys, device = self.context.key_length, self.kind.device
        is_token, index = None, None
        if self.kind.mask == "window and keys":
            key = torch.arange(keys, device=device)
            begins = torch.tensor([[3], [0]], device=device)
            is_token, index = (key >= begins) & ((key < keys // 3) | (begins > 0)), key - begins
        return SlidingWindowMask(
            self.context.query_length,
            keys,
            WINDOW,
            device,
            self.start,
            GLOBAL_TOKENS,
            self.kind.causal,
            index_in_document=index,
            is_token=is_token,
        )

    def normal(self, *shape: int) -> torch.Tensor:
        """Numbers that the dtype of the call can hold, in float64."""
        numbers = torch.randn(shape, generator=self.random, dtype=torch.float64)
        return numbers.to(self.kind.dtype).to(self.kind.device, torch.float64)

    def results(
        self, dtype: torch.dtype, run: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The output, as "out", and the gradients by name."""
        leaves = {name: leaf.to(dtype, copy=True).requires_grad_() for name, leaf in self.leaves.items()}
        out = run(leaves)
        gradients = torch.autograd.grad(out, list(leaves.values()), self.gradient.to(dtype))
        return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}

    def terms(self, leaves: dict[str, torch.Tensor]) -> Terms:
        def row_of(r: torch.Tensor) -> torch.Tensor:
            return r.clamp(-CLIP, CLIP) + CLIP

        A, B, c, V = ((Table(leaves[letter], row_of),) if letter in leaves else () for letter in "ABcV")
        allow = () if self.allow is None else (Table(self.allow, row_of),)
        return Terms(query_table=A, key_table=B, bias=c, value_table=V, content_bias=leaves.get("u"), allow=allow)

    def by_kernels(self, leaves: dict[str, torch.Tensor], attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        """(B, L, H, d)."""
        terms = self.terms(leaves)
        content, query, key = content_vectors(leaves["query"], leaves["key"], terms, self.context)
        form = to_toeplitz(terms, self.context, query, by_row=self.by_row)
        dropout = self.dropout / 65536
        causal = self.kind.causal and not isinstance(self.mask, SlidingWindowMask)  # a window knows it
        return attention(content, query, key, leaves["value"], form, self.start, self.mask, causal, dropout, self.seed)

    def by_formula(self, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        """(B, L, H, d): with the weights that the kernels drop, and zeros where a query sees no key."""
        query, key, value = (leaves[name] for name in ("query", "key", "value"))
        terms, mask = self.terms(leaves), self.mask
        if isinstance(mask, SlidingWindowMask):
            mask = mask.dense
        if self.kind.causal:
            causal = (self.context.matrix(query.device) <= 0)[None, None]
            mask = causal if mask is None else mask & causal
        out, weights = attend(query, key, value, terms, self.context, mask)
        if self.seed is not None:
            left = kept(int(self.seed), tuple(weights.shape), self.dropout).to(weights.device)
            weights = weights * left.to(weights.dtype) * (65536 / (65536 - self.dropout))
            out = torch.matmul(weights, value)
            if (positional := position_values(weights, terms, self.context)) is not None:
                out = out + positional
        if mask is not None:
            out = out * mask.any(-1, keepdim=True)
        return out.transpose(1, 2)


def kept(seed: int, shape: tuple[int, ...], threshold: int) -> torch.Tensor:
    """Which weights stay: boolean of that shape, (B, H, L, K); the threshold is in units of 2^−16."""
    batch, heads, length, keys = shape
    pair = torch.arange(batch * heads).view(batch, heads, 1, 1)
    return dropout.kept(torch.tensor([seed]), pair, torch.arange(length)[:, None], torch.arange(keys), threshold)
