"""Vocabulary head of SPLADE for real tokens only, without a tensor of tokens × vocabulary.

SPLADE takes the maximum over tokens of log(1 + relu(logit)) (Formal et al. 2021, arXiv 2109.10086, eq. 6). These
functions are monotone, so that the maximum is taken before them, of a few tokens at a time.
"""

import functools
import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..host.torch import map_tensors, without_overrides, without_values
from ..products.cpu_gemm import FastLinear, has_gradients, is_plain, linear
from .substitute import MADE_OF, substitute_class


POOLING = ("sentence_transformers.sparse_encoder.modules.splade_pooling", "SpladePooling")
TOKENS_OF_A_PRODUCT = 256  # whose logits, of 30,000 words, are 31 MB and stay in the cache
# What is asked of a tensor without its values, beside all that begins with "is_"; conversions may return it as it is.
# What PyTorch computes in spite of that, it computes of the values.
METADATA = frozenset(
    "shape ndim dtype device layout itemsize nbytes name names output_nr requires_grad retains_grad grad grad_fn "
    "grad_dtype dim ndimension size numel nelement __len__ stride storage_offset element_size dim_order get_device "
    "type type_as result_type to cpu float contiguous".split()
)
ADDRESSES = ("is_set_to", "is_shared")  # read where values are
logger = logging.getLogger("hf_relpos.live")


@functools.cache
def tell(reader: str) -> None:
    """Say, once, that somebody reads all logits."""
    logger.info("SPLADE's logits of all tokens are computed, as without optimize, since %s reads them", reader)


class Logits(torch.Tensor):
    """The output of a linear layer, (B, L, V), computed when somebody reads it."""

    states: torch.Tensor
    layer: nn.Linear
    whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, states: torch.Tensor, layer: nn.Linear) -> "Logits":
        made: Logits = without_values(cls, (*states.shape[:-1], layer.out_features), states.dtype)
        made.states, made.layer, made.whole = states, layer, None
        return made

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of states, (…, D), without gradients, which the call that made this did not ask for."""
        with torch.no_grad():
            return linear(rows, self.layer.weight, self.layer.bias, self.layer)

    def computed(self) -> torch.Tensor:
        """Return the plain tensor, the same one in every call."""
        if self.whole is None:
            self.whole = self.product(self.states)
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else name  # of a property
        if name in METADATA or (name.startswith("is_") and name not in ADDRESSES):
            return without_overrides(func, args, kwargs or {})
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tell(func.__name__)
        args, kwargs = map_tensors(cls, cls.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def maxima(self, real: torch.Tensor) -> torch.Tensor:
        """Return the largest logits over the tokens of each sequence, (B, V); zeros without tokens.

        Args:
            real: whether a position is a token, (B, L), bool.
        """
        out = self.states.new_full((len(real), self.layer.out_features), float("-inf"))
        for places in real.nonzero().split(TOKENS_OF_A_PRODUCT):
            rows, columns = places.unbind(1)
            # values that somebody has read may also have been written to
            logits = self.product(self.states[rows, columns]) if self.whole is None else self.whole[rows, columns]
            found, counts = rows.unique_consecutive(return_counts=True)
            for row, each in zip(found.tolist(), logits.split(counts.tolist()), strict=True):
                torch.maximum(out[row], each.amax(0), out=out[row])
        return out.masked_fill_(~real.any(1, True), 0.0)


class VocabularyHead(FastLinear):
    """A linear layer whose output is computed when it is read, in inference."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`."""
        given = input, self.weight, self.bias
        if input.dim() != 3 or has_gradients(*given) or not is_plain(*given):
            return FastLinear.forward(self, input)  # also where `undo` has just taken this class away
        return Logits(input, self)


def pool_maxima(pooling: Any, forward: Any, features: dict[str, Any]) -> Any:
    """Forward of a max pooling that takes the maxima of `Logits`."""
    logits, mask = features["token_embeddings"], features.get("attention_mask")
    if (
        type(logits) is not Logits
        or pooling.pooling_strategy != "max"
        or not torch.is_tensor(mask)
        or mask.shape != logits.shape[:2]
        or bool(((mask != 0) & (mask != 1)).any())
    ):
        return forward(features)
    row = {"token_embeddings": logits.maxima(mask != 0)[:, None], "attention_mask": mask.amax(1, True)}
    features["sentence_embedding"] = forward({**features, **row})["sentence_embedding"]
    return features


def take_maxima_first(root: nn.Module) -> bool:
    """Replace max poolings and their vocabulary heads; return whether there were both."""
    modules: list[Any] = list(root.modules())
    kinds = {each for each in map(type, modules) if (each.__module__, each.__qualname__) == POOLING}
    poolings = [each for each in modules if type(each) in kinds and not hasattr(each, MADE_OF)]
    poolings = [each for each in poolings if each.pooling_strategy == "max"]
    models = [each for each in modules if isinstance(each, PreTrainedModel)] if poolings else []
    heads = {each.get_output_embeddings() for each in models}
    heads = {each for each in heads if type(each) in (nn.Linear, FastLinear)}
    for head in heads:
        head.__class__ = VocabularyHead
    for pooling in poolings if heads else ():
        pooling.__class__ = substitute_class(type(pooling), pool_maxima)
    return bool(heads)
