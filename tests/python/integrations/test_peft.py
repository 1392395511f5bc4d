"""Low-rank adapters of peft on layers of quire."""

import copy
import subprocess
import sys
import typing

import pytest

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
import torch  # noqa: E402
from peft.tuners.lora import config as lora_configs  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import quire  # noqa: E402
from python.integrations import tiny_language_models as tiny  # noqa: E402
from quire.integrations.peft import prepare  # noqa: E402
from quire.integrations.transformers import register  # noqa: E402
from steps import assert_rounded  # noqa: E402

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}


class Adapted(torch.nn.Module):
    """A layer with an adapter, written out."""

    def __init__(self, base, down, up):
        super().__init__()
        self.base, self.down, self.up = base.requires_grad_(False), down, up

    def forward(self, x):
        y = self.base(x)
        down, up = torch.nn.functional.linear(x, self.down), torch.nn.functional.linear
        return y + up(down, self.up) * (LORA["lora_alpha"] / LORA["r"])


def adapt(model, as_in):
    """Gives a model the adapters, with their present values, of one that peft has adapted."""
    model.requires_grad_(False)
    values = {name.removeprefix("base_model.model."): p.detach().clone() for name, p in as_in.named_parameters()}
    for name in [name for name, _ in model.named_modules() if name.endswith(tuple(LORA["target_modules"]))]:
        down, up = (torch.nn.Parameter(values[f"{name}.lora_{part}.default.weight"]) for part in "AB")
        model.set_submodule(name, Adapted(model.get_submodule(name), down, up))


def trained_losses(model):
    ids, optimizer = tiny.tokens(4), torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def loaded(tmp_path):
    register()
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)


def test_adapters_train_on_quantized_weights_which_stay_as_they_are(loaded):
    before = {
        name: p.detach().dequantize() for name, p in loaded.named_parameters() if isinstance(p, quire.QuantizedTensor)
    }
    assert len(before) == 14
    own = copy.deepcopy(loaded)
    model = peft.get_peft_model(loaded, peft.LoraConfig(**LORA))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    adapt(own, model)
    losses = trained_losses(model)
    assert losses == trained_losses(own) and len(set(losses)) == 6
    now = {
        name: p.detach().dequantize() for name, p in loaded.named_parameters() if isinstance(p, quire.QuantizedTensor)
    }
    assert [torch.equal(a, b) for a, b in zip(before.values(), now.values(), strict=True)] == [True] * 14


def test_the_gradient_of_an_adapter_is_that_of_the_decoded_weight(loaded):
    """dx of a quantized layer is computed of decoded weights, so that the adapters before it learn."""
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded, peft.LoraConfig(**LORA, init_lora_weights=False))
    model(tiny.tokens(), labels=tiny.tokens()).loss.backward()
    for name, p in model.named_parameters():
        assert (p.grad is not None and p.grad.any()) == ("lora_" in name), name


def test_merging_into_a_quantized_weight_is_refused_and_changes_nothing(loaded):
    config = prepare(peft.LoraConfig(**LORA, init_lora_weights=False))
    model = peft.get_peft_model(loaded, config).eval()
    ids = tiny.tokens()
    with torch.no_grad():
        before = model(ids).logits
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(NotImplementedError, match=r"quantized as mxfp8.*model\.dequantize\(\)"):
            merge()
    with pytest.raises(ValueError, match=r"call model\.dequantize\(\), which changes both"):
        quire.dequantize_weights(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)


