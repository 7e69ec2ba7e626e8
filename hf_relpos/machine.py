"""Check this machine: `self_check`, and the command `hf-relpos doctor --check`.

A release of PyTorch or Transformers, a processor or a GPU that nobody tested is checked in half a minute: everything
that this package computes faster is compared with what computes it plainly, on tiny models with random weights.
"""

import dataclasses
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

from .host.declarations import LIVE, NEEDS, missing
from .host.transformers import CACHE_NAMES
from .live import optimize
from .models.capabilities import explain_backend, probe_call
from .models.configuration_relpos_bert import RelPosBertConfig
from .models.modeling_relpos_bert import RelPosBertLMHeadModel, RelPosBertModel
from .schemes.registry import SCHEMES


# Largest error, as a share of the largest value.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
INT8_COSINE = 0.99  # of the states of random weights, which round worse than trained ones
SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
VOCABULARY = 60
# Tokens of a row, and the attention window: with them each backend of the CPU has its turn.
SHAPES = ((24, None), (320, None), (640, 32))
# Stock encoders that `optimize` knows, by `model_type`, with fields of their configurations.
DISENTANGLED = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
STOCK: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
    "camembert": {"pad_token_id": 1},
    "electra": {"embedding_size": 32},
    "ernie": {},
    "distilbert": {"hidden_dim": 48},
    "mpnet": {"pad_token_id": 1},
    "deberta": DISENTANGLED,
    "deberta-v2": {**DISENTANGLED, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "roformer": {"embedding_size": 32},
    "xlnet": {"d_inner": 48, "d_head": 16},
    "t5": {"d_ff": 48, "d_kv": 16},
    "mt5": {"d_ff": 48, "d_kv": 16},
    "modernbert": {"pad_token_id": 0, "local_attention": 8},
    "nomic_bert": {},
    "gte": {"pad_token_id": 0},
    "eurobert": {"pad_token_id": 0},
    "jina_embeddings_v3": {"pad_token_id": 0},
    "esm": {"pad_token_id": 1, "position_embedding_type": "rotary"},
    "umt5": {"d_ff": 48, "d_kv": 16},
}
for _kind, _name in (("gte", "GteModel"), ("umt5", "UMT5Stack"), ("esm", "EsmEncoder")):
    if not LIVE[_name].is_released:  # the installed Transformers is too old
        del STOCK[_kind]
ELSEWHERE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_relpos":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModel
folder = sys.argv[1]
model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
case = torch.load(folder + "/case.pt", weights_only=True)
with torch.no_grad():
    case["found"] = model(case["ids"], attention_mask=case["mask"])[0]
torch.save(case, folder + "/case.pt")
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
    with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
        saved = _saved(folder)  # beside the others, since it takes long to import PyTorch
        yield _checked("host", "declarations", _host)
        for device in devices:
            kinds = schemes_of_every_kind()
            for scheme in SCHEMES if device == "cpu" else kinds:  # elsewhere each takes seconds to compile
                yield _checked("attention", f"{scheme}, {device}", partial(_attention, scheme, device))
            for scheme in kinds:
                yield _checked("cache", f"{scheme}, {device}", partial(_cache, scheme, device))
        for kind, fields in STOCK.items():
            yield _checked("live", kind, partial(_live, kind, fields))
        yield _checked("saved code", "without hf_relpos", partial(_elsewhere, folder, *saved))


def schemes_of_every_kind() -> list[str]:
    """A scheme for each combination of terms that a scheme has, of those that read nothing but tokens."""
    found: dict[frozenset[str], str] = {}
    for scheme, kind in SCHEMES.items():
        if not kind.required_inputs:
            found.setdefault(_terms_of(scheme), scheme)
    return list(found.values())


def _terms_of(scheme: str) -> frozenset[str]:
    """The terms of the formula that a scheme has."""
    terms = probe_call(RelPosBertConfig(**SIZES, position_embedding_type=scheme)).terms
    values = {field.name: getattr(terms, field.name) for field in dataclasses.fields(terms)}
    return frozenset(name for name, value in values.items() if value is not None and not (value == ()))


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
        batch = _batch(length, device)
        batch |= _extra_inputs(model.config, length, device)
        expected = _states_and_gradients(model, batch, "eager")
        found = _states_and_gradients(model, batch, "relpos")
        explanation = explain_backend(model, len(batch["input_ids"]), length, device, gradients=True)
        name = explanation.partition("\n")[0].partition(" takes ")[2] + (" in a window" if window else "")
        error = _compare(found, expected, f"{name}, {length} tokens")
        backends[name] = max(error, backends.get(name, 0.0))
        with torch.no_grad():
            states = model.bfloat16()(**batch)[0].float() * batch["attention_mask"][..., None]
        _compare([states], expected[:1], f"{name}, {length} tokens, bfloat16", TOLERANCE[torch.bfloat16])
    return ", ".join(f"{name} {error:.0e}" for name, error in backends.items())


