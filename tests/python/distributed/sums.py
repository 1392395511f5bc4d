"""What sums of the same terms in two orders may differ by."""

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
