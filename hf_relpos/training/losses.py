"""Parts of the distillation loss, and the model outputs that they compare."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..evaluation.sliding_windows import OverlappingWindows


# Parts of the loss. They compare the hidden states after every layer; the attention weights of every layer, for which
# both models need attn_implementation='eager', or 'relpos'; and the predictions of the masked language model heads.
LOSSES = ("layers", "attention", "logits")
# Weights and learning rates are the best of those tried on all-MiniLM-L6-v2 with `tables` from zero, 50 steps of 512
# tokens. Mean token cosine on unseen text: .831 before; with rates of 3e-4 and 1e-2 .909 for layers alone, .935 with
# attention, .941 at weight 3; .956 with the default rates. Attention supervises the tables directly. It is omitted
# if a model does not return its weights.
DEFAULT_LOSSES = {"layers": 1.0, "attention": 3.0}


Batch = Mapping[str, torch.Tensor]
ROW_INPUTS = ("input_ids", "token_type_ids")  # entries of a batch, (B, L)


@dataclass(frozen=True)
class Targets:
    """Outputs of a model for a batch; the teacher's are the targets. None for outputs that are not compared.

    Attributes:
        hidden_states: hidden states of every layer, the embeddings first, (B, L, D) each.
        attentions: attention weights of every layer, (B, H, L, L) each.
        logits: predictions, (B, L, vocabulary).
        without: names of `LOSSES` that are skipped in this batch.
    """

    hidden_states: tuple[torch.Tensor, ...]
    attentions: tuple[torch.Tensor, ...] | None = None
    logits: torch.Tensor | None = None
    without: frozenset[str] = frozenset()


def token_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the real tokens of each example, then over the examples, a scalar.

    Args:
        values: (B, L).
        mask: (B, L), 1 for real tokens and 0 for padding.
    """
    mask = mask.to(values.dtype)
    return ((values * mask).sum(1) / mask.sum(1)).mean()


def hidden_loss(student: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Squared error divided by the teacher's variance: 0 for equal states, 1 if all student states are their mean.

    The variance is over the batch's real tokens, summed over features, so that losses of different layers and models
    have the same scale.

    Args:
        student: (B, L, D).
        target: (B, L, D).
        mask: (B, L), 1 for real tokens.
    """
    student, target = student.float(), target.float()
    real = target[mask.bool()]
    variance = (real - real.mean(0)).square().sum(-1).mean()
    return token_means((student - target).square().sum(-1), mask) / variance.clamp(min=torch.finfo(real.dtype).tiny)


def attention_loss(student: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) of the attention weights of real queries, mean over heads, in nats.

    Args:
        student: (B, H, L, L), rows sum to 1.
        target: the same shape.
        mask: (B, L), 1 for real tokens. Padded keys have weight 0 in both.
    """
    student, target, tiny = student.float(), target.float(), torch.finfo(torch.float32).tiny
    gap = target * (target.clamp(min=tiny).log() - student.clamp(min=tiny).log())
    return token_means(gap.sum(-1).mean(1), mask)


def logits_loss(student: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(teacher ‖ student) of the predictions at every real token, times temperature², in nats.

    Args:
        student: (B, L, vocabulary).
        target: the same shape.
        mask: (B, L), 1 for real tokens.
        temperature: divides both logits. The factor temperature² keeps the size of gradients (Hinton et al. 2015,
            arXiv 1503.02531, §2).
    """
    student = functional.log_softmax(student.float() / temperature, dim=-1)
    target = functional.log_softmax(target.float() / temperature, dim=-1)
    gap = functional.kl_div(student, target, reduction="none", log_target=True).sum(-1)
    return token_means(gap, mask) * temperature**2


def loss_parts(
    outputs: Targets, targets: Targets, mask: torch.Tensor, names: Iterable[str], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """The parts of the loss, by name, as scalars.

    Args:
        outputs: outputs of the student.
        targets: outputs of the teacher.
        mask: (B, L), 1 for real tokens.
    """
    compared: dict[str, tuple[Callable[..., torch.Tensor], Any, Any]] = {
        # without the embeddings: only the teacher's contain positions
        "layers": (hidden_loss, outputs.hidden_states[1:], targets.hidden_states[1:]),
        "attention": (attention_loss, outputs.attentions, targets.attentions),
        "logits": (partial(logits_loss, temperature=temperature), [outputs.logits], [targets.logits]),
    }
    parts = {}
    for name in names:
        loss, own, target = compared[name]
        values = [loss(a, b, mask) for a, b in zip(own, target, strict=True)]
        parts[name] = reduce(torch.add, values) / len(values)
    return parts


def compute_outputs(model: nn.Module, batch: Batch, names: Iterable[str]) -> Targets:
    """Outputs of a model for a batch, as needed for the given parts of the loss.

    Args:
        model: a model with BERT's outputs, and a masked language model head if `names` contains "logits".
        batch: `input_ids` and `attention_mask`, (B, L), and `token_type_ids` if they are not all 0.
        names: some of `LOSSES`.
    """
    names = set(names)
    outputs = model(
        **{name: batch[name] for name in (*ROW_INPUTS, "attention_mask") if name in batch},
        output_hidden_states=True,
        output_attentions="attention" in names,
        return_dict=True,
    )
    logits = None
    if "logits" in names:
        logits = outputs["logits"] if "logits" in outputs else outputs["prediction_logits"]  # …ForPreTraining
    return Targets(outputs["hidden_states"], outputs["attentions"] if "attention" in names else None, logits)


def model_targets(model: nn.Module, limit: int | None, batch: Batch, names: Iterable[str]) -> Targets:
    """`compute_outputs`, with overlapping windows for rows longer than the model's maximum length.

    The windows are `OverlappingWindows`, as in `windowed_hidden_states`: the target for a token is from the window
    where it is most central, for hidden states and predictions. Attention is omitted for such rows, since it ends at
    the borders of the windows.

    Args:
        model: as in `compute_outputs`.
        limit: maximum length of the model; None for no limit.
        batch: as in `compute_outputs`.
        names: some of `LOSSES`.
    """
    if limit is None or batch["input_ids"].shape[1] <= limit:
        return compute_outputs(model, batch, names)
    names = set(names) - {"attention"}
    inputs = {name: batch[name] for name in ROW_INPUTS if name in batch}
    rows = [
        _read_in_windows(model, limit, {name: tensor[row][mask.bool()] for name, tensor in inputs.items()}, names)
        for row, mask in enumerate(batch["attention_mask"])
    ]
    return Targets(
        tuple(map(_pad, zip(*(row.hidden_states for row in rows), strict=True))),
        logits=_pad([row.logits for row in rows if row.logits is not None]) if "logits" in names else None,
        without=frozenset({"attention"}),
    )


def _pad(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors (L, …) to (B, L, …), padded with zeros."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _read_in_windows(model: nn.Module, limit: int, row: Batch, names: Iterable[str]) -> Targets:
    """`compute_outputs` of one row, read in windows: inputs (L,), outputs (L, …)."""
    overlapping = OverlappingWindows.of(len(row["input_ids"]), limit)
    windows = {name: tensor[overlapping.columns] for name, tensor in row.items()}
    outputs = compute_outputs(model, {**windows, "attention_mask": torch.ones_like(windows["input_ids"])}, names)
    logits = None if outputs.logits is None else overlapping.merge(outputs.logits)
    return Targets(tuple(map(overlapping.merge, outputs.hidden_states)), logits=logits)
