"""Fine-tune converted models and their source on several tasks with the same flags, and compare the results.

    python scripts/benchmarks/bench_finetuning.py --data DATA --models all-MiniLM-L6-v2=SOURCE converted=FOLDER
    python scripts/benchmarks/bench_finetuning.py … --tasks pairs --seeds 0 1 2

The recipes of scripts/examples do the work, in one process for each model, task and seed, with one thread and
`hf_relpos.optimize`. The first model is the source, with which the others are compared; every source has a table. A
seed is that of the new head, of the order of the examples and of dropout. All tasks and models come with the first
seed, then with the second. Results are kept run by run in docs/results/benchmarks/finetuning.json, from which
finetuning.md is written. A run that is there is not repeated.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.arguments import RESULTS, ROOT
from shared.measuring import environment
from shared.process import start_quietly
from shared.reports import stored, write_report

from hf_relpos.console import markdown_table


sys.path.append(str(ROOT / "scripts" / "examples"))
COMMON = ["--optimize", "--do_train", "--do_eval", "--save_strategy", "no", "--report_to", "none", "--use_cpu"]
COMMON += ["--disable_tqdm", "true", "--learning_rate", "1e-4", "--warmup_steps", "20"]
COMMON += ["--num_train_epochs", "1"]


@dataclass(frozen=True)
class Task:
    """What a model is fine-tuned on.

    Attributes:
        title: in the table.
        recipe: module of scripts/examples.
        train: training file in the folder --data.
        validation: file to measure on; None where a flag names it, or the recipe holds examples out.
        flags: of the recipe.
        metric: in the recipe's eval_results.json.
        goal: points below the source's mean that are allowed.
    """

    title: str
    recipe: str
    train: str
    validation: str | None
    flags: str
    metric: str
    goal: float = -1.0


TWO = "--text_column_names sentence1 sentence2"
BATCH = "--per_device_train_batch_size 16"
TWICE = f"{BATCH} --num_train_epochs 2"
CAP = f"{BATCH} --max_train_samples 2000 --max_eval_samples 1000"
# with 2,000 examples and 1e-4 not learnt at all
ORDER = f"{BATCH} --max_train_samples 6000 --max_eval_samples 1000 --learning_rate 3e-4"
TASKS = {  # the cheap ones first
    "pairs": Task(
        "STS-B read as pairs, Spearman",
        "run_classification",
        "sts/stsb.train.tsv",
        "sts/stsb.dev.tsv",
        f"{TWO} --label_column_name score --do_regression {CAP}",
        "spearman",
    ),
    "similarity": Task(
        "STS-B by embeddings, Spearman",
        "run_embedding",
        "sts/stsb.train.tsv",
        None,
        f"{TWO} --score_column_name score --sts_file {{data}}/sts/stsb.dev.tsv {CAP}",
        "sts_spearman_cosine",
    ),
    "swaps": Task(
        "two neighbouring words swapped?, accuracy",
        "run_classification",
        "order/bshift.train.tsv.xz",
        "order/bshift.dev.tsv",
        ORDER,
        "accuracy",
    ),
    "sentences": Task(
        "two sentences swapped?, accuracy",
        "run_classification",
        "order/sop.train.tsv.xz",
        "order/sop.dev.tsv",
        f"{TWO} {ORDER}",
        "accuracy",
    ),
    "entities": Task(
        "entities of WNUT-17, F1", "run_ner", "ner/wnut17.train.conll", "ner/wnut17.dev.conll", TWICE, "f1"
    ),
    "chemicals": Task(
        "entities of BC5CDR, F1", "run_ner", "ner/bc5cdr.train.conll", "ner/bc5cdr.dev.conll", CAP, "f1"
    ),
    "reactions": Task(  # of make_reactions.py at commit e3ef674
        "classes of chemical reactions, accuracy",
        "run_classification",
        "reactions/train.tsv",
        "reactions/dev.tsv",
        f"--max_seq_length 256 {BATCH} --num_train_epochs 4",
        "accuracy",
    ),
    "masked": Task(
        "masked words of abstracts, accuracy",
        "run_mlm",
        "text/acl_abstracts.jsonl.xz",
        None,
        f"--text_column_name abstract --max_seq_length 128 {CAP}",
        "accuracy",
    ),
    "questions": Task(
        "questions of SQuAD, F1",
        "run_qa",
        "qa/squad.train.json.xz",
        "qa/squad.dev.json.xz",
        "--max_seq_length 256 --max_train_samples 3000 --max_eval_samples 1000",
        "f1",
    ),
}
HEADLESS = [name for name in TASKS if name not in ("masked", "reactions")]  # for sentence encoders of any text
MEAN_GOAL = -0.2  # points, over all tasks

INTRODUCTION = """# Fine-tuning a converted model and its source

