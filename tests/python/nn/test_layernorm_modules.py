"""LayerNormLinear and LayerNormMLP: equal to their parts. Compiled: test_every_way.py."""

import copy
import math
import pickle
import re

import pytest
import torch

import quire
from every_recipe import ALL, IN_ANY_PRECISION, params, some
from python.nn.layernorm_parts import Parts, make_linear, make_mlp
from steps import assert_rounded

pytestmark = pytest.mark.any_device

ACTIVATIONS = ["gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu"]


@pytest.fixture(params=params(IN_ANY_PRECISION | some("nvfp4_row_scaled", "custom")))
def recipe(request):
    return request.param


def results_of_steps(module, recipe, function=None, steps=3):
    """Results and gradients of some steps, with inputs that grow, so that a wrong delayed scale shows."""
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        first = next(module.parameters())
        features = module.norm.weight if isinstance(module, Parts) else module.layer_norm_weight
        x = (4.0**step * torch.randn(70, len(features), generator=generator)).to(first).requires_grad_()
        module.zero_grad()
        with quire.autocast(recipe is not None, recipe=recipe):
            y = (module if function is None else function)(x)
        (4.0**step * y.float().square().sum()).backward()
        parts = isinstance(module, Parts)
        gradients = module.gradients() if parts else {n: p.grad for n, p in module.named_parameters()}
        found += [y.detach(), x.grad, *(gradients[name] for name in sorted(gradients))]
    return found


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("make", [make_linear, make_mlp])
def test_equals_its_parts_bit_for_bit(make, normalization, zero_centered, recipe, equal_bits, device):
    fused = make(normalization, zero_centered_gamma=zero_centered)
    expected = results_of_steps(Parts(fused), recipe)
    assert all(map(equal_bits, expected, results_of_steps(fused.to(device), recipe)))


@pytest.mark.cpu_only
@pytest.mark.parametrize("make", [make_linear, make_mlp])
def test_with_quantized_weights_they_equal_their_parts_too(make, recipe, equal_bits, device):
    if recipe is None:
        pytest.skip("weights are quantized as a recipe says")
    plain = make(dtype=torch.float32).bfloat16()
    with quire.quantized_model_init(recipe=recipe, keep_master=True):
        fused, parts = make().to(device), Parts(plain)
    fused.load_state_dict(plain.state_dict())
    quire.set_rng_state(fused, quire.rng_state(plain))
    assert all(map(equal_bits, results_of_steps(parts, recipe), results_of_steps(fused, recipe)))
    weights = [p for p in fused.parameters() if p.dim() == 2]
    assert all(isinstance(w, quire.QuantizedTensor) and type(w.grad) is torch.Tensor for w in weights)


def test_checkpointing_changes_nothing_but_memory(recipe, equal_bits, device):
    plain, checkpointed = make_mlp(), make_mlp(checkpoint=True).to(device)
    assert all(map(equal_bits, results_of_steps(plain, recipe), results_of_steps(checkpointed, recipe)))
    saved = {}
    for module in (plain, checkpointed):
        sizes = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.nbytes) or t, lambda t: t)
        with quire.autocast(recipe is not None, recipe=recipe), hooks:
            module(torch.randn(64, 64).to(module.fc1_weight).requires_grad_())
        saved[module] = sum(sizes)
    assert saved[checkpointed] < saved[plain] / 2


