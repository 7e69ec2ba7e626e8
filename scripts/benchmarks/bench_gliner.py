"""GLiNER and GLiNER2 on one CPU core, stock and with `hf_relpos.optimize`, beside what both packages offer themselves.

    pip install --no-deps gliner==0.2.29 gliner2==2.1.0 disentangled-flash && pip install sentencepiece pydantic
    python scripts/benchmarks/bench_gliner.py        # ten minutes, and memory for a model three times

GLiNER 0.2.29 asks for transformers < 5.17, and so is not among the packages of this repository's tests; without its
dependencies it runs. Both models have the sizes of deberta-v3-base and random weights; nothing is downloaded. The
entities of all variants are compared before any time is taken. Written to docs/results/benchmarks/gliner.json and .md.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from shared.arguments import benchmark_parser
from shared.measuring import environment, time_in_turns
from shared.process import start_quietly
from shared.reports import Table, describe, markdown_sections, print_tables, write_report

from hf_relpos import optimize


WORDS = [f"w{number}" for number in range(400)]
LABELS = ["person", "place", "date", "product"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ENCODER = {"model_type": "deberta-v2", "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
ENCODER |= {"position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
ENCODER |= {"position_biased_input": False, "vocab_size": len(SPECIAL) + len(WORDS) + len(LABELS)}
ENCODER |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-7}
SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
STOCK, OURS, FLASH = "stock", "optimize", "enable_disentangled_flash"
TOLERANCE = 1e-3  # of a score, from 0 to 1
PROTOCOL = "CPU seconds of the process (time.process_time), all of `inference`; variants take turns in one process"
INTRODUCTION = """# GLiNER and GLiNER2 on a CPU

Entities of four labels in {rows} texts of {shortest} to {longest} words; random weights, sizes of
deberta-v3-base, one thread. Random scores are all near .5, so rounding may
decide between overlapping candidates. The ONNX Runtime and OpenVINO models are GLiNER's own exports.