def test_nothing_has_to_be_prepared_for_a_merge_to_be_refused(loaded, tmp_path):
    """Also of an adapter that is loaded, where other layers have plain weights, which stay as they are."""
    config = peft.LoraConfig(**LORA | {"target_modules": ["lm_head", "q_proj"]}, init_lora_weights=False)
    peft.get_peft_model(loaded, config).save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    head, layer = model.base_model.model.lm_head, model.base_model.model.model.layers[1].self_attn.q_proj
    before = head.base_layer.weight.detach().clone()
    assert not isinstance(head.base_layer.weight, quire.QuantizedTensor)
    for merge in (model.merge_adapter, model.merge_and_unload, layer.merge):
        with pytest.raises(NotImplementedError, match="quantized as mxfp8"):
            merge()
    assert torch.equal(head.base_layer.weight, before) and not head.merged
    head.merge()
    assert not torch.equal(head.base_layer.weight, before)
    assert model.unload() is base


@pytest.mark.parametrize("order", ["quire, peft", "peft, quire"])
def test_merging_is_guarded_in_whatever_order_packages_are_imported(order):
    code = f"import {order}\nassert peft.tuners.lora.layer.Linear.merge._of_quire"
    subprocess.run([sys.executable, "-c", code], check=True)


def on_quantized_weights(recipe, **options):
    torch.manual_seed(0)
    model = quire.convert(
        tiny.model_of("llama"), recipe, min_features=1, for_inference=True, tokens=None, gradients="input"
    )
    return model, peft.get_peft_model(model, prepare(peft.LoraConfig(**LORA, **options)))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "x=none,w=mxfp4"])
def test_adapters_train_on_a_model_converted_for_inference(recipe):
    """peft's layers, and the same adapters written out, on the same quantized weights."""
    own, model = on_quantized_weights(recipe)
    reference = copy.deepcopy(model).unload()
    adapt(reference, model)
    losses = trained_losses(model)
    assert losses == trained_losses(reference) and losses[-1] < losses[0]
    assert all(
        isinstance(layer.weight, quire.QuantizedTensor) for layer in own.modules() if type(layer) is quire.Linear
    )


def adapted_layers(model):
    """Layers with an adapter, and their names in the model without adapters."""
    named = [(name.removeprefix("base_model.model."), layer) for name, layer in model.named_modules()]
    return [(name, layer) for name, layer in named if hasattr(layer, "get_delta_weight")]


def merged_weights(model):
    """What merged layers must have as their weights."""
    layers = adapted_layers(model)
    return {
        name: (layer.base_layer.weight + layer.get_delta_weight("default")).detach().clone() for name, layer in layers
    }


def assert_merged(model, expected, ids):
    """Layers have these weights, and compute with them. (A bound for the logits of two models would be a guess.)"""
    assert len(expected) == 6
    layers = {name.removeprefix("base_model.model."): layer for name, layer in model.named_modules()}
    for name, weight in expected.items():
        layer = getattr(layers[name], "base_layer", layers[name])
        x = torch.randn(3, weight.shape[1])
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layers[name](x), torch.nn.functional.linear(x, weight, layer.bias))
    assert model(ids).logits.isfinite().all()


