"""What does a masked language model with relative positions make of texts far longer than it was trained on?

    python scripts/long_mlm.py --name novels --train novels-train.txt --test novels-test.txt

Each variant starts from the words and layers of the demo's BERT, with a fresh position scheme in place of its table of
positions, and is trained on windows of `--length` tokens. Then its masked tokens are measured on windows of other
lengths, as it is and with each `attention_window`. Both files hold text, one paragraph per line, compressed or not.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.arguments import (
    add_experiment_options,
    fingerprint,
    positive_int,
    reproducing_command,
    settings_of,
)
from experiments.process import start_quietly
from experiments.reports import markdown_table
from experiments.results import Results, by_variant, conditions
from experiments.training import QUIET
from transformers import AutoTokenizer, PrinterCallback, Trainer, TrainingArguments

from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM
from hf_relpos.data.masking import mask_tokens
from hf_relpos.data.records import read_lines
from hf_relpos.demo import CHECKPOINT
from hf_relpos.evaluation import masked_accuracy_by_length
from hf_relpos.evaluation.masked import token_ids


TRAINED = 128
# position_embedding_type, and its options where {length} tokens are trained
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deberta-v3": (
        "deberta",
        {"buckets": 32, "max_distance": TRAINED, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    ),
    "deberta-v1": ("deberta", {"max_distance": TRAINED}),
    "alibi": ("alibi", {}),
}
CARD = """# Masked language models beyond their training length

{sections}
"""
SECTION = """## {name}

`{command}`
({versions}; {machine}; {date})

Trained on {train}: {steps} batches of {batch} windows of {length} tokens, from the words and layers of the demo's
BERT and fresh positions. Measured on {test}: negative log-likelihood of a masked token in nats (accuracy in
percent), mean over the seeds, by tokens per window; lower is better. The same amount of text is read at each length.

{table}"""


class Windows(torch.utils.data.Dataset):
    """Windows `[CLS] … [SEP]` of the training text, each at its place and with its masks by number and seed."""

    def __init__(self, ids: list[int], tokenizer: Any, length: int, count: int, seed: int):
        self.ids, self.tokenizer, self.inner, self.count = np.array(ids), tokenizer, length - 2, count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng((self.seed, number))
        start = int(rng.integers(len(self.ids) - self.inner))
        window = self.ids[start : start + self.inner][None]
        known = window != self.tokenizer.unk_token_id
        inputs, labels = mask_tokens(window, self.tokenizer.mask_token_id, rng, 0.15, known)
        ends = (self.tokenizer.cls_token_id, self.tokenizer.sep_token_id)
        return {
            "input_ids": torch.from_numpy(np.pad(inputs[0], 1, constant_values=ends)),
            "labels": torch.from_numpy(np.pad(labels[0], 1, constant_values=-100)),
        }


def build(variant: str) -> RelPosBertForMaskedLM:
    """The demo's BERT with a fresh scheme instead of its table."""
    scheme, options = VARIANTS[variant]
    config = RelPosBertConfig.from_pretrained(CHECKPOINT, position_embedding_type=scheme, position_options=options)
    return RelPosBertForMaskedLM.from_pretrained(CHECKPOINT, config=config)


def train(variant: str, seed: int, ids: list[int], tokenizer: Any, args: argparse.Namespace) -> RelPosBertForMaskedLM:
    """A trained model."""
    torch.manual_seed(seed)
    model = build(variant)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.work),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            lr_scheduler_type="linear",
            warmup_steps=args.steps // 10,
            seed=seed,
            **QUIET,
        ),
        train_dataset=Windows(ids, tokenizer, args.length, args.steps * args.batch, seed),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return model.eval()


def measure(model: RelPosBertForMaskedLM, paragraphs: list[str], tokenizer: Any, args: argparse.Namespace) -> Any:
    """{attention_window: {length: accuracy and nll}}; a window that no length exceeds changes nothing."""
    results = {}
    for window in (None, *args.windows):
        model.config.attention_window = window
        results[str(window)] = {
            str(length): figures
            for length, figures in masked_accuracy_by_length(
                model, tokenizer, paragraphs, args.lengths, tokens=args.tokens
            ).items()
        }
    model.config.attention_window = None
    return results


def section(name: str, entry: dict[str, Any]) -> str:
    """One data set of the card."""
    settings, rows = entry["settings"], []
    for variant, runs in by_variant(entry["runs"], VARIANTS).items():
        for window in runs[0]["figures"]:
            cells = []
            for length in map(str, settings["lengths"]):
                figures = [run["figures"][window][length] for run in runs]
                nll, accuracy = (float(np.mean([each[key] for each in figures])) for key in ("nll", "accuracy"))
                cells.append(f"{nll:.3f} ({accuracy:.1f})")
            rows.append([f"`{variant}`", "–" if window == "None" else window, *cells])
    columns = ["scheme", "attention_window", *map(str, settings["lengths"])]
    return SECTION.format(name=name, **{**settings, **entry["about"]}, table=markdown_table(columns, rows))


def card(content: dict[str, Any]) -> str:
    """The Markdown file, without its notes."""
    return CARD.format(sections="\n".join(section(name, entry) for name, entry in content.items()))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_experiment_options(parser, "long_mlm", "long_mlm", 1, "for the Trainer")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--length", type=positive_int, default=TRAINED, help="tokens of a training window")
    parser.add_argument("--steps", type=positive_int, default=3000)
    parser.add_argument("--batch", type=positive_int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lengths", type=positive_int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--windows", type=positive_int, nargs="*", default=[64, 127])
    parser.add_argument("--tokens", type=positive_int, default=65_536, help="of test text at each length")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train and measure what is not stored yet, and write the card."""
    args = parse(arguments)
    arguments = sys.argv[1:] if arguments is None else arguments
    start_quietly(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    settings = settings_of(args, ["variants"], **{key: fingerprint(getattr(args, key)) for key in ("train", "test")})
    results = Results(args.out, args.name, settings, card, args.again)
    results.entry["about"] = {"command": reproducing_command("long_mlm.py", arguments), **conditions()}
    ids, paragraphs = token_ids(tokenizer, read_lines(args.train)), read_lines(args.test)
    for variant, seed in results.pending(args.variants, args.seeds):
        start = time.process_time()
        figures = measure(train(variant, seed, ids, tokenizer, args), paragraphs, tokenizer, args)
        results.add(variant, seed, {"figures": figures, "cpu_seconds": round(time.process_time() - start, 1)})
        results.save()
        print(f"{variant}/{seed}: {figures}", flush=True)
    results.save()


if __name__ == "__main__":
    main()
