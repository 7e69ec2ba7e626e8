"""Remove padding from the encoders of an object: choose levels, report them, undo them."""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..products.cpu_gemm import half_library
from ..products.weight_cache import CachingLinear, forget
from .arguments import wants
from .call import Setup
from .check import Check, apply_to, refusal
from .contract import Native
from .encoder import SETUP
from .end_to_end import MAY_READ, losses_over_padding, sides_that_heads_allow
from .find import Found, encoders_in, tokenizer_of
from .foreign import CAPTURE, CONTENTS, is_watched, kinds_in, modules_in
from .half import TWIN, half_of
from .joined import JOINED
from .labels import keep_labelled_padding
from .own import give_speech, own_parts
from .probe import SIDES, padding_tokens
from .record import Record
from .substitute import MADE_OF, OURS, stock_class, substitute_class


UNPAD = ("pad_token", "attention_mask", "auto", "never")
# Packages whose objects read the outputs of their models by the mask.
PIPELINES = "transformers.pipelines."
IN_FLOAT32 = "half precision runs in float32"
READERS = ("sentence_transformers.", PIPELINES)


@dataclass(frozen=True)
class Encoder:
    """Report of an encoder that was changed.

    Attributes:
        name: of the module in the object that was given, "" for that object itself.
        kind: name of its class.
        layers: number of attention modules that this package computes.
        level: "contract", "own" or "by length", of docs/live.md; "" where padding stays.
        difference: from Transformers at tokens on a few rows, as a share of the largest value.
        effect: what is faster, in words.
        is_bare: whether it is a model by itself, whose hidden states go to the caller.
    """

    name: str
    kind: str
    layers: int
    level: str
    difference: float
    effect: str
    is_bare: bool = False

    def __str__(self) -> str:
        layers = f", {self.layers} layers" if self.layers else ""
        return f"{self.name or 'the model'} ({self.kind}{layers}): {self.effect}"


@dataclass(frozen=True)
class Skipped:
    """Report of an encoder that was not changed.

    Attributes:
        name: of the module in the object that was given.
        kind: name of its class.
        reason: why.
    """

    name: str
    kind: str
    reason: str


def take_padding_out(
    found: Found, unpad: str, record: Record, widens: bool = False, captures: bool = False
) -> list[Encoder | Skipped]:
    """Make the encoders in a module skip padding.

    Args:
        unpad: one of `UNPAD`.
        record: of their calls.
        widens: whether those in half precision may compute in float32.
        captures: whether encoders whose padding stays get a record, too.

    Returns:
        What became of each of them.
    """
    root, root_kind = found.module, stock_class(type(found.module)).__name__
    reports: list[Encoder | Skipped] = []
    setups = {name: _setup_of(encoder, found, unpad, widens, captures) for name, encoder in encoders_in(root)}
    if layers := give_speech(root):  # after encoders of text, which may have sound inside
        effect = "relative attention of sound is faster, in memory linear in the length"
        reports.append(Encoder(found.path, root_kind, layers, "", 0.0, effect))
    if not (setups or reports):
        reason = "no module inside maps tokens and a mask to hidden states, so padding is kept"
        if any(hasattr(type(part), MADE_OF) for part in root.modules()):
            reason = "it is accelerated already"
        reports.append(Skipped(found.path, root_kind, reason))
    unpadded = {name: each for name, each in setups.items() if isinstance(each, Setup) and each.sides}
    is_bare = not unpadded or "" in unpadded
    sides, trains, reader = SIDES, True, ""
    may_read = unpad == "auto" and not type(found.owner).__module__.startswith(READERS)
    if not is_bare:
        before, trains, reader = sides_that_heads_allow(root, unpadded, may_read)
        sides, heads = losses_over_padding(root, unpadded, before)
        notes = [f"the loss of {root_kind} includes padding"] if sides != before else []
        notes += ["calls with labels at padding keep it"] if sides and heads else []
        reader = "; ".join(filter(None, (reader, *notes)))
        for head in heads if sides else ():
            head.__class__ = substitute_class(type(head), keep_labelled_padding)
    elif unpad == "auto" and unpadded:  # also in pipelines, which return its states
        sides, reader = (), MAY_READ
    for name, setup in setups.items():
        encoder = root.get_submodule(name)
        place, kind = ".".join(filter(None, (found.path, name))), stock_class(type(encoder)).__name__
        if isinstance(setup, Setup):
            allowed = tuple(side for side in setup.sides if side in sides)
            setup = replace(setup, sides=allowed, trains=setup.trains and trains, keeps_states=may_read, record=record)
            if setup.sides or setup.own is not None or setup.in_float32 or captures:
                reports.append(replace(_changed(place, kind, encoder, setup, reader), is_bare=encoder is root))
                continue
            setup = f"padding is kept: {reader}"
        reports.append(Skipped(place, kind, setup))
    return reports


