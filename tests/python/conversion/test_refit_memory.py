"""quire.refit with values that lie in the memory of the model."""

import pytest
import torch

import quire

IN = 256


def layers():
    return torch.nn.Sequential(torch.nn.Linear(IN, IN), torch.nn.Linear(IN, IN)).requires_grad_(False)


def served(model, **options):
    return quire.convert(model, "mxfp8", for_inference=True, tokens=None, **options)


@pytest.mark.parametrize("name", ["bias", "weight"])
def test_a_value_in_the_memory_of_another_weight_is_refused(name):
    model, new = served(layers()), layers().state_dict()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"1.{name} is in the memory of the model's 0.{name}, which is written; pass"):
        quire.refit(model, new | {f"1.{name}": model[0].state_dict()[name]})
    after = model.state_dict()
    assert all(torch.equal(after[key].dequantize(), value.dequantize()) for key, value in before.items() if "w" in key)
    quire.refit(model, new | {"1.bias": model[0].bias.clone()})


def test_a_value_that_is_the_master_of_another_weight_is_refused_once():
    with quire.quantized_model_init(recipe="mxfp8", keep_master=True):
        model = torch.nn.Sequential(quire.Linear(IN, IN, bias=False), quire.Linear(IN, IN, bias=False))
    with pytest.raises(ValueError, match=r"1.weight is in the memory of the model's 0.weight(?!.*1.weight is in)"):
        quire.refit(model, {"0.weight": torch.ones(IN, IN), "1.weight": model[0].weight.master})


def test_each_value_may_lie_in_its_own_place():
    model = served(layers())
    assert quire.refit(model, model.state_dict()).plain


@pytest.mark.filterwarnings("ignore:quire.convert")
def test_a_tied_weight_that_kept_its_values_is_where_it_is_written():
    model = layers()
    model[1].weight = model[0].weight
    own = model.state_dict()
    served(model, filter=lambda layer, name: name == "1")
    assert quire.refit(model, own).plain and torch.equal(own["0.weight"], model[0].weight)
