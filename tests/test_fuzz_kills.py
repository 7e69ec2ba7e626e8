"""`kill -9`, Ctrl-C and a full disk at any file operation or moment of convert and export.

The target is then what it was before or whole, and doing it once more gives what an undisturbed run gives.
"""

import errno
import os
import shutil
import signal
import sys
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from fuzzing import attempt, examples
from hypothesis import given, strategies as st
from oracles import tiny_sizes
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, DebertaV2Config, DebertaV2Model

from hf_relpos import convert, export_checkpoint
from hf_relpos.demo import CHECKPOINT, read_text
from hf_relpos.products import cpu_gemm


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the processes that it kills")
WRITES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate", "os.chmod", "shutil.rmtree")
DATED = ("README.md", "conversion.json")  # say when, how long and where
KINDS = ("killed", "interrupted", "full disk", "killed at some moment", "interrupted at some moment")
DONE, INTERRUPTED, REFUSED, OTHER = 0, 3, 4, 5  # exit statuses


@dataclass(frozen=True)
class Disturbance:
    """What happens to a process.

    Attributes:
        kind: of KINDS.
        at: which of its file operations, from 1; or after how many seconds.
    """

    kind: str
    at: float


def converted_by_distillation(root, sources):
    options = {"steps": 6, "batch_tokens": 128}
    text = read_text("train")[:400]
    convert(sources / "bert", root / "out", method="distil", method_options=options, texts=text, overwrite=True)


OPERATIONS = {
    "convert": lambda root, sources: convert(sources / "deberta", root / "out", overwrite=True),
    "export": lambda root, sources: export_checkpoint(sources / "converted", root / "out", overwrite=True),
    "convert, method distil": converted_by_distillation,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    BertForMaskedLM(BertConfig(**tiny_sizes(vocab_size=5000))).save_pretrained(folder / "bert")
    AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(folder / "bert")
    relative = {"relative_attention": True, "pos_att_type": ["c2p"]}
    DebertaV2Model(DebertaV2Config(**tiny_sizes(), **relative)).save_pretrained(folder / "deberta")
    convert(folder / "deberta", folder / "converted")
    return folder


def contents(path):
    """The bytes of a file, or of the files of a folder; None for nothing."""
    if path.is_file():
        return path.read_bytes()
    if not path.exists():
        return None
    files = (each for each in sorted(path.rglob("*")) if each.is_file())
    return {str(each.relative_to(path)): b"" if each.name in DATED else each.read_bytes() for each in files}


def disturb(disturbance, root, count):
    """Let it happen in this process; `count` gets the number of file operations below `root` so far."""

    def happens(path):
        if disturbance.kind.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if disturbance.kind.startswith("interrupted"):
            raise KeyboardInterrupt
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def hook(event, arguments):
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            path, writes = arguments[0] if arguments else None, event in WRITES
        if not writes or not isinstance(path, str | bytes | os.PathLike):
            return
        path = os.fsdecode(path)
        if path.startswith(str(root)):
            count[0] += 1
            if disturbance is not None and "moment" not in disturbance.kind and count[0] == disturbance.at:
                happens(path)

    sys.addaudithook(hook)
    if disturbance is not None and "moment" in disturbance.kind:
        signal.signal(signal.SIGALRM, lambda number, frame: happens(""))
        signal.setitimer(signal.ITIMER_REAL, disturbance.at)


def in_child(work, root, disturbance=None):
    """Do work in a process of its own; gives its status, negative for a signal, and its number of file operations."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status, count = OTHER, [0]
        try:
            os.dup2(os.open(root.parent / "errors.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            sys.stdout = sys.stderr = open(2, "w", closefd=False)
            warnings.simplefilter("ignore")
            os.environ["HF_RELPOS_ONEDNN"] = "off"  # a measurement would choose, and the sums differ
            cpu_gemm.linear_library.cache_clear()
            cpu_gemm.bmm_library.cache_clear()
            disturb(disturbance, root, count)
            work()
            status = DONE
        except KeyboardInterrupt:
            status = INTERRUPTED
        except (ValueError, OSError) as error:  # ConversionError is one
            status = REFUSED if "No space left" in str(error) else OTHER
            traceback.print_exc()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stderr.flush()
                os.write(writer, str(count[0]).encode())
            os._exit(status)
    os.close(writer)
    written = os.read(reader, 20)
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status != OTHER, (root.parent / "errors.txt").read_text()
    return status, int(written or 0)


@pytest.fixture(scope="module")
def undisturbed(sources, tmp_path_factory):
    """For an operation, and what lay at its target before: its result, and its number of file operations."""
    made = {}

    def run(name, existing):
        if (name, existing) not in made:
            root = tmp_path_factory.mktemp("undisturbed")
            prepare(root, sources, existing)
            status, count = in_child(lambda: OPERATIONS[name](root, sources), root)
            assert status == DONE
            made[name, existing] = contents(root / "out"), count
        return made[name, existing]

    return run


def prepare(root, sources, existing):
    if existing:
        shutil.copytree(sources / existing, root / "out")


@pytest.mark.slow
@examples(few=4, share=0.15, shrink=False)
@given(data=st.data())
def test_folders(data, sources, undisturbed, tmp_path_factory):
    name = data.draw(st.sampled_from(sorted(OPERATIONS)))
    replaces = {"convert": "converted", "export": "deberta"}
    existing = data.draw(st.sampled_from([None, replaces[name]])) if name in replaces else None
    expected, count = undisturbed(name, existing)
    kind = data.draw(st.sampled_from(KINDS))
    seconds = st.floats(0.001, 0.1 if name in replaces else 1.5)
    at = data.draw(seconds if "moment" in kind else st.integers(1, count), label="at")
    root = tmp_path_factory.mktemp("disturbed")
    prepare(root, sources, existing)
    before = contents(root / "out")
    with attempt(f"{kind.removesuffix(' at some moment')}: {name}"):
        status, _ = in_child(lambda: OPERATIONS[name](root, sources), root, Disturbance(kind, at))
        found, beside = contents(root / "out"), [each for each in root.iterdir() if each.name.startswith(".out")]
        if found is None and before is not None:  # between two renamings
            assert status == -signal.SIGKILL and any(contents(each) == before for each in beside)
        else:
            assert found in (before, expected)
        if status != -signal.SIGKILL:  # what lay there before may be left, with a warning
            assert {each.suffix for each in beside} <= {".old"}
        status, _ = in_child(lambda: OPERATIONS[name](root, sources), root)
        assert status == DONE and contents(root / "out") == expected
    shutil.rmtree(root)
