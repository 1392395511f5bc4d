"""Optimizers on quantized parameters: each update is computed on decoded values, or on a master, and quantized anew."""

import pytest
import torch

import quire
from every_recipe import DEFAULTS
from pairwise import pairwise
from quire import QuantizedTensor
from steps import assert_rounded, same

pytestmark = pytest.mark.any_device

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),  # PyTorch chooses otherwise for some devices
}


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS)
def make_optimizer(request):
    return request.param


def gradient(shape, i, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_is_that_of_the_decoded_values_quantized(recipe, make_optimizer, dtype, device):
    if make_optimizer is OPTIMIZERS["sgd_fused"] and dtype == torch.bfloat16 and device.type != "cpu":
        pytest.skip("PyTorch's kernel of this optimizer reads beyond the end of bfloat16 tensors")
    initial = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    text = recipe.weight_spec
    quantized = torch.nn.Parameter(quire.quantize(initial, text, columnwise=True))
    bias, plain_bias = (torch.nn.Parameter(torch.zeros(64, dtype=dtype, device=device)) for _ in range(2))
    plain = torch.nn.Parameter(quantized.detach().dequantize())
    optimizer, reference = make_optimizer([quantized, bias]), make_optimizer([plain, plain_bias])
    pointers = [t.data_ptr() for t in quantized.buffers().values()]
    for i in range(4):
        for p in (quantized, bias, plain, plain_bias):
            p.grad = gradient(p.shape, i, dtype).to(device)
        optimizer.step()
        reference.step()
        expected = quire.quantize(plain.detach(), text, columnwise=True)
        assert same(quantized, expected) and torch.equal(bias, plain_bias)
        with torch.no_grad():
            plain.copy_(expected)
    assert [t.data_ptr() for t in quantized.buffers().values()] == pointers
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert state and not any(isinstance(t, QuantizedTensor) for t in state) or make_optimizer is OPTIMIZERS["sgd"]


@pytest.mark.cpu_only
@pytest.mark.parametrize("make_optimizer", [OPTIMIZERS["adamw"], OPTIMIZERS["adamw_fused"]], ids=["single", "fused"])
def test_a_master_in_float32_takes_the_updates_of_a_bfloat16_parameter(make_optimizer, device):
    initial = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(device)
    quantized = torch.nn.Parameter(quire.quantize(initial.bfloat16(), "nvfp4:16x16", columnwise=True))
    quantized.master = initial.clone()
    optimizer = make_optimizer([quantized])
    for i in range(3):
        quantized.grad = gradient((64, 96), i, torch.bfloat16).to(device)
        before = quantized.master.clone()
        optimizer.step()
        moved = (quantized.master - before).abs()
        # An element moves by at most lr (1 - beta1) / sqrt(1 - beta2) = 0.032, and lr * 0.01 of itself decays.
        assert 0 < moved.max() < 0.05 and same(
            quantized, quire.quantize(quantized.master, "nvfp4:16x16", columnwise=True)
        )
    average, magnitude = torch.zeros(2, 64, 96, dtype=torch.float64)
    for i in range(3):
        value = gradient((64, 96), i, torch.bfloat16).double()
        average, magnitude = 0.9 * average + 0.1 * value, 0.9 * magnitude + 0.1 * value.abs()
    kept = optimizer.state[quantized]["exp_avg"]
    assert kept.dtype == torch.bfloat16
    assert_rounded(kept, average, magnitude, 2 * 2**16 + 9)  # rounded to bfloat16 twice before, which is 2^-8 each


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = quire.Linear(48, 96), quire.Linear(96, 48, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.relu(self.up(x)))


def losses_of_steps(model, make_optimizer, recipe, function=None, steps=4):
    optimizer, losses = make_optimizer(model.parameters()), []
    for i in range(steps):
        x = torch.randn(32, 48, generator=torch.Generator().manual_seed(i)).to(model.up.bias.device)
        with quire.autocast(recipe=recipe):
            loss = ((model if function is None else function)(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_model(recipe=None, **options):
    torch.manual_seed(2)
    with quire.quantized_model_init(recipe is not None, recipe=recipe, **options):
        return Model()


#: Optimizers that read a weight into other tensors.
READING = {
    "sgd_decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, foreach=False),
    "adam_decay": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("name", ["sgd_foreach", "adamw", "adamw_foreach", "adamw_fused", *READING])
def test_with_a_master_training_is_that_of_plain_weights(any_recipe, name, device):
    plain, quantized = make_model().to(device), make_model(any_recipe, keep_master=True).to(device)
    make_optimizer = (OPTIMIZERS | READING)[name]
    expected = losses_of_steps(plain, make_optimizer, any_recipe)
    assert losses_of_steps(quantized, make_optimizer, any_recipe) == expected and len(set(expected)) == 4
    assert torch.equal(quantized.up.weight.master, plain.up.weight)


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8"])
def test_without_one_training_still_learns_in_eight_bits(name, compiler):
    recipe = quire.recipe.from_name(name)
    losses = losses_of_steps(make_model(recipe), OPTIMIZERS["adamw"], recipe, steps=30)
    assert losses[-1] < losses[0]  # by how much, depends on roundings
    model = make_model(recipe)
    assert (
        losses_of_steps(model, OPTIMIZERS["adamw"], recipe, compiler(model), steps=30) == losses
        and compiler.graphs == 1
    )


class OnPlainTensors:
    """An optimizer of plain tensors with the masters or the decoded values of parameters, which get the results."""

    def __init__(self, parameters, make_optimizer):
        self.parameters = list(parameters)
        values = [p.dequantize() if isinstance(p, QuantizedTensor) else p for p in self.parameters]
        masters = [getattr(p, "master", None) for p in self.parameters]
        values = [value if master is None else master for value, master in zip(values, masters, strict=True)]
        self.plain = [torch.nn.Parameter(value.detach().clone()) for value in values]
        self.optimizer, self.round_plain = make_optimizer(self.plain), not any(m is not None for m in masters)

    @torch.no_grad()
    def step(self):
        for plain, p in zip(self.plain, self.parameters, strict=True):
            plain.grad = p.grad
        self.optimizer.step()
        for plain, p in zip(self.plain, self.parameters, strict=True):
            p.copy_(plain)
            if self.round_plain:
                plain.copy_(p)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


@pytest.mark.parametrize(
    ("recipe", "name", "keep_master"), pairwise(list(DEFAULTS), ["sgd", "sgd_decay", "adamw_foreach"], [False, True])
)
def test_a_compiled_optimizer_makes_the_same_updates(recipe, compiler, name, keep_master):
    recipe = DEFAULTS[recipe]
    eager, model = (make_model(recipe, keep_master=keep_master) for _ in range(2))

    def compiled(parameters):
        optimizer = (OPTIMIZERS | READING)[name](parameters)
        optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        return optimizer

    losses = losses_of_steps(model, compiled, recipe)
    if name.startswith("sgd"):
        assert losses == losses_of_steps(eager, (OPTIMIZERS | READING)[name], recipe) and same(
            model.up.weight, eager.up.weight
        )
    else:  # PyTorch's compiled AdamW computes its factors in another way than its eager one
        assert losses == losses_of_steps(eager, lambda parameters: OnPlainTensors(parameters, compiled), recipe)
    if keep_master:
        assert same(model.up.weight, quire.quantize(model.up.weight.master, recipe.weight_spec, columnwise=True))


def test_training_resumes_exactly(recipe):
    model = make_model(recipe, keep_master=True)
    losses_of_steps(model, OPTIMIZERS["sgd"], recipe)
    other = make_model(recipe, keep_master=True)
    other.load_state_dict(model.state_dict())
    quire.set_rng_state(other, quire.rng_state(model))
    assert losses_of_steps(other, OPTIMIZERS["sgd"], recipe) == losses_of_steps(model, OPTIMIZERS["sgd"], recipe)


def test_gradients_are_accumulated_clipped_and_assigned(recipe):
    model = make_model(recipe)
    for _ in range(2):
        with quire.autocast(recipe=recipe):
            model(torch.ones(8, 48)).sum().backward()
    plain = [torch.nn.Parameter(torch.zeros_like(p.grad)) for p in model.parameters()]
    for one, p in zip(plain, model.parameters(), strict=True):
        one.grad = p.grad.clone()
    total, expected = (torch.nn.utils.clip_grad_norm_(parameters, 1.0) for parameters in (model.parameters(), plain))
    assert total > 1 and all(type(p.grad) is torch.Tensor for p in model.parameters())
    assert same([total, *(p.grad for p in model.parameters())], [expected, *(one.grad for one in plain)])
    model.up.weight.grad = torch.ones(96, 48)
    with pytest.raises(RuntimeError, match="size|shape"):
        model.up.weight.grad = torch.ones(3)


def optimizer_step(layer):
    layer.weight.grad = torch.ones(64, 64)
    torch.optim.SGD([layer.weight], 0.1).step()


CHANGES = {
    "mul_": lambda layer: layer.weight.mul_(2),
    "an item": lambda layer: layer.weight.__setitem__(0, 1.0),
    "copied codes": lambda layer: layer.weight.copy_(layer.weight.clone()),
    "quantize_": lambda layer: layer.weight.quantize_(torch.ones(64, 64)),
    "quantize_ with a flag": lambda layer: layer.weight.quantize_(torch.ones(64, 64), noop_flag=torch.zeros(1)),
    "an optimizer": optimizer_step,
    "load_state_dict": lambda layer: layer.load_state_dict(layer.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("keep_master", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", None])
def test_a_weight_that_changes_before_backward_is_refused_as_a_plain_one_is(recipe, keep_master, change):
    with quire.quantized_model_init(recipe=recipe or "mxfp8", keep_master=keep_master):
        layer = quire.Linear(64, 64, bias=False)
    with quire.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(torch.randn(16, 64, requires_grad=True))
    with torch.no_grad():
        change(layer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
