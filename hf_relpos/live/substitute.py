"""Subclass patches: subclasses of third-party classes, with methods of this package first.

They have the name, module and signature of the class that they are made of, for saved files, copies and pickles.
"""

import functools
import sys
from typing import Any

from torch import nn


OURS = __name__.partition(".")[0]
MADE_OF = "hf_relpos_made_of"  # of a substitute: the class of others, and the changes


def substitute_class(kind: Any, change: Any) -> Any:
    """Return a subclass of a class, which may be such a subclass itself, with a change.

    Args:
        change: a class whose methods are first looked for; or a function in place of the forward, of the module, the
            forward of before, and the arguments, which suits classes of any layout. It has a name, for pickles.
    """
    return _substitute(kind, change)


@functools.cache
def _substitute(kind: Any, change: Any) -> Any:
    before: tuple[Any, ...] = vars(kind).get(MADE_OF, (kind,))
    stock, made_of = before[0], (*before, change)

    @functools.wraps(kind.forward)  # callers look at its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, made):  # since `undo` has come between the look-up of this method and the call
            return type(self).forward(self, *args, **kwargs)
        inner = functools.partial(getattr(change, "forward", kind.forward), self)
        return inner(*args, **kwargs) if isinstance(change, type) else change(self, inner, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        build, arguments, *state = stock.__reduce_ex__(self, protocol)
        build, *arguments = (stock if each is type(self) else each for each in (build, *arguments))
        return (_again, (made_of, build, *arguments), *state)

    def is_custom_code(cls: Any) -> Any:
        return stock.is_custom_code()  # else files are saved with other names

    made: Any = type(
        stock.__name__,
        (change, kind) if isinstance(change, type) else (kind,),
        {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "__reduce_ex__": reduce,
            "is_custom_code": classmethod(is_custom_code),
            "forward": forward,
            MADE_OF: made_of,
        },
    )
    return made


def _again(made_of: tuple[Any, ...], build: Any, *arguments: Any) -> Any:
    """Rebuild a copy by its own class, then give it the class that it had."""
    made = build(*arguments)
    made.__class__ = functools.reduce(substitute_class, made_of[1:], made_of[0])
    return made


def stock_class(kind: Any) -> Any:
    """Return the class that a subclass patch was made of; any other class as it is."""
    return vars(kind).get(MADE_OF, (kind,))[0]


def stock_file(module: nn.Module) -> Any:
    """Return the Python module that defines the class of a module."""
    return sys.modules[stock_class(type(module)).__module__]
