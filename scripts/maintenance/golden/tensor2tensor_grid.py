"""Fixtures of sinusoids at the input and of positions on a grid, from tensor2tensor.

Original: github.com/tensorflow/tensor2tensor, commit bafdc1b67730430d38d6ab802cbd51f9d053ba2e,
tensor2tensor/layers/common_attention.py. Environment: that of tensor2tensor.py beside this file.

    python scripts/maintenance/golden/tensor2tensor_grid.py --repo PATH

sinusoidal_t2t.safetensors, D = 24:
    positions, t2t       (P,) and (P, D)
sinusoidal_2d.safetensors, for the grids and widths of its cases:
    <case>               (height, width, D); not a number where D < 8
relative_2d.safetensors, B = 2, H = 3, d = 8, for the grids of its cases; the original wants q times d^−1/2, and the
last tokens of the second row are hidden:
    <case>.query, <case>.key, <case>.value, <case>.out      (B, H, height, width, d)
    <case>.height_key_relative_embeddings, <case>.width_key_relative_embeddings     (2m − 1, d) or (H, 2m − 1, d)
"""

import argparse
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tensorflow.compat.v1 as tf
from tensor2tensor import BATCH, HEADS, SIZE, attention_functions, noise, run, write


START, LENGTH, WIDTH = 3, 40, 24
SINUSOIDS = {
    "square": {"height": 4, "width": 4, "hidden_size": 16},
    "oblong": {"height": 3, "width": 5, "hidden_size": 24},
    "tail": {"height": 3, "width": 5, "hidden_size": 10},
    "narrow": {"height": 3, "width": 5, "hidden_size": 6},
}
HIDDEN = 4
TABLES = {
    f"{height}x{width}-{max_distance}-{'heads' if per_head else 'shared'}": {
        "height": height,
        "width": width,
        "max_relative_position": max_distance,
        "per_head": per_head,
    }
    for height, width in ((4, 4), (3, 5))
    for max_distance, per_head in ((2, True), (8, False))
}


def load(repo: Path) -> SimpleNamespace:
    """The functions of common_attention.py that the fixtures come from."""
    names = {
        "_matmul_with_relative_keys_2d",
        "_relative_position_to_absolute_position_unmasked",
        "add_timing_signal_nd",
        "dot_product_unmasked_self_attention_relative_2d",
        "get_relative_embeddings_left_right",
        "get_timing_signal_1d",
    }
    utilities = SimpleNamespace(add_name_scope=lambda: lambda function: function)
    return attention_functions(repo, names, math=math, expert_utils=utilities)


def evaluate(function, *arguments, **settings) -> np.ndarray:
    with tf.Graph().as_default(), tf.Session() as session:
        return session.run(function(*[tf.constant(array) for array in arguments], **settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    original = load(parser.parse_args().repo)
    np.random.seed(0)

    signal = evaluate(original.get_timing_signal_1d, length=LENGTH, channels=WIDTH, start_index=START)[0]
    write("sinusoidal_t2t", {"positions": START + np.arange(LENGTH), "t2t": signal}, hidden_size=WIDTH)

    signals = {}
    for case, sizes in SINUSOIDS.items():
        image = np.zeros((1, sizes["height"], sizes["width"], sizes["hidden_size"]), np.float32)
        signals[case] = evaluate(original.add_timing_signal_nd, image)[0]
    write("sinusoidal_2d", signals, cases=SINUSOIDS)

    tensors = {}
    for case, settings in TABLES.items():
        height, width = settings["height"], settings["width"]
        inputs = {name: noise(BATCH, HEADS, height, width, SIZE) for name in ("query", "key", "value")}
        bias = np.zeros((BATCH, 1, 1, height * width), np.float32)
        bias[1, ..., -HIDDEN:] = -1e9
        (out, *_), variables = run(
            original.dot_product_unmasked_self_attention_relative_2d,
            *inputs.values(),
            bias,
            max_relative_position=settings["max_relative_position"],
            heads_share_relative_embedding=not settings["per_head"],
        )
        tensors |= {f"{case}.{name}": array for name, array in {**inputs, **variables, "out": out}.items()}
    write("relative_2d", tensors, batch=BATCH, heads=HEADS, size=SIZE, hidden=HIDDEN, cases=TABLES)


if __name__ == "__main__":
    main()
