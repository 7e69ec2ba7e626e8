"""The demo behind `make demo` and `hf-relpos demo`: convert, measure, fine-tune, reload.

`bert/` is a small BERT with absolute positions, trained for this project (see model_cards/demo-bert). `text/` holds
parts of two public-domain novels that it was not trained on.
"""

import lzma
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from ..console import print_table, progress_bar, timed_step
from ..conversion import ConversionError, convert
from ..conversion.folder import KNOWN, check_apart, other_files, refuse_other_files
from ..evaluation import masked_accuracy, masked_windows, random_orders, token_ids
from ..evaluation.loading import refusing_code
from ..files import atomic_folder
from ..schemes.registry import PLAIN_SCHEME


HERE = Path(__file__).parent
CHECKPOINT = HERE / "bert"
# Files that the demo writes.
MODELS = ("keep", "drop", "calibrate", "fine-tuned")
# The smallest number for which calibration gives no warning.
CALIBRATION_TOKENS = 12_000
# 40 steps on another novel take the loss on the unseen one from 3.746 to 3.803 at 5e-4, 3.746 at 1e-4, 3.743 at 5e-5
# and 3.744 at 2e-5.
LEARNING_RATE = 2e-5
# Number of windows of the source's maximum length, and of four times that length.
WINDOWS, LONG_WINDOWS = 64, 4


