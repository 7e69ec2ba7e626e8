"""Agreement of a result with its source on held-out text."""

import platform
import timeit
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..console import ProgressCallback
from ..data.windows import PairLayout, Windows, pair_windows
from ..evaluation import fidelity
from ..evaluation.encoder import hidden_states
from ..evaluation.inspection import has_mlm_head
from ..evaluation.model_fidelity import LENGTHS
from ..models.modeling_relpos_bert import RelPosBertPreTrainedModel
from .plan import Conversion
from .texts import gather


# Tokens of text for each length at which teacher and student are compared.
EVALUATED_TOKENS = 6144
# Windows that are compared as segment pairs: maximum tokens of each, and tokens of all.
PAIR_LENGTH, PAIR_TOKENS = 128, 4096
SPEED_RUNS = 5


def held_out_rows(conversion: Conversion, tokenizer: Any) -> dict[int, list[list[int]]]:
    """Rows of text that is not trained on, by length; none for a length that the text does not fill.

    Raises:
        ConversionError: as `gather`.
    """
    lengths = [length for length in LENGTHS if length <= conversion.limit] or [conversion.limit]
    if (longest := conversion.options.length or 0) > conversion.limit:
        lengths.append(longest)
    cut = partial(gather, conversion, tokenizer, "check", seed=conversion.seed, short=0.0)
    return {length: cut(max(EVALUATED_TOKENS, 2 * length), (length,)).ids for length in lengths}


def held_out_fidelity(
    student: RelPosBertPreTrainedModel,
    teacher: RelPosBertPreTrainedModel,
    tokenizer: Any,
    rows_by_length: dict[int, list[list[int]]],
    conversion: Conversion,
    progress: ProgressCallback,
) -> dict[str, Any]:
    """The content of `details["fidelity"]`: agreement by length, or the reason why it cannot be measured.

    `skipped` lists the lengths that the text does not fill. If the source reads segment pairs, `pairs` has the token
    cosine in each segment.

    Args:
        rows_by_length: from `held_out_rows`.
    """
    limit, seed = conversion.limit, conversion.seed
    filled = {length: rows for length, rows in rows_by_length.items() if rows}
    if not filled:
        return {"skipped": f"no held-out text fills {min(rows_by_length)} tokens; give more text"}
    mask = tokenizer.mask_token_id if has_mlm_head(student) and has_mlm_head(teacher) else None
    result = fidelity(teacher, student, filled, mask_token_id=mask, seed=seed, progress=progress)
    for length in sorted(set(rows_by_length) - set(filled)):
        result.skipped[length] = f"no held-out text fills {length:,} tokens; give more text"
    found = result.to_dict()
    layout = PairLayout.of(tokenizer) if conversion.tells_segments_apart else None
    if layout is not None:
        most = min(limit, max(PAIR_LENGTH, min(filled)))
        length = max(length for length in filled if length <= most)
        chosen = Windows(filled[length][: max(4, PAIR_TOKENS // length)], 0.0, 0)
        pairs = pair_windows(chosen, layout, 1.0, length, conversion.seed)
        if any(map(any, pairs.types or ())):  # otherwise all windows are too short to split
            ids, types = (torch.tensor(rows, device=student.device) for rows in (pairs.ids, pairs.types))
            real = torch.ones_like(ids, dtype=torch.bool)
            one, other = (hidden_states(model, ids, real, token_type_ids=types) for model in (teacher, student))
            cosines = torch.cosine_similarity(one, other, dim=-1)
            by_segment = [float(cosines[types == segment].mean()) for segment in (0, 1)]
            found["pairs"] = {"length": length, "tokens": ids.numel(), "token_cosine_by_segment": by_segment}
    return found


@torch.inference_mode()
def speed(student: RelPosBertPreTrainedModel, teacher: RelPosBertPreTrainedModel) -> dict[str, Any]:
    """The content of `details["speed"]`: seconds of both encoders for one row of the source's limit, and the device.

    Each is the fastest of several runs, because other processes only make a run slower.
    """
    length = min(LENGTHS[-1], teacher.config.max_position_embeddings)
    ids = torch.full((1, length), 5, device=student.device).clamp_max(student.config.vocab_size - 1)

    def read(model: RelPosBertPreTrainedModel) -> None:
        model.base_model(input_ids=ids).last_hidden_state.sum().item()  # waits for a GPU

    models = {"source": teacher, "result": student}
    runs = [  # in turns, so that other work on the machine slows both
        {name: timeit.timeit(partial(read, each), number=1) for name, each in models.items()}
        for _ in range(SPEED_RUNS)
    ]
    best = {name: min(each[name] for each in runs) for name in models}
    return {"tokens": length, "device": processor_name(ids.device), **best}


def processor_name(device: torch.device) -> str:
    """What computes there: the GPU, or the CPU and the number of its threads."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    threads, cpu = torch.get_num_threads(), platform.processor() or platform.machine()
    with suppress(OSError, KeyError):  # there is one on Linux, where platform knows the architecture alone
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in first.splitlines()}
        cpu = f"{fields['model name']} {fields['cpu family']}/{fields['model']}"
    return f"{cpu}, {threads} {'threads' if threads > 1 else 'thread'}"
