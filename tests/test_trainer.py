"""The stock Trainer: every task can be learned. What else users expect of it is in test_trainer_features.py."""

import pytest
from oracles import ON_TOKENS
from selection import with_full
from stock import older_than
from toy_training import HEADS, make_model, train

from hf_relpos.schemes import SCHEMES


def mean(values):
    return sum(values) / len(values)


# the tasks that ask for the order of words are not for those that do not see it, or are random in training
ORDERLESS = {"cape", *(name for name in ON_TOKENS if SCHEMES[name].is_symmetric_with(SCHEMES[name].defaults()))}
LEARNABLE = [(scheme, task) for scheme in ON_TOKENS for task in HEADS if task == "kind" or scheme not in ORDERLESS]
# by what is trained: a parameter of the scheme's own, a network, a module that layers share, a projection of theirs
BY_TASK = {"relative_key": "order", "fire": "kind", "t5": "echo", "transformer_xl": "next"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme, task", with_full(BY_TASK.items(), LEARNABLE))
def test_loss_goes_down(scheme, task, tmp_path):
    losses, _ = train(make_model(task, scheme), task, tmp_path, max_steps=60)
    assert len(losses) == 60
    assert mean(losses[-15:]) < 0.8 * mean(losses[:5])  # batches of 8: single steps jump


@pytest.mark.slow
@pytest.mark.skipif(older_than("5.14"), reason="the Trainer divides accumulated losses otherwise")
@pytest.mark.parametrize("task", with_full(["next", "kind"], HEADS))
def test_accumulated_gradients_give_the_curve_of_the_larger_batch(task, tmp_path):
    """The Trainer leaves the division to heads that take `num_items_in_batch`; the others must not claim to."""
    whole, _ = train(make_model(task, "shaw"), task, tmp_path, max_steps=5)
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5}
    accumulated, _ = train(make_model(task, "shaw"), task, tmp_path, **parts)
    assert accumulated == pytest.approx(whole, abs=1e-5)
