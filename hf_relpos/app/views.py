"""Figures and tables of the page."""

from itertools import combinations
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..data import cut_windows
from ..data.records import text_problem
from ..demo import read_text
from ..evaluation import Encoder, FidelitySettings, default_lengths, fidelity, masked_predictions, model_max_length
from ..evaluation.inspection import has_mlm_head
from ..evaluation.plot import fidelity_figure, figure_class, plot_model
from ..evaluation.position_scores import attention_maps
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel


if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Longest text whose maps over all token pairs are still legible.
MAX_TOKENS = 256
# Largest number of tokens whose names next to a map are legible.
MAX_NAMES = 40
MASK = "[MASK]"
# Most lines that are compared with each other.
MAX_LINES = 50
# Sentences for a sentence encoder that is given one line.
OTHERS = ("The sailor climbed down and watched the boat.", "A man is eating food.", "The sky is blue.")
# Tokens of text for each length at which cosines are measured.
TOKENS = 1024


def tokenize(encoder: Encoder, text: str) -> list[int]:
    """Token ids of a text, special ones included; `[MASK]` stands for the mask token of any tokenizer.

    Raises:
        ValueError: for an empty text, one that no tokenizer reads, or more tokens than the model reads or the page
            draws.
    """
    if problem := text_problem(text):
        raise ValueError(f"the text {problem}")
    if not text.strip():
        raise ValueError("there is no text; type some words")
    mask = encoder.tokenizer.mask_token
    ids: list[int] = encoder.tokenizer(text.replace(MASK, mask) if mask else text, verbose=False).input_ids
    limit = encoder.limit()
    if limit is not None and len(ids) > limit:
        raise ValueError(f"the text has {len(ids)} tokens, and the model reads {limit}; shorten it")
    if len(ids) > MAX_TOKENS:
        raise ValueError(f"the text has {len(ids)} tokens, and {MAX_TOKENS} at most are drawn; shorten it")
    return ids


def _ours(encoder: Encoder) -> RelPosBertPreTrainedModel:
    """The model of an encoder.

    Raises:
        ValueError: if it is not a model of this package.
    """
    if not isinstance(encoder.model, RelPosBertPreTrainedModel):
        raise ValueError(
            f"model_type = {encoder.model.config.model_type!r}: positions and attention are shown of BERTs and of "
            "models of this package; convert it first (`hf-relpos convert`)"
        )
    return encoder.model


def position_figure(encoder: Encoder, text: str) -> "Figure":
    """Figure of what positions do in all heads of all layers (`plot_model`).

    Raises:
        ValueError: for a text that `tokenize` rejects, and a model of another package.
    """
    return plot_model(_ours(encoder), {"input_ids": torch.tensor([tokenize(encoder, text)])})


def attention_figure(encoder: Encoder, text: str, layer: int, head: int) -> "Figure":
    """Figure of the attention weights of one head, with and without positions (`attention_maps`).

    Raises:
        ValueError: as `position_figure`, and for an unknown layer or head.
    """
    model = _ours(encoder)
    ids = tokenize(encoder, text)
    maps = attention_maps(model, layer, {"input_ids": torch.tensor([ids])})
    count = len(maps[0])
    if not 0 <= head < count:
        raise ValueError(f"head = {head}: the model has heads 0 to {count - 1}")
    figure = figure_class()(figsize=(6.5, 3.9), layout="constrained")
    names = encoder.tokenizer.convert_ids_to_tokens(ids)
    highest = max(float(each[head].max()) for each in maps)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, weights, title in zip(panels, maps, ("with positions", "without"), strict=True):
        image = axes.imshow(weights[head].numpy(), cmap="Blues", vmin=0, vmax=highest, interpolation="nearest")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("key j", fontsize=9)
        axes.tick_params(labelsize=7)
        if len(names) <= MAX_NAMES:
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
    panels[0].set_ylabel("query i", fontsize=9)
    figure.colorbar(image, ax=panels, shrink=0.8).ax.tick_params(labelsize=8)
    figure.suptitle(f"{model.config.position_scheme_name}, layer {layer}, head {head}", fontsize=11)
    return figure


