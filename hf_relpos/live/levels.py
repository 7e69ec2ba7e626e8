"""Take padding out of the encoders of an object: the level of each, what it says of it, and how it is undone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from ..attention.cpu_gemm import FastLinear
from ..attention.tracing import is_traced
from ..host.live import collects_outputs
from ..models.modeling_relpos_bert import RelPosBertModel
from ..models.sequence import Rows
from . import contract
from .by_length import TOKENS_OF_A_CALL
from .check import SIDES, Check, EndToEnd, apply_to, batch_dependence, padding_tokens
from .encoder import FEWEST, SETUP, Setup, is_padding
from .find import Found, encoders_in, tokenizer_of
from .foreign import foreign_part, is_watched, modules_in, stock_class, transformers_class
from .own import OWN, OwnParts, give_speech, own_parts
from .shadow import shadow


PADDINGS = ("zeros", "mask", "stock")
# In the names of heads for spans, whose softmax and loss are over all states of a row.
SPANS = "ForQuestionAnswering"
# The modules of this package with classes for the parts of encoders.
OWN_CODE = frozenset(f"{__package__}.{each.code}" for each in OWN)


@dataclass(frozen=True)
class Encoder:
    """An encoder that is faster now.

    Attributes:
        name: of the module in the object that was given, "" for that object itself.
        kind: name of its class.
        layers: number of attention modules that this package computes.
        level: "contract", "own" or "by length", of docs/live.md; "" where padding stays.
        difference: from Transformers at tokens on a few rows, as a share of the largest value.
        effect: what is faster, in words.
    """

    name: str
    kind: str
    layers: int
    level: str
    difference: float
    effect: str

    def __str__(self) -> str:
        layers = f", {self.layers} layers" if self.layers else ""
        return f"{self.name or 'the model'} ({self.kind}{layers}): {self.effect}"


@dataclass(frozen=True)
class Skipped:
    """An encoder that is as it was.

    Attributes:
        name: of the module in the object that was given.
        kind: name of its class.
        reason: why.
    """

    name: str
    kind: str
    reason: str


@dataclass
class Taken:
    """What was done with the encoders of one module.

    Attributes:
        encoders, skipped: those that are faster now, and those that are as they were.
        changed: the modules that `restore` has to undo.
        inside: the layers of all of them.
    """

    encoders: list[Encoder]
    skipped: list[Skipped]
    changed: list[nn.Module]
    inside: set[nn.Module]


def may_unpad(setup: Setup, encoder: nn.Module, rows: Rows) -> bool:
    """Whether an encoder of this package's own models may take padding out of the call that is running."""
    ids = rows.tokens if rows.tokens.dim() == 2 else None
    return (
        not is_traced()
        and not collects_outputs()
        and rows.key_mask is not None
        and is_padding(setup, ids, rows.key_mask != 0)
        and not is_watched(encoder)
        and foreign_part(encoder) is None
    )


def take_padding_out(found: Found, padding: str, changed: list[nn.Module]) -> Taken:
    """Let the encoders in a module compute batches without their padding.

    Args:
        padding: one of `PADDINGS`.
        changed: a list that gets the modules that change.
    """
    root, taken = found.module, Taken([], [], changed, set())
    encoders = list(encoders_in(root))
    if speech := give_speech(root):
        changed += speech
        effect = "relative attention of sound is faster, in memory linear in the length"
        taken.encoders.append(Encoder(found.path, stock_class(type(root)).__name__, len(speech), "", 0.0, effect))
    if not encoders:
        reason = "nothing inside maps tokens and a mask to hidden states, so that padding stays"
        taken.skipped.append(Skipped(found.path, stock_class(type(root)).__name__, reason))
    for _, encoder in encoders:
        taken.inside |= {
            each for part in modules_in(encoder) if isinstance(part, nn.ModuleList) for each in part.modules()
        }
    setups = dict(_setups(found, encoders, padding, taken))
    sides, reader = _sides_that_heads_allow(root, encoders, setups)
    for name, encoder in encoders:
        if encoder not in setups:
            continue
        setup, own = setups[encoder]
        place = ".".join(filter(None, (found.path, name)))
        kind = stock_class(type(encoder)).__name__
        if setup is not None:
            allowed = tuple(side for side in setup.sides if side in sides)
            setup = replace(setup, sides=allowed) if allowed else None
            if setup is None and own is None:
                taken.skipped.append(Skipped(place, kind, f"padding stays: {reader}"))
                continue
        taken.encoders.append(_changed(place, kind, encoder, setup, own, reader, taken.changed))
    return taken


