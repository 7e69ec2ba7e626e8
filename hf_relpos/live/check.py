"""Choose the level of an encoder: the first whose outputs equal Transformers' on a probe batch.

A few rows of random tokens, padded on the right and on the left, run through the encoder's own forward and through
each level, and the first that agrees at real tokens is taken. All of this runs on a shadow of the model, which shares
its parameters and nothing else: dropout is off there, other tensors and configuration are its own, and other threads
see nothing of it.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..host.transformers import CACHE_NAMES
from .arguments import parameters_of
from .by_length import ByLength
from .call import EncoderCall, Level, Setup
from .contract import DELEGATE, Contract, Native, WithPadding, take_over
from .encoder import SETUP, optimized_forward, plan
from .foreign import CONTENTS, Contents, kinds_in, modules_in
from .guard import HALF, Guard, WriteError, is_half
from .own import OwnParts
from .probe import MEMORIES, SIDES, TOLERANCE, TOLERANCE_OF_HALF, Probe, differences, outputs_of, without_dropout
from .shadow import first_layers, shadow
from .substitute import MADE_OF, substitute_class


LENGTHS = (20, 9, 5, 3)  # of the rows, in several groups
# Fields that Transformers' mask functions read in every call, and their value in the check, whose rows are longer.
WINDOWS, NARROW = ("sliding_window", "attention_chunk_size"), 2
# In the names of other fields that are lengths; and in those of counts, and of what is no structure of rows.
STRUCTURE = frozenset(("window", "block", "chunk", "stride", "radius", "landmarks", "segment", "kernel"))
COUNTS = frozenset(("layers", "pattern", "multiple", "types", "forward", "per", "group"))
MOST_OPERATIONS = 1e11  # of a call with rows longer than these: a second or two
# Rotations whose angles depend on the length of the batch. Those of remote code are found by `Verified`.
BY_BATCH = ("dynamic", "longrope")
# Seconds that a call of a few tokens may take. Scans that pad to whole chunks take minutes where they have no kernels.
SLOW = 10.0


def refusal(encoder: Any, own: OwnParts | None, keeps_padding: bool) -> str | None:
    """Return why an encoder is skipped before anything is computed; None if it is not.

    Args:
        own: the parts for it.
        keeps_padding: whether padding stays in any case.
    """
    if any(hasattr(type(part), MADE_OF) for part in modules_in(encoder)):
        return "it is accelerated already"
    unpads = getattr(encoder, "unpads", None)
    if unpads:
        return "it takes padding out already"
    if keeps_padding and own is None:
        return "padding is left to Transformers"
    if "forward" in vars(encoder):
        return "other code has replaced its forward method"
    devices = {each.device.type for each in encoder.parameters()} - {"cpu"}
    if devices:
        remedy = "" if unpads is None else ": set config.unpad_inputs = True"
        return f"it is on {', '.join(sorted(devices))}, and only CPUs are served{remedy}"
    config = getattr(encoder, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    if keeps_padding and own is not None:
        is_ours = own.level == "own" or chosen == DELEGATE
        return None if is_ours else f"attn_implementation = {chosen!r}: attention is accelerated with 'sdpa'"
    # ways in which rows of a batch depend on each other that a few rows do not show
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in modules_in(encoder)):
        return "its BatchNorm mixes the sequences of a batch in training"
    if getattr(config, "expert_capacity", None):
        return "the capacity of its experts is that of a batch"
    return None


def rotations_by_batch(encoder: nn.Module) -> int | None:
    """Return the batch length from which RoPE depends on it; None if it never does."""
    config: Any = getattr(encoder, "config", None)
    limits = []
    for part in modules_in(encoder):
        kinds: Any = getattr(part, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, Mapping) else {"": kinds}).items():
            if isinstance(kind, str) and any(name in kind for name in BY_BATCH):
                limits.append(getattr(part, "original_max_seq_len", None) or config.max_position_embeddings)
                parameters: Any = getattr(config, "rope_parameters", None) or {}
                trained = (parameters.get(layer) or parameters).get("original_max_position_embeddings")
                limits += [trained] if trained else []
    return min(limits, default=None)


def sparse_from(config: Any) -> int | None:
    """Return the batch length from which attention chooses keys, by score or at random; None for never.

    Which ones are chosen depends on padding then: scores are equal where all heads have zeros, and blocks are drawn.
    """

    def product(*names: str) -> int | None:
        values = [getattr(config, name, None) for name in names]
        return math.prod(each for each in values if each) if all(isinstance(each, int) for each in values) else None

    limits = [product("index_topk"), product("keep_window_size"), product("index_topk_blocks", "index_block_size")]
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird's is full up to these
        limits.append((5 + 2 * config.num_random_blocks) * config.block_size)
    return min((each + 1 for each in limits if each), default=None)


def longest_structure(config: Any) -> int:
    """Return the largest block, chunk or window size in a configuration; 0 for none."""
    found = [0]
    for name, value in getattr(config, "__dict__", {}).items():
        words = {*name.split("_")}
        if words & STRUCTURE and not words & COUNTS and name not in WINDOWS:
            found += [each for each in (value if isinstance(value, list | tuple) else (value,)) if type(each) is int]
    return max(found)


class Check:
    """Tries the levels of one encoder on a weight-sharing copy of it."""

    def __init__(self, encoder: Any, setup: Setup, own: OwnParts | None) -> None:
        """
        Args:
            encoder: of the model that was given.
            setup: what is known. Without sides padding stays, and attention of our own is tried alone.
            own: parts of our own for it.
        """
        self.encoder, self.own = encoder, own
        self.trial = shadow(encoder, has_memory=False)
        config = getattr(encoder, "config", None)
        known, foreign = kinds_in(encoder)
        limits = [each for each in (rotations_by_batch(encoder), sparse_from(config)) if each is not None]
        is_causal = any(getattr(part, "is_causal", False) for part in modules_in(encoder))
        self.window = None if is_causal else getattr(config, "sliding_window", None)
        self.structure = 0 if foreign else longest_structure(config)  # third-party code is checked at longer calls
        self.lengths = tuple(min([each, *(limit - 1 for limit in limits)]) for each in LENGTHS)
        for holder in [each for part in modules_in(self.trial) for each in (part, vars(part).get("config"))]:
            for name in WINDOWS:
                if isinstance(size := getattr(holder, name, None), int) and size > NARROW:
                    setattr(holder, name, NARROW)
        self.base = replace(
            setup,
            limit=min(limits, default=None),
            trusted=known | foreign,
            is_foreign=bool(foreign),
            checked=self.lengths[0],
        )

    def levels(self) -> Iterator[tuple[Level, ...]]:
        """Return the levels to try, fastest first, each with and without position ids."""
        places = ("columns", "counted")
        takes_places = "position_ids" in parameters_of(type(self.encoder).forward)[0]
        window, config = self.window and NARROW, getattr(self.encoder, "config", None)
        if hasattr(self.encoder, "unpads"):
            if not self.base.is_foreign:
                yield (Native(),)
        elif self.own is not None:
            window = window if self.own.level == "contract" else None
            found = tuple(Contract(positions, window, self.own) for positions in places)
            yield found if self.base.sides else (WithPadding(self.own),)
        elif not self.base.is_foreign and getattr(config, "_attn_implementation", None) == DELEGATE:
            yield tuple(Contract(positions, window) for positions in places)
        if self.base.sides:
            yield (ByLength(), ByLength("columns")) if takes_places else (ByLength(),)

    def setup(self) -> Setup | str:
        """Return the setup of the first level that agrees, or why none does."""
        if self.lengths[0] < 2:
            return "its rotations depend on the length of the batch, and no trained length is known"
        begin = time.perf_counter()
        try:
            longest, *others = self.lengths
            # third-party code may return the longest row's states alone, so that no row is as long as the batch
            lengths = (longest - 1 if self.base.is_foreign else longest, *others)
            self.probe = Probe(self.trial, lengths, self.base.pads, SIDES, self.base.trusts_mask, longest)
            expected = outputs_of(self.trial, self.probe.inputs)
            plain = shadow(self.encoder, has_memory=False)
            rounded = outputs_of(plain, self.probe.inputs, own_dtype=True) if is_half(plain) else None
        except WriteError as error:
            return str(error)
        except Exception as error:  # whatever third-party code raises
            return f"its own forward fails on a few tokens ({type(error).__name__}: {error})"
        if (seconds := time.perf_counter() - begin) > SLOW:
            return f"its own forward takes {seconds:.0f} s for a few tokens, too long to try others"
        base = replace(self.base, returns_cache=self._returns_cache())
        if rounded is not None and base.in_float32:
            is_half_all = all(each.dtype in HALF or not each.is_floating_point() for each in rounded.values())
            exact = outputs_of(shadow(self.encoder, has_memory=False), self.probe.inputs)
            is_near = bool((differences(rounded, exact, self.probe.real) <= TOLERANCE_OF_HALF).all())
            base = replace(base, in_float32=is_half_all and is_near)
        reasons = []
        for levels in self.levels():
            best = self._best(base, levels, expected)
            level = best.levels[0]
            if isinstance(level, Contract):
                level = replace(level, window=level.window and self.window)
            best = self._with_long_rows(replace(best, levels=(level,)))
            if best.sides and rounded is not None:
                trial = shadow(self.encoder, has_memory=False)
                found = self._tried(best, level, rounded, trial, own_dtype=True)
                best = replace(best, sides=tuple(side for side in best.sides if side in found.sides))
            if not best.sides:
                is_computed = math.isfinite(best.difference)
                reasons.append(f"{level.name} {best.difference:.0e}" if is_computed else f"{level.name} fails")
                continue
            if level.name == ByLength.name:
                again = outputs_of(self.trial, self.probe.inputs, seed=1)
                if differences(again, expected, self.probe.real).max() > TOLERANCE:
                    return "its own outputs differ from call to call: it draws random numbers, or has a state"
            if base.is_foreign:
                best = replace(best, trains=self._trains(best))
            return replace(best, sides=best.sides if base.sides else (), levels=with_others(level, self.own))
        if base.in_float32:
            return replace(base, sides=())
        return f"no level computes what it does on a probe batch (difference: {', '.join(reasons)})"

    def _returns_cache(self) -> bool:
        if self.probe.inputs.keys().isdisjoint(MEMORIES):
            return False
        short = {name: True if name in MEMORIES else each[:1, :2] for name, each in self.probe.inputs.items()}
        try:
            model = shadow(self.encoder)
            with Guard(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = model(**short)
        except Exception:  # of caches that have no place for the keys and values of its layers
            return True
        found = getattr(outputs, "__dict__", {})  # Transformers warns of an attribute with an old name
        return any(found.get(name) is not None for name in (*CACHE_NAMES, "mems"))

    def _trains(self, setup: Setup) -> bool:
        """Whether a setup also agrees in training mode, where third-party code may mix sequences."""
        stock = without_dropout(self.trial)
        try:
            expected = outputs_of(stock, self.probe.inputs)
        except Exception:  # of models that ask for labels then
            return False
        # running means and the like, which each part of a batch would move
        if not all(map(torch.equal, stock.buffers(), self.trial.buffers())):
            return False
        found = self._tried(setup, setup.levels[0], expected, without_dropout(self.trial))
        return {*setup.sides} <= {*found.sides}

    def _with_long_rows(self, setup: Setup) -> Setup:
        """Return the setup for the sides on which it agrees on sequences longer than the lengths in the configuration.

        Where those cannot be computed, or only at length, batches that are as long are left to Transformers.
        """
        config: Any = getattr(self.encoder, "config", None)
        limits = (setup.limit and setup.limit - 1, getattr(config, "max_position_embeddings", None))
        size = min([2 * self.structure + 2, *(each for each in limits if each)])
        if not setup.sides or size <= LENGTHS[0]:
            return setup
        stock, trial = first_layers(self.trial), first_layers(self.trial)
        sizes = (size * 7 // 8, size * 5 // 8, 3)
        tables = (part for part in modules_in(stock) if not isinstance(part, nn.Embedding))
        weights = sum(each.numel() for part in tables for each in part.parameters(recurse=False))
        if 2 * weights * sum(sizes) <= MOST_OPERATIONS:
            probe = Probe(stock, sizes, setup.pads, SIDES, setup.trusts_mask, size)
            with suppress(Exception):  # of positions that end before, or code that counts layers
                expected = outputs_of(stock, probe.inputs)
                found = self._tried(setup, setup.levels[0], expected, trial, probe)
                return replace(found, sides=tuple(side for side in setup.sides if side in found.sides))
        return replace(setup, limit=min(setup.limit or self.structure, self.structure))

    def _best(self, setup: Setup, levels: Iterable[Level], expected: dict[str, Any]) -> Setup:
        """Return the setup of the level that agrees on most sides."""
        found: list[Setup] = []
        for level in levels:
            found.append(self._tried(setup, level, expected, shadow(self.trial)))
            if found[-1].sides == SIDES:
                break
        return max(found, key=lambda each: (len(each.sides), -each.difference))

    def _tried(
        self,
        setup: Setup,
        level: Level,
        expected: dict[str, Any],
        trial: Any,
        probe: Probe | None = None,
        own_dtype: bool = False,
    ) -> Setup:
        """Return the setup for the sides on which a level agrees, with its difference; the least one if on none."""
        probe, setup = probe or self.probe, replace(setup, levels=(level,), sides=(), difference=math.inf)
        tried = replace(setup.for_check(), sides=SIDES)
        try:
            apply_to(trial, tried)
        except TypeError:  # of classes that refuse subclasses
            return setup
        if not plan(EncoderCall(trial, trial.forward, tried, probe.inputs))[0]:
            return setup
        sides, difference = probe.agreement(trial, expected, probe.inputs, own_dtype=own_dtype)
        return replace(setup, sides=sides, difference=difference)


def with_others(level: Level, own: OwnParts | None) -> tuple[Level, ...]:
    """Return a level that agrees, followed by those for calls that it does not compute."""
    alone = () if own is None or level.name == ByLength.name else (WithPadding(own, own.serves_short),)
    if not isinstance(level, Contract):
        return alone or (level,)
    return (level, ByLength(level.positions, inner=alone), *alone)


def apply_to(encoder: Any, setup: Setup) -> None:
    """Make the forward of an encoder follow a setup."""
    if setup.own is not None:
        setup.own.give(encoder)
    encoder.__class__ = substitute_class(type(encoder), optimized_forward)
    vars(encoder).update({SETUP: setup, CONTENTS: Contents()})
    take_over()
