"""Functions that torch.compile takes as one operator, and doesn't look into.

A compiler that sees what such a function does moves it about: it keeps for backward a mask that
backward makes again on purpose, because it is as large as a sample is long times itself; or it
breaks the graph at messages between two ranks. Uncompiled they are what they are, and nothing
stands in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from megagrid.comm.ledger import Ledger


def opaque(like: Callable[..., Any] | None = None) -> Callable[[Callable], Callable]:
    """Have compilers take a function, at the top of a module, as one operator.

    It takes tensors, numbers, strings and sequences of numbers, states their types, changes none of
    the tensors and returns new ones. Backward doesn't go through it.

    Args:
        like: what returns, for tensors without values, others with the shapes, dtypes and strides
            of those that the function returns; None: the function itself, run on such tensors.
    """

    def of(function: Callable) -> Callable:
        module = function.__module__.rpartition(".")[2]
        name = f"{OPS}::{module}{function.__name__}"
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(like or function)

        # Otherwise no mode sees what an operator consists of: its messages are to be counted.
        def look_inside(ledger: Ledger, op: Any, types: Any, args: tuple, kwargs: dict) -> Any:
            with ledger:
                return function(*args, **kwargs)

        torch.library.register_torch_dispatch(name, Ledger, look_inside)

        @wraps(function)
        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_compiling() else function(*args)

        return call

    return of


OPS = "megagrid"
"""The namespace of the operators."""
