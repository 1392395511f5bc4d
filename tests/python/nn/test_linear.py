"""quire.Linear as a module: a torch.nn.Linear in everything but its products."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import quire
from quire.recipe import MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.any_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pair(*arguments, **options):
    """The same stack of two layers, ours and torch's, after the same seed; and a number drawn afterwards."""
    out = []
    for kind in (quire.Linear, torch.nn.Linear):
        torch.manual_seed(3)
        layers = torch.nn.Sequential(kind(*arguments, **options), kind(arguments[1], 5))
        out += [layers, torch.rand(1)]
    return out


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"dtype": torch.bfloat16}, {"device": "cpu"}])
def test_weights_start_as_those_of_torch_and_the_generator_stays_in_step(options, equal_bits):
    ours, after, theirs, after_theirs = pair(24, 16, **options)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(equal_bits(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert torch.equal(after, after_theirs)


def test_reset_parameters_starts_as_torch_too(equal_bits):
    ours, _, theirs, _ = pair(24, 16)
    for layers in (ours, theirs):
        torch.manual_seed(9)
        layers[0].reset_parameters()
    assert equal_bits(ours[0].weight, theirs[0].weight)


def test_checkpoints_go_both_ways(equal_bits):
    ours, _, theirs, _ = pair(24, 16)
    theirs.load_state_dict(quire.Linear(24, 16).state_dict() and ours.state_dict(), strict=True)
    fresh = torch.nn.Sequential(quire.Linear(24, 16), quire.Linear(16, 5))
    fresh.load_state_dict(theirs.state_dict(), strict=True)
    assert list(fresh[0].state_dict()) == ["weight", "bias"]
    assert equal_bits(fresh[0].weight, ours[0].weight)


def test_it_is_and_looks_like_a_linear():
    layer = quire.Linear(24, 16, bias=False)
    assert isinstance(layer, torch.nn.Linear)
    assert repr(layer) == "quire.Linear(in_features=24, out_features=16, bias=False)"


@pytest.mark.parametrize("option", ["dtype", "params_dtype"])
def test_the_dtype_of_parameters_has_two_names(option):
    layer = quire.Linear(4, 4, **{option: torch.bfloat16})
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="the same option, got torch.float32 and torch.float16"):
        quire.Linear(4, 4, dtype=torch.float32, params_dtype=torch.float16)


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="quire.Linear: there is no option 'colour'; the options are in_features"):
        quire.Linear(4, 4, colour="red")
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'colour'"):
        quire.Linear(4, 4)(torch.randn(2, 4), colour="red")


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), saved_and_loaded]


@pytest.mark.parametrize("make_copy", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_a_copy_computes_the_same_bits_from_the_same_random_state(make_copy, make_layer, make_x, step, recipe):
    layer, x = make_layer(), make_x(8, 96)
    layer.sr_state[1] = 7
    other = make_copy(layer)
    assert torch.equal(other.sr_state, layer.sr_state) and other.sr_state is not layer.sr_state
    assert step(layer, x, recipe) == step(other, x, recipe)


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu")])
def test_conversions_leave_the_random_state_alone(move):
    layer = quire.Linear(4, 4)
    state = layer.sr_state.clone()
    assert torch.equal(move(layer).sr_state, state) and layer.sr_state.dtype == torch.int64


@pytest.mark.cpu_only
def test_the_meta_device_works_up_to_real_memory(equal_bits):
    with torch.device("meta"):
        layer = quire.Linear(24, 16)
    with quire.autocast(recipe=NVFP4BlockScaling()):
        y = layer(torch.empty(2, 3, 24, device="meta"))
    assert y.shape == (2, 3, 16) and layer.sr_state.is_meta
    layer = layer.to_empty(device="cpu")
    assert layer.sr_state[0] >= 0 and layer.sr_state[1] == 0
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    assert equal_bits(layer.weight, quire.Linear(24, 16).weight)


@pytest.mark.cpu_only
def test_skip_init_and_fake_tensors_work():
    assert torch.nn.utils.skip_init(quire.Linear, 4, 4).sr_state[1] == 0
    with FakeTensorMode():
        layer = quire.Linear(24, 16)
        with quire.autocast(recipe=NVFP4BlockScaling()):
            assert layer(torch.empty(5, 24)).shape == (5, 16)


@pytest.mark.cpu_only
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_layer_of_fake_tensors_may_be_on_a_device_that_this_machine_lacks():
    # A build of PyTorch without CUDA cannot fill fake CUDA tensors, with torch.nn.Linear as with quire's.
    with pytest.raises(RuntimeError, match="device 'cuda' is not available"):
        quire.Linear(24, 16, device="cuda")
    with FakeTensorMode():
        try:
            layer = quire.Linear(24, 16, device="cuda")
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                torch.nn.Linear(24, 16, device="cuda")
        else:
            assert layer.weight.device.type == "cuda"


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24), (2, 0, 24), (1, 24)])
def test_leading_dimensions_are_kept(shape, make_x, step, recipe, device):
    layer, x = quire.Linear(24, 16, device=device), make_x(*shape, dtype=torch.float32)
    done = step(layer, x, recipe)
    assert done.y.shape == (*shape[:-1], 16) and done.dx.shape == shape
    assert done.dw.shape == (16, 24) and done.db.shape == (16,)
    flat = step(layer, x, recipe, lambda x: layer(x.reshape(-1, 24)).reshape(*shape[:-1], 16))
    assert done == flat


