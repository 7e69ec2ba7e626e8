"""Training on a stream of text with recurrence memory: each row of a batch continues the row of the previous batch.

A `SegmentDataset` cuts the concatenated documents into rows of equal length. Batch t holds segment t of all rows. A
`StreamTrainer` gives the model the memory of the previous step, and saves it in checkpoints. Where a document ends
inside a row, `position_ids` restart, and the next document does not attend to it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer
from transformers.utils import logging

from ..data.masking import IGNORE_INDEX
from ..files import write_tensors
from ..models.checkpoint_files import open_tensors
from ..models.recurrence import SegmentMemory


logger = logging.get_logger(__name__)


class SegmentDataset(Dataset[dict[str, torch.Tensor]]):
    """Segments of documents, ordered so that consecutive batches of `rows` segments continue each other.

    Item t · rows + b is segment t of row b: `input_ids` and `position_ids`, which count from the beginning of the
    document, or of the row if that is later. With `next_token` it also has `labels` and `shift_labels`: both hold the
    next token, even past the end of the segment, and −100 where a document ends. All segments of a batch have the same
    length; the last batch is shorter.
    """

    def __init__(
        self, documents: Iterable[Sequence[int]], rows: int, segment_length: int, next_token: bool = True
    ) -> None:
        """
        Args:
            documents: token ids of each document.
            rows: batch size of all processes together.
            segment_length: L, tokens of a segment.
            next_token: return labels of the next token, for a causal model; a collator can make other labels.

        Raises:
            ValueError: for a document without tokens, too few tokens for the rows, or sizes that are not positive.
        """
        if rows < 1 or segment_length < 1:
            raise ValueError(f"rows = {rows}, segment_length = {segment_length}: give positive numbers")
        self.rows, self.segment_length, self.next_token = rows, segment_length, next_token
        texts = [torch.as_tensor(document, dtype=torch.long) for document in documents]
        for number, text in enumerate(texts):
            if text.dim() != 1 or not len(text):
                raise ValueError(
                    f"documents[{number}] has shape {tuple(text.shape)}; give the token ids of each document, at "
                    "least one, as a flat sequence"
                )
        count = sum(map(len, texts))
        self.row_length = count // rows
        if not self.row_length:
            raise ValueError(
                f"the documents have {count} tokens, too few for rows = {rows}; give more text or fewer rows"
            )
        self.ids = torch.cat(texts)
        self.positions = torch.cat([torch.arange(len(text)) for text in texts])
        self.targets = torch.cat([self.ids[1:], torch.tensor([IGNORE_INDEX])])
        self.targets[self.positions.roll(-1) == 0] = IGNORE_INDEX

    @property
    def steps(self) -> int:
        """Segments of each row."""
        return -(-self.row_length // self.segment_length)

    def __len__(self) -> int:
        return self.steps * self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, row = divmod(index, self.rows)
        begin = row * self.row_length
        start = begin + step * self.segment_length
        stop = min(start + self.segment_length, begin + self.row_length)
        # positions of a document that continues from the previous row count from the beginning of this row
        positions = torch.minimum(self.positions[start:stop], torch.arange(start, stop) - begin)
        item = {"input_ids": self.ids[start:stop], "position_ids": positions}
        if self.next_token:
            item |= {"labels": self.targets[start:stop], "shift_labels": self.targets[start:stop]}
        return item


class StreamTrainer(Trainer):
    """A `Trainer` that carries the recurrence memory of a model with `config.memory_length` from step to step.

    Datasets are `SegmentDataset`s whose `rows` are the batch size of all processes together. They are read in order,
    epoch by epoch. The evaluation set is, too, with a separate memory. Rows in which a document or the stream begins
    start with an empty memory. Every process saves the memory of its rows in checkpoints as
    `memory-<process>-of-<processes>.safetensors`, so that a resumed run has the losses of an uninterrupted one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            ValueError: for a model without memory, unsuitable datasets, or several GPUs in one process.
        """
        super().__init__(*args, **kwargs)
        self.args.remove_unused_columns = False  # shift_labels is not in the signature of heads
        self.memories: dict[str, SegmentMemory] = {}  # for training and for evaluation
        length = getattr(self.model.config, "memory_length", 0)
        if not length:
            raise ValueError(f"model.config.memory_length = {length}: StreamTrainer needs a model with a memory")
        if self.args.n_gpu > 1:
            raise ValueError(
                f"args.n_gpu = {self.args.n_gpu}: DataParallel would split a memory; start one process for each "
                "device, with accelerate launch"
            )
        if self.train_dataset is not None:
            self._check(self.train_dataset, self.args.train_batch_size, "train")
        for dataset in (
            self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else filter(None, [self.eval_dataset])
        ):
            self._check(dataset, self.args.eval_batch_size, "eval")

    def _check(self, dataset: Any, batch_size: int, split: str) -> None:
        """
        Raises:
            ValueError: for a dataset whose batches do not continue each other.
        """
        if not isinstance(dataset, SegmentDataset):
            raise ValueError(
                f"{split}_dataset is a {type(dataset).__name__}; StreamTrainer needs a SegmentDataset, whose batches "
                "continue each other"
            )
        processes = 1 if self.args.accelerator_config.split_batches else self.args.world_size
        if dataset.rows != batch_size * processes:
            raise ValueError(
                f"{split}_dataset.rows = {dataset.rows}; {processes} processes with per_device_{split}_batch_size = "
                f"{batch_size} read {batch_size * processes} rows at once; give as many"
            )

    def _get_train_sampler(self, train_dataset: SegmentDataset | None = None) -> SequentialSampler:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        self._check(dataset, self.args.train_batch_size, "train")
        return SequentialSampler(dataset)

    def _get_eval_sampler(self, eval_dataset: SegmentDataset) -> SequentialSampler:
        self._check(eval_dataset, self.args.eval_batch_size, "eval")
        return SequentialSampler(eval_dataset)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, from an empty memory or the memory of the checkpoint."""
        self.memories.pop("train", None)
        return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, from an empty memory."""
        self.memories.pop("eval", None)
        return super().evaluation_loop(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """As Trainer's, with the memory of the previous step, except in rows whose position_ids start at 0."""
        split = "train" if model.training else "eval"
        memory = self.memories.get(split)
        if memory is not None:
            memory = memory.reset(inputs["position_ids"][:, 0] == 0)
        loss, outputs = super().compute_loss(
            model, {**inputs, "memory": memory}, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        self.memories[split] = outputs["memory"]
        return (loss, outputs) if return_outputs else loss

    def _memory_file(self, folder: str | Path) -> Path:
        return Path(folder) / f"memory-{self.args.process_index}-of-{self.args.world_size}.safetensors"

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the state of each process: its random generators and the memory of its rows."""
        super()._save_rng_state(output_dir)
        if "train" in self.memories:
            write_tensors(self._memory_file(output_dir), self.memories["train"].to_tensors())
        self.accelerator.wait_for_everyone()  # the first process completes the checkpoint when all have written

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the state that `_save_rng_state` saved.

        Raises:
            ValueError: for a checkpoint of a different number of processes.
        """
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        file = self._memory_file(checkpoint)
        if file.is_file():
            with open_tensors(file) as stored:
                tensors = {name: stored.get_tensor(name).to(self.args.device) for name in stored.keys()}
            self.memories["train"] = SegmentMemory.from_tensors(tensors)
        elif others := sorted(other.name for other in Path(checkpoint).glob("memory-*-of-*.safetensors")):
            raise ValueError(
                f"{checkpoint} has {others[0]}, and this is process {self.args.process_index} of "
                f"{self.args.world_size}; resume with as many processes as it was saved with"
            )
        else:
            logger.warning(f"{checkpoint} has no memory; training resumes with an empty one")


__all__ = ["SegmentDataset", "StreamTrainer"]
