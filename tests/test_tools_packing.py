"""Batches without padding, as Transformers' DataCollatorWithFlattening makes them: one row of several texts."""

import pytest
import torch
from errors import raises
from oracles import extra_inputs, tiny_model
from selection import FEATURE_SCHEMES
from transformers import DataCollatorWithFlattening

from hf_relpos import RelPosBertForMaskedLM, RelPosBertModel


EVERY_SCHEME = pytest.mark.parametrize("scheme", FEATURE_SCHEMES)
LENGTHS = [7, 1, 12, 4]


def flattened(texts, **settings):
    """What the collator gives, without what only flash attention reads."""
    examples = [{"input_ids": text.tolist(), "labels": text.tolist()} for text in texts]
    return dict(DataCollatorWithFlattening(return_flash_attn_kwargs=True, **settings)(examples))


def texts_of(lengths):
    return [torch.randint(1, 50, (length,)) for length in lengths]


@pytest.mark.parametrize("backend", ["relpos", "eager"])
@EVERY_SCHEME
@torch.no_grad()
def test_texts_in_one_row_are_as_each_alone(scheme, backend, none_too_short):
    """All that the collator gives is passed on; without its position ids it would be one text."""
    texts = texts_of(LENGTHS)
    model = tiny_model(RelPosBertModel, scheme, backend)
    alone = torch.cat([model(text[None], **extra_inputs(scheme, 1, len(text)))[0][0] for text in texts])
    batch = flattened(texts)
    batch.pop("labels")
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "position_ids"} <= batch.keys()
    torch.testing.assert_close(model(**batch)[0][0], alone, atol=1e-5, rtol=0)
    del batch["position_ids"]
    with raises(ValueError, "cu_seq_lens_q", "position_ids"):
        model(**batch)


@EVERY_SCHEME
def test_losses_and_gradients_of_one_row_are_those_of_a_padded_batch(scheme, none_too_short):
    texts = texts_of(LENGTHS)
    model = tiny_model(RelPosBertForMaskedLM, scheme)
    real = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    results = []
    batch = flattened(texts, separator_id=-100)
    batch["labels"] = batch["input_ids"]
    for inputs in (batch, {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}):
        model.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        results.append((loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-5, rtol=0)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=1e-5, rtol=1e-4)
