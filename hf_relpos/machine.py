"""Check this machine: `self_check`, and the command `hf-relpos doctor --check`.

A release of PyTorch or Transformers, a processor or a GPU that nobody tested is checked in half a minute: everything
that this package computes faster is compared with what computes it plainly, on tiny models with random weights.
"""

import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from .host.declarations import CACHE, NEEDS, missing
from .live import optimize
from .models.capabilities import explain_backend, probe_call
from .models.configuration_relpos_bert import RelPosBertConfig
from .models.modeling_relpos_bert import RelPosBertLMHeadModel, RelPosBertModel
from .schemes.registry import DEFAULT_SCHEME, SCHEMES


# Largest error, as a share of the largest value.
TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 5e-2
INT8_COSINE = 0.99  # of the states of random weights, which round worse than trained ones
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
VOCABULARY = 60
# Tokens of a row, and the attention window: with them each backend of the CPU has its turn.
SHAPES = ((24, None), (320, None), (640, 32))
# Stock encoders that `optimize` knows, by `model_type`, with fields of their configurations.
LIKE_BERT = ("bert", "roberta", "xlm-roberta", "camembert", "ernie", "mpnet", "nomic_bert", "gte", "eurobert")
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
STOCK: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in (*LIKE_BERT, "jina_embeddings_v3")},
    **{kind: {"embedding_size": 32} for kind in ("electra", "roformer")},
    **{kind: {"d_ff": 48, "d_kv": 16} for kind in ("t5", "mt5", "umt5")},
    "distilbert": {"hidden_dim": 48},
    "deberta": DISENTANGLED,
    "deberta-v2": {**DISENTANGLED, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "xlnet": {"d_inner": 48, "d_head": 16},
    "modernbert": {"local_attention": 8},
    "esm": {"position_embedding_type": "rotary"},
}
if "gte" not in transformers.CONFIG_MAPPING:  # the installed Transformers is older than 5.18
    del STOCK["gte"]
# Run where this package cannot be imported: prints the error of the outputs of a saved folder.
ELSEWHERE = """
import sys
sys.modules["hf_relpos"] = None
import torch
from transformers import AutoModel
folder = sys.argv[1]
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
ids, expected = torch.load(folder + "/case.pt", weights_only=True)
with torch.no_grad():
    print(float((model(ids)[0] - expected).abs().max() / expected.abs().max()))
"""


@dataclass(frozen=True)
class Check:
    """One line of `self_check`.

    Attributes:
        kind: what was checked: "host", "attention", "cache", "saved code", or "live".
        name: of the scheme or encoder, with the device.
        passed: whether it is right.
        detail: what was compared, and the largest error; or what is wrong.
        seconds: how long it took.
    """

    kind: str
    name: str
    passed: bool
    detail: str
    seconds: float

    def __str__(self) -> str:
        return f"{'ok    ' if self.passed else 'WRONG '} {self.kind:11}{self.name:28}{self.detail}"


def self_check(devices: Iterable[str] | None = None) -> list[Check]:
    """Check everything that depends on this machine and its releases of PyTorch and Transformers, in half a minute.

    - what the package uses of other libraries beyond their documented interfaces is there;
    - attention of each scheme on each backend that calls would take, against eager attention, with gradients, in
      float32 and bfloat16;
    - decoding with a cache, under each of its names, against one call without;
    - a saved folder in a process that cannot import this package;
    - `optimize` of each stock encoder, in float32 and int8, with padding, forward and gradients, against stock.

    Args:
        devices: "cpu", "cuda", "mps"; None for the CPU and the accelerator of this machine.

    Returns:
        A check for each of these; it is right where all have `passed`.

    Example:

    ```python
    >>> import hf_relpos

    >>> all(check.passed for check in hf_relpos.self_check())
    True
    ```
    """
    return list(checks(devices))


