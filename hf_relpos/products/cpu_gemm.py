"""Matrix products of float32 on the CPU, by the faster of the two libraries inside PyTorch.

PyTorch multiplies float32 matrices with MKL. On processors that are not Intel's, MKL takes its AVX2 path, which has
half the speed of AVX-512. oneDNN, in the same wheel, does not. On first use both are timed, with the threads that the
process has, and compared with float64. oneDNN is used if it is faster and as exact.

- `linear` calls oneDNN's own operator on the weight as it is, forward and backward. No global state is changed.
- In inference, a layer of few tokens is bound by reading its weight, and oneDNN reads a copy in its own layout faster.
  `FastLinear` keeps such a copy (`weight_cache`) for calls of up to `packed_rows()` tokens.
- PyTorch has no such operator for `bmm`. `fast_bmm()` changes `torch.backends.mkldnn.matmul.fp32_precision` and
  restores it at the end. Other threads see this setting, too. With it oneDNN may round to bfloat16, and does on
  processors with AMX. The measurement finds that error, and oneDNN is then not used.

`HF_RELPOS_ONEDNN=off` turns all off, `linear` uses it for linear layers only, `no-prepack` without the copies.

oneDNN compiles code for every shape. It keeps the last 1,024 of them, and PyTorch keeps as many for each thread: half
a gigabyte once batches have had so many different numbers of tokens. Both read their capacity from the environment
when they are first used. `limit_caches`, which `optimize` calls, sets it to `CACHED_SHAPES` there, unless it is set.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..deprecation import variable
from ..host.torch import (
    fits_onednn_linear,
    has_onednn_linear,
    has_packed_weights,
    onednn_linear,
    onednn_matmul,
    pack_weight,
)
from ..host.tracing import is_traced, is_transformed
from .weight_cache import CachingLinear, cached


SETTING = "HF_RELPOS_ONEDNN"
VALUES = ("off", "linear", "no-prepack", "on")
HALF = (torch.float16, torch.bfloat16)
# With fewer rows of a matrix, a product is bound by memory and neither library is faster.
FEWEST_ROWS = 4
FASTER = 1.02  # oneDNN is used if it is at least so many times as fast
PACKED_FASTER = 1.05  # packed weights are used if they are so many times as fast, as they take memory
PACKED_ROWS = (8, 32, 128, 256)  # for which they are measured
# The largest error of a float32 product, relative to its largest value. With bfloat16 the error is 1e-3 and more.
LARGEST_ERROR = 1e-5
# Shapes that oneDNN keeps, and PyTorch again for each thread: about 0.4 MB each. A Transformer has four shapes for
# each number of tokens, so that single texts of up to 64 tokens are not compiled anew; for longer ones that takes
# little.
CACHED_SHAPES = 256
# oneDNN reads the first that is set of one tuple, PyTorch the other.
CACHE_SETTINGS = (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"), ("LRU_CACHE_CAPACITY",))

LONGEST_MEASUREMENT = 0.5  # seconds of one function
# That of the thread does not count what other processes take. On Windows it is too coarse.
CLOCK = time.thread_time if os.name == "posix" else time.perf_counter

_measuring = threading.Lock()  # two measurements at once would slow each other


@dataclass(frozen=True)
class Library:
    """Measurements of one kind of product on this machine.

    Attributes:
        torch_rate: speed of PyTorch's own product, in GFLOP/s.
        onednn_rate: speed of oneDNN's product; 0 if PyTorch does not have it.
        torch_error: the largest error of PyTorch's own product, relative to the largest value.
        onednn_error: the largest error of oneDNN's product, relative to the largest value.
        allowed: whether `HF_RELPOS_ONEDNN` allows oneDNN.
    """

    torch_rate: float
    onednn_rate: float
    torch_error: float
    onednn_error: float
    allowed: bool = True

    @property
    def is_used(self) -> bool:
        """Whether oneDNN is used."""
        exact = self.onednn_error <= max(LARGEST_ERROR, self.torch_error)
        return self.allowed and exact and self.onednn_rate >= FASTER * self.torch_rate


def _setting() -> str:
    value = variable(SETTING, "on")
    if value not in VALUES:
        raise ValueError(f"{SETTING}={value!r} is not one of {', '.join(VALUES)}")
    return value


def limit_caches() -> None:
    """Let oneDNN and PyTorch keep fewer shapes, if they have not been used in this process before."""
    for names in CACHE_SETTINGS:
        if not any(name in os.environ for name in names):
            os.environ[names[0]] = str(CACHED_SHAPES)


def seconds_of(runs: Mapping[str, Callable[[], object]], rounds: int = 6) -> dict[str, float]:
    """The least time of each function, called in turns; of a function that takes long, of one call."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    with _measuring, torch.inference_mode():
        for _ in range(rounds + 1):
            for name, run in runs.items():
                if sum(taken[name]) < LONGEST_MEASUREMENT:
                    start = CLOCK()
                    run()
                    taken[name].append(CLOCK() - start)
    return {name: min(each) for name, each in taken.items()}


