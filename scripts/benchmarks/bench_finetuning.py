"""Fine-tune converted models and their source on several tasks with the same flags, and compare the results.

    python scripts/benchmarks/bench_finetuning.py --data DATA --models source=all-MiniLM-L6-v2 default=converted
    python scripts/benchmarks/bench_finetuning.py … --tasks pairs --seeds 0 1 2

The recipes of scripts/examples do the work, one process for each model, task and seed, with one thread and
`hf_relpos.optimize`. The first model is the one that the others are compared with. Tasks read files of DATA:
similarity of pairs and of embeddings (sts/stsb.*), named entities (ner/wnut17.*) and questions (qa/squad.*). Results
are kept run by run in docs/results/benchmarks/finetuning.json, from which finetuning.md is written. A run that is
there is not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from shared.arguments import RESULTS, ROOT
from shared.measuring import environment
from shared.reports import markdown_table, write_report


EXAMPLES = ROOT / "scripts" / "examples"
COMMON = ["--optimize", "--do_train", "--do_eval", "--save_strategy", "no", "--report_to", "none", "--use_cpu"]
COMMON += ["--disable_tqdm", "true", "--learning_rate", "1e-4", "--warmup_steps", "20"]
PAIRS = ["--text_column_names", "sentence1", "sentence2"]
TASKS = {  # recipe, training file, validation file, flags, metric, its name
    "pairs": (
        "run_classification.py",
        "sts/stsb.train.tsv",
        "sts/stsb.dev.tsv",
        [*PAIRS, "--label_column_name", "score", "--do_regression", "--per_device_train_batch_size", "16"],
        "eval_spearman",
        "STS-B read as pairs, Spearman",
    ),
    "entities": (
        "run_ner.py",
        "ner/wnut17.train.conll",
        "ner/wnut17.dev.conll",
        ["--num_train_epochs", "2", "--per_device_train_batch_size", "16"],
        "eval_f1",
        "entities of WNUT-17, F1",
    ),
    "similarity": (
        "run_embedding.py",
        "sts/stsb.train.tsv",
        None,
        [*PAIRS, "--score_column_name", "score", "--sts_file", "{data}/sts/stsb.dev.tsv"],
        "eval_sts_spearman_cosine",
        "STS-B by embeddings, Spearman",
    ),
    "questions": (
        "run_qa.py",
        "qa/squad.train.json.xz",
        "qa/squad.dev.json.xz",
        "--max_seq_length 256 --max_train_samples 3000 --max_eval_samples 1000".split(),
        "eval_f1",
        "questions of SQuAD, F1",
    ),
}
ONE_EPOCH = ["--num_train_epochs", "1"]

INTRODUCTION = """# Fine-tuning a converted model and its source

Written by `python scripts/benchmarks/bench_finetuning.py`. The same recipe and flags for each model; scores × 100,
mean over the seeds, and the difference to {first} in brackets.

{about}
"""


def run(task: str, folder: str, seed: int, data: Path) -> float:
    """The metric of one training."""
    recipe, train, validation, flags, metric, _ = TASKS[task]
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(EXAMPLES / recipe), "--model_name_or_path", folder, "--output_dir", out]
        command += ["--train_file", str(data / train), "--seed", str(seed), *COMMON]
        command += ["--validation_file", str(data / validation)] if validation else []
        command += [] if "--num_train_epochs" in flags else ONE_EPOCH
        command += [flag.format(data=data) for flag in flags]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        scores = json.loads((Path(out) / "eval_results.json").read_text(encoding="utf-8"))
    score = next(value for name, value in scores.items() if name.endswith(metric.removeprefix("eval_")))
    return 100 * score if score <= 1 else score


def card(results: dict) -> str:
    """finetuning.md."""
    names = list(dict.fromkeys(row["model"] for row in results["runs"]))
    first = names[0]
    lines, differences = [], {name: [] for name in names}
    for task, (*_, title) in TASKS.items():
        means = {}
        for name in names:
            scores = [row["score"] for row in results["runs"] if (row["task"], row["model"]) == (task, name)]
            if scores:
                means[name] = (statistics.mean(scores), len(scores))
        if first not in means:
            continue
        cells = []
        for name in names:
            if name not in means:
                cells.append("–")
                continue
            gap = means[name][0] - means[first][0]
            differences[name].append(gap)
            cells.append(f"{means[name][0]:.1f}" if name == first else f"{means[name][0]:.1f} ({gap:+.1f})")
        lines.append([f"{title} ({means[first][1]})", *cells])
    whole = {name for name in names if len(differences[name]) == len(lines)}  # means over other tasks say nothing
    means = [f"{statistics.mean(differences[name]):+.1f}" if name in whole else "–" for name in names]
    lines.append(["mean difference", *means])
    about = results["environment"]
    where = f"{about['machine']}, one thread; torch {about['torch']}, transformers {about['transformers']}; "
    text = INTRODUCTION.format(first=first, about=where + about["date"] + ".")
    return text + "\n" + markdown_table(["task (seeds)", *names], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of the tasks")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks", help="folder for the results")
    args = parser.parse_args()
    path = args.out / "finetuning.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"runs": []}
    results["environment"] = environment()
    models = dict(each.split("=", 1) for each in args.models)
    for seed in args.seeds:
        for task in args.tasks:
            for name, folder in models.items():
                key = {"model": name, "task": task, "seed": seed}
                if any({**row, "score": 0} == {**key, "score": 0} for row in results["runs"]):
                    continue
                row = {**key, "score": round(run(task, folder, seed, args.data), 2)}
                print(json.dumps(row), file=sys.stderr)
                results["runs"].append(row)
                write_report(path.with_suffix(""), results, card(results))


if __name__ == "__main__":
    main()