def test_adapters_merge_into_dequantized_weights_and_out_again():
    _, model = on_quantized_weights("nvfp4", init_lora_weights=False)
    model.eval()
    ids = tiny.tokens()
    with pytest.raises(NotImplementedError, match=r"quire\.dequantize_weights\(model\)"):
        model.merge_adapter()
    quire.dequantize_weights(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    with torch.no_grad():
        expected = merged_weights(model)
        before = {name: layer.base_layer.weight.clone() for name, layer in adapted_layers(model)}
        model.merge_adapter()
        assert_merged(model, expected, ids)
        model.unmerge_adapter()
        for name, layer in adapted_layers(model):  # a sum and a difference are rounded
            size = before[name].double().abs() + layer.get_delta_weight("default").double().abs()
            assert_rounded(layer.base_layer.weight, before[name].double(), size, 2)
        expected = merged_weights(model)
        merged = model.merge_and_unload()
        assert_merged(merged, expected, ids)
        quire.convert(merged, "mxfp8", min_features=1, for_inference=True, tokens=None)
    assert isinstance(merged.model.layers[0].self_attn.q_proj.weight, quire.QuantizedTensor)


def test_adapters_of_a_loaded_model_merge_after_its_own_dequantize(loaded):
    model = peft.get_peft_model(loaded, prepare(peft.LoraConfig(**LORA, init_lora_weights=False))).eval()
    model.dequantize()
    with torch.no_grad():
        expected = merged_weights(model)
        assert_merged(model.merge_and_unload(), expected, tiny.tokens())


def test_merging_into_a_plain_weight_of_a_layer_of_quire_is_as_in_peft():
    torch.manual_seed(0)
    model = quire.convert(tiny.model_of("llama"), None, min_features=1)
    model = peft.get_peft_model(model, prepare(peft.LoraConfig(**LORA, init_lora_weights=False))).eval()
    with torch.no_grad():
        expected = merged_weights(model)
        model.merge_adapter()
        assert_merged(model, expected, tiny.tokens())


def test_another_configuration_is_refused():
    with pytest.raises(TypeError, match="must be a peft.LoraConfig, got IA3Config"):
        prepare(peft.IA3Config())


def test_adapters_merge_into_a_dequantized_model(loaded):
    torch.manual_seed(0)
    plain = loaded.dequantize()
    model = peft.get_peft_model(plain, peft.LoraConfig(**LORA, init_lora_weights=False)).eval()
    with torch.no_grad():
        expected = merged_weights(model)
        assert_merged(model.merge_and_unload(), expected, tiny.tokens())


def test_adapters_train_on_layers_that_quantize_in_each_call():
    model = tiny.model_of("llama")
    quire.convert(model, "mxfp8", min_features=1)
    model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    assert type(model.base_model.model.model.layers[0].self_attn.q_proj.base_layer) is quire.Linear
    model(tiny.tokens(), labels=tiny.tokens()).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_saving_with_an_adapter_writes_the_adapter_only(loaded, tmp_path):
    loaded.add_adapter(peft.LoraConfig(**LORA))
    loaded.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()


#: Each value that peft lists for init_lora_weights; of one it lists a template.
LISTED = [
    each.replace("[number of iters]", "4")
    for kind in typing.get_args(typing.get_type_hints(peft.LoraConfig)["init_lora_weights"])
    for each in typing.get_args(kind)
]
#: Those that write W - BA into the weight. Of "orthogonal", BA is 0, and others only choose A and B. peft takes
#: "lora_ga" too, which it does not list.
WRITING = {"pissa", "pissa_niter_4", "corda", "olora", "loftq", "lora_ga"}
OPTIONS = {
    "eva": lambda: {"eva_config": lora_configs.EvaConfig()},
    "corda": lambda: {"corda_config": lora_configs.CordaConfig()},
    "loftq": lambda: {"loftq_config": lora_configs.LoftQConfig()},
    "lora_ga": lambda: {"lora_ga_config": lora_configs.LoraGAConfig()},
}


def initialised(how, **options):
    if how == "kasa":
        return peft.LoraConfig(**LORA | options, kasa_config=lora_configs.KasaConfig())
    return peft.LoraConfig(**LORA | options, init_lora_weights=how, **OPTIONS.get(how, dict)())


def contents(model):
    """Names and classes of modules, and every stored byte of the parameters."""
    kinds = [(name, type(module)) for name, module in model.named_modules()]
    stored = [
        (name, part, tensor.clone())
        for name, p in model.named_parameters()
        for part, tensor in (p.buffers() if isinstance(p, quire.QuantizedTensor) else {"": p.detach()}).items()
    ]
    return kinds, stored


def assert_same_contents(model, before):
    kinds, stored = contents(model)
    assert kinds == before[0] and len(stored) == len(before[1])
    for (name, part, now), (*known, old) in zip(stored, before[1], strict=True):
        assert [name, part] == known and torch.equal(now, old)


def quantized_model(recipe="nvfp4", **options):
    torch.manual_seed(0)
    model = tiny.model_of("llama")
    quire.convert(model, recipe, min_features=1, for_inference=True, tokens=None, gradients="input", **options)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer._peft_loraga_grad = torch.randn(layer.weight.shape)  # as preprocess_loraga
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", [*sorted(WRITING), "kasa"])
def test_an_initialisation_that_writes_to_a_quantized_weight_is_refused_and_changes_nothing(how):
    model = quantized_model()
    before, attributes = contents(model), {*vars(model)}
    message = r"the weight, and that of 'model\.layers\.0\.\S+' is quantized as nvfp4.*quire\.convert after it"
    with pytest.raises(NotImplementedError, match=message):
        peft.get_peft_model(model, initialised(how))
    assert_same_contents(model, before)
    assert {*vars(model)} == attributes
    with pytest.raises(NotImplementedError, match=message):
        model.add_adapter(initialised(how))  # of transformers
    assert_same_contents(model, before)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    before = contents(adapted)
    with pytest.raises(NotImplementedError, match=message):
        adapted.add_adapter("second", initialised(how))
    assert_same_contents(adapted, before)
    assert [*adapted.peft_config] == ["default"]


@pytest.mark.parametrize("how", [True, False, *(each for each in LISTED if each not in WRITING)])
def test_other_initialisations_leave_quantized_weights_as_they_are(how):
    def codes(model):
        return [q for q in model.parameters() if isinstance(q, quire.QuantizedTensor)]

    model = quantized_model()
    before = [q.detach().clone() for q in codes(model)]
    adapted = peft.get_peft_model(model, initialised(how))
    assert WRITING < {*LISTED, "lora_ga"} and len(before) == len(codes(adapted)) > 0
    for old, now in zip(before, codes(adapted), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old.buffers().values(), now.buffers().values(), strict=True))