def predictions(encoder: Encoder, text: str) -> list[list[tuple[str, float]]]:
    """The five most likely tokens for each `[MASK]` of a text, with their probabilities.

    Raises:
        ValueError: for a text that `tokenize` rejects or without [MASK], and a model without a masked-token head.
    """
    tokenizer = encoder.tokenizer
    if not has_mlm_head(encoder.model) or tokenizer.mask_token_id is None:
        raise ValueError(f"{type(encoder.model).__name__} predicts no masked tokens; give a …ForMaskedLM")
    ids = tokenize(encoder, text)
    masked = torch.tensor(ids) == tokenizer.mask_token_id
    if not masked.any():
        raise ValueError(f"the text has no {MASK}; put it in the place of a word")
    with torch.inference_mode():
        best = masked_predictions(encoder.model, [ids], [masked]).softmax(-1).topk(5)
    return [
        list(zip(tokenizer.convert_ids_to_tokens(tokens), values, strict=True))
        for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def prediction_rows(left: Encoder, right: Encoder, text: str) -> list[list[Any]]:
    """Predictions of both models side by side: number of the [MASK], rank, each model's token and its probability.

    Raises:
        ValueError: as `predictions`.
    """
    both = (predictions(left, text), predictions(right, text))
    return [
        [number, rank, f"{one} ({p:.1%})", f"{other} ({q:.1%})"]
        for number, sides in enumerate(zip(*both, strict=True), 1)
        for rank, ((one, p), (other, q)) in enumerate(zip(*sides, strict=True), 1)
    ]


def similarity_rows(left: Encoder, right: Encoder, text: str) -> list[list[Any]]:
    """Cosines of the sentence vectors of each pair of lines, in both models; one line is compared with `OTHERS`.

    Raises:
        ValueError: for an empty text, one that no tokenizer reads, and more than `MAX_LINES` lines.
    """
    if problem := text_problem(text):
        raise ValueError(f"the text {problem}")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError("the text is empty; type a sentence, or several lines")
    if len(lines) > MAX_LINES:
        raise ValueError(f"the text has {len(lines)} lines, and {MAX_LINES} at most are compared; shorten it")
    sentences = lines if len(lines) > 1 else [lines[0], *OTHERS]
    vectors = [nn.functional.normalize(encoder.encode(sentences), dim=-1) for encoder in (left, right)]
    scores = [each @ each.T for each in vectors]
    pairs = list(combinations(range(len(sentences)), 2)) if len(lines) > 1 else [(0, n) for n in (1, 2, 3)]
    return [[sentences[i], sentences[j], *(f"{float(each[i, j]):.2f}" for each in scores)] for i, j in pairs]


def cosine_figure(left: Encoder, right: Encoder, as_it_is: Encoder | None = None) -> "Figure":
    """Figure of the cosine of two models' hidden states by length, on the packaged novel.

    Lengths go past the maximum length of the left model. There `as_it_is`, the right model with its own window, is
    shown, too.

    Raises:
        ValueError: for models that cannot be compared, such as models of different widths.
    """
    novel = read_text("eval")
    windows = {
        length: cut_windows(left.tokenizer, novel, max(TOKENS, 2 * length), (length,), 0.0).ids
        for length in default_lengths(model_max_length(left.model))
    }
    settings = FidelitySettings(left.pooling, divergence=False, ceiling=False)
    report = fidelity(left.model, right.model, windows, settings).to_dict()
    limit = report["teacher_limit"]
    past = {length: rows for length, rows in windows.items() if limit is not None and length > limit}
    if as_it_is is not None and past:
        report["as_it_is"] = fidelity(left.model, as_it_is.model, past, settings).to_dict()
    return fidelity_figure(report)
