"""`optimize(model, join=True)`: calls of several threads are computed together; each gets what it would get alone."""

import copy
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from encoders import build, difference, pad_of, tensors_of, tokens

from hf_relpos import optimize
from hf_relpos.live import joined
from hf_relpos.live.call import EncoderCall
from hf_relpos.live.contract import Contract
from hf_relpos.live.encoder import SETUP
from hf_relpos.live.joined import JOINED, Joined, Place


def calls_of(model) -> list[dict]:
    """Of a row of its own length each, but for the last, which has two rows and padding."""
    lengths = [torch.ones(1, length, dtype=torch.bool) for length in (3, 40, 9, 22)]
    return [tokens(real, pad_of(model)) for real in (*lengths, torch.arange(9) < torch.tensor([9, 4])[:, None])]


def states_of(model, inputs, **others) -> list[torch.Tensor]:
    with torch.no_grad():
        return [each for _, each in tensors_of(model(**inputs, **others))]


def assert_same(found, expected, inputs):
    real = inputs["attention_mask"] == 1
    for ours, theirs in zip(found, expected, strict=True):
        pair = (ours[real], theirs[real]) if theirs.dim() == 3 else (ours, theirs)
        assert ours.is_contiguous() and difference(*pair) < 1e-9


@contextmanager
def busy(model):
    """A call of another thread that lasts as long as the context."""
    queue, place = vars(model)[JOINED], Place(None)
    queue.cores = 1
    queue.computing.add(place)
    try:
        yield queue
    finally:
        queue._leave(place)


def together(model, calls) -> list:
    """The results of calls, or their exceptions, of threads that wait until all have begun."""
    with ThreadPoolExecutor(len(calls)) as pool:
        with busy(model) as queue:
            futures = [pool.submit(each) for each in calls]
            deadline = time.monotonic() + 60
            while sum(each.kind is not each for each in list(queue.waiting)) < len(calls):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        results = [each.exception(60) or each.result() for each in futures]
    assert not queue.waiting and not queue.computing
    return results


@pytest.fixture
def bert():
    """A model, its calls with the outputs of Transformers, the calls as functions, and the report of `optimize`."""
    model = build("BERT")
    calls = calls_of(model)
    expected = [states_of(model, each) for each in calls]
    return model, calls, expected, [partial(states_of, model, each) for each in calls], optimize(model, join=True)


@pytest.mark.parametrize("name", ["BERT", "DeBERTa v2", "ALBERT", "RoBERTa"])
@pytest.mark.parametrize("others", [{}, {"return_dict": False}, {"output_hidden_states": True}], ids=str)
def test_joined_calls_get_what_they_get_alone(name, others):
    """At each level; the first batch is computed both ways."""
    model = build(name)
    calls = calls_of(model)
    expected = [states_of(model, each, **others) for each in calls]
    handle, work = optimize(model, join=True), [partial(states_of, model, each, **others) for each in calls]
    for _ in range(2):
        for found in zip(together(model, work), expected, calls, strict=True):
            assert_same(*found)
    counts = handle.counts()
    assert counts.joined == {5: 10} and "10 calls joined to 2" in str(counts)
    assert sum(counts.calls.values()) == 10 and counts.given == 2 * (3 + 40 + 9 + 22 + 18)
    _, (answer,) = together(model, [work[0], lambda: handle.explain(**calls[1], **others)])
    assert answer.joined == 2 and "in 2 calls of as many threads" in str(answer)


def test_joined_calls_are_bounded(bert, monkeypatch):
    model, calls, expected, work, handle = bert
    monkeypatch.setattr(joined, "MOST", 80)
    for found in zip(together(model, work), expected, calls, strict=True):
        assert_same(*found)
    assert max(handle.counts().joined) in (2, 3, 4)  # 40 with one of 3, 9 or 22; of 3, 9, 9 and 9, or of 22, up to 3