def _compare(
    plain: Callable[[], torch.Tensor], fast: Callable[[], torch.Tensor] | None, exact: torch.Tensor, work: float
) -> Library:
    """Time two ways to compute one product in turns, and compare the results with float64.

    Args:
        plain: computes the product with PyTorch's own library.
        fast: computes the product with oneDNN; or None.
        exact: the first rows of the result in float64.
        work: the number of floating-point operations.
    """
    runs = {"plain": plain} if fast is None else {"plain": plain, "fast": fast}
    with torch.inference_mode():
        results = [run().flatten(0, -2)[: len(exact)] for run in runs.values()]
    errors = [float((each - exact).abs().max() / exact.abs().max()) for each in results]
    rates = [work / taken / 1e9 for taken in seconds_of(runs).values()]
    return Library(rates[0], rates[-1] if fast else 0.0, errors[0], errors[-1])


@functools.cache
def linear_library() -> Library:
    """Measure rates and errors of linear layers, once per process, in some milliseconds."""
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(size, generator=generator) for size in ((128, 768), (1536, 768), (1536,)))
    exact = rows[:16].double() @ weight.double().t() + bias.double()
    fast = (lambda: onednn_linear(rows, weight, bias)) if has_onednn_linear() else None
    found = _compare(lambda: nn.functional.linear(rows, weight, bias), fast, exact, 2 * 128 * 768 * 1536)
    return replace(found, allowed=_setting() != "off")


@functools.cache
def half_library(dtype: torch.dtype) -> Library:
    """Measure linear layers in half precision, once per process: PyTorch's own, and in the place of oneDNN float32."""
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randn(size, 768, generator=generator).to(dtype) for size in (32, 768)]
    rows, weight = (each.float() for each in halves)
    exact, linear_library_ = rows.double() @ weight.double().t(), linear_library()
    own = partial(nn.functional.linear, *halves)
    found = _compare(own, lambda: linear(rows, weight), exact, 2 * 32 * 768 * 768)
    return replace(found, allowed=linear_library_.allowed)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16 products. Without them, float32 products are faster."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # not in older PyTorch
    return not capabilities or any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@functools.cache
