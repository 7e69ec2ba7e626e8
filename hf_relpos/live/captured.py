"""Level `captured`: inference of few tokens without padding, by a graph that was recorded of the encoder.

`torch.export` records the encoder for any number and length of rows. `flat_graph` makes one function of that, without
modules, whose products read packed weights. It is taken if its outputs are those of the encoder, and if it is faster.
"""

import itertools
import math
import warnings
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn

from ..host.torch import unflatten
from ..products.cpu_gemm import may_pack, seconds_of
from ..products.flat_graph import FlatGraph, flat_graph
from ..products.weight_cache import ATTRIBUTE, Snapshots
from .arguments import SWITCHES, parameters_of
from .call import EncoderCall, Level, MismatchError, Setup
from .contract import full_rows
from .encoder import SETUP
from .foreign import CAPTURE, CONTENTS, HELD, configs_of, modules_in
from .half import TWIN
from .levels import undo_optimize
from .probe import MEMORIES, SIDES, TOLERANCE, Probe, differences, outputs_of, tensors_in
from .rules import returns_cache
from .shadow import shadow
from .verify import is_exact


INPUTS = ("input_ids", "token_type_ids")
OWN = {ATTRIBUTE, SETUP, TWIN, CAPTURE, CONTENTS, *HELD}
FASTER = 1.05  # times as fast as without
TIMED = 16  # tokens
MOST = 512  # tokens of a call. See docs/results/benchmarks/cpu-encoder.md


