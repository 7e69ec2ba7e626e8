"""Check this package on a GPU, which its tests do not reach, and time it there beside Transformers, in four minutes.

    python scripts/maintenance/device_check.py --out device_check.json
    python scripts/maintenance/device_check.py --device cpu --tiny --schemes t5    # a rehearsal, in two minutes

Every part runs in a process of its own: a part that raises, hangs or crashes the GPU's context becomes a row, and the
others go on. Parts that only check run side by side, since they mostly compile. Parts that measure times compile
beside them, wait until all of those have ended, and then run one after the other.

An error is the norm of a difference ÷ the norm of the reference, the largest over the tensors. The reference of
bfloat16 is eager attention in float32, that of float32 eager attention in float64, with the same weights on the same
device.
"""

import argparse
import copy
import importlib
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

import hf_relpos
from hf_relpos import machine
from hf_relpos.console import markdown_table
from hf_relpos.demo import CHECKPOINT, read_text
from hf_relpos.files import write_json
from hf_relpos.models.capabilities import supported_implementations


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts" / "benchmarks"))
measuring = importlib.import_module("shared.measuring")

TIMED = ("relative_key", "deberta", "t5", "harmonic")  # schemes whose base models are timed
STOCK = "stock"
CASES = ((8, 512), (2, 2048))  # rows and tokens of base models
SMALL = 320  # tokens of small models: of 3 such rows the CPU's chunked backend takes scores
NO_GRADIENTS = ("flex_attention", "cpu")  # in PyTorch
# Stock encoders that `optimize` has to leave as they are on a GPU, and their sizes.
KINDS = ("bert", "deberta-v2", "mpnet", "t5", "roformer", "xlnet", "modernbert")
WIDE = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 4}
# Bounds. In bfloat16 that of the forward is eager attention's; other backends may have twice its error. Gradients are
# sums of rounded scores in every backend, .01 to .06 off; on a CPU .05 with eager attention, too.
FLOAT32 = {"forward": 1e-4, "gradients": 1e-4}
BFLOAT16 = {"forward": 0.05, "gradients": 0.1}
SAME = {"forward": 0.0, "gradients": 1e-5}  # some sums of a GPU's backward have no fixed order
SLOWER, COSINE, LOSS = 1.1, 0.02, 0.8
STEPS, ROUNDS = 20, 10
LINE = "\n"
CHECKS_SHARE = 0.7  # of the seconds; parts that only check are ended then, so that the others have their turn

Row = dict[str, Any]
Tensors = list[torch.Tensor]


def row_of(part: str, name: str = "", **known: Any) -> Row:
    """A row of the results; without anything known it is wrong."""
    unknown = {"error": None, "bound": None, "ok": False, "seconds": None, "detail": ""}
    return {"part": part, "name": name, **unknown, **known}


@dataclass
class Part:
    """What a part of the check is called with.

    Attributes:
        name: of the part.
        device: "cuda", or "cpu" for a rehearsal.
        tiny: whether all models are small, and few calls are timed.
        emit: gets each row.
        wait: returns when no other part uses the device.
    """

    name: str
    device: str
    tiny: bool
    emit: Callable[[Row], None]
    wait: Callable[[], object]

    def check(self, name: str, bounds: Mapping[str, float], errors: Callable[[], Sequence[float]]) -> Sequence[float]:
        """Emit a row for each error that is returned; one row if an exception is raised."""
        began, found = time.perf_counter(), self._attempt(name, errors)
        for (what, bound), error in zip(bounds.items(), found or (), strict=False):
            known = {"error": error if error == error else None, "bound": bound, "ok": error <= bound}
            self.emit(row_of(self.name, f"{name}{what}", **known, seconds=time.perf_counter() - began))
        return found or ()

    def time(self, name: str, tokens: int, run: Callable[[], object]) -> None:
        """Emit a row with the median seconds of a call, and its tokens a second."""
        seconds = self._attempt(name, partial(median_seconds, run, self.device, 1 if self.tiny else ROUNDS))
        if seconds is not None:
            self.emit(row_of(self.name, name, ok=True, seconds=seconds, detail=f"{tokens / seconds:,.0f}"))

    def _attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        try:
            return measure()
        except Exception as problem:  # whatever a GPU raises is what this script is for
            traceback.print_exc()
            self.emit(row_of(self.name, name, detail=f"{type(problem).__name__}: {problem}"[:500]))


# Numbers ------------------------------------------------------------------------------------------------------------


