"""One of two processes that distil or convert, and of which the second may be killed in the midst.

    accelerate launch --multi_gpu --num_processes 2 tests/killed_processes.py {distil|convert} FOLDER STEP

The second process dies as by `kill -9` at the start of training step STEP of this run; 0 for none. Started again with
the same FOLDER, a distillation and a conversion go on from their last checkpoint. FOLDER/out gets the result.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from distil_train import pair, texts
from transformers import Trainer

from hf_relpos import convert
from hf_relpos.demo import CHECKPOINT, read_text
from hf_relpos.training import DistillationSettings, checkpoints, distil


STEPS, SAVED = 9, 3  # of a run; between checkpoints of a distillation


def die_at(step: int) -> None:
    """Kill the second process at that step."""
    train, count = Trainer.training_step, 0

    def training_step(self, *arguments, **settings):
        nonlocal count
        count += 1
        if count == step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self, *arguments, **settings)

    Trainer.training_step = training_step


def run_distil(folder: Path) -> None:
    teacher, student = pair()
    more = {"use_cpu": True, "ddp_backend": "gloo", "save_steps": SAVED}
    settings = DistillationSettings(steps=STEPS, batch_tokens=64, trainer_arguments=more)
    distil(student, teacher, texts(128), settings, output_dir=folder / "run", resume=True)
    if os.environ["RANK"] == "0":
        student.save_pretrained(folder / "out")


def run_convert(folder: Path) -> None:
    """The second process computes other fingerprints, as on another processor, whose rounding differs."""
    if os.environ["RANK"] == "1":
        checkpoints.model_fingerprint = lambda model: "another"
    options = {"steps": STEPS, "batch_tokens": 128}
    convert(CHECKPOINT, folder / "out", method="distil", method_options=options, texts=read_text("train")[:400])


def main() -> None:
    torch.set_num_threads(1)
    what, folder, step = sys.argv[1:]
    die_at(int(step))
    {"distil": run_distil, "convert": run_convert}[what](Path(folder))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
