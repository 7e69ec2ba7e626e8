"""Predictions of masked tokens, and the agreement of two models in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ..data.batching import Row, batch_indices
from ..data.masking import IGNORE_INDEX, mask_rows
from .encoder import pad_batch


@dataclass(frozen=True)
class MaskedAgreement:
    """Predictions of masked tokens by teacher and student.

    Attributes:
        tokens: number of masked tokens.
        agreement: share of masked tokens for which both models predict the same token.
        teacher_accuracy: share that the teacher predicts correctly.
        student_accuracy: share that the student predicts correctly.
    """

    tokens: int
    agreement: float
    teacher_accuracy: float
    student_accuracy: float


@torch.inference_mode()
def masked_predictions(model: PreTrainedModel, rows: Sequence[Row], masked: Sequence[torch.Tensor]) -> torch.Tensor:
    """Logits at masked tokens of one batch of rows, (masked tokens of all rows, V) in float32.

    Args:
        model: a masked language model.
        rows: token ids, of any lengths.
        masked: one boolean tensor per row, true at masked tokens.
    """
    ids, mask = pad_batch(rows, model)
    out = model(input_ids=ids, attention_mask=mask.long())
    logits = out.logits if "logits" in out else out.prediction_logits  # …ForPreTraining
    return torch.cat(
        [row[: len(flags)][flags.to(row.device)] for row, flags in zip(logits, masked, strict=True)]
    ).float()


def masked_agreement(
    teacher: PreTrainedModel, student: PreTrainedModel, windows: Sequence[Row], mask_token_id: int, seed: int = 0
) -> MaskedAgreement:
    """How often two masked language models predict the same tokens, and the right ones.

    Args:
        windows: rows of tokens, `[CLS] … [SEP]`; the first and the last token are never masked.
        mask_token_id: id of [MASK].
        seed: decides which tokens are masked.

    Raises:
        ValueError: for windows without a token between the first and the last.
    """
    inputs, labels = mask_rows(windows, mask_token_id, np.random.default_rng(seed))
    models = (teacher,) if teacher is student else (teacher, student)
    found = []  # targets, and predictions of both models, (3, masked tokens)
    for indices in batch_indices(inputs):
        rows, targets = [inputs[index] for index in indices], [torch.tensor(labels[index]) for index in indices]
        masked = [target != IGNORE_INDEX for target in targets]
        predicted = [masked_predictions(model, rows, masked).argmax(-1).cpu() for model in models]
        own = [target[flags] for target, flags in zip(targets, masked, strict=True)]
        found.append(torch.stack([torch.cat(own), predicted[0], predicted[-1]]))
    right, one, other = torch.cat(found, 1)
    shares = (float((a == b).double().mean()) for a, b in ((one, other), (one, right), (other, right)))
    return MaskedAgreement(len(right), *shares)
