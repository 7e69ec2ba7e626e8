"""The registry of families: the classes in `MODULES`.

All else follows from them: recognition of checkpoints, layouts in error messages, `hf-relpos families` and
docs/families.md.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from . import albert, alibi, bert, deberta, distilbert, gte, mpnet, nomic, roberta, roformer, xlm_roberta_flash, xlnet
from .family import Family, Layout
from .names import is_table


# In the order of docs/families.md.
MODULES = (bert, roberta, distilbert, albert, mpnet, alibi, deberta, roformer, xlnet, gte, nomic, xlm_roberta_flash)
# Families by `model_type`, or by another name if their model_type is BERT's.
FAMILIES: dict[str, type[Family]] = {
    kind.name: kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Family) and kind.name
}
# Layouts that are not read.
OTHER_LAYOUTS = {
    Layout("a model with adapters of PEFT in it", (r"\.(base_layer|lora_A\..*)\.weight$",)): (
        "merge the adapters (`merge_and_unload()` of PEFT) and save the model again"
    ),
    Layout("ModernBERT", (r"\blayers\.\d+\.attn\.Wqkv\.", r"\blayers\.\d+\.mlp\.Wi\.")): (
        "with model_type = 'modernbert' in its config.json, AutoModel of Transformers reads it, and hf_relpos does "
        "not yet"
    ),
}
# Layouts of the families, the most specific first.
LAYOUTS = sorted({family.layout for family in FAMILIES.values() if family.layout}, key=lambda each: -len(each.tensors))


def family_of(config: Mapping[str, Any], names: Iterable[str] = ()) -> tuple[str, str]:
    """The name of a checkpoint's family, or its model_type if that is not known, and the field or tensor that tells.

    Args:
        config: content of config.json.
        names: names of the tensors in its files; () if not known.
    """
    model_type, names = str(config.get("model_type") or "bert"), list(names)  # the first BERT files lack it
    # tensors tell more than a field: those of JinaBERT beside a field of NEZHA
    for name, family in sorted(FAMILIES.items(), key=lambda item: not item[1].told_by_tensors):
        if family.marks == model_type and (found := family.marked(config, names)):
            return name, f"{found} marks a {name.upper()}"
    return model_type, f"model_type = {model_type!r}"


def layout_of(names: Iterable[str]) -> Layout | None:
    """The layout of tensors with these names, if it is known and not stock BERT's."""
    names = list(names)
    return next((layout for layout in (*OTHER_LAYOUTS, *LAYOUTS) if layout.find(names)), None)


def model_types(layout: Layout) -> list[str]:
    """Values of `model_type` of checkpoints with a layout."""
    names = [name for name, family in FAMILIES.items() if family.layout == layout]
    return list(dict.fromkeys(FAMILIES[name].marks if FAMILIES[name].told_by_tensors else name for name in names))


def resemblance(names: Iterable[str], source: object, model_type: str = "", missing: Collection[str] = ()) -> str:
    """A sentence about the layout of tensors with these names and what reads them; empty for an unknown layout.

    Args:
        source: the checkpoint, for the commands.
        model_type: the current model_type of its configuration, which the sentence must not suggest.
        missing: names of tensors that a BERT lacks: if its table of positions alone, there is a sentence on NEZHA.
    """
    layout = layout_of(names)
    if layout is None or model_type in model_types(layout):
        if not missing or not all(map(is_table, missing)):
            return ""
        nezha = f"set model_type = 'nezha' in its config.json, and `hf-relpos convert {source} OUT` converts it"
        return f"NEZHA has no such table: if this is one, {nezha}; if not, restore the file"
    if layout in OTHER_LAYOUTS:
        return f"The weights look like {layout.name}; {OTHER_LAYOUTS[layout]}"
    is_direct = any(family.read_directly for family in FAMILIES.values() if family.layout == layout)
    reads = "from_pretrained of our classes reads it where hf_relpos is installed, and " if is_direct else ""
    said = f"The weights look like {layout.name}; with model_type = {' or '.join(map(repr, model_types(layout)))}"
    return f"{said} in its config.json, {reads}`hf-relpos convert {source} OUT` converts it"
