"""CAPE (Likhomanenko et al. 2021, §3): sinusoids of p' = λ (p + Δ + ε) in training, of p in evaluation."""

import math

import numpy as np
import pytest
import torch
from errors import raises
from oracles import STILL, array, golden, padding, tiny_config, tiny_model

from hf_relpos import RelPosBertModel


def module_of(training=False, width=24, **options):
    """`embeddings.position_embeddings`."""
    config = tiny_config("cape", position_options=options, hidden_size=width)
    return RelPosBertModel(config).embeddings.position_embeddings.train(training)


def vectors(module, batch, length, mask=None, dtype=torch.float64, width=24):
    return module(torch.arange(length)[None], torch.zeros(batch, length, width, dtype=dtype), mask)


def paper(position, frequency=1.0):
    angles = [frequency * position / 10000 ** (2 * n / 24) for n in range(12)]
    return np.array([wave(angle) for angle in angles for wave in (math.sin, math.cos)])


def positions_of(rows):
    """The positions, (B, L), of vectors (B, L, 24), from the wave of longest period, which they do not go round."""
    return np.arctan2(array(rows)[..., -2], array(rows)[..., -1]) * 10000 ** (22 / 24)


@pytest.mark.parametrize("frequency", [1.0, 0.3])
def test_evaluation_is_the_paper_s_sinusoid(frequency):
    got = array(vectors(module_of(freq_scale=frequency, amplitude=0.5), 3, 40))
    assert np.abs(got - 0.5 * np.stack([paper(p, frequency) for p in range(40)])).max() <= 1e-10


def test_training_draws_within_the_ranges():
    """Δ and λ one for a row, ε one for a token; with the other two off, each is seen alone."""
    places = np.arange(40)

    def drawn(**ranges):
        return positions_of(vectors(module_of(training=True, **{**STILL["cape"], **ranges}), 64, 40))

    shift = drawn(max_global_shift=5) - places
    assert np.ptp(shift, axis=1).max() <= 1e-6 and np.abs(shift).max() <= 5
    assert shift.min() < -3.5 and shift.max() > 3.5
    jitter = drawn(max_local_shift=0.5) - places
    assert np.abs(jitter).max() <= 0.5 and jitter.std() > 0.25 and abs(jitter.mean()) < 0.03
    stretch = np.log(drawn(max_global_scaling=1.5)[:, 1:] / places[1:])
    assert np.ptp(stretch, axis=1).max() <= 1e-6 and np.abs(stretch).max() <= math.log(1.5)
    assert stretch.min() < -0.25 and stretch.max() > 0.25  # as often shorter as longer
    everything = drawn(max_global_shift=5, max_local_shift=0.5, max_global_scaling=1.03)
    assert np.abs(everything - places).max() <= 1.03 * 44.5 - 39 and (np.ptp(everything, axis=0) > 3).all()


def test_random_in_training_only():
    module = module_of(training=True)
    assert (vectors(module, 2, 9) - vectors(module, 2, 9)).abs().max() > 1e-2
    off = module_of(training=True, **STILL["cape"])
    module.eval()
    assert torch.equal(vectors(module, 2, 9), vectors(module, 2, 9))
    assert torch.equal(vectors(module, 2, 9).expand(2, -1, -1), vectors(off, 2, 9))


def test_every_row_of_the_batch_is_drawn_apart():
    """Also where the position ids, being the same for all rows, are given once."""
    model = tiny_model(RelPosBertModel, "cape").train()
    rows = model.embeddings(torch.randint(1, 50, (1, 9)).expand(4, -1))
    assert min((rows[a] - rows[b]).abs().max() for a in range(4) for b in range(a)) > 1e-3


CASES = list(golden("cape")[0]["cases"])


@torch.no_grad()
def parity(case: str) -> float:
    """Largest difference from the original, given the numbers that it drew."""
    sizes, tensors = golden("cape")
    settings, draws = sizes["cases"][case], []

    def replayed(tensor, low, high):
        index = len(draws)
        draws.append((low, high))
        return tensor.copy_(tensors[f"{case}.draw.{index}"])

    module = module_of(settings["training"], sizes["hidden_size"], **settings["options"])
    real = padding(sizes["real"], 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "uniform_", replayed)
        got = vectors(module, 2, 12, real.long(), torch.float32, sizes["hidden_size"])
    assert np.allclose(draws, [(-high, high) for high in settings["ranges"]])
    expected = tensors[case]
    if settings["options"].get("normalize"):  # the original leaves padding without a position
        got, expected = got * real[..., None], expected * real[..., None]
    return (got - expected).abs().max().item()


def test_centre_of_the_real_tokens():
    """The original's own mask takes in the first token of the padding."""
    module, real = module_of(normalize=True), padding([12, 7], 12)
    got = vectors(module, 2, 12, real.long())
    for row, length in enumerate([12, 7]):
        centre = (length - 1) / 2
        expected = np.stack([paper(p - centre) for p in range(length)])
        assert np.abs(array(got[row, :length]) - expected).max() <= 1e-10
    alone = vectors(module, 1, 7)
    assert (got[1:, :7] - alone).abs().max() <= 1e-12
    with raises(ValueError, "attention_mask", "(2, 1, 12, 12)"):
        vectors(module, 2, 12, torch.ones(2, 1, 12, 12))
