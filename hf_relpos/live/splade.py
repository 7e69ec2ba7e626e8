"""The vocabulary head of SPLADE: products of real tokens only, and no tensor of tokens × vocabulary.

SPLADE takes the maximum over tokens of log(1 + relu(logit)) (Formal et al. 2021, arXiv 2109.10086, eq. 6). These
functions are monotone, so that the maximum is taken before them, of a few rows at a time.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..attention.cpu_gemm import FastLinear, has_gradients, linear
from ..attention.tracing import is_traced, is_transformed
from ..host.torch import map_tensors, without_values
from .substitute import stock_class, substitute_class


POOLING = ("sentence_transformers.sparse_encoder.modules.splade_pooling", "SpladePooling")
TOKENS_OF_A_PRODUCT = 256  # whose logits, of 30,000 words, are 31 MB
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
        often = is_traced() or is_transformed() or torch.is_autocast_enabled("cpu")
        if often or input.dim() != 3 or type(input) is not torch.Tensor:
            return super().forward(input)
        if has_gradients(input, self.weight, self.bias) or input.device.type != "cpu":
            return super().forward(input)
        return Logits(input, self)


def _forward_of_maxima(stock: Any) -> Any:
    def forward(self: Any, features: dict[str, Any]) -> dict[str, Any]:
        logits, mask = features["token_embeddings"], features.get("attention_mask")
        if (
            type(logits) is not Logits
            or self.pooling_strategy != "max"
            or not torch.is_tensor(mask)
            or mask.shape != logits.shape[:2]
            or bool(((mask != 0) & (mask != 1)).any())
        ):
            result: dict[str, Any] = stock.forward(self, features)
            return result
        row = {"token_embeddings": logits.maxima(mask != 0)[:, None], "attention_mask": mask.amax(1, True)}
        features["sentence_embedding"] = stock.forward(self, {**features, **row})["sentence_embedding"]
        return features

    return forward


def take_maxima_first(roots: list[nn.Module], changed: list[nn.Module]) -> bool:
    """Change poolings by maximum and the vocabulary heads that they read.

    Args:
        changed: a list that gets the modules that change.

    Returns:
        Whether there was one.
    """
    before = len(changed)
    for root in roots:
        modules: list[Any] = list(root.modules())
        poolings = [each for each in modules if (type(each).__module__, type(each).__qualname__) == POOLING]
        models = [each for each in modules if isinstance(each, PreTrainedModel)] if poolings else []
        heads = {each.get_output_embeddings() for each in models}
        for head in heads:
            if type(head) is FastLinear:
                head.__class__ = VocabularyHead
                changed.append(head)
        for pooling in poolings:
            pooling.__class__ = substitute_class(stock_class(type(pooling)), _forward_of_maxima)
            changed.append(pooling)
    return len(changed) > before
