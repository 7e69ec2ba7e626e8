"""Write what the schemes say of themselves: docs/schemes.md and its pictures.

    python scripts/maintenance/scheme_report.py          # all of it, or: make schemes; needs the extra `plot`
    python scripts/maintenance/scheme_report.py --check  # exit code 1 if a file is stale; measures and draws nothing

Terms are those of a fresh layer, with the default options. The error is the largest that `parity` of the scheme's test
returns for its `CASES`. The original is `Scheme.original`, or what a script of scripts/maintenance/golden ran: its
docstring names it after "Original:".
"""

import argparse
import ast
import importlib
import io
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
from scheme_scores import plot_layer, record_calls
from transformers.utils import logging

from hf_relpos import RelPosBertConfig, RelPosBertModel
from hf_relpos.models.capabilities import supported_implementations
from hf_relpos.schemes import SCHEMES
from hf_relpos.schemes.registry import build_input, build_scheme, build_shared
from hf_relpos.schemes.scheme import OUT_OF_RANGE


ROOT = Path(__file__).resolve().parents[2]
CARD = ROOT / "docs" / "schemes.md"
PICTURES = CARD.with_suffix("")  # a folder, one picture for each scheme
UNMEASURED = "*"
ATTENTION = ("relpos", "eager", "sdpa", "flex_attention")
CARD_HEAD = """# Position schemes

All position schemes with their sources and limits, to look one up ([which one to try](choose.md)). Written by `make
schemes`, with default options; `hf-relpos schemes NAME` lists the options.

- **terms**: letters of [the formula](how_it_works.md#the-formula); *input*: vectors added to the embeddings.
- **parameters**: added to BERT-base (12 layers, D = 768, H = 12, P = 512); shared ones are counted once.
- **error**: largest absolute difference from the original code, on stored outputs, rounded up.

"""
BACKENDS_HEAD = "\n`relpos` and `eager` compute all schemes. Schemes that the others do not compute:\n\n"
RANGE_HEAD = """
## Range, order and longer inputs

`position_options={"out_of_range": …}` sets what the terms do beyond the trained range:

"""
ORDER_HEAD = """
Symmetric schemes do not tell left from right: without a causal mask, a reversed text gives reversed outputs.
They are {}.

What the sources claim for inputs longer than those of training; of `harmonic` and `tables`, what we do:

"""
CLAIM = re.compile(r"On longer inputs[^:]*: (.+)\.", re.DOTALL)  # at the end of a docstring
PLOTS_HEAD = """
## What each scheme adds to the score

A new layer with 12 heads; learned tables are noise. Each row is a head and shows what is added to the scores of the
middle query of 64 tokens, over r = j − i, minus its mean. Hidden keys are grey.

- q·A and k·B: for the mean query and key of random tokens.
- Rotations and gains: the change in the product of a unit vector with itself.
- Vectors added to the input: cosines of all pairs.
- Grid schemes: 8 × 8 tokens. `relation`: edges to the next and to the fourth token.

V acts on the values and is not shown.
"""


# Fields of Terms, and their letters in the formula.
LETTERS = {
    "query_table": "A",
    "key_table": "B",
    "content_bias": "u",
    "scaled_bias": "c",
    "bias": "c'",
    "dense": "dense c'",
    "value_table": "V",
    "gain": "gain",
    "feature_gain": "gain",
    "allow": "allow",
    "rotate": "rotate",
}


def small_model(name: str) -> RelPosBertModel:
    """One layer with the heads of BERT-base."""
    sizes = {"vocab_size": 100, "hidden_size": 192, "num_attention_heads": 12, "num_hidden_layers": 1}
    config = RelPosBertConfig(position_embedding_type=name, **sizes, intermediate_size=64)
    torch.manual_seed(0)
    return RelPosBertModel(config, add_pooling_layer=False)


def letters_of(model: RelPosBertModel) -> str:
    """Letters of the terms that a model has, in the order of the formula."""
    (call,), added = record_calls(model)
    present = [letter for field, letter in LETTERS.items() if getattr(call.terms, field) not in (None, ())]
    return ", ".join([*dict.fromkeys(present), *["input"] * (added is not None)])


def added_parameters(name: str) -> int:
    """What the scheme adds to BERT-base."""
    config = RelPosBertConfig(position_embedding_type=name)
    with torch.device("meta"):
        modules = [build_scheme(config) for _ in range(config.num_hidden_layers)]
        modules += [module for module in (build_shared(config), build_input(config)) if module is not None]
    return sum(parameter.numel() for parameter in torch.nn.ModuleList(modules).parameters())


