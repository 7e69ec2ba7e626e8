"""Predictions of masked tokens, and the agreement of two models in them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from ..data.batching import Row, batch_indices, pad_rows
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
        ids, mask = pad_batch([inputs[index] for index in indices], teacher)
        targets = pad_rows([labels[index] for index in indices], IGNORE_INDEX)[0]
        masked, predicted = targets != IGNORE_INDEX, []
        for model in models:
            out = model(input_ids=ids, attention_mask=mask.long())
            logits = out.logits if "logits" in out else out.prediction_logits  # …ForPreTraining
            predicted.append(logits[masked.to(logits.device)].argmax(-1).cpu())
        found.append(torch.stack([targets[masked], predicted[0], predicted[-1]]))
    right, one, other = torch.cat(found, 1)
    shares = (float((a == b).double().mean()) for a, b in ((one, other), (one, right), (other, right)))
    return MaskedAgreement(len(right), *shares)
