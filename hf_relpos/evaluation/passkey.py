"""Passkey retrieval: a number hidden in filler text is recognised by the text's vector or predicted at masked tokens.

The task and the wording of the needle are from Mohtashami and Jaggi 2023, "Landmark attention: random-access infinite
context length for Transformers", arXiv 2305.16300.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..console import ProgressCallback
from ..data.batching import Row, batch_indices
from .encoder import Encoder
from .masked import masked_predictions


NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
STATEMENT = "The pass key is {key}."
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PER_DEPTH = 20
TEXTS = PER_DEPTH * len(DEPTHS)


@dataclass(frozen=True)
class Passkey:
    """One text with a key in it.

    Attributes:
        row: tokens, `[CLS] … [SEP]`.
        depth: place of the key, from 0 (beginning) to 1 (end).
        keys: candidates of five digits each, all with the same number of tokens.
        right: index of the key in the text.
        masked: positions in `row` of the masked tokens of the key; empty in a text for sentence vectors.
    """

    row: list[int]
    depth: float
    keys: tuple[str, ...]
    right: int
    masked: tuple[int, ...] = ()


def key_tokens(tokenizer: PreTrainedTokenizerBase, key: str) -> list[int]:
    """Tokens of a key inside the statement. Tokenizers that mark spaces give other tokens for the key alone."""
    before, after = STATEMENT.split("{key}")
    parts = [tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in (before.rstrip(), after)]
    whole = tokenizer(STATEMENT.format(key=key), add_special_tokens=False, verbose=False).input_ids
    return whole[len(parts[0]) : len(whole) - len(parts[1])]


def passkeys(
    tokenizer: PreTrainedTokenizerBase,
    filler: Row,
    length: int,
    candidates: int = 10,
    per_depth: int = PER_DEPTH,
    depths: Sequence[float] = DEPTHS,
    masked: bool = False,
    seed: int = 0,
) -> list[Passkey]:
    """Make texts of filler with one key each.

    Args:
        tokenizer: tokenizer of the model.
        filler: tokens of a text, without special tokens; each passkey uses a random piece of it.
        length: tokens of each text, special tokens included.
        candidates: number of keys to choose from.
        per_depth: texts for each depth.
        depths: places of the key, from 0 (beginning) to 1 (end).
        masked: end the text with the statement of the key, whose tokens are masked.
        seed: seed of the random pieces and keys.

    Raises:
        ValueError: if the filler is too short, or the length is too short for key and statement.
    """
    if candidates < 2 or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(
            f"candidates = {candidates}, depths = {list(depths)}: give two candidates at least, and depths from 0 to 1"
        )
    rng = np.random.default_rng(seed)

    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    # keys have equally many tokens, so that neither the length of a sentence nor its number of masks reveals the key
    drawn = [str(key) for key in rng.choice(np.arange(10_000, 100_000), 40 * candidates, replace=False)]
    sizes = [len(key_tokens(tokenizer, key)) for key in drawn]
    common = max(set(sizes), key=sizes.count)
    pool = [key for key, size in zip(drawn, sizes, strict=True) if size == common]
    trials = []
    for depth in depths:
        for _ in range(per_depth):
            keys = tuple(str(key) for key in rng.choice(pool, candidates, replace=False))
            right = int(rng.integers(candidates))
            needle = tokens(NEEDLE.format(key=keys[right]))
            end = []
            if masked:
                before, after = STATEMENT.split("{key}")
                end = [*tokens(before.rstrip()), *[tokenizer.mask_token_id] * common, *tokens(after)]
            room = length - 2 - len(needle) - len(end)
            if room < 1:
                raise ValueError(
                    f"length = {length}: key and statement take {length - room} tokens; give a greater length"
                )
            if len(filler) < room:
                raise ValueError(
                    f"length = {length}: the text has {len(filler)} tokens and {room} are needed; give more text, or "
                    "a smaller length"
                )
            start = int(rng.integers(len(filler) - room + 1))
            piece = list(filler[start : start + room])
            split = round(depth * room)
            inner = [*piece[:split], *needle, *piece[split:], *end]
            row = [tokenizer.cls_token_id, *inner, tokenizer.sep_token_id]
            is_mask = [masked and token == tokenizer.mask_token_id for token in row]
            positions = tuple(index for index, flag in enumerate(is_mask) if flag)
            trials.append(Passkey(row, float(depth), keys, right, positions[-common:]))
    return trials


def _shares(trials: Sequence[Passkey], hits: Sequence[bool]) -> dict[str, float]:
    """Accuracy over all texts and by depth, and the accuracy of chance."""
    depths = sorted({trial.depth for trial in trials})
    by_depth = {
        f"depth {depth:g}": float(np.mean([hit for t, hit in zip(trials, hits, strict=True) if t.depth == depth]))
        for depth in depths
    }
    return {
        "texts": len(trials),
        "accuracy": float(np.mean(hits)),
        **by_depth,
        "chance": 1 / len(trials[0].keys),
    }


def passkey_by_vector(
    encoder: Encoder, trials: Sequence[Passkey], progress: ProgressCallback | None = None
) -> dict[str, float]:
    """Share of texts whose vector is nearest to the statement of their own key, among those of all candidates."""
    keys = sorted({key for trial in trials for key in trial.keys})
    number = {key: n for n, key in enumerate(keys)}
    statements = encoder.encode([STATEMENT.format(key=key) for key in keys]).double()
    vectors = encoder.encode_rows([trial.row for trial in trials], progress, "passkeys").double()
    hits = []
    for trial, vector in zip(trials, vectors, strict=True):
        scores = nn.functional.cosine_similarity(statements[[number[key] for key in trial.keys]], vector[None], dim=-1)
        others = [score for n, score in enumerate(scores.tolist()) if n != trial.right]
        hits.append(float(scores[trial.right]) > max(others))
    return _shares(trials, hits)


def passkey_by_mask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trials: Sequence[Passkey],
    progress: ProgressCallback | None = None,
) -> dict[str, float]:
    """Share of texts whose own key is the most probable candidate at their masked tokens.

    Args:
        model: a masked language model.
        trials: made with `masked=True`.
    """
    hits: list[bool] = [False] * len(trials)
    done = 0
    for indices in batch_indices([trial.row for trial in trials]):
        rows = [trials[index].row for index in indices]
        masked = [torch.zeros(len(row), dtype=torch.bool) for row in rows]
        for flags, index in zip(masked, indices, strict=True):
            flags[list(trials[index].masked)] = True
        logits = masked_predictions(model, rows, masked)
        by_text = logits.log_softmax(-1).cpu().split([int(flags.sum()) for flags in masked])
        for index, log_probabilities in zip(indices, by_text, strict=True):
            trial = trials[index]
            ids = torch.tensor([key_tokens(tokenizer, key) for key in trial.keys])
            scores = log_probabilities[torch.arange(ids.shape[1]), ids].sum(1)  # (candidates,)
            others = [score for k, score in enumerate(scores.tolist()) if k != trial.right]
            hits[index] = float(scores[trial.right]) > max(others)
        done += len(indices)
        if progress is not None:
            progress("passkeys, masked", done, len(trials))
    return _shares(trials, hits)