def checks(devices: Iterable[str] | None = None) -> Iterator[Check]:
    """The checks of `self_check`, one after the other, as each is done."""
    if devices is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        devices = ["cpu", *([accelerator.type] if accelerator is not None else [])]
    with torch.random.fork_rng():
        yield _checked("host", "declarations", _host)
        for device in devices:
            kinds = _schemes_of_every_kind()
            for scheme in SCHEMES if device == "cpu" else kinds:  # elsewhere each takes seconds to compile
                yield _checked("attention", f"{scheme}, {device}", partial(_attention, scheme, device))
            for scheme in kinds:
                yield _checked("cache", f"{scheme}, {device}", partial(_cache, scheme, device))
        for kind, fields in STOCK.items():
            yield _checked("live", kind, partial(_live, kind, fields))
        yield _checked("saved code", "without hf_relpos", _saved_code)


def _schemes_of_every_kind() -> list[str]:
    """A scheme for each combination of terms that a scheme has, of those that read nothing but tokens."""
    found: dict[frozenset[str], str] = {}
    for scheme, kind in SCHEMES.items():
        if not kind.required_inputs:
            terms = vars(probe_call(RelPosBertConfig(**SIZES, position_embedding_type=scheme)).terms)
            found.setdefault(frozenset(name for name, term in terms.items() if term not in (None, ())), scheme)
    return list(found.values())


def _checked(kind: str, name: str, check: Callable[[], str]) -> Check:
    """Run a check, which returns its detail, and raises an exception for what is wrong."""
    torch.manual_seed(0)
    began = time.perf_counter()
    try:
        passed, detail = True, check()
    except Exception as error:  # whatever a new release raises is what this is for
        said = str(error).strip() or repr(error)
        passed, detail = False, said if isinstance(error, WrongError) else f"{type(error).__name__}: {said}"
    return Check(kind, name, passed, detail, time.perf_counter() - began)


class WrongError(Exception):
    """A number that differs by more than rounding."""


def _host() -> str:
    if lines := missing():
        raise WrongError("; ".join(lines))
    return f"all {len(NEEDS)} names and arguments are there"


def _attention(scheme: str, device: str) -> str:
    """Two layers of a scheme on the backends that `relpos` takes, against eager attention."""
    backends: dict[str, float] = {}
    for length, window in SHAPES if device == "cpu" else SHAPES[1:]:
        model = _own(RelPosBertModel, scheme, attention_window=window).to(device)
        batch = _batch(length, device, model.config.required_inputs)
        model.set_attn_implementation("eager")
        expected = _states_and_gradients(model, batch)
        model.set_attn_implementation("relpos")
        found = _states_and_gradients(model, batch)
        explanation = explain_backend(model, len(batch["input_ids"]), length, device, gradients=True)
        name = explanation.partition("\n")[0].partition(" takes ")[2] + (" in a window" if window else "")
        error = _compare(found, expected, f"{name}, {length} tokens")
        backends[name] = max(error, backends.get(name, 0.0))
        rounded = _states(model.bfloat16(), batch).float()
        _compare([rounded], expected[:1], f"{name}, {length} tokens, bfloat16", BFLOAT16_TOLERANCE)
    return ", ".join(f"{name} {error:.0e}" for name, error in backends.items())


@torch.no_grad()
def _cache(scheme: str, device: str) -> str:
    """Two calls with a cache against one without."""
    model = _own(RelPosBertLMHeadModel, scheme, is_decoder=True).to(device)
    ids = _batch(12, device)["input_ids"]
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the earlier name
        whole = model(ids, use_cache=False).logits
        for name in CACHE.split("|"):
            first = model(ids[:, :7], use_cache=True)
            rest = model(ids[:, 7:], use_cache=True, **{name: first[1]})
            errors.append(_compare([first.logits, rest.logits], [whole[:, :7], whole[:, 7:]], name))
    return f"as without one, {max(errors):.0e}"