@pytest.mark.filterwarnings("ignore")
def test_a_plain_weight_beside_quantized_ones_is_initialised_as_in_peft():
    model = quantized_model(filter=lambda module, name: "q_proj" not in name)
    adapted = peft.get_peft_model(model, initialised("pissa", target_modules=["q_proj"]))
    layer = adapted.base_model.model.model.layers[0].self_attn.q_proj
    torch.manual_seed(0)
    weight = tiny.model_of("llama").model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(layer.base_layer.weight, weight)
    delta = layer.get_delta_weight("default")
    size = weight.double().abs() + layer.scaling["default"] * (
        layer.lora_B["default"].weight.double().abs() @ layer.lora_A["default"].weight.double().abs()
    )
    # Twice a sum of r products and a factor, which is subtracted, and is added here.
    assert_rounded(layer.base_layer.weight + delta, weight.double(), size, 2 * (LORA["r"] + 2))
    with pytest.raises(NotImplementedError, match="k_proj' is quantized"):
        peft.get_peft_model(adapted.unload(), initialised("pissa", target_modules="all-linear"))


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_is_converted_after_such_an_initialisation_trains():
    """The remedy of the error: the adapters are left in high precision, by a filter here."""
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny.model_of("llama"), initialised("pissa"))
    options = {"min_features": 1, "for_inference": True, "tokens": None, "gradients": "input"}
    quire.convert(model, "mxfp8", filter=lambda module, name: ".lora_" not in name, **options)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.base_layer.weight, quire.QuantizedTensor) and layer.lora_A["default"].weight.requires_grad
    losses = trained_losses(model)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_whose_initialisation_is_repeated_when_it_is_loaded_is_refused(tmp_path):
    torch.manual_seed(0)
    peft.get_peft_model(tiny.model_of("llama"), initialised("olora")).save_pretrained(tmp_path)
    model = quantized_model()
    before = contents(model)
    with pytest.raises(NotImplementedError, match="init_lora_weights='olora' initialises an adapter by a change"):
        peft.PeftModel.from_pretrained(model, tmp_path)
    assert_same_contents(model, before)
