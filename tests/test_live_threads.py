"""Optimized models, and the patch, beside other threads and in forked processes."""

import copy
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from encoders import build, pad_of, tensors_of, tokens
from launching import run_code
from oracles import tiny_sizes
from parallel_live import gradients_of
from test_patch import attributes, same_objects
from transformers import BertConfig, BertModel

from hf_relpos import RelPosBertModel, optimize
from hf_relpos.live.verify import Verified
from hf_relpos.models import patch


REAL = torch.arange(40) < torch.tensor([40, 9, 22, 3])[:, None]
NAMES = ("BERT", "DeBERTa v2", "ALBERT")  # one of each level


@pytest.mark.parametrize("name", NAMES)
def test_undo_waits_for_calls_in_flight(name, monkeypatch):
    """A call that runs ends as it began, and one that begins meanwhile is Transformers' own."""
    model, started, go_on, call = build(name), threading.Event(), threading.Event(), Verified.outputs
    inputs, kind = tokens(REAL, pad_of(model)), type(model)

    def waits(*args):
        started.set()
        assert go_on.wait(60)
        return call(*args)

    def states():
        with torch.no_grad():
            return model(**inputs)[0]

    expected, handle = states(), optimize(model)
    monkeypatch.setattr(Verified, "outputs", waits)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(states)
        try:
            assert started.wait(60)
            undone = pool.submit(handle.undo)
            assert not wait([undone], timeout=0.2).done and type(model) is not kind
            late = pool.submit(states)
            assert not wait([late], timeout=0.2).done
        finally:
            go_on.set()
        unpadded = running.result(60)
        undone.result(60)
        assert type(model) is kind and torch.equal(late.result(60), expected)
    assert not unpadded[~REAL].any() and torch.allclose(unpadded[REAL], expected[REAL], rtol=0, atol=1e-9)


def test_undo_waits_for_calls_of_its_own_model_alone():
    model, other = build("BERT"), build("BERT")
    handle, others = optimize(model), optimize(other)
    with others._record.inside(), ThreadPoolExecutor(1) as pool:  # a call of the other one that does not end
        pool.submit(handle.undo).result(60)
    assert type(model) is type(build("BERT")) is not type(other)


@pytest.mark.parametrize("name", NAMES)
def test_training_beside_threads_that_infer(name):
    """One thread computes gradients while others infer with the same model, one of them its hidden states."""
    model = build(name).train()
    optimize(model)
    batches = [tokens(REAL.roll(row, 0), pad_of(model), row) | {"output_hidden_states": row == 0} for row in range(3)]
    inputs, barrier = tokens(REAL, pad_of(model)), threading.Barrier(4)

    def states_of(inputs):
        with torch.inference_mode():
            return [each for _, each in tensors_of(model(**inputs))]

    expected = [states_of(each) for each in batches]
    alone = gradients_of(model, inputs)

    def infer(number):
        barrier.wait(60)
        for _ in range(8):
            found = states_of(batches[number])
            assert len(found) == len(expected[number]) and all(map(torch.equal, found, expected[number]))

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(infer, number) for number in range(3)]
        barrier.wait(60)
        for _ in range(4):
            assert all(map(torch.equal, gradients_of(model, inputs), alone))
        for each in others:
            each.result(60)


FORK = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from encoders import build, pad_of, tokens
from hf_relpos import optimize

real = torch.arange(40) < torch.tensor([40, 9, 22, 3])[:, None]
model = build(sys.argv[2])
inputs, stock = tokens(real, pad_of(model)), type(model)
handle, inside, end = optimize(model, join=True), threading.Event(), threading.Event()

def call():
    with handle._record.inside():
        inside.set()
        end.wait()

with torch.no_grad():
    expected = model(**inputs)[0]
    other = threading.Thread(target=call)
    other.start()
    inside.wait()
    vars(model)["_hf_relpos_joined"].computing |= {*range(os.cpu_count())}  # threads that compute
    child = os.fork()
    if not child:
        signal.alarm(50)  # less than it would wait for them
        same = torch.equal(model(**inputs)[0], expected)
        handle.undo()  # does not wait for a thread that is not here
        os._exit(not (same and type(model) is stock))
    end.set()
    other.join()
    vars(model)["_hf_relpos_joined"].computing.clear()
    assert os.waitpid(child, 0)[1] == 0 and torch.equal(model(**inputs)[0], expected)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_forked_processes_compute_the_same():
    """As docs/serve.md says; what a thread of the parent holds is free in the child."""
    run_code(FORK, Path(__file__).parent, "DeBERTa v2", env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_patch_transformers_in_several_threads(monkeypatch):
    """Those that come while the first installs the patch wait for it, and the last one undoes it."""
    before, barrier, install = attributes(), threading.Barrier(4), patch._install
    monkeypatch.setattr(patch, "_install", lambda: (time.sleep(0.05), install()))
    config = BertConfig(**tiny_sizes(num_hidden_layers=1), position_embedding_type="relative_key")

    def work(_):
        barrier.wait(60)
        with patch.patch_transformers():
            assert type(BertModel(copy.deepcopy(config))) is RelPosBertModel
            installed = len(patch._replaced)
            barrier.wait(60)
        return installed

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(work, range(4)))
    assert len(set(counts)) == 1 and same_objects(attributes(), before)