def relative_error(found: Iterable[torch.Tensor], exact: Iterable[torch.Tensor]) -> float:
    """The largest error of the tensors; that of a small tensor is relative to a hundredth of the largest one."""
    pairs = [(one.cpu().double(), other.cpu().double()) for one, other in zip(found, exact, strict=True)]
    least = 0.01 * max(float(other.norm()) for _, other in pairs)
    errors = [(one - other).norm() / other.norm().clamp_min(least) for one, other in pairs]
    return float(torch.stack(errors).max())  # NaN if one of them is


def outputs(model: Any, batch: Mapping[str, torch.Tensor], gradients: bool = True) -> list[Tensors]:
    """The states of real tokens; and the gradients of all parameters."""
    if not gradients:
        return [[machine._states(model, batch)]]
    states = machine._states_and_gradients(model, batch)[0]
    return [[states], [parameter.grad for parameter in model.parameters() if parameter.grad is not None]]


def errors_of(
    model: Any, batch: Mapping[str, torch.Tensor], exact: list[Tensors], gradients: bool = True
) -> list[float]:
    """Errors of `outputs`."""
    return [relative_error(*pair) for pair in zip(outputs(model, batch, gradients), exact, strict=False)]


def label_of(model: Any, rows: int, tokens: int, device: str) -> str:
    """The name of a model's attention, and what `relpos` takes."""
    name = model.config._attn_implementation
    if name != "relpos":
        return name
    said = hf_relpos.explain_backend(model, rows, tokens, device, gradients=True).partition("\n")[0]
    return f"{name} ({said.rpartition(' ')[2]})"


def compare_backends(
    part: Part, model: Any, batch: dict[str, torch.Tensor], dtypes: Sequence[torch.dtype], on_cpu: bool = False
) -> None:
    """Rows for each backend that computes a model, eager first; with `on_cpu` also for what the CPU takes."""
    known = supported_implementations(model.config)
    pairs = [(name, part.device) for name in ("eager", "relpos", "sdpa", "flex_attention") if name in known]
    for dtype in dtypes:
        rounded = copy.deepcopy(model).to(part.device, dtype)
        wider = copy.deepcopy(rounded).to(torch.float32 if dtype == torch.bfloat16 else torch.float64)
        wider.set_attn_implementation("eager")
        exact = outputs(wider, batch)
        del wider
        bounds = BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
        for name, device in dict.fromkeys([*pairs, *([("relpos", "cpu")] if on_cpu else [])]):
            chosen = copy.deepcopy(rounded).to(device)
            chosen.set_attn_implementation(name)
            given = {field: tensor.to(device) for field, tensor in batch.items()}
            label = label_of(chosen, *given["input_ids"].shape, device) + " on the CPU" * (device != part.device)
            measure = partial(errors_of, chosen, given, exact, (name, device) != NO_GRADIENTS)
            label = f"{given['input_ids'].shape[1]} tokens, {str(dtype).rpartition('.')[2]}, {label}, "
            found = part.check(label, bounds, measure)
            if name == "eager" and dtype == torch.bfloat16 and found:
                bounds = bounds | {"forward": max(0.01, 2 * found[0])}


def attention(part: Part, scheme: str) -> None:
    """A small model of a scheme, three rows with padding."""
    model = machine._own(hf_relpos.RelPosBertModel, scheme)
    batch = machine._batch(SMALL, part.device, model.config.required_inputs)
    compare_backends(part, model, batch, (torch.float32, torch.bfloat16), on_cpu=True)


# Times --------------------------------------------------------------------------------------------------------------


def median_seconds(run: Callable[[], object], device: str, rounds: int) -> float:
    """Median seconds of a call after it has warmed up; on a GPU by events."""
    if device == "cpu":
        return measuring.time_in_turns({"": run}, rounds, time.perf_counter)[""]
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(other) / 1000 for one, other in itertools.pairwise(marks))


