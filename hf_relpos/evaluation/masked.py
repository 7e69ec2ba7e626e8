"""Accuracy of a masked language model on text, and its agreement with another one."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.batching import BATCH_TOKENS, Row, batch_indices
from ..data.masking import IGNORE_INDEX, mask_rows, mask_tokens
from .encoder import pad_batch
from .fidelity_report import MaskedAgreement


def token_ids(tokenizer: PreTrainedTokenizerBase, paragraphs: Sequence[str]) -> list[int]:
    """Token ids of the concatenated paragraphs of a text, without special tokens."""
    return [
        token for text in paragraphs for token in tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    ]


def masked_windows(
    tokenizer: PreTrainedTokenizerBase,
    paragraphs: Sequence[str],
    length: int,
    limit: int,
    rng: np.random.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut text into windows `[CLS] … [SEP]` and mask tokens at random.

    Args:
        paragraphs: the text; their tokens are concatenated.
        length: tokens per window, special tokens included.
        limit: maximum number of windows.
        rng: decides which tokens are masked.

    Returns:
        Token ids with [MASK], (windows, length), and labels of the same shape, −100 at tokens that are not masked.

    Raises:
        ValueError: if the text does not fill one window.
    """
    inner = length - 2
    ids = token_ids(tokenizer, paragraphs)
    count = min(len(ids) // inner, limit)
    if count < 1:
        raise ValueError(
            f"length = {length}: the text has {len(ids)} tokens and a window needs {inner}; give more text, or a "
            "smaller length"
        )
    windows = np.array(ids[: count * inner], dtype=np.int64).reshape(count, inner)
    inputs, labels = mask_tokens(windows, tokenizer.mask_token_id, rng, maskable=windows != tokenizer.unk_token_id)
    special = ((0, 0), (tokenizer.cls_token_id, tokenizer.sep_token_id))
    inputs = np.pad(inputs, ((0, 0), (1, 1)), constant_values=special)
    labels = np.pad(labels, ((0, 0), (1, 1)), constant_values=IGNORE_INDEX)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


@torch.inference_mode()
def masked_accuracy(
    model: PreTrainedModel,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    batch_size: int = 32,
) -> dict[str, float]:
    """Accuracy on the masked tokens, in percent, and their mean negative log-likelihood, in nats.

    Args:
        model: a masked language model; its mode (train or eval) is kept.
        inputs: token ids, (windows, length).
        labels: the same shape, −100 at tokens that are not predicted.
    """
    right, loss, count = 0, 0.0, 0
    for start in range(0, len(inputs), batch_size):
        part = slice(start, start + batch_size)
        logits = model(input_ids=inputs[part].to(model.device)).logits
        target = labels[part].to(model.device)
        logits, target = logits[target != IGNORE_INDEX].float(), target[target != IGNORE_INDEX]
        right += int((logits.argmax(-1) == target).sum())
        loss += float(nn.functional.cross_entropy(logits, target, reduction="sum"))
        count += len(target)
    return {"accuracy": round(100 * right / count, 2), "nll": round(loss / count, 4)}


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
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    windows: Sequence[Row],
    mask_token_id: int,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> MaskedAgreement:
    """How often two masked language models predict the same tokens.

    Args:
        windows: rows of tokens, `[CLS] … [SEP]`; the first and the last token are never masked.
        mask_token_id: id of [MASK].
        seed: decides which tokens are masked.

    Raises:
        ValueError: for windows without a token between the first and the last.
    """
    inputs, labels = mask_rows(windows, mask_token_id, np.random.default_rng(seed))
    same = teacher_right = student_right = count = 0
    for indices in batch_indices(inputs, batch_tokens):
        rows = [inputs[index] for index in indices]
        targets = torch.cat([torch.as_tensor(labels[index]) for index in indices])
        masked = [torch.as_tensor(labels[index]) != IGNORE_INDEX for index in indices]
        targets = targets[targets != IGNORE_INDEX]
        predicted = [masked_predictions(model, rows, masked).argmax(-1).cpu() for model in (teacher, student)]
        same += int((predicted[0] == predicted[1]).sum())
        teacher_right += int((predicted[0] == targets).sum())
        student_right += int((predicted[1] == targets).sum())
        count += len(targets)
    return MaskedAgreement(count, same / count, teacher_right / count, student_right / count)
