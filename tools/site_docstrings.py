"""Griffe extension: lines of docstrings that say what a parameter is, as a list."""

import re

import griffe

#: "x: ..." or "eps, zero_centered_gamma: ..." at the beginning of a line, and what is indented below it.
_PARAMETER = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*(?:\n +.*)*)$", re.MULTILINE)


def as_list(docstring: str) -> str:
    text = docstring.replace("][", "]\\[")  # shapes and options, never links
    return _PARAMETER.sub(lambda found: f"\n* **`{found[1]}`**: {' '.join(found[2].split())}\n", text)


class Parameters(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