def test_strided_inputs_give_the_bits_of_contiguous_ones(make_layer, make_x, step, recipe, device):
    layer = make_layer()
    wide = make_x(12, 200, requires_grad=False)
    for view in (wide[:, 3:99], wide[::2, :96], wide.t()[:96, :].t(), wide[:1, :96].expand(5, 96)):
        contiguous = view.contiguous().requires_grad_()
        assert step(layer, view.requires_grad_(), recipe) == step(layer, contiguous, recipe)


def test_the_number_of_threads_does_not_change_a_bit(make_layer, make_x, step, recipe):
    layer, x = make_layer(512, 256), make_x(300, 512)
    threads = torch.get_num_threads()
    done = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        done.append(step(layer, x, recipe))
    torch.set_num_threads(threads)
    assert done[0] == done[1] == done[2]


@pytest.mark.cpu_only
def test_without_a_recipe_it_follows_torch_autocast(make_layer, make_x, equal_bits):
    layer, x = make_layer(dtype=torch.float32), make_x(8, 96, dtype=torch.float32)
    plain = torch.nn.Linear(96, 64)
    plain.load_state_dict(layer.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16 and equal_bits(y, plain(x))
    assert equal_bits(layer(x), plain(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_outside_torch_autocast_the_result_has_the_dtype_of_x(dtype, make_layer, make_x, step, recipe):
    layer, x = make_layer(dtype=dtype), make_x(8, 96, dtype=dtype)
    done = step(layer, x, recipe)
    assert {done.y.dtype, done.dx.dtype, done.dw.dtype, done.db.dtype} == {dtype}


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_outside_torch_autocast_parameters_must_have_the_dtype_of_x(part, make_layer, make_x):
    layer = make_layer()
    setattr(layer, part, torch.nn.Parameter(getattr(layer, part).float()))
    words = f"{part} must have the dtype of x; got x torch.bfloat16 and {part} torch.float32.*torch.autocast"
    with quire.autocast(), pytest.raises(TypeError, match=words):
        layer(make_x(8, 96))


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("w_dtype", DTYPES)
def test_under_torch_autocast_any_dtypes_meet_and_none_is_rounded_first(dtype, x_dtype, w_dtype, make_layer, make_x):
    layer, x = make_layer(dtype=torch.float32), make_x(8, 96, dtype=torch.float32)
    layer.weight.data, layer.bias.data = layer.weight.to(w_dtype), layer.bias.to(x_dtype)
    x = x.detach().to(x_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype), quire.autocast(), quire.debug.operands() as operands:
        y = layer(x)
    y.sum().backward()
    assert y.dtype == dtype and x.grad.dtype == x_dtype
    assert layer.weight.grad.dtype == w_dtype and layer.bias.grad.dtype == x_dtype
    for operand, source in zip(operands, (x, layer.weight), strict=True):
        direct = quire.quantize(source.detach(), "mxfp8", columnwise=True)
        assert torch.equal(operand.tensor.rowwise_data, direct.rowwise_data)
        assert torch.equal(operand.tensor.columnwise_data, direct.columnwise_data)


def test_a_recipe_of_its_own_per_call_needs_no_new_module(make_layer, make_x, equal_bits, device):
    layer, x = make_layer(), make_x(8, 96)
    out = []
    for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling(), MXFP8BlockScaling()):
        with quire.autocast(recipe=recipe):
            out.append(layer(x))
    assert equal_bits(out[0], out[2]) and not equal_bits(out[0], out[1])


@pytest.mark.parametrize("tokens, inputs, outputs", [(1, 1, 1), (3, 7, 5), (33, 17, 65), (129, 1, 31)])
def test_no_size_is_refused(tokens, inputs, outputs, make_layer, make_x, step, any_recipe, device):
    layer, x = make_layer(inputs, outputs, torch.float32), make_x(tokens, inputs, dtype=torch.float32)
    done, exact = step(layer, x, any_recipe), step(layer, x, None)
    for got, expected in zip(vars(done).values(), vars(exact).values(), strict=True):
        assert got.shape == expected.shape
        assert (got - expected).norm() <= 0.5 * expected.norm()  # what four bits with a Hadamard transform may cost


class Doubled(torch.nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("cached", [False, True])
def test_every_way_of_a_call_gives_the_same_bits(cached, recipe, make_layer, make_x, equal_bits, device):
    """Plain calls are quick, and those of other tensors, or with options, are not: a parameter as x, a weight that is
    computed, an option that changes nothing."""
    layer, doubled, x = make_layer(), make_layer(), make_x(5, 96, requires_grad=False)
    torch.nn.utils.parametrize.register_parametrization(doubled, "weight", Doubled())
    with torch.no_grad():
        layer.weight.mul_(2)
    for grad in (False, True):
        if cached:
            quire.quantize_weights(layer, recipe)
        with quire.autocast(recipe=recipe), torch.set_grad_enabled(grad):
            y = layer(x)
            for other in (layer(torch.nn.Parameter(x)), doubled(x), layer(x, is_first_microbatch=True)):
                assert equal_bits(other, y)
        y = torch.nn.functional.linear(x, layer.weight, layer.bias)
        assert all(equal_bits(call(x), y) for call in (layer, doubled))
