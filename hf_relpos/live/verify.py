"""Compute the first call of each kind both ways, on the caller's own batch.

The probe of `optimize` has a few short rows of random tokens. What they cannot show, a caller's own batch shows at
once: masks made of an argument, windows and blocks longer than the probe, keys that are chosen from some length on. So
the first call of each kind is computed by its level and by Transformers, whose outputs are returned. If they differ,
calls of this kind are Transformers' own from then on.
"""

import functools
import threading
from typing import Any

import torch
from torch import nn

from ..products.low_precision import KINDS
from .call import EncoderCall, Level, MismatchError
from .foreign import modules_in
from .guard import Guard
from .probe import differences, tensors_in
from .record import logger
from .shadow import shadow
from .substitute import stock_class


WHEN = ("first call", "load", "always")
# The largest difference that is rounding, as a share of the largest value: batches of callers are longer than those of
# the probe, whose bound is a tenth. In half precision, of a row's root mean square.
ROUNDING, ROUNDING_OF_HALF = 1e-4, 5e-2
EVERY = "every "
LONGEST = 2**62  # of a kind whose lengths are alike


def check_when(verify: str) -> int:
    """Return after how many calls of a kind one is checked again; 0 for never again, −1 for no checks.

    Raises:
        ValueError: for anything but "first call", "load", "always" and "every N".
    """
    if verify in WHEN:
        return {"first call": 0, "load": -1, "always": 1}[verify]
    count = verify.removeprefix(EVERY) if isinstance(verify, str) and verify.startswith(EVERY) else ""
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"verify = {verify!r} is not one of 'first call', 'load', 'always', 'every 1000' or the like")
    return int(count)


class DifferenceError(MismatchError):
    """Outputs of a level differ from Transformers' in calls of this kind."""


