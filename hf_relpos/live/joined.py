"""Concurrent calls of one encoder, computed together.

Servers with threads call an encoder with a text each, at the same time. A call that comes while nobody computes is
computed at once. Those that come meanwhile wait, and the first of them computes all that are alike in one batch, whose
padding a level takes out. Each thread gets its own rows.

Nobody who computes ever waits here, and whoever ends, by an exception, too, wakes those who wait for it.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..host.cores import cores
from ..host.torch import has_modes, map_tensors
from .arguments import FAMILIAR
from .call import EncoderCall, MismatchError, Setup
from .foreign import modules_in
from .record import Reason, renew_in_child, tell
from .rules import CALL, CODE, PADDING, reasons


JOINED = "_hf_relpos_joined"  # the attribute that holds an encoder's `Joined`
# Rows × length of the longest in one batch. With more, rows gain nothing, and short ones wait for long ones.
MOST = 2048
# Seconds after which a call that waits is computed by itself, whatever those do that it waits for.
PATIENCE = 60.0
ALONE = "not joined with calls of other threads: "

_computes: ContextVar[bool] = ContextVar("computes", default=False)  # whether others may wait for this thread

Compute = Callable[[EncoderCall, Callable[[], Any]], Any]


class Place:
    """A call in the queue.

    Attributes:
        call: the call.
        kind: what calls have in common that may be computed together; the place itself until that is known.
        others: those that it computes with itself.
        joint: the batch in which it was computed, its outputs, and which of their rows are its own; None for none.
        woken: whether it need not wait any more.
    """

    def __init__(self, call: EncoderCall) -> None:
        self.call, self.woken = call, threading.Event()
        self.kind: Any = self
        self.others: list[Place] = []
        self.joint: tuple[EncoderCall, Any, slice] | None = None

    def outputs(self) -> Any:
        """Its part of the outputs of the batch.

        Raises:
            MismatchError: if there are none, or they are not made of entries for rows.
        """
        if self.joint is None:
            raise MismatchError("it was not computed with others")
        (joint, outputs, rows), (_, length) = self.joint, self.call.shape

        def own(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.shape[:1] == joint.shape[:1] and value.shape != joint.shape:
                if value.dim() < 3 or (value.dim() == 3 and value.shape[1] == joint.shape[1]):
                    part = value[rows] if value.dim() < 3 else value[rows, :length]
                    return part.clone(memory_format=torch.contiguous_format)
            if value is not None:
                raise MismatchError(f"an output {type(value).__name__} has no entry for each row, or for each token")

        found = map_tensors(object, own, outputs)
        if not self.others:  # of the thread that computed, the record knows
            tell(joint.answer)
        return found


class Joined:
    """Calls of an encoder that are computed, and those that wait for them. Copies and pickles begin with none."""

    def __init__(self) -> None:
        self._renew()
        renew_in_child(self)

    def _renew(self) -> None:
        self.lock, self.cores = threading.Lock(), cores()
        self.computing: set[Place] = set()
        self.waiting: list[Place] = []

    def __reduce__(self) -> Any:
        return Joined, ()

    def without_record(self) -> "Joined":
        """For copies to measure on."""
        return Joined()

    def outputs(self, call: EncoderCall, compute: Compute, stock: Callable[[], Any]) -> Any:
        """The outputs of a call.

        Args:
            compute: from a call, and what computes it by Transformers, to its outputs.
            stock: computes this one by Transformers.
        """
        if _computes.get():
            return compute(call, stock)
        place = Place(call)
        try:
            if self._comes(place):
                token = _computes.set(True)
                try:
                    self._take(place)
                    if not place.others:
                        return compute(call, stock)
                    with suppress(Exception):  # then each is computed by itself, to raise its own
                        _compute([place, *place.others], compute)
                finally:
                    _computes.reset(token)
        finally:
            self._leave(place)
        with suppress(MismatchError):
            return place.outputs()
        return compute(call, stock)

    def _comes(self, place: Place) -> bool:
        """Wait; whether the thread is to compute its call, with others, now. Else these were, or it is by itself."""
        with self.lock:
            self.waiting.append(place)
            self._appoint()
        if not place.woken.is_set():
            place.call.alone = against(place.call)
            if place.call.alone is None:
                place.kind, before = _kind(place.call), frozenset(self.computing)
                if not place.woken.wait(PATIENCE):  # for threads that died in `_leave`, or wait for locks of this one
                    self.computing -= before
        return place in self.computing

    def _appoint(self) -> None:
        """Let the first one that waits compute, if there is a core for it."""
        if self.waiting and len(self.computing) < max(1, self.cores // torch.get_num_threads()):
            place = self.waiting.pop(0)
            self.computing.add(place)
            place.woken.set()

    def _take(self, place: Place) -> None:
        """Take calls that wait, and are of the same kind, from the queue."""
        with self.lock:
            rows, length = place.call.shape
            share = -(-len(self.waiting) * torch.get_num_threads() // self.cores)  # as others compute beside it
            for each in self.waiting.copy():
                more, longest = rows + each.call.shape[0], max(length, each.call.shape[1])
                if each.kind == place.kind and more * longest <= MOST and len(place.others) < share:
                    self.waiting.remove(each)
                    place.others.append(each)
                    rows, length = more, longest

    def _leave(self, place: Place) -> None:
        """Let the next one compute, and wake those that were computed."""
        with self.lock:
            self.computing.discard(place)
            if place in self.waiting:
                self.waiting.remove(place)
            self._appoint()
        for each in place.others:
            each.woken.set()


def may_join(setup: Setup | None) -> bool:
    """Whether calls of an encoder may be computed together: rows do not depend on others, nor on padding."""
    return setup is not None and setup.record is not None and "right" in setup.sides and not setup.is_foreign


def against(call: EncoderCall) -> Reason | None:
    """Why a call is computed by itself; None for no reason."""
    given = {name: value for name, value in call.given.items() if value is not None}
    tensors = {name for name, value in given.items() if isinstance(value, torch.Tensor)}
    plain = {name for name in call.by_token if type(given[name]) is torch.Tensor}
    others = sorted((given.keys() - FAMILIAR) | (tensors - plain))
    if torch.is_grad_enabled() or any(part.training for part in modules_in(call.encoder)):
        return Reason(ALONE, f"{ALONE}they have gradients, or dropout; call it in evaluation, under torch.no_grad()")
    if torch.is_autocast_enabled("cpu") or has_modes():
        return Reason(ALONE, f"{ALONE}autocast or another mode of its thread is on")
    if others or "input_ids" not in given or "attention_mask" not in call.names:
        return Reason(ALONE, f"{ALONE}it has {', '.join(map(repr, others)) or 'no tokens and mask'}")
    reason = next(reasons((*CALL, *PADDING[1:], CODE), call), None)  # little padding is no reason
    return None if reason is None else Reason(ALONE, f"{ALONE}{reason.text}")


def _kind(call: EncoderCall) -> Any:
    given = sorted((name, value) for name, value in call.given.items() if value is not None)
    sorts = [(name, (v.dtype, v.shape[2:]) if isinstance(v, torch.Tensor) else v) for name, v in given]
    return call.encoder, call.setup, torch.is_inference_mode_enabled(), sorts


def _compute(places: list[Place], compute: Compute) -> None:
    """Compute calls of one kind as one, their rows padded on the right."""
    calls = [each.call for each in places]
    given, setup = dict(calls[0].given), replace(calls[0].setup, fewest=1)

    def rows(call: EncoderCall, name: str) -> Any:
        value = call.real.long() if call.given.get(name) is None else call.given[name]  # type: ignore[union-attr]
        return value.expand(call.shape[0], *value.shape[1:])

    for name in (*calls[0].by_token, "attention_mask"):
        filling = next(iter(setup.pads), 0) if name == "input_ids" else 0
        given[name] = pad_sequence([row for call in calls for row in rows(call, name)], True, filling)
    joint, first = EncoderCall(calls[0].encoder, calls[0].forward, setup, given), 0
    joint.callers = tuple(calls)

    def stock() -> Any:
        if joint.hidden:
            raise MismatchError("no level removes the padding of these calls together")
        return joint.forward(**joint.given)

    outputs = compute(joint, stock)
    for each in places:
        first, end = first + each.call.shape[0], first
        each.joint = joint, outputs, slice(end, first)
