"""One of two processes that train optimized encoders under DistributedDataParallel, on CPU by gloo.

    python tests/parallel_live.py OUT.json ENCODER ...

OUT.json gets by encoder how far its gradients are from those of Transformers in one process.
"""

import copy
import json
import sys
from pathlib import Path

import torch
from encoders import build, pad_of, tokens
from torch import distributed, nn

from hf_relpos import optimize


REAL = torch.arange(60) < torch.tensor([60, 3, 2, 4, 3, 50, 5, 2, 1, 4])[:, None]  # each half in two parts


def gradients_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    outputs = model(**inputs)
    states = outputs[0][inputs["attention_mask"] != 0].pow(2).sum()
    pooled = outputs.get("pooler_output")
    (states if pooled is None else states + pooled.pow(2).sum()).backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def main() -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    report = {}
    for name in sys.argv[2:]:
        stock = build(name).train()
        ours, inputs = copy.deepcopy(stock), tokens(REAL, pad_of(stock))
        optimize(ours)
        rows = {key: value.chunk(2)[distributed.get_rank()] for key, value in inputs.items()}
        expected = gradients_of(stock, inputs)
        found = gradients_of(nn.parallel.DistributedDataParallel(ours), rows)
        pairs = zip(found, expected, strict=True)  # gradients are means over processes
        apart = torch.stack([(2 * one - other).abs().max() / other.abs().max().clamp(min=1) for one, other in pairs])
        distributed.all_reduce(worst := apart.max(), op=distributed.ReduceOp.MAX)
        report[name] = float(worst)
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(report))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