def base_model(part: Part, scheme: str, layers: int) -> Any:
    """A model of base width without dropout, stock or of this package, with noise in its tables."""
    torch.manual_seed(0)
    sizes = {"max_position_embeddings": 2048, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes |= machine.SIZES if part.tiny else {"num_hidden_layers": layers}
    if scheme == STOCK:
        return transformers.BertModel(transformers.BertConfig(**sizes)).to(part.device)
    model = hf_relpos.RelPosBertModel(hf_relpos.RelPosBertConfig(**sizes, position_embedding_type=scheme))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model.to(part.device)


def calls(model: Any, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
    """A forward, and a training step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=ids.is_cuda)

    def step() -> None:
        model(ids)[0].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    forward = {"forward": torch.no_grad()(partial(model, ids))}
    has_gradients = (model.config._attn_implementation, ids.device.type) != NO_GRADIENTS
    return {**forward, "training step": step} if has_gradients else forward


def speed(part: Part, scheme: str) -> None:
    """A base model: errors of two layers, and times of twelve in bfloat16."""
    cases = [(rows, tokens // 8 if part.tiny else tokens) for rows, tokens in CASES]
    small = base_model(part, scheme, 2).eval()
    names = ["sdpa"] if scheme == STOCK else supported_implementations(small.config)
    shapes = {case: torch.randint(5, machine.VOCABULARY, case, device=part.device) for case in cases}

    def each(model: Any) -> Iterable[tuple[str, int, Callable[[], object]]]:
        for (case, ids), name in itertools.product(shapes.items(), names):
            model.set_attn_implementation(name)
            label = name if scheme == STOCK else label_of(model, *case, part.device)
            for kind, run in calls(model, ids).items():
                yield f"{case[0]} × {case[1]}, {kind}, {label}", ids.numel(), run

    for _, _, run in each(copy.deepcopy(small).bfloat16()):
        with suppress(Exception):  # it is compiled here; what it raises is a row below
            run()
    for dtypes, (_, tokens) in zip(((torch.float32, torch.bfloat16), (torch.bfloat16,)), cases, strict=True):
        batch = {name: tensor[:2] for name, tensor in machine._batch(tokens, part.device).items()}
        if scheme != STOCK:
            compare_backends(part, small, batch, dtypes)
    model = base_model(part, scheme, 12).bfloat16()
    if part.device == "cuda":
        torch.cuda.empty_cache()
    part.wait()
    for call in each(model):
        part.time(*call)


def optimized(part: Part, kind: str) -> None:
    """A stock encoder that `optimize` has to leave as it is, unless it is on the CPU."""
    own = {"xlnet": {"d_head": 64}, "mpnet": {"max_position_embeddings": 514}}  # MPNet counts from the padding token
    wide = {} if part.tiny else WIDE | own.get(kind, {})
    model = machine._stock(kind, **machine.STOCK[kind] | wide).to(part.device)
    batch = machine._batch(40 if part.tiny else 128, part.device)
    exact = outputs(model, batch)
    part.wait()
    seconds = partial(median_seconds, partial(machine._states, model, batch), part.device, ROUNDS)
    before = seconds()
    with hf_relpos.optimize(model) as handle:
        part.check("", FLOAT32 if part.device == "cpu" else SAME, partial(errors_of, model, batch, exact))
        if part.device != "cpu":
            part.check("time ÷ time before", {"": SLOWER}, lambda: [seconds() / before])
            part.check(f"the device is not named in: {handle}", {"": 0.0}, lambda: [part.device not in str(handle)])


# What users do ------------------------------------------------------------------------------------------------------


def patched(part: Part) -> None:
    """Checkpoints that an old Transformers wrote, loaded by an Auto class onto the device, against its outputs."""

    @torch.no_grad()
    def errors(folder: Path) -> list[float]:
        with hf_relpos.patch_transformers():
            model = transformers.AutoModelForMaskedLM.from_pretrained(folder, device_map=part.device)
        stored = load_file(folder / "io.safetensors", part.device)
        given = {name.removeprefix("input."): stored[name] for name in stored if name.startswith("input.")}
        return [relative_error([model(**given).logits], [stored["output.logits"]])]

    for kind in ("relative_key", "relative_key_query"):
        folder = ROOT / "tests" / "fixtures" / "legacy" / kind / "BertForMaskedLM"
        part.check(f"{kind}, ", FLOAT32, partial(errors, folder))


def converted(part: Part) -> None:
    """The packaged BERT's conversion: its cosines to the source on the device, less those on the CPU."""
    options = {"steps": 2 if part.tiny else 40}

    def cosines(device: str, out: Path) -> list[float]:
        given = {"texts": read_text("train"), "method_options": options, "device": device}
        lengths = hf_relpos.convert(CHECKPOINT, out, **given).details["fidelity"]["lengths"]
        return [length["token_cosine"] for length in lengths]

    def errors() -> list[float]:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # after so few steps it is a poor conversion
            pair = [cosines(device, Path(folder, str(number))) for number, device in enumerate((part.device, "cpu"))]
        return [float(torch.tensor(pair).diff(dim=0).abs().max())]

    part.check("token cosines", {"": COSINE}, errors)


def trained(part: Part, **arguments: Any) -> None:
    """A masked language model that learns random rows by heart under `Trainer` in bfloat16."""

    def errors() -> list[float]:
        model = machine._own(hf_relpos.RelPosBertForMaskedLM, TIMED[0]).train()
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(2, machine.VOCABULARY, (8, 64))]
        given = {"max_steps": STEPS, "learning_rate": 5e-3, "logging_steps": 1, "bf16": True, **arguments}
        given |= {"use_cpu": part.device == "cpu", "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        with tempfile.TemporaryDirectory() as folder:
            trainer = transformers.Trainer(model, transformers.TrainingArguments(folder, **given), train_dataset=rows)
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [losses[-1] / losses[0]]

    part.check("last loss ÷ first", {"": LOSS}, errors)


# Processes ----------------------------------------------------------------------------------------------------------


def parts(schemes: Iterable[str] = hf_relpos.schemes.SCHEMES) -> dict[str, Callable[[Part], None]]:
    """What runs each part, by its name; those that measure times are first."""
    timed = [*(scheme for scheme in TIMED if scheme in schemes), STOCK]
    return {
        **{f"speed {scheme}": partial(speed, scheme=scheme) for scheme in timed},
        **{f"optimize {kind}": partial(optimized, kind=kind) for kind in KINDS},
        "convert": converted,
        "patch_transformers": patched,
        "Trainer": trained,
        "Trainer with torch_compile": partial(trained, torch_compile=True),
        **{f"attention {scheme}": partial(attention, scheme=scheme) for scheme in schemes},
    }


def run_part(part: Part) -> None:
    """Run a part in this process. What it raises is a row."""
    torch.manual_seed(0)
    # a rehearsal on the CPU is not to take a compiler's minutes
    with torch.compiler.set_stance("force_eager" if part.device == "cpu" else "default"):
        part._attempt("", partial(parts()[part.name], part))


class Parent:
    """The processes of the parts, and their rows."""

    def __init__(self, args: argparse.Namespace, about: dict[str, Any]) -> None:
        self.args, self.about, self.rows, self.began = args, about, [], time.monotonic()
        self.is_quiet, self.turn, self.writing = threading.Event(), threading.Lock(), threading.Lock()

    def run(self, name: str, share: float) -> None:
        """Run a part in a new process, until it ends or its share of the time is over."""
        command = [sys.executable, __file__, "--part", name, "--device", self.args.device]
        command += ["--tiny"] if self.args.tiny else []
        # there are as many processes as cores
        variables = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
        with self.args.out.with_suffix(".log").open("a") as log:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
            process = subprocess.Popen(
                command, text=True, encoding="utf-8", env=variables, start_new_session=True, **pipes
            )
        kill = partial(os.killpg, process.pid, signal.SIGKILL)  # with compilers that it started
        end = threading.Timer(self.began + share * self.args.seconds - time.monotonic(), kill)
        end.start()
        has_turn = False
        for line in process.stdout:
            if line.startswith('{"part"'):
                self.add(json.loads(line))
            elif line == "waits\n":
                self.is_quiet.wait()
                has_turn = self.turn.acquire()
                with suppress(BrokenPipeError):  # its time was over
                    print(file=process.stdin, flush=True)
        if code := process.wait():
            late = "; its time was over" if time.monotonic() > self.began + share * self.args.seconds else ""
            self.add(row_of(name, detail=f"its process ended with {code}{late}"))
        end.cancel()
        if has_turn:
            self.turn.release()

    def add(self, row: Row) -> None:
        """Keep a row, and write the results so far."""
        with self.writing:
            self.rows.append(row)
            write_json(self.args.out, {"environment": self.about, "rows": self.rows})

    def run_all(self, names: Sequence[str]) -> None:
        """Start the parts that measure times at once, the others as many at a time as there are jobs."""
        timed = [name for name in names if name.startswith(("speed", "optimize"))]
        with ThreadPoolExecutor(len(timed) or 1) as waiting, ThreadPoolExecutor(self.args.jobs) as pool:
            last = [waiting.submit(self.run, name, 1) for name in timed]
            checks = [pool.submit(self.run, name, CHECKS_SHARE) for name in names if name not in timed]
            wait(checks)
            self.is_quiet.set()
        for part in [*checks, *last]:
            part.result()


def times_table(rows: Iterable[Row]) -> str:
    """Tokens a second by model and case, and the time as a share of stock's."""
    times: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row["error"] is None and row["ok"]:
            case, _, name = row["name"].rpartition(", ")
            times[f"{row['part'].partition(' ')[2]}, {name}"][case] = row
    stock, lines = times.get(f"{STOCK}, sdpa", {}), []
    for name, found in times.items():
        ratios = {case: found[case]["seconds"] / stock[case]["seconds"] for case in found if case in stock}
        lines.append(
            [name, *(f"{found[case]['detail']} ({ratios[case]:.2f})" if case in ratios else "" for case in stock)]
        )
    return f"Tokens a second in bfloat16 (time ÷ stock's):\n\n{markdown_table(['', *stock], lines)}"


def summary(rows: Sequence[Row]) -> str:
    """Tables of the largest errors and of the times, and the rows that are wrong."""
    compared: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    alike: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kind = row["part"].partition(" ")[0]
        if row["error"] is not None and row["name"].count(", ") == 3:
            tokens, dtype, backend, what = row["name"].split(", ")
            compared[f"{backend}, {tokens}"][f"{dtype}, {what}"].append(row)
        elif row["error"] is not None:
            alike[f"{kind}: {row['name'].partition(':')[0]}"].append(row)
    columns = [f"{dtype}, {what}" for dtype in ("float32", "bfloat16") for what in FLOAT32]
    lines = [
        [name, *(f"{max(row['error'] for row in of[each]):.0e}" if each in of else "" for each in columns)]
        for name, of in sorted(compared.items())
    ]
    text = f"Largest errors of attention:\n\n{markdown_table(['', *columns], lines)}\n\n"
    lines = [
        [name, f"{worst['error']:.1e}", f"{worst['bound']:.0e}"]
        for name, same in alike.items()
        for worst in [max(same, key=lambda row: row["error"] - row["bound"])]
    ]
    text += markdown_table(["", "largest error", "bound"], lines)
    text += f"\n\n{times_table(rows)}\n\n"
    wrong = [row for row in rows if not row["ok"]]
    said = [
        f"WRONG {row['part']}: {row['name'][:120]} {row['error']} {row['detail'].partition(LINE)[0]}"
        for row in wrong[:20]
    ]
    return text + "\n".join([*said, f"{len(rows) - len(wrong)} of {len(rows)} rows are right"])


def card(results: Mapping[str, Any]) -> str:
    """The page of a run."""
    about = results["environment"]
    tables, _, wrong = summary(results["rows"]).rpartition("\n\n")
    versions = f"torch {about['torch']}, transformers {about['transformers']}; {about['date']}"
    text = f"# On a GPU\n\n{about['gpu']}; {versions}.\n\n`{about['command']}`\n\n{tables}\n\n```text\n{wrong}\n```\n"
    if earlier := results.get("earlier"):
        about = earlier["environment"]
        text += f"\n## Times of a longer run before it\n\n{about['date']}, `{about['command']}`\n\n"
        text += f"{times_table(earlier['rows'])}\n"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("device_check.json"), help="rows as JSON; .log is beside it")
    parser.add_argument(
        "--schemes",
        nargs="+",
        choices=hf_relpos.schemes.SCHEMES,
        default=list(hf_relpos.schemes.SCHEMES),
        metavar="NAME",
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="parts, by beginnings of their names")
    parser.add_argument("--tiny", action="store_true", help="small models alone, and few calls for a time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parts that run side by side")
    parser.add_argument("--seconds", type=float, default=220, help="after which what still runs is ended")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # run it in this process
    args = parser.parse_args(arguments)
    if args.part:
        print_line = partial(print, flush=True)

        def ask() -> None:
            print_line("waits")
            sys.stdin.readline()

        run_part(Part(args.part, args.device, args.tiny, lambda row: print_line(json.dumps(row)), ask))
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU; --device cpu --tiny rehearses")
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    ran = {"gpu": gpu, "command": shlex.join(sys.argv), "protocol": median_seconds.__doc__}
    about = measuring.environment() | ran
    args.out.with_suffix(".log").write_text("")
    parent = Parent(args, about)
    parent.run_all([name for name in parts(args.schemes) if name.startswith(tuple(args.only))])
    print(json.dumps(about, ensure_ascii=False), summary(parent.rows), sep="\n\n")
    return not all(row["ok"] for row in parent.rows)


if __name__ == "__main__":
    sys.exit(main())
