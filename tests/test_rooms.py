"""Who may import whom in the package: nothing upwards, no circle; imports inside functions and by name count, too."""

import ast
from pathlib import Path

import pytest

import hf_relpos


ROOT = Path(hf_relpos.__file__).parent
# Each room may import from those before it; those in one line do not know each other.
ROOMS = [
    {"version", "deferred", "deprecation", "host"},
    {"files", "console", "data", "checkpoints", "products"},
    {"attention"},
    {"schemes"},
    {"models"},
    {"families"},
    {"registration", "loaded"},
    {"live"},
    {"autoload"},
    {"evaluation", "machine"},
    {"training"},
    {"conversion"},
    {"demo"},
    {ROOT.name},  # which imports by the names that are asked for
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
    strings = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            candidates = [f"{base}.{alias.name}" for alias in node.names]
            targets |= {candidate if candidate in known else base for candidate in candidates}
        elif isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and (named := named_module(node, package)):
            targets |= {named.replace("*", string) for string in strings}
    return targets & set(known)


def named_module(call: ast.Call, package: str) -> str:
    """What `import_module` and `__import__` import by a string, with * for parts that are only known when it runs."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("import_module", "__import__") or not call.args:
        return ""
    parts = call.args[0].values if isinstance(call.args[0], ast.JoinedStr) else [call.args[0]]
    values = [part.value if isinstance(part, ast.Constant | ast.FormattedValue) else part for part in parts]
    values = [package if getattr(value, "id", "") == "__package__" else value for value in values]
    name = "".join(value if isinstance(value, str) else "*" for value in values)
    dots = len(name) - len(name.lstrip("."))
    above = package.split(".")
    return ".".join([*above[: len(above) - dots + 1], name.lstrip(".")]) if dots else name


IMPORTS = [
    ('import_module("hf_relpos.live")', "hf_relpos.live"),
    ('importlib.import_module(".deberta", __package__)', "hf_relpos.live.deberta"),
    ('import_module(f"..live.{code}", __package__)', "hf_relpos.live.*"),
    ('import_module(f"{__package__}.{code}")', "hf_relpos.live.*"),
    ("import_module(name)", "*"),
    ("print(name)", ""),
]


@pytest.mark.parametrize("code, name", IMPORTS)
def test_imports_by_name_are_found(code, name):
    assert named_module(ast.parse(code).body[0].value, "hf_relpos.live") == name


def test_nothing_runs_upwards():
    known = modules()
    level = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    wrong = []
    for name, tree in known.items():
        room = [*name.split("."), ROOT.name][1]
        for target in imports(name, tree, known):
            other = [*target.split("."), ROOT.name][1]
            if other != room and level[other] >= level[room]:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_imported_by_a_name_of_the_caller():
    """Such a name need not be in the file that imports. `host` imports what it declares, of other packages."""
    nodes = [(name, node) for name, tree in modules().items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = {name for name, node in nodes if named_module(node, name).startswith("*")}
    assert found <= {ROOT.name, f"{ROOT.name}.host.declarations"}


def test_no_circles():
    known = modules()
    graph = {name: imports(name, tree, known) - {name} for name, tree in known.items()}
    while leaves := [name for name, targets in graph.items() if not targets & set(graph)]:
        for name in leaves:
            del graph[name]
    assert not graph, f"modules in circles, and what imports them: {sorted(graph)}"
