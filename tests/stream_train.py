"""A run over a stream, in this process or in several: with checkpoints, and resumed from one of them.

As a script, one of the processes that `accelerate launch` starts:

    accelerate launch --multi_gpu --num_processes 2 tests/stream_train.py OUT.json FOLDER BATCH
"""

from pathlib import Path

import torch
from ddp_train import Losses, main, tiny_run
from transformers import set_seed

from hf_relpos import RelPosBertConfig, RelPosBertLMHeadModel
from hf_relpos.training.stream import SegmentDataset, StreamTrainer


WORDS, ROWS, LENGTH, STEPS, SAVED = 20, 4, 6, 8, 5
COUNTS = [31, 7, 90, 1, 12, 50, 23, 60]  # tokens of the documents


def documents(counts=COUNTS):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, WORDS, (count,), generator=generator).tolist() for count in counts]


def make_model(scheme="transformer_xl", dropout=0.0, **settings):
    """A tiny causal model, the same for the same arguments."""
    set_seed(0)
    sizes = {
        "vocab_size": WORDS,
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
        "initializer_range": 0.2,
        "is_decoder": True,
        "memory_length": 9,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
    }
    return RelPosBertLMHeadModel(RelPosBertConfig(**{**sizes, "position_embedding_type": scheme, **settings}))


def run(folder: Path, batch: int, resume: Path | None = None, dropout=0.0, model=None, **arguments):
    """Losses of each step, and the trainer."""
    defaults = {
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVED,
    }
    losses = Losses()
    settings = tiny_run(folder, **{**defaults, **arguments})
    if settings.device.type == "cpu":  # Transformers 5.14 cannot load an optimizer to the "cpu:0" of a process
        settings.__dict__["_setup_devices"] = torch.device("cpu")
    trainer = StreamTrainer(
        model=make_model(dropout=dropout) if model is None else model,
        args=settings,
        train_dataset=SegmentDataset(documents(), ROWS, LENGTH),
        eval_dataset=SegmentDataset(documents()[:3], ROWS, LENGTH),
        callbacks=[losses],
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return losses.values, trainer


def both(folder: Path, batch: int) -> dict:
    """A whole run, one resumed in its middle, and the evaluation after."""
    whole, trainer = run(folder / "whole", batch)
    rest, resumed = run(folder / "again", batch, resume=folder / "whole" / f"checkpoint-{SAVED}")
    return {
        "losses": whole,
        "resumed": rest,
        "eval": [trainer.evaluate()["eval_loss"], resumed.evaluate()["eval_loss"]],
        "processes": trainer.args.world_size,
        "kept": sorted(file.name for file in (folder / "whole" / f"checkpoint-{SAVED}").glob("memory-*")),
    }


if __name__ == "__main__":
    main(both)