Limits: one machine, one batch, random weights. Differences below a tenth are noise.
"""


def tokenizer_in(folder: Path) -> transformers.PreTrainedTokenizerBase:
    (folder / "vocab.txt").write_text("\n".join([*SPECIAL, *WORDS, *LABELS]), encoding="utf-8")
    tokenizer = transformers.BertTokenizer(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    return tokenizer


def random_gliner(folder: Path, encoder: dict) -> Any:
    from gliner import GLiNER, GLiNERConfig

    tokenizer_in(folder)
    transformers.DebertaV2Config(**encoder).save_pretrained(folder)
    settings = {"hidden_size": 512, "max_width": 8, "max_len": 384, "dropout": 0.0}
    config = GLiNERConfig(model_name=str(folder), encoder_config=encoder, **settings)
    return GLiNER.from_config(config, backbone_from_pretrained=False).eval()


def random_gliner2(folder: Path, encoder: dict) -> Any:
    from gliner2.configuration import ExtractorConfig
    from gliner2.inference.engine import SpanExtractor

    tokenizer = tokenizer_in(folder)
    sizes = transformers.DebertaV2Config(**encoder)
    sizes.save_pretrained(folder)
    config = ExtractorConfig(model_name=str(folder))
    return SpanExtractor(config, encoder_config=sizes, tokenizer=tokenizer).eval()


def found_by_gliner(model: Any, texts: list[str]) -> dict[tuple, float]:
    """The score of each entity."""
    rows = model.inference(texts, LABELS, threshold=0.0, flat_ner=False, batch_size=len(texts))
    return {(i, e["start"], e["end"], e["label"]): e["score"] for i, row in enumerate(rows) for e in row}


def found_by_gliner2(model: Any, texts: list[str]) -> dict[tuple, float]:
    """The confidence of each entity."""
    shown = {"include_confidence": True, "include_spans": True, "threshold": 0.0}
    rows = model.batch_extract_entities(texts, LABELS, batch_size=len(texts), **shown)
    return {
        (i, e["start"], e["end"], label): e["confidence"]
        for i, row in enumerate(rows)
        for label, entities in row["entities"].items()
        for e in entities
    }


def agreement(ours: dict[tuple, float], theirs: dict[tuple, float]) -> tuple[float, float]:
    """The share of their entities that are ours, too, and the largest difference of these scores.

    Raises:
        SystemExit: when they differ by more than rounding.
    """
    shared = ours.keys() & theirs.keys()
    worst = max((abs(ours[key] - theirs[key]) for key in shared), default=1.0)
    if not worst <= TOLERANCE:
        raise SystemExit(f"the scores differ by {worst}; no times are shown")
    return len(shared) / len(theirs), worst


def gliner_variants(folder: Path, encoder: dict) -> dict[str, Any]:
    import onnxruntime
    from gliner import GLiNER

    models = {}
    for name in (STOCK, OURS):
        torch.manual_seed(0)
        models[name] = random_gliner(folder, encoder)
    optimize(models[OURS])
    models[STOCK].export_to_onnx(folder / "onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    load = GLiNER.from_pretrained
    models["ONNX Runtime"] = load(str(folder / "onnx"), runtime="onnxruntime", session_options=options)
    models[STOCK].export_to_openvino(folder / "openvino")
    threads = {"config": {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}}
    models["OpenVINO"] = load(
        str(folder / "openvino"), runtime="openvino", runtime_model_file="model.xml", runtime_options=threads
    )
    return models


def gliner2_variants(folder: Path, encoder: dict) -> dict[str, Any]:
    models = {}
    for name in (STOCK, OURS, FLASH):
        torch.manual_seed(0)
        models[name] = random_gliner2(folder, encoder)
    optimize(models[OURS])
    models[FLASH].enable_disentangled_flash(packed=True)
    return models


def measure(
    models: dict[str, Any], find: Callable[[Any, list[str]], dict], texts: list[str], rounds: int
) -> dict[str, Any]:
    found = {name: find(model, texts) for name, model in models.items()}
    same = {name: agreement(each, found[STOCK]) for name, each in found.items()}
    calls = {name: (lambda model=model: find(model, texts)) for name, model in models.items()}
    return {"same": same, "seconds": time_in_turns(calls, rounds, clock=time.process_time)}


def tables_of(results: dict) -> list[Table]:
    tables = []
    for name, run in results["models"].items():
        plain = run["seconds"][STOCK]
        rows = [
            [way, f"{seconds:.2f}", f"{plain / seconds:.2f}", f"{100 * share:.1f}", f"{worst:.0e}"]
            for (way, seconds), (share, worst) in zip(run["seconds"].items(), run["same"].values(), strict=True)
        ]
        tables.append((name, ["", "CPU s", "× stock", "same entities, %", "score differs by"], rows))
    return tables


def card(results: dict) -> str:
    """gliner.md."""
    text = INTRODUCTION.format(**results["texts"])
    return f"{text}\n{describe(results['environment'])}{markdown_sections(tables_of(results))}"


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16, help="texts of the batch")
    parser.add_argument("--words", type=int, default=200, help="words of the longest text; the others have a quarter")
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    return parser.parse_args()


def main() -> None:
    args = arguments()
    start_quietly(threads=1)
    draw = random.Random(0)
    lengths = [args.words, *(draw.randint(args.words // 20, args.words // 3) for _ in range(args.rows - 1))]
    texts = [" ".join(draw.choices(WORDS, k=length)) for length in lengths]
    encoder = ENCODER | SIZES | {"num_hidden_layers": args.layers}
    results = {"environment": {**environment(), "protocol": PROTOCOL}, "models": {}}
    results["texts"] = {"rows": args.rows, "shortest": min(lengths), "longest": max(lengths)}
    with tempfile.TemporaryDirectory() as folder:
        (one := Path(folder, "gliner")).mkdir()
        name = f"GLiNER {version('gliner')}"
        results["models"][name] = measure(gliner_variants(one, encoder), found_by_gliner, texts, args.rounds)
        (two := Path(folder, "gliner2")).mkdir()
        name = f"GLiNER2 {version('gliner2')}"
        results["models"][name] = measure(gliner2_variants(two, encoder), found_by_gliner2, texts, args.rounds)
    write_report(args.out / "gliner", results, card(results))
    print_tables(tables_of(results))


if __name__ == "__main__":
    main()
