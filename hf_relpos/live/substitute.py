"""Subclasses of other people's classes with another forward.

They have the name, module and signature of the class that they are made of, for saved files, copies and pickles.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


OURS = __name__.partition(".")[0]


@functools.cache
def substitute_class(stock: Any, maker: Callable[[Any], Callable[..., Any]]) -> type[nn.Module]:
    """The subclass of a class with another forward.

    Args:
        maker: from the class to the forward; a function of a module, so that pickles find it.
    """
    kind: Any = transformers_class(stock)

    def reduce(self: Any, protocol: Any) -> Any:
        return (_made, (stock, maker), *stock.__reduce_ex__(self, protocol)[2:])

    def is_custom_code(cls: Any) -> Any:
        return kind.is_custom_code()  # else files are saved with other names

    made: type[nn.Module] = type(
        kind.__name__,
        (stock,),
        {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
            "__reduce_ex__": reduce,
            "is_custom_code": classmethod(is_custom_code),
            "forward": functools.wraps(stock.forward)(maker(stock)),
            "hf_relpos_stock": stock,
        },
    )
    return made


def _made(stock: type, maker: Any) -> Any:
    kind: Any = substitute_class(stock, maker)
    return kind.__new__(kind)


def stock_class(kind: Any) -> type:
    """The class that one of this package's was made of; any other class as it is."""
    found: type = vars(kind).get("hf_relpos_stock", kind)
    return found


def transformers_class(kind: type) -> type:
    """The first base of a class that is not of this package."""
    bases = (stock_class(base) for base in kind.__mro__ if issubclass(base, nn.Module))
    return next(base for base in bases if base.__module__.partition(".")[0] != OURS)
