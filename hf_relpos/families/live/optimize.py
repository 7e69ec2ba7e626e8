"""A live model, faster on the CPU, in place: attention, unpadding and products; and how to undo it."""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...attention.products import FastLinear, Library, linear_library
from ...models.modeling_relpos_bert import RelPosBertEncoder, RelPosBertModel
from ..registry import LIVE
from .accelerate import Accelerated, Skipped, module_of, restore, substitute
from .low_precision import Bfloat16Linear


PRECISIONS: dict[str, type[nn.Linear]] = {"float32": FastLinear, "bfloat16": Bfloat16Linear}


@dataclass
class Optimized:
    """What `optimize` did, and the handle that undoes it; also a context manager. `print` it to read it.

    Attributes:
        encoders: whose attention or padding it changed.
        left: what it left as it is, and why.
        linear: how many linear layers have other products.
        products: what these are, with the rates and errors measured on this machine.
    """

    encoders: tuple[Accelerated, ...]
    left: tuple[Skipped, ...]
    linear: int
    products: str
    _modules: list[nn.Module] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Give the model back what it had. A second call does nothing."""
        while self._modules:
            restore(self._modules.pop())

    def __enter__(self) -> "Optimized":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [
            f"{each.name or 'the model'}: {each.family}, {each.layers} layers; {each.effect}" for each in self.encoders
        ]
        lines.append(f"{self.linear} linear layers: {self.products}")
        lines += [f"left {each.name or 'the model'} ({each.kind}): {each.reason}" for each in self.left]
        return "\n".join(lines)


def optimize(model: Any, precision: str = "float32", unpad: bool = True) -> Optimized:
    """Make a loaded model faster on the CPU, in place, without another format or runtime.

    - Relative attention computes with the backends of this package, as by `accelerate_attention`.
    - Padding is taken out once around the encoder of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, ERNIE,
      DistilBERT, DeBERTa v1 to v3, MPNet, RoFormer, T5 and mT5, and of this package's own models. The states of
      padding are zeros then; all others, and so what heads and poolers read, are what they were.
    - Linear layers multiply by oneDNN where a measurement finds it faster on this machine, and as exact.

    Parameters, their names, the state dict and what `save_pretrained` writes stay as they are; training, gradient
    checkpointing, adapters, copies and threads work as before. Calls that ask for hidden states or attention weights,
    batches with padding on the left or inside, graphs and models on other devices keep their padding.

    Args:
        model: a PreTrainedModel, a CrossEncoder or SentenceTransformer, a GLiNER, any other module with encoders
            inside; or a pipeline, whose `model` is taken.
        precision: of the products of linear layers inside the encoders: "float32", whose outputs are those of before
            up to rounding, or "bfloat16", with errors of about 1e-2 of the largest value; weights stay as they are.
        unpad: whether to take padding out.

    Returns:
        The report of what was changed, what was left and why, and what was measured; also the handle to undo it.

    Raises:
        TypeError: if `model` neither is a module nor has one as its `model`.
        ValueError: for an unknown precision.

    Example:

    ```python
    >>> from sentence_transformers import CrossEncoder
    >>> import hf_relpos

    >>> reranker = CrossEncoder("cross-encoder/nli-deberta-v3-base")
    >>> print(hf_relpos.optimize(reranker))
    ```
    """
    root = module_of(model, "optimize")
    if precision not in PRECISIONS:
        raise ValueError(f"precision = {precision!r} is not one of {', '.join(map(repr, PRECISIONS))}")
    library = linear_library()  # before anything is changed, since the environment may be wrong
    encoders, left, changed = substitute(root, unpad)
    for name, module in root.named_modules():
        if not unpad or not isinstance(module, RelPosBertModel):
            continue
        if module.unpads:
            left.append(Skipped(name, type(module).__name__, "it takes padding out already"))
        else:
            module.unpads = True
            changed.append(module)
            count = len(module.encoder.layer)
            encoders.append(Accelerated(name, type(module).__name__, count, "padding is taken out"))
    layers, products = _change_linear(root, precision, library)
    return Optimized(tuple(encoders), tuple(left), len(layers), products, changed + layers)


def _change_linear(root: nn.Module, precision: str, library: Library) -> tuple[list[nn.Module], str]:
    """Give linear layers the class of a precision; returns them, and what they compute with."""
    rates = (
        f"oneDNN {library.onednn_rate:.0f} GFLOP/s, error {library.onednn_error:.0e}; PyTorch's own "
        f"{library.torch_rate:.0f}, {library.torch_error:.0e}"
    )
    already = sum(type(module) in PRECISIONS.values() for module in root.modules())
    note = f"; {already} have other products already" if already else ""
    if precision == "float32" and not library.is_used:
        return [], f"PyTorch's own products are kept ({rates}){note}"
    inside = [root] if precision == "float32" else _encoders(root)
    layers: list[nn.Module] = []
    for each in inside:
        for layer in _linear_layers(each):
            layer.__class__ = PRECISIONS[precision]
            layers.append(layer)
    return layers, (f"products by oneDNN ({rates})" if precision == "float32" else "products in bfloat16") + note


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
    kinds = (RelPosBertEncoder, *(family.stock_class(family.container) for family in LIVE if family.is_imported))
    found = [module for module in root.modules() if isinstance(module, kinds)]
    return [module for module in found if not getattr(getattr(module, "config", None), "is_decoder", False)]
