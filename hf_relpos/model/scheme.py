"""What a scheme is: options it accepts, parameters it owns, terms it adds. A new scheme is one subclass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from .formula import Terms
from .offsets import Offsets


SCHEMES: dict[str, type["Scheme"]] = {}


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


def is_count(value: Any) -> bool:
    """A positive integer (True is not one)."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def one_of(*choices: Any) -> Callable[[Any], bool]:
    """Accepts exactly these values; 1 is not taken for True."""
    return lambda value: any(value == choice and type(value) is type(choice) for choice in choices)


class Scheme(nn.Module):
    """One position scheme, as the module `attention.self.distance_embedding` of a layer.

    Subclasses register themselves under a name: `class Shaw(Scheme, name="shaw")`. They may own parameters but no
    buffers: whatever can be computed from lengths is computed in `terms`.

    Class attributes:
        name: value of `config.position_embedding_type`.
        source: paper and equation, or the code that defines it.
        options: the keys of `config.position_options` that it knows.
        absolute_input: the embeddings add a learned table of absolute positions.
        relative: outputs depend on token order only through offsets, so that shifting a text changes nothing.
        zero_is_neutral: with all its parameters at zero every term vanishes, while their gradients do not all vanish.
        beyond_range: what happens to inputs longer than the trained range, in words.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    options: ClassVar[dict[str, Option]] = {}
    absolute_input: ClassVar[bool] = False
    relative: ClassVar[bool] = True
    zero_is_neutral: ClassVar[bool] = True
    beyond_range: ClassVar[str]

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = name
        SCHEMES[name] = cls

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads: int = config.num_attention_heads
        self.head_size: int = config.hidden_size // config.num_attention_heads
        self.scale: float = self.head_size**-0.5
        self.settings: dict[str, Any] = self.resolve(config.position_options, config)

    @classmethod
    def resolve(cls, options: Mapping[str, Any] | None, config: Any) -> dict[str, Any]:
        """`options` completed with the defaults.

        Raises:
            ValueError: for an unknown option or a value that is not accepted; names field, value and the known ones.
        """
        options = options or {}
        for key, value in options.items():
            if key not in cls.options:
                known = ", ".join(cls.options) or "none"
                raise ValueError(
                    f"position_options[{key!r}] = {value!r}: the scheme {cls.name!r} has no such option; "
                    f"known: {known}"
                )
            if not cls.options[key].accepts(value):
                raise ValueError(
                    f"position_options[{key!r}] = {value!r} is not accepted by the scheme {cls.name!r}; "
                    f"{key}: {cls.options[key].help}"
                )
        return {key: options.get(key, option.default) for key, option in cls.options.items()}

    @classmethod
    def has_value_term(cls, options: Mapping[str, Any]) -> bool:
        """Whether the terms include V, which only backends that hold the attention weights can compute."""
        return False

    def init_weights(self, std: float) -> None:
        """Fresh parameters, by `transformers.initialization` functions only (they spare loaded tensors).

        Args:
            std: `config.initializer_range`.
        """

    def terms(self, offsets: Offsets) -> Terms:
        """The terms for one attention call."""
        raise NotImplementedError(f"{type(self).__name__} must define terms(offsets)")