class Forward(nn.Module):
    """An encoder as a function of its inputs alone."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, (names, _) = encoder, parameters_of(type(encoder).forward)
        self.switches = {name: False for name in MEMORIES if name in names} | {"return_dict": True}

    def forward(self, *tensors: torch.Tensor) -> Any:
        """The outputs of tokens, and of token types if there are two arguments."""
        return self.encoder(**dict(zip(INPUTS, tensors, strict=False)), **self.switches)


class Bound(NamedTuple):
    """A graph with the weights of an encoder.

    Attributes:
        known: the values of the encoder's `Contents` for which they were looked up.
        tensors: of the encoder, by name.
        values: of the arguments of the graph but for inputs.
        before: what those weights held of which there are copies.
    """

    known: Any
    tensors: dict[str, torch.Tensor]
    values: list[torch.Tensor]
    before: Snapshots


class Capture:
    """The graph of an encoder. Copies and pickles of it record one of their own, in the first call that it computes.

    Attributes:
        graph: the flat function; None before it is recorded, or if it cannot be.
        bound: the same with weights.
        seen: what weights held in the last call, if they have changed since they were bound.
        refusal: why it cannot be.
        difference: from the encoder's own outputs, as a share of the largest value.
        least, longest: lengths of rows.
        count: of the inputs.
    """

    graph: FlatGraph | None = None
    bound: Bound | None = None
    seen: Snapshots | None = None
    refusal = ""
    difference = 0.0
    least, longest, count = 2, MOST, len(INPUTS)

    def __init__(self) -> None:
        self.lock = Lock()

    def __reduce__(self) -> Any:
        return Capture, ()

    def without_record(self) -> "Capture":
        """For copies to measure on."""
        return Capture()

    @property
    def nbytes(self) -> int:
        """Memory of copies of weights."""
        if self.graph is None or self.bound is None:
            return 0
        pairs = zip(self.graph.arguments, self.bound.values, strict=False)
        return sum(value.nbytes for argument, value in pairs if argument.is_copy)

    def __str__(self) -> str:
        if self.graph is None:
            return f"not captured: {self.refusal}"
        return (
            f"calls of up to {MOST} tokens without padding run a captured graph (inference; difference "
            f"{self.difference:.0e}; packed weights, {self.nbytes / 1e6:.3g} MB)"
        )

    def record(self, encoder: Any, setup: Setup) -> None:
        """Record a graph, unless there is one, or none can be."""
        with self.lock, torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.graph is None and not self.refusal:
                self.refusal = against_capture(encoder, setup)
                takes_types = INPUTS[1] in parameters_of(type(encoder).forward)[0]
                for count in () if self.refusal else (2, 1) if takes_types else (1,):
                    try:
                        self.refusal = self._record(encoder, setup, count)
                    except Exception as error:  # of whatever a model does, and of all that it cannot be exported with
                        reason = " ".join(str(error).split())[:200]
                        self.refusal = f"it cannot be exported ({type(error).__name__}: {reason})"
                    if not self.refusal:
                        break

    def _record(self, encoder: Any, setup: Setup, count: int) -> str:
        """Record a graph with so many inputs; or say why not."""
        stock = shadow(encoder, has_memory=False)
        undo_optimize(stock)
        for part in modules_in(stock):  # whose parameters get weak references, which the encoder's shall not have
            own = part._parameters
            own.update({name: nn.Parameter(each.detach(), False) for name, each in own.items() if each is not None})
        sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        inputs = tuple(torch.zeros(2, 17, dtype=torch.long) for _ in range(count))  # each a tensor of its own
        shapes = {"tensors": (sizes,) * count}
        with full_rows():
            program = torch.export.export(Forward(stock), inputs, dynamic_shapes=shapes, strict=False)
        token = next(node for node in program.graph.nodes if node.name == program.graph_signature.user_inputs[0])
        lengths = program.range_constraints[token.meta["val"].shape[1].node.expr]
        self.count, self.outputs, self.structure = count, program.call_spec.out_spec, structure_of(encoder)
        graph = flat_graph(program)
        bound, positions = self._bound(graph, encoder), getattr(stock.config, "max_position_embeddings", MOST)
        longest = int(min(lengths.upper, MOST, MOST if setup.limit is None else setup.limit - 1, positions))
        self.least, self.difference = int(lengths.lower), math.inf
        # RoBERTa counts positions from its padding id on
        for self.longest in (longest, longest - 1 - max(setup.pads, default=0)):
            with suppress(IndexError):
                self.difference = self._compared(graph, bound, stock, setup)
                break
        if self.difference > TOLERANCE:
            return f"its outputs differ by {self.difference:.0e}"
        tokens = torch.zeros(1, TIMED, dtype=torch.long)
        runs = {
            "before": partial(Forward(shadow(encoder)), tokens),
            "captured": partial(self.run, graph, bound, tokens),
        }
        taken = seconds_of(runs)
        if taken["before"] < FASTER * taken["captured"]:
            return f"it is not faster ({1e3 * taken['captured']:.1f} ms instead of {1e3 * taken['before']:.1f})"
        self.graph, self.bound = graph, bound
        return ""

    def _compared(self, graph: FlatGraph, bound: Bound, stock: Any, setup: Setup) -> float:
        """The largest difference from Transformers' outputs, in the longest, the shortest and several rows."""
        worst = 0.0
        few = max(self.least, min(TIMED, self.longest))
        for rows, length, left_out in ((1, self.longest, ""), (1, self.least, ""), (5, few, "attention_mask")):
            probe = Probe(stock, (length,) * rows, setup.pads or (0,), SIDES[:1])
            found = dict(tensors_in(self.run(graph, bound, probe.ids)))
            given = {name: each for name, each in probe.inputs.items() if name != left_out}
            worst = max(worst, float(differences(found, outputs_of(stock, given), probe.real).max()))
        return worst

    def _bound(self, graph: FlatGraph, encoder: Any) -> Bound:
        tensors = {**graph.constants, **tensors_of(encoder)}
        before = Snapshots([tensors[name] for name in graph.copied])
        return Bound(vars(encoder)[CONTENTS].values, tensors, graph.bind(tensors), before)

    def run(self, graph: FlatGraph, bound: Bound, tokens: Any, types: Any = None) -> Any:
        """The outputs for tokens, and for their types, which are zeros if none are given."""
        types = torch.zeros_like(tokens) if types is None else types
        return unflatten(graph.function(*bound.values, *(tokens, types)[: self.count]), self.outputs)

    def against(self, encoder: Any, setup: Setup) -> str:
        """Why the graph is not that of the encoder as it is now; "" if it is, with its weights.

        Weights that have changed are packed in the second call: as in training they may change between calls.
        """
        if self.graph is None:
            self.record(encoder, setup)
        if self.graph is None:
            return self.refusal
        known, bound = vars(encoder)[CONTENTS].values, self.bound
        if bound is not None and bound.known is not known:
            now, tensors = structure_of(encoder), tensors_of(encoder)
            is_same = all(now.get(key) is value for key, value in self.structure.items())
            if not is_same or any(not key[1] and key not in self.structure for key in now):  # or a part is new
                return "the encoder was changed since it was captured: call optimize again"
            if all(each is bound.tensors.get(name) for name, each in tensors.items()):
                bound = self.bound = bound._replace(known=known)
        if bound is not None and bound.known is known and bound.before.hold():
            return ""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            tensors = tensors_of(encoder)
            copied = [tensors[name] for name in self.graph.copied]
            if bound is not None and not (self.seen and self.seen.hold(copied)):
                self.seen = Snapshots(copied)
                return "weights have changed since the call before"
            self.bound, self.seen = self._bound(self.graph, encoder), None
        return ""


