"""A live model, faster on the CPU, in place: attention, unpadding and products; and how to undo it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.cpu_gemm import FastLinear, Library, limit_caches, linear_library
from ..attention.weight_cache import CachingLinear, forget
from ..families.family import module_of
from ..families.registry import LIVE
from ..models.modeling_relpos_bert import RelPosBertEncoder, RelPosBertModel
from ..schemes.projection_cache import forget_projections
from .accelerate import HOOK, TAKEN_OUT, Accelerated, Skipped, reader_of_padding, restore, substitute
from .comparison import Agreement, Comparison, Sample
from .fused import fused
from .low_precision import Bfloat16Linear, Int8Linear, quantize
from .unpadding import may_unpad


PRECISIONS = ("float32", "bfloat16", "int8")


@dataclass
class Optimized:
    """What `optimize` did, and the handle that undoes it; also a context manager. `print` it to read it.

    Attributes:
        encoders: whose attention or padding it changed.
        left: what it left as it is, and why.
        linear: how many linear layers compute in float32; None where none was to be changed.
        products: by which library, with the rates and errors measured on this machine.
        rounded: how many linear layers compute in a lower precision, as a sentence.
        agreement: of the outputs with those before, for "int8" and a sample.
    """

    encoders: tuple[Accelerated, ...]
    left: tuple[Skipped, ...]
    linear: int | None
    products: str
    rounded: str = ""
    agreement: Agreement | None = None
    _modules: list[nn.Module] | None = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the modules that this call changed what they had. A second call does nothing."""
        self.refresh()
        while self._modules:
            restore(self._modules.pop())
        self._modules = None

    def refresh(self) -> None:
        """Drop rounded copies of weights, and projections of positions. The next call makes them again.

        Needed after a write through `.data` or NumPy to single elements of a weight. All other writes are seen.
        """
        for module in self._modules or ():
            forget(module)
            forget_projections(module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        if self._modules is None:
            return "undone: the model is as it was before"
        lines = [f"{e.name or 'the model'}: {e.family}, {e.layers} layers; {e.effect}" for e in self.encoders]
        if self.linear or (self.linear is not None and "earlier" in self.products):
            lines.append(f"{self.linear} linear layer{'s' * (self.linear != 1)} in float32: {self.products}")
        lines += map(str, filter(None, (self.rounded, self.agreement)))
        lines += [f"left {each.name or 'the model'} ({each.kind}): {each.reason}" for each in self.left]
        return "\n".join(lines) or "nothing is changed"


def optimize(model: Any, precision: str | None = "float32", unpad: bool = True, sample: Sample = None) -> Optimized:
    """Make a loaded model faster on the CPU, in place, without another format or runtime.

    - Relative attention of DeBERTa v1 to v3, MPNet, RoFormer, XLNet, T5 and mT5 computes with this package's backends.
    - Padding is taken out once around the encoder of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE,
      DistilBERT, DeBERTa v1 to v3, MPNet, RoFormer, XLNet, T5 and mT5, ModernBERT, NomicBERT, GTE, EuroBERT, Jina
      embeddings v3, ESM-2 and UMT5, and of this package's own models. The states of padding are zeros then; all
      others, and so what heads and poolers read, are what they were.
    - Linear layers multiply by oneDNN where a measurement finds it faster on this machine, and as exact.

    Parameters, their names, the state dict and what `save_pretrained` writes stay as they are; training, gradient
    checkpointing, adapters, copies and threads work as before. Calls that ask for hidden states or attention weights,
    graphs and models on other devices keep their padding, and so do batches that have it inside a row, or where heads
    read: at the first token, for XLNet at the last.

    Args:
        model: a PreTrainedModel, a CrossEncoder or SentenceTransformer, a GLiNER, any other module with encoders
            inside; or a pipeline, whose `model` is taken.
        precision: of the products of linear layers inside the encoders. "float32": the outputs are those of before up
            to rounding. "bfloat16": with errors of about 1e-2 of the largest value. "int8", for inference: a scale for
            each token and each output feature; the outputs are compared with those in float32, layers that do harm
            stay in float32, and `agreement` of the result says how close it is. Weights stay as they are. None: linear
            layers are left as they are.
        unpad: whether to take padding out.
        sample: data for a before/after comparison of outputs and time: texts, if `model` has a tokenizer or processor,
            or inputs of the model; for an encoder-decoder without decoder inputs, of its encoder. It is measured on a
            copy of the model that shares its weights. None for no comparison, and in "int8" for random tokens of the
            vocabulary, which say less.

    Returns:
        The report of what was changed, what was left and why, and what was measured; also the handle to undo it.

    Raises:
        TypeError: if `model` neither is a module nor has one as its `model`.
        ValueError: for an unknown precision, for "int8" or a sample and a module without a PreTrainedModel inside, and
            for texts and no tokenizer.

    Example:

    ```python
    >>> from sentence_transformers import CrossEncoder
    >>> import hf_relpos

    >>> reranker = CrossEncoder("cross-encoder/nli-deberta-v3-base")
    >>> print(hf_relpos.optimize(reranker))
    ```
    """
    root = module_of(model, "optimize")
    if precision not in (*PRECISIONS, None):
        raise ValueError(f"precision = {precision!r} is not one of {', '.join(map(repr, PRECISIONS))}, None")
    with _unchanged_on_error(root):
        return _optimize(model, root, precision, unpad, sample)


@contextmanager
def _unchanged_on_error(root: nn.Module) -> Iterator[None]:
    """Give all modules the classes, attributes and hooks that they have now, if the block raises or is interrupted."""
    before = [(module, type(module), {*vars(module)}, HOOK in module._forward_pre_hooks) for module in root.modules()]
    try:
        yield
    except BaseException:
        for module, kind, names, has_hook in before:
            module.__class__ = kind
            for name in vars(module).keys() - names:
                delattr(module, name)
            if not has_hook:
                module._forward_pre_hooks.pop(HOOK, None)  # type: ignore[call-overload]
                module._forward_pre_hooks_with_kwargs.pop(HOOK, None)  # type: ignore[call-overload]
        raise


def _optimize(model: Any, root: nn.Module, precision: str | None, unpad: bool, sample: Sample) -> Optimized:
    """Do what `optimize` says."""
    limit_caches()
    library = linear_library()  # before anything is changed, since the environment may be wrong
    comparison = None if sample is None and precision != "int8" else Comparison(model, root, sample)
    encoders, left, changed = substitute(root, unpad)
    for name, module in root.named_modules():
        if not unpad or not isinstance(module, RelPosBertModel):
            continue
        if reader := reader_of_padding(root):
            left.append(Skipped(name, type(module).__name__, f"padding stays, as {reader} may read it"))
        elif module.unpads:
            left.append(Skipped(name, type(module).__name__, "it takes padding out already"))
        else:
            module.unpads = may_unpad
            changed.append(module)
            encoders.append(Accelerated(name, type(module).__name__, len(module.encoder.layer), TAKEN_OUT))
    layers = [] if precision is None else _linear_layers(root)
    if not encoders and not left:
        stranger = next((each for each in root.modules() if isinstance(each, PreTrainedModel)), None)
        if stranger is not None:
            what = "attention and padding are not known" if unpad else "attention without unpadding is left as it is"
            rest = "only its linear layers are changed" if library.is_used and layers else "nothing is changed"
            left.append(Skipped("", type(stranger).__name__, f"{what} here; {rest}"))
    inside = {layer for encoder in _encoders(root) for layer in encoder.modules()}
    rounded = [layer for layer in layers if precision != "float32" and layer in inside]
    products = "by oneDNN" if library.is_used else "PyTorch's own products are kept"
    products += f" ({rates_of(library)})"
    if already := sum(isinstance(module, CachingLinear) for module in root.modules()):
        products += f"; {already} are as an earlier call left them"
    halves = []
    if library.is_used and precision is not None:
        for layer in layers:
            layer.__class__ = FastLinear
        for module in root.modules():
            if (ours := fused(module)) is not None:
                module.__class__ = ours
                halves.append(module)
    handle = Optimized(tuple(encoders), tuple(left), None, products, _modules=[*changed, *layers, *halves])
    if precision == "int8" and comparison is not None:
        rounded, handle.agreement = quantize(comparison, rounded)
    for layer in rounded:
        layer.__class__ = Bfloat16Linear if precision == "bfloat16" else Int8Linear
    if comparison is not None and precision != "int8":
        handle.agreement = comparison.agreement(comparison.copy())
    count = sum(isinstance(layer, Bfloat16Linear | Int8Linear) for layer in layers)
    handle.linear = None if precision is None else len(layers) - count
    handle.rounded = f"{count} linear layers in {precision}" if count else ""
    return handle


def rates_of(library: Library) -> str:
    """Both rates of a kind of product in float32 on the CPU, and its errors."""
    return (
        f"oneDNN {library.onednn_rate:.0f} GFLOP/s, error {library.onednn_error:.0e}; PyTorch's own "
        f"{library.torch_rate:.0f} GFLOP/s, error {library.torch_error:.0e}"
    )


def _linear_layers(root: nn.Module) -> list[nn.Linear]:
    """Those that nobody else has changed: of that very class, with float32 weights on the CPU."""
    return [
        module
        for module in root.modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(module.weight) is nn.Parameter
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
    ]


def _encoders(root: nn.Module) -> list[nn.Module]:
    """The modules around the layers of the encoders that this package knows; those of its own models are BERT's."""
    kinds: tuple[type[nn.Module], ...] = (RelPosBertEncoder,)
    kinds += tuple(family.stock_class(family.container) for family in LIVE if family.is_imported)
    found = [module for module in root.modules() if isinstance(module, kinds)]
    return [module for module in found if not getattr(getattr(module, "config", None), "is_decoder", False)]
