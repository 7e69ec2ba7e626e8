"""What every test needs: no network, one thread, no progress bars, fixed seeds. And which tests run: `selection`."""

import os
from logging import WARNING, Handler
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# the first call of each kind would be Transformers' own: tests/test_verify.py
os.environ["HF_RELPOS_VERIFY"] = "load"

import fuzzing
import pytest
import selection
import torch
from transformers.utils import logging


try:
    from hub_fixtures import hub  # noqa: F401  a fixture
except ModuleNotFoundError as error:
    if error.name != "hub_fixtures":
        raise

torch.set_num_threads(1)
logging.disable_progress_bar()
fuzzing.register_profiles()  # --hypothesis-profile chooses another

LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="every case of every test (make test-all); see selection.py")
    parser.addoption("--fuzz-counts", metavar="JSON", help="write what the examples of test_fuzz_*.py ended in")
    parser.addoption("--interpreter", metavar="PYTHON", help="of another environment, for test_doc_blocks.py")


def pytest_configure(config):
    for line in (
        "covering(strength, every_scheme=True): without --full, a covering array of the cases (selection.py)",
        "full: runs with --full only",
        "heavy: takes long, so it is started early",
        *(f"{tier}: runs with -m {tier}, --full, or asked for by file (selection.py)" for tier in selection.TIERS),
    ):
        config.addinivalue_line("markers", line)
    named = any("::" in argument for argument in config.args)  # a test that is asked for by name runs
    selection.full = config.getoption("--full") or named


def named_files(config):
    """The files that the command line names."""
    paths = (Path(config.invocation_params.dir, argument.split("::")[0]) for argument in config.args)
    return {path.resolve() for path in paths if path.is_file()}


def only_fast(config):
    """Whether nothing asks for the other tiers: they run with `--full`, and where `-m` says so."""
    return not config.getoption("--full") and not config.option.markexpr


def pytest_ignore_collect(collection_path, config):
    """Spare the import of files whose tier does not run."""
    if collection_path.is_file() and only_fast(config) and selection.tier_of(collection_path):
        return collection_path.resolve() not in named_files(config) or None
    return None


def shares_fixture(item):
    """Whether an item uses a fixture of module scope, which one process should make, once."""
    return any(each[-1].scope == "module" for each in item._fixtureinfo.name2fixturedefs.values())


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Group what shares a fixture, mark tiers, choose cases, and begin with what takes longest."""
    for item in items:
        if shares_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        for tier in selection.tiers_of(item):
            item.add_marker(tier)
    yield  # -k, -m, and the names that pytest-xdist gives to groups
    wanted = items
    if only_fast(config):
        files = named_files(config)
        wanted = [
            item for item in items if item.path in files or not any(map(item.get_closest_marker, selection.TIERS))
        ]
    chosen = wanted if selection.full else selection.select(wanted)
    kept = set(chosen)
    left_out = [item for item in items if item not in kept]
    config.stash[LEFT_OUT] = len(wanted) - len(chosen)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(chosen, key=lambda item: item.get_closest_marker("heavy") is None)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, 0)
        session.config.workeroutput["fuzz_counts"] = [[*key, count] for key, count in fuzzing.COUNTS.items()]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    node.config.stash[LEFT_OUT] = output.get("left_out", 0)
    fuzzing.COUNTS.update({(area, outcome): count for area, outcome, count in output.get("fuzz_counts", [])})


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--fuzz-counts")
    if path:
        fuzzing.write_counts(path)
        terminalreporter.write_line(f"{sum(fuzzing.COUNTS.values())} examples; counts are in {path}")
    count = config.stash.get(LEFT_OUT, 0)
    if count:
        terminalreporter.write_line(f"{count} more cases run with --full (make test-all)")
    if only_fast(config) and not named_files(config):
        terminalreporter.write_line(f"The tiers {', '.join(selection.TIERS)} run with -m (make test-more)")


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts from the same random state, and with Transformers' warnings, which scripts turn off."""
    torch.manual_seed(0)
    logging.set_verbosity_warning()


@pytest.fixture
def warnings_heard():
    """Messages of Transformers from level warning up, in order; its logger passes them on to nobody (`caplog`)."""

    class Collect(Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    messages: list[str] = []
    handler = Collect(WARNING)
    logging.add_handler(handler)
    yield messages
    logging.get_logger().removeHandler(handler)  # `logging.remove_handler` raises before Transformers 5.14


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A stock BERT and one of ours, each in one file and in shards: stock, ours, stock-shards, ours-shards."""
    from oracles import tiny_sizes
    from transformers import BertConfig, BertForMaskedLM

    from hf_relpos import RelPosBertForMaskedLM, convert

    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    sizes = tiny_sizes(vocab_size=30, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    stock = BertForMaskedLM(BertConfig(**sizes | {"num_hidden_layers": 1, "max_position_embeddings": 12}))
    stock.save_pretrained(folder / "stock")
    convert(folder / "stock", folder / "ours", position_embedding_type="tables")
    for name, model in (("stock", stock), ("ours", RelPosBertForMaskedLM.from_pretrained(folder / "ours"))):
        model.save_pretrained(folder / f"{name}-shards", max_shard_size="4KB")
    return folder


@pytest.fixture
def none_too_short(monkeypatch):
    """The default backend takes its own way, in chunks, however small the model."""
    monkeypatch.setattr("hf_relpos.attention.backends.chunked.FEWEST_SCORES", 0)


@pytest.fixture
def any_padding(monkeypatch):
    """Padding is taken out of a batch however little there is."""
    monkeypatch.setattr("hf_relpos.live.call.FEWEST", 1)
    monkeypatch.setattr("hf_relpos.models.modeling_relpos_bert.FEWEST_PADDING", 1)
