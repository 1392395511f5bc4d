"""Options of LayerNormLinear and LayerNormMLP: they do what they do for quire.Linear, eager and compiled."""

import collections
import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from every_recipe import ALL, OVERRIDDEN, WEIGHT_ONLY, each, some
from pairwise import pairwise
from python.nn.layernorm_parts import Parts, make_linear, make_mlp
from steps import same

pytestmark = pytest.mark.any_device

MODULES = {
    "linear": make_linear,
    "mlp": make_mlp,
    "mlp_checkpoint": lambda **options: make_mlp(checkpoint=True, activation="swiglu", **options),
}
RECIPES = ALL | some("custom")
every_recipe = each(RECIPES)
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
FUSED, DELAYED = {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}
#: Name -> options of the constructor and of the call.
OPTIONS = {
    "fused": (FUSED, {}),
    "delayed": (DELAYED, {}),
    "fused_delayed": (FUSED | DELAYED, {}),
    "original_input": ({"save_original_input": True}, {}),
    "fp8_grad": ({}, {"fp8_grad": True}),
    "fp8_output": ({}, {"fp8_output": True}),
    "output_spec": ({}, {"output_spec": "mxfp4"}),
    "all": (FUSED | DELAYED, {"fp8_grad": True, "fp8_output": True}),
}


def weights(module):
    """Name -> weight of a product."""
    named = module.by_name() if isinstance(module, Parts) else dict(module.named_parameters())
    return {name: p for name, p in sorted(named.items()) if name.endswith("weight") and "norm" not in name}


def x_of(module, step, rows=33):
    """Inputs that grow with the step, so that a wrong scale of delayed scaling shows."""
    norm = module.norm.weight if isinstance(module, Parts) else module.layer_norm_weight
    generator = torch.Generator().manual_seed(step + 100)
    return (4.0**step * torch.randn(rows, len(norm), generator=generator)).to(norm).requires_grad_()


def results_of_steps(module, recipe, function=None, microbatches=(None,), steps=2, **call):
    """Everything that some steps compute."""
    found, function = [], module if function is None else function
    for weight in weights(module).values():
        weight.main_grad = torch.full(weight.shape, 0.5, device=weight.device)
    for step in range(steps):
        module.zero_grad()
        for i, first in enumerate(microbatches):
            x = x_of(module, step + i)
            with quire.autocast(recipe=recipe):
                y = function(x, is_first_microbatch=first, **call)
            if isinstance(y, quire.QuantizedActivation):
                found += [b for b in y.buffers if b is not None]
                y = y.dequantize()
            (4.0**step * y.float().square().sum()).backward()
            module.backward_dw()
            found += [y.detach(), x.grad]
        named = module.by_name() if isinstance(module, Parts) else dict(module.named_parameters())
        found += [named[name].grad for name in sorted(named)]
        found += [weight.main_grad.clone() for weight in weights(module).values()]
        with torch.no_grad():  # weights of the next step
            for weight in weights(module).values():
                weight *= -0.75
    return found


def not_refused(option, module, recipe):
    return option != "original_input" or recipe != "delayed"


@pytest.mark.parametrize(
    ("option", "module", "recipe"), pairwise(list(OPTIONS), list(MODULES), list(RECIPES), allowed=not_refused)
)
def test_an_option_does_what_it_does_for_linear(option, module, recipe, device):
    (constructor, call), make, recipe = OPTIONS[option], MODULES[module], RECIPES[recipe]
    fused = make(**constructor)
    expected = results_of_steps(Parts(fused), recipe, **call)
    assert same(results_of_steps(fused.to(device), recipe, **call), expected)
    for name, weight in weights(fused).items():
        external_wgrad = constructor.get("fuse_wgrad_accumulation", False)
        assert (weight.grad is None) == external_wgrad, name
        assert weight.main_grad.ne(0.5).any() == external_wgrad, name


