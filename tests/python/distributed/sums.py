"""What sums of the same terms in two orders may differ by."""

import math

import torch


def assert_same_sums(found: torch.Tensor, expected: torch.Tensor, terms: int, where: object = "") -> None:
    """Sums in float32 of that many terms, each in an order of its own: equal up to rounding.

    The error of one order is about sqrt(n) 2^-24 times the sum of the absolute terms, if the n roundings are
    independent (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019). For terms of random
    signs this sum is about sqrt(n) times the result. There are two orders, so n eps of the result, over all elements.
    """
    assert found.shape == expected.shape and found.dtype == expected.dtype, where
    off, size = (found.double() - expected.double()).norm(), expected.double().norm()
    assert off <= terms * torch.finfo(torch.float32).eps * size, f"{where}: {off / size} of the norm, {terms} terms"


def assert_same_up_to(found: torch.Tensor, expected: torch.Tensor, roundings: int, where: object = "") -> None:
    """Results of the same terms of random signs, of which both together are rounded that often to a number of the size
    of the result.

    A rounding is off by eps / 2 of the number at most, and by eps / sqrt(12) of it in root mean square, and independent
    ones add up in squares: eps sqrt(roundings / 12) of the result, over all elements. The bound is sqrt(12), or 3.5,
    times that. A sum of n terms one after another counts as n / 2: after k terms it is about sqrt(k / n) of the result.
    """
    assert found.shape == expected.shape and found.dtype == expected.dtype, where
    off, size = (found.double() - expected.double()).norm(), expected.double().norm()
    unit = torch.finfo(found.dtype).eps
    assert off <= math.sqrt(roundings) * unit * size, f"{where}: {off / size} of the norm, {roundings} roundings"