def _saved_code() -> str:
    """A saved model in another process, which cannot import this package and runs the saved code."""
    model, ids = _own(RelPosBertModel), _batch(24, "cpu")["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with torch.no_grad():
            torch.save((ids, model(ids)[0]), Path(folder, "case.pt"))
        command = [sys.executable, "-c", ELSEWHERE, folder]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise WrongError((done.stderr.strip() or "the process ended without a word").splitlines()[-1])
    return f"as here, {_within(float(done.stdout.split()[-1]), 'the saved folder'):.0e}"


def _live(kind: str, fields: Mapping[str, Any]) -> str:
    """A stock encoder with `optimize` against itself before, in a batch with padding."""
    model = _stock(kind, **fields)
    batch = _batch(40, "cpu")
    expected = _states_and_gradients(model, batch)
    with optimize(model) as handle:
        if not handle.encoders:
            raise WrongError(f"optimize left it as it was: {handle}")
        error = _compare(_states_and_gradients(model, batch), expected, "float32")
    with optimize(model, dtype="int8"):
        found = _states(model, batch)
    cosine = torch.cosine_similarity(found.flatten(), expected[0].flatten(), dim=0).item()
    if not cosine >= INT8_COSINE:
        raise WrongError(f"int8: cosine {cosine:.4f} with float32, less than {INT8_COSINE}")
    return f"as stock, {error:.0e}; int8, cosine {cosine:.4f}"


def _stock(kind: str, **fields: Any) -> Any:
    """A tiny stock encoder with random weights, by its `model_type`."""
    sizes = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0, **fields}
    if kind == "xlnet":  # it has no limit, and rejects one
        del sizes["max_position_embeddings"]
    auto = transformers.AutoModelForTextEncoding if kind in ("t5", "mt5", "umt5") else transformers.AutoModel
    return _stirred(auto.from_config(transformers.AutoConfig.for_model(kind, **sizes)))


def _own(head: type[Any], scheme: str = DEFAULT_SCHEME, **fields: Any) -> Any:
    """A tiny model of this package with random weights."""
    fields |= {"vocab_size": VOCABULARY, "max_position_embeddings": 640, "attention_probs_dropout_prob": 0.0}
    return _stirred(head(RelPosBertConfig(**SIZES, **fields, position_embedding_type=scheme)))


def _stirred(model: Any) -> Any:
    """The model in evaluation, with noise on its parameters: relative terms begin at zero, or too small to be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def _batch(length: int, device: str, others: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Three rows of random tokens, of which two have padding at the end, and what else a scheme reads."""
    lengths, index = torch.tensor([length, length // 3, length - 2]), torch.arange(length)
    mask = (index < lengths[:, None]).long()
    batch = {"input_ids": torch.randint(2, VOCABULARY, mask.shape) * mask, "attention_mask": mask}
    if "relation_ids" in others:
        batch["relation_ids"] = ((index[None, :] - index[:, None]) % 2).expand(3, -1, -1)
    if "grid" in others:
        batch["position_ids"] = torch.stack([index // 8, index % 8], dim=-1).expand(3, -1, -1)
    return {name: tensor.to(device) for name, tensor in batch.items()}


@torch.no_grad()
def _states(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The states of real tokens, zeros at padding."""
    states: torch.Tensor = model(**batch)[0] * batch["attention_mask"][..., None]
    return states


def _states_and_gradients(model: Any, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The states of real tokens, and the gradients of all parameters as one vector.

    They are those of a sum with random weights: with weights that all tokens share, gradients cancel in the softmax.
    """
    model.zero_grad()
    states = model(**batch)[0] * batch["attention_mask"][..., None]
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    (states * weights.to(states)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [states.detach(), torch.cat(gradients)]


def _compare(found: list[Any], expected: list[Any], what: str, tolerance: float = TOLERANCE) -> float:
    """The largest error as a share of the largest value."""
    pairs = zip(found, expected, strict=True)
    return max([_within(((a - b).abs().max() / b.abs().max()).item(), what, tolerance) for a, b in pairs])


def _within(error: float, what: str, tolerance: float = TOLERANCE) -> float:
    """The error, unless it is larger than the tolerance, or not a number."""
    if not error <= tolerance:
        raise WrongError(f"{what}: error {error:.1e} of the largest value, more than {tolerance:.0e}")
    return error