@pytest.mark.parametrize(
    ("override", "module", "option"),
    pairwise(list(OVERRIDDEN), list(MODULES), ["none", "fused", "delayed", "fp8_output"]),
)
def test_a_backward_override_does_what_it_does_for_linear(override, module, option, device):
    constructor, call = OPTIONS.get(option, ({}, {}))
    fused, recipe = MODULES[module](**constructor), OVERRIDDEN[override]
    expected = results_of_steps(Parts(fused), recipe, **call)
    assert same(results_of_steps(fused.to(device), recipe, **call), expected)


@pytest.mark.parametrize("override", OVERRIDDEN | WEIGHT_ONLY)
def test_a_compiled_backward_override_has_the_bits_of_eager(override, compiler):
    fused, recipe = MODULES["mlp_checkpoint"](**FUSED), (OVERRIDDEN | WEIGHT_ONLY)[override]
    expected = results_of_steps(copy.deepcopy(fused), recipe)
    assert same(results_of_steps(fused, recipe, compiler(fused)), expected)


# ---------------------------------------------------------------- weights that are quantized once


class Quantizations(TorchDispatchMode):
    """Counts by shape how often a matrix is quantized apart, and how often a product quantizes its weight."""

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ops = torch.ops.quire
        if func is ops.quantize.default:
            self.count[args[0].shape] += 1
        if func is ops.linear_fwd.default and not args[9]:
            self.count[args[1][0].shape] += 1
        return func(*args, **(kwargs or {}))

    def of(self, module):
        return [self.count[weight.shape] for weight in weights(module).values()]


@every_recipe
@every_module
def test_microbatches_quantize_weights_once_and_do_what_they_do_for_linear(make, recipe, device):
    fused = make(**FUSED)
    parts = Parts(fused)
    cycle = {"microbatches": (True, False, False)}
    expected = results_of_steps(parts, recipe, **cycle)
    fused.to(device)
    with Quantizations() as quantizations:
        assert same(results_of_steps(fused, recipe, **cycle), expected)
    assert set(quantizations.of(fused)) == {2}  # steps


@every_recipe
@every_module
@pytest.mark.parametrize("fused_optimizer", [False, True])
def test_weights_are_quantized_once_an_optimizer_step(fused_optimizer, make, recipe, equal_bits, device):
    module, plain = make().to(device), make().to(device)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.1, fused=fused_optimizer) for m in (module, plain)]
    with Quantizations() as quantizations:
        quire.quantize_weights(module, recipe, optimizers[0])
        for step in range(1, 4):
            for i in range(2):
                y, x = [], x_of(module, i)
                for model in (module, plain):
                    before = quantizations.count.copy()
                    with quire.autocast(recipe=recipe):
                        y.append(model(x))
                    y[-1].square().sum().backward()
                    if model is plain:
                        quantizations.count = before
                # Under delayed scaling the weights' amaxes are known at other times.
                assert recipe.delayed() or equal_bits(*y)
            for optimizer in optimizers:
                optimizer.step(), optimizer.zero_grad()
            assert set(quantizations.of(module)) == {step + 1}


def load(module):
    module.load_state_dict({name: 2 * value for name, value in module.state_dict().items()})


@pytest.mark.parametrize(
    ("name", "way", "compiled"),
    pairwise(
        ["fc1_weight", "fc2_weight", "load_state_dict"], ["quantize_weights", "is_first_microbatch"], [False, True]
    ),
)
def test_stale_codes_are_never_used(name, way, compiled, compiler):
    way = {"quantize_weights": None, "is_first_microbatch": False}[way]
    module, x = MODULES["mlp_checkpoint"](), torch.randn(5, 64).bfloat16()
    function = compiler(module) if compiled else module
    with quire.autocast():
        quire.quantize_weights(module) if way is None else module(x, is_first_microbatch=True)
        function(x, is_first_microbatch=way)
        load(module) if name == "load_state_dict" else getattr(module, name).data.view(-1)[17:18].add_(1e-2)
        with pytest.raises(RuntimeError, match="the weight has changed since it was quantized"):
            function(x, is_first_microbatch=way)
            quire.synchronize()  # kernels of a device say then which weights they refuse
        quire.quantize_weights(module) if way is None else module(x, is_first_microbatch=True)
        other = MODULES["mlp_checkpoint"]()
        other.load_state_dict(module.state_dict())
        assert torch.equal(function(x, is_first_microbatch=way), other(x))


