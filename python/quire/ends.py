"""What happens at the end of an object."""

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes


def at_the_end(owner: object, function: Callable[..., object], *arguments: object) -> weakref.finalize:
    """weakref.finalize for a function that calls operators. The garbage collector may end an object while somebody
    exports or traces another one: the call is kept out of that graph."""
    return weakref.finalize(owner, _untraced, function, *arguments)


def _untraced(function: Callable[..., object], *arguments: object) -> None:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        function(*arguments)
