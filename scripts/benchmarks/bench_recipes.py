"""The larger run of each training recipe, for the absolute source and for its relative model with the same flags.

    python scripts/benchmarks/bench_recipes.py --source all-MiniLM-L6-v2 --data DATA
    python scripts/benchmarks/bench_recipes.py --source … --data … --rows 'ner/*' qa/relative  # only these
    python scripts/benchmarks/bench_recipes.py --list                                          # rows and commands

Every row is one command line of scripts/examples/run_*.py, which the card shows; its figures are those that the recipe
wrote into all_results.json. Relative models are converted where WORK does not hold them. The masked language models
are trained from new weights; the distillation starts from a student with fitted tables, measured before and after.

Writes OUT/recipes.json and .md after every row. A row that is in the JSON with the same commands is not run again;
what a run wrote and printed stays in WORK. CPU seconds are those of the whole process: start, tokenizing, training,
evaluation. SOURCE is a sentence-embedding BERT, DATA a folder with the files that the commands name.
"""

import argparse
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from shared.arguments import RESULTS, ROOT, check_patterns, digest, positive_int, reproducing_command
from shared.measuring import environment
from shared.reports import Table, describe, markdown_sections, print_tables, write_report

from hf_relpos.demo import CHECKPOINT


@dataclass(frozen=True)
class Run:
    """A row: a recipe with a model.

    Attributes:
        label: of the model, in the table.
        flags: command line after the script's name, but for --output_dir. {source}, {bert} (the packaged one), {data}
            and the keys of `CONVERSIONS` are folders.
        student: key of `CONVERSIONS` that the flags name.
    """

    label: str
    flags: str
    student: str | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe with its rows.

    Attributes:
        title: what is learnt, in the card.
        metrics: keys of all_results.json to heading and decimals.
        runs: by the second part of a row's name.
    """

    title: str
    metrics: Mapping[str, tuple[str, int]]
    runs: Mapping[str, Run]


# Command lines of `hf-relpos`, but for the folder that they write.
LEARNT = "--text {data}/text/novels.txt.xz --text {data}/text/acl_abstracts.jsonl.xz --field text --field abstract"
CONVERSIONS = {
    "bert-relative": "convert {bert} --method calibrate --scheme harmonic --text hf_relpos/demo/text/train.txt.xz",
    "minilm-relative": "convert {source} " + LEARNT,
    "minilm-pairs": "convert {source} --method-option pairs=0.5 " + LEARNT,
    "minilm-fitted": "convert {source} --method calibrate --scheme harmonic " + LEARNT,
}
TRAIN = " --do_train --do_eval --save_strategy no --report_to none --use_cpu"


def pair(flags: str, source: str, student: str) -> dict[str, Run]:
    """The runs of a source and its conversion."""
    start = "--model_name_or_path {%s} " + flags + TRAIN
    return {"absolute": Run("absolute", start % source), "relative": Run("relative", start % student, student)}


def masked_models() -> dict[str, Run]:
    """The runs of two new models of the packaged BERT's size."""
    size = "hidden_size=128,num_hidden_layers=4,num_attention_heads=4,intermediate_size=512"
    size += ",max_position_embeddings=128,hidden_dropout_prob=0,attention_probs_dropout_prob=0"
    flags = (
        "--tokenizer_name {bert} %s --config_overrides " + size + " --train_file {data}/text/novels.txt.xz "
        "--shuffle_train_dataset --max_train_samples 20000 --max_eval_samples 500 --max_seq_length 64 "
        "--per_device_train_batch_size 32 --max_steps 400 --learning_rate 2e-3 --warmup_steps 50" + TRAIN
    )
    return {
        "absolute": Run("new BERT", flags % "--model_type bert"),
        "relative": Run("new, t5", flags % "--position_embedding_type t5"),
    }


def distillations() -> dict[str, Run]:
    """A student before and after."""
    flags = (
        "--teacher_name_or_path {source} --model_name_or_path {minilm-fitted} "
        "--validation_file {data}/text/wikitext2.valid.txt --do_eval --report_to none --use_cpu"
    )
    train = (
        " --do_train --train_file {data}/text/novels.txt.xz {data}/long/wikidocs.docs.jsonl.xz "
        "--max_steps 100 --batch_tokens 1024 --learning_rate 5e-5 --table_learning_rate 1e-2"
    )
    return {
        "before": Run("fitted", flags, "minilm-fitted"),
        "after": Run("fitted, distilled", flags + train, "minilm-fitted"),
    }


