"""Which cases `make test` runs of a test that is a product of several axes, and which wait for `--full`.

A test marked `@pytest.mark.covering(strength)` keeps a covering array of its cases: for every choice of `strength`
axes, each combination of their values that occurs in the full product occurs in a case that is kept. The axes of a
test are the arguments it is parametrized with. One of them may hold schemes (names, or lists of names): its values are
then not the schemes but the kinds of terms they have (`kinds`), so that every other axis meets every kind of term, and
besides every scheme keeps at least one case. `covering(strength, every_scheme=False)` leaves out the latter, for tests
that take long.

A test or case marked `full` runs with `--full` only, and `chosen` is for loops over schemes inside a test or fixture.
All of it is deterministic: the processes of pytest-xdist must agree.

`TIERS` says which files wait for `make test-more`: what they test changes rarely, or takes long. So do tests of other
files that are marked with a tier, or have the fixture `hub`. All others are the fast tier, which `pytest` alone runs.
"""

import dataclasses
import fnmatch
import functools
import itertools
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


full = False  # set by `--full`, before test modules are imported
OTHER_LIBRARIES = ("compile", "fuzz_compile", "graph_export", "live_splade", "live_tools", "loading_features")
# Markers, and the files `test_*.py` that have them as a whole.
TIERS = {
    "documents": ("demo", "doc_blocks", "docs", "notebook"),
    "ecosystem": (*OTHER_LIBRARIES, "offloading", "processes", "tools_*", "trainer_features"),
    "hub": ("hub*", "privacy", "saved_code"),
    "slow": (),  # of those marked by themselves: they take seconds beside what faster ones of their file say
    "scripts": ("examples", "scripts"),
}
# A scheme for each kind of term: what the tests that docs/features.md lists are parametrized with.
FEATURE_SCHEMES = (
    "relative_key",  # A
    "relative_key_query",  # A, B
    "shaw",  # A, V
    "tables",  # A, B, c, V
    "transformer_xl",  # u, and A and c by a projection
    "deberta",  # A and B by projections of a table that layers share, in buckets
    "t5",  # c, shared, in buckets
    "alibi",  # c without parameters
    "fire",  # c by a small network
    "rope",  # queries and keys rotated
)

# Tests of a feature that take long run for two of them, and for all with `--full`.
FEW_FEATURE_SCHEMES = tuple(
    name if name in ("tables", "t5") else pytest.param(name, marks=pytest.mark.full) for name in FEATURE_SCHEMES
)


def tier_of(path: Path) -> str | None:
    """The tier of a file of tests; None for the fast one."""
    name = path.stem.removeprefix("test_")
    found = (tier for tier, patterns in TIERS.items() if any(fnmatch.fnmatch(name, each) for each in patterns))
    return next(found, None)


def tiers_of(item: pytest.Item) -> list[str]:
    """The tiers that an item has, without those it is marked with."""
    tier = tier_of(item.path)
    return [*([tier] if tier else []), *(["hub"] if "hub" in getattr(item, "fixturenames", ()) else [])]


@functools.cache
def kinds(scheme: str) -> frozenset[str]:
    """The kinds of terms of a scheme, from what a tiny model does with it.

    They are the fields of `Terms` that it fills (A, B, u, c, c_outer, dense, V, gain, feature_gain, allow, rotate,
    scale), "input" if it acts on the input, "shared" if layers share a module, and the inputs that it requires.
    """
    import torch
    from oracles import extra_inputs, tiny_model

    from hf_relpos import RelPosBertModel

    with torch.random.fork_rng(devices=[]):
        model = tiny_model(RelPosBertModel, scheme)
    module = model.encoder.layer[0].attention.self.distance_embedding
    calls = []
    module.register_forward_hook(lambda module, args, terms: calls.append(terms))
    inputs = extra_inputs(scheme, 1, 6)
    with torch.no_grad():
        model(torch.ones(1, 6, dtype=torch.long), **inputs)
    values = {field.name: getattr(calls[0], field.name) for field in dataclasses.fields(calls[0])}
    found = {letter for letter, value in values.items() if value is not None and not (value == ())}
    if model.encoder.distance_embedding is not None:
        found.add("shared")
    if model.embeddings.position_embeddings is not None:
        found.add("input")
    return frozenset(found | set(inputs))


def cover(features: Sequence[Iterable[Hashable]]) -> list[int]:
    """Indices of cases that together have every feature that any case has: a greedy set cover, ascending."""
    cases = [frozenset(each) for each in features]
    missing, kept = set().union(*cases), []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(cases[index] & missing))
        missing -= cases[best]
        kept.append(best)
    return sorted(kept)


def chosen(schemes: Iterable[str]) -> list[str]:
    """All of these schemes with `--full`, else the fewest that have all kinds of terms among them, in their order."""
    names = list(schemes)
    return names if full else [names[index] for index in cover([kinds(name) for name in names])]


def thinned(schemes: Iterable[str]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: all of these schemes, `full` on those that are not `chosen`."""
    names = list(schemes)
    kept = set(chosen(names))
    return [name if name in kept else pytest.param(name, marks=pytest.mark.full) for name in names]


def with_full(quick: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: the quick ones, and `full` on the others that are not among them."""
    names = list(quick)
    added = [each if isinstance(each, tuple) else (each,) for each in others if each not in names]
    return [*names, *(pytest.param(*each, marks=pytest.mark.full) for each in added)]


def schemes_of(value: Any, known: Iterable[str]) -> list[str]:
    """The schemes that a parameter names: one, several for a combination, none for anything else."""
    names = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
    return list(names) if names and all(isinstance(name, str) and name in known for name in names) else []


def case_features(params: dict[str, Any], strength: int, every_scheme: bool) -> list[Hashable]:
    """What a case covers: combinations of values of `strength` axes, and its scheme."""
    from hf_relpos.schemes import SCHEMES

    axes: list[list[tuple[str, str]]] = []
    features: list[Hashable] = []
    for axis, value in sorted(params.items()):
        schemes = schemes_of(value, SCHEMES)
        if schemes:
            letters = frozenset().union(*map(kinds, schemes)) | ({"combination"} if len(schemes) > 1 else set())
            axes.append([(axis, kind) for kind in sorted(letters)])
            if every_scheme:
                features.append((axis, repr(value)))
        else:
            axes.append([(axis, repr(value))])
    for some in itertools.combinations(axes, min(strength, len(axes))):
        features.extend(itertools.product(*some))
    return features


def select(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items that run without `--full`, in their order."""
    kept: list[pytest.Item] = []
    products: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("full"):
            continue
        mark = item.get_closest_marker("covering")
        if mark is None or not hasattr(item, "callspec"):
            kept.append(item)
        else:
            key = (item.path, item.originalname, mark.args[0], mark.kwargs.get("every_scheme", True))
            products.setdefault(key, []).append(item)
    for (_, _, strength, every_scheme), cases in products.items():
        features = [case_features(item.callspec.params, strength, every_scheme) for item in cases]
        kept.extend(cases[index] for index in cover(features))
    places = {item: place for place, item in enumerate(items)}
    return sorted(kept, key=places.__getitem__)
