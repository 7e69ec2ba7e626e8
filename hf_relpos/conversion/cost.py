"""The cost of attention on this machine by scheme and backend: predicted from operation counts, and measured.

Every operation of one forward pass is counted by its bottleneck (multiplications, bytes, entries), and each count is
divided by this machine's rate for such work. The rates are measured on operations of the model's sizes. The prediction
ignores overlap and reuse in an implementation. `hf-relpos doctor --model` prints prediction and measurement side by
side.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from ..attention.backends.window_blocks import QUERIES
from ..attention.call import reads_window_only
from ..attention.dispatch import AUTO, choose
from ..evaluation.position_scores import inputs_of_length
from ..families.checkpoint import download, local_folder, read_config
from ..families.recognition import recognise
from ..models.capabilities import probe_call, supported_implementations
from ..models.configuration_relpos_bert import RelPosBertConfig
from ..models.explain import named
from ..models.modeling_relpos_bert import RelPosBertModel, RelPosBertSelfAttention
from ..schemes.registry import STOCK_SCHEME, find_scheme
from .configurations import source_config


# Results up to this size, in bytes, are assumed to stay in a core's cache until the next operation reads them.
CACHED = 1 << 20
# Operations by bottleneck; all others read and write their tensors once.
INDEXED = {"embedding", "gather", "index", "index_add", "index_put", "index_select", "scatter_add"}
TRANSCENDENTAL = {"_softmax", "cos", "erf", "exp", "gelu", "log", "pow", "sigmoid", "sin", "softmax", "tanh"}
FREE = {"_local_scalar_dense", "detach", "empty", "empty_like", "empty_strided", "new_empty"}


@dataclass(frozen=True)
class Cost:
    """A forward pass of the encoder, and its self-attention: all layers, projections included.

    Attributes:
        scheme: value of `position_embedding_type`.
        backend: value of `attn_implementation`.
        taken: the backend that computes it, which differs from `backend` for "relpos".
        in_window: whether it reads only the keys in the attention window.
        attention: measured seconds in self-attention; on the CPU, processor time of all threads.
        model: measured seconds of the encoder, likewise.
        predicted_attention: predicted seconds in self-attention.
        predicted_model: predicted seconds of the encoder.
    """

    scheme: str
    backend: str
    taken: str
    in_window: bool
    attention: float
    model: float
    predicted_attention: float
    predicted_model: float


class CountWork(TorchDispatchMode):
    """Counts work by kind.

    The kinds are "linear", "products" and "fused" in multiplications, "cached" and "memory" in bytes, "indexed" and
    "transcendental" in entries, and "calls".
    """

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._overloadpacket.__name__.removesuffix("_")  # in place or not
        if func.is_view or name in FREE:
            return result
        results = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        flops = flop_registry.get(getattr(torch.ops.aten, name, None))
        self.work["calls"] += 1
        if name.startswith("_scaled_dot_product"):
            query, key, value = args[:3]
            self.work["fused"] += sdpa_flop_count(query.shape, key.shape, value.shape) // 2
        elif flops is not None:
            linear = name == "mm" or (name == "addmm" and args[0].dim() == 1)  # otherwise a product is added to scores
            self.work["linear" if linear else "products"] += flops(*args, **kwargs, out_val=result) // 2
        elif name in INDEXED:
            self.work["indexed"] += sum(each.numel() for each in results)
        elif name in TRANSCENDENTAL:
            self.work["transcendental"] += sum(each.numel() for each in results)
        else:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            size = max((each.nbytes for each in results), default=0)
            self.work["cached" if size <= CACHED else "memory"] += sum(each.nbytes for each in (*given, *results))
        return result


def read_configuration(source: str | Path) -> RelPosBertConfig:
    """The RelPosBertConfig of a checkpoint, whose weights are not read.

    Args:
        source: folder or Hub repository of a checkpoint of this package, or one that can be converted.

    Raises:
        ConversionError: for a checkpoint that cannot be found or converted.
    """
    folder = local_folder(source, None) or download(str(source), None, "", ["config.json"])[0]
    return source_config(folder, recognise(folder, read_config(folder)))


def with_scheme(config: RelPosBertConfig, scheme: str, length: int) -> RelPosBertConfig:
    """The same sizes with another scheme and its default options; tables cover the length of the input.

    Raises:
        ValueError: for an unknown scheme, and a scheme that does not fit these sizes.
    """
    find_scheme(scheme)
    fields = config.to_dict()
    fields.update(
        position_embedding_type=scheme,
        position_options={},
        absolute_position_embeddings=False,
        max_position_embeddings=max(length, config.max_position_embeddings),
    )
    return RelPosBertConfig.from_dict(fields)


def with_window(config: RelPosBertConfig, window: int) -> RelPosBertConfig:
    """The same configuration with another `attention_window`; 0 for none.

    Raises:
        ValueError: for a negative number, and a window that the configuration does not allow.
    """
    fields = config.to_dict()
    fields["attention_window"] = window or None
    if not window:
        fields["global_tokens"] = None
    return RelPosBertConfig.from_dict(fields)


def measure_rates(
    config: RelPosBertConfig, batch: int, length: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """Rates of this machine, per second, for each kind of `CountWork`, at the sizes of this model."""
    heads, width = config.num_attention_heads, config.hidden_size
    size = width // heads
    make = partial(torch.randn, device=device, dtype=dtype)
    states, weight = make(batch * length, width), make(width, width)
    # number of keys in a block, since with a window there are never the scores of all pairs
    keys = length if config.attention_window is None else min(length, QUERIES + 2 * config.attention_window)
    vectors = make(batch * heads, keys, size)
    split = make(batch, heads, keys, size)
    scores, small = make(heads, length, keys), make(CACHED // 8)
    pairs = batch * heads * keys**2
    index = torch.randint(keys, scores.shape, device=device)
    tiny = make(1)
    probes: dict[str, tuple[float, Callable[[], object]]] = {
        "linear": (states.numel() * width, lambda: states @ weight),
        "products": (pairs * size, lambda: vectors @ vectors.transpose(1, 2)),
        "fused": (2 * pairs * size, lambda: scaled_dot_product_attention(split, split, split)),
        "cached": (3 * small.nbytes, lambda: small.add_(1e-3 * small)),
        "memory": (3 * scores.nbytes, lambda: scores + scores),
        "indexed": (scores.numel(), lambda: scores.gather(-1, index)),
        "transcendental": (scores.numel(), lambda: scores.softmax(-1)),
        "calls": (1, lambda: tiny.add_(1)),
    }
    return {kind: work / _seconds(run, device) for kind, (work, run) in probes.items()}


def predicted(work: Mapping[str, float], rates: Mapping[str, float]) -> float:
    """Seconds for counts of `CountWork` at these rates."""
    return sum(count / rates[kind] for kind, count in work.items())


def model_costs(
    config: RelPosBertConfig,
    length: int,
    batch: int = 1,
    schemes: Sequence[str] = (),
    backends: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    rounds: int = 3,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> list[Cost]:
    """Predicted and measured time of a forward pass, without padding, next to the same model with absolute positions.

    All models have the `attention_window` of the configuration, and random weights.

    Args:
        config: configuration of the model.
        length: tokens per row.
        batch: rows.
        schemes: other schemes to compare, with their default options and a table row for each offset.
        backends: values of `attn_implementation`; None for all that compute a scheme, except flex_attention on the
            CPU, which takes a minute to compile.
        rounds: measured passes, after one to count and one to warm up; the median is reported.
        progress: called with a description, the number of completed jobs, and their total.

    Returns:
        First the model with absolute positions on sdpa, then each backend, by scheme.

    Raises:
        ValueError: for an unknown scheme, or a backend that cannot compute it.
    """
    device = torch.device(device)
    jobs = [(with_scheme(config, STOCK_SCHEME, length), "sdpa")]
    own = [] if config.position_embedding_type == STOCK_SCHEME else [config]
    for each in [*own, *(with_scheme(config, name, length) for name in schemes)]:
        able = supported_implementations(each)
        for name in backends or [name for name in able if name != "flex_attention" or device.type != "cpu"]:
            if name not in able:
                raise ValueError(
                    f"attn_implementation = {name!r} cannot compute {each.position_scheme_name!r}; use one of: "
                    f"{', '.join(able)}"
                )
            jobs.append((each, name))
    rates = measure_rates(config, batch, length, device, dtype)
    costs = []
    for number, (each, name) in enumerate(jobs):
        progress(f"{each.position_scheme_name}, {name}", number, len(jobs))
        with torch.device(device):
            model = RelPosBertModel._from_config(each, attn_implementation=name, dtype=dtype).eval()
        inputs = {key: value.to(device) for key, value in inputs_of_length(each, length, batch).items()}
        call = probe_call(each, batch, length, dtype, device)
        backend, call = (choose(call)[0], call) if name == AUTO else named(name, call)
        counts = [predicted(work, rates) for work in _count(model, inputs)]
        seconds = _measure(model, inputs, device, rounds)
        costs.append(
            Cost(each.position_scheme_name, name, backend.name, reads_window_only(backend, call), *seconds, *counts)
        )
    progress("measured", len(jobs), len(jobs))
    return costs


@torch.no_grad()
def _count(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> tuple[Counter[str], Counter[str]]:
    """The work of self-attention in all layers, and of the encoder, in one forward pass."""
    attention: Counter[str] = Counter()
    with CountWork() as counted:
        handles = _around_attention(
            model,
            lambda: attention.subtract(counted.work),
            lambda: attention.update(counted.work),
        )
        model(**inputs)
    for handle in handles:
        handle.remove()
    return attention, counted.work


@torch.no_grad()
def _measure(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], device: torch.device, rounds: int
) -> tuple[float, float]:
    """Median seconds of self-attention in all layers, and of the encoder."""
    moments: list[float] = []
    handles = _around_attention(model, *[lambda: moments.append(_now(device))] * 2)
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        moments.clear()
        start = _now(device)
        model(**inputs)
        whole = _now(device) - start
        times.append((sum(moments[1::2]) - sum(moments[::2]), whole))
    for handle in handles:
        handle.remove()
    attention, encoder = zip(*times[1:], strict=True)
    return statistics.median(attention), statistics.median(encoder)


def _around_attention(model: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> list[Any]:
    """Register hooks before and after each layer's self-attention; returns their handles."""
    layers = [module for module in model.modules() if isinstance(module, RelPosBertSelfAttention)]
    handles: list[Any] = [layer.register_forward_pre_hook(lambda *_: before()) for layer in layers]
    return handles + [layer.register_forward_hook(lambda *_: after()) for layer in layers]


def _now(device: torch.device) -> float:
    """Time in seconds; on the CPU, processor time, which depends less on other jobs."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The time of a call: the median of five runs of 10 ms or more."""
    run()
    calls = 1
    times: list[float] = []
    while len(times) < 5:
        start = _now(device)
        for _ in range(calls):
            run()
        taken = _now(device) - start
        if taken < 0.01:
            calls *= 4
        else:
            times.append(taken / calls)
    return statistics.median(times)