def answers() -> dict[str, Run]:
    """The runs of a source, of its conversion, and of one that was fitted to pairs of segments as well."""
    flags = (
        "--train_file {data}/qa/squad.train.json.xz --validation_file {data}/qa/squad.dev.json.xz "
        "--shuffle_train_dataset --max_train_samples 4000 --max_eval_samples 500 --max_seq_length 256 "
        "--doc_stride 64 --num_train_epochs 1 --per_device_train_batch_size 16 --learning_rate 3e-4 "
        "--warmup_steps 25 --train_sampling_strategy group_by_length"
    )
    fitted = pair(flags, "source", "minilm-pairs")["relative"]
    return {
        **pair(flags, "source", "minilm-relative"),
        "pairs": replace(fitted, label="relative, fitted to pairs"),
    }


RECIPES = {
    "mlm": Recipe(
        "masked words of novels, two small models from new weights",
        {"eval_loss": ("loss", 3), "eval_perplexity": ("perplexity", 1), "eval_accuracy": ("accuracy", 3)},
        masked_models(),
    ),
    "classification": Recipe(
        "were two neighbouring words of a sentence exchanged?",
        {"eval_accuracy": ("accuracy", 3), "eval_f1_macro": ("macro F1", 3)},
        pair(
            "--train_file {data}/order/bshift.train.tsv.xz --validation_file {data}/order/bshift.dev.tsv "
            "--max_steps 600 --per_device_train_batch_size 32 --learning_rate 5e-4 --max_seq_length 64",
            "bert",
            "bert-relative",
        ),
    ),
    "ner": Recipe(
        "entities of WNUT-17, an epoch",
        {"eval_f1": ("F1", 3), "eval_precision": ("precision", 3), "eval_recall": ("recall", 3)},
        pair(
            "--train_file {data}/ner/wnut17.train.conll --validation_file {data}/ner/wnut17.dev.conll "
            "--num_train_epochs 1 --per_device_train_batch_size 16 --learning_rate 3e-4 --max_seq_length 64",
            "source",
            "minilm-relative",
        ),
    ),
    "qa": Recipe(
        "answers to a part of SQuAD 1.1",
        {"eval_f1": ("F1", 1), "eval_exact_match": ("exact match", 1)},
        answers(),
    ),
    "embedding": Recipe(
        "similarity of sentences (STS-B), an epoch",
        {"eval_sts_spearman_cosine": ("Spearman's ρ", 4), "eval_sts_pearson_cosine": ("Pearson's r", 4)},
        pair(
            "--train_file {data}/sts/stsb.train.tsv --text_column_names sentence1 sentence2 --score_column_name score "
            "--score_scale 5 --sts_file {data}/sts/stsb.dev.tsv --num_train_epochs 1 --max_seq_length 64 "
            "--per_device_train_batch_size 32 --learning_rate 2e-5 --warmup_steps 15",
            "source",
            "minilm-relative",
        ),
    ),
    "distil": Recipe(
        "the source's outputs, held-out text (cosine of token states, of sentence vectors)",
        {
            f"eval_{kind}_cosine_{length}": (f"{kind}, {length} tokens", 4)
            for kind in ("token", "sentence")
            for length in (32, 128, 512)
        },
        distillations(),
    ),
}
ROWS = {f"{name}/{run}": (name, row) for name, recipe in RECIPES.items() for run, row in recipe.runs.items()}


