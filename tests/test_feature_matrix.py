"""The matrix of features: what is recorded of a session, what stays of the one before, and what the card says."""

import sys

import pytest
from launching import SCRIPTS, import_script


pytest_plugins = ["pytester"]

MATRIX = import_script("feature_matrix")
TESTS = """
import pytest

SCHEMES = ["shaw", "t5", "rope"]

@pytest.mark.feature("good")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_good(scheme, record_property):
    if scheme == "rope":
        record_property("note", "slowly")

@pytest.mark.feature("mixed")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_mixed(scheme, record_property):
    if scheme == "t5":
        record_property("refused", "no tables")
    assert scheme != "rope"

@pytest.mark.feature("mixed")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_mixed_otherwise(scheme, record_property):
    record_property("refused", "never")

@pytest.fixture
def broken():
    yield
    raise RuntimeError("after the test")

@pytest.mark.feature("broken")
@pytest.mark.parametrize("scheme", ["shaw", "hop"])  # hop has no column
def test_broken(scheme, broken):
    pass

def test_of_no_feature():
    assert False
"""


def run(pytester, monkeypatch, *arguments, tests=TESTS):
    """A session with the plugin in a folder of its own."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.syspath_prepend(SCRIPTS.parent / "tests")
    monkeypatch.setitem(sys.modules, "feature_matrix", MATRIX)
    pytester.makeini("[pytest]\nmarkers = feature(name): a feature\n")
    pytester.makepyfile(tests)
    results = pytester.path / "features.json"
    done = pytester.runpytest_inprocess(
        "-p", "feature_matrix", "-p", "no:xdist", "-p", "no:hypothesispytest", "--feature-results", results, *arguments
    )
    return MATRIX.read(results), done


def test_outcomes_are_recorded_by_feature_and_scheme(pytester, monkeypatch):
    results, done = run(pytester, monkeypatch)
    done.assert_outcomes(passed=9, failed=1, errors=1, deselected=2)
    name = "test_outcomes_are_recorded_by_feature_and_scheme.py"
    mixed = results["features"]["mixed"]["tests"]
    assert mixed["t5"] == {
        f"{name}::test_mixed[t5]": "refused: no tables",
        f"{name}::test_mixed_otherwise[t5]": "refused: never",
    }
    assert mixed["rope"][f"{name}::test_mixed[rope]"] == "failed"
    assert mixed["shaw"][f"{name}::test_mixed[shaw]"] == "passed"
    assert results["features"]["broken"]["tests"]["shaw"] == {f"{name}::test_broken[shaw]": "failed"}
    assert results["schemes"]["shaw"] == ["A", "V"]


def test_one_feature_leaves_the_other_rows(pytester, monkeypatch):
    before, _ = run(pytester, monkeypatch)
    mended = TESTS.replace('assert scheme != "rope"', "pass").replace('"never"', '"other"')
    after, done = run(pytester, monkeypatch, "--feature", "good", tests=mended)
    done.assert_outcomes(passed=3, deselected=9)
    assert after["features"]["mixed"] == before["features"]["mixed"]
    after, _ = run(pytester, monkeypatch, "--feature", "mixed", tests=mended)
    assert "failed" not in after["features"]["mixed"]["tests"]["rope"].values()
    assert after["features"]["broken"] == before["features"]["broken"]


def test_features_without_tests_leave_the_results(pytester, monkeypatch):
    run(pytester, monkeypatch)
    after, _ = run(pytester, monkeypatch, tests=TESTS.replace('feature("broken")', 'feature("new")'))
    assert list(after["features"]) == ["good", "mixed", "new"]


def test_unknown_features_are_refused(pytester, monkeypatch):
    _, done = run(pytester, monkeypatch, "--feature", "god")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*no test is marked*god*broken*good*mixed*"])


def test_tests_without_schemes_are_refused(pytester, monkeypatch):
    _, done = run(pytester, monkeypatch, tests='import pytest\n@pytest.mark.feature("x")\ndef test_x():\n    pass\n')
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*test_x*parametrized with `scheme`*"])


def test_card_says_what_works_and_why_not(pytester, monkeypatch):
    results, _ = run(pytester, monkeypatch)
    lines = MATRIX.card(results).splitlines()
    header = next(line for line in lines if line.startswith("| feature"))
    columns = [column.strip(" `") for column in header.split("|")]
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")] for line in lines if "|" in line}
    cells = {name: {column: row[columns.index(column)] for column in columns[2:-2]} for name, row in rows.items()}
    assert cells["good"]["shaw"] == "✓" and cells["good"]["alibi"] == ""
    assert cells["good"]["rope"] == "✓[^1]"
    assert cells["mixed"]["shaw"] == "✓[^2]" and cells["mixed"]["t5"] == "refused[^2][^3]"
    assert cells["mixed"]["rope"] == "✗"
    assert lines[-2:] == ["[^2]: never", "[^3]: no tables"]
