"""A tiny teacher and student; and, as a script, one of the processes of a distillation in several.

    accelerate launch --multi_gpu --num_processes 2 tests/distil_train.py FOLDER

It writes the student and the report.
"""

import json
import sys
from pathlib import Path

import torch
from oracles import tiny_sizes
from transformers import BertConfig, BertForMaskedLM, BertModel, set_seed

from hf_relpos import RelPosBertConfig, RelPosBertForMaskedLM, RelPosBertModel
from hf_relpos.training import distil


VOCABULARY, LIMIT = 20, 16


def pair(heads: bool = False):
    """A stock teacher with absolute positions, and a student with its weights and fresh tables.

    Args:
        heads: with masked language model heads, and attention that holds its weights.
    """
    set_seed(0)
    sizes = tiny_sizes(vocab_size=VOCABULARY, max_position_embeddings=LIMIT)
    config = BertConfig(**sizes, initializer_range=0.2)
    relative = RelPosBertConfig.from_bert(config, position_embedding_type="tables")
    more = {"attn_implementation": "eager"} if heads else {}
    teacher = (BertForMaskedLM if heads else BertModel)._from_config(config, **more).eval()
    student = (RelPosBertForMaskedLM if heads else RelPosBertModel)(relative).eval()
    student.load_state_dict(teacher.state_dict(), strict=False)
    return teacher, student


def texts(count: int = 64, seed: int = 5) -> list[list[int]]:
    """Windows of 4 to LIMIT random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, LIMIT + 1, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    teacher, student = pair()
    rates = {"learning_rate": 1e-3, "table_learning_rate": 1e-2}
    report = distil(student, teacher, texts(), steps=10, batch_tokens=64, **rates, use_cpu=True, ddp_backend="gloo")
    if torch.distributed.get_rank() == 0:
        student.save_pretrained(folder / "student")
        found = {**vars(report), "processes": torch.distributed.get_world_size()}
        (folder / "report.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
