"""The order of parameters, by which optimizers number their state: TransformerEngine's; and state of before."""

import copy

import pytest
import torch

import quire
from every_layer import call

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


def older(model):
    """Names of the parameters in the order of before: of each GroupedLinear weights, then biases."""
    names = []
    for owner, module in model.named_modules():
        own = [f"{owner}.{name}".strip(".") for name, _ in module.named_parameters(recurse=False)]
        names += sorted(own, key=lambda n: "bias" in n) if isinstance(module, quire.GroupedLinear) else own
    return names


def two_groups(order):
    return [
        [name for name in order if "fc2" not in name and "1" not in name],
        [n for n in order if "fc2" in n or "1" in n],
    ]


MODELS = {
    "GroupedLinear": lambda: quire.GroupedLinear(3, 64, 64),
    "one weight": lambda: quire.GroupedLinear(3, 64, 64, **ONE),
    "MoE": lambda: quire.MoE(64, 64, 3, 2, bias=True, activation="gelu", shared_ffn_hidden_size=64),
    "other layers": lambda: quire.LayerNormMLP(64, 64),
}


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01)


#: What makes the optimizer, its parameter groups, and whether it knows names.
OPTIMIZERS = {
    "one group": (adamw, lambda order: [order], False),
    "two groups with names": (adamw, two_groups, True),
    "momentum": (lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9), two_groups, False),
    "no state": (lambda groups: torch.optim.SGD(groups, lr=0.01), lambda order: [order], False),
}


def optimizer_of(make, model, order, grouping, named):
    parameters = dict(model.named_parameters())
    groups = [[(n, parameters[n]) if named else parameters[n] for n in names] for names in grouping(order)]
    return make([{"params": group} for group in groups if group])


def steps(model, optimizer, count):
    for seed in range(count):
        x = torch.randn(24, 64, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        call(model, x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("make, grouping, named", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_older_state_does_not_go_to_other_parameters(name, make, grouping, named, equal_bits):
    torch.manual_seed(0)
    before, now = MODELS[name](), MODELS[name]()
    order = [key for key, _ in now.named_parameters()]
    optimizer = optimizer_of(make, before, older(before), grouping, named)
    steps(before, optimizer, 2)
    now.load_state_dict(before.state_dict())
    again = optimizer_of(make, now, order, grouping, named)
    saved = copy.deepcopy(optimizer.state_dict())
    again.load_state_dict(quire.reorder_optimizer_state(saved, again, now))
    assert str(saved) == str(optimizer.state_dict())
    current = again.state_dict()
    assert quire.reorder_optimizer_state(current, again, now) is current
    for model, its in ((before, optimizer), (now, again)):
        steps(model, its, 2)
    pairs = zip(before.named_parameters(), now.named_parameters(), strict=True)
    assert all(a == b and equal_bits(p.detach(), q.detach()) for (a, p), (b, q) in pairs)


def test_state_of_another_model_is_refused_in_words():
    model, other = quire.GroupedLinear(2, 64, 64), quire.GroupedLinear(2, 64, 32)
    optimizer, its = (torch.optim.AdamW(m.parameters()) for m in (model, other))
    steps(other, its, 1)
    with pytest.raises(ValueError, match="reorder_optimizer_state: tensors of the state have not the shapes"):
        quire.reorder_optimizer_state(its.state_dict(), optimizer, model)
    fewer = torch.optim.AdamW([model.weight0])
    with pytest.raises(ValueError, match=r"groups of \[4\] parameters, the optimizer has groups of \[1\]"):
        quire.reorder_optimizer_state(its.state_dict(), fewer, model)
