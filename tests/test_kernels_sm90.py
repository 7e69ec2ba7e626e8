"""The Triton kernels without a GPU: the memory they take, and what sm_90 would run."""

import subprocess
import sys

import pytest
import torch

from hf_relpos.attention.backends.kernels import ops


pytest.importorskip("triton", reason="Triton has wheels for Linux alone")


def launches(
    monkeypatch,
    letters,
    batch,
    heads,
    length,
    dtype=torch.bfloat16,
    size=64,
    dropout=0,
    padded=False,
    rows=None,
    window=None,
):
    """(name, Tile, arguments) of every launch of forward and backward, on "meta"; and the most numbers of scratch that
    one chunk takes, of each pass. Tables have a row for each offset, or so many; beside a window are other keys."""
    found, taken = [], []

    def launch(name, grid, how, **arguments):
        found.append((name, how, arguments))

    def scratch(count, like):
        taken.append(count)
        return like.new_empty(count)

    monkeypatch.setattr(ops, "_launch", launch)
    monkeypatch.setattr(ops, "scratch", scratch)
    made = {"device": "meta", "dtype": dtype}
    vectors = [torch.empty(batch, length, heads, size, **made).transpose(1, 2) for _ in range(3)]
    offsets = 2 * length - 1
    shapes = {"A": (1, rows or offsets, size), "c": (1, offsets)}
    index = None if rows is None else torch.empty(offsets, dtype=torch.int32, device="meta")
    indices = [index if x in letters else None for x in "ABV"]
    tables = [torch.empty(shapes.get(x, shapes["A"]), **made) if x in letters else None for x in "ABcV"]
    mask = torch.empty(batch, 1, 1, length, dtype=torch.bool, device="meta") if padded else None
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    beside = (None, None, None)
    if window is not None:
        beside = ((-window, window), vectors[0].transpose(1, 2), torch.empty(batch, heads, length, device="meta"))
    inputs = (vectors[0], None, *vectors[1:], *tables, *indices, mask, seed)
    call = ops.Call(*inputs, 0, 0.125, False, dropout, *beside)
    out, lse = call.forward()
    most, count = [sum(taken)], len([name for name, _, _ in found if name == "forward"])
    most[0] //= max(count, 1)
    taken.clear()
    call.backward(out, out, lse, False)
    count = len([name for name, _, _ in found if name == "backward"])
    return found, [*most, sum(taken) // max(count, 1)]


@pytest.mark.parametrize("batch, length", [(32, 512), (4, 8192), (1, 16384)])
@pytest.mark.parametrize("letters", ["A", "ABcV", "c"])
def test_workspace_is_bounded(letters, batch, length, monkeypatch):
    """Nothing of size B·H·L² is made: the matrices of a chunk take `WORKSPACE` bytes, its margins aside."""
    _, most = launches(monkeypatch, letters, batch, 12, length)
    assert max(most) * 2 <= 1.05 * ops.WORKSPACE


@pytest.mark.parametrize("letters", ["A", "ABcV"])
def test_launches_under_a_window_grow_with_the_length(letters, monkeypatch):
    """Scratch of a workspace that bounds nothing, and where loops over keys, queries and offsets go."""
    monkeypatch.setattr(ops, "WORKSPACE", 1 << 60)
    found = [launches(monkeypatch, letters, 1, 12, length, window=256) for length in (8192, 16384)]
    assert all(twice <= 2 * once for once, twice in zip(*(most for _, most in found), strict=True))
    for name, _, arguments in found[1][0]:
        if name != "products":
            assert arguments["high"] - arguments["low"] == 512 and arguments["BAND"]
    numbers = ops.numbers_per_row(16384, 513)
    assert found[1][1][0] <= 1.01 * len(letters.replace("c", "")) * 12 * 16384 * (numbers + 1) and numbers == 1024


# bytes of shared memory that a program may have; instructions of the main loop for the letters, bf16, heads of 64
SHARED = 227 << 10
LOOPS = {"A": {"forward": 450, "backward": 650}, "AB": {"forward": 520, "backward": 760}}
WINDOW_LOOPS = {"A": {"forward": 560, "backward": 800}, "AB": {"forward": 840, "backward": 1060}}


def builds(monkeypatch, letters, *given, names=("forward", "backward"), **settings):
    from sm90 import build

    from hf_relpos.attention.backends.kernels import tiles

    with monkeypatch.context() as patch:
        found, _ = launches(patch, letters, *given, **settings)
    first = {name: (how, arguments) for name, how, arguments in reversed(found)}
    return {
        name: build(getattr(tiles, name), first[name][1], first[name][0].warps, first[name][0].stages)
        for name in names
    }


@pytest.mark.parametrize("letters", [pytest.param("A", marks=pytest.mark.full), "AB"])
def test_main_loops_on_sm90(letters, monkeypatch):
    """Instructions of a thread for one tile; a gather by element would take several times as many."""
    made = builds(monkeypatch, letters, 32, 12, 512)
    for name, most in LOOPS[letters].items():
        assert 200 <= made[name].loop <= most, (name, made[name])
        assert made[name].spilled == 0 and made[name].registers <= 255 and made[name].shared <= SHARED


@pytest.mark.parametrize("letters", [pytest.param("A", marks=pytest.mark.full), "AB"])
def test_main_loops_under_a_window_on_sm90(letters, monkeypatch):
    """The window is a comparison of indices for each pair."""
    made = builds(monkeypatch, letters, 8, 12, 4096, window=256)
    for name, most in WINDOW_LOOPS[letters].items():
        assert 200 <= made[name].loop <= most, (name, made[name])
        assert made[name].spilled == 0 and made[name].registers <= 255 and made[name].shared <= SHARED


MAIN = ("forward", "backward")
KINDS = {  # float32 with heads of 128 spills 208 bytes in the forward pass; nothing of ours should need it
    "bf16, 64": (torch.bfloat16, 64, (*MAIN, "table_product", "table_apply", "table_gradient")),
    "bf16, 128": (torch.bfloat16, 128, MAIN),
    "fp32, 64": (torch.float32, 64, MAIN),
}


@pytest.mark.parametrize("rows", [None, pytest.param(64, marks=pytest.mark.full)], ids=["by offset", "by row"])
@pytest.mark.parametrize(
    "kind", [kind if kind == "bf16, 64" else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_nothing_spills_on_sm90(kind, rows, monkeypatch):
    """With every term, dropout and padding, at a length that fills no tile."""
    dtype, size, names = KINDS[kind]
    made = builds(monkeypatch, "ABcV", 4, 12, 500, dtype, size, 6554, True, rows, names=names)
    for name, found in made.items():
        assert found.spilled == 0 and found.registers <= 255 and found.shared <= SHARED, (name, found)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_next_to_nothing_spills_under_a_window_on_sm90(kind, monkeypatch):
    """With every term, dropout, padding and attention to other keys: 32 bytes of a thread at most."""
    dtype, size, names = KINDS[kind]
    made = builds(monkeypatch, "ABcV", 4, 12, 1500, dtype, size, 6554, True, None, 256, names=names)
    for name, found in made.items():
        assert found.spilled <= 32 and found.registers <= 255 and found.shared <= SHARED, (name, found)


@pytest.mark.full
def test_kernels_are_imported_first():
    """Before any other module of the package, as this file does."""
    code = (
        "from hf_relpos.attention.backends.kernels import ops; from hf_relpos.attention.dispatch import BACKENDS; "
        "print(BACKENDS[0].name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "triton"
