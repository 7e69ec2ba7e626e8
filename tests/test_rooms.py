"""Who may import whom in the package: nothing upwards, no circle; imports inside functions count, too."""

import ast
from pathlib import Path

import hf_relpos


ROOT = Path(hf_relpos.__file__).parent
# Each room may import from those before it; those in one line do not know each other.
ROOMS = [
    {"version", "deferred", "host"},
    {"files", "console", "data"},
    {"attention"},
    {"schemes"},
    {"models", "settings"},
    {"registration"},
    {"families"},
    {"live"},
    {"autoload"},
    {"evaluation", "machine"},
    {"training"},
    {"conversion"},
    {"demo"},
    {"cli"},
    {"__main__"},
]


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text("utf-8"))
    return found


def imports(name: str, tree: ast.Module, known: dict[str, ast.Module]) -> set[str]:
    """Modules of the package that a module imports anywhere."""
    package = name if (ROOT.parent / Path(*name.split(".")) / "__init__.py").is_file() else name.rpartition(".")[0]
    targets = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            candidates = [f"{base}.{alias.name}" for alias in node.names]
            targets |= {candidate if candidate in known else base for candidate in candidates}
        elif isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
    return targets & set(known)


def test_nothing_runs_upwards():
    known = modules()
    level = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    wrong = []
    for name, tree in known.items():
        if name == ROOT.name:
            continue
        room = name.split(".")[1]
        for target in imports(name, tree, known) - {ROOT.name}:
            other = target.split(".")[1]
            if other != room and level[other] >= level[room]:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_circles():
    known = modules()
    graph = {name: imports(name, tree, known) - {name} for name, tree in known.items() if name != ROOT.name}
    while leaves := [name for name, targets in graph.items() if not targets & set(graph)]:
        for name in leaves:
            del graph[name]
    assert not graph, f"modules in circles, and what imports them: {sorted(graph)}"


def test_every_room_has_a_level():
    rooms = {name.split(".")[1] for name in modules() if name != ROOT.name}
    assert rooms == set().union(*ROOMS)
