"""What the scripts of this folder share: running pieces of an original's source, seeded noise, writing a fixture.

Nothing of an original is kept in this repository: the scripts read a checkout, or an installed package, and run it.
"""

import ast
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures" / "schemes"


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


def write(name: str, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """tests/fixtures/schemes/<name>.safetensors, the configuration as JSON in its metadata."""
    FIXTURES.mkdir(parents=True, exist_ok=True)
    tensors = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    save_file(tensors, FIXTURES / f"{name}.safetensors", metadata={"config": json.dumps(config)})
    print(f"{name}: {(FIXTURES / f'{name}.safetensors').stat().st_size} bytes")