class Bench:
    """Folders of the models, and what is run with them.

    Attributes:
        shown: the folders as the card names them.
        places: where they are.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        names = {name: name for name in CONVERSIONS}
        self.shown = {"data": "DATA", "source": Path(args.source).name, "bert": str(CHECKPOINT.relative_to(ROOT))}
        self.shown |= names
        self.places = {"data": str(args.data.resolve()), "source": str(args.source), "bert": str(CHECKPOINT)}
        for name in CONVERSIONS:
            self.places[name] = str(args.work.resolve() / f"{name}.{digest(self.conversion(name))}")

    def conversion(self, name: str) -> str:
        """The command that makes a relative model."""
        verb, source, options = CONVERSIONS[name].format(**self.shown).split(" ", 2)
        return f"hf-relpos {verb} {source} {name} {options}"

    def command(self, key: str) -> str:
        """That of a row."""
        name, row = ROWS[key]
        out = key.replace("/", "-")
        return f"python scripts/examples/run_{name}.py {row.flags.format(**self.shown)} --output_dir {out}"

    def settings(self, key: str) -> dict[str, str]:
        """The commands that the figures of a row depend on."""
        student = ROWS[key][1].student
        made = {"conversion": self.conversion(student)} if student else {}
        return {"command": self.command(key), **made}

    def measure(self, key: str) -> dict[str, Any]:
        """What the recipe measured, and its CPU seconds."""
        name, row = ROWS[key]
        if row.student and not Path(self.places[row.student]).is_dir():
            self._convert(row.student)
        out = self.args.work.resolve() / f"{name}-{digest(self.settings(key))}-{key.rpartition('/')[2]}"
        shutil.rmtree(out, ignore_errors=True)
        words = [
            f"scripts/examples/run_{name}.py",
            *shlex.split(row.flags.format(**self.places)),
            "--output_dir",
            str(out),
        ]
        seconds = self._python(words, out.with_suffix(".log"))
        figures = json.loads((out / "all_results.json").read_text(encoding="utf-8"))
        return {"cpu_seconds": round(seconds, 1), "figures": figures}

    def _convert(self, name: str) -> None:
        folder = Path(self.places[name])
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        verb, source, *options = shlex.split(CONVERSIONS[name].format(**self.places))
        self._python(["-m", "hf_relpos", verb, source, str(partial), *options], folder.with_suffix(".log"))
        partial.rename(folder)

    def _python(self, words: Sequence[str], log: Path) -> float:
        """CPU seconds of a Python process in the project's folder.

        Raises:
            SystemExit: when it fails.
        """
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(self.args.threads)}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            done = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT, check=False
            )
        if done.returncode:
            sys.exit(f"{words[0]} failed; see {log}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tables(results: Mapping[str, Any]) -> list[Table]:
    """One for each recipe, with a line for each run."""
    found = []
    for name, recipe in RECIPES.items():
        lines = []
        for run, row in recipe.runs.items():
            if entry := results["rows"].get(f"{name}/{run}"):
                figures = [f"{entry['figures'][key]:.{places}f}" for key, (_, places) in recipe.metrics.items()]
                lines.append([row.label, *figures, f"{entry['cpu_seconds']:.0f}"])
        if lines:
            columns = ["model", *(heading for heading, _ in recipe.metrics.values()), "CPU s"]
            found.append((f"`run_{name}.py`: {recipe.title}", columns, lines))
    return found


def commands(results: Mapping[str, Any]) -> str:
    """The command lines of the rows and, before them, of their conversions."""
    settings = [row["settings"] for row in results["rows"].values()]
    made = dict.fromkeys(each["conversion"] for each in settings if "conversion" in each)
    return "\n".join([*made, *(each["command"] for each in settings)])


def card(results: dict[str, Any]) -> str:
    """recipes.md."""
    missing = ", ".join(f"`{key}`" for key in ROWS if key not in results["rows"])
    return (
        f"# A larger run of each recipe\n\n{describe(results['environment'])}\n"
        "Written by scripts/benchmarks/bench_recipes.py. One seed each: differences of a point or two may be chance. "
        f"The models of a table have the same flags.{f' Not run yet: {missing}.' if missing else ''}\n"
        f"{markdown_sections(tables(results))}\n## The commands\n\n"
        "DATA is the folder of the data sets; the models are converted first.\n\n"
        f'```bash title="not run in the tests: it takes the data and most of an hour"\n{commands(results)}\n```\n'
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Arguments; with --list only that one is needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="sentence-embedding BERT with absolute positions")
    parser.add_argument("--data", type=Path, help="folder with the files that the commands name")
    parser.add_argument("--rows", nargs="+", default=["*"], help="patterns of the rows to run")
    parser.add_argument("--list", action="store_true", help="print the rows and their commands, and do nothing else")
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, default=Path("build") / "bench_recipes", help="models and logs")
    args = parser.parse_args(arguments)
    if not args.list and not (args.source and args.data):
        parser.error("--source and --data are needed")
    check_patterns(parser, "--rows", args.rows, ROWS)
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.list:
        bench = Bench(argparse.Namespace(source="SOURCE", data=Path("DATA"), work=Path("WORK")))
        print("\n".join(f"{key}: {bench.command(key)}" for key in ROWS))
        return
    torch.set_num_threads(args.threads)
    bench = Bench(args)
    path = args.out / "recipes.json"
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": {}}
    command = reproducing_command(
        "bench_recipes.py", sys.argv[1:] if arguments is None else arguments, ("--rows", "--out", "--work")
    )
    protocol = "CPU seconds of each process: start, tokenizing, training and evaluation"
    rows = {key: row for key, row in results["rows"].items() if key in ROWS and row["settings"] == bench.settings(key)}
    for key in ROWS:
        if key in rows or not any(fnmatch(key, pattern) for pattern in args.rows):
            continue
        row = {"settings": bench.settings(key), **bench.measure(key)}
        rows = {name: {**rows, key: row}[name] for name in ROWS if name in {**rows, key: row}}
        results = {"environment": {**environment(), "command": command, "protocol": protocol}, "rows": rows}
        write_report(args.out / "recipes", results, card(results))
        print_tables(tables({"rows": {key: row}}))


if __name__ == "__main__":
    main()
