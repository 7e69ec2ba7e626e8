"""Self-check of the kernels, before a model gets their numbers: once per process for every kind of call.

The kernels are tested in Triton's interpreter, but what a driver, a device or another version of Triton makes of them
is known only where they run. So before the first call of a kind, a small random call of that kind runs forward and
backward. It is compared with `formula.attend` in the same dtype and in float64. This takes milliseconds, plus the time
to compile, which the call would take anyway. If the kernels raise, or are further from float64 than rounding explains,
the process does not use them for that kind.

Calls so large that `ops.chunks` divides their queries are not covered. They run the same kernels piece by piece.
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

# Queries and keys of the small calls: more than one tile, with keys before the first query; and whole tiles.
LENGTHS = ((150, 170), (256, 256))
# With a window: long enough for rows of pair matrices to overlap in memory (`ops.numbers_per_row`).
WINDOW_LENGTHS = ((900, 1030), (1024, 1024))
BATCH, HEADS, CLIP, DROPOUT, SEED = 2, 2, 9, 0.25, 20
WINDOW, GLOBAL_TOKENS = 7, (0, 9)
# Kernels may be this many times as far from float64 as eager, or as the precision below, whichever is larger.
TIMES = 4.0
# Relative precision of one result after rounding; in float32 it leaves room for the device's own exp2.
PRECISIONS = {"ieee": 2e-6, "tf32": 2.0**-10, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Kind(NamedTuple):
    """The properties of a call that decide which code of the kernels it runs.

    Attributes:
        device: device with its index.
        size: head size.
        terms: letters of the formula, with "1" after a table that all heads share, and "allow" for hidden offsets.
        mask: "none", "keys" (the same for every query), "window", "window and keys", or "pairs" (packed sequences, and
            windows that are not a narrow band).
        precision: precision of float32 products, "ieee" or "tf32".
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
    """Result of a check; `words` describe it to a user."""

    passed: bool
    words: str


OUTCOMES: dict[Kind, Outcome] = {}
_lock = threading.Lock()


def kind_of(call: AttentionCall) -> Kind:
    """Return the kind of a call that the kernels take."""
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
    """Return the outcome for a kind. If there is none yet, run the check, and log a failure.

    The check runs in its own thread, which does not have the caller's modes: autocast, inference, hooks of activation
    checkpointing, fake tensors, a default device. Random states stay as they are.

    Args:
        attention: a function like `backend.attention`.

    Raises:
        torch.OutOfMemoryError: if the device has too little memory, which says nothing about the kernels.
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
    except Exception as error:  # Triton's errors have no class of their own
        lines = str(error).strip().splitlines() or [""]
        return Outcome(False, f"{type(error).__name__}: {lines[-1]}")


def _forms(kind: Kind) -> tuple[bool, ...]:
    """Return the values of `by_row` to check: both for tables of vectors, since calls of one kind may use either."""
    return (False, True) if any(term[0] in "ABV" for term in kind.terms) else (False,)


def _by_ratio(found: tuple[float, Outcome]) -> float:
    return found[0] if math.isfinite(found[0]) else math.inf


def _compare(
    kind: Kind, attention: Callable[..., torch.Tensor], by_row: bool, length: int, keys: int
) -> tuple[float, Outcome]:
    """Return error ÷ limit of the worst output or gradient, and the resulting outcome."""
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
    """Return the root mean square of the difference, relative to that of the truth."""
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
            mask[1, :, 0] = False  # a query that sees no key; with a mask of keys, all queries of the row
            self.mask = mask.to(kind.device)
        self.dropout = round(DROPOUT * 65536) if kind.dropout else 0
        self.seed = torch.tensor([SEED], device=kind.device) if kind.dropout else None
        self.gradient = self.normal(BATCH, length, HEADS, kind.size)

    def band(self) -> SlidingWindowMask:
        """Return a window. With keys, one row begins and the other ends with padding."""
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
        """Draw numbers that the dtype of the call can represent; return them in float64."""
        numbers = torch.randn(shape, generator=self.random, dtype=torch.float64)
        return numbers.to(self.kind.dtype).to(self.kind.device, torch.float64)

    def results(
        self, dtype: torch.dtype, run: Callable[[dict[str, torch.Tensor]], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the output, as "out", and the gradients by name."""
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
        """Return the kernels' output, (B, L, H, d)."""
        terms = self.terms(leaves)
        content, query, key = content_vectors(leaves["query"], leaves["key"], terms, self.context)
        form = to_toeplitz(terms, self.context, query, by_row=self.by_row)
        dropout = self.dropout / 65536
        causal = self.kind.causal and not isinstance(self.mask, SlidingWindowMask)  # a window includes it
        return attention(content, query, key, leaves["value"], form, self.start, self.mask, causal, dropout, self.seed)

    def by_formula(self, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the formula's output, (B, L, H, d), with the dropout of the kernels; zeros if a query sees no key."""
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
    """Return which weights stay, boolean, of that shape, (B, H, L, K). The threshold is in units of 2^−16."""
    batch, heads, length, keys = shape
    pair = torch.arange(batch * heads).view(batch, heads, 1, 1)
    return dropout.kept(torch.tensor([seed]), pair, torch.arange(length)[:, None], torch.arange(keys), threshold)
