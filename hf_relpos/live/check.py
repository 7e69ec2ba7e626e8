"""At which level an encoder computes what Transformers does: measured on the model that was given.

A few rows of random tokens, padded on the right and on the left, run through the encoder's own forward and through
each level, and the first that agrees at real tokens is taken. All of this runs on a shadow of the model, which shares
its parameters and nothing else: dropout is off there, other tensors and configuration are its own, and other threads
see nothing of it.
"""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..host.transformers import CACHE_NAMES
from ..models.modeling_relpos_bert import RelPosBertModel
from . import contract
from .arguments import parameters_of
from .encoder import SETUP, Level, Setup, plan_of
from .foreign import kinds_in, modules_in
from .guard import Guard, WriteError, is_half
from .labels import forward_unless_labelled, may_unpad_unless_labelled
from .own import OwnParts
from .probe import MEMORIES, SIDES, TOLERANCE, Probe, differences, outputs_of, without_dropout
from .shadow import first_layers, shadow
from .substitute import MADE_OF, substitute_class


LENGTHS = (20, 9, 5, 3)  # of the rows, in several groups
# Fields that Transformers' mask functions read in every call, and their value in the check, whose rows are longer.
WINDOWS, NARROW = ("sliding_window", "attention_chunk_size"), 2
# In the names of other fields that are lengths; and in those of counts, and of what is no structure of rows.
STRUCTURE = frozenset(("window", "block", "chunk", "stride", "radius", "landmarks", "segment", "kernel"))
COUNTS = frozenset(("layers", "pattern", "multiple", "types", "forward", "per", "group"))
MOST_OPERATIONS = 1e11  # of a call with rows longer than these: a second or two
# Rotations whose angles depend on the length of the batch. Those of remote code are found by `with_length`.
BY_BATCH = ("dynamic", "longrope")
# Seconds that a call of a few tokens may take. Scans that pad to whole chunks take minutes where they have no kernels.
SLOW = 10.0


def refusal(encoder: Any, own: OwnParts | None, keeps_padding: bool) -> str | None:
    """Why an encoder is left as it is without a look at its numbers; None for no reason.

    Args:
        own: the parts for it.
        keeps_padding: whether padding stays in any case.
    """
    if any(hasattr(type(part), MADE_OF) for part in modules_in(encoder)):
        return "it is accelerated already"
    if isinstance(encoder, RelPosBertModel) and encoder.can_unpad:
        return "it takes padding out already"
    if keeps_padding and own is None:
        return "padding is left to Transformers"
    if isinstance(encoder, RelPosBertModel):
        return None
    if "forward" in vars(encoder):
        return "other code has replaced its forward method"
    devices = {each.device.type for each in encoder.parameters()} - {"cpu"}
    if devices:
        return f"it is on {', '.join(sorted(devices))}, and only CPUs are served"
    config = getattr(encoder, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    if keeps_padding and own is not None:
        is_ours = own.level == "own" or chosen == contract.DELEGATE
        return None if is_ours else f"attn_implementation = {chosen!r}: attention is accelerated with 'sdpa'"
    # ways in which rows of a batch depend on each other that a few rows do not show
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in modules_in(encoder)):
        return "its BatchNorm reads all rows of a batch in training"
    if getattr(config, "expert_capacity", None):
        return "the capacity of its experts is that of a batch"
    return None


