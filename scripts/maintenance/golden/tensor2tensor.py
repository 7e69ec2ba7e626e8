"""Fixtures of Shaw's scheme and of Music Transformer, from tensor2tensor.

Original: github.com/tensorflow/tensor2tensor, commit bafdc1b67730430d38d6ab802cbd51f9d053ba2e,
tensor2tensor/layers/common_attention.py. Of its two files only the functions named below are run, because the rest
needs packages that are gone. Environment: Python 3.11, tensorflow 2.16.2 as tensorflow.compat.v1, safetensors 0.8.0.

    python scripts/maintenance/golden/tensor2tensor.py --repo PATH

Both fixtures, B = 2, H = 3, L = 9 (the second row ends after 6 tokens), d = 8; the original wants q times d^−1/2:
    query, key, value    (B, H, L, d)
    <case>.out           (B, H, L, d)
shaw.safetensors:
    <case>.relative_positions_keys, <case>.relative_positions_values        (2k + 1, d), row j − i + k; for the case
        `heads` (H, 2k + 1, d), one call of the original per head
music.safetensors, m rows for causal cases and 2m − 1 for the others, the head axis where the heads have tables each:
    <case>.key_relative_embeddings, <case>.value_relative_embeddings        (H, m or 2m − 1, d) or (m or 2m − 1, d)
"""

import argparse
import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from safetensors.numpy import save_file


FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures" / "schemes"
BATCH, HEADS, LENGTH, REAL, SIZE = 2, 3, 9, 6, 8
SIZES = {"batch": BATCH, "heads": HEADS, "length": LENGTH, "real": [LENGTH, REAL], "size": SIZE}
SHAW = {"near": {"clip": 3}, "far": {"clip": 16}, "heads": {"clip": 4}}
MUSIC = {
    f"{'causal' if causal else 'both'}-{max_distance}-{'shared' if shared else 'heads'}{'-values' * values}": {
        "causal": causal,
        "max_relative_position": max_distance,
        "per_head": not shared,
        "values": values,
    }
    for causal in (True, False)
    for max_distance, shared, values in ((4, False, True), (4, True, False), (16, False, False), (16, True, True))
}


def functions(path: Path, names: set[str], known: dict) -> SimpleNamespace:
    """These functions of a source file, run with `known` as their globals."""
    body = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if getattr(node, "name", None) in names]
    exec(compile(ast.Module(body, type_ignores=[]), str(path), "exec"), known)
    return SimpleNamespace(**{name: known[name] for name in names})


def attention_functions(repo: Path, names: set[str], **known: Any) -> SimpleNamespace:
    """These functions of common_attention.py, with `known` among their globals."""
    layers = repo / "tensor2tensor" / "layers"
    common = functions(layers / "common_layers.py", {"shape_list", "dropout_with_broadcast_dims"}, {"tf": tf})
    common.should_generate_summaries = lambda: False
    return functions(layers / "common_attention.py", names, {"tf": tf, "common_layers": common, **known})


def load(repo: Path) -> SimpleNamespace:
    """The attention functions."""
    names = {
        "_absolute_position_to_relative_position_masked",
        "_absolute_position_to_relative_position_unmasked",
        "_generate_relative_positions_embeddings",
        "_generate_relative_positions_matrix",
        "_relative_attention_inner",
        "_relative_position_to_absolute_position_masked",
        "_relative_position_to_absolute_position_unmasked",
        "dot_product_attention_relative",
        "dot_product_self_attention_relative_v2",
        "dot_product_unmasked_self_attention_relative_v2",
        "get_relative_embeddings_left",
        "get_relative_embeddings_left_right",
        "matmul_with_relative_keys",
        "matmul_with_relative_values",
    }
    return attention_functions(repo, names)


def run(function, query, key, value, bias, **arguments) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The output of one call, and its variables, which are noise, by the part of their names that tells them apart."""
    with tf.Graph().as_default(), tf.Session() as session:
        tensors = [tf.constant(array) for array in (query * SIZE**-0.5, key, value, bias)]
        out = function(*tensors, **arguments)
        variables = {}
        for variable in tf.global_variables():
            name = variable.op.name.removesuffix("/embeddings").rpartition("/")[2]
            variables[name] = noise(*variable.shape)
            variable.load(variables[name], session)
        return session.run(out), variables


def noise(*shape: int) -> np.ndarray:
    return np.random.standard_normal(shape).astype(np.float32)


def write(name: str, tensors: dict[str, np.ndarray], **config: Any) -> None:
    tensors = {key: np.ascontiguousarray(array) for key, array in tensors.items()}
    save_file(tensors, FIXTURES / f"{name}.safetensors", {"config": json.dumps(config)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repo", type=Path, required=True)
    original = load(parser.parse_args().repo)
    np.random.seed(0)
    query, key, value = (noise(BATCH, HEADS, LENGTH, SIZE) for _ in range(3))
    bias = np.zeros((BATCH, 1, LENGTH, LENGTH), np.float32)
    bias[1, ..., REAL:] = -1e9
    future = np.where(np.triu(np.ones((LENGTH, LENGTH)), 1), -1e9, 0).astype(np.float32)

    tensors = {"query": query, "key": key, "value": value}
    for case, settings in SHAW.items():
        rows = [slice(None)] if case != "heads" else [slice(h, h + 1) for h in range(HEADS)]
        calls = [
            run(
                original.dot_product_attention_relative,
                *(array[:, chosen] for array in (query, key, value)),
                bias,
                max_relative_position=settings["clip"],
            )
            for chosen in rows
        ]
        tensors[f"{case}.out"] = np.concatenate([out for out, _ in calls], axis=1)
        for name in calls[0][1]:
            tables = [variables[name] for _, variables in calls]
            tensors[f"{case}.{name}"] = np.stack(tables) if case == "heads" else tables[0]
    write("shaw", tensors, **SIZES, cases=SHAW)

    tensors = {"query": query, "key": key, "value": value}
    for case, settings in MUSIC.items():
        function = "self_attention_relative_v2" if settings["causal"] else "unmasked_self_attention_relative_v2"
        tensors[f"{case}.out"], variables = run(
            getattr(original, f"dot_product_{function}"),
            query,
            key,
            value,
            np.minimum(bias, future) if settings["causal"] else bias,
            max_relative_position=settings["max_relative_position"],
            heads_share_relative_embedding=not settings["per_head"],
            add_relative_to_values=settings["values"],
        )
        tensors |= {f"{case}.{name}": array for name, array in variables.items()}
    write("music", tensors, **SIZES, cases=MUSIC)


if __name__ == "__main__":
    main()
