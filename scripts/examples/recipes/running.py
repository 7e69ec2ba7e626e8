"""A run of a recipe with the Trainer: where it starts, and what it writes."""

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import Any

from torch.utils.data import SequentialSampler
from transformers import AutoConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed


# Fields of config.json that make another model of the same weights, or need other weights.
SHAPE = ("model_type", "position_embedding_type", "position_options", "attention_window", "hidden_size")
SHAPE += ("num_hidden_layers", "num_attention_heads", "vocab_size")


def is_complete(checkpoint: Path) -> bool:
    """Whether the last file of a checkpoint, which the Trainer does not write atomically, was written completely."""
    try:
        return isinstance(json.loads((checkpoint / "trainer_state.json").read_bytes()), dict)
    except (OSError, ValueError):
        return False


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The last complete checkpoint in the output folder of a Trainer, or None.

    `resume_from_checkpoint=True` takes the last of all, and fails if the run was killed while writing it.
    """
    found = {path.name.rpartition("-")[2]: path for path in Path(output_dir).glob("checkpoint-*") if is_complete(path)}
    steps = [step for step in found if step.isdecimal()]
    return str(found[max(steps, key=int)]) if steps else None


def start(args: TrainingArguments, predicts: bool = False) -> str | None:
    """Log to the terminal, seed the generators, and find the checkpoint to go on from, if there is one.

    Args:
        predicts: the recipe has --do_predict.

    Raises:
        ValueError: for nothing to do, and an output folder that holds something else.
    """
    if args.do_predict and not predicts:
        raise ValueError("--do_predict: this recipe trains and evaluates only; leave it out")
    if not (args.do_train or args.do_eval or args.do_predict):
        raise ValueError(f"nothing to do: give --do_train, --do_eval{', --do_predict' if predicts else ''} or several")
    folder = Path(args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder}: is a file; give a folder")
    checkpoint = args.resume_from_checkpoint
    if checkpoint is not None and not Path(checkpoint, "trainer_state.json").is_file():
        raise ValueError(f"--resume_from_checkpoint {checkpoint}: is no checkpoint of a Trainer; give its folder")
    if args.do_train and checkpoint is None:
        checkpoint = last_checkpoint(folder)
        if checkpoint is None and folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"--output_dir {folder}: is not empty, and has no checkpoint to go on from; give another folder"
            )
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr, level="INFO")
    set_seed(args.seed)
    return checkpoint


def check_checkpoint(checkpoint: str | None, model: PreTrainedModel) -> None:
    """
    Raises:
        ValueError: for a checkpoint of a different model, of which the Trainer would load what fits.
    """
    if checkpoint is None or not Path(checkpoint, "config.json").is_file():
        return
    stored, now = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False).to_dict(), model.config.to_dict()
    for name in SHAPE:
        if stored.get(name) != now.get(name):
            both = f"its model has {name} = {stored.get(name)!r}, this run {now.get(name)!r}"
            raise ValueError(f"{checkpoint}: {both}; give another --output_dir")


def train(trainer: Trainer, checkpoint: str | None) -> None:
    """Train and save the model, its tokenizer, the state of the Trainer and train_results.json."""
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    save_metrics(trainer, "train", metrics, trainer.train_dataset)
    trainer.save_state()


def save_metrics(trainer: Trainer, split: str, metrics: Mapping[str, Any], data: Sized | None = None) -> None:
    """Log the figures, and write them to <split>_results.json and all_results.json."""
    found = dict(metrics) if data is None else {**metrics, f"{split}_samples": len(data)}
    trainer.log_metrics(split, found)
    trainer.save_metrics(split, found)


class OrderedTrainer(Trainer):
    """A Trainer that evaluates and predicts in the order of the data, with --train_sampling_strategy too."""

    def _get_eval_sampler(self, eval_dataset: Any) -> SequentialSampler:
        return SequentialSampler(eval_dataset)


def trainer_arguments(
    model: PreTrainedModel, args: TrainingArguments, rows: Mapping[str, Any], tokenizer: Any, collator: Any
) -> dict[str, Any]:
    """Arguments of a Trainer that all recipes give."""
    sets = {"train_dataset": rows.get("train"), "eval_dataset": rows.get("validation")}
    return {"model": model, "args": args, **sets, "data_collator": collator, "processing_class": tokenizer}


def run(
    trainer: Trainer, checkpoint: str | None, predict: Callable[[], Mapping[str, float]] | None = None
) -> dict[str, float]:
    """Train, evaluate, predict and push, as the arguments say.

    Args:
        predict: writes predictions, and returns figures.

    Returns:
        The figures of the evaluation and of the predictions; empty without them.
    """
    metrics: dict[str, float] = {}
    if trainer.args.do_train:
        train(trainer, checkpoint)
    if trainer.args.do_eval:
        metrics = trainer.evaluate()
        save_metrics(trainer, "eval", metrics, trainer.eval_dataset)
    if trainer.args.do_predict and predict is not None:
        found = predict()
        save_metrics(trainer, "predict", found)
        metrics = {**metrics, **found}
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    return metrics
