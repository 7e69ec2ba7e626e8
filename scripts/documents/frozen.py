"""Models by strategy, converted where needed, and the hidden states of their frozen layers, computed once."""

import argparse
import hashlib
import time
from pathlib import Path

import numpy as np
import torch
from experiments.arguments import digest, fingerprint
from safetensors.torch import load_file
from transformers import PreTrainedModel

from hf_relpos import convert
from hf_relpos.files import write_tensors

from .models import DocumentClassifier, load_for_strategy, split_frozen
from .strategies import LONG, SOURCE, Strategy
from .task import Documents, DocumentTask


SHARD = 25  # documents whose states are in one file: what an interruption loses
# For each document, for each piece.
States = list[list[torch.Tensor]]
Seconds = list[list[float]]


@torch.no_grad()
def lower_states(lower: PreTrainedModel, pieces: list[list[int]]) -> tuple[list[torch.Tensor], list[float]]:
    """Hidden states (L, D) of each piece of a document, and the CPU seconds that it took."""
    memory, states, seconds = None, [], []
    has_memory = bool(getattr(lower.config, "memory_length", 0))
    for piece in pieces:
        start = time.thread_time()
        outputs = lower(torch.tensor([piece]), **({} if memory is None else {"memory": memory}))
        memory = outputs.memory if has_memory else None
        states.append(outputs.last_hidden_state[0])
        seconds.append(time.thread_time() - start)
    return states, seconds


def cached_states(lower: PreTrainedModel, path: Path, documents: list[list[list[int]]]) -> tuple[States, Seconds]:
    """`lower_states` of all documents, stored in a safetensors file."""
    if not path.is_file():
        computed = [lower_states(lower, pieces) for pieces in documents]
        tensors = {
            "states": torch.cat([state for states, _ in computed for state in states]),
            "seconds": torch.tensor([second for _, seconds in computed for second in seconds]),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, tensors)
    tensors = load_file(path)
    states = tensors["states"].split([len(piece) for pieces in documents for piece in pieces])
    counts = [len(pieces) for pieces in documents]
    ends = np.cumsum(counts).tolist()
    return (
        [list(states[end - count : end]) for count, end in zip(counts, ends, strict=True)],
        [seconds.tolist() for seconds in tensors["seconds"].split(counts)],
    )


class StrategyModels:
    """The models of all strategies, and the hidden states of their frozen layers."""

    def __init__(self, args: argparse.Namespace, task: DocumentTask):
        """Check everything that can be wrong, before anything is computed.

        Raises:
            ValueError: for a strategy that its model does not support.
        """
        self.args, self.task = args, task
        converting = [strategy for strategy in args.strategies if strategy.model != SOURCE]
        if converting and not args.converted and not args.calibration_text:
            raise ValueError(
                f"--strategies {converting[0]}: give --calibration-text to convert {args.source} on, or --converted "
                "FOLDER"
            )
        for text in args.calibration_text or []:
            if not text.exists():
                raise ValueError(f"--calibration-text {text}: no such file; check the path")
        for strategy in args.strategies:
            if self.folder(strategy) is not None:
                layers = len(self.load(strategy).encoder.layer)
                if args.train_layers != "all" and args.train_layers > layers:
                    raise ValueError(
                        f"--train-layers {args.train_layers}: {self.folder(strategy)} has {layers} layers; give "
                        "fewer, or all"
                    )

    def method_options(self, model: str) -> dict[str, int]:
        """Of the conversion for pieces, or of that for long rows."""
        options = {"tokens": self.args.calibration_tokens}
        if model == LONG:
            options["length"] = max(strategy.length for strategy in self.args.strategies if strategy.model == LONG)
            if self.args.window:
                options["window"] = self.args.window
        return options

    def folder(self, strategy: Strategy) -> str | Path | None:
        """Where the model of a strategy is; None for one that is still to be converted."""
        if strategy.model == SOURCE:
            return self.args.source
        if strategy.model == LONG and self.args.converted_long:
            return self.args.converted_long
        if self.args.converted:
            return self.args.converted
        target = self.conversion_folder(strategy.model)
        return target if target.is_dir() else None

    def conversion_folder(self, model: str) -> Path:
        """The target of a conversion in `--work`."""
        texts = [fingerprint(path) if path.is_file() else str(path) for path in self.args.calibration_text]
        return self.args.work / f"{model}-{digest(str(self.args.source), texts, self.method_options(model))}"

    def convert(self) -> None:
        """Convert the source for all strategies that need it.

        Raises:
            ValueError: where that cannot be done.
        """
        for strategy in self.args.strategies:
            if self.folder(strategy) is None:
                target = self.conversion_folder(strategy.model)
                target.parent.mkdir(parents=True, exist_ok=True)
                print(f"converting {self.args.source} for {strategy} into {target}", flush=True)
                convert(
                    self.args.source,
                    target,
                    position_embedding_type="tables",
                    method="calibrate",
                    method_options=self.method_options(strategy.model),
                    texts=list(self.args.calibration_text),
                )

    def load(self, strategy: Strategy) -> PreTrainedModel:
        """The model of a strategy."""
        option = "--converted-long" if strategy.model == LONG and self.args.converted_long else "--converted"
        option = "--source" if strategy.model == SOURCE else option
        special_tokens = sum(map(len, self.task.special))
        return load_for_strategy(strategy, self.folder(strategy), option, special_tokens, self.args.window)

    def classifier(self, strategy: Strategy) -> tuple[PreTrainedModel | None, DocumentClassifier]:
        """The frozen layers, if there are any, and what is trained."""
        lower, upper = split_frozen(self.load(strategy), self.args.train_layers)
        return lower, DocumentClassifier(upper, len(self.task.names), self.args.dropout)

    def pieces(
        self, strategy: Strategy, lower: PreTrainedModel | None, documents: Documents
    ) -> tuple[States, Seconds]:
        """Pieces as the classifier takes them, and the CPU seconds that the frozen layers took for each."""
        if lower is None:
            ids = [[torch.tensor(piece) for piece in self.task.pieces(strategy, row)] for row in documents.ids]
            return ids, [[0.0] * len(row) for row in ids]
        # the first tokens of a document are the first of its chunks
        chunks = Strategy("chunks", strategy.length)
        stored = chunks if strategy.kind == "truncate" and chunks in self.args.strategies else strategy
        rows = [self.task.pieces(stored, ids) for ids in documents.ids]
        weights = hashlib.sha256()
        for name, tensor in sorted(lower.state_dict().items()):
            weights.update(name.encode() + tensor.contiguous().numpy().tobytes())
        model = digest(weights.hexdigest(), lower.config.to_json_string(use_diff=False))
        states: States = []
        seconds: Seconds = []
        for start in range(0, len(rows), SHARD):
            shard = rows[start : start + SHARD]
            shard_states, shard_seconds = cached_states(
                lower, self.args.work / f"states-{digest(model, shard)}.safetensors", shard
            )
            states += shard_states
            seconds += shard_seconds
        if stored is not strategy:
            states, seconds = [row[:1] for row in states], [row[:1] for row in seconds]
        if self.args.train_layers == 0:  # the head sees nothing but the mean
            states = [[torch.cat(row).mean(0, keepdim=True)] for row in states]
        return states, seconds
