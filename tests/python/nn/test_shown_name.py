"""print(model) shows which layers are quire's, and nothing is found by that name."""

import copy
import pickle
import re

import torch

import quire


class Mine(quire.Linear):
    pass


def shown(model) -> list[str]:
    """The class of each child, as print(model) shows it."""
    return re.findall(r"^  \(\w+\): ([\w.]+)\(", repr(model), re.MULTILINE)


def model() -> torch.nn.Sequential:
    layers = quire.Linear(8, 8), torch.nn.Linear(8, 8), Mine(8, 8), quire.RMSNorm(8), torch.nn.RMSNorm(8)
    return torch.nn.Sequential(*layers, quire.MoE(8, 8, num_experts=2, top_k=1))


def test_layers_of_quire_differ_from_those_of_torch():
    expected = ["quire.Linear", "Linear", "Mine", "quire.RMSNorm", "RMSNorm", "quire.MoE"]
    for one in (model(), copy.deepcopy(model()), pickle.loads(pickle.dumps(model()))):
        assert shown(one) == expected
    blocks = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    quire.convert(blocks, "mxfp8", filter=lambda module, name: name == "0")
    assert shown(blocks) == ["quire.Linear", "Linear"] and "recipe=MXFP8BlockScaling('x=mxfp8" in repr(blocks)


def test_what_pytorch_makes_of_a_layer_has_the_name_that_pytorch_gives():
    layer = quire.Linear(8, 8)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    assert repr(layer).startswith("ParametrizedLinear(")


def test_graphs_have_no_such_name():
    layers = torch.nn.Sequential(quire.Linear(256, 256, recipe="mxfp8"), torch.nn.GELU()).eval()
    exported = torch.export.export(layers, (torch.randn(4, 256),))
    assert "quire.Linear" not in exported.graph_module.code
