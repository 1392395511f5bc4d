"""What quire.te computes on scales and amaxes keeps subnormal numbers, also where the caller flushes them to zero."""

import pytest
import torch

from python.loading.subnormals import ONE, THREE, TINY, bits
from quire.te.ops.pointwise import _RoundedGradient
from quire.te.pytorch import DType, Float8Quantizer, Float8Tensor

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("before, wanted", [(torch.zeros(1), 3 * ONE), (THREE * 2, 6 * ONE)])
def test_a_quantizer_with_a_scale_keeps_the_larger_of_two_subnormal_amaxes(flushing, before, wanted):
    x, amax = torch.cat([TINY, -THREE]).repeat(16), before.clone()
    quantizer = Float8Quantizer(torch.ones(1), amax, DType.kFloat8E4M3)
    flushing()
    quantizer(x)
    assert bits(amax) == [wanted]


def test_a_gradient_that_is_rounded_keeps_a_subnormal_amax(flushing):
    amaxes, gradient = torch.zeros(2), THREE.expand(4, 32).contiguous()
    x = torch.ones(4, 32, requires_grad=True)
    y = _RoundedGradient.apply(x, "fp8_tensor", torch.ones(1), amaxes)
    flushing()
    y.backward(gradient)
    assert bits(amaxes) == [3 * ONE, 0]


def test_a_tensor_of_given_codes_has_the_subnormal_amax_of_its_values(flushing):
    codes = torch.tensor([[2.0, -3.0, 0.5, 1.0]]).to(torch.float8_e4m3fn).view(torch.uint8)
    flushing()
    made = Float8Tensor(shape=(1, 4), dtype=torch.float32, data=codes, fp8_scale_inv=TINY, fp8_dtype=DType.kFloat8E4M3)
    assert bits(made.rowwise_amax) == [3 * ONE]