def bmm_library() -> Library:
    """Measure rates and errors of batched products, of the sizes that attention has, once per process."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(6, 128, 64, generator=generator) for _ in range(2))
    exact = left[0].double() @ right[0].double().t()

    def fast() -> torch.Tensor:
        with _switched():
            return torch.bmm(left, right.transpose(1, 2))

    work = 2 * 6 * 128 * 128 * 64
    found = _compare(lambda: torch.bmm(left, right.transpose(1, 2)), fast if onednn_matmul() else None, exact, work)
    return replace(found, allowed=_setting() in ("no-prepack", "on"))


def may_pack() -> bool:
    """Whether weights can be packed, and `HF_RELPOS_ONEDNN` allows it."""
    return has_packed_weights() and _setting() not in ("off", "no-prepack")


def _each(run: Callable[..., torch.Tensor], rows: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        run(rows, weight, None)


@functools.cache
def packed_rows(dtype: torch.dtype = torch.float32) -> int:
    """The most tokens of a call for which packed weights are faster on this machine; 0 if they are not.

    Measured once per process, in a quarter of a second, with more memory than caches have.

    Args:
        dtype: float32 or bfloat16.
    """
    if not may_pack():
        return 0
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(768, 768, generator=generator).to(dtype) for _ in range(16)]
    try:
        packed = [pack_weight(each) for each in weights]
    except RuntimeError:  # bfloat16 on a processor without instructions that it needs
        return 0
    used = onednn_linear if dtype == torch.float32 and linear_library().is_used else nn.functional.linear
    most = 0
    for count in PACKED_ROWS:
        rows = torch.randn(count, 768, generator=generator).to(dtype)
        runs = {"plain": partial(_each, used, rows, weights), "packed": partial(_each, onednn_linear, rows, packed)}
        taken = seconds_of(runs, rounds=2)
        if taken["plain"] < PACKED_FASTER * taken["packed"]:
            break
        most = count
    return most


# Linear layers -------------------------------------------------------------------------------------------------------


def linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, layer: nn.Linear | None = None
) -> torch.Tensor:
    """Compute `torch.nn.functional.linear`, forward and backward, with the faster library.

    Gradients of any order are those of `linear`. PyTorch's own function takes calls that oneDNN is not for: other
    dtypes and devices, autocast, tensor subclasses, graphs, forward-mode derivatives and transforms of `torch.func`.

    Args:
        rows: (…, D).
        weight: (E, D).
        bias: (E,), or None.
        layer: the layer of this weight, which may keep a packed copy; or None.

    Returns:
        (…, E).
    """
    if not is_plain(rows, weight, bias):
        return nn.functional.linear(rows, weight, bias)
    count, gradients = rows.shape[:-1].numel(), has_gradients(rows, weight, bias)
    if layer is not None and not gradients and count <= packed_rows():
        packed = cached(layer, pack_weight, patient=True)
        if packed is not None:
            return onednn_linear(rows, packed, bias)
    if count < FEWEST_ROWS or not linear_library().is_used:
        return nn.functional.linear(rows, weight, bias)
    if gradients:
        # reshaped outside of the function: stock DeBERTa v1 changes a view of the result in place
        out: torch.Tensor = _Linear.apply(rows.flatten(0, -2), weight, bias).unflatten(0, rows.shape[:-1])
        return out
    return onednn_linear(rows, weight, bias)


def has_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records what is computed of these tensors."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def is_plain(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether oneDNN may compute a product of these tensors."""
    if is_traced() or torch.is_autocast_enabled("cpu") or is_transformed():
        return False
    return fits_onednn_linear(rows, weight, bias)


class _Linear(torch.autograd.Function):
    """`linear` of rows, (n, D), with its gradients."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        # only what the backward reads: the other may be changed in place before it
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        return onednn_linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        d_rows = linear(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        d_weight = linear(gradient.t(), rows.t()) if ctx.needs_input_grad[1] else None
        return d_rows, d_weight, gradient.sum(0) if ctx.needs_input_grad[2] else None


class FastLinear(CachingLinear):
    """`torch.nn.Linear` with the products of `linear`. A live layer is given this class."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the layer as `torch.nn.Linear` does."""
        return linear(input, self.weight, self.bias, self)


@contextlib.contextmanager
def fast_linears(*models: nn.Module) -> Iterator[None]:
    """Context in which the linear layers of models compute as `linear` does."""
    layers = [each for model in models for each in model.modules() if type(each) is nn.Linear]
    for layer in layers:
        layer.__class__ = FastLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


# Batches of products -------------------------------------------------------------------------------------------------

_lock = threading.Lock()
ALLOWING = "bf16"  # the value that lets PyTorch take oneDNN
_inside = 0  # number of threads, or nested calls of one thread, in `_switched`
_before = ""  # the setting outside of `_switched`


@contextlib.contextmanager
def _switched() -> Iterator[None]:
    """Set PyTorch's option that allows oneDNN for float32 products. The first to enter sets it, the last resets it.

    A setting that the user makes meanwhile stays.
    """
    global _inside, _before
    matmul = onednn_matmul()
    with _lock:
        if _inside == 0:
            _before = matmul.fp32_precision
            matmul.fp32_precision = ALLOWING
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and matmul.fp32_precision == ALLOWING:
                matmul.fp32_precision = _before


def has_onednn_bmm(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes batches of products in `fast_bmm`. It copies matrices that are not contiguous."""
    return dtype == torch.bfloat16 or (dtype == torch.float32 and bmm_library().is_used)


def fast_bmm(like: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Return a context in which `mm`, `bmm` and the like use the faster library.

    Keep it short, and only compute products in it: `scaled_dot_product_attention` takes four times as long in it for
    short rows.

    Args:
        like: a tensor of the device and dtype of the products.
    """
    is_plain = like.dtype == torch.float32 and like.device.type == "cpu"
    return _switched() if is_plain and bmm_library().is_used else contextlib.nullcontext()
