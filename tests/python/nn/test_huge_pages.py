"""Large results get pages of 2 MiB, because the first touch of a page of 4 KiB takes longer than writing it."""

import mmap
import resource
from collections.abc import Callable

import pytest
import torch

import quire

SMALL_PAGE = 4096


def page_faults(function: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    function()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def touch_huge_pages(size: int) -> None:
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size, SMALL_PAGE):
            memory[at] = 1


def test_a_large_gradient_takes_few_page_faults():
    """It has more than 32 MiB, from which on malloc always takes fresh memory."""
    layer = quire.Linear(4096, 4096 + 512, bias=False, dtype=torch.bfloat16)
    size, x = layer.weight.nbytes, torch.randn(32, 4096, dtype=torch.bfloat16)
    few = size // SMALL_PAGE // 2
    if page_faults(lambda: touch_huge_pages(size)) > few:
        pytest.skip("the system gives no pages of 2 MiB")

    def step():
        layer.weight.grad = None
        with quire.autocast(recipe="mxfp8"):
            layer(x).sum().backward()

    assert min(page_faults(step) for _ in range(4)) < few