def _setups(
    found: Found, encoders: list[tuple[str, nn.Module]], padding: str, taken: Taken
) -> Iterator[tuple[nn.Module, tuple[Setup | None, OwnParts | None]]]:
    """Encoders that can be changed, each with the setup that agrees with Transformers, and its own parts."""
    for name, encoder in encoders:
        place, kind = ".".join(filter(None, (found.path, name))), stock_class(type(encoder)).__name__
        reason = _refusal(encoder, padding)
        if isinstance(encoder, RelPosBertModel):
            if reason is None and padding != "stock":
                pads = padding_tokens(tokenizer_of(found.owner, found.module), encoder)
                yield encoder, (Setup("own", ("right",), pads, padding == "mask"), None)
            elif padding != "stock":
                taken.skipped.append(Skipped(place, kind, reason or ""))
            continue
        own, refused = (None, None) if reason else own_parts(encoder)
        setup: Setup | str | None = None
        if reason is None and padding != "stock":
            pads = padding_tokens(tokenizer_of(found.owner, found.module), encoder)
            setup = Check(encoder, shadow(encoder), pads, own, padding == "mask").setup()
        if isinstance(setup, Setup):
            setup = replace(setup, fewest=FEWEST, call_cost=TOKENS_OF_A_CALL, is_trial=False)
            yield encoder, (setup, own if setup.level == "own" else None)
        elif own is not None and padding == "stock":
            yield encoder, (None, own)
        else:
            why = "; ".join(filter(None, (reason, setup, refused)))
            taken.skipped.append(Skipped(place, kind, why or "padding is left to Transformers"))


def _refusal(encoder: Any, padding: str) -> str | None:
    """Why an encoder is left as it is without a look at its numbers; None for no reason."""
    if SETUP in vars(encoder) or any(type(part).__module__ in OWN_CODE for part in modules_in(encoder)):
        return "it is accelerated already"
    if isinstance(encoder, RelPosBertModel):
        return "it takes padding out already" if encoder.can_unpad else None
    if "forward" in vars(encoder):
        return "other code has replaced its forward method"
    devices = {each.device.type for each in encoder.parameters()}
    if devices - {"cpu"}:
        return f"it is on {', '.join(sorted(devices - {'cpu'}))}, and only CPUs are served"
    return None if padding == "stock" else batch_dependence(encoder)


def _sides_that_heads_allow(
    root: nn.Module, encoders: list[tuple[str, nn.Module]], setups: dict[nn.Module, tuple[Setup | None, Any]]
) -> tuple[tuple[str, ...], str]:
    """Where padding may be taken out of without another output of the object that was given; and who reads it."""
    unpadded = [
        (name, setup, own) for name, each in encoders for setup, own in [setups.get(each, (None, None))] if setup
    ]
    if not unpadded or root in setups:
        return SIDES[0], ""
    for module in root.modules():
        if SPANS in type(module).__name__:
            return (), f"{type(module).__name__} compares all states of a row, padding too"
    check, kind = EndToEnd(root, unpadded), type(root).__name__
    sides = check.sides()
    if sides and not check.is_called:
        return sides, f"whether {kind} reads states at padding is not known: if it does, pass padding='stock'"
    if sides and sides == check.common:
        return sides, ""
    return sides, f"{kind} reads states at padding, and computes other outputs without"


def _changed(
    place: str,
    kind: str,
    encoder: Any,
    setup: Setup | None,
    own: OwnParts | None,
    reader: str,
    changed: list[nn.Module],
) -> Encoder:
    """Change an encoder, and say how."""
    if isinstance(encoder, RelPosBertModel) and setup is not None:
        encoder.can_unpad = partial(may_unpad, setup)
        changed.append(encoder)
        return Encoder(place, kind, len(encoder.encoder.layer), "own", 0.0, "padding is taken out")
    effects = [] if own is None else [own.effect]
    layers = 0 if own is None else own.layers(encoder)
    if setup is None:
        changed += own.give(encoder) if own is not None else []
        if reader:
            effects.append(f"padding stays: {reader}")
        return Encoder(place, kind, layers, "", 0.0, "; ".join(filter(None, effects)))
    changed += apply_to(encoder, setup, own)
    where = "" if len(setup.sides) == len(SIDES[0]) else f" on the {setup.sides[0]}"
    taken_out = f"padding{where} is taken out, its hidden states are zeros"
    taken_out += f" (level {setup.level}, difference {setup.difference:.0e})"
    if setup.returns_cache:
        argument = "use_mems" if hasattr(getattr(encoder, "config", None), "mem_len") else "use_cache"
        taken_out += f"; calls that return keys and values are left to Transformers: ask with {argument}=False"
    if setup.trained is not None:
        taken_out += f"; not of batches of {setup.trained} tokens and more, whose length changes what it computes"
    if not setup.trains:
        taken_out += "; not in training, where rows depend on each other"
    if reader:
        taken_out += f"; {reader}"
    if watched := next((part for part in modules_in(encoder) if part is not encoder and is_watched(part)), None):
        taken_out += f"; not while {type(watched).__name__} has hooks"
    return Encoder(place, kind, layers, setup.level, setup.difference, "; ".join(filter(None, (*effects, taken_out))))


def restore_attention(model: nn.Module) -> None:
    """Undo `optimize` everywhere in a model, also in a copy or after loading a pickle.

    Args:
        model: any module.
    """
    for module in model.modules():
        restore(module)


def restore(module: Any) -> None:
    """Give a module the class and the attention that it had before `optimize`."""
    own = vars(module)
    if isinstance(module, RelPosBertModel):
        own.pop("can_unpad", None)
    if own.pop(SETUP, None) is not None:
        for part in modules_in(module):
            config: Any = getattr(part, "config", None)
            if getattr(config, "_attn_implementation_internal", None) == contract.NAME:
                config._attn_implementation_internal = contract.DELEGATE
    kind = type(module)
    if hasattr(kind, "hf_relpos_stock") or kind.__module__.startswith(f"{__package__}.") or kind is FastLinear:
        own.pop("_rounded", None)
        module.__class__ = transformers_class(kind)
