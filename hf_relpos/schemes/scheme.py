"""What a scheme is: options it accepts, parameters it owns, terms it adds. A new scheme is one subclass.

Its declarations say everything about it: other code reads them, and knows no scheme by name.
"""

import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from torch import nn

from ..attention.context import AttentionContext
from ..attention.formula import Terms


SCHEMES: dict[str, type["Scheme"]] = {}


def nearest(name: Any, known: Iterable[str]) -> str:
    """For an error message: "; 'x' is most like it", where a known name is like this one; else empty."""
    return "".join(f"; {most_like!r} is most like it" for most_like in get_close_matches(str(name), known, n=1))


@dataclass(frozen=True)
class Option:
    """One key of `position_options`.

    Attributes:
        default: its value when not given.
        help: one line, for error messages and the command line; says what is accepted.
        accepts: whether a value is acceptable.
    """

    default: Any
    help: str
    accepts: Callable[[Any], bool]


# Schemes compute distances in float32, which has all integers up to this one.
MAX_COUNT = 2**24
# Factors and bases: far from what float32 overflows at when they are multiplied.
MIN_NUMBER, MAX_NUMBER = 1e-12, 1e12


def is_count(value: Any) -> bool:
    """A positive integer up to `MAX_COUNT` (True is not one)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


def is_number(value: Any) -> bool:
    """An integer or a float, positive, from `MIN_NUMBER` to `MAX_NUMBER`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and MIN_NUMBER <= value <= MAX_NUMBER


def one_of(*choices: Any) -> Callable[[Any], bool]:
    """Accepts exactly these values; 1 is not taken for True."""
    return lambda value: any(type(value) is type(choice) and value == choice for choice in choices)


def choice(default: Any, *others: Any, help: str) -> Option:
    """An option with a fixed set of values, the default first."""
    listed = ", ".join(repr(value) for value in (default, *others))
    return Option(default=default, help=f"{help}; one of {listed}", accepts=one_of(default, *others))


TABLE_LETTERS = "ABcV"  # of the tables that a scheme may leave to the user to choose
WHICH_TABLES = Option(
    default=TABLE_LETTERS,
    help=f"which tables there are: a string of letters of {TABLE_LETTERS!r}, each at most once",
    accepts=lambda value: (
        isinstance(value, str) and 0 < len(value) == len(set(value)) and set(value) <= set(TABLE_LETTERS)
    ),
)


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of a module's parameters; float32 where it has none, as PyTorch's dynamically quantised layers."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), torch.float32)


def refuse_odd_width(config: Any, name: str) -> None:
    """
    Raises:
        ValueError: for a model size that pairs of sine and cosine do not fill.
    """
    if config.hidden_size % 2:
        raise ValueError(f"hidden_size = {config.hidden_size}: the sinusoids of the scheme {name!r} need an even one")


def refuse_odd_heads(config: Any, name: str) -> None:
    """
    Raises:
        ValueError: for a head size that pairs of sine and cosine do not fill.
    """
    size = config.hidden_size // config.num_attention_heads
    if size % 2:
        raise ValueError(
            f"hidden_size = {config.hidden_size} with num_attention_heads = {config.num_attention_heads} makes a head "
            f"size of {size}; the sinusoids of the scheme {name!r} need an even one"
        )


# Options under the names that earlier checkpoints have, and their values.
RENAMED_OPTIONS = {"beyond": "out_of_range"}
RENAMED_VALUES = {("beyond", "refuse"): "error"}


@dataclass(frozen=True)
class LinearParameter:
    """A parameter on which terms depend linearly when the others are zero: what a converter fits in closed form.

    Attributes:
        letters: the letters of the formula whose tables it enters, such as "A", or "AB" for both.
        distance_axis: the axis along which neighbours are neighbouring distances; None where there is none.
        makes_rows: whether rows of the tables are combinations of its rows, the same ones in every head and feature.
    """

    letters: str
    distance_axis: int | None = -2
    makes_rows: bool = True


