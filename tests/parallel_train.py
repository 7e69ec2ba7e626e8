"""One of two processes that train a scheme by the Trainer: DistributedDataParallel and FSDP2, on CPU by gloo.

    python tests/parallel_train.py OUT.json FOLDER SCHEME WAY ...

Of `WAYS`. Losses by way go to OUT.json, trained models to FOLDER/<way>. Each way sees the batches of `alone`, half on
each side.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import distributed
from toy_training import make_model, train


STEPS, BATCH, RATE = 6, 8, 5e-3
# gradients that are zero but for rounding, such as that of the keys' bias, would else move weights by the whole rate
EPSILON = 1e-3
RUN = {"max_steps": STEPS, "learning_rate": RATE, "adam_epsilon": EPSILON}
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["RelPosBertLayer"]}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
RESUMED = {"save_strategy": "steps", "save_steps": STEPS // 2}


def alone(scheme: str, folder: Path) -> tuple[list[float], torch.nn.Module]:
    """Losses and model of one process that takes whole batches."""
    losses, trainer = train(make_model("order", scheme), "order", folder, per_device_train_batch_size=BATCH, **RUN)
    return losses, trainer.model


def by_trainer(scheme: str, folder: Path, dropout: float = 0.0, resume: Path | None = None, **more) -> list[float]:
    """Losses of Transformers' Trainer, whose model is then saved."""
    model = make_model("order", scheme, dropout)
    arguments = {"per_device_train_batch_size": BATCH // 2, **RUN, **more}
    losses, trainer = train(model, "order", folder, resume=resume, **arguments)
    trainer.save_model(str(folder))
    distributed.barrier()
    return losses


def resumed(scheme: str, folder: Path, **more) -> dict[str, list[float]]:
    """Losses of a run, and of one that goes on from the middle of it."""
    whole = by_trainer(scheme, folder, **RESUMED, **more)
    checkpoint = folder / f"checkpoint-{STEPS // 2}"
    return {"whole": whole, "resumed": by_trainer(scheme, folder / "again", resume=checkpoint, **RESUMED, **more)}


def tried(run: Callable[..., list[float]], *arguments, **settings) -> list[float] | str:
    """What it returns, or what PyTorch, in every process alike, says against it."""
    try:
        return run(*arguments, **settings)
    except RuntimeError as error:
        return str(error)


def pretend_devices() -> None:
    """Let accelerate take its way for several GPUs, on CPUs: it has FSDP for no other."""

    def prepare_backend(self, *arguments, **settings):
        return "gloo", DistributedType.MULTI_GPU

    def set_device(self):
        self.device = torch.device("cpu")

    PartialState._prepare_backend, PartialState.set_device = prepare_backend, set_device
    AcceleratorState._reset_state(reset_partial_state=True)


DEVICES = "fsdp by the Trainer"  # how the ways begin for which devices are pretended
WAYS = {
    "ddp": by_trainer,
    "ddp, accumulated": partial(by_trainer, per_device_train_batch_size=2, gradient_accumulation_steps=2),
    "ddp, reentrant": partial(tried, by_trainer, **REENTRANT),
    "ddp, resumed": partial(resumed, dropout=0.1),
    DEVICES: partial(by_trainer, **SHARDED),
    f"{DEVICES}, resumed": partial(resumed, dropout=0.1, **SHARDED),
}


def main() -> None:
    torch.set_num_threads(1)
    out, folder, scheme, *ways = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    report = {way: WAYS[way](scheme, folder / way) for way in ways if not way.startswith(DEVICES)}
    pretend_devices()
    report |= {way: WAYS[way](scheme, folder / way) for way in ways if way.startswith(DEVICES)}
    if distributed.get_rank() == 0:
        out.write_text(json.dumps(report))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