def test_moving_or_converting_drops_the_codes():
    module = make_mlp()
    quire.quantize_weights(module)
    assert module.fc1_kept_weight is not None and module.fc2_kept_weight is not None
    module.float()
    assert module.fc1_kept_weight is None and module.fc2_kept_weight is None


# ---------------------------------------------------------------- the rest


def twice(module, x):
    """What follows a checkpoint needs that recomputed, too."""
    return quire.checkpoint(lambda x: module(module(x)), x) if module.checkpoint else module(module(x))


def test_a_checkpoint_within_a_checkpoint_is_recomputed_as_it_was(device):
    """The next step's forward pass comes before the backward pass, and has smaller amaxes."""
    results = []
    for module in (make_mlp(), make_mlp(checkpoint=True).to(device)):
        pending, found = [], []
        for step in range(4):
            x = x_of(module, -3 * step)
            with quire.autocast(recipe=ALL["delayed"]):
                pending.append((x, twice(module, x)))
            if step > 0:
                leaf, y = pending.pop(0)
                y.float().sum().backward()
                found += [leaf.grad, *(p.grad.clone() for p in module.parameters())]
                found += [module.fc1_delayed.fwd_amax.clone(), module.fc2_delayed.fwd_amax.clone()]
                module.zero_grad()
        results.append(found)
    assert same(*results)


@every_module
def test_copies_keep_their_own_operands_and_frozen_weights_none(make):
    module = make(delay_wgrad_compute=True)
    frozen, *rest = weights(module).values()
    frozen.requires_grad_(not rest)
    with quire.autocast():
        module(x_of(module, 0)).sum().backward()
    with pytest.raises(RuntimeError, match=f"{type(module).__name__}.backward_dw: no backward pass has kept operands"):
        copy.deepcopy(module).backward_dw()
    module.backward_dw()
    assert all((weight.grad is not None) == weight.requires_grad for weight in weights(module).values())
    assert module.need_backward_dw() and not make().need_backward_dw()


@every_recipe
@every_module
def test_a_quantized_input_is_decoded(make, recipe, device):
    module, results = make().to(device), []
    leaf = x_of(module, 0)
    for decode in (False, True):
        leaf.grad = None
        module.zero_grad()
        q = quire.quantize(leaf, "mxfp8")
        with quire.autocast(recipe=recipe):
            y = module(q.dequantize() if decode else q)
        y.float().sum().backward()
        results.append([y.detach(), leaf.grad])
        for state in module.sr_states().values():
            state[1] = 0
        if recipe.delayed():
            module = make().to(device)
    assert same(*results)


def test_what_does_not_fit_is_refused_by_name():
    module, x = make_mlp(fuse_wgrad_accumulation=True), torch.randn(3, 64).bfloat16()
    module.fc1_weight.main_grad = torch.zeros(96, 64)
    with (
        quire.autocast(),
        pytest.raises(RuntimeError, match="LayerNormMLP: .* needs fc2_weight.main_grad, a contiguous"),
    ):
        module(x)
    module = make_mlp(save_original_input=True)
    refused = pytest.raises(ValueError, match="LayerNormMLP: save_original_input=True does not go with DelayedScaling")
    with quire.autocast(recipe=ALL["delayed"]), refused:
        module(x)
    with quire.autocast(), pytest.raises(ValueError, match="mxfp9"):
        make_mlp()(x, output_spec="mxfp9")