def _cache(scheme: str, device: str) -> str:
    """Two calls with a cache against one without."""
    model = _own(RelPosBertLMHeadModel, scheme, is_decoder=True).to(device)
    ids = _batch(12, device)["input_ids"]
    errors = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the earlier name
        whole = model(ids, use_cache=False).logits
        for name in CACHE_NAMES:
            first = model(ids[:, :7], use_cache=True)
            rest = model(ids[:, 7:], use_cache=True, **{name: first[1]})
            errors.append(_compare([first.logits, rest.logits], [whole[:, :7], whole[:, 7:]], name))
    return f"as without one, {max(errors):.0e}"


def _saved(folder: str) -> tuple["subprocess.Popen[str]", list[torch.Tensor]]:
    """Save a model, and load it in another process, which cannot import this package and runs the saved code.

    Returns:
        The process, and the states that it is to find.
    """
    model = _own(RelPosBertModel, max(schemes_of_every_kind(), key=lambda scheme: len(_terms_of(scheme))))
    batch = _batch(24, "cpu")
    with torch.no_grad():
        expected = model(**batch)[0] * batch["attention_mask"][..., None]
    model.save_pretrained(folder)
    torch.save({"ids": batch["input_ids"], "mask": batch["attention_mask"]}, Path(folder, "case.pt"))
    command = [sys.executable, "-c", ELSEWHERE, folder]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder), [expected]


def _elsewhere(folder: str, process: "subprocess.Popen[str]", expected: list[torch.Tensor]) -> str:
    """What that process found against what is right."""
    said = process.communicate()[1].strip()
    if process.returncode:
        raise WrongError((said or "the process ended without a word").splitlines()[-1])
    case = torch.load(Path(folder, "case.pt"), weights_only=True)
    return f"as here, {_compare([case['found'] * case['mask'][..., None]], expected, 'the saved folder'):.0e}"


def _live(kind: str, fields: Mapping[str, Any]) -> str:
    """A stock encoder with `optimize` against itself before, in a batch with padding."""
    sizes = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0, **fields}
    if kind == "xlnet":  # it has no limit, and rejects one
        del sizes["max_position_embeddings"]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = transformers.AutoModelForTextEncoding if kind in ("t5", "mt5", "umt5") else transformers.AutoModel
    model = _stirred(auto.from_config(config))
    batch = _batch(40, "cpu", config.pad_token_id)
    expected = _states_and_gradients(model, batch)
    with optimize(model) as handle:
        if not handle.encoders:
            raise WrongError(f"optimize left it as it was: {handle}")
        error = _compare(_states_and_gradients(model, batch), expected, "float32")
    with optimize(model, precision="int8"), torch.no_grad():
        found = model(**batch)[0] * batch["attention_mask"][..., None]
    cosine = torch.cosine_similarity(found.flatten(), expected[0].flatten(), dim=0).item()
    if not cosine >= INT8_COSINE:
        raise WrongError(f"int8: cosine {cosine:.4f} with float32, less than {INT8_COSINE}")
    return f"as stock, {error:.0e}; int8, cosine {cosine:.4f}"


def _own(head: type[Any], scheme: str, **fields: Any) -> Any:
    """A tiny model of this package with random weights."""
    fixed = {"vocab_size": VOCABULARY, "max_position_embeddings": 640, "attention_probs_dropout_prob": 0.0}
    config = RelPosBertConfig(**SIZES, **fixed, position_embedding_type=scheme, **fields)
    return _stirred(head(config))


def _stirred(model: Any) -> Any:
    """The model in evaluation, with noise on its parameters: relative terms begin at zero, or too small to be seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def _batch(length: int, device: str, pad: int = 0) -> dict[str, torch.Tensor]:
    """Three rows of random tokens, of which two have padding at the end."""
    lengths = torch.tensor([length, length // 3, length - 2])
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.where(mask > 0, torch.randint(2, VOCABULARY, mask.shape), pad)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _extra_inputs(config: RelPosBertConfig, length: int, device: str) -> dict[str, torch.Tensor]:
    """What a scheme reads beside the tokens: labels of relations, or rows and columns of a grid."""
    index, found = torch.arange(length, device=device), {}
    if "relation_ids" in config.required_inputs:
        found["relation_ids"] = ((index[None, :] - index[:, None]) % 2).expand(3, -1, -1)
    if "grid" in config.required_inputs:
        found["position_ids"] = torch.stack([index // 8, index % 8], dim=-1).expand(3, -1, -1)
    return found


def _states_and_gradients(model: Any, batch: Mapping[str, Any], implementation: str | None = None) -> list[Any]:
    """The states of real tokens, and the gradients of all parameters as one vector."""
    if implementation is not None:
        model.set_attn_implementation(implementation)
    model.zero_grad()
    states = model(**batch)[0] * batch["attention_mask"][..., None]
    (states * torch.linspace(-1, 1, states.shape[-1], device=states.device)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return [states.detach(), torch.cat(gradients)]


def _compare(found: list[Any], expected: list[Any], what: str, tolerance: float = TOLERANCE[torch.float32]) -> float:
    """The largest error as a share of the largest value.

    Raises:
        WrongError: if it is larger than the tolerance, or not a number.
    """
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    for error in errors:
        if not error <= tolerance:
            raise WrongError(f"{what}: error {error:.1e} of the largest value, more than {tolerance:.0e}")
    return max(errors)
