"""Passage vectors in the context of the whole text ("late chunking").

Günther et al. 2024, "Late chunking: contextual chunk embeddings using long-context embedding models", arXiv
2409.04701: the text is encoded first and cut into passages afterwards, so that tokens attend to other passages.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from .encoder import Encoder, hidden_states, pad_batch
from .sliding_windows import windowed_hidden_states


def passage_vectors(encoder: Encoder, text: str, borders: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Encode the whole text at once, and average the last hidden states of each passage's tokens.

    Special tokens belong to no passage. If passages cover the text once, the mean of their vectors, weighted by their
    numbers of tokens, is the vector of the text without special tokens.

    Args:
        encoder: from `load_encoder`, or `Encoder(model, tokenizer)`. A text longer than the model's maximum length is
            read in windows that overlap by half, and each token is taken from the window where it is most central.
        text: the whole text.
        borders: first character of each passage and the character after its last, 0 ≤ start < end ≤ len(text).
            Passages may overlap and be in any order. A token that crosses a border belongs to the passage in which it
            begins.

    Returns:
        (passages, D) on the CPU, not normalised.

    Raises:
        ValueError: for a tokenizer without character offsets, borders outside the text, and a passage in which no
            token begins.
    """
    for number, (start, end) in enumerate(borders):
        if not 0 <= start < end <= len(text):
            raise ValueError(
                f"borders[{number}] = ({start}, {end}): give 0 ≤ start < end ≤ {len(text)}, the length of the text"
            )
    ids, begins = _tokens(encoder.tokenizer, text)  # in SentencePiece a word's token includes the space before
    begins = torch.tensor([_past_space(text, begin) for begin in begins.tolist()])
    limit = encoder.limit()
    if limit is None or len(ids) <= limit:
        hidden = hidden_states(encoder.model, *pad_batch([ids], encoder.model))[0]
    else:
        hidden = windowed_hidden_states(encoder.model, ids, limit, batch_tokens=encoder.batch_tokens)
    hidden = hidden.cpu()
    vectors = []
    for number, (start, end) in enumerate(borders):
        inside = (begins >= start) & (begins < end)
        if not inside.any():
            raise ValueError(
                f"borders[{number}] = ({start}, {end}): no token begins in {text[start:end][:40]!r}; leave it out"
            )
        vectors.append(hidden[inside].mean(0))
    return torch.stack(vectors) if vectors else hidden.new_zeros(0, hidden.shape[1])


def _past_space(text: str, begin: int) -> int:
    """Index of the first character from `begin` on that is not white space, if there is one; −1 is returned as is."""
    while 0 <= begin < len(text) - 1 and text[begin].isspace():
        begin += 1
    return begin


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], torch.Tensor]:
    """Token ids of a text with special tokens, and the character at which each token begins, −1 for special tokens."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not return offsets of tokens; load a fast tokenizer with AutoTokenizer"
        )
    encoding = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)
    begins = torch.tensor([start for start, _ in encoding.offset_mapping])
    return encoding.input_ids, begins.masked_fill(torch.tensor(encoding.special_tokens_mask).bool(), -1)
