"""The vocabulary head of SPLADE: products of real tokens only, and no tensor of tokens × vocabulary.

SPLADE takes the maximum over tokens of log(1 + relu(logit)) (Formal et al. 2021, arXiv 2109.10086, eq. 6). These
functions are monotone, so that the maximum is taken before them, of a few rows at a time.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..host.torch import map_tensors, without_values
from ..products.cpu_gemm import FastLinear, has_gradients, is_plain, linear
from .substitute import MADE_OF, substitute_class


POOLING = ("sentence_transformers.sparse_encoder.modules.splade_pooling", "SpladePooling")
TOKENS_OF_A_PRODUCT = 256  # whose logits, of 30,000 words, are 31 MB and stay in the cache
# What may be asked of a tensor without its values.
METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_sparse")
) | {torch.Tensor.dim, torch.Tensor.size}


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
        """The plain tensor; the same one in every call."""
        if self.whole is None:
            self.whole = self.product(self.states)
        return self.whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = map_tensors(cls, cls.computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.computed().__reduce_ex__(protocol)

    def maxima(self, real: torch.Tensor) -> torch.Tensor:
        """The largest logits of the tokens of each row, (B, V); zeros for rows without a token.

        Args:
            real: whether a position is a token, (B, L), bool.
        """
        tokens, counts = self.states[real], real.sum(1).tolist()
        out = tokens.new_zeros(len(counts), self.layer.out_features)
        first = row = 0
        while row < len(counts):
            last = row + 1
            while last < len(counts) and sum(counts[row : last + 1]) <= TOKENS_OF_A_PRODUCT:
                last += 1
            count = sum(counts[row:last])
            logits = self.product(tokens[first : first + count])
            for into, each in zip(out[row:last], logits.split(counts[row:last]), strict=True):
                if len(each):
                    torch.amax(each, 0, out=into)
            first, row = first + count, last
        return out


class VocabularyHead(FastLinear):
    """A linear layer whose output is computed when it is read, in inference."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`."""
        given = input, self.weight, self.bias
        if input.dim() != 3 or has_gradients(*given) or not is_plain(*given):
            return FastLinear.forward(self, input)  # also where `undo` has just taken this class away
        return Logits(input, self)


def pool_maxima(pooling: Any, forward: Any, features: dict[str, Any]) -> Any:
    """The forward of a pooling by maximum, which gets the maxima of `Logits`."""
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
    """Change poolings by maximum and the vocabulary heads that they read; returns whether there was one."""
    modules: list[Any] = list(root.modules())
    kinds = {each for each in map(type, modules) if (each.__module__, each.__qualname__) == POOLING}
    poolings = [each for each in modules if type(each) in kinds and not hasattr(each, MADE_OF)]
    models = [each for each in modules if isinstance(each, PreTrainedModel)] if poolings else []
    for head in {each.get_output_embeddings() for each in models}:
        if type(head) is FastLinear:
            head.__class__ = VocabularyHead
    for pooling in poolings:
        pooling.__class__ = substitute_class(type(pooling), pool_maxima)
    return bool(poolings)
