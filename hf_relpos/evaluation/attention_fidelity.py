"""KL divergence between the attention weights of teacher and student, by layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .encoder import hidden_states


# Largest size of the teacher's attention weights kept at a time, in bytes.
ATTENTION_BYTES = 512 * 1024 * 1024
# A student gives weight 0 to keys outside its attention window, and the divergence would be infinite. With 1e-10 such
# a key costs 23 nats times the teacher's weight.
MIN_WEIGHT = 1e-10


@contextmanager
def eager_attention(*models: PreTrainedModel) -> Iterator[None]:
    """Context in which models use eager attention, which returns its weights."""
    before = [model.config._attn_implementation for model in models]
    try:
        for model in models:
            model.set_attn_implementation("eager")
        yield
    finally:
        for model, name in zip(models, before, strict=True):
            model.set_attn_implementation(name)


@contextmanager
def attention_weights(model: PreTrainedModel, callback: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """Context in which a forward pass calls `callback(layer, weights)` for each layer, as soon as it is computed.

    Unlike `output_attentions=True` this keeps no weights. They are recognised as the last item of a tuple that a
    module returns, four-dimensional and from L queries to L keys. This works for every Transformers model whose eager
    attention returns its weights; for other models `callback` is not called.

    Args:
        model: a model with eager attention.
        callback: gets the number of the layer and its weights, (B, H, L, L).
    """
    layer, last = 0, None

    def hook(module: nn.Module, args: Any, out: Any) -> None:
        nonlocal layer, last
        weights = out[-1] if isinstance(out, tuple) and len(out) > 1 else None
        # enclosing modules return the same tensor again
        if isinstance(weights, torch.Tensor) and weights.dim() == 4 and weights is not last:
            if weights.shape[-1] == weights.shape[-2]:
                last = weights
                callback(layer, weights)
                layer += 1

    hooks = [module.register_forward_hook(hook) for module in model.base_model.modules()]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def attention_divergence(teacher: torch.Tensor, student: torch.Tensor, mask: torch.Tensor) -> float:
    """Σ KL(teacher‖student) over heads and query tokens that are not padding, in nats.

    Args:
        teacher: weights, (B, H, L, L).
        student: weights, the same shape.
        mask: (B, L), true for tokens that are not padding.
    """
    total = 0.0
    for p, q in zip(teacher.unbind(1), student.unbind(1), strict=True):  # one head at a time, to save memory
        ratio = p.clamp(min=MIN_WEIGHT).log_().sub_(q.clamp(min=MIN_WEIGHT).log_())
        total += float((ratio * p).sum(-1, dtype=torch.float64)[mask].sum())
    return total


class AttentionDivergence:
    """Mean divergence of the attention weights by layer, batch by batch."""

    def __init__(self, teacher: PreTrainedModel, student: PreTrainedModel) -> None:
        self.teacher, self.student = teacher, student
        self.totals: dict[int, float] = {}
        self.queries = 0
        self.comparable = True

    def add(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run both models on a batch and add its divergence.

        The teacher's weights are kept until the student reaches the same layer. If the weights of all layers do not
        fit into `ATTENTION_BYTES`, both models run several times, each time for as many layers as fit.

        Returns:
            Last hidden states of both models, (B, L, D) each.
        """
        config = self.teacher.base_model.config
        step = max(1, ATTENTION_BYTES // (4 * config.num_attention_heads * len(ids) * ids.shape[1] ** 2))
        self.queries += int(mask.sum())
        for start in range(0, config.num_hidden_layers, step):
            states = self._add_layers(ids, mask, range(start, start + step))
            if not self.comparable:
                break
        return states

    def _add_layers(self, ids: torch.Tensor, mask: torch.Tensor, layers: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Run both models on a batch and add the divergence of some layers; returns both last hidden states."""
        kept: dict[int, torch.Tensor] = {}
        teacher_shapes, student_shapes = [], []  # shapes of the weights, by layer

        def keep(layer: int, weights: torch.Tensor) -> None:
            teacher_shapes.append(weights.shape)
            if layer in layers:
                kept[layer] = weights

        def compare(layer: int, weights: torch.Tensor) -> None:
            student_shapes.append(weights.shape)
            target = kept.pop(layer, None)
            if target is not None and target.shape == weights.shape:
                divergence = attention_divergence(target, weights, mask) / weights.shape[1]
                self.totals[layer] = self.totals.get(layer, 0.0) + divergence

        with attention_weights(self.teacher, keep):
            teacher = hidden_states(self.teacher, ids, mask)
        with attention_weights(self.student, compare):
            student = hidden_states(self.student, ids, mask)
        if not teacher_shapes or teacher_shapes != student_shapes:
            self.comparable = False  # no weights, or different shapes
        return teacher, student

    def means(self) -> list[float] | None:
        """Mean divergence by layer; None for models whose attention weights cannot be compared."""
        if not self.comparable:
            return None
        return [total / self.queries for _, total in sorted(self.totals.items())]