def test_a_recomputed_pass_has_the_recipe_and_the_scales_of_the_first(equal_bits, device):
    """Backward after autocast was left, and after another step has moved the scales."""
    results = []
    for module in (make_mlp(), make_mlp(checkpoint=True).to(device)):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(module.fc1_weight).requires_grad_()
        with quire.autocast(recipe=ALL["delayed"]):
            y = module(x)
        with quire.autocast(recipe=ALL["delayed"]):
            module(100 * x)
        with quire.autocast(recipe=ALL["delayed"]):
            pass
        y.float().square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in module.parameters()), module.fc2_delayed.fwd_scale])
    assert all(map(equal_bits, *results))


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", [*ACTIVATIONS, "clamped_swiglu"])
def test_in_high_precision_each_activation_is_that_of_float64(name, equal_bits, device):
    """The module is its parts bit for bit, and the part that is its activation is within the bound of numerics.md 11.3.
    test_norm.py compares the norm with float64; the products are those of PyTorch."""
    parameters = {"limit": 0.5, "alpha": 1.5, "glu_linear_offset": 0.25} if name == "clamped_swiglu" else None
    module = make_mlp(dtype=torch.float32, activation=name, activation_params=parameters)
    assert all(map(equal_bits, results_of_steps(Parts(module), None), results_of_steps(module.to(device), None)))
    h = (1.5 * torch.randn(20, 2 * 96 if name.endswith("glu") else 96)).requires_grad_()
    wide = h.detach().double().requires_grad_()
    a, up = wide.chunk(2, -1) if name.endswith("glu") else (wide, torch.ones(()).double())
    if name == "clamped_swiglu":
        a, up = a.clamp(max=0.5), up.clamp(-0.5, 0.5) + 0.25
    curve = {
        "glu": torch.sigmoid,
        # PyTorch's tanh form, of which 1 + tanh would cancel digits of float64.
        "ge": lambda v: v * torch.sigmoid(math.sqrt(8 / math.pi) * (v + 0.044715 * v**3)),
        "qge": lambda v: v * torch.sigmoid(1.702 * v),
        "re": torch.relu,
        "sre": lambda v: torch.relu(v) ** 2,
        "si": torch.nn.functional.silu,
        "swi": torch.nn.functional.silu,
        "clamped_swi": lambda v: v * torch.sigmoid(1.5 * v),
    }[name if name == "glu" else name.removesuffix("glu").removesuffix("lu")]
    y, _ = quire.functional.activation(h, module._activation, torch.float32)
    expected, argument = curve(a) * up, a.detach().abs() * (1.8 + 0.08 * a.detach() ** 2)  # of any sigmoid, at most
    of_value = 8 + 4 * argument
    assert_rounded(y, expected, of_value * expected.abs(), 1)
    dy = torch.randn(y.shape)
    (got,), (wanted,) = torch.autograd.grad(y, h, dy), torch.autograd.grad(expected, wide, dy.double())
    # Both terms of a curve's derivative are below 1.2, but that of srelu is 2 a.
    magnitudes = [dy.abs() * up.detach().abs() * (2.4 + 2 * a.detach().abs()), dy.abs() * curve(a.detach()).abs()]
    parts = wanted.chunk(2, -1) if name.endswith("glu") else [wanted]
    for found, exact, magnitude in zip(got.chunk(len(parts), -1), parts, magnitudes, strict=False):
        assert_rounded(found, exact, 2 * of_value * magnitude, 1)


def test_parameters_have_names_and_shapes():
    assert [*make_linear().state_dict()] == ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    assert [*make_linear("RMSNorm", bias=False).state_dict()] == ["layer_norm_weight", "weight"]
    names = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
    mlp = make_mlp(activation="geglu")
    assert [*mlp.state_dict()] == names
    assert [tuple(p.shape) for p in mlp.parameters()] == [(64,), (64,), (192, 64), (192,), (64, 96), (64,)]
    assert [*make_mlp("RMSNorm", bias=False).state_dict()] == ["layer_norm_weight", "fc1_weight", "fc2_weight"]


def test_bad_input_is_refused_in_words():
    with pytest.raises(ValueError, match="normalization must be 'LayerNorm' or 'RMSNorm', got 'BatchNorm'"):
        make_linear("BatchNorm")
    with pytest.raises(NotImplementedError, match="activation='no_such' is not available; use one of gelu"):
        make_mlp(activation="no_such")
    with pytest.raises(ValueError, match="activation_params has 'limit', but swiglu takes none"):
        make_mlp(activation="swiglu", activation_params={"limit": 1.0})
    with quire.autocast(), pytest.raises(TypeError, match="outside torch.autocast weight must have the dtype of x"):
        make_linear()(torch.randn(2, 96))


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_delayed"])
@pytest.mark.parametrize("shape", [[2, 95], [95], [2, 0], []])
@pytest.mark.parametrize("make", [make_linear, make_mlp, lambda: make_mlp(checkpoint=True)])
def test_an_x_with_other_features_than_the_norm_is_refused_by_the_name_of_the_layer(make, shape, recipe):
    module = make()
    features = module.layer_norm_weight.numel()
    match = (
        rf"^quire.{type(module).__name__}: x must be \[..., {features}\], got {re.escape(str(shape))}; the norm of the"
    )
    with quire.autocast(enabled=recipe is not None, recipe=recipe), pytest.raises(RuntimeError, match=match):
        module(torch.randn(shape).bfloat16())


def test_what_is_returned(recipe, equal_bits, device):
    x = torch.randn(40, 96).bfloat16().to(device)
    context = {"enabled": recipe is not None, "recipe": recipe}
    plain = make_linear().to(device)
    norm = quire.LayerNorm(96, dtype=torch.bfloat16).to(device)
    norm.load_state_dict({"weight": plain.layer_norm_weight, "bias": plain.layer_norm_bias})
    with quire.autocast(**context):
        y, normed = make_linear(return_layernorm_output=True).to(device)(x)
        assert equal_bits(y, make_linear().to(device)(x)) and equal_bits(normed, norm(x))
        y, bias, normed = make_linear(return_layernorm_output=True, return_bias=True).to(device)(x)
        assert equal_bits(bias, plain.bias)
        with torch.no_grad():
            plain.bias.zero_()
        assert equal_bits(y, plain(x))
        y, bias = make_mlp(return_bias=True).to(device)(x[:, :64])
        assert equal_bits(bias, make_mlp().to(device).fc2_bias) and y.shape == (40, 64)
        assert len(make_mlp(return_bias=True, return_layernorm_output=True).to(device)(x[:, :64])) == 3


