"""Write which checkpoints are read: docs/families.md, from the registry of families.

    python scripts/maintenance/family_report.py            # or: make families
    python scripts/maintenance/family_report.py --check    # exit code 1 if it is stale

What is refused is what a family says of a configuration in `PROBES`; a probe that it does not refuse any more is an
error. Heads that are missing are those of the classes in Transformers.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import transformers
from scheme_report import table

from hf_relpos.families.family import Family
from hf_relpos.families.registry import FAMILIES
from hf_relpos.families.table import example, row


ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "families.md"
# Configurations that a family refuses, each with the changes that make it refuse.
PROBES: dict[str, list[dict[str, Any]]] = {
    "nezha": [{"add_cross_attention": True}],
    "albert": [{"embedding_size": 768, "hidden_size": 768}],
    "mpnet": [{"relative_attention_num_buckets": 64}],
    "deberta-v2": [
        {"attention_head_size": 32, "num_attention_heads": 12, "hidden_size": 768},
        {"position_buckets": 256, "max_relative_positions": 128},
    ],
    "deberta": [{"talking_head": True}, {"pos_att_type": "c2p|p2p"}],
    "jinabert": [{"feed_forward_type": "swiglu"}],
    "mosaicbert": [{"hidden_act": "relu", "architectures": ["BertForMaskedLM"]}],
    "roformer": [{"rotary_value": True}],
    "xlnet": [{"attn_type": "uni"}, {"bi_data": True}, {"untie_r": False}],
    "new": [
        {"layer_norm_type": "rms_norm"},
        {"logn_attention_scale": True},
        {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}},
    ],
    "xlm_roberta_flash": [{"hidden_act": "relu"}],
    "nomic_bert": [{"num_experts": 8}, {"prenorm": True}, {"activation_function": "gelu"}],
}
# Rotary encoders that Transformers computes with SDPA and flash attention itself: titles by `model_type`. A test
# compares them with the installed release.
NATIVE = {
    "modernbert": "ModernBERT",
    "nomic_bert": "NomicBERT",
    "gte": "GTE",
    "eurobert": "EuroBERT",
    "jina_embeddings_v3": "Jina embeddings v3",
    "esm": "ESM-2",
}
HEAD = """# Checkpoints that can be read

Whether and how your checkpoint can be loaded, converted and exported. Written by `make families`.

- **recognised by**: a field of config.json, or tensors if the checkpoint calls itself `bert`.
- **heads**: the supported ones of BERT's nine (CausalLM: BERT's LMHeadModel).
- **positions**: absolute positions are replaced or kept by a conversion; a relative scheme is kept.
- **direct**: `from_pretrained` of hf_relpos reads the checkpoint. `hf-relpos convert` reads all of them.
- **compared with**: the class of Transformers that every conversion runs to check its result. –: tests compare with
  stored outputs of the original code; for GTE, NomicBERT and Jina also with Transformers' class of the same body.

"""
REFUSED_HEAD = """
## What is refused

`hf-relpos convert` and `from_pretrained` raise an error that gives the reason. If only the head is refused,
`architecture="…Model"` converts the encoder.

"""
NATIVE_HEAD = """
## Rotary classes of Transformers

Transformers computes these right; `hf_relpos.optimize` removes their padding on a CPU ([how](live.md)): """


def missing_heads(family: Family) -> list[str]:
    """Heads of the family's classes in Transformers that are not kept."""
    if family.stock is None:
        return []
    stem = family.class_prefixes[0]
    classes = [name for name in dir(transformers) if re.fullmatch(rf"{stem}(For[A-Z]\w+|LMHeadModel)", name)]
    return [name for name in classes if name not in family.heads()]


def refusals(name: str) -> list[str]:
    """Why checkpoints of the family are refused.

    Raises:
        SystemExit: for a probe that is not refused.
    """
    family, reasons = example(name), []
    for changes in PROBES.get(name, []):
        reason = type(family)({**family.config, **changes}).refusal()
        if not reason:
            raise SystemExit(f"PROBES[{name!r}]: {changes} is not refused any more; take it out")
        reasons.append(re.match(r"(?:[^:;{]|\{[^}]*\})*", reason)[0])  # the fields; the error says more
    missing = [f"`{each}`" for each in missing_heads(family)]
    return reasons + ([f"heads that compute something different: {', '.join(missing)}"] if missing else [])


def page_row(name: str) -> list[str]:
    """What the page says of a family: a row of the command line's table, shortened."""
    cells, stock = row(name), FAMILIES[name].stock
    every = row("bert")["heads"].replace("LMHeadModel", "CausalLM").split(", ")
    kept = cells["heads"].replace("LMHeadModel", "CausalLM").split(", ")
    lacking = [head for head in every if head not in kept]
    if set(kept) <= set(every) and len(lacking) < len(kept):
        cells["heads"] = f"all but {', '.join(lacking)}" if lacking else "all"
    return [
        cells["checkpoints"],
        cells["told by"].replace("model_type = ", "model_type="),
        cells["heads"],
        cells["positions"],
        "✓" if "from_pretrained" in cells["by"] else "–",
        "–" if stock is None else f"`{stock}`",
    ]


def page() -> str:
    """docs/families.md."""
    rows = [page_row(name) for name in FAMILIES]
    text = HEAD + table(["checkpoints", "recognised by", "heads", "positions", "direct", "compared with"], rows)
    refused = [[family.title, "; ".join(refusals(name))] for name, family in FAMILIES.items()]
    text += REFUSED_HEAD + table(["checkpoints", "refused"], [each for each in refused if each[1]])
    return text + NATIVE_HEAD + ", ".join(f"{title} (`{kind}`)" for kind, title in NATIVE.items()) + ".\n"


def is_stale() -> bool:
    """Whether the page does not say what the families say."""
    return not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if it is stale")
    if parser.parse_args().check:
        if is_stale():
            sys.exit("stale: docs/families.md; run: make families")
        return
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
