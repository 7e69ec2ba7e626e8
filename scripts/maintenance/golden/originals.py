"""What the scripts of this folder share: running pieces of an original's source, seeded noise, writing a fixture.

Nothing of an original is kept in this repository: the scripts read a checkout, or an installed package, and run it.
"""

import ast
import json
import zlib
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file


FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures" / "schemes"


TRANSFORMERS = "4.57.6"  # the last release with several of the originals


def check_transformers() -> None:
    """
    Raises:
        SystemExit: for another release than `TRANSFORMERS`.
    """
    if transformers.__version__ != TRANSFORMERS:
        raise SystemExit(f"needs transformers {TRANSFORMERS}, not {transformers.__version__}")


def find(path: Path, name: str) -> ast.stmt:
    """The definition `name` of a source file; dots go inside: "Class.method.function"."""
    node = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node


def run(path: Path, statements: list[ast.stmt], names: dict[str, Any]) -> dict[str, Any]:
    """`statements` of a source file, run with `names` as globals, which are returned with what they define."""
    exec(compile(ast.Module(statements, type_ignores=[]), str(path), "exec"), names)
    return names


def noise(name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal noise, the same for the same name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator) * scale


@torch.no_grad()
def randomise(module: torch.nn.Module, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Every parameter becomes noise seeded by its name; returns copies of them."""
    for name, parameter in module.named_parameters():
        parameter.copy_(noise(name, *parameter.shape, scale=scale))
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def padded_batch(words: int, types: int = 2, padding: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of a model, (2, 12), the second row with padding after 7 tokens.

    Args:
        words: size of the vocabulary.
        types: number of token types.
        padding: id of the padding token.
    """
    mask = (torch.arange(12) < torch.tensor([12, 7])[:, None]).long()
    ids = noise("input_ids", *mask.shape).abs().mul(1e4).long() % (words - 3) + 3
    kinds = (torch.arange(12) >= 4).long().expand_as(mask) % types
    return {"input_ids": torch.where(mask == 1, ids, padding), "attention_mask": mask, "token_type_ids": kinds * mask}


def check_meaningful(name: str, right: dict[str, torch.Tensor], wrong: dict[str, torch.Tensor], cause: str) -> None:
    """
    Raises:
        SystemExit: where a wrong cause changes an output by less than 1e-2.
    """
    change = min(float((wrong[field] - output).abs().max()) for field, output in right.items())
    print(f"{name}: {cause} changes every output by {change:.2g} or more")
    if change < 1e-2:
        raise SystemExit("too little")


def write(name: str, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """tests/fixtures/schemes/<name>.safetensors, the configuration as JSON in its metadata."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    save_file(tensors, FIXTURES / f"{name}.safetensors", metadata={"config": json.dumps(config)})
    print(f"{name}: {(FIXTURES / f'{name}.safetensors').stat().st_size} bytes")
