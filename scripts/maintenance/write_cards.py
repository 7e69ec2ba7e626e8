"""Write the cards of docs/results from the results beside them; measures nothing.

    python scripts/maintenance/write_cards.py            # after a change of what a card says
    python scripts/maintenance/write_cards.py --check    # exit code 1 if a card is not what its results give

Notes below the line `<!-- notes -->` are kept. Pictures are drawn by the experiments themselves.
"""

import argparse
import datetime
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_relpos.files import write_json, write_text


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
sys.path.append(str(ROOT / "scripts" / "benchmarks"))  # their modules write their cards


# Results to the module whose function `card` makes their card; its `CARD_PATH`, a path below docs, where it has one.
CARDS = {
    "benchmarks/conversion.json": "bench_conversion",
    "benchmarks/corpus.json": "bench_corpus",
    "benchmarks/cpu-attention.json": "bench_attention",
    "benchmarks/cpu-encoder.json": "bench_encoder",
    "benchmarks/documents.json": "bench_documents",
    "benchmarks/finetuning.json": "bench_finetuning",
    "benchmarks/gliner.json": "bench_gliner",
    "benchmarks/gpu.json": "device_check",
    "benchmarks/heads.json": "bench_heads",
    "benchmarks/join.json": "bench_join",
    "benchmarks/passkeys.json": "bench_passkeys",
    "benchmarks/probes.json": "probe_schemes",
    "families.json": "family_parity",
    "levels.json": "encoder_levels",
    "fuzz.json": "reliability",
    "mutants.json": "mutants",
}


def cards(folder: Path = RESULTS) -> dict[Path, str]:
    """The cards of all results that exist, with their notes."""
    from shared.reports import keep_notes

    texts = {}
    for name, module in CARDS.items():
        results = folder / name
        if not results.is_file():
            continue
        writer = importlib.import_module(module)
        path = folder.parent / writer.CARD_PATH if hasattr(writer, "CARD_PATH") else results.with_suffix(".md")
        text = writer.card(json.loads(results.read_text(encoding="utf-8")))
        texts[path] = keep_notes(text, path)
    return texts


def publish(path: Path, content: dict[str, Any], **about: str) -> None:
    """Write results with versions and the date, and the cards that are stale by then."""
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    about["date"] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    write_json(path, {"about": about, **content})
    for card, text in stale_cards().items():
        write_text(card, text)


def stale_cards() -> dict[Path, str]:
    """The cards that are not what their results give."""
    return {
        path: text for path, text in cards().items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a card is stale")
    args = parser.parse_args()
    stale = stale_cards()
    for path, text in stale.items():
        print(f"{path} {'is stale: run python scripts/maintenance/write_cards.py' if args.check else 'is written'}")
        if not args.check:
            write_text(path, text)
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
