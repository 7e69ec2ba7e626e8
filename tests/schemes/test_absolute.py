"""Absolute positions: plain attention, and one learned table at the input (Devlin et al. 2018)."""

import torch
from oracles import padding, tiny_model, tiny_sizes
from transformers import BertConfig, BertModel

from hf_relpos import RelPosBertModel


CASES = ["eager", "sdpa"]


def parity(implementation: str) -> float:
    """Largest difference from the BERT of the installed Transformers."""
    model = tiny_model(RelPosBertModel, "absolute", attn_implementation=implementation)
    stock = BertModel(BertConfig(**tiny_sizes(), attn_implementation=implementation)).eval()
    assert not stock.load_state_dict(model.state_dict(), strict=False).missing_keys
    real = padding([12, 8, 1], 12).long()
    inputs = {"input_ids": torch.randint(1, 50, (3, 12)), "token_type_ids": torch.randint(0, 2, (3, 12))}
    with torch.no_grad():
        ours, theirs = model(**inputs, attention_mask=real), stock(**inputs, attention_mask=real)
    return max((a - b).abs().max().item() for a, b in zip(ours.to_tuple(), theirs.to_tuple(), strict=True))