Written by `python scripts/benchmarks/bench_finetuning.py`; each model has the same recipe and flags. Scores × 100 of
the source, and the difference of the others to it: mean ± standard error (number of seeds). ✗: more than 1 point below
the source on a task, or more than 0.2 points below on average.

{about}
"""


def train(recipe: str, arguments: Sequence[str]) -> None:
    """A recipe in this process, without its output."""
    start_quietly(threads=1)
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        importlib.import_module(recipe).main(arguments)


def run(task: Task, folder: str, seed: int, data: Path) -> dict[str, float]:
    """The score of one training, × 100, and its CPU seconds with the evaluation."""
    importlib.import_module(task.recipe)  # once, for all processes
    before = os.times()
    with tempfile.TemporaryDirectory() as out:
        arguments = ["--model_name_or_path", folder, "--output_dir", out, "--seed", str(seed), *COMMON]
        arguments += ["--train_file", str(data / task.train)]
        arguments += ["--validation_file", str(data / task.validation)] if task.validation else []
        arguments += [flag.format(data=data) for flag in task.flags.split()]
        process = multiprocessing.get_context("fork").Process(target=train, args=(task.recipe, arguments))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{task.title}: {task.recipe} ended with {process.exitcode}")
        scores = json.loads((Path(out) / "eval_results.json").read_text(encoding="utf-8"))
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    score = next(value for name, value in scores.items() if name.endswith(task.metric))
    return {"score": round(100 * score if score <= 1 else score, 2), "cpu": round(cpu)}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error; that of one value is not known."""
    spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), spread


def difference(mean: float, error: float, goal: float) -> str:
    """Points, with the standard error where it is known and a mark where the goal is missed."""
    return f"{mean:+.1f}" + ("" if math.isnan(error) else f" ± {error:.1f}") + " ✗" * (mean < goal)


def source_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The differences of models to their source, by task."""
    scores = {(row["task"], row["model"], row["seed"]): row["score"] for row in runs}
    source, *others = dict.fromkeys(row["model"] for row in runs)
    lines, found = [], {name: [] for name in others}
    for name, task in TASKS.items():
        of_source = {seed: score for (which, model, seed), score in scores.items() if (which, model) == (name, source)}
        if not of_source:
            continue
        cells = [f"{statistics.mean(of_source.values()):.1f} ({len(of_source)})"]
        for model in others:
            # of the same seeds, which have the same order of examples
            gaps = [scores[name, model, seed] - of_source[seed] for seed in of_source if (name, model, seed) in scores]
            if gaps:
                found[model].append(mean_and_error(gaps))
            cells.append(f"{difference(*found[model][-1], task.goal)} ({len(gaps)})" if gaps else "–")
        lines.append([task.title, *cells])
    last = []
    for model in others:
        whole = len(found[model]) == len(lines)  # a mean over other tasks says nothing
        error = math.hypot(*(each for _, each in found[model])) / max(1, len(found[model]))
        last.append(difference(statistics.mean(m for m, _ in found[model]), error, MEAN_GOAL) if whole else "–")
    return markdown_table(["task", source, *others], [*lines, ["mean", "", *last]]) + "\n"


def card(results: dict[str, Any]) -> str:
    """finetuning.md."""
    about = results["environment"]
    where = f"{about['machine']}, one thread; torch {about['torch']}, transformers {about['transformers']}; "
    text = INTRODUCTION.format(about=where + about["date"] + ".")
    for source in dict.fromkeys(row["source"] for row in results["runs"]):
        runs = [row for row in results["runs"] if row["source"] == source]
        text += f"\n## {source}\n\n" + source_table(runs)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of the tasks")
    parser.add_argument("--models", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=HEADLESS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "benchmarks", help="folder for the results")
    args = parser.parse_args()
    path = args.out / "finetuning"
    results = stored(path) or {"runs": []}
    results["environment"] = environment()
    models = dict(each.split("=", 1) for each in args.models)
    source = next(iter(models))
    for seed in args.seeds:
        for task in args.tasks:
            for name, folder in models.items():
                key = {"source": source, "model": name, "task": task, "seed": seed}
                if any(key.items() <= row.items() for row in results["runs"]):
                    continue
                row = {**key, **run(TASKS[task], folder, seed, args.data)}
                print(json.dumps(row), file=sys.stderr)
                results["runs"].append(row)
                write_report(path, results, card(results))


if __name__ == "__main__":
    main()
