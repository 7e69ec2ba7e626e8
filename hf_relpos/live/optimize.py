"""Speed up a loaded model on the CPU in place: unpadding, attention, matrix products; and undo it."""

import functools
import os
import re
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from ..deferred import when_imported
from ..deprecation import UNPAD as UNPAD_BEFORE, rename_arguments, warn
from ..host.torch import QUANTIZERS, before_quantization
from ..products.cpu_gemm import HALF, FastLinear, Library, half_library, limit_caches, linear_library, packed_rows
from ..products.low_precision import KINDS, HalfLinear, int8_rates
from ..products.weight_cache import CachingLinear, forget
from ..schemes.projection_cache import forget_projections
from .captured import Capture, Captured
from .comparison import Agreement, Comparison, Sample
from .encoder import SETUP
from .end_to_end import MAY_READ
from .find import layers_in, modules_of
from .foreign import CAPTURE
from .half import TWIN, tables_of
from .joined import JOINED, Joined, may_join
from .levels import IN_FLOAT32, UNPAD, Encoder, Skipped, restore, take_padding_out, undo_optimize
from .precision import choose
from .record import Answer, Counts, Record, watching
from .splade import take_maxima_first
from .verify import WHEN, Verified


DTYPES = ("float32", "bfloat16", "int8", "auto")
VERIFY = "HF_RELPOS_VERIFY"  # environment variable: the default of `verify`
BYTES = {"bfloat16": 2, "int8": 1}  # of an element of a rounded weight
ONEDNN = "by oneDNN"
JOINS = "calls of several threads are computed together"
COPIES = "after writes through .data to single elements of a weight call refresh(); others are seen"
ZEROS = "hidden states at padding are zeros: read them by the mask, or pass unpad=False"


