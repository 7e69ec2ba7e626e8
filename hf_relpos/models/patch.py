"""Opt-in patch that makes stock BERT classes and Auto classes use `position_embedding_type`.

Transformers v5 ignores this field and loads such a checkpoint as an absolute BERT, with wrong outputs. Its load report
lists the tables of distances as UNEXPECTED; after `import hf_relpos` a warning says what that means.
Inside `patch_transformers()` the same code gets our classes, which subclass the stock ones:

    with patch_transformers():
        model = AutoModelForMaskedLM.from_pretrained("old/relative-bert")  # a RelPosBertForMaskedLM

The patch replaces two attributes of the nine stock heads, `__init__` and `from_pretrained`, the second also of
XLM-RoBERTa's heads. The Auto classes are not changed, since they call one of the two.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from threading import RLock
from typing import Any

import transformers
from transformers import AutoConfig, BertConfig, BertModel, BertPreTrainedModel, PreTrainedConfig
from transformers.utils import logging

from ..schemes.registry import SCHEMES
from .configuration_relpos_bert import RelPosBertConfig
from .installed import INSTALLED
from .loading import hub_arguments, load, load_other_architecture
from .modeling_relpos_bert import HEADS, RelPosBertPreTrainedModel


logger = logging.get_logger(__name__)

# Each stock head and our subclass of it: BertModel → RelPosBertModel.
STOCK_HEADS: dict[type[BertPreTrainedModel], type[RelPosBertPreTrainedModel]] = {
    getattr(transformers, ours.__name__.removeprefix("RelPos")): ours for ours in HEADS.values()
}
# Prefix of further stock heads, whose model_type has checkpoints that only tensors show to be read here. The stock
# class would start layers in the layout of flash attention at random.
TOLD_BY_TENSORS = "XLMRoberta"
# Fields of our configuration only; the Auto classes, which read a BertConfig, pass them on to the model.
OWN_FIELDS = {field.name for field in fields(RelPosBertConfig)} - {field.name for field in fields(BertConfig)}
MISSING = object()  # the class inherits the attribute


class Patch(AbstractContextManager["Patch"]):
    """Handle of `patch_transformers`: call `undo()`, or use it as a context manager."""

    def undo(self) -> None:
        """Undo this patch; undoing the last patch restores the stock classes. A second call does nothing."""
        with _lock:
            if self in _active:
                _active.remove(self)
                if not _active:
                    _restore()

    def __exit__(self, *error: object) -> None:
        self.undo()


_lock = RLock()
_active: list[Patch] = []
# (class, attribute, original, replacement)
_replaced: list[tuple[type, str, Any, Any]] = []


def patch_transformers() -> Patch:
    """Make the stock BERT classes build our models for configurations with relative positions.

    The patch affects the nine stock heads and their Auto classes in the whole process, if `position_embedding_type`
    names a scheme of `SCHEMES` other than `"absolute"`, or other fields or tensors show a relative architecture with
    BERT's model_type (JinaBERT v2, MosaicBERT, DNABERT-2):

    - `BertForX.from_pretrained`, `AutoModelForX.from_pretrained`, `pipeline`, and code that calls them;
    - `AutoModelForX.from_config(config)` and `BertForX(config)`.

    The Auto classes also build our models for checkpoints with remote code of an architecture that is read here (GTE,
    JinaBERT v2); that code is not run, even with `trust_remote_code=True`. XLM-RoBERTa's heads do so for checkpoints
    in the layout of flash attention (jina-embeddings-v3).

    The results are `RelPosBertForX`, with a copy of the configuration as `RelPosBertConfig`; they remain valid after
    the patch. Absolute configurations, subclasses of `BertConfig` and subclasses of the stock heads are not affected
    (a relative subclass of `BertModel` gives a warning). But an exact stock class inside other code, such as
    `self.bert = BertModel(config)`, becomes ours. A part of a model such as `BertEncoder` or `BertLayer` stays stock,
    since the model prepares positions and masks for it. Stock heads also reject checkpoints whose encoder would have
    random weights, as ours do.

    Patches may be nested and undone in any order: when the last one is undone, the classes have their original
    attributes again.

    Returns:
        The handle: call `undo()`, or use it in a `with` statement, which undoes the patch on errors, too.

    Example:

    ```python
    >>> from hf_relpos import patch_transformers

    >>> patch = patch_transformers()
    >>> model = AutoModelForMaskedLM.from_pretrained("old/relative-bert")
    >>> patch.undo()
    ```
    """
    with _lock:
        patch = Patch()
        if not _active:
            _install()
        _active.append(patch)
        return patch


def needs_ours(source: Any, fields: dict[str, Any], changes: Mapping[str, Any]) -> bool:
    """Whether the fields of a BERT's configuration, with these changes, need our models instead of stock BERT."""
    scheme = changes.get("position_embedding_type", fields.get("position_embedding_type"))
    if isinstance(scheme, str) and scheme in SCHEMES and not SCHEMES[scheme].learned_input_table:
        return True
    is_bert = fields.get("model_type", "bert") == "bert"
    return is_bert and INSTALLED.families().config_fields(source, fields) is not None


