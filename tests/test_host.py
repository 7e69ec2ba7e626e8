"""What the package uses of other libraries beyond their documented interfaces, and keywords that nobody knows.

`make test`, `make test-floor` and `make test-newest` walk the declarations on three releases.
"""

import ast
from pathlib import Path

import pytest
import torch
import transformers
from oracles import tiny_model

import hf_relpos
from hf_relpos import RelPosBertLMHeadModel
from hf_relpos.host.declarations import NEEDS, Need, missing
from hf_relpos.host.transformers import CACHE_NAMES, one_cache
from hf_relpos.models.modeling_relpos_bert import HEADS


ROOT = Path(hf_relpos.__file__).parent
# What Transformers documents for code of others, and modules of its classes of outputs.
DOCUMENTED = {
    "transformers": None,
    "transformers.cache_utils": {"Cache", "DynamicCache", "EncoderDecoderCache"},
    "transformers.modeling_outputs": None,
    "transformers.utils": {"ModelOutput", "is_peft_available", "logging"},
}


def test_nothing_is_missing():
    assert missing() == []


LAYER = "transformers.models.bert.modeling_bert:BertLayer.forward"


CHANGES = [
    (Need("transformers.gone:BertModel", without="x stops"), "has no transformers.gone:BertModel; without it, x"),
    (Need(LAYER, ("hidden_states", "kept|retained")), "has no argument kept or retained (it has self, hidden"),
]


@pytest.mark.parametrize("need, line", CHANGES)
def test_a_change_of_the_host_is_one_line(need, line):
    assert line in need.missing() and "\n" not in need.missing()
    assert need.missing().startswith(f"transformers {transformers.__version__}")


def test_what_comes_later_or_is_not_installed_is_not_missing():
    assert Need("transformers:gone", since="99.0").missing() is None
    assert Need("no_such_library:gone", since="1.0").missing() is None
    assert "has no transformers:gone" in Need("transformers:gone", since="99.0").lack()


def test_declarations_are_declared_once():
    paths = [need.path for need in NEEDS]
    assert len(paths) == len(set(paths))


def undocumented(path: Path) -> list[str]:
    """Imports of a file, and attributes of torch, that Transformers, PEFT and PyTorch do not document."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            module = node.module or ""
            library = module.partition(".")[0]
            names = {alias.name for alias in node.names}
            if library == "transformers" and not (module in DOCUMENTED and names <= (DOCUMENTED[module] or names)):
                found.append(f"{module}: {', '.join(sorted(names))}")
            elif library == "peft" and module != "peft":
                found.append(module)
            elif library == "torch" and any(part.startswith("_") for part in (*module.split("."), *names)):
                found.append(f"{module}: {', '.join(sorted(names))}")
        elif isinstance(node, ast.Attribute):
            chain = ast.unparse(node).split(".")
            private = [part for part in chain[1:] if part.startswith("_") and not part.startswith("__")]
            if chain[0] in ("torch", "transformers", "forward_ad", "output_capturing") and private:
                found.append(".".join(chain))
    return found


def test_only_the_host_uses_what_is_not_documented():
    files = [path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "host"]
    found = {str(path.relative_to(ROOT)): names for path in files if (names := undocumented(path))}
    assert not found


# Keywords --------------------------------------------------------------------------------------------------------


def arguments(auto: str) -> dict[str, torch.Tensor]:
    ids = torch.ones(1, 6, dtype=torch.long)
    return {"input_ids": ids[None] if auto == "AutoModelForMultipleChoice" else ids}


@pytest.mark.parametrize("word, meant", [("attention_masks", "attention_mask"), ("tokentype_ids", "token_type_ids")])
@pytest.mark.parametrize("auto", HEADS)
def test_a_misspelt_keyword_is_an_error(auto, word, meant):
    model = tiny_model(HEADS[auto], "shaw", is_decoder=auto == "AutoModelForCausalLM")
    model(**arguments(auto))
    with pytest.raises(TypeError, match=f"{word}.*did you mean '{meant}'"):
        model(**arguments(auto), **{word: torch.ones(1, 6)})


# Of PEFT, DataCollatorWithFlattening, pipelines, Trainer and Transformers' decorators.
HANDED_THROUGH = ("adapter_names", "cu_seq_lens_k", "cu_seq_lens_q", "debug_io", "ignore_index", "is_causal")
HANDED_THROUGH += ("max_length_k", "max_length_q", "num_items_in_batch", "output_attentions", "output_hidden_states")
HANDED_THROUGH += ("return_dict", "seq_idx", "shift_labels")


@pytest.mark.parametrize("auto", HEADS)
def test_what_others_hand_through_is_known(auto):
    """Without a value, which is what `is_causal` and lengths of packed rows have where they do not apply."""
    model = tiny_model(HEADS[auto], "t5", is_decoder=auto == "AutoModelForCausalLM")
    plain = model(**arguments(auto))
    given = model(**arguments(auto), **dict.fromkeys(HANDED_THROUGH))
    found = given if isinstance(given, tuple) else given.to_tuple()
    assert torch.equal(found[0], plain[0])


@pytest.mark.parametrize("is_decoder", [False, True])
def test_direction_is_said_by_the_configuration(is_decoder):
    model = tiny_model(RelPosBertLMHeadModel, "t5", is_decoder=is_decoder)
    ids = torch.ones(1, 4, dtype=torch.long)
    assert torch.equal(model(ids, is_causal=is_decoder).logits, model(ids).logits)
    with pytest.raises(ValueError, match=f"load the model with is_decoder={not is_decoder}"):
        model(ids, is_causal=not is_decoder)


@pytest.mark.filterwarnings("ignore:.past_key_values.:FutureWarning")
@pytest.mark.parametrize("scheme", ["t5", "relative_key", "rope", ["shaw", "t5"]], ids=str)
@torch.no_grad()
def test_a_cache_has_two_names(scheme):
    model = tiny_model(RelPosBertLMHeadModel, scheme, is_decoder=True)
    ids = torch.randint(1, 50, (2, 11))
    whole = model(ids, use_cache=False).logits
    for name in CACHE_NAMES:
        first = model(ids[:, :5], use_cache=True)
        made = first[1]
        assert made is first.past_key_values
        rest = model(ids[:, 5:], **{name: made}).logits
        assert (rest - whole[:, 5:]).abs().max() <= 1e-5
    with pytest.raises(ValueError, match="two names of one argument"):
        one_cache(made, made)