@dataclass
class Optimized:
    """Report of `optimize`, and the handle that undoes it; also a context manager.

    Attributes:
        encoders: those that it made faster, with their level.
        skipped: those that it left as they are, and why.
        linear: how many linear layers compute in float32; None where none was to be changed.
        products: by which library, with the rates and errors measured on this machine.
        rounded: what computes in another precision than it has, as a sentence.
        agreement: of the outputs with those before, for "int8", "auto" and a sample.
        choices: time and agreement of each precision, for "auto".
        captured: which calls run a captured graph, or why none do, for `capture=True`.
        copies: which writes to weights their copies do not follow, if there are copies.
        joined: whether calls of several threads are computed together, in words; "" without `join`.
    """

    encoders: tuple[Encoder, ...]
    skipped: tuple[Skipped, ...]
    linear: int | None
    products: str
    rounded: str = ""
    agreement: Agreement | None = None
    choices: str = ""
    captured: str = ""
    copies: str = ""
    joined: str = ""
    _modules: list[nn.Module] | None = field(default_factory=list, repr=False)
    _record: Record = field(default_factory=Record, repr=False)
    _root: Any = field(default=None, repr=False)

    def undo(self) -> None:
        """Restore the modules that this call changed, once calls in flight have ended.

        A second call does nothing.
        """
        with self._record.none():
            self.refresh()
            while self._modules:
                restore(self._modules.pop())
            self._modules = None

    def refresh(self) -> None:
        """Drop packed and rounded copies of weights, and cached projections; the next call makes them again.

        Needed after a write through `.data` or NumPy to single elements of a weight. All other writes are seen.
        """
        for module in self._modules or ():
            forget(module)
            vars(module).pop(TWIN, None)
            if CAPTURE in vars(module):
                vars(module)[CAPTURE].bound = None
            forget_projections(module)

    def counts(self) -> Counts:
        """Return counts of the calls so far: by level, with their tokens, and why padding was kept."""
        return self._record.counts

    def explain(self, *args: Any, **inputs: Any) -> list[Answer]:
        """Call the optimized object, and return how each call of its encoders was computed, and why.

        Args:
            args, inputs: as of the object's own call; or a function and its arguments.

        Returns:
            An answer for each call of an encoder; `print` them to read them.
        """
        call, *args = args if args and callable(args[0]) else (self._root, *args)  # type: ignore[assignment]
        with torch.no_grad(), watching() as found:
            call(*args, **inputs)
        return [replace(each, products=self.products) for each in found]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    @property
    def left(self) -> tuple[Skipped, ...]:
        """`skipped`, by its old name."""
        warn("Optimized.left", "skipped")
        return self.skipped

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dictionaries, for JSON."""
        found = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        found |= {name: [asdict(each) for each in found[name]] for name in ("encoders", "skipped")}
        return found | {"agreement": self.agreement and asdict(self.agreement)}

    @property
    def summary(self) -> str:
        """The report in a few words for one line of a log, most important first."""
        levels = ", ".join(sorted({each.level for each in self.encoders if each.level}))
        reasons, effects = [each.reason for each in self.skipped], "; ".join(each.effect for each in self.encoders)
        if any(MAY_READ in each for each in (*reasons, effects)):
            reasons = ["padding kept: code may read it (--unpad pad_token)"]
        faster = ["attention"] if "is faster" in effects else []
        if self.linear and self.products.startswith(ONEDNN):
            faster.append(f"{self.linear} layers {ONEDNN}")
        words = [f"padding removed (level {levels})"] if levels else []
        words += ["short requests run a graph"] if "run a captured graph" in self.captured else []
        words += [IN_FLOAT32] if IN_FLOAT32 in effects else []
        words += [re.split(r", and| \([A-Z]", each)[0] for each in reasons[:1]]
        words += [re.split("[:(]", self.rounded)[0].replace(" linear", "").strip()] if self.rounded else []
        words += [f"faster: {', '.join(faster)}"] if faster else []
        words += ["calls joined"] if self.joined == JOINS else []
        return "; ".join(dict.fromkeys(words)) or "nothing is changed"

    def __str__(self) -> str:
        if self._modules is None:
            return "undone: the model is as it was before"
        lines = [ZEROS] if any(each.is_bare and each.level for each in self.encoders) else []
        lines += [str(each) for each in self.encoders]
        if self.linear or (self.linear is not None and "earlier" in self.products):
            lines.append(f"{self.linear} linear layer{'s' * (self.linear != 1)} in float32: {self.products}")
        notes = (self.choices, self.rounded, self.captured, self.copies, self.joined, self.agreement)
        lines += map(str, filter(None, notes))
        lines += [f"skipped {each.name or 'the model'} ({each.kind}): {each.reason}" for each in self.skipped]
        return "\n".join(lines) or "nothing is changed"


@rename_arguments(precision=("dtype", {}), padding=("unpad", UNPAD_BEFORE))
def optimize(
    model: Any,
    dtype: str | torch.dtype | None = "float32",
    unpad: str | bool = True,
    sample: Sample = None,
    verify: str | None = None,
    join: bool = False,
    capture: bool = False,
) -> Optimized:
    """Speed up a loaded model on the CPU, in place, without another format or runtime.

    - Padding is taken out of encoders: between the first and the last layer a batch is its tokens alone. Hidden states
      at padding are zeros then; all others are unchanged. Which way it is taken out ("level") is measured on the model
      that was given, against its own forward, and named in the report; where no way agrees, the model is left alone.
    - Relative attention of DeBERTa v1 to v3, MPNet, RoFormer, XLNet, T5, mT5, UMT5, Wav2Vec2-BERT and SeamlessM4T v2's
      speech encoder computes with this package's backends.
    - Linear layers multiply by oneDNN where a measurement finds it faster on this machine, and as exact.
    - Encoders in half precision compute inference in float32 where that is faster, by a copy with float32 weights.

    Parameters, their names, the state dict and what `save_pretrained` writes stay as they are; training, gradient
    checkpointing, adapters, copies and threads work as before. docs/live.md has the calls that Transformers answers.

    Args:
        model: a PreTrainedModel, a CrossEncoder or SentenceTransformer, a GLiNER, a pipeline; any module with encoders
            inside; or an object that holds such modules in its attributes or items, to a depth of three.
        dtype: of the matrix products of linear layers inside the encoders, as text or as `torch.bfloat16`. "float32":
            outputs are unchanged up to rounding. "bfloat16": with errors of about 1e-2 of the largest value. "int8",
            for inference: a scale for each token and each output feature; outputs are compared with those in float32,
            layers that do harm stay in float32, and `agreement` of the result says how close it is. "auto": the
            fastest of these on the sample and this machine whose rows have a mean cosine of 0.995 or more. Weights
            stay as they are. None: linear layers are left as they are.
        unpad: which padding is removed. True or "pad_token": positions where the mask is 0 and the token is the pad
            token. "attention_mask": where the mask is 0, whatever the token, and also of `inputs_embeds`. "auto": as
            True where sentence-transformers or a pipeline reads the outputs by the mask, or those at padding stay, as
            logits of sequences; otherwise none. False or "never": none; Transformers computes padded calls.
        sample: data for a before/after comparison of outputs and latency: texts, if `model` has a tokenizer or
            processor, or inputs of the model; for an encoder-decoder without decoder inputs, of its encoder. It is
            measured on a copy that shares the weights. None for no comparison, and in "int8" and "auto" for random
            tokens of the vocabulary, which say less.
        verify: which calls in evaluation are computed both ways, by their level and by Transformers, whose outputs are
            returned. "first call": the first of each kind of arguments, length and padding; a kind that differs is
            left to Transformers, with a warning. "always", "every 1000": further ones, too. "load": none. None for the
            environment variable HF_RELPOS_VERIFY, or "first call".
        join: whether inference that several threads call at the same time is computed together: calls of an encoder
            that come while it computes are one batch, next. See docs/serve.md.
        capture: whether inference of few tokens without padding runs a graph of the encoder that `torch.export`
            records, where its outputs agree and it is faster. That takes some seconds, and memory for packed weights.

    Returns:
        The report of what was changed, what was left and why, and what was measured; also the handle to undo it.

    Raises:
        TypeError: if `model` is no module and holds none.
        ValueError: for an unknown dtype, unpad or verify, for "int8", "auto" or a sample and a module without a
            PreTrainedModel inside or one whose forward writes to its weights, and for texts and no tokenizer.

    Example:

    ```python
    >>> from sentence_transformers import CrossEncoder
    >>> import hf_relpos

    >>> reranker = CrossEncoder("cross-encoder/nli-deberta-v3-base")
    >>> print(hf_relpos.optimize(reranker))
    ```
    """
    found = modules_of(model, "optimize")
    precision = None if dtype is None else str(dtype).removeprefix("torch.")
    if precision not in (*DTYPES, None):
        raise ValueError(f"dtype = {dtype!r} is not one of {', '.join(map(repr, DTYPES))}, None")
    way = unpad if isinstance(unpad, str) else UNPAD[0] if unpad else UNPAD[-1]
    if way not in UNPAD:
        raise ValueError(f"unpad = {unpad!r} is not one of {', '.join(map(repr, UNPAD))}, True, False")
    record = Record(Verified(verify or os.environ.get(VERIFY) or WHEN[0]))
    limit_caches()
    _serve_quantizers()
    library = linear_library()  # before anything is changed, since the environment may be wrong
    roots = [each.module for each in found]
    wanted = sample is not None or precision in ("int8", "auto")
    comparison = Comparison(model, roots[0], sample) if wanted else None
    before = [(module, type(module)) for root in roots for module in root.modules()]
    try:
        widens = precision is not None
        reports = [report for each in found for report in take_padding_out(each, way, record, widens, capture)]
        encoders = tuple(each for each in reports if isinstance(each, Encoder))
        skipped = tuple(each for each in reports if isinstance(each, Skipped))
        handle = Optimized(encoders, skipped, None, "", _record=record, _root=model)
        _change_products(roots, precision, library, comparison, handle)
        if capture:
            _capture(roots, handle)
        handle._modules = [module for module, kind in before if type(module) is not kind]
        for module in handle._modules if join else ():
            if may_join(vars(module).get(SETUP)):
                vars(module)[JOINED], handle.joined = Joined(), JOINS
        if join and not handle.joined:
            handle.joined = f"no {JOINS}: padding stays, or third-party code is inside"
        return handle
    except BaseException:
        for module, kind in before:
            if type(module) is not kind:
                restore(module)
        raise


@functools.cache
def _serve_quantizers() -> None:
    """Undo `optimize` in models that `quantize_dynamic` gets: it looks for exactly `nn.Linear`."""
    when_imported(QUANTIZERS, lambda: before_quantization(undo_optimize))


def _change_products(
    roots: list[nn.Module], precision: str | None, library: Library, comparison: Comparison | None, handle: Optimized
) -> None:
    """Make linear layers multiply faster, those of encoders in a lower precision; report it in the handle."""
    modules = [module for root in roots for module in root.modules()]
    layers = [] if precision is None else _linear_layers(modules)
    inside = set() if precision == "float32" else set().union(*map(layers_in, roots))
    rounded = [layer for layer in layers if layer in inside]
    handle.products = ONEDNN if library.is_used else "PyTorch's own products are kept"
    handle.products += f" ({rates_of(library)})"
    if already := sum(isinstance(module, CachingLinear) for module in modules):
        handle.products += f"; {already} are as an earlier call left them"
    if library.is_used or (layers and packed_rows()):
        for layer in layers:
            layer.__class__ = FastLinear
    widened = "" if precision is None else _widen_products(modules)
    if precision is not None and any([take_maxima_first(root) for root in roots]):
        handle.products += "; the vocabulary head reads tokens only, and gives their maxima to SpladePooling"
    if precision == "int8" and not int8_rates().is_faster:
        handle.rounded, precision, rounded = f"int8 is {int8_rates()}: layers stay in float32", "float32", []
    if comparison is not None:
        taken = choose(comparison, rounded, precision or "float32")
        precision, rounded, handle.agreement = taken.precision, taken.layers, taken.agreement
        handle.choices = taken.choices
    for layer in rounded:
        layer.__class__ = KINDS[str(precision)]
    handle.linear = None if precision is None else len(layers) - len(rounded)
    if rounded:
        memory = sum(layer.weight.numel() for layer in rounded) * BYTES[str(precision)] / 1e6
        handle.rounded = f"{len(rounded)} linear layers in {precision}: copies of weights, {memory:.3g} MB"
    if packed_rows() and handle.linear:
        memory = sum(layer.weight.nbytes for layer in {*layers} - {*rounded}) / 1e6
        handle.products += f"; calls of up to {packed_rows()} tokens read packed copies of weights, {memory:.3g} MB"
    handle.rounded = "; ".join(filter(None, (handle.rounded, widened)))
    if handle.rounded or packed_rows():
        handle.copies = COPIES


def _capture(roots: list[nn.Module], handle: Optimized) -> None:
    """Record graphs of the encoders, and note them in the handle."""
    encoders = [each for root in roots for each in root.modules() if SETUP in vars(each)]
    notes = []
    for encoder in encoders:
        found, setup = Capture(), vars(encoder)[SETUP]
        found.record(encoder, setup)
        if found.graph is not None:
            vars(encoder).update({CAPTURE: found, SETUP: replace(setup, captured=Captured())})
        notes.append(str(found))
    handle.captured = "; ".join(dict.fromkeys(notes)) or "not captured: no encoder is changed"
    handle.copies = COPIES


def _widen_products(modules: list[nn.Module]) -> str:
    """Make linear layers in half precision multiply in float32 where that is faster; return a description."""
    encoders = [each for each in modules if getattr(vars(each).get(SETUP), "in_float32", False)]
    weights: set[torch.Tensor] = {weight for each in encoders for weight in {*each.parameters()} - tables_of(each)}
    layers = [each for each in _linear_layers(modules, HALF) if each.weight not in weights]
    layers = [each for each in layers if half_library(each.weight.dtype).is_used]
    for layer in layers:
        layer.__class__ = HalfLinear
    weights = {each for each in (*weights, *(layer.weight for layer in layers)) if each.dtype in HALF}
    dtypes = {each.dtype: half_library(each.dtype) for each in weights}
    rates = "; ".join(rates_of(library, "float32", str(dtype)[6:]) for dtype, library in dtypes.items())
    memory = f"{sum(4 * each.numel() for each in weights) / 1e6:.3g} MB"
    memory += f", as much again by calls of up to {packed_rows()} tokens" if packed_rows() else ""
    text = f"{IN_FLOAT32} (inference): {rates}; copies of weights take {memory}"
    return text if weights else ""


def rates_of(library: Library, fast: str = "oneDNN", own: str = "PyTorch's own") -> str:
    """Format the rates and errors of two libraries."""
    return (
        f"{fast} {library.onednn_rate:.0f} GFLOP/s, error {library.onednn_error:.0e}; {own} "
        f"{library.torch_rate:.0f} GFLOP/s, error {library.torch_error:.0e}"
    )


def _linear_layers(modules: list[nn.Module], dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> list[nn.Linear]:
    """Return the linear layers of exactly `nn.Linear`, with weights of some dtypes on the CPU."""
    return [
        module
        for module in modules
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(module.weight) is nn.Parameter
        and module.weight.dtype in dtypes
        and module.weight.device.type == "cpu"
    ]
