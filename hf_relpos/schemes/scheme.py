"""Base class of the position schemes: options that a scheme accepts, parameters it owns, terms it adds.

A new scheme is one subclass. Other code reads its declarations and knows no scheme by name.
"""

import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init

from ..attention.context import AttentionContext
from ..attention.formula import TABLE_FIELDS, Clipped, Table, Terms
from ..host.tracing import is_traced


SCHEMES: dict[str, type["Scheme"]] = {}


def nearest(name: Any, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for an error message if a known name resembles `name`, else an empty string."""
    return "".join(f" (did you mean {match!r}?)" for match in get_close_matches(str(name), known, n=1))


@dataclass(frozen=True)
class Option:
    """One key of `position_options`.

    Attributes:
        default: value if it is not given.
        help: one line for error messages and the command line; says which values are accepted.
        accepts: function that says whether a value is accepted.
    """

    default: Any
    help: str
    accepts: Callable[[Any], bool]


# Schemes compute distances in float32, which represents all integers up to this one.
MAX_COUNT = 2**24
# Limits on factors and bases, so that products of them stay far from the overflow of float32.
MIN_NUMBER, MAX_NUMBER = 1e-12, 1e12


def is_count(value: Any) -> bool:
    """Whether `value` is a positive integer up to `MAX_COUNT`. True is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


def is_number(value: Any) -> bool:
    """Whether `value` is an integer or a float from `MIN_NUMBER` to `MAX_NUMBER`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_NUMBER <= value <= MAX_NUMBER


def is_number_or_zero(value: Any) -> bool:
    """Whether `value` is 0 or a number that `is_number` accepts."""
    return is_number(value) or (type(value) in (int, float) and value == 0)


def one_of(*choices: Any) -> Callable[[Any], bool]:
    """Return a function that accepts exactly these values. It does not take 1 for True."""
    return lambda value: any(type(value) is type(choice) and value == choice for choice in choices)


def choice(default: Any, *others: Any, help: str) -> Option:
    """Return an option with a fixed set of values, the default first."""
    listed = ", ".join(repr(value) for value in (default, *others))
    return Option(default=default, help=f"{help}; one of {listed}", accepts=one_of(default, *others))


def integer(default: int | None, help: str, none: str = "", least: int = 1, most: int = MAX_COUNT) -> Option:
    """Return an option that is an integer from `least` to `most`, or also None if `none` says what that means."""
    limit = f" up to {most:,}" if most < MAX_COUNT else ""
    kind = f"a positive integer{limit}" if least == 1 else f"an integer of at least {least}{limit}"
    return Option(
        default=default,
        help=f"{help}; {kind}" + (f", or None for {none}" if none else ""),
        accepts=lambda value: (bool(none) and value is None) or (is_count(value) and least <= value <= most),
    )


TABLE_LETTERS = "ABcV"  # tables that a scheme may let the user choose
WHICH_TABLES = Option(
    default=TABLE_LETTERS,
    help=f"tables of the scheme: a string of letters of {TABLE_LETTERS!r}, each at most once",
    accepts=lambda value: (
        isinstance(value, str) and 0 < len(value) == len(set(value)) and set(value) <= set(TABLE_LETTERS)
    ),
)


def register_tables(scheme: "Scheme", rows: int) -> None:
    """Register the tables that the options `terms` and `per_head` name, (H or 1, rows, d) or, of c, (H or 1, rows)."""
    heads = scheme.num_heads if scheme.settings["per_head"] else 1
    for letter in TABLE_LETTERS:
        width = () if letter == "c" else (scheme.head_size,)
        has_table = letter in scheme.settings["terms"]
        scheme.register_parameter(letter, nn.Parameter(torch.empty(heads, rows, *width)) if has_table else None)


def terms_of_tables(scheme: "Scheme", make: Callable[[torch.Tensor], Table]) -> Terms:
    """Return terms with what a function makes of each table of `register_tables`."""
    tables: dict[str, Any] = {TABLE_FIELDS[each]: (make(getattr(scheme, each)),) for each in scheme.settings["terms"]}
    return Terms(**tables)


def dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype of the parameters; float32 if there are none, as in PyTorch's dynamically quantised layers."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), torch.float32)


def clipped_table(rows: torch.Tensor, low: int, high: int, out_of_range: str, descending: bool = False) -> Table:
    """Return a table of the offsets from `low` to `high`, a copy of `rows`.

    Args:
        rows: (high − low + 1, d), or (H or 1, high − low + 1, d).
        out_of_range: "clip": offsets past the ends share the last rows; "zero": they have a row of zeros.
        descending: whether the rows are in descending order of the offset.
    """
    rows, zero = rows if rows.dim() == 3 else rows[None], out_of_range == "zero"
    return Table(nn.functional.pad(rows, (0, 0, 0, 1)) if zero else rows.clone(), Clipped(low, high, zero, descending))


class ScalarLinear(nn.Module):
    """x · w + b of a number x, (…, 1) to (…, W), with the parameters of `nn.Linear(1, W)`: (W, 1) and (W,).

    It is not an `nn.Linear`, so that tools which replace linear layers skip it: torchao cannot quantise rows of one
    weight, quantisation would make distances coarser, and a low-rank adapter would be larger than the layer.
    """

    in_features = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, 1))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


def look_up(
    embedding: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor, name: str, field: str, size: int
) -> torch.Tensor:
    """Look up rows of an embedding.

    Args:
        embedding: a module, or its function.
        ids: row numbers, any shape.
        name: name of the argument that holds `ids`.
        field: name of the configuration field that sets the number of rows.
        size: number of rows.

    Raises:
        IndexError: on the CPU, for numbers without a row. Other devices raise their own errors, later.
    """
    if is_traced():
        return embedding(ids)
    try:
        return embedding(ids)
    except IndexError as error:
        low, high = (int(number) for number in ids.aminmax())
        raise IndexError(
            f"{name} has numbers from {low} to {high}; {field} = {size}: give numbers from 0 to {size - 1}"
        ) from error


def check_options(options: Mapping[str, Any], known: Mapping[str, Option], field: str, owner: str) -> None:
    """Check options by name.

    Args:
        options: the given values.
        known: what there is.
        field: name of the argument that holds them.
        owner: what has these options, for the error.

    Raises:
        ValueError: for an unknown option or a value that is not accepted. It names field, value and what is known.
    """
    for key, value in options.items():
        given = f"{field}[{reprlib.repr(key)}] = {reprlib.repr(value)}"
        if key not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"{given}: {owner} has no such option{nearest(key, known)}; known options: {listed}")
        if not known[key].accepts(value):
            limit = f" (up to {MAX_COUNT:,})" if isinstance(value, int) and value > MAX_COUNT else ""
            raise ValueError(f"{given} is not accepted by {owner}; {key}: {known[key].help}{limit}")


OUT_OF_RANGE = {
    "clip": "distances beyond the range share its last row",
    "zero": "distances beyond the range have no term",
    "extrapolate": "the terms are computed for any distance",
    "error": "a longer input raises an error",
}


class Scheme(nn.Module):
    """A position scheme: the module `attention.self.distance_embedding` of a layer, from AttentionContext to Terms.

    Subclasses register themselves under a name: `class Shaw(Scheme, name="shaw")`. They may own parameters but no
    buffers: whatever follows from lengths is computed in `forward`.

    Class attributes:
        name: value of `config.position_embedding_type`.
        summary: what it does, in one short sentence; empty for none.
        source: paper and equation, or the code that defines it.
        original: code outside this repository that its tests compare it with; None if there is none, or if a script
            of scripts/maintenance/golden names it.
        out_of_range: how terms can behave beyond the trained range: keys of `OUT_OF_RANGE`, the default first. They
            become the values of the option `out_of_range`, which every scheme has.
        options: the keys of `config.position_options` that it accepts, besides `out_of_range`.
        symmetric: whether the terms are the same for keys to the left and to the right. Without a causal mask, a
            reversed text then gives reversed outputs. It may depend on options: see `is_symmetric_with`.
        zero_init_is_identity: whether parameters that are all zero give no terms, but still receive gradients.
        learned_input_table: whether it adds a learned table of absolute positions to the input, as stock BERT does.
        even_size: "hidden_size" or "head_size" if pairs of sine and cosine must fill that size.
        input_class, shared_class: what `input_module` and `shared_module` make by default; None for none.
        required_inputs: inputs that the model's `forward` requires: `grid`, `relation_ids`.
        uses_absolute_positions: whether terms depend on i and j themselves, not on j − i alone. Then
            `context.positions` is given whenever positions are not 0, 1, 2, …
        relative: whether nothing depends on absolute positions, so that shifting a text changes no output. Derived.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    source: ClassVar[str]
    original: ClassVar[str | None] = None
    out_of_range: ClassVar[tuple[str, ...]]
    options: ClassVar[dict[str, Option]] = {}
    symmetric: ClassVar[bool] = False
    relative: ClassVar[bool]
    zero_init_is_identity: ClassVar[bool] = True
    even_size: ClassVar[str | None] = None
    input_class: ClassVar[type["InputScheme"] | None] = None
    shared_class: ClassVar[type["SharedScheme"] | None] = None
    required_inputs: ClassVar[frozenset[str]] = frozenset()
    learned_input_table: ClassVar[bool] = False
    uses_absolute_positions: ClassVar[bool] = False

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        """Register a scheme under its name.

        Raises:
            TypeError: for a scheme without a name, or without a declaration that has no default. Classes derived from
                a scheme need none: `fully_shard` and `parametrize` give modules such a class.
        """
        super().__init_subclass__(**kwargs)
        if name is None:
            if not hasattr(cls, "name"):
                raise TypeError(f"{cls.__name__} has no name; give it one: class {cls.__name__}(Scheme, name=…)")
            return
        for needed in ("source", "out_of_range"):
            if not hasattr(cls, needed):
                raise TypeError(f"{cls.__name__} has no {needed}; the docstring of Scheme says what it declares")
        cls.name = name
        has_module = any("input_module" in vars(base) for base in cls.__mro__ if base is not Scheme)
        cls.relative = not (has_module or cls.input_class or cls.uses_absolute_positions)
        meanings = ", ".join(f"{word!r}: {OUT_OF_RANGE[word]}" for word in cls.out_of_range)
        out_of_range = Option(cls.out_of_range[0], f"beyond the trained range; {meanings}", one_of(*cls.out_of_range))
        cls.options = {**cls.options, "out_of_range": out_of_range}
        SCHEMES[name] = cls

    def __init__(self, config: Any, options: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            config: a RelPosBertConfig.
            options: options of this scheme; None means `config.position_options`.
        """
        super().__init__()
        self.num_heads: int = config.num_attention_heads
        self.head_size: int = config.hidden_size // config.num_attention_heads
        self.settings: dict[str, Any] = self.resolve(config.position_options if options is None else options, config)
        own = self.scale_of(self.settings, config)
        self.scale: float = self.head_size**-0.5 if own is None else own
        # Everything that terms depend on besides the context and the parameters. It is equal for schemes that make
        # the same terms. It is computed here because a graph cannot sort.
        self.signature: Hashable = (type(self), repr(sorted(self.settings.items())))
        self.build(config)

    def build(self, config: Any) -> None:
        """Add parameters and submodules for the options, `self.settings`, and attributes that follow from these."""

    @classmethod
    def resolve(cls, options: Mapping[str, Any] | None, config: Any) -> dict[str, Any]:
        """Complete `options` with the defaults.

        Raises:
            ValueError: as `check_options` and `complete`, and for an odd `even_size`.
        """
        sizes = {"head_size": config.hidden_size // config.num_attention_heads, "hidden_size": config.hidden_size}
        if cls.even_size and sizes[cls.even_size] % 2:
            raise ValueError(
                f"hidden_size = {config.hidden_size} with num_attention_heads = {config.num_attention_heads} gives "
                f"{cls.even_size} = {sizes[cls.even_size]}; the scheme {cls.name!r} requires an even one"
            )
        options = options or {}
        check_options(options, cls.options, "position_options", f"the scheme {cls.name!r}")
        settings = {**cls.defaults(), **options}
        cls.complete(settings, config)
        return settings

    @classmethod
    def complete(cls, settings: dict[str, Any], config: Any) -> None:
        """Set options that depend on the configuration; raise a ValueError for some that do not go together."""

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of every option."""
        return {key: option.default for key, option in cls.options.items()}

    @classmethod
    def options_for_length(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:
        """Add to `options`, where not given, the defaults that depend on the length, for `length` tokens."""
        return dict(options)

    @classmethod
    def settings_of_layer(cls, settings: Mapping[str, Any], layer: int) -> dict[str, Any]:
        """Return the options of one layer, where resolved options tell layers apart."""
        return dict(settings)

    @classmethod
    def scale_of(cls, settings: Mapping[str, Any], config: Any) -> float | None:
        """Return s of the formula; None leaves it at 1/√d. Combined schemes must agree."""
        return None

    @classmethod
    def is_symmetric_with(cls, settings: Mapping[str, Any]) -> bool:
        """Whether the terms are symmetric with these resolved options; see `symmetric`."""
        return cls.symmetric

    @classmethod
    def memory_unsupported_reason(cls, settings: Mapping[str, Any]) -> str | None:
        """Return why tokens cannot attend to a memory of earlier segments; None if they can.

        A memory needs terms that depend on j − i alone and extend to the left as far as the memory.
        """
        if cls.required_inputs:
            needed = " and ".join(sorted(cls.required_inputs))
            return f"it requires {needed} for all keys, but those of earlier segments are not stored"
        if not cls.relative:
            return "its positions count from the beginning of the input, but every segment starts at 0"
        return None

    @classmethod
    def input_module(cls, config: Any, settings: Mapping[str, Any]) -> nn.Module | None:
        """Return the module `embeddings.position_embeddings`, for schemes that (also) act on the input.

        It is an InputScheme, or any module that maps position ids (1 or B, L) to vectors (1 or B, L, D). The vectors
        are added to the word embeddings. By default, it is an `input_class`.
        """
        return None if cls.input_class is None else cls.input_class(settings)

    @classmethod
    def shared_module(cls, config: Any, settings: Mapping[str, Any]) -> nn.Module | None:
        """Return the module `encoder.distance_embedding`, for schemes with parameters shared by all layers.

        It is called once per forward with the AttentionContext. Its result reaches `forward` as
        `context.layer.shared`. By default, it is a `shared_class`.
        """
        return None if cls.shared_class is None else cls.shared_class(config, settings)

    def init_weights(self, std: float) -> None:
        """Initialise the parameters, only with functions of `transformers.initialization`: they spare loaded tensors.

        By default all are normal. Linear layers, embeddings and normalisations of the scheme were initialised before
        as in Transformers' models.

        Args:
            std: `config.initializer_range`.
        """
        for parameter in self.parameters(recurse=False):
            init.normal_(parameter, mean=0.0, std=std)

    def token_numbers(self, states: torch.Tensor) -> torch.Tensor | None:
        """Return a number for each token and head, (B, K, H), of a layer's inputs (B, K, D); None for none.

        They reach `forward` as `context.layer.token_numbers`, also those of cached tokens: the cache holds them as a
        further entry of each key, so that caches allocated for the sizes of the configuration, and prefix tuning, do
        not fit.
        A combination can hold only one such scheme.
        """
        return None

    @classmethod
    def has_token_numbers(cls) -> bool:
        """Whether the scheme has `token_numbers`."""
        return cls.token_numbers is not Scheme.token_numbers

    def forward(self, context: AttentionContext) -> Terms:
        """Return the terms for one attention call. Schemes that act on the input need not define it.

        If a scheme has no parameters of its own and calls no projection of a layer, its terms are computed once for
        all layers (`capabilities.layers_share_terms`). So terms must follow from the context, the settings and the
        parameters alone, with `nn.Dropout` as the only randomness. They must be computable on the meta device.

        Parameters are in place only while the module that owns them is called: offloading, sharding and quantisation
        change them before and after. So a scheme may read its own parameters, but must call its submodules without
        reading their weights. `context.device` says where to compute, and `dtype_of` in which dtype submodules take
        their input. Terms must not hold a parameter or a view of one (`clone` it): they are used after the call.
        """
        if self.relative:
            raise NotImplementedError(f"{type(self).__name__} must define forward(context)")
        return Terms()


class InputScheme(nn.Module):
    """Base of the modules that `Scheme.input_module` returns when they need more than position ids.

    Args:
        settings: the resolved options of the scheme.

    Class attributes:
        takes_grid: whether position ids are rows and columns, (B, L, 2); for schemes with
            `required_inputs = {"grid"}`.
    """

    takes_grid: ClassVar[bool] = False

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.settings = dict(settings)

    def forward(
        self, position_ids: torch.Tensor, content: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Map position ids, (1 or B, L) or (1 or B, L, 2), to vectors (1 or B, L, D).

        Args:
            content: (B, L, D), what the vectors will be added to; only its shape and dtype are used.
            attention_mask: as given to the model.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(position_ids, content, attention_mask)")


class SharedScheme(nn.Module):
    """Base of the modules that `Scheme.shared_module` returns. Its methods follow the rules of those of Scheme.

    Args:
        config: a RelPosBertConfig.
        settings: the resolved options of the scheme.
    """

    def __init__(self, config: Any, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.num_heads: int = config.num_attention_heads
        self.settings = dict(settings)

    def init_weights(self, std: float) -> None:
        """Initialise the parameters of the module, besides those of linear layers, embeddings and normalisations."""

    def forward(self, context: AttentionContext) -> Any:
        """Return what the schemes of the layers need, as a tensor or a tuple of tensors."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(context)")
