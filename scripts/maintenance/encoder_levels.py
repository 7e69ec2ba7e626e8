"""Run `optimize` on every text model of Transformers, and write at which level each one is: docs/results/levels.json.

    python scripts/maintenance/encoder_levels.py                       # and its card

`tests/text_models.py` builds them, tiny and random; `tests/test_text_models.py` compares them with this file.
"""

import collections
import sys
from pathlib import Path
from typing import Any

import transformers
from scheme_report import table
from write_cards import publish

from hf_relpos.console import markdown_table


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "levels.json"
KINDS = ("encoder", "masked LM", "classifier")
HEAD = """# The level of each text model of Transformers under `optimize`

Written by `scripts/maintenance/encoder_levels.py`: PyTorch {torch}, Transformers {transformers}, {date}.

Every class of Transformers' AutoModel, AutoModelForTextEncoding, AutoModelForMaskedLM and
AutoModelForSequenceClassification that takes tokens and a mask is built tiny and random, and called before and after
[`optimize`](../live.md) with batches padded on the right and on the left, and with one padded row. Outputs at tokens
differ by at most {worst:.0e} of the largest value.

"""


def measured() -> dict[str, Any]:
    """What optimize makes of the classes; and why others are not among them."""
    sys.path.append(str(ROOT / "tests"))
    from text_models import measure, named

    found = {name: {"kind": kind, **measure(name)} for kind, name in named()}
    return {
        "classes": {name: each for name, each in found.items() if each["level"] is not None},
        "others": {name: each["reason"] for name, each in found.items() if each["level"] is None},
    }


def card(stored: dict[str, Any]) -> str:
    """The Markdown file."""
    names = collections.defaultdict(list)
    for name, each in stored["classes"].items():
        where = f"{each['level']}, {each['padding']}" if each["level"] else f"left alone: {each['reason']}"
        names[where].append((each["kind"], name))
    rows = [
        [where, *(str(sum(kind == each for each, _ in names[where])) for kind in KINDS)]
        for where in sorted(names, key=lambda where: (where.startswith("left"), -len(names[where])))
    ]
    worst = max(each["difference"] for each in stored["classes"].values())
    text = HEAD.format(**stored["about"], worst=worst)
    text += markdown_table(["level, and where padding is taken out", *(f"{kind}s" for kind in KINDS)], rows)
    text += "\n\n## Names\n\n"
    lists = [
        [where, ", ".join(name.removesuffix("Model") for kind, name in names[where] if kind == KINDS[0])]
        for where, *_ in rows
    ]
    text += table(["level", "encoders"], [each for each in lists if each[1]])
    others = ", ".join(name.removesuffix("Model") for name in stored["others"])
    return text + f"\nNot tried, since they need other inputs or do not fit the sizes of the test: {others}.\n"


def main() -> None:
    """Measure, and write figures and card."""
    transformers.logging.set_verbosity_error()
    publish(RESULTS, measured())


if __name__ == "__main__":
    main()