def is_ours(config: Any, changes: Mapping[str, Any]) -> bool:
    """Whether a configuration, exactly a BertConfig or a RelPosBertConfig, needs our classes with these changes."""
    known = type(config) in (BertConfig, RelPosBertConfig)
    return known and needs_ours(config.name_or_path, config.to_dict(), changes)


def _is_saved_as_ours(path: Any, config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `from_pretrained(path, config=config, **kwargs)` reads a configuration that needs our classes."""
    source = path if config is None else config
    if source is None or kwargs.get("gguf_file") is not None:
        return False
    try:
        saved, _ = BertConfig.get_config_dict(source, **hub_arguments(kwargs))
    except OSError:  # no such file or repository: the stock class raises a better error
        return False
    return needs_ours(source, saved, kwargs)


def _route_configuration(ours: Any, inherited: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> Any:
    """`AutoConfig.from_pretrained`: ours for an architecture whose own code a checkpoint names, which is not run."""
    hub, families = hub_arguments(kwargs), INSTALLED.families()
    try:
        saved, _ = PreTrainedConfig.get_config_dict(path, **hub)
    except OSError:  # no such file or repository: the stock class raises a better error
        return inherited(path, *args, **kwargs)
    families.refuse_converted_only(path, saved)
    if not families.replaces_own_code(path, saved, hub):
        return inherited(path, *args, **kwargs)
    given = {name: value for name, value in kwargs.items() if name not in ("trust_remote_code", "code_revision")}
    return ours.from_pretrained(path, *args, **given)


def _routed_init(stock: Any, ours: Any) -> Callable[..., None]:
    """`__init__` for a stock head: an exact instance becomes one of ours if its configuration is relative."""
    before = stock.__init__

    @functools.wraps(before)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if _active and type(self) is stock and is_ours(config, {}):
            self.__class__ = ours
            ours.__init__(self, RelPosBertConfig.from_bert(config), *args, **kwargs)
            return
        if _active and stock is BertModel and is_ours(config, {}):
            ignored = f"position_embedding_type = {config.position_embedding_type!r} and adds absolute positions"
            remedy = "derive it from RelPosBertModel."
            logger.warning_once(f"{type(self).__name__} is a subclass of BertModel, so it ignores {ignored}; {remedy}")
        before(self, config, *args, **kwargs)

    return __init__


def _routed_from_pretrained(stock: Any, ours: Any, route: Callable[..., Any]) -> "classmethod[Any, ..., Any]":
    """`from_pretrained` for a stock class; subclasses, including ours, use the original method.

    Args:
        route: gets our class, the original method, and the arguments.
    """
    before = vars(stock).get("from_pretrained")

    @functools.wraps(stock.from_pretrained.__func__)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        inherited = super(stock, cls).from_pretrained if before is None else before.__get__(None, cls)
        if _active and cls is stock:
            return route(ours, inherited, pretrained_model_name_or_path, args, kwargs)
        return inherited(pretrained_model_name_or_path, *args, **kwargs)

    return classmethod(from_pretrained)


def _route_head(ours: Any, inherited: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> Any:
    """A stock BERT, or ours for a configuration that is relative, or for tensors of another architecture."""
    config = kwargs.get("config")
    if isinstance(config, PreTrainedConfig):
        own = {name: value for name, value in kwargs.items() if name in OWN_FIELDS}
        if is_ours(config, own):
            rest = {name: value for name, value in kwargs.items() if name not in own}
            return ours.from_pretrained(path, *args, **rest | {"config": RelPosBertConfig.from_bert(config, **own)})
    elif _is_saved_as_ours(path, config, kwargs):
        return ours.from_pretrained(path, *args, **kwargs)
    return load(ours, inherited, path, args, kwargs)


def _route_by_tensors(ours: Any, inherited: Callable[..., Any], path: Any, args: Any, kwargs: Any) -> Any:
    """A stock model, or ours for a checkpoint whose tensors show another architecture."""
    given = {name: value for name, value in kwargs.items() if name != "output_loading_info"}
    found = load_other_architecture(ours, path, (), given, by_tensors=True)
    if found is None:
        return inherited(path, *args, **kwargs)
    return found if kwargs.get("output_loading_info") else found[0]


def _install() -> None:
    routed = _routed_from_pretrained
    _replace(AutoConfig, "from_pretrained", routed(AutoConfig, RelPosBertConfig, _route_configuration))
    for stock, ours in STOCK_HEADS.items():
        _replace(stock, "__init__", _routed_init(stock, ours))
        _replace(stock, "from_pretrained", routed(stock, ours, _route_head))
        other = getattr(transformers, stock.__name__.replace("Bert", TOLD_BY_TENSORS, 1), None)
        if other is not None:
            _replace(other, "from_pretrained", routed(other, ours, _route_by_tensors))


def _replace(owner: type, name: str, routed: Any) -> None:
    _replaced.append((owner, name, vars(owner).get(name, MISSING), routed))
    setattr(owner, name, routed)


def _restore() -> None:
    while _replaced:
        stock, name, before, routed = _replaced.pop()
        if vars(stock).get(name) is not routed:
            continue  # other code has wrapped the replacement, which has no effect any more
        if before is MISSING:
            delattr(stock, name)
        else:
            setattr(stock, name, before)