@dataclass(frozen=True)
class RangeOption:
    """The option that sets the largest distance with an embedding of its own.

    Attributes:
        name: key of `position_options`; its value None stands for what `max_position_embeddings` allows.
        exclusive: the value is the first distance without an embedding of its own.
        within_table: `max_position_embeddings` sets the size of the table, and the option only leaves out distances.
    """

    name: str
    exclusive: bool = False
    within_table: bool = False

    def max_distance(self, settings: Mapping[str, Any], config: Any) -> int:
        """The largest distance with an embedding of its own, for resolved options."""
        value = settings[self.name]
        if value is None:
            return config.max_position_embeddings - 1
        return value - 1 if self.exclusive else value

    def resized(self, options: Mapping[str, Any], max_distance: int) -> dict[str, Any]:
        """The fields of the configuration for another largest distance.

        Args:
            options: `position_options` as they are.
        """
        if self.within_table:
            others = {key: value for key, value in options.items() if key != self.name}
            return {"max_position_embeddings": max_distance + 1, "position_options": others}
        return {"position_options": {**options, self.name: max_distance + self.exclusive}}


OUT_OF_RANGE = {
    "clip": "distances past the range share its last row",
    "zero": "distances past the range have no term",
    "extrapolate": "the terms are computed for any distance",
    "error": "a longer input is an error",
}


