"""The registry: one import line per scheme."""

from typing import Any

from .scheme import SCHEMES, Scheme
from .scheme_absolute import Absolute
from .scheme_relative_key import RelativeKey, RelativeKeyQuery
from .scheme_shaw import Shaw
from .scheme_transformer_xl import TransformerXL


__all__ = ["SCHEMES", "Absolute", "RelativeKey", "RelativeKeyQuery", "Scheme", "Shaw", "TransformerXL", "find_scheme"]


def find_scheme(name: Any) -> type[Scheme]:
    """The scheme of that name.

    Raises:
        ValueError: for an unknown name; lists the known ones.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        raise ValueError(f"position_embedding_type = {name!r} is unknown; known schemes: {', '.join(sorted(SCHEMES))}")
    return SCHEMES[name]
