"""The forward of an optimized encoder: which calls are computed without their padding, or by our attention."""

import itertools
from typing import Any

import torch

from ..host.tracing import is_traced
from .arguments import parameters_of
from .call import FEWEST, EncoderCall, Level, MismatchError, Setup
from .half import InFloat32, against_float32
from .record import TWICE, Answer, Reason, is_watching
from .rules import CALL, CODE, PADDING, reasons
from .substitute import stock_class


SETUP = "_hf_relpos"  # the attribute that holds an encoder's `Setup`
HALF_PRECISION = "It stays in half precision, for its gradients, for autocast, or for its cache."
STOCK = "Transformers"  # the level of calls that its own forward computes


def optimized_forward(encoder: Any, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of an encoder whose calls are computed as its `Setup` says.

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
    """A call of an encoder, without its padding and by our attention where nothing speaks against it.

    Args:
        forward: of its class, bound to it.
    """
    names, _ = parameters_of(type(encoder).forward)
    if len(args) > len(names):
        return forward(*args, **kwargs)  # which raises
    call = EncoderCall(encoder, forward, setup, dict(zip(names, args, strict=False)) | kwargs)
    levels, why = plan(call)
    if setup.record is None:  # what is tried has to show its errors
        return levels[0].run(call) if levels else forward(**call.given)
    for level in levels:
        state = torch.get_rng_state() if call.encoder.training else None
        try:
            outputs = setup.record.verified.outputs(call, level)
        except MismatchError as error:  # another level may fit
            why.insert(0, Reason("It turns out that a level does not compute such a call.", f"{level.name}: {error}"))
            if state is not None:
                torch.set_rng_state(state)
        except Exception as error:  # which is raised by Transformers, too, unless it is of the level
            if state is not None:
                torch.set_rng_state(state)
            outputs = forward(*args, **kwargs)
            failure = Reason("A level raised an error.", f"{level.name} raised {type(error).__name__}: {error}")
            setup.record.verified.give_up(call, level, failure.text)
            note(call, None, [failure, *why], is_loud=True)
            return outputs
        else:
            note(call, level, why)
            return outputs
    outputs = forward(*args, **kwargs)
    note(call, None, why)
    return outputs


def plan(call: EncoderCall) -> tuple[list[Level], list[Reason]]:
    """The levels that compute a call, in the order in which they are tried, none for Transformers' own forward.

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
    if found and (changed := next(iter(reasons([CODE], call)), None)):
        return [], [changed]
    return found, why + not_captured


def _against(level: Level, call: EncoderCall) -> list[Reason]:
    """What a level itself says against a call."""
    kind, place = f"Not by level {level.name}.", f"not by level {level.name}"
    return [Reason(kind, f"{place}: {each}") for each in level.unsupported(call)]


def why_not(call: EncoderCall) -> list[Reason]:
    """All that speaks against taking padding out of a call, and not the first reason alone."""
    return list(itertools.chain(reasons(CALL, call), reasons(PADDING, call), reasons([CODE], call)))


def note(call: EncoderCall, level: Level | None, why: list[Reason], is_loud: bool = False) -> None:
    """Count what a call got.

    Args:
        is_loud: whether the reason is a warning. So it is where twice the tokens are computed, unless one was told so.
    """
    assert call.setup.record is not None
    given = call.shape[0] * call.shape[1]
    computed = given if level is None or call.computed is None else call.computed
    name, kind = STOCK if level is None else level.name, stock_class(type(call.encoder)).__name__
    if is_watching() and (level is None or not level.removes_padding):
        why = list(dict.fromkeys([*why, *why_not(call)]))
    answer = Answer(kind, name, given, computed, given - call.hidden, tuple(why))
    is_costly = bool(call.setup.sides) and call.hidden >= FEWEST and computed >= TWICE * (given - call.hidden)
    call.setup.record.note(answer, is_loud or is_costly)
