"""One of two processes that compute models in parallel ways, each compared with one process, on CPU by gloo.

    python tests/parallel_models.py OUT.json FOLDER CASE ...

Of `CASES`; all ways, `ENGINES`, for each. OUT.json gets {case: {way: {figure: number}}}, or a message in place of the
figures where an error is raised in both processes alike. The figures are the largest differences of either process, in
float64, each relative to the largest entry if that is above 1.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from oracles import STILL, extra_inputs, padding, stir, tiny_config
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

from hf_relpos import RelPosBertForMaskedLM
from hf_relpos.models import modeling_relpos_bert
from hf_relpos.schemes import SCHEMES


PROCESSES, ROWS, LENGTH = 2, 4, 9
DEBERTA_V3 = {"share_att_key": True, "buckets": 4, "max_distance": 16, "norm_rel_ebd": "layer_norm"}
# Options that change what a scheme has by head, what layers share or what is projected; then fields of other kinds.
VARIANTS = {
    "shaw, per head": ("shaw", {"per_head": True}),
    "relation, per head": ("relation", {"per_head": True}),
    "relative_2d, per head": ("relative_2d", {"per_head": True}),
    "music, shared by heads": ("music", {"per_head": False, "values": True}),
    "tables, shared by heads": ("tables", {"per_head": False}),
    "tables, by row": ("tables", {"storage": "rows", "terms": "AB"}),
    "harmonic, shared by heads": ("harmonic", {"per_head": False}),
    "harmonic, values": ("harmonic", {"terms": "V"}),
    "alibi, asymmetric": ("alibi", {"variant": "asymmetric"}),
    "alibi, offset": ("alibi", {"variant": "offset"}),
    "deberta, shared projections": ("deberta", {"share_att_key": True}),
    "deberta, v3": ("deberta", DEBERTA_V3),
    "deberta, p2c": ("deberta", {"share_att_key": True, "pos_att_type": "p2c"}),
    "fire, shared by layers": ("fire", {"shared": True}),
    "kerple, power": ("kerple", {"kind": "power", "scaled": True}),
    "tener, paper": ("tener", {"terms": "paper", "scale": True}),
    "tupe, R": ("tupe", {"variant": "R"}),
    "xlnet, no segments": ("xlnet", {"segments": False}),
    "a combination": (["deberta", "alibi", "t5"], {"deberta": {"share_att_key": True}}),
}
FIELDS = {
    "a gated model": {"position_embedding_type": "rope", "feed_forward_type": "glu"},
    "a window": {"position_embedding_type": "shaw", "attention_window": 3},
    "unpadded": {"position_embedding_type": "tables", "unpad_inputs": True},
    "a convolution": {"position_embedding_type": "t5", "conv_kernel_size": 3, "embedding_size": 16},
    "chosen biases": {"position_embedding_type": "deberta", "attention_biases": ["value"]},
    "eager": {"position_embedding_type": "transformer_xl", "attn_implementation": "eager"},
}
CASES: dict[str, dict] = {
    **{name: {"position_embedding_type": name, "position_options": STILL.get(name)} for name in SCHEMES},
    **{name: {"position_embedding_type": kind, "position_options": more} for name, (kind, more) in VARIANTS.items()},
    **FIELDS,
}


def make_model(case: str) -> nn.Module:
    """The model of a case, the same in every process."""
    torch.manual_seed(0)
    modeling_relpos_bert.FEWEST_PADDING = 0
    settings = {"hidden_size": 32, "num_attention_heads": 4, "save_code": False, **CASES[case]}
    model = RelPosBertForMaskedLM(tiny_config(settings.pop("position_embedding_type"), **settings))
    return stir(model).double().train()


def make_batch(case: str) -> dict[str, torch.Tensor]:
    """Inputs of all rows, some of which are padded."""
    real = padding([LENGTH, 5, 7, LENGTH], LENGTH)
    ids = torch.randint(1, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)) * real
    types = (torch.arange(LENGTH) > 3).long().expand(ROWS, -1)
    more = extra_inputs(CASES[case]["position_embedding_type"], ROWS, LENGTH)
    return {"input_ids": ids, "attention_mask": real.long(), "token_type_ids": types, **more}


def half(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows of this process."""
    return {name: tensor.chunk(PROCESSES)[distributed.get_rank()] for name, tensor in batch.items()}


