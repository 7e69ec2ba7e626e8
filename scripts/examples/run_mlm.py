"""Train a relative or a stock BERT to predict masked tokens: on from a checkpoint, or from new weights.

    python scripts/examples/run_mlm.py --model_name_or_path bert-relative --train_file novels.txt \\
        --do_train --do_eval --output_dir out
    python scripts/examples/run_mlm.py --tokenizer_name bert-relative --position_embedding_type shaw \\
        --position_options clip=32 --config_overrides hidden_size=256,num_hidden_layers=4,num_attention_heads=4 \\
        --train_file novels.txt --do_train --do_eval --output_dir shaw

Files are text (.txt, .md: one document per line) or records (.jsonl, .tsv, .csv: the column --text_column_name),
compressed or not. Documents are concatenated and cut into rows `[CLS] … [SEP]` of --max_seq_length tokens, or with
--line_by_line read one by one. All flags of `TrainingArguments` apply. Without --validation_file the last part of the
text is held out.

Measured: loss, perplexity and accuracy on masked tokens. What is masked for that is drawn once, and is the same in
every evaluation of every model with this tokenizer, so that runs with different schemes or seeds are compared on the
same tokens.
"""

import itertools
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from recipes.arguments import DataArguments, ModelArguments, launch, option
from recipes.data import SUFFIXES, check_suffix, check_texts, load_data, read_file, tokenized
from recipes.models import load_model, load_tokenizer, sequence_length
from recipes.running import check_checkpoint, run, start, trainer_arguments
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from hf_relpos.data.masking import IGNORE_INDEX, mask_rows
from hf_relpos.data.records import text_suffix
from hf_relpos.data.windows import special_tokens


TEXT = (".txt", ".md")
MASK_SEED = 0


@dataclass
class MaskedArguments(DataArguments):
    """Data of a masked language model."""

    text_column_name: str = option("column of the text", "text")
    mlm_probability: float = option("share of the tokens to predict", 0.15)
    line_by_line: bool = option("a row for each document, cut off, rather than documents concatenated", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise ValueError(f"--mlm_probability {self.mlm_probability}: give a number between 0 and 1")


class MaskingCollator(TrainerCallback):
    """Pads rows, and masks those that have no labels: those of the training set.

    What is masked depends on the seed, the epoch and the batch alone, so that a run that was stopped goes on with the
    masks that it would have had; the Trainer draws the same batches again, but not the same random numbers.

    Attributes:
        epoch: that of the Trainer whose callback this is.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int):
        self.mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability)
        self.pad = DataCollatorForTokenClassification(tokenizer)
        self.seed, self.epoch = seed, 0

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.epoch = int(state.epoch or 0)

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        if "labels" in rows[0]:
            return self.pad(rows)
        batch = json.dumps([self.seed, self.epoch, *(list(row["input_ids"]) for row in rows)])
        self.mask.generator = torch.Generator().manual_seed(zlib.crc32(batch.encode()))
        return self.mask(rows)


def read_text(path: str, columns: Sequence[str]) -> Dataset:
    """The lines of a text file, or the records of another, with the column of the text.

    Raises:
        ValueError: for a file of another kind, or that cannot be read.
    """
    check_suffix(path, (*TEXT, *SUFFIXES))
    if text_suffix(path) not in TEXT:
        return read_file(path, columns)
    try:
        lines = load_dataset("text", data_files=path, split="train")
    except Exception as error:  # datasets has many
        raise ValueError(f"{path}: not readable as UTF-8 text ({error}); restore or re-encode the file") from error
    return lines if columns[0] == "text" else lines.rename_column("text", columns[0])


def cut_rows(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int, line_by_line: bool) -> Any:
    """Rows `[CLS] … [SEP]` of at most `length` tokens; the last one of a batch of texts is shorter."""
    before, after = special_tokens(tokenizer)
    size = length - len(before) - len(after)
    ids = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    if line_by_line:
        pieces = [each[:size] for each in ids if each]
    else:
        joined = list(itertools.chain.from_iterable(ids))
        pieces = [joined[start : start + size] for start in range(0, len(joined), size)]
    return {"input_ids": [[*before, *piece, *after] for piece in pieces]}


def masked_once(rows: Dataset, tokenizer: PreTrainedTokenizerBase, probability: float) -> Dataset:
    """Rows for evaluation, every token to be predicted replaced by [MASK]."""
    ids, labels = mask_rows(
        list(rows["input_ids"]), tokenizer.mask_token_id, np.random.default_rng(MASK_SEED), probability
    )
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def masked_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of masked tokens that are predicted."""
    masked = prediction.label_ids != IGNORE_INDEX
    return {"accuracy": float((prediction.predictions[masked] == prediction.label_ids[masked]).mean())}


class MaskedTrainer(Trainer):
    """A Trainer whose evaluation has the perplexity, too."""

    def evaluate(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        loss = metrics[f"{metric_key_prefix}_loss"]
        return {**metrics, f"{metric_key_prefix}_perplexity": math.exp(loss) if loss < 700 else math.inf}


def pretrain(model_args: ModelArguments, args: MaskedArguments, training: TrainingArguments) -> dict[str, Any]:
    """Train, measure, and return the figures.

    Raises:
        ValueError: for flags, data and models that cannot be used, before anything is written.
    """
    if training.dataloader_persistent_workers:
        raise ValueError("--dataloader_persistent_workers: they would mask each epoch like the first; leave it out")
    checkpoint = start(training)
    tokenizer = load_tokenizer(model_args)
    if tokenizer.mask_token is None:
        raise ValueError(f"{model_args.tokenizer_name or model_args.model_name_or_path}: its tokenizer has no [MASK]")
    column = args.text_column_name
    sets = load_data(args, model_args, training, [column], read=read_text, shuffle=False)
    check_texts(sets, [column])
    model = load_model(AutoModelForMaskedLM, model_args, tokenizer, training.do_train)
    check_checkpoint(checkpoint, model)
    length = sequence_length(args.max_seq_length, model, 512)
    if length < 3:
        raise ValueError(f"--max_seq_length {length}: has no room between [CLS] and [SEP]; give 3 or more")

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return cut_rows(tokenizer, batch[column], length, args.line_by_line)

    with training.main_process_first(desc="leaving out empty rows"):
        rows = {
            split: data.filter(lambda row: len(row["input_ids"]) > 2, load_from_cache_file=not args.overwrite_cache)
            for split, data in tokenized(sets, cut, args, training).items()
        }
    for split, data in rows.items():
        if not len(data):
            raise ValueError(f"--{split}_file: holds no text; give another file")
    if "validation" in rows:
        rows["validation"] = masked_once(rows["validation"], tokenizer, args.mlm_probability)
    collator = MaskingCollator(tokenizer, args.mlm_probability, training.seed)
    trainer = MaskedTrainer(
        **trainer_arguments(model, training, rows, tokenizer, collator),
        callbacks=[collator],
        compute_metrics=masked_accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    return run(trainer, checkpoint)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe with these arguments, or those of the command line."""
    return launch(pretrain, (ModelArguments, MaskedArguments, TrainingArguments), __doc__, arguments)


if __name__ == "__main__":
    main()
