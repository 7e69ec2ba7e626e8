"""The demo behind `make demo` and `hf-relpos demo`: what a BERT reads before and after its conversion.

`bert/` is a small BERT with absolute positions, trained for this project (see model_cards/demo-bert). `text/` holds
parts of two public-domain novels that it was not trained on.
"""

import lzma
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch.nn.functional import normalize
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..console import print_table, timed_step
from ..conversion import ConversionError, convert
from ..evaluation import masked_accuracy, masked_windows, token_ids
from ..evaluation.loading import no_such_model, refusing_code


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
    with lzma.open(HERE / "text" / f"{part}.txt.xz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


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
        ConversionError: for a checkpoint that cannot be loaded, and when `convert` rejects it or `out`.
    """
    console = console or Console()
    started, used = time.monotonic(), time.process_time()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    source = str(checkpoint or CHECKPOINT)
    try:
        with refusing_code(source):
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
            absolute = AutoModelForMaskedLM.from_pretrained(source, trust_remote_code=False).eval()
    except OSError as error:
        raise ConversionError(no_such_model(source, error)) from error
    limit = absolute.config.max_position_embeddings
    length = FACTOR * limit
    rng = np.random.default_rng(0)
    unseen = read_text("eval")
    short, long = (
        masked_windows(tokenizer, unseen, size, limit=count, rng=rng)
        for size, count in ((limit, WINDOWS), (length, LONG_WINDOWS))
    )
    passages, excerpts = passages_and_excerpts(tokenizer, unseen, limit, length, rng)

    with timed_step(console, "1. A BERT with absolute positions"):
        console.print(
            f"{source}: {absolute.num_parameters():,} parameters, at most {limit} tokens. {limit + 1} tokens:"
        )
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
        rows = {
            "source": {
                "masked": masked_accuracy(absolute, *short)["accuracy"],
                "found": found(absolute, passages[:, :limit], excerpts),
            },
            "converted": {
                "masked": masked_accuracy(converted, *short)["accuracy"],
                "masked, long": masked_accuracy(converted, *long, batch_size=2)["accuracy"],
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
        f"AutoModelForMaskedLM.from_pretrained({str(out)!r})."
    )
    console.print(f"{time.monotonic() - started:.0f} s, {time.process_time() - used:.0f} s of processor time.")
    return rows


def passages_and_excerpts(
    tokenizer: PreTrainedTokenizerBase, paragraphs: list[str], limit: int, length: int, rng: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive passages of a text, (N, length), and of each an excerpt past its first `limit` tokens."""
    inner = length - 2
    ids = token_ids(tokenizer, paragraphs)
    count = len(ids) // inner
    body = torch.tensor(ids[: count * inner]).view(count, inner)
    starts = torch.from_numpy(rng.integers(limit, inner - EXCERPT, count))
    columns = starts[:, None] + torch.arange(EXCERPT)
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id]).expand(count, 2)
    first, last = ends[:, :1], ends[:, 1:]
    return torch.cat([first, body, last], 1), torch.cat([first, body.gather(1, columns), last], 1)


def found(model: PreTrainedModel, passages: torch.Tensor, excerpts: torch.Tensor) -> float:
    """Percentage of excerpts that are closest to their own passage, by the cosine of centred mean hidden states."""
    embedded = []
    for rows in (passages, excerpts):
        with torch.inference_mode():
            means = torch.cat([model.base_model(part).last_hidden_state[:, 1:-1].mean(1) for part in rows.split(8)])
        embedded.append(normalize(means - means.mean(0), dim=-1))
    right = (embedded[1] @ embedded[0].T).argmax(1) == torch.arange(len(excerpts))
    return 100 * float(right.float().mean())
