"""Rows of the table of families in docs/families.md and `hf-relpos families`."""

import re

from transformers import CONFIG_MAPPING

from .family import COUNTERPARTS, Family
from .registry import FAMILIES


def example(name: str) -> Family:
    """A checkpoint like the published ones of a family, by its configuration."""
    known = CONFIG_MAPPING[name if name in CONFIG_MAPPING else "bert"]().to_dict()
    return FAMILIES[name]({**known, **FAMILIES[name].defaults, **FAMILIES[name].published})


def told_by(family: Family) -> str:
    """The fields and tensors by which a checkpoint of the family is recognised."""
    signs = [f"`{family.marker}`"] if family.marker else []
    if family.told_by_tensors and family.layout:
        names = [re.sub(r"\W+", ".", mark.split("|")[0]).strip(".") for mark in family.layout.tensors]
        signs.append("tensors " + " and ".join(f"`{each}`" for each in names))
    if family.name in CONFIG_MAPPING or not signs:
        signs.insert(0, f"`model_type = {family.name!r}`")
    return " or ".join(signs)


def positions(family: Family) -> str:
    """The positions of its published checkpoints, and further ones of Transformers ≤ 4.57."""
    kinds = ["absolute"] if family.positions.absolute else []
    if family.positions.scheme is not None:
        kinds.append(f"`{family.positions.scheme}`")
    return " + ".join(kinds) + "".join(f", `{kind}`" for kind in family.legacy_types)


def heads(family: Family) -> str:
    """The heads that are kept, without the prefix of their names."""
    names = dict.fromkeys(name.removeprefix(family.class_prefixes[0]) for name in family.heads())
    return ", ".join(name.removeprefix("For") for name in names if name in COUNTERPARTS)


def row(name: str) -> dict[str, str]:
    """The cells of a family by column, in Markdown."""
    family = example(name)
    is_direct = family.read_directly or name == "bert"
    return {
        "checkpoints": family.title,
        "told by": told_by(family),
        "heads": heads(family),
        "positions": positions(family),
        "by": "convert, `from_pretrained`" if is_direct else "convert",
        "compared with": "stored outputs" if family.stock is None else f"`{family.stock}` of Transformers",
    }