def originals() -> dict[str, str]:
    """The code that each scheme is compared with: repository, commit or version, file."""
    by_scheme = {name: scheme.original for name, scheme in SCHEMES.items() if scheme.original is not None}
    for script in sorted((ROOT / "scripts" / "maintenance" / "golden").glob("*.py")):
        text = " ".join((ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split())
        stated = re.search(r"Original: (.+?)\.(?: |$)", text)
        if stated:
            original = re.sub(r"(commit [0-9a-f]{10})[0-9a-f]+", r"\1", stated[1])
            by_scheme |= dict.fromkeys(re.findall(r"(\w+)\.safetensors", text), original)
    return by_scheme


def error(name: str) -> float | None:
    """Largest error against the original, by the test of the scheme; None where there is nothing to compare with."""
    sys.path[:0] = [path for path in (f"{ROOT}/tests", f"{ROOT}/tests/schemes") if path not in sys.path]
    test = importlib.import_module(f"test_{SCHEMES[name].__module__.rpartition('.')[2]}")
    if not hasattr(test, "parity"):
        return None
    torch.manual_seed(0)
    return max(test.parity(case) for case in test.CASES)


def rounded_up(value: float | None) -> str:
    """One digit, so that the next run says the same: 3e-07."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    power = math.floor(math.log10(value))
    return f"{math.ceil(value / 10**power) * 10.0**power:.0e}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def out_of_range_table() -> str:
    """What happens past the trained range, and with which schemes."""
    rows = []
    for word, meaning in OUT_OF_RANGE.items():
        able = {name: scheme.out_of_range for name, scheme in SCHEMES.items() if word in scheme.out_of_range}
        default = ", ".join(f"`{name}`" for name, words in able.items() if words[0] == word)
        option = ", ".join(f"`{name}`" for name, words in able.items() if words[0] != word)
        rows.append([f"`{word}`", meaning, default or "–", option or "–"])
    return table(["`out_of_range`", "beyond the trained range", "default of", "also an option of"], rows)


def order_section() -> str:
    """Which schemes do not know directions, and what the source of each claims."""
    blind = [f"`{name}`" for name, scheme in SCHEMES.items() if scheme.is_symmetric_with(scheme.defaults())]
    said = {name: CLAIM.search(str(scheme.__doc__)) for name, scheme in SCHEMES.items()}
    rows = [[f"`{name}`", " ".join(found[1].split())] for name, found in said.items() if found]
    return ORDER_HEAD.format(", ".join(blind)) + table(["name", "on longer inputs"], rows)


def report(measure: bool) -> str:
    """The text of the card; with `measure` false, errors are left open."""
    made_with, full, without = originals(), [], defaultdict(list)
    for name, scheme in SCHEMES.items():
        model = small_model(name)
        able = supported_implementations(model.config)
        without[", ".join(f"`{each}`" for each in ATTENTION if each not in able)].append(name)
        original = made_with.get(name, "–")
        largest_error = UNMEASURED if name in made_with else "–"
        if measure:
            largest_error = rounded_up(error(name))
            if (largest_error == "–") != (name not in made_with):
                raise SystemExit(f"{name}: an original is named, but its test has no parity(case), or the reverse")
        full.append(
            [f"`{name}`", scheme.source, letters_of(model), f"{added_parameters(name):,}", largest_error, original]
        )
    header = ["name", "source", "terms", "parameters", "error", "original"]
    lines = [
        f"- not in {names}: {', '.join(f'`{each}`' for each in able)}\n" for names, able in without.items() if names
    ]
    card = CARD_HEAD + table(header, full) + BACKENDS_HEAD + "".join(lines)
    card += RANGE_HEAD + out_of_range_table() + order_section() + PLOTS_HEAD
    card += "".join(f"\n### {name}\n\n![{name}]({PICTURES.name}/{name}.png)\n" for name in SCHEMES)
    return card


def without_errors(card: str) -> str:
    """The card with every measured error replaced, since they differ from machine to machine."""
    return re.sub(r"\| (?:0|\de-\d+) \|(?=[^|]*\|$)", f"| {UNMEASURED} |", card, flags=re.MULTILINE)


def stale() -> list[str]:
    """Files that do not say what the schemes say."""
    card, files = report(measure=False), []
    if not CARD.exists() or without_errors(CARD.read_text(encoding="utf-8")) != card:
        files.append("docs/schemes.md")
    missing = [name for name in SCHEMES if not (PICTURES / f"{name}.png").exists()]
    return files + [f"docs/schemes/{name}.png" for name in missing]


def write_pictures() -> None:
    """One picture for each scheme, with a palette to keep the repository small."""
    from PIL import Image

    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in SCHEMES:
        drawn = io.BytesIO()
        plot_layer(small_model(name)).savefig(drawn, dpi=80)
        Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
            PICTURES / f"{name}.png", optimize=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the files are stale")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if arguments.check:
        files = stale()
        print("\n".join(f"{file} is stale: run make schemes" for file in files))
        return int(bool(files))
    card = report(measure=True)
    CARD.parent.mkdir(exist_ok=True)
    CARD.write_text(card, encoding="utf-8")
    write_pictures()
    return 0


if __name__ == "__main__":
    sys.exit(main())
