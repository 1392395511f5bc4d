"""Every class of recipe, delayed scaling among them, for tests of options that each must serve; results compared."""

import pytest

from quire import recipe as recipes

DELAYED = recipes.DelayedScaling(amax_history_len=4)
ALL = {
    "fp8_current": recipes.Float8CurrentScaling(),
    "fp8_block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "delayed": DELAYED,
}
every_recipe = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
in_any_precision = pytest.mark.parametrize("recipe", [None, *ALL.values()], ids=["high_precision", *ALL])
ways = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def assert_same(a, b, equal_bits):
    """Bit for bit, or both None."""
    for left, right in zip(a, b, strict=True):
        assert (left is None and right is None) or equal_bits(left, right)