def _setup_of(encoder: Any, found: Found, unpad: str, widens: bool, captures: bool) -> Setup | str:
    """Return the setup that agrees with Transformers, or why there is none."""
    known, foreign = kinds_in(encoder)
    own = None if foreign else own_parts(encoder)
    half = half_of(encoder) if widens else None
    in_float32 = half is not None and half_library(half).is_used
    if reason := refusal(encoder, own, unpad == "never" and not (in_float32 or captures)):
        return reason
    pads = padding_tokens(tokenizer_of(found.owner, found.module), encoder)
    sides = () if unpad == "never" else SIDES
    drops_cache = (
        type(found.owner).__module__.startswith(PIPELINES) and not getattr(found.module, "can_generate", bool)()
    )
    setup = Setup((), sides, pads, trusts_mask=unpad == "attention_mask", trusted=known, drops_cache=drops_cache)
    return Check(encoder, replace(setup, in_float32=in_float32), own).setup()


def _changed(place: str, kind: str, encoder: Any, setup: Setup, reader: str) -> Encoder:
    """Apply a setup to an encoder, and report it.

    Args:
        place, kind: of the report.
        reader: who reads padding, in words.
    """
    apply_to(encoder, setup)
    in_training = [] if setup.trains else ["not in training, where sequences depend on each other or on padding"]
    level, difference = (setup.levels[0].name, setup.difference) if setup.sides else ("", 0.0)
    layers = 0 if setup.own is None else len(setup.own.attention_in(encoder))
    layers = encoder.config.num_hidden_layers if level == Native.name else layers
    effects = [IN_FLOAT32] if setup.in_float32 else []
    effects += [] if setup.own is None else [setup.own.effect]
    if setup.sides:
        where = "" if len(setup.sides) == len(SIDES) else f" on the {setup.sides[0]}"
        effects.append(
            f"padding{where} is removed, hidden states there are zeros (level {level}, difference {difference:.0e})"
        )
        argument = "use_mems" if hasattr(getattr(encoder, "config", None), "mem_len") else "use_cache"
        if setup.returns_cache and not setup.drops_cache and wants(encoder, {}, argument):
            effects.append(f"calls that return a cache fall back to Transformers: pass {argument}=False")
        if setup.limit is not None:
            effects.append(f"not from {setup.limit} tokens on, where the length of a batch changes what it computes")
        effects += in_training
    if reader:
        effects.append(reader if setup.sides else f"padding is kept: {reader}")
    if watched := next((part for part in modules_in(encoder) if part is not encoder and is_watched(part)), None):
        effects.append(f"not while {type(watched).__name__} has hooks")
    return Encoder(place, kind, layers, level, difference, "; ".join(effects) or "padding is kept")


def undo_optimize(model: nn.Module) -> None:
    """Undo `optimize` everywhere in a model, also in a copy or after loading a pickle.

    Args:
        model: any module.
    """
    for module in model.modules():
        restore(module)


def restore(module: Any) -> None:
    """Restore the class and the attention that a module had before `optimize`."""
    own = vars(module)
    for name in (SETUP, TWIN, JOINED, CONTENTS, CAPTURE):
        own.pop(name, None)
    kind = stock_class(type(module))
    if isinstance(module, CachingLinear):
        forget(module)
        # parametrizations and FSDP make classes of ours, which they need
        kind = nn.Linear if kind.__module__.startswith(f"{OURS}.") else kind
    if kind is not type(module):
        module.__class__ = kind