def test_gradients_of_the_returned_norm_are_added(recipe, equal_bits):
    x = torch.randn(40, 96).bfloat16()
    module = make_linear(return_layernorm_output=True)
    parts = Parts(module)
    with quire.autocast(recipe is not None, recipe=recipe):
        y, normed = module(x)
        of_parts = parts.norm(x)
        (y.float().sum() + normed.float().sum()).backward()
        (parts.products[0](of_parts).float().sum() + of_parts.float().sum()).backward()
    assert equal_bits(module.layer_norm_weight.grad, parts.norm.weight.grad)
    assert equal_bits(module.layer_norm_bias.grad, parts.norm.bias.grad)


@pytest.mark.cpu_only
def test_under_torch_autocast_float32_parameters_get_float32_gradients(recipe, equal_bits, device):
    if recipe is None and device.type != "cpu":
        pytest.skip("the test device has no autocast for PyTorch's own matmul")
    fused = make_mlp(dtype=torch.float32, activation="swiglu")
    results = []
    for module, place in ((Parts(fused), torch.device("cpu")), (fused.to(device), device)):
        x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1)).to(place).requires_grad_()
        with quire.autocast(recipe is not None, recipe=recipe), torch.autocast(place.type, torch.bfloat16):
            y = module(x)
        y.sum().backward()
        results.append([y, x.grad])
        assert y.dtype == torch.bfloat16 and all(p.grad.dtype == torch.float32 for p in module.parameters())
    assert all(map(equal_bits, *results))


def test_random_states_are_saved_and_restored():
    model = torch.nn.Sequential(make_mlp(), quire.Linear(64, 96, params_dtype=torch.bfloat16), make_linear())
    state = quire.rng_state(model)
    assert [*state] == ["0.fc1", "0.fc2", "1", "2"]
    assert len({int(value[0]) for value in state.values()}) >= 2
    assert int(state["0.fc1"][0]) != int(state["0.fc2"][0])
    with quire.autocast(recipe=ALL["nvfp4"]):
        y = model(torch.randn(16, 64).bfloat16())
    y.sum().backward()
    assert {int(value[1]) for value in quire.rng_state(model).values()} == {1}
    quire.set_rng_state(model, state)
    assert {int(value[1]) for value in quire.rng_state(model).values()} == {0}


@pytest.mark.parametrize("make", [make_linear, make_mlp])
def test_moves_copies_and_pickles(make, recipe, equal_bits):
    module = make()
    with torch.device("meta"):
        empty = make()
    empty.to_empty(device="cpu").load_state_dict(module.state_dict())
    quire.set_rng_state(empty, quire.rng_state(module))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), empty):
        assert all(
            map(
                equal_bits,
                results_of_steps(copy.deepcopy(module), recipe, steps=1),
                results_of_steps(other, recipe, steps=1),
            )
        )


def test_init_methods_are_called():
    mlp = make_mlp(init_method=torch.nn.init.ones_, output_layer_init_method=lambda w: w.fill_(2))
    assert mlp.fc1_weight.eq(1).all() and mlp.fc2_weight.eq(2).all()
    assert quire.LayerNormLinear(8, 4, init_method=torch.nn.init.zeros_).bias.eq(0).all()
    bound = 1 / math.sqrt(96)
    assert 0.8 * bound < make_linear().weight.abs().max() <= bound
    torch.manual_seed(0)
    for module in (quire.LayerNormLinear(96, 400), quire.GroupedLinear(1, 96, 400, single_grouped_bias=True)):
        assert 0.8 * bound < module.bias.abs().max() <= bound


def test_no_token_count_is_special(recipe, device):
    for rows in (0, 1):
        module = make_mlp(activation="swiglu").to(device)
        with quire.autocast(recipe is not None, recipe=recipe):
            y = module(torch.randn(rows, 64).bfloat16().to(device))
        y.sum().backward()
        assert y.shape == (rows, 64) and module.fc1_weight.grad.isfinite().all()


def test_without_gradients_nothing_is_quantized_columnwise():
    module = make_mlp()
    with torch.no_grad(), quire.autocast(), quire.debug.operands() as operands:
        module(torch.randn(32, 64).bfloat16())
    assert [o.role for o in operands] == ["x", "w", "x", "w"]
    assert all(o.tensor.columnwise_data is None for o in operands)


def test_export_holds_the_outer_operators():
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_mlp()

        def forward(self, x):
            with quire.autocast(recipe=ALL["mxfp8"]):
                return self.inner(x)

    module, x = Module(), torch.randn(8, 64).bfloat16()
    with torch.no_grad():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},))
        assert torch.equal(program.module()(x), module(x))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {"quire.norm.default", "quire.activation.default", "quire.linear_prequantized.default"} <= names
