"""At which level an encoder computes what Transformers does: measured on the model that was given.

A few rows of random tokens, padded on the right and on the left, run through the encoder's own forward and through
each level, and the first that agrees at real tokens is taken. Then the object that was given is called as its user
calls it, since a head may read padding. All of this runs on a shadow of the model, which shares its parameters and
nothing else: dropout is off there, buffers and configuration are its own, and other threads see nothing of it.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..host.transformers import CACHE_NAMES
from ..models.modeling_relpos_bert import RelPosBertModel
from . import contract
from .encoder import SETUP, TOKENS, Level, Setup, optimized_class, parameters_of, plan_of
from .foreign import kinds_in, modules_in
from .own import OwnParts
from .shadow import shadow


# Arguments that ask for keys and values, or XLNet's memory.
MEMORIES = ("use_cache", "use_mems")
MEMORY_FIELDS = ("use_cache", "use_mems_eval", "use_mems_train")
# Lengths of the rows, in several groups; of encoders with more parameters than `LARGE` the second ones.
LENGTHS, FEWER_LENGTHS, LARGE = (20, 9, 5, 3), (18, 4, 3), 400_000_000
# Windows up to this size are met by a row that is longer; wider ones are left to the mask functions.
WIDEST_WINDOW = 256
# Largest difference, as a share of the largest value: float32 and float64, and half precision.
TOLERANCE, TOLERANCE_OF_HALF = 1e-5, 3e-2
# Rotations whose angles depend on the length of the batch, as Transformers calls them.
BY_BATCH = ("dynamic", "longrope")
# In names of classes and fields of remote code that do likewise.
BY_BATCH_NAMES = ("dynamic", "ntk", "longrope")
# Seconds that a call of a few tokens may take. Scans that pad to whole chunks take minutes where they have no kernels.
SLOW = 10.0
# Padding tokens of models that name none: zero, and the end of a text.
UNNAMED = (0,)
# Of setups that are tried: several groups or parts of a few rows, whatever they cost.
TRIAL: dict[str, Any] = {"fewest": 1, "call_cost": 0, "is_trial": True}
SIDES: tuple[tuple[str, ...], ...] = (("right", "left"), ("right",), ("left",))


class Probe:
    """Rows of random tokens for an encoder, and which of their positions are padding."""

    def __init__(
        self,
        encoder: Any,
        lengths: Iterable[int],
        pads: tuple[int, ...],
        sides: tuple[str, ...],
        trusts_mask: bool = False,
    ) -> None:
        """
        Args:
            lengths: of the rows, the longest first.
            pads: ids of the padding token.
            sides: where padding stands; with two of them rows take turns.
            trusts_mask: whether any token may stand there, since the mask alone says what is padding.
        """
        sizes = list(lengths)
        generator = torch.Generator().manual_seed(0)
        config = getattr(encoder, "config", None)
        words = vocabulary_of(encoder)
        columns, length = torch.arange(sizes[0]), sizes[0]
        rows = [
            columns < size if sides[row % len(sides)] == "right" else columns >= length - size
            for row, size in enumerate(sizes)
        ]
        self.real = torch.stack(rows)
        special = [*pads, *(getattr(config, name, None) for name in ("eos_token_id", "bos_token_id", "unk_token_id"))]
        common = torch.arange(min(words // 4, 1000), words)
        plain = common[~torch.isin(common, torch.tensor([each for each in special if isinstance(each, int)]))]
        common = plain if len(plain) else common
        ids = common[torch.randint(len(common), self.real.shape, generator=generator)]
        hidden = ids.clone() if trusts_mask else torch.full_like(ids, pads[0])
        mask_token = getattr(config, "mask_token_id", None)
        if isinstance(mask_token, int) and mask_token < words:
            ids[0, columns == length - 2] = mask_token  # encoders that look for it do so in each row by itself
            if trusts_mask:
                hidden[:, ::2] = mask_token  # ESM-2 counts those that the mask hides, too
        self.ids = torch.where(self.real, ids, hidden)

    def inputs(self, encoder: Any) -> dict[str, Any]:
        """Arguments of the forward of an encoder, or of a model around it."""
        names, _ = parameters_of(type(encoder).forward)
        given: dict[str, Any] = {"input_ids": self.ids.clone(), "attention_mask": self.real.long()}
        given |= {name: False for name in MEMORIES if name in names}
        return given


def vocabulary_of(encoder: Any) -> int:
    """How many tokens an encoder knows; of a module that does not say so, by its first table of embeddings.

    Raises:
        StopIteration: if it has none.
    """
    try:
        table = encoder.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        table = None
    if not isinstance(getattr(table, "weight", None), torch.Tensor):
        table = next(part for part in encoder.modules() if isinstance(part, nn.Embedding))
    count: int = table.weight.shape[0]
    return count


def padding_tokens(tokenizer: Any, encoder: Any) -> tuple[int, ...]:
    """Ids of the padding token: of the configuration, and of the tokenizer that came with the model, if any.

    Where neither names one, those that people take in its place: zero, and the end of a text.
    """
    config = getattr(encoder, "config", None)
    sources = (getattr(config, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None))
    named = [each for each in sources if isinstance(each, int) and each >= 0]
    if named:
        return tuple(dict.fromkeys(named))
    ends = getattr(config, "eos_token_id", None)
    found = [*UNNAMED, *(ends if isinstance(ends, list | tuple) else (ends,))]
    return tuple(dict.fromkeys(each for each in found if isinstance(each, int)))


def batch_dependence(encoder: nn.Module) -> str | None:
    """Why rows of a batch depend on each other in ways that a few rows do not show; None for no known reason."""
    for part in modules_in(encoder):
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            return "its BatchNorm reads all rows of a batch in training"
    if getattr(getattr(encoder, "config", None), "expert_capacity", None):
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
        name = type(part).__name__.lower()
        if kinds is None and ("rotary" in name or "rope" in name) and any(each in name for each in BY_BATCH_NAMES):
            trained = getattr(config, "max_trained_positions", None) or getattr(config, "max_position_embeddings", 0)
            limits.append(trained)
    return min(limits) if limits else None


def sparse_from(config: Any) -> int | None:
    """The length of a batch from which on attention chooses keys, by their scores or at random; None for never.

    Which ones are chosen depends on padding then: scores are equal where all heads have zeros, and blocks are drawn.
    """

    def product(*names: str) -> int | None:
        values = [getattr(config, name, None) for name in names]
        return math.prod(each for each in values if each) if all(isinstance(each, int) for each in values) else None

    limits = [product("index_topk"), product("keep_window_size"), product("index_topk_blocks", "index_block_size")]
    if getattr(config, "attention_type", None) == "block_sparse":
        limits.append(
            (5 + 2 * config.num_random_blocks) * config.block_size
        )  # BigBird's full attention is up to these
    return min((each + 1 for each in limits if each), default=None)


def outputs_of(model: Any, inputs: dict[str, Any], *args: Any, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Tensors of what a model returns, by names; with other random numbers than a call without a seed draws."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        if seed is not None:
            torch.manual_seed(seed)
        return dict(_tensors("", model(*map(_copied, args), **_copied(inputs))))


def _copied(inputs: Any) -> Any:
    """Inputs that a model may change."""
    if isinstance(inputs, torch.Tensor):
        return inputs.clone()
    return {name: _copied(value) for name, value in inputs.items()} if isinstance(inputs, dict) else inputs


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(f"{name}.{key}", each)
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from _tensors(f"{name}.{index}", each)


def differences(found: dict[str, Any], expected: dict[str, Any], real: torch.Tensor) -> torch.Tensor:
    """The largest difference in each row as a share of the largest value, (B,); infinite where outputs are others.

    Tensors (B, L, …) are compared at tokens, all others as a whole.
    """
    worst = torch.zeros(len(real), dtype=torch.float64)
    if found.keys() != expected.keys():
        return worst + float("inf")
    for name, want in expected.items():
        got = found[name]
        if got.shape != want.shape or not want.numel():
            return worst + float("inf")
        got, want = (each.detach().double() for each in (got, want))
        if want.shape[:2] == real.shape:
            hidden = ~real.reshape(*real.shape, *(1,) * (want.dim() - 2))
            got, want = got.masked_fill(hidden, 0), want.masked_fill(hidden, 0)
        apart = (got - want).abs().nan_to_num(float("inf")) / want.abs().max().clamp(min=1e-30)
        if want.shape[:1] == real.shape[:1]:
            worst = worst.maximum(apart.reshape(len(real), -1).amax(1))
        else:
            worst = worst.maximum(apart.max())
    return worst


def tolerance_of(module: nn.Module) -> float:
    """The largest difference that is rounding, in the dtype of a module's parameters."""
    dtype = next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)
    return TOLERANCE if dtype in (torch.float32, torch.float64) else TOLERANCE_OF_HALF


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a shadow in training mode with dropout 0."""
    made: nn.Module = shadow(model).train()
    for part in modules_in(made):
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for holder in filter(None, (part, vars(part).get("config"))):
            for name, value in list(vars(holder).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
    return made


def with_length(encoder: Any, setup: Setup, batch: int, length: int) -> Setup:
    """The setup of an encoder with code of others, once batches of a length are checked, too; it is stored.

    What the rows of `Check` do not show appears in longer ones: windows, blocks, scales and rotations by the length.

    Args:
        batch: rows of the call, which bound those of the check, and so its memory.
    """
    stock, trial = shadow(encoder), shadow(encoder)
    del vars(stock)[SETUP]
    vars(trial)[SETUP] = replace(setup, checked=None, **TRIAL)
    most = getattr(getattr(encoder, "config", None), "max_position_embeddings", None) or length
    step = min(2 ** (length - 1).bit_length(), 1024)  # up to which power of two, or multiple of 1,024
    longer = min(-(-length // step) * step, max(most, length))
    for size in dict.fromkeys((longer, length)):
        probe = Probe(encoder, (size, size * 5 // 8, 3)[: max(batch, 2)], setup.pads, setup.sides, setup.trusts_mask)
        inputs = probe.inputs(encoder)
        try:
            worst = differences(outputs_of(trial, inputs), outputs_of(stock, inputs), probe.real)
        except Exception:  # of a model that ends before
            continue
        if float(worst.max()) <= tolerance_of(encoder):
            found = replace(setup, checked=size)
            break
    else:
        found = replace(setup, checked=None, trained=(setup.checked or 0) + 1)
    vars(encoder)[SETUP] = found
    return found


class Check:
    """The levels of one encoder, tried on a shadow of it."""

    def __init__(
        self, encoder: Any, trial: Any, pads: tuple[int, ...], own: OwnParts | None = None, trusts_mask: bool = False
    ) -> None:
        """
        Args:
            encoder: of the model that was given.
            trial: its shadow.
            pads, trusts_mask: as of `Setup`.
            own: the parts for its class.
        """
        self.encoder, self.trial, self.own = encoder, trial, own
        known, foreign = kinds_in(encoder)
        self.is_foreign = bool(foreign)
        self.names, _ = parameters_of(type(encoder).forward)
        limits = (rotations_by_batch(encoder), sparse_from(getattr(encoder, "config", None)))
        trained = min((each for each in limits if each is not None), default=None)
        trusted = known | foreign
        self.base = Setup("by length", pads=pads, trusts_mask=trusts_mask, trained=trained, trusted=trusted, **TRIAL)
        parameters = sum(each.numel() for each in encoder.parameters())
        lengths: tuple[int, ...] = FEWER_LENGTHS if parameters > LARGE else LENGTHS
        window = getattr(getattr(encoder, "config", None), "sliding_window", None)
        if isinstance(window, int) and lengths[0] < window + 2 <= WIDEST_WINDOW:
            lengths = (window + 2, *lengths[1:])
        self.two_sided = None if any(getattr(part, "is_causal", False) for part in modules_in(encoder)) else window
        if self.base.trained is not None:
            lengths = tuple(min(each, self.base.trained - 1) for each in lengths)
        self.lengths = lengths
        self.tolerance = tolerance_of(encoder)

    def setup(self) -> Setup | str:
        """The setup of the first level that agrees; or why none does."""
        if self.lengths[0] < 2:
            return "its rotations depend on the length of the batch, and no trained length is known"
        begin = time.perf_counter()
        try:
            probe = Probe(self.encoder, self.lengths, self.base.pads, SIDES[0], self.base.trusts_mask)
            inputs = probe.inputs(self.encoder)
            expected = outputs_of(self.trial, inputs)
            if (seconds := time.perf_counter() - begin) > SLOW:
                return f"its own forward takes {seconds:.0f} s for a few tokens, too long to try others"
        except Exception as error:  # whatever the code of others raises
            return f"its own forward fails on a few tokens ({type(error).__name__}: {error})"
        base = replace(self.base, returns_cache=self._returns_cache(inputs))
        reasons = []
        for level in self._levels():
            best: Setup | None = None
            worst = float("inf")
            for positions in self._positions(level):
                window = self.two_sided if level == "contract" else None
                tried = replace(base, level=level, positions=positions, window=window)
                setup, least = self._tried(tried, probe, inputs, expected)
                worst = min(worst, least)
                if setup is not None and (best is None or len(setup.sides) > len(best.sides)):
                    best = setup
                if best is not None and len(best.sides) == len(SIDES[0]):
                    break
            if best is not None and level == "by length":
                again = differences(outputs_of(self.trial, inputs, seed=1), expected, probe.real)
                if not float(again.max()) <= self.tolerance:
                    return "its own outputs differ from call to call: it draws random numbers, or has a state"
            if best is not None and self.is_foreign:
                best = replace(
                    best, trains=self._trains(best, probe, inputs), checked=self.lengths[0], recheck=with_length
                )
            if best is not None:
                return best
            reasons.append(f"{level} {worst:.0e}" if worst < float("inf") else f"{level} fails")
        return f"no level computes what it does on a few rows (difference: {', '.join(reasons)})"

    def _levels(self) -> tuple[Level, ...]:
        if self.is_foreign:
            return ("by length",)
        if self.own is not None:
            return ("own", "by length")
        implementation = getattr(getattr(self.encoder, "config", None), "_attn_implementation", None)
        return ("contract", "by length") if implementation in (contract.DELEGATE, contract.NAME) else ("by length",)

    def _positions(self, level: Level) -> tuple[str | None, ...]:
        if "position_ids" not in self.names:
            return (None,)
        return (None, "columns") if level == "by length" else ("columns", "counted")

    def _returns_cache(self, inputs: dict[str, Any]) -> bool:
        if not any(name in inputs for name in MEMORIES):
            return False
        names = [name for name in inputs if name not in MEMORIES]
        short = {name: inputs[name][:1, :2] if name in (*TOKENS, "attention_mask") else inputs[name] for name in names}
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = self.trial(**short)
        except Exception:  # of caches that have no place for the keys and values of its layers
            return True
        found = getattr(outputs, "__dict__", {})  # Transformers warns of an attribute with an old name
        return any(found.get(name) is not None for name in (*CACHE_NAMES, "mems"))

    def _trains(self, setup: Setup, probe: Probe, inputs: dict[str, Any]) -> bool:
        """Whether a setup agrees in training, too, where code of others may read all rows of a batch."""
        try:
            expected = outputs_of(without_dropout(self.trial), inputs)
        except Exception:  # of models that ask for labels then
            return False
        both = replace(setup, sides=SIDES[0])
        found, _ = self._tried(both, probe, inputs, expected, without_dropout(self.trial))
        return found is not None and {*setup.sides} <= {*found.sides}

    def _tried(
        self, setup: Setup, probe: Probe, inputs: dict[str, Any], expected: dict[str, Any], trial: Any = None
    ) -> tuple[Setup | None, float]:
        """A setup with the sides on which it agrees, None if on none; and the least difference of a side."""
        trial = shadow(self.trial) if trial is None else trial
        apply_to(trial, setup, self.own)
        if plan_of(trial, setup, self.names, dict(inputs)) is None:
            return None, float("inf")
        try:
            found = outputs_of(trial, inputs)
        except Exception:  # of the encoder's code, which may expect what a level does not give
            return None, float("inf")
        worst = differences(found, expected, probe.real)
        of_side = {side: float(worst[index::2].max()) for index, side in enumerate(SIDES[0])}
        sides = tuple(side for side in SIDES[0] if of_side[side] <= self.tolerance)
        if not sides:
            return None, min(of_side.values())
        difference = max(of_side[side] for side in sides)
        return replace(setup, sides=sides, difference=difference), difference


class EndToEnd:
    """Calls of the object that was given, as its user calls it: who else reads padding?"""

    def __init__(self, root: nn.Module, setups: Sequence[tuple[str, Setup, OwnParts | None]]) -> None:
        """
        Args:
            setups: of encoders inside, by their names; at least one.
        """
        self.root, self.setups, self.tolerance = root, setups, tolerance_of(root)
        self.is_called = False  # whether it took any of the arguments that are tried
        name, first, _ = setups[0]
        # on other sides one of them would leave padding to Transformers, and its outputs would be those of before
        self.common = tuple(side for side in SIDES[0] if all(side in setup.sides for _, setup, _ in setups))
        limit = min((setup.trained - 1 for _, setup, _ in setups if setup.trained is not None), default=LENGTHS[0])
        lengths = [min(each, limit) for each in LENGTHS]
        self.probe = Probe(root.get_submodule(name), lengths, first.pads, self.common or SIDES[0])

    def sides(self) -> tuple[str, ...]:
        """Where padding stands in rows with the same outputs without it; of all if it is not known how to call it."""
        stock = self._shadow()
        for inputs in self._inputs():
            try:
                expected = outputs_of(stock, *inputs)
            except Exception:  # another signature; the code of others raises what it likes
                continue
            trial = self._shadow()
            for name, setup, own in self.setups:
                encoder = trial.get_submodule(name)
                if isinstance(encoder, RelPosBertModel):
                    encoder.can_unpad = lambda *given: True
                else:
                    apply_to(encoder, replace(setup, **TRIAL), own)
            try:
                worst = differences(outputs_of(trial, *inputs), expected, self.probe.real)
            except Exception:
                return ()
            turns = len(self.common)
            self.is_called = True
            return tuple(s for i, s in enumerate(self.common) if float(worst[i::turns].max()) <= self.tolerance)
        return self.common

    def _shadow(self) -> Any:
        """A shadow of the object whose encoders return no keys and values, with which they would keep padding."""
        made = shadow(self.root)
        for name, setup, _ in self.setups:
            config = getattr(made.get_submodule(name), "config", None)
            for field in MEMORY_FIELDS if setup.returns_cache else ():
                if hasattr(config, field):
                    setattr(config, field, False)
        return made

    def _inputs(self) -> Iterator[tuple[Any, ...]]:
        """Arguments that modules around encoders take, one after the other: by name, as a dict, or by position."""
        ids, mask = self.probe.ids, self.probe.real.long()
        kind: Any = type(self.root)
        names, takes_others = parameters_of(kind.forward)
        if "MultipleChoice" in kind.__name__:
            ids, mask = ids[:, None], mask[:, None]
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if "decoder_input_ids" in names:
            given["decoder_input_ids"] = ids[:, :2]
        given |= {name: False for name in MEMORIES if name in names or takes_others}
        if "input_ids" in names or takes_others:
            yield (given,)
        yield ({}, {"input_ids": ids, "attention_mask": mask})
        yield ({}, ids, mask)
        yield ({}, ids, mask.sum(-1))  # lengths
        yield ({}, ids)


def apply_to(encoder: Any, setup: Setup, own: OwnParts | None = None) -> list[nn.Module]:
    """Let the forward of an encoder follow a setup; returns the modules that were changed."""
    changed = own.give(encoder) if own is not None and setup.level == "own" else []
    kind: Any = type(encoder)
    encoder.__class__ = optimized_class(kind)
    vars(encoder)[SETUP] = setup
    if setup.level == "contract":
        for part in modules_in(encoder):
            config: Any = getattr(part, "config", None)
            if getattr(config, "_attn_implementation_internal", None) == contract.DELEGATE:
                config._attn_implementation_internal = contract.NAME
    return [*changed, encoder]
