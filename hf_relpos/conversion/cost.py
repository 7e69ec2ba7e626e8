"""The cost of attention on this machine by scheme and backend, for `hf-relpos doctor --model`."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

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
    """

    scheme: str
    backend: str
    taken: str
    in_window: bool
    attention: float
    model: float


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
    """Measured time of a forward pass, without padding, next to the same model with absolute positions.

    All models have the `attention_window` of the configuration, and random weights.

    Args:
        config: configuration of the model.
        length: tokens per row.
        batch: rows.
        schemes: other schemes to compare, with their default options and a table row for each offset.
        backends: values of `attn_implementation`; None for all that compute a scheme, except flex_attention on the
            CPU, which takes a minute to compile.
        rounds: measured passes, after one to warm up; the median is reported.
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
    costs = []
    for number, (each, name) in enumerate(jobs):
        progress(f"{each.position_scheme_name}, {name}", number, len(jobs))
        with torch.device(device):
            model = RelPosBertModel._from_config(each, attn_implementation=name, dtype=dtype).eval()
        inputs = {key: value.to(device) for key, value in inputs_of_length(each, length, batch).items()}
        call = probe_call(each, batch, length, dtype, device)
        backend, call = (choose(call)[0], call) if name == AUTO else named(name, call)
        seconds = _measure(model, inputs, device, rounds)
        costs.append(Cost(each.position_scheme_name, name, backend.name, reads_window_only(backend, call), *seconds))
    progress("measured", len(jobs), len(jobs))
    return costs


@torch.no_grad()
def _measure(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], device: torch.device, rounds: int
) -> tuple[float, float]:
    """Median seconds of self-attention in all layers, and of the encoder."""
    moments: list[float] = []
    layers = [module for module in model.modules() if isinstance(module, RelPosBertSelfAttention)]
    handles = [layer.register_forward_pre_hook(lambda *_: moments.append(_now(device))) for layer in layers]
    handles += [layer.register_forward_hook(lambda *_: moments.append(_now(device))) for layer in layers]
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


def _now(device: torch.device) -> float:
    """Time in seconds; on the CPU, processor time, which depends less on other jobs."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()
