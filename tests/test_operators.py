"""How many operators each layer runs: short calls wait for their launches on a GPU, and for values asked of it.

Limits are what was counted with PyTorch 2.13 on the CPU, views left out; one that is passed says what to look for.
"""

import pytest
import torch
from computed import Computed
from oracles import extra_inputs, tiny_model
from selection import with_full

from hf_relpos import RelPosBertModel
from hf_relpos.schemes import SCHEMES, projection_cache


# In a forward without gradients, and in one with its backward; BertModel has 12 and 38.
# fmt: off
MOST = {
    "absolute": (12, 38), "alibi": (12, 39), "cable": (21, 84), "sinusoidal": (12, 38), "cape": (12, 38),
    "deberta": (21, 88), "disan": (14, 45), "dual_triangle": (14, 45), "fire": (32, 111), "harmonic": (28, 81),
    "hop": (49, 111), "huang_m1": (25, 67), "huang_m2": (25, 67), "huang_m3": (54, 180), "kerple": (12, 62),
    "log_cpb": (32, 88), "music": (16, 71), "nezha": (25, 67), "relation": (29, 83), "relative_2d": (39, 98),
    "relative_key": (17, 69), "relative_key_query": (22, 86), "rope": (18, 54), "sandwich": (12, 39),
    "shaw": (27, 71), "sinusoidal_2d": (12, 38), "t5": (12, 63), "tables": (34, 93), "tener": (47, 106),
    "transformer_xl": (33, 92), "tupe": (12, 59), "xlnet": (43, 118), "grape_m": (44, 121), "pope": (39, 91),
}
# fmt: on


def computed(name, implementation, layers, training):
    """What the second of two calls computes."""
    fields = {"num_hidden_layers": layers, "max_position_embeddings": 64}
    model = tiny_model(RelPosBertModel, name, implementation, **fields).train(training)
    inputs = {"input_ids": torch.randint(1, 50, (2, 40)), **extra_inputs(name, 2, 40)}
    with torch.set_grad_enabled(training):
        model(**inputs)
        with Computed() as found:
            states = model(**inputs)[0]
            if training:
                states.sum().backward()
    return found


WAYS = [("sdpa", False), ("sdpa", True), ("relpos", False)]


@pytest.mark.parametrize("implementation, training", with_full(WAYS, [("relpos", True)]))
@pytest.mark.parametrize("name", SCHEMES)
def test_operators_of_a_layer(name, implementation, training, monkeypatch):
    if implementation == "sdpa" and name.startswith("huang"):
        implementation = "eager"  # it multiplies scores
    monkeypatch.setattr(projection_cache, "_may_keep", lambda *_: False)  # as on a GPU
    few, many = (computed(name, implementation, layers, training) for layers in (1, 3))
    more = many.operators - few.operators
    assert more.total() <= 2 * MOST[name][training], more
    assert many.asked == ([] if name != "relation" else ["_local_scalar_dense"] * 2)  # labels are checked once
