"""Why quire.convert leaves a layer."""

from typing import Self


class Reason(str):
    """The words of a report, with what the caller can do. The error of quire.convert says that if all layers are left.

    Attributes:
        remedy: a sentence without its full stop; "" if there is nothing to do, or the words say it.
    """

    remedy: str

    def __new__(cls, words: str, remedy: str = "") -> Self:
        reason = super().__new__(cls, words)
        reason.remedy = remedy
        return reason


def remedy_of(reason: str) -> str:
    """ "" for words alone."""
    return reason.remedy if isinstance(reason, Reason) else ""