def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the real tokens, zero elsewhere, and the gradients of a fixed function of them, whole, by name."""
    model.zero_grad()
    logits = model(**batch).logits * batch["attention_mask"][..., None]
    weights = torch.linspace(-1, 1, 50, dtype=logits.dtype) + batch["input_ids"][..., None] / 50
    (weights * logits**2).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name.removeprefix("module.")] = whole(gradient)
    return logits.detach(), found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        raise AssertionError(f"{tuple(found.shape)} instead of {tuple(expected.shape)}")
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def compare(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    expected: tuple[torch.Tensor, dict[str, torch.Tensor]],
    checkpointing: tuple[bool | None, ...],
) -> dict[str, float]:
    """Largest differences of outputs and gradients from one process. Each process has its own rows.

    Args:
        checkpointing: whether activation checkpointing is reentrant; None for none. Each is tried.
    """
    inputs, logits = half(batch), half({"logits": expected[0]})["logits"]
    figures = {"outputs": 0.0, "gradients": 0.0}
    inner = getattr(model, "module", model)
    for reentrant in checkpointing:
        if reentrant is not None:
            inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        found, gradients = run(model, inputs)
        assert gradients.keys() == expected[1].keys()
        figures["outputs"] = max(figures["outputs"], difference(found, logits))
        for name, gradient in gradients.items():
            figures["gradients"] = max(figures["gradients"], difference(gradient, expected[1][name] / PROCESSES))
    return figures


def saved(model: nn.Module, original: nn.Module, folder: Path) -> dict[str, float]:
    """Largest difference of the weights that a divided model saves."""
    model.save_pretrained(folder)
    distributed.barrier()
    again = RelPosBertForMaskedLM.from_pretrained(folder, dtype=torch.float64).state_dict()
    state = original.state_dict()
    assert again.keys() == state.keys()
    return {"saved": max(difference(again[name], state[name]) for name in state)}


def data_parallel(case: str, folder: Path, batch, expected) -> dict[str, float]:
    """Reentrant checkpointing is PyTorch's to refuse, where layers share parameters; `parallel_train` has it."""
    return compare(nn.parallel.DistributedDataParallel(make_model(case)), batch, expected, (None, False))


def fully_sharded(case: str, folder: Path, batch, expected) -> dict[str, float]:
    model = make_model(case)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return compare(model, batch, expected, (None, False, True))


def sharded_by_transformers(case: str, folder: Path, batch, expected) -> dict[str, float]:
    """A model that Transformers divides among the processes while it loads it."""
    settings = DistributedConfig(fsdp_size=PROCESSES)
    model = RelPosBertForMaskedLM.from_pretrained(folder, dtype=torch.float64, distributed_config=settings).train()
    figures = compare(model, batch, expected, (None, False, True))
    return figures | saved(model, make_model(case), folder / "saved")


ENGINES = {"DistributedDataParallel": data_parallel, "FSDP2": fully_sharded}
ENGINES |= {"FSDP2 by DistributedConfig": sharded_by_transformers}


def agreed(figures: dict[str, float]) -> dict[str, float]:
    """The larger of both processes' figures."""
    values = torch.tensor(list(figures.values()), dtype=torch.float64)
    distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
    return dict(zip(figures, values.tolist(), strict=True))


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo")
    out, folder, *cases = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    report: dict[str, dict] = {}
    for number, case in enumerate(cases):
        report[case] = {}
        batch, model = make_batch(case), make_model(case)
        expected = run(model, batch)
        place = folder / str(number)
        if distributed.get_rank() == 0:
            model.save_pretrained(place)
        distributed.barrier()
        for name, engine in ENGINES.items():
            try:
                report[case][name] = agreed(engine(case, place, batch, expected))
            except Exception as error:  # the report says what
                report[case][name] = f"{type(error).__name__}: {error}"
    if distributed.get_rank() == 0:
        out.write_text(json.dumps(report))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