class Verified:
    """Keeps which kinds of calls were checked."""

    def __init__(self, verify: str) -> None:
        """
        Args:
            verify: "first call" of each kind; "load" for none but those of third-party code at new lengths; "always";
                or "every N" calls of a kind.

        Raises:
            ValueError: for anything else.
        """
        self.verify, self.every = verify, check_when(verify)
        self.lock = threading.Lock()
        self.right: dict[Any, int] = {}  # by kind, up to which length
        self.wrong: dict[Any, tuple[int, str]] = {}  # by kind, from which length on, and how
        self.calls: dict[Any, int] = {}

    def __reduce__(self) -> Any:
        return Verified, (self.verify,)

    def outputs(self, call: EncoderCall, level: Level) -> Any:
        """Return the outputs of a level, or those of Transformers if the call is checked.

        Raises:
            DifferenceError: if such calls are known to differ.
        """
        is_foreign = call.setup.is_foreign
        is_left_out = not is_foreign and (self.every < 0 or call.encoder.training)
        if is_left_out and not self.wrong:
            return level.run(call)
        kind, length = kind_of(call, level), call.shape[1]
        place = level.name if is_foreign else kind  # third-party code that differs may do so in other calls, too
        first, how = self.wrong.get(place, (length + 1, ""))
        if length >= first:
            raise DifferenceError(how)
        if (
            is_left_out
            or not self._is_due(kind, length, call.setup.checked if is_foreign else 0)
            or has_draws(call.encoder)
        ):
            return level.run(call)
        expected, apart = self._compared(call, level)
        with self.lock:
            if apart <= 1:
                self.right[kind] = max(length, self.right.get(kind, 0)) if is_foreign else LONGEST
            else:
                first = max(self.right.get(kind, call.setup.checked), length // 2) + 1 if is_foreign else 0
                how = f"its outputs differ from Transformers' in such calls ({describe(call)})"
                self.wrong[place] = (first, how)
        if apart > 1:
            logger.warning("%s: level %s: %s; Transformers computes them", _name(call), level.name, how)
        if not is_foreign:
            return expected
        if apart > 1:
            raise DifferenceError(how)
        return level.run(call)

    def give_up(self, call: EncoderCall, level: Level, how: str) -> None:
        """Leave calls of this kind to Transformers, after a level failed on one."""
        with self.lock:
            self.wrong[level.name if call.setup.is_foreign else kind_of(call, level)] = (0, how)

    def _is_due(self, kind: Any, length: int, checked: int) -> bool:
        with self.lock:
            self.calls[kind] = self.calls.get(kind, 0) + 1
            if self.every > 0 and self.calls[kind] % self.every == 0:
                return True
            return length > max(self.right.get(kind, 0), checked)

    def _compared(self, call: EncoderCall, level: Level) -> tuple[Any, float]:
        """Return Transformers' outputs, and the difference of the level's in units of rounding."""
        is_foreign = call.setup.is_foreign
        ours, theirs = (_of_copy(call) if is_foreign else call for _ in range(2))
        found = expected = None
        try:
            with Guard(ours.encoder, own_dtype=True), torch.no_grad(), torch.random.fork_rng(devices=[]):
                found = level.run(ours)
                expected = theirs.forward(**theirs.given) if is_foreign else None
        except Exception as error:  # of third-party code, which Transformers' own call may raise, too
            logger.info("%s: level %s raised %s: %s", _name(call), level.name, type(error).__name__, error)
        if not is_foreign:
            expected = call.forward(**call.given)
        if found is None or expected is None:
            return expected, float("inf")
        assert ours.real is not None
        return expected, apart(dict(tensors_in(found)), dict(tensors_in(expected)), ours.real, is_exact(call.encoder))


def _of_copy(call: EncoderCall) -> EncoderCall:
    """Call a copy in evaluation mode, because third-party code may have state.

    No row is as long as the batch, since some rotations keep the tables of the longest input that they have seen.
    """
    made, given, real = shadow(call.encoder), dict(call.given), call.real
    assert real is not None
    forward: Any = call.forward
    length, full = real.shape[1], real.all(1, keepdim=True)
    columns = torch.arange(length)
    kept = columns >= length // 8 if call.sides == {"left"} else columns < length - length // 8
    given["attention_mask"] = (real & (kept | ~full)).to(call.given["attention_mask"].dtype)
    if given.get("input_ids") is not None:
        given["input_ids"] = given["input_ids"].where(kept | ~full, call.setup.pads[0])
    return EncoderCall(made, functools.partial(forward.func, made), call.setup, given)


def _name(call: EncoderCall) -> str:
    return str(stock_class(type(call.encoder)).__name__)


def kind_of(call: EncoderCall, level: Level) -> Any:
    """Return a key that calls share if they are computed alike."""
    sorts = []
    for name, value in sorted(call.given.items()):
        is_tensor = isinstance(value, torch.Tensor)
        sorts.append((name, value.dtype, value.dim()) if is_tensor else (name, type(value), value is True))
    dtype = next((each.dtype for each in call.encoder.parameters()), None)
    rows, length = call.shape
    size = 2 ** (length - 1).bit_length() if length <= 1024 else -(-length // 1024) * 1024
    size = 0 if call.setup.is_foreign else size
    return (level.name, *sorts, *sorted(call.sides), size, rows > 1, dtype, torch.is_autocast_enabled("cpu"))


def describe(call: EncoderCall) -> str:
    """Describe a kind of calls in words."""
    sides = f", padding on the {' and '.join(sorted(call.sides))}" if call.sides else ""
    return f"{', '.join(sorted(call.given))}; {call.shape[0]} × {call.shape[1]} tokens{sides}"


def has_draws(encoder: Any) -> bool:
    """Whether a part of an encoder in evaluation mode is in training mode, so that outputs may be random."""
    return not encoder.training and any(part.training for part in modules_in(encoder))


def is_exact(encoder: Any) -> bool:
    """Whether products are computed in float32 or float64."""
    parts = [part for part in modules_in(encoder) if isinstance(part, nn.Linear)]
    is_plain = all(type(part.weight) is nn.Parameter and not isinstance(part, tuple(KINDS.values())) for part in parts)
    dtypes = {each.dtype for each in encoder.parameters() if each.is_floating_point()}
    return is_plain and dtypes <= {torch.float32, torch.float64} and not torch.is_autocast_enabled("cpu")


def apart(found: dict[str, Any], expected: dict[str, Any], real: torch.Tensor, exact: bool) -> float:
    """Return the difference of outputs at tokens in units of rounding; infinite for other shapes or names."""
    if exact:
        return float(differences(found, expected, real).max()) / ROUNDING
    if found.keys() != expected.keys() or any(found[name].shape != want.shape for name, want in expected.items()):
        return float("inf")
    worst = 0.0
    for name, want in expected.items():
        got = found[name].detach().double()
        want = want.detach().double()
        if want.shape[:2] == real.shape:
            got, want = got[real], want[real]
        scale = want.square().mean().sqrt().clamp(min=1e-30)
        rows = (got - want).flatten(1).square().mean(1).sqrt() if want.dim() > 1 else (got - want).abs()
        worst = max(worst, float((rows / scale).nan_to_num(float("inf")).max()))
    return worst / ROUNDING_OF_HALF
