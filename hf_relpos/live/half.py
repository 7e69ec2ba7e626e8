"""Encoders in half precision, on machines that multiply float32 faster: a copy in float32 computes their calls.

The copy has weights of its own, but for the table of words. It is made in the first call, and again when a weight, a
part or an attribute of the encoder has changed.
"""

import contextlib
import operator
from functools import partial
from typing import Any

import torch
from torch import nn

from ..host.torch import map_tensors
from ..host.tracing import is_transformed
from ..products.cpu_gemm import HALF, FastLinear, has_gradients, linear_library, packed_rows
from ..products.weight_cache import is_unchanged, snapshot
from .call import EncoderCall, Level
from .foreign import kinds_in, modules_in
from .guard import in_float32, widen
from .probe import vocabulary_of
from .rules import returns_cache
from .shadow import shadow
from .substitute import OURS


TWIN = "_hf_relpos_twin"  # the attribute that holds an encoder's `Twin`
SLOW = "gradients, autocast and training are in half precision, which is slow here: call it under torch.no_grad()"


class Table(nn.Embedding):
    """Word embeddings in half precision, of which a call reads few rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The rows in float32."""
        return super().forward(input).float()


def tables_of(encoder: Any) -> set[torch.Tensor]:
    """Return the word embeddings, which the copy shares."""
    words = vocabulary_of(encoder)
    return {each.weight for each in modules_in(encoder) if type(each) is nn.Embedding and each.num_embeddings == words}


def half_of(encoder: nn.Module) -> torch.dtype | None:
    """Return the half precision of an encoder that a float32 copy can serve; None with adapters or unknown code."""
    (known, foreign), parameters = kinds_in(encoder), [*encoder.parameters()]
    is_known = not foreign and {kind.__module__.partition(".")[0] for kind in known} <= {OURS, "torch", "transformers"}
    is_plain = all(type(each) is nn.Parameter and each.device.type == "cpu" for each in parameters)
    found = {each.dtype for each in parameters} & {*HALF}
    return found.pop() if is_known and is_plain and len(found) == 1 else None


def _contents(part: nn.Module) -> tuple[Any, ...]:
    return (part, *vars(part).values(), *part._parameters.values(), *part._buffers.values())


class Copy:
    """A float32 copy of an encoder, and the weights that the encoder had when it was made.

    Attributes:
        dtype: of the encoder; None if it cannot be served.
        model: the copy.
    """

    def __init__(self, encoder: Any) -> None:
        self.dtype, self.model, tables = half_of(encoder), shadow(encoder), tables_of(encoder)
        self.parts = [*map(_contents, modules_in(encoder))]
        weights = {*encoder.parameters(), *encoder.buffers()} - tables
        self.weights = [(each, snapshot(each)) for each in weights]
        for (part, *_), own in zip(self.parts, modules_in(self.model) if self.dtype else (), strict=False):
            vars(own).update({name: each for name, each in vars(part).items() if name == "config"})
            if type(part) is nn.Embedding and part.weight in tables:
                own.__class__, vars(own)["weight"] = Table, own._parameters.pop("weight", part.weight)
            elif type(own) is nn.Linear and (linear_library().is_used or packed_rows()):
                own.__class__ = FastLinear
            widen(own)

    def holds_for(self, encoder: Any) -> bool:
        """Whether the encoder has not changed since."""
        now = [*map(_contents, modules_in(encoder))]
        pairs = zip(now, self.parts, strict=False)
        alike = (len(each) == len(before) and all(map(operator.is_, each, before)) for each, before in pairs)
        return len(now) == len(self.parts) and all(alike) and all(is_unchanged(*each) for each in self.weights)


class Twin:
    """Holds the float32 copy of an encoder; copies and pickles of the encoder start without one."""

    copy: Copy | None = None

    def __reduce__(self) -> Any:
        return Twin, ()

    def without_record(self) -> "Twin":
        """For copies to measure on."""
        return Twin()

    def of(self, encoder: Any, lock: Any) -> Copy:
        """The copy for an encoder as it is now."""
        if (found := self.copy) is None or not found.holds_for(encoder):
            with lock, torch.inference_mode(False), torch.no_grad():
                found = self.copy
                if found is None or not found.holds_for(encoder):
                    found = self.copy = None  # whose memory is free now
                    found = self.copy = Copy(encoder)
        return found


def against_float32(call: EncoderCall) -> str:
    """Return why a call stays in half precision; "" if it does not."""
    given = [each for each in call.given.values() if isinstance(each, torch.Tensor)]
    may_learn = torch.is_grad_enabled() and has_gradients(*given, *call.encoder.parameters())
    is_other = torch.is_autocast_enabled("cpu") or is_transformed()
    is_slow = may_learn or is_other or any(part.training for part in modules_in(call.encoder))
    return SLOW if is_slow else returns_cache(call)


def _rounded(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


class InFloat32(Level):
    """A level, or the encoder's own forward, computed by the copy in float32; outputs have the encoder's dtype."""

    def __init__(self, inner: Level | None) -> None:
        self.inner = inner
        self.name = "float32" if inner is None else f"{inner.name}, float32"  # type: ignore[misc]
        self.removes_padding = inner is not None and inner.removes_padding  # type: ignore[misc]

    def run(self, call: EncoderCall) -> Any:
        """As of every level."""
        record, forward, given = call.setup.record, call.forward, map_tensors(torch.Tensor, in_float32, call.given)
        lock: Any = contextlib.nullcontext() if record is None else record.changed
        copy = vars(call.encoder).setdefault(TWIN, Twin()).of(call.encoder, lock)
        if copy.dtype is None:
            return self._run(call)
        own = EncoderCall(copy.model, partial(forward.func, copy.model), call.setup, given)  # type: ignore[attr-defined]
        outputs, call.computed = self._run(own), own.computed
        return map_tensors(torch.Tensor, partial(_rounded, copy.dtype), outputs)

    def _run(self, call: EncoderCall) -> Any:
        return call.forward(**call.given) if self.inner is None else self.inner.run(call)