def against_capture(encoder: Any, setup: Setup) -> str:
    """Why an encoder cannot be captured, before it is tried; "" for no reason."""
    if not may_pack():
        return "weights cannot be packed here, or HF_RELPOS_ONEDNN forbids it"
    if setup.is_foreign:
        return "it has third-party code inside"
    dtypes = {each.dtype for each in encoder.parameters() if each.is_floating_point()}
    return "" if is_exact(encoder) and dtypes == {torch.float32} else "it does not compute in float32"


def tensors_of(encoder: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, with the names that they have in `Forward`."""
    named = itertools.chain(
        encoder.named_parameters("encoder", remove_duplicate=False),
        encoder.named_buffers("encoder", remove_duplicate=False),
    )
    return dict(named)


def structure_of(encoder: nn.Module) -> dict[tuple[str, str], Any]:
    """What an encoder is made of but for tensors and hooks: modules, their classes, attributes and configurations.

    By the names of a part and of its attribute; "" for the part itself.
    """
    found: dict[tuple[str, str], Any] = {}
    for place, part in encoder.named_modules(remove_duplicate=False):
        found |= {(place, name): each for name, each in vars(part).items() if name not in OWN}
        found |= {(place, ""): part, (place, "__class__"): type(part)}
    for number, config in enumerate(configs_of(modules_in(encoder))):
        found |= {(f"config {number}", name): each for name, each in config.items()}
    return found


class Captured(Level):
    """The level."""

    name = "captured"
    removes_padding = False

    def unsupported(self, call: EncoderCall) -> list[str]:
        """As of every level."""
        capture, rows, length = vars(call.encoder).setdefault(CAPTURE, Capture()), *call.shape
        tokens = call.given.get("input_ids")
        others = {name for name, each in call.given.items() if each is not None}
        others -= {*INPUTS[: capture.count], *SWITCHES, "attention_mask"}
        if call.encoder.training or torch.is_grad_enabled():
            return ["gradients are recorded, or it trains: call it in evaluation and under torch.no_grad()"]
        if others or tokens is None or tokens.dtype != torch.long or call.by_row:
            return ["it has other arguments than tokens, mask and token types"]
        if torch.is_autocast_enabled("cpu") or call.wants("output_hidden_states") or returns_cache(call):
            return ["it asks for hidden states or a cache, or is under autocast"]
        if call.hidden:
            return ["it has padding"]
        if not capture.least <= length <= capture.longest or rows * length > MOST:
            lengths = f"{capture.least} to {capture.longest}"
            return [f"it has {rows} × {length} tokens; up to {MOST} are captured, in rows of {lengths}"]
        return [why] if (why := call.changed or capture.against(call.encoder, call.setup)) else []

    def run(self, call: EncoderCall) -> Any:
        """As of every level."""
        return call.forward_as_asked(lambda given: self._run(call.encoder, given), call.given)

    def _run(self, encoder: Any, given: dict[str, Any]) -> Any:
        capture: Capture = vars(encoder)[CAPTURE]
        if capture.graph is None or capture.bound is None:
            raise MismatchError("its weights were dropped meanwhile")
        with torch.no_grad():
            tokens, types = (given.get(name) for name in INPUTS)
            return capture.run(capture.graph, capture.bound, tokens, types)
