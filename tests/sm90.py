"""Compile the kernels for sm_90 ahead of time, without a device, and read what came out."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
TARGET = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Build:
    """What the compiler made of a kernel.

    Attributes:
        registers: of a thread.
        spilled: bytes of local memory that a thread spills to.
        shared: bytes of shared memory of a program.
        loop: instructions of the longest innermost loop.
    """

    registers: int
    spilled: int
    shared: int
    loop: int


def build(function: Callable, arguments: dict, warps: int, stages: int) -> Build:
    """Compile for the arguments of one launch, specialised to them as a launch does; tensors may be on "meta"."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(function.params):
        name, value, special = parameter.name, arguments[parameter.name], not parameter.do_not_specialize
        if value is None or parameter.is_constexpr or (isinstance(value, int) and value == 1 and special):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], aligned = f"*{TYPES[value.dtype]}", True
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        else:
            signature[name], aligned = "i32" if abs(value) < 1 << 31 else "i64", value % 16 == 0 and special
        if aligned:
            attributes[place,] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    made = triton.compile(source, target=TARGET, options={"num_warps": warps, "num_stages": stages})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", path)
        listing = _tool("nvdisasm", "-c", path)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    return Build(found["REG"], found["STACK"] + found["LOCAL"], made.metadata.shared, longest_loop(listing))


def _tool(name: str, *arguments: object) -> str:
    """What a program of the triton wheel prints."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def longest_loop(listing: str) -> int:
    """Instructions between a label and the last jump back to it, over loops without another in them; 0 without any."""
    place, labels, loops = 0, {}, {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = place
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*)", line):
            place += 1
            target = re.search(r"\bBRA(?:\.\S+)?\s.*?`\((\.L_x_\d+)\)", instruction[1])
            if target and target[1] in labels and labels[target[1]] < place - 1:
                if place - labels[target[1]] > 16:  # or it only waits for a barrier
                    loops[labels[target[1]]] = place
    inner = [end - begin for begin, end in loops.items() if not any(begin < other < end for other in loops)]
    return max(inner, default=0)