@pytest.mark.parametrize("error", [IndexError, KeyboardInterrupt])
def test_an_error_is_that_of_its_caller(bert, error, monkeypatch):
    """Of a token that does not exist; and one by which the thread ends that computes for all."""
    model, calls, expected, work, _ = bert
    together(model, work)
    if error is IndexError:
        wrong = {**calls[1], "input_ids": calls[1]["input_ids"] + 1000}
        work[1] = partial(states_of, model, wrong)
    else:
        run = Contract.run

        def ends(*args):
            monkeypatch.setattr(Contract, "run", run)
            raise KeyboardInterrupt

        monkeypatch.setattr(Contract, "run", ends)
    results = together(model, work)
    assert [type(each) for each in results if isinstance(each, BaseException)] == [error]
    for found in zip(results, expected, calls, strict=True):
        if not isinstance(found[0], BaseException):
            assert_same(*found)


# Calls that are not joined, by their reason.
ALONE = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), {}),
    "another mode": (lambda: torch.device("cpu"), {}),
    "gradients": (torch.enable_grad, {}),
    "'encoder_hidden_states'": (torch.no_grad, {"encoder_hidden_states": torch.zeros(1, 3, 16).double()}),
    "attention weights": (torch.no_grad, {"output_attentions": True}),
}


@pytest.mark.parametrize("words", ALONE)
def test_other_calls_do_not_wait(bert, words):
    model, (inputs, *_), *_, handle = bert
    context, others = ALONE[words]

    def call():
        with torch.no_grad(), context():
            return model(**inputs, **others)

    with busy(model) as queue, ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(60)
        assert not queue.waiting and not handle.counts().joined
    assert any("not joined" in each.text and words in each.text for each in handle.explain(call)[0].reasons)


def test_tensors_of_inference_mode_stay_apart(bert):
    model, calls, _, work, handle = bert
    work = [torch.inference_mode()(partial(model, **each)) for each in calls[:3]] + work[:3]
    found = [each[0].is_inference() for each in together(model, work)]
    assert found == [True] * 3 + [False] * 3 and handle.counts().joined == {3: 6}


def test_a_lost_thread_is_not_waited_for(bert, monkeypatch):
    model, calls, expected, work, _ = bert
    monkeypatch.setattr(joined, "PATIENCE", 0.1)
    with busy(model) as queue:
        assert_same(work[0](), expected[0], calls[0])
        assert not queue.waiting and not queue.computing


def test_nested_calls_do_not_wait(bert):
    model, calls, expected, work, _ = bert
    with busy(model) as queue:
        queue.cores = 2
        call = EncoderCall(model, model.forward, vars(model)[SETUP], calls[0])
        assert_same(queue.outputs(call, lambda *_: work[0](), work[0]), expected[0], calls[0])
        assert len(queue.computing) == 1


def test_undo_copies_and_pickles_under_load(bert):
    model, calls, expected, work, handle = bert
    end = threading.Event()

    def repeat(number):
        while not end.is_set():
            assert_same(work[number](), expected[number], calls[number])

    with ThreadPoolExecutor(5) as pool:
        try:
            futures = [pool.submit(repeat, number) for number in range(5)]
            for _ in range(3):
                vars(model)[JOINED].cores = 1
                for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                    assert type(vars(other)[JOINED]) is Joined and vars(other)[JOINED] is not vars(model)[JOINED]
                    assert_same(states_of(other, calls[0]), expected[0], calls[0])
                handle.undo()
                assert JOINED not in vars(model)
                handle = optimize(model, join=True)
        finally:
            end.set()
        assert not any(each.exception(60) for each in futures)


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="sends a signal to a thread")
def test_a_thread_that_waits_is_interrupted(bert):
    model, _, _, work, _ = bert
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it
    try:
        with busy(model) as queue:
            threading.Timer(1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                work[0]()
            assert not queue.waiting
    finally:
        signal.signal(signal.SIGINT, before)
