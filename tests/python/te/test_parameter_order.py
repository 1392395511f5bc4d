"""The order of parameters, by which optimizers number their state: TransformerEngine's."""

import pytest
import torch

import quire

pytestmark = pytest.mark.any_device

ONE = {"single_grouped_weight": True}
ORDERS = {
    "each": ({}, "weight0 bias0 weight1 bias1 weight2 bias2"),
    "no bias": ({"bias": False}, "weight0 weight1 weight2"),
    "one weight": (ONE, "bias0 bias1 bias2 weight"),
    "one bias": ({"single_grouped_bias": True}, "weight0 weight1 weight2 bias"),
    "one of both": ({"single_grouped_bias": True, **ONE}, "weight bias"),
}


@pytest.mark.parametrize("options, names", ORDERS.values(), ids=ORDERS)
def test_a_parameter_has_no_other_number_than_in_transformer_engine(options, names):
    layer = quire.GroupedLinear(3, 16, 16, **options)
    assert [name for name, _ in layer.named_parameters()] == list(layer.state_dict()) == names.split()
    assert [*layer.weight_names, *layer.bias_names] == sorted(names.split(), key=lambda name: name[0], reverse=True)
    twin = quire.GroupedLinear(3, 16, 16, **options)
    twin.load_state_dict(dict(reversed(layer.state_dict().items())))  # by name, in any order
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), twin.parameters(), strict=True))
