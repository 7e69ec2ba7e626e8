"""Fixture of DiSAN's masks, read off the attention weights of its directional attention.

Original: github.com/taoshen58/DiSAN, commit fdb5b977921dd17d8e58a1e1fb98ccb44742ea7e, disan.py
(directional_attention_with_dense). Environment: Python 3.11, tensorflow 2.16.2 as tensorflow.compat.v1, safetensors
0.8.0.

    python scripts/maintenance/golden/disan.py --repo PATH

disan.safetensors, B = 3, L = 7 (the rows have 7, 4 and 1 tokens), for the cases forward, backward and diag:
    <case>    (B, L, L), 1 where a query (second axis) gives a key any weight
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf
from safetensors.numpy import save_file


TARGET = Path(__file__).parents[3] / "tests" / "fixtures" / "schemes" / "disan.safetensors"
LENGTH, REAL, WIDTH = 7, [7, 4, 1], 5
CASES = {"forward": "forward", "backward": "backward", "diag": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    sys.modules["tensorflow"] = tf  # the original is of TensorFlow 1
    spec = importlib.util.spec_from_file_location("disan_original", parser.parse_args().repo / "disan.py")
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    np.random.seed(0)
    hidden = np.random.standard_normal((len(REAL), LENGTH, WIDTH)).astype(np.float32)
    real = np.arange(LENGTH)[None] < np.array(REAL)[:, None]
    tensors = {}
    for case, direction in CASES.items():
        with tf.Graph().as_default(), tf.Session() as session:
            kept = {}
            original.directional_attention_with_dense(
                tf.constant(hidden),
                tf.constant(real),
                direction,
                case,
                is_train=tf.constant(False),
                tensor_dict=kept,
                name="weights",
            )
            session.run(tf.global_variables_initializer())
            weights = session.run(kept["weights"])  # (B, L, L, features), the same keys for every feature
        seen = weights > 0
        assert (seen.any(-1) == seen.all(-1)).all()
        tensors[case] = seen.any(-1).astype(np.uint8)
    save_file(tensors, TARGET, {"config": json.dumps({"real": REAL})})


if __name__ == "__main__":
    main()