def rotations_by_batch(encoder: nn.Module) -> int | None:
    """The length of a batch from which on its rotations depend on it; None where they never do."""
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
    """The length of a batch from which on attention chooses keys, by their scores or at random; None for never.

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
    """The largest length in a configuration by which rows are cut, as into blocks or windows; 0 for none."""
    found = [0]
    for name, value in getattr(config, "__dict__", {}).items():
        words = {*name.split("_")}
        if words & STRUCTURE and not words & COUNTS and name not in WINDOWS:
            found += [each for each in (value if isinstance(value, list | tuple) else (value,)) if type(each) is int]
    return max(found)


def with_length(encoder: Any, setup: Setup, batch: int, length: int) -> Setup:
    """The setup of an encoder with code of others, once batches of a length are checked, too; it is stored.

    What the rows of `Check` do not show appears in longer ones: windows, blocks, scales and rotations by the length.

    Args:
        batch: rows of the call, which bound those of the check, and so its memory.
    """
    stock, trial = shadow(encoder, has_memory=False), shadow(encoder, has_memory=False)
    del vars(stock)[SETUP]
    vars(trial)[SETUP] = replace(setup, checked=None, is_trial=True)
    most = getattr(getattr(encoder, "config", None), "max_position_embeddings", None) or length
    step = min(2 ** (length - 1).bit_length(), 1024)  # up to which power of two, or multiple of 1,024
    longer = min(-(-length // step) * step, max(most, length))
    found = replace(setup, trained=max(setup.checked or 0, length // 2) + 1)
    for size in dict.fromkeys((longer, length)):
        # no row is as long as the batch, since some rotations keep the tables of the longest input that they have seen
        lengths = (size * 7 // 8, size * 5 // 8, 3)[: max(batch, 2)]
        probe = Probe(encoder, lengths, setup.pads, setup.sides, setup.trusts_mask, size)
        with suppress(Exception):  # of a model that ends before
            expected = outputs_of(stock, probe.inputs)
            if probe.agreement(trial, expected, probe.inputs)[0] == setup.sides:
                found = replace(setup, checked=size)
                break
    vars(encoder)[SETUP] = found
    return found


class Check:
    """The levels of one encoder, tried on a shadow of it."""

    def __init__(self, encoder: Any, setup: Setup) -> None:
        """
        Args:
            encoder: of the model that was given.
            setup: what is asked for. Without sides padding stays, and attention of our own is tried alone.
        """
        self.encoder = encoder
        self.trial = shadow(encoder, has_memory=False)
        self.names, _ = parameters_of(type(encoder).forward)
        config = getattr(encoder, "config", None)
        known, foreign = kinds_in(encoder)
        limits = [each for each in (rotations_by_batch(encoder), sparse_from(config)) if each is not None]
        limit, trusted = min(limits, default=None), known | foreign
        self.base = replace(setup, trained=limit, trusted=trusted, is_trial=True)
        self.levels: list[Level] = ["by length"] if setup.sides else []
        attention = getattr(config, "_attn_implementation", None)
        if setup.own is not None:
            self.levels.insert(0, setup.own.level)
        elif not foreign and attention in (contract.DELEGATE, contract.NAME):
            self.levels.insert(0, "contract")
        self.is_foreign = bool(foreign)
        is_causal = any(getattr(part, "is_causal", False) for part in modules_in(encoder))
        self.two_sided = None if is_causal else getattr(config, "sliding_window", None)
        self.structure = 0 if foreign else longest_structure(config)  # code of others is checked at longer calls
        self.lengths = tuple(min([each, *(limit - 1 for limit in limits)]) for each in LENGTHS)
        for holder in [each for part in modules_in(self.trial) for each in (part, vars(part).get("config"))]:
            for name in WINDOWS:
                if isinstance(size := getattr(holder, name, None), int) and size > NARROW:
                    setattr(holder, name, NARROW)

    def setup(self) -> Setup | str:
        """The setup of the first level that agrees; or why none does."""
        if self.lengths[0] < 2:
            return "its rotations depend on the length of the batch, and no trained length is known"
        begin = time.perf_counter()
        try:
            longest, *others = self.lengths
            # the code of others may return the longest row's states alone, so that no row is as long as the batch
            lengths = (longest - 1 if self.is_foreign else longest, *others)
            self.probe = Probe(self.trial, lengths, self.base.pads, SIDES, self.base.trusts_mask, longest)
            expected = outputs_of(self.trial, self.probe.inputs)
            plain = shadow(self.encoder, has_memory=False)
            rounded = outputs_of(plain, self.probe.inputs, own_dtype=True) if is_half(plain) else None
        except WriteError as error:
            return str(error)
        except Exception as error:  # whatever the code of others raises
            return f"its own forward fails on a few tokens ({type(error).__name__}: {error})"
        if (seconds := time.perf_counter() - begin) > SLOW:
            return f"its own forward takes {seconds:.0f} s for a few tokens, too long to try others"
        base = replace(self.base, returns_cache=self._returns_cache())
        reasons = []
        for level in self.levels:
            window = self.two_sided if level == "contract" else None
            own = None if level == "by length" else base.own
            best = self._best(replace(base, level=level, own=own, window=window and NARROW), expected)
            best = self._with_long_rows(replace(best, window=window))
            if best.sides and rounded is not None:
                trial = shadow(self.encoder, has_memory=False)
                found = self._tried(replace(best, sides=SIDES), rounded, trial, own_dtype=True)
                best = replace(best, sides=tuple(side for side in best.sides if side in found.sides))
            if not best.sides:
                is_computed = math.isfinite(best.difference)
                reasons.append(f"{level} {best.difference:.0e}" if is_computed else f"{level} fails")
                continue
            if level == "by length":
                again = outputs_of(self.trial, self.probe.inputs, seed=1)
                if differences(again, expected, self.probe.real).max() > TOLERANCE:
                    return "its own outputs differ from call to call: it draws random numbers, or has a state"
            if self.is_foreign:
                best = replace(best, trains=self._trains(best), checked=self.lengths[0], recheck=with_length)
            return replace(best, sides=best.sides if base.sides else (), own=own, is_trial=False)
        return f"no level computes what it does on a few rows (difference: {', '.join(reasons)})"

    def _returns_cache(self) -> bool:
        if self.probe.inputs.keys().isdisjoint(MEMORIES):
            return False
        short = {name: each[:1, :2] for name, each in self.probe.inputs.items() if name not in MEMORIES}
        try:
            model = shadow(self.encoder)
            with Guard(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = model(**short)
        except Exception:  # of caches that have no place for the keys and values of its layers
            return True
        found = getattr(outputs, "__dict__", {})  # Transformers warns of an attribute with an old name
        return any(found.get(name) is not None for name in (*CACHE_NAMES, "mems"))

    def _trains(self, setup: Setup) -> bool:
        """Whether a setup agrees in training, too, where code of others may read all rows of a batch."""
        stock = without_dropout(self.trial)
        try:
            expected = outputs_of(stock, self.probe.inputs)
        except Exception:  # of models that ask for labels then
            return False
        # running means and the like, which each part of a batch would move
        if not all(map(torch.equal, stock.buffers(), self.trial.buffers())):
            return False
        found = self._tried(replace(setup, sides=SIDES), expected, without_dropout(self.trial))
        return {*setup.sides} <= {*found.sides}

    def _with_long_rows(self, setup: Setup) -> Setup:
        """The setup with the sides on which it agrees on rows longer than the lengths in the configuration.

        Where those cannot be computed, or only at length, batches that are as long are left to Transformers.
        """
        config: Any = getattr(self.encoder, "config", None)
        limits = (setup.trained and setup.trained - 1, getattr(config, "max_position_embeddings", None))
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
                found = self._tried(replace(setup, sides=SIDES), expected, trial, probe)
                return replace(found, sides=tuple(side for side in setup.sides if side in found.sides))
        return replace(setup, trained=min(setup.trained or self.structure, self.structure))

    def _best(self, setup: Setup, expected: dict[str, Any]) -> Setup:
        """The setup of a level that agrees on most sides, with the position ids that this takes."""
        choices: tuple[str | None, ...] = (None,)
        if "position_ids" in self.names:
            choices = (None, "columns") if setup.level == "by length" else ("columns", "counted")
        found: list[Setup] = []
        for positions in choices:
            found.append(self._tried(replace(setup, positions=positions), expected, shadow(self.trial)))
            if found[-1].sides == SIDES:
                break
        return max(found, key=lambda each: (len(each.sides), -each.difference))

    def _tried(
        self, setup: Setup, expected: dict[str, Any], trial: Any, probe: Probe | None = None, own_dtype: bool = False
    ) -> Setup:
        """A setup with the sides on which it agrees, and its difference there; if on none, the least of a side."""
        probe = probe or self.probe
        if setup.own is not None:  # the rows of the check are short
            setup = replace(setup, own=replace(setup.own, serves_short=True))
        try:
            apply_to(trial, setup)
        except TypeError:  # of classes that refuse subclasses
            return replace(setup, sides=(), difference=math.inf)
        plan = plan_of(trial, setup, self.names, probe.inputs)
        if plan is None or (plan.batch is None) != (setup.level == "by length"):
            return replace(setup, sides=(), difference=math.inf)
        sides, difference = probe.agreement(trial, expected, probe.inputs, own_dtype=own_dtype)
        return replace(setup, sides=sides, difference=difference)


def apply_to(encoder: Any, setup: Setup) -> None:
    """Let the forward of an encoder follow a setup."""
    if isinstance(encoder, RelPosBertModel):
        encoder.can_unpad = partial(may_unpad_unless_labelled, setup)
        return
    if setup.own is not None:
        setup.own.give(encoder)
    encoder.__class__ = substitute_class(type(encoder), forward_unless_labelled)
    vars(encoder)[SETUP] = setup
    if setup.level == "contract":
        contract.replace_attention(encoder, contract.DELEGATE, contract.NAME)