class Scheme(nn.Module):
    """One position scheme, as the module `attention.self.distance_embedding` of a layer: an AttentionContext to Terms.

    Subclasses register themselves under a name: `class Shaw(Scheme, name="shaw")`. They may own parameters but no
    buffers: whatever can be computed from lengths is computed in `forward`.

    Class attributes:
        name: value of `config.position_embedding_type`.
        source: paper and equation, or the code that defines it.
        original: the code outside this repository that its tests compare it with, where no script of
            scripts/maintenance/golden names it; None for none.
        out_of_range: what can happen past the trained range, keys of `OUT_OF_RANGE`, the default first. Becomes the
            option `out_of_range`, so every scheme has it.
        extrapolation_claim: what its source says about inputs longer than those trained on, in one line.
        options: the keys of `config.position_options` that it knows, besides `out_of_range`.
        range_option: the option that sets the largest distance with an embedding of its own; None for none.
        renamed_options: earlier names of its options, old to new.
        linear_parameters: by name, the parameters of which terms are linear; empty for none.
        order_blind: keys to the left and to the right get the same terms, so that without a causal mask a reversed
            text gives reversed outputs. May depend on options: see `is_order_blind`.
        zero_is_neutral: with all its parameters at zero every term vanishes, while their gradients do not all vanish.
        learned_input_table: adds a learned table of absolute positions to the input, as stock BERT does.
        required_inputs: inputs that `forward` must be given for it: `grid`, `relation_ids`.
        uses_absolute_positions: its terms depend on i and j themselves, not on j − i alone: `context.positions` is
            given whenever they are not 0, 1, 2, …
        relative: derived: nothing depends on absolute positions, so that shifting a text changes no output.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    original: ClassVar[str | None] = None
    out_of_range: ClassVar[tuple[str, ...]]
    extrapolation_claim: ClassVar[str]
    options: ClassVar[dict[str, Option]] = {}
    range_option: ClassVar[RangeOption | None] = None
    renamed_options: ClassVar[dict[str, str]] = {}
    linear_parameters: ClassVar[dict[str, LinearParameter]] = {}
    order_blind: ClassVar[bool] = False
    relative: ClassVar[bool]
    zero_is_neutral: ClassVar[bool] = True
    required_inputs: ClassVar[frozenset[str]] = frozenset()
    learned_input_table: ClassVar[bool] = False
    uses_absolute_positions: ClassVar[bool] = False

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        """Register a scheme under its name.

        Raises:
            TypeError: for a scheme without one. Classes that are made of a scheme need none: `fully_shard` and
                `parametrize` give modules such a class.
        """
        super().__init_subclass__(**kwargs)
        if name is None:
            if not hasattr(cls, "name"):
                raise TypeError(f"{cls.__name__} has no name; give it one: class {cls.__name__}(Scheme, name=…)")
            return
        cls.name = name
        acts_on_input = any("input_module" in vars(base) for base in cls.__mro__ if base is not Scheme)
        cls.relative = not (acts_on_input or cls.uses_absolute_positions)
        meanings = ", ".join(f"{word!r}: {OUT_OF_RANGE[word]}" for word in cls.out_of_range)
        out_of_range = Option(cls.out_of_range[0], f"past the trained range; {meanings}", one_of(*cls.out_of_range))
        cls.options = {
            **{key: option for key, option in cls.options.items() if key != "out_of_range"},
            "out_of_range": out_of_range,
        }
        SCHEMES[name] = cls

    def __init__(self, config: Any, options: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            config: a RelPosBertConfig.
            options: this scheme's options; None for `config.position_options`.
        """
        super().__init__()
        self.num_heads: int = config.num_attention_heads
        self.head_size: int = config.hidden_size // config.num_attention_heads
        self.settings: dict[str, Any] = self.resolve(config.position_options if options is None else options, config)
        own = self.scale_of(self.settings, config)
        self.scale: float = self.head_size**-0.5 if own is None else own
        # What its terms depend on besides the context and its parameters: alike for schemes that make the same. Made
        # here, since a graph cannot sort.
        self.signature: Hashable = (type(self), repr(sorted(self.settings.items())))

    @classmethod
    def translate(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options as they are called now, from options of any release, for checkpoints that name them differently.

        Raises:
            ValueError: for an option that is given under two names.
        """
        renamed = {**RENAMED_OPTIONS, **cls.renamed_options}
        values = {
            renamed.get(key, key): RENAMED_VALUES.get((key, value), value) if isinstance(value, str) else value
            for key, value in options.items()
        }
        if len(values) < len(options):
            twice = [f"{old} and {new}" for old, new in renamed.items() if old in options and new in options]
            raise ValueError(
                f"position_options of the scheme {cls.name!r}: {', '.join(twice)} are two names of one option; give "
                "the second one"
            )
        return values

    @classmethod
    def resolve(cls, options: Mapping[str, Any] | None, config: Any) -> dict[str, Any]:
        """`options` completed with the defaults.

        Raises:
            ValueError: for an unknown option or a value that is not accepted; names field, value and the known ones.
        """
        options = options or {}
        for key, value in options.items():
            if key not in cls.options:
                raise ValueError(
                    f"position_options[{reprlib.repr(key)}] = {reprlib.repr(value)}: the scheme {cls.name!r} has no "
                    f"such option{nearest(key, cls.options)}; known: {', '.join(cls.options)}"
                )
            if not cls.options[key].accepts(value):
                limit = f" (up to {MAX_COUNT:,})" if isinstance(value, int) and value > MAX_COUNT else ""
                raise ValueError(
                    f"position_options[{key!r}] = {reprlib.repr(value)} is not accepted by the scheme {cls.name!r}; "
                    f"{key}: {cls.options[key].help}{limit}"
                )
        return {**cls.defaults(), **options}

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The value of every option that is not given."""
        return {key: option.default for key, option in cls.options.items()}

    @classmethod
    def reaching(cls, options: Mapping[str, Any], length: int) -> dict[str, Any]:
        """`options`, with defaults that depend on the length made for inputs of `length` tokens, where not given."""
        return dict(options)

    @classmethod
    def scale_of(cls, settings: Mapping[str, Any], config: Any) -> float | None:
        """s of the formula, or None when the scheme leaves it at 1/√d; combined schemes must agree."""
        return None

    @classmethod
    def has_tables(cls) -> bool:
        """Whether it is made of tables of distances, which can be fitted."""
        parameters = cls.linear_parameters.values()
        return len(parameters) > 0 and all(parameter.makes_rows for parameter in parameters)

    @classmethod
    def is_order_blind(cls, settings: Mapping[str, Any]) -> bool:
        """`order_blind`, given the resolved options."""
        return cls.order_blind

    @classmethod
    def memory_unsupported_reason(cls, settings: Mapping[str, Any]) -> str | None:
        """Why tokens cannot attend to a memory of earlier segments; None where they can.

        A memory needs terms that depend on j − i alone and extend to the left as far as the memory.
        """
        if cls.required_inputs:
            needed = " and ".join(sorted(cls.required_inputs))
            return f"it needs {needed} of all keys, and those of earlier segments are not kept"
        if not cls.relative:
            return "it counts positions from the beginning of the input, and every segment begins at 0 again"
        return None

    @classmethod
    def input_module(cls, config: Any, settings: Mapping[str, Any]) -> nn.Module | None:
        """The module `embeddings.position_embeddings`, for schemes that (also) act on the input.

        An InputScheme, or any module that maps position ids (1 or B, L) to vectors (1 or B, L, D), which are added
        to the word embeddings.
        """
        return None

    @classmethod
    def shared_module(cls, config: Any, settings: Mapping[str, Any]) -> nn.Module | None:
        """The module `encoder.distance_embedding`, for schemes with parameters shared by all layers.

        It is called once per forward with the AttentionContext; what it returns reaches `forward` as `context.shared`.
        """
        return None

    def init_weights(self, std: float) -> None:
        """Fresh parameters, all of them, by `transformers.initialization` functions only (they spare loaded tensors).

        Args:
            std: `config.initializer_range`.
        """

    @classmethod
    def rotates(cls) -> bool:
        """Whether it rotates q and k; a combination can hold one such scheme."""
        return cls.rotate is not Scheme.rotate

    def rotate(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotated queries or keys, for schemes that put this method into their terms.

        Args:
            vectors: (B, H, N, d).
            positions: (N,) or (B, N).

        Returns:
            (B, H, N, d).
        """
        raise NotImplementedError(f"{type(self).__name__} rotates nothing")

    def forward(self, context: AttentionContext) -> Terms:
        """The terms for one attention call.

        A scheme without parameters of its own, and that calls no projection of a layer, makes them once for all layers
        (`capabilities.layers_share_terms`). So they must follow from the context, the settings and the parameters
        alone, with `nn.Dropout` as the only randomness. They must be computable on the meta device.

        Parameters are where they should be only while the module that owns them is called: offloading, sharding and
        quantisation change them before and after. So a scheme reads its own, and calls its submodules without reading
        their weights; `context.device` says where to compute, and `dtype_of` in which dtype they take their input.
        Terms hold neither a parameter nor a view of one (`clone` it), since they are used when the call has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(context)")


class InputScheme(nn.Module):
    """Base of the modules that `Scheme.input_module` returns when they need more than position ids.

    Class attributes:
        takes_grid: its position ids are rows and columns, (B, L, 2); for schemes with `required_inputs = {"grid"}`.
    """

    takes_grid: ClassVar[bool] = False

    def forward(
        self, position_ids: torch.Tensor, content: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Position ids, (1 or B, L) or (1 or B, L, 2), to vectors (1 or B, L, D).

        Args:
            content: (B, L, D), what they will be added to, for its shape and dtype.
            attention_mask: as the model was given it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(position_ids, content, attention_mask)")


class SharedScheme(nn.Module):
    """Base of the modules that `Scheme.shared_module` returns; both methods keep to what Scheme says of its own."""

    def init_weights(self, std: float) -> None:
        """Fresh parameters of the module itself."""

    def forward(self, context: AttentionContext) -> Any:
        """Whatever the schemes of the layers need, as a tensor or a tuple of tensors."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(context)")
