"""The forward of an optimized encoder: choose the level of each call, or fall back to Transformers."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..host.tracing import is_traced
from .arguments import parameters_of
from .call import FEWEST, EncoderCall, Level, MismatchError, Setup
from .half import InFloat32, against_float32
from .joined import JOINED, against
from .record import TWICE, Answer, Reason, is_watching
from .rules import CALL, CODE, PADDING, reasons
from .substitute import stock_class


SETUP = "_hf_relpos"  # the attribute that holds an encoder's `Setup`
HALF_PRECISION = "It stays in half precision, for its gradients, for autocast, or for its cache."
STOCK = "Transformers"  # the level of calls that its own forward computes


def optimized_forward(encoder: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Forward of an optimized encoder; follows its `Setup`.

    Args:
        forward: of its class.
    """
    setup = vars(encoder).get(SETUP)  # there is none in calls that waited for `undo`
    if is_traced() or setup is None:
        return forward(*args, **kwargs)
    if setup.record is None:
        return run(encoder, forward, setup, args, kwargs)
    with setup.record.inside():
        setup = vars(encoder).get(SETUP)
        return forward(*args, **kwargs) if setup is None else run(encoder, forward, setup, args, kwargs)


def run(encoder: Any, forward: Any, setup: Setup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a call without padding where every rule allows it.

    Args:
        forward: of its class, bound to it.
    """
    names, _ = parameters_of(type(encoder).forward)
    if len(args) > len(names):
        return forward(*args, **kwargs)  # which raises
    call = EncoderCall(encoder, forward, setup, dict(zip(names, args, strict=False)) | kwargs)
    if setup.record is None:  # what is tried has to show its errors
        levels, _ = plan(call)
        return levels[0].run(call) if levels else forward(**call.given)
    stock, joined = functools.partial(forward, *args, **kwargs), vars(encoder).get(JOINED)
    if joined is None:
        return compute(call, stock)
    if is_watching():
        call.alone = against(call)
    return joined.outputs(call, compute, stock)


def compute(call: EncoderCall, stock: Callable[[], Any]) -> Any:
    """The outputs of a call, by the first level that computes it, or by Transformers.

    Args:
        stock: computes it by Transformers.
    """
    record, (levels, why) = call.setup.record, plan(call)
    assert record is not None
    for level in levels:
        state = torch.get_rng_state() if call.encoder.training else None
        try:
            outputs = record.verified.outputs(call, level)
        except MismatchError as error:  # another level may fit
            why.insert(0, Reason("It turns out that a level does not compute such a call.", f"{level.name}: {error}"))
            if state is not None:
                torch.set_rng_state(state)
        except Exception as error:  # which is raised by Transformers, too, unless it is of the level
            if state is not None:
                torch.set_rng_state(state)
            outputs = stock()
            failure = Reason("A level raised an error.", f"{level.name} raised {type(error).__name__}: {error}")
            record.verified.give_up(call, level, failure.text)
            note(call, None, [failure, *why], is_loud=True)
            return outputs
        else:
            note(call, level, why)
            return outputs
    outputs = stock()
    note(call, None, why)
    return outputs


def plan(call: EncoderCall) -> tuple[list[Level], list[Reason]]:
    """Return the levels to try for a call, in order; none for Transformers' own forward.

    Returns:
        They, and what speaks against those before them; only the first reason of the rules.
    """
    if reason := next(iter(reasons(CALL, call)), None):
        return [], [reason]
    captured = call.setup.captured
    not_captured = [] if captured is None else _against(captured, call)
    if captured is not None and not not_captured:
        return [captured], []
    padding = next(iter(reasons(PADDING, call)), None)
    found, why = [], [] if padding is None else [padding]
    for level in call.setup.levels:
        if level.removes_padding and padding is not None:
            continue
        why += (against := _against(level, call))
        if not against:
            found.append(level)
    if call.setup.in_float32:
        half = against_float32(call)
        why += [Reason(HALF_PRECISION, half)] if half else []
        found = found if half else [InFloat32(each) for each in (*found, None)]
    if call.callers and call.hidden:  # padding that no caller has
        found = [each for each in found if each.removes_padding]
    if found and (changed := next(iter(reasons([CODE], call)), None)):
        return [], [changed]
    return found, why + not_captured


def _against(level: Level, call: EncoderCall) -> list[Reason]:
    """What a level itself says against a call."""
    kind, place = f"Not by level {level.name}.", f"not by level {level.name}"
    return [Reason(kind, f"{place}: {each}") for each in level.unsupported(call)]


def note(call: EncoderCall, level: Level | None, why: list[Reason], is_loud: bool = False) -> None:
    """Count a call by its level.

    Args:
        is_loud: whether the reason is a warning. So it is where twice the tokens are computed, unless one was told so.
    """
    assert call.setup.record is not None
    size = call.shape[0] * call.shape[1]
    given = sum(rows * length for rows, length in (each.shape for each in call.callers)) or size
    computed = size if level is None or call.computed is None else call.computed
    name, kind = STOCK if level is None else level.name, stock_class(type(call.encoder)).__name__
    if is_watching() and (level is None or not level.removes_padding):
        why = list(dict.fromkeys([*why, *reasons((*CALL, *PADDING, CODE), call)]))  # all, and not the first alone
    why = [*why, call.alone] if call.alone else why
    call.answer = Answer(kind, name, given, computed, size - call.hidden, tuple(why), joined=len(call.callers))
    is_costly = bool(call.setup.sides) and call.hidden >= FEWEST and computed >= TWICE * (size - call.hidden)
    call.setup.record.note(call.answer, is_loud or is_costly)
