"""The demo behind `make demo` and `hf-relpos demo`: what a BERT reads before and after its conversion.

`bert/` is a small BERT with absolute positions, trained for this project (see model_cards/demo-bert). `text/` holds
parts of two public-domain novels that it was not trained on.
"""

from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..console import print_table, timed_step
from ..conversion import convert
from ..data.records import read_lines
from ..evaluation import masked_agreement
from ..evaluation.loading import load_model, load_tokenizer


HERE = Path(__file__).parent
CHECKPOINT = HERE / "bert"
# How many times as many tokens the result is made for.
FACTOR = 4
# Number of windows of the source's maximum length, and of those that are `FACTOR` times as long.
WINDOWS, LONG_WINDOWS = 64, 16
# Tokens of an excerpt, of which the passage is looked for.
EXCERPT = 64


def read_text(part: str) -> list[str]:
    """Paragraphs of `train` (She, by H. R. Haggard) or `eval` (Treasure Island, by R. L. Stevenson)."""
    return read_lines(HERE / "text" / f"{part}.txt.xz")


def run_demo(
    checkpoint: str | Path | None = None,
    out: str | Path = "demo-out",
    steps: int = 120,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, dict[str, float]]:
    """Convert a BERT with absolute positions for texts of 4 times its length, and measure what it makes of them.

    Passages of an unseen novel, as long as the result reads, are looked for by an excerpt that lies past the source's
    limit: the passage whose mean hidden state has the largest cosine. The source reads the beginnings of the passages.

    Args:
        checkpoint: a masked language model, folder or Hub id; None for the packaged one.
        out: a folder for the result.
        steps: steps of the distillation.
        overwrite: replace `out` if it holds only a checkpoint.

    Returns:
        By model, `source` and `converted`: `masked`, percentage of masked tokens predicted right in windows of the
        source's length, `masked, long`, the same in rows that are 4 times as long, and `found`, percentage of excerpts
        whose passage was found.

    Raises:
        ValueError: for a checkpoint that cannot be loaded, and when `convert` rejects it or `out`.
    """
    console = console or Console()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    source = str(checkpoint or CHECKPOINT)
    absolute, tokenizer = load_model(source), load_tokenizer(source)
    limit = absolute.config.max_position_embeddings
    length = FACTOR * limit
    unseen = read_text("eval")
    short, passages = (cut_rows(tokenizer, unseen, size) for size in (limit, length))
    excerpts = cut_excerpts(passages, limit)

    with timed_step(console, "1. A BERT with absolute positions"):
        count = f"{absolute.num_parameters():,} parameters"
        console.print(f"{source}: {count}, at most {limit} tokens. {limit + 1} tokens:")
        try:
            with torch.inference_mode():
                absolute(passages[:1, : limit + 1])
        except (IndexError, RuntimeError, ValueError) as error:
            console.print(f"  {type(error).__name__}: {str(error).partition(chr(10))[0]}", markup=False)

    with timed_step(console, f"2. Converted for {length} tokens, on another novel, without labels"):
        options = {"steps": steps, "length": length, "window": limit // 2, "pairs": 0}  # no pairs are measured below
        text = HERE / "text" / "train.txt.xz"
        report = convert(source, out, texts=text, method_options=options, overwrite=overwrite, progress=True)
        console.print(f"  Verdict: {report.verdict}.")

    with timed_step(console, "3. Reloaded and measured on a novel that neither has seen"):
        converted = AutoModelForMaskedLM.from_pretrained(out).eval()
        mask = tokenizer.mask_token_id
        both = masked_agreement(absolute, converted, short[:WINDOWS].tolist(), mask)
        long = masked_agreement(converted, converted, passages[:LONG_WINDOWS].tolist(), mask)
        rows = {
            "source": {"masked": 100 * both.teacher_accuracy, "found": found(absolute, passages[:, :limit], excerpts)},
            "converted": {
                "masked": 100 * both.student_accuracy,
                "masked, long": 100 * long.student_accuracy,
                "found": found(converted, passages, excerpts),
            },
        }

    kinds = (
        ("masked", f"masked tokens right, {limit} tokens at once"),
        ("masked, long", f"the same, {length} at once"),
        ("found", f"passage found by {EXCERPT} tokens past {limit}"),
    )
    lines = [
        (what, *(f"{row[kind]:.1f}" if kind in row else "refused" for row in rows.values())) for kind, what in kinds
    ]
    print_table(console, "In percent", ("", "source", "converted"), lines)
    console.print(
        f"The passage is one of {len(passages)}; the source reads its first {limit} tokens. Load the result by "
        f"import hf_relpos; AutoModelForMaskedLM.from_pretrained({str(out)!r})."
    )
    return rows


def cut_rows(tokenizer: PreTrainedTokenizerBase, paragraphs: list[str], length: int) -> torch.Tensor:
    """Consecutive rows `[CLS] … [SEP]` of a text, (N, length)."""
    inner = length - 2
    tokens = tokenizer(paragraphs, add_special_tokens=False, verbose=False).input_ids
    ids = torch.tensor([token for paragraph in tokens for token in paragraph])
    body = ids[: len(ids) // inner * inner].view(-1, inner)
    first, last = (body.new_full((len(body), 1), token) for token in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    return torch.cat([first, body, last], 1)


def cut_excerpts(passages: torch.Tensor, limit: int) -> torch.Tensor:
    """Of each passage a row `[CLS] … [SEP]` of an excerpt past its first `limit` tokens, (N, EXCERPT + 2)."""
    starts = np.random.default_rng(0).integers(limit, passages.shape[1] - 2 - EXCERPT, len(passages))
    columns = torch.from_numpy(starts)[:, None] + 1 + torch.arange(EXCERPT)
    return torch.cat([passages[:, :1], passages.gather(1, columns), passages[:, -1:]], 1)


def found(model: PreTrainedModel, passages: torch.Tensor, excerpts: torch.Tensor) -> float:
    """Percentage of excerpts that are closest to their own passage, by the cosine of centred mean hidden states."""
    embedded = []
    for rows in (passages, excerpts):
        with torch.inference_mode():
            means = torch.cat([model.base_model(part).last_hidden_state[:, 1:-1].mean(1) for part in rows.split(8)])
        embedded.append(nn.functional.normalize(means - means.mean(0), dim=-1))
    right = (embedded[1] @ embedded[0].T).argmax(1) == torch.arange(len(excerpts))
    return 100 * float(right.float().mean())