def read_text(part: str) -> list[str]:
    """Paragraphs of `train` (She, by H. R. Haggard) or `eval` (Treasure Island, by R. L. Stevenson)."""
    with lzma.open(HERE / "text" / f"{part}.txt.xz", "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def _other_files(out: Path) -> list[str]:
    """Relative paths of the files in a folder that no demo wrote."""
    if not out.is_dir():
        return [out.name] if out.exists() else []
    found = []
    for path in sorted(out.iterdir()):
        if path.name in MODELS and path.is_dir():
            others = other_files(path, (*KNOWN, "training_args.bin"))
            found += [f"{path.name}/{name}" for name in others]
        else:
            found.append(path.name)
    return found


class TextDataset(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Consecutive windows of a text, `length` tokens each, special tokens included."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, paragraphs: list[str], length: int) -> None:
        inner = length - 2
        ids = token_ids(tokenizer, paragraphs)
        self.rows = [
            [tokenizer.cls_token_id, *ids[start : start + inner], tokenizer.sep_token_id]
            for start in range(0, len(ids) - inner + 1, inner)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.rows[index]}


class LossPrinter(TrainerCallback):
    """Prints the loss whenever the Trainer logs it, and reports progress after each step."""

    def __init__(self, console: Console, progress: Callable[[str, int, int], None]) -> None:
        self.console = console
        self.progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress("fine-tuning", state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.console.print(f"  step {state.global_step} of {state.max_steps}: loss {float(logs['loss']):.2f}")


def run_demo(
    checkpoint: str | Path | None = None,
    out: str | Path = "demo-out",
    scheme: str = "transformer_xl",
    steps: int = 40,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, dict[str, float]]:
    """Convert a BERT with absolute positions in three ways, measure, fine-tune the calibrated one, reload it.

    Args:
        checkpoint: a masked language model, folder or Hub id; None for the packaged one.
        out: a folder for the models; `out/keep`, `out/drop`, `out/calibrate` and `out/fine-tuned` are written.
        scheme: `position_embedding_type` of `keep` and `drop`; `calibrate` uses that of the default preset.
        steps: steps of the fine-tuning.
        overwrite: replace `out` if it holds only files of an earlier demo.

    Returns:
        For each model, the accuracies and the loss shown in the table.

    Raises:
        ConversionError: when `out` exists and `overwrite` is not set, when `out` holds other files or the checkpoint,
            and when `convert` rejects the checkpoint.
    """
    console = console or Console()
    started, used = time.monotonic(), time.process_time()
    out = Path(out).expanduser().resolve()
    check_apart(checkpoint or CHECKPOINT, out)
    if out.exists() and not overwrite:
        raise ConversionError(f"out = {out} exists; choose another folder, or pass overwrite (--overwrite)")
    refuse_other_files(out, _other_files(out))
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    set_seed(0)

    source = str(checkpoint or CHECKPOINT)
    with refusing_code(source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        absolute = AutoModelForMaskedLM.from_pretrained(source, trust_remote_code=False).eval()
    limit = absolute.config.max_position_embeddings
    length, window = min(limit, 128), limit // 2
    rng = np.random.default_rng(0)
    unseen = read_text("eval")
    inputs, labels = masked_windows(tokenizer, unseen, length, limit=WINDOWS, rng=rng)
    order = random_orders(len(inputs), length, rng)
    long = masked_windows(tokenizer, unseen, 4 * limit, limit=LONG_WINDOWS, rng=rng)

    rows: dict[str, dict[str, float]] = {}

    def measure(name: str, model: PreTrainedModel) -> None:
        model.eval()
        in_order = masked_accuracy(model, inputs, labels)
        row = {
            "in order": in_order["accuracy"],
            "loss": in_order["nll"],
            "shuffled": masked_accuracy(model, inputs.gather(1, order), labels.gather(1, order))["accuracy"],
        }
        if not getattr(model.config, "has_absolute_table", True):
            row["long"] = masked_accuracy(model, *long, batch_size=2)["accuracy"]
        if name == "calibrate":  # the attention window limits distances to those seen in calibration
            model.config.attention_window = window
            row["windowed"] = masked_accuracy(model, *long, batch_size=2)["accuracy"]
        rows[name] = row
        console.print(f"  {name}: {row['in order']:.1f} % of the masked tokens right, loss {row['loss']:.3f}")

    with atomic_folder(out, overwrite, lambda folder: refuse_other_files(out, _other_files(folder))) as work:
        with timed_step(console, "1. A BERT with absolute positions"):
            console.print(f"{source}: {absolute.num_parameters():,} parameters, at most {limit} tokens")
            measure("source", absolute)

        with timed_step(console, "2. Converted"):
            for method in ("keep", "drop"):
                report = convert(source, work / method, position_embedding_type=scheme, method=method)
                console.print(f"method={method!r}, position_embedding_type={scheme!r}")
                console.print(f"  {report.summary()}")
                measure(method, AutoModelForMaskedLM.from_pretrained(work / method))

        with timed_step(console, "3. Calibrated: fitted to the source's attention in closed form, no training"):
            report = convert(
                source,
                work / "calibrate",
                method="calibrate",
                position_embedding_type=PLAIN_SCHEME,
                texts=HERE / "text" / "train.txt.xz",
                method_options={"tokens": CALIBRATION_TOKENS, "pairs": 0},  # segment pairs are not measured below
                progress=True,
            )
            fitted = report.details["calibration"]
            console.print(f"method='calibrate', position_embedding_type={report.scheme!r}")
            console.print(f"  fitted to {fitted['tokens']:,} tokens of another novel in {fitted['seconds']:.0f} s")
            console.print(f"  {report.summary()}")
            measure("calibrate", AutoModelForMaskedLM.from_pretrained(work / "calibrate"))

        with timed_step(console, f"4. Fine-tuned on that novel for {steps} steps"):
            model = AutoModelForMaskedLM.from_pretrained(work / "calibrate")
            arguments = TrainingArguments(
                output_dir=str(work / "trainer"),
                max_steps=steps,
                per_device_train_batch_size=8,
                learning_rate=LEARNING_RATE,
                warmup_steps=max(1, steps // 10),
                lr_scheduler_type="linear",
                save_strategy="no",
                logging_steps=max(1, steps // 4),
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=False,
                seed=0,
            )
            with progress_bar(console) as progress:
                trainer = Trainer(
                    model=model,
                    args=arguments,
                    train_dataset=TextDataset(tokenizer, read_text("train"), length),
                    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15),
                    processing_class=tokenizer,
                    callbacks=[LossPrinter(console, progress)],
                )
                trainer.remove_callback(PrinterCallback)
                trainer.train()
            trainer.save_model(str(work / "fine-tuned"))
            measure("fine-tuned", model)

        with timed_step(console, "5. Reloaded"):
            reloaded = AutoModelForMaskedLM.from_pretrained(work / "fine-tuned").to(model.device).eval()
            with torch.inference_mode():
                example = inputs[:4].to(model.device)
                difference = float((reloaded(example).logits - model(example).logits).abs().max())
            if difference != 0.0:
                raise RuntimeError(f"the reloaded model differs from the one that was saved by {difference}")
            console.print(f"AutoModelForMaskedLM.from_pretrained({str(out / 'fine-tuned')!r}) gives the same logits.")
        shutil.rmtree(work / "trainer", ignore_errors=True)

    names = {
        "source": "source (absolute)",
        "keep": "keep",
        "drop": "drop",
        "calibrate": "calibrate, no training",
        "fine-tuned": f"that + {steps} steps",
    }
    lines = []
    for name, row in rows.items():
        too_long = f"> {limit}: refused"
        at_once = f"{row['long']:.1f}" if "long" in row else too_long
        if "windowed" in row:
            at_once += f", {row['windowed']:.1f} *"
        lines.append((names[name], f"{row['in order']:.1f}", f"{row['loss']:.3f}", f"{row['shuffled']:.1f}", at_once))
    title = f"Masked tokens of an unseen novel predicted right, in percent ({length} tokens at once)"
    print_table(console, title, ("model", "in order", "loss", "words shuffled", f"{4 * limit} at once"), lines)
    console.print(f"* with attention_window={window}, so that there is no distance that calibration did not see")
    console.print(
        f"Models in {out}/. {time.monotonic() - started:.0f} s, {time.process_time() - used:.0f} s of processor time."
    )
    return rows
