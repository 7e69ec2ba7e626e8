"""Distil a model into its converted student, which is trained to compute what the source computes, without labels.

    python scripts/examples/run_distil.py --teacher_name_or_path sentence-transformers/all-MiniLM-L6-v2 \\
        --model_name_or_path minilm-relative --train_file texts.txt --validation_file held-out.txt \\
        --max_steps 200 --do_train --do_eval --output_dir minilm-distilled

Text is read as `hf-relpos convert --text` reads it: .txt files with blank lines between documents, .jsonl, .tsv or
.csv, folders, and datasets of the Hub. Flags of `TrainingArguments` apply, but for those of the batches, which have
--batch_tokens tokens (`hf_relpos.training.distil`). Measured on the validation text: cosines of token states and of
sentence vectors to the teacher's, by length.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from recipes.arguments import check_least, launch, option
from recipes.running import finish, start
from transformers import TrainingArguments

from hf_relpos.conversion.folder import locate
from hf_relpos.data import cut_windows, read_texts
from hf_relpos.evaluation import FidelitySettings, fidelity, load_model, load_tokenizer, pooling_of
from hf_relpos.training import DistillationSettings, distil
from hf_relpos.training.checkpoints import SETTINGS_FILE
from hf_relpos.training.distillation import OWN_ARGUMENTS


@dataclass
class DistillationArguments:
    """Models and text of a distillation, and what `TrainingArguments` does not have of its settings."""

    model_name_or_path: str = option("the student: converted from the teacher", "")
    teacher_name_or_path: str = option("the source of the conversion", "")
    train_file: list[str] = option("text: files, folders or datasets of the Hub", [])
    validation_file: list[str] = option("text to measure on", [])
    text_column_name: str = option("column of the text, but for .txt", "text")
    train_tokens: int = option("tokens of text to read", 200_000)
    eval_tokens: int = option("tokens of text to measure each length on", 6144)
    lengths: list[int] = option(
        "of the windows of text; a length that is not trained on does not improve", [32, 128, 512]
    )
    batch_tokens: int = option("tokens of a batch, padding included", 4096)
    table_learning_rate: float = option("of the scheme's parameters", 3e-2)
    temperature: float = option("of the logits", 2.0)
    train: str = option("all, or tables for the scheme's parameters only", "all")

    def __post_init__(self) -> None:
        for name in ("model_name_or_path", "teacher_name_or_path"):
            if not getattr(self, name):
                raise ValueError(f"--{name}: give a folder or Hub repository")
        for name, least in (("train_tokens", 1), ("eval_tokens", 1), ("batch_tokens", 1)):
            check_least(name, getattr(self, name), least)
        for length in self.lengths:
            check_least("lengths", length, 3)


def settings_of(args: DistillationArguments, training: TrainingArguments) -> DistillationSettings:
    """The settings of `distil`; flags of `TrainingArguments` that are not at their defaults are passed on.

    Raises:
        ValueError: for values that it does not accept.
    """
    plain = TrainingArguments(training.output_dir)
    own = {*OWN_ARGUMENTS, "do_train", "do_eval", "resume_from_checkpoint", "use_cpu"}
    passed = {
        each.name: getattr(training, each.name)
        for each in dataclasses.fields(TrainingArguments)
        if each.init and each.name not in own and getattr(training, each.name) != getattr(plain, each.name)
    }
    return DistillationSettings(
        steps=training.max_steps,
        batch_tokens=args.batch_tokens,
        learning_rate=training.learning_rate,
        table_learning_rate=args.table_learning_rate,
        schedule=getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type),
        train=args.train,
        temperature=args.temperature,
        seed=training.seed,
        trainer_arguments={**passed, "use_cpu": training.use_cpu},
    )


def measure(args: DistillationArguments, teacher: Any, student: Any, tokenizer: Any) -> dict[str, float]:
    """Cosines to the teacher on the validation text, by length."""
    rows = {
        length: cut_windows(
            tokenizer,
            read_texts(args.validation_file, args.text_column_name),
            args.eval_tokens,
            (length,),
            short=0.0,
        ).ids
        for length in args.lengths
    }
    settings = FidelitySettings(
        pooling=pooling_of(args.teacher_name_or_path) or "mean", divergence=False, ceiling=False
    )
    found = fidelity(teacher, student, rows, settings)
    return {
        f"eval_{kind}_{entry.length}": getattr(entry, kind)
        for entry in found.lengths
        for kind in ("token_cosine", "sentence_cosine")
    }


def check_output(folder: Path, models: Sequence[str]) -> None:
    """
    Raises:
        ValueError: for a folder of one of the models, one inside it, and one that holds something else than a
            distillation.
    """
    for name in models:
        if Path(name).exists() and Path(name).resolve() in (folder.resolve(), *folder.resolve().parents):
            raise ValueError(f"--output_dir {folder} is {name}, or inside it; give a folder of its own")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / SETTINGS_FILE).is_file():
        raise ValueError(f"--output_dir {folder} holds something else than a distillation; give a folder of its own")


def run_distillation(args: DistillationArguments, training: TrainingArguments) -> dict[str, Any]:
    """Distil, measure, and return the figures.

    Raises:
        ValueError: for flags, texts and models that cannot be used, before anything is written.
    """
    check_output(Path(training.output_dir), (args.teacher_name_or_path, args.model_name_or_path))
    start(training, own_checkpoints=True)
    settings = settings_of(args, training)
    for flag, needed in (("train_file", training.do_train), ("validation_file", training.do_eval)):
        if needed and not getattr(args, flag):
            raise ValueError(f"--{flag}: give text")
    folders = {name: locate(name) for name in (args.teacher_name_or_path, args.model_name_or_path)}
    (source, _, inside), (target, _, layout) = folders.values()
    teacher, student = load_model(source / inside.encoder), load_model(target / layout.encoder)
    tokenizer = load_tokenizer(source / inside.encoder)
    teacher.set_attn_implementation("eager")  # sdpa holds no attention to compare
    figures: dict[str, Any] = {}
    if training.do_train:
        texts = read_texts(args.train_file, args.text_column_name)
        windows = cut_windows(tokenizer, texts, args.train_tokens, args.lengths, seed=training.seed).ids
        report = distil(
            student, teacher, windows, settings, output_dir=training.output_dir, resume=True, progress=True
        )
        if training.should_save:
            out = Path(training.output_dir)
            layout.copy(target, out)
            student.save_pretrained(out / layout.encoder)
            tokenizer.save_pretrained(out / layout.encoder)
            finish(training, "train", report.to_dict())
        print(report.summary())
    if training.do_eval and training.should_save:
        with torch.inference_mode():
            figures = measure(args, teacher, student, tokenizer)
        finish(training, "eval", figures)
        print(figures)
    return figures


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The recipe with these arguments, or those of the command line."""
    kinds = (DistillationArguments, TrainingArguments)
    return launch(run_distillation, kinds, __doc__, arguments, max_steps=200, learning_rate=1e-4)


if __name__ == "__main__":
    main()
