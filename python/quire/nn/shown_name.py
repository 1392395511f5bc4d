"""The name under which print(model) shows a layer."""

import torch


class ShownName(torch.nn.Module):
    """Shows quire's classes as "quire.Linear", so that they differ from those of torch.nn with the same name.

    A class that a program or another library derives from one of them keeps its own name. Nothing is found by this
    name.
    """

    #: The package that users import the class from.
    shown_in = "quire"

    def _get_name(self) -> str:
        cls = type(self)
        return f"{self.shown_in}.{cls.__name__}" if cls.__module__.startswith("quire.") else cls.__name__
