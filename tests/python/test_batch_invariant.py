"""quire.batch_invariant: which kernels run within it, what keeps the choice, and what it refuses."""

import copy
import io
import threading

import pytest
import torch

import pytorch
import quire
from quire import recipe as recipes
from steps import assert_rounded

ROWS = recipes.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True)
WEIGHT_ONLY = "x=none,w=nvfp4:nan,dy=none"


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    quire.set_batch_invariant(False)


def drawn(*shape, seed=0):
    """Values of widely different magnitudes, so that sums in another order have other bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) ** 3 * 2.0 ** torch.randint(
        -6, 7, (shape[0], 1), generator=generator
    )


def layer(recipe, **options):
    torch.manual_seed(0)
    made = quire.Linear(288, 200, recipe=recipe, **options)
    with torch.no_grad():
        made.weight.copy_(drawn(200, 288, seed=3))
    return made


def kernels(function, *arguments) -> set[str]:
    """The rows of the kernel table that multiply in a call."""
    text = str(quire.explain(function, *arguments))
    found, of_product = set(), False
    for line in text.splitlines():
        if not line.startswith(" "):
            of_product = " gemm " in line or " matmul " in line
        elif of_product and line.endswith(": runs"):
            found.add(line.split()[1].rstrip(":"))
    return found


# ------------------------------------------------------------ the state


def test_the_context_is_of_the_thread_and_ends():
    assert not quire.is_batch_invariant_enabled()
    with quire.batch_invariant():
        assert quire.is_batch_invariant_enabled()
        with quire.batch_invariant(False):
            assert not quire.is_batch_invariant_enabled()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(quire.is_batch_invariant_enabled()))
        thread.start()
        thread.join()
        assert seen == [False] and quire.is_batch_invariant_enabled()
    with pytest.raises(KeyError), quire.batch_invariant():
        raise KeyError
    assert not quire.is_batch_invariant_enabled()


def test_it_is_a_decorator():
    @quire.batch_invariant()
    def function():
        """Its own."""
        return quire.is_batch_invariant_enabled()

    assert function() and function.__doc__ == "Its own." and not quire.is_batch_invariant_enabled()


def test_each_step_of_a_generator_is_within_it():
    @quire.batch_invariant()
    def steps():
        for _ in range(2):
            yield quire.is_batch_invariant_enabled()

    found = []
    for within in steps():
        found += [within, quire.is_batch_invariant_enabled()]
    assert found == [True, False] * 2


def test_the_setting_of_the_process_is_that_of_all_threads():
    quire.set_batch_invariant(True)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(quire.is_batch_invariant_enabled()))
    thread.start()
    thread.join()
    with quire.batch_invariant(False):
        assert not quire.is_batch_invariant_enabled()
    assert seen == [True] and quire.is_batch_invariant_enabled()


@pytest.mark.parametrize("wrong", [1, None, "mxfp8", lambda: None])
def test_other_arguments_are_refused(wrong):
    with pytest.raises(TypeError, match="enabled must be a bool"):
        quire.batch_invariant(wrong)
    with pytest.raises(TypeError, match="enabled must be"):
        quire.set_batch_invariant(wrong)


# ------------------------------------------------------------ the kernels


@pytest.mark.parametrize("recipe", [ROWS, "mxfp8", WEIGHT_ONLY, None])
def test_one_kernel_computes_every_number_of_tokens(recipe):
    made, x = layer(recipe), drawn(40, 288)
    with quire.batch_invariant(), torch.no_grad():
        few, many = kernels(made, x[:7]), kernels(made, x)
    assert len(many) == 1 and few == many and "library" not in many


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", [None, WEIGHT_ONLY])
def test_products_without_codes_of_x_are_right(recipe, dtype, bias):
    # Sizes that are no multiples of anything, more than one tile, one row, none, and strides.
    for rows, inputs, outputs in ((70, 300, 131), (1, 64, 3), (0, 64, 3), (5, 1, 1)):
        torch.manual_seed(0)
        made = quire.Linear(inputs, outputs, bias, recipe=recipe, dtype=dtype)
        x = torch.randn(rows, 2 * inputs, dtype=dtype)[:, ::2].requires_grad_()
        with quire.batch_invariant():
            y = made(x)
        dy = torch.randn_like(y)
        y.backward(dy)
        w = made.weight.detach()
        if recipe:
            w = quire.quantize(w, "nvfp4:nan").dequantize(dtype)
        exact = [t.double() for t in (x.detach(), w, dy)]
        for found, a, b in (
            (y if made.bias is None else y - made.bias, exact[0], exact[1].T),
            (x.grad, exact[2], exact[1]),
            (made.weight.grad, exact[2].T, exact[0]),
        ):
            bound = (a.shape[1] + 6) * 2.0**-24 * (a.abs() @ b.abs()) + 2 * torch.finfo(dtype).eps * (a @ b).abs()
            bound += 4 * torch.finfo(dtype).eps if found is not x.grad and bias else 2.0**-24
            assert bool(((found.double() - a @ b).abs() <= bound).all())


def test_autocast_of_torch_decides_about_the_dtype_as_without():
    made, x = layer(None), drawn(9, 288)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = made(x)
        with quire.batch_invariant():
            y = made(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    a, b, bias = (t.detach().bfloat16().double() for t in (x, made.weight, made.bias))
    assert_rounded(y, a @ b.T + bias, a.abs() @ b.abs().T + bias.abs(), x.shape[1] + 6)


@pytest.mark.parametrize("recipe", [ROWS, "mxfp8", WEIGHT_ONLY, None])
@pytest.mark.parametrize(
    "make",
    [
        lambda recipe: quire.LayerNormMLP(64, 96, activation="swiglu", recipe=recipe),
        lambda recipe: quire.MoE(64, 96, 4, 2, shared_ffn_hidden_size=64, recipe=recipe),
        lambda recipe: quire.LayerNormLinear(64, 96, recipe=recipe),
    ],
    ids=["LayerNormMLP", "MoE", "LayerNormLinear"],
)
def test_tokens_of_every_layer_have_the_bits_that_they_have_alone(make, recipe, equal_bits):
    torch.manual_seed(0)
    made, x = make(recipe), drawn(48, 64)
    with quire.batch_invariant(), torch.no_grad():
        many = made(x)
        parts = [made(part) for part in x.split([1, 7, 33, 7])]
    results = [many[0] if isinstance(many, tuple) else many]
    parts = [part[0] if isinstance(part, tuple) else part for part in parts]
    assert equal_bits(torch.cat(parts), results[0])


# ------------------------------------------------------------ what keeps the choice


@pytest.mark.parametrize("recipe", [ROWS, WEIGHT_ONLY, None])
def test_a_compiled_function_is_compiled_again_when_the_state_changes(recipe, compiler):
    made, x = layer(recipe), drawn(7, 288)
    function = compiler(made)
    with torch.no_grad():
        plain = function(x)
        with quire.batch_invariant():
            invariant = function(x)
            assert torch.equal(invariant, made(x))
        assert torch.equal(function(x), plain)
        quire.set_batch_invariant(True)
        assert torch.equal(function(x), invariant)
    assert compiler.graphs >= 2


def test_the_context_within_a_compiled_function_is_in_its_graph(compiler):
    made, x = layer(WEIGHT_ONLY), drawn(7, 288)

    def function(x):
        with quire.batch_invariant():
            return made(x)

    assert torch.equal(compiler(function)(x), function(x)) and compiler.graphs == 1
    assert not quire.is_batch_invariant_enabled()


@pytest.mark.parametrize("recipe", [ROWS, WEIGHT_ONLY, None])
def test_a_program_keeps_it_where_it_runs_outside(recipe):
    made, x = layer(recipe).requires_grad_(False), drawn(40, 288)
    with quire.batch_invariant():
        program = torch.export.export(made, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        expected = made(x)
    assert "kernels=batch_invariant" in program.graph_module.code
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    run = torch.export.load(file).module()
    assert torch.equal(torch.cat([run(part) for part in x.split([7, 33])]), expected)


@pytest.mark.slow
@pytorch.aotinductor
def test_a_package_of_aotinductor_keeps_it_too(tmp_path):
    model = torch.nn.Sequential(layer(ROWS), layer(None, bias=False)).requires_grad_(False)
    model[1] = quire.Linear(200, 96)
    x = drawn(40, 288)
    with quire.batch_invariant(), torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(path)
    assert torch.equal(torch.cat([run(part) for part in x.split([7, 33])]), expected)


@pytest.mark.parametrize("recipe", [ROWS, WEIGHT_ONLY, None])
def test_backward_has_the_choice_of_its_forward_pass(recipe):
    made, x, dy = layer(recipe), drawn(7, 288).requires_grad_(), drawn(7, 200)
    with quire.batch_invariant():
        y = made(x)
        random = copy.deepcopy(quire.rng_state(made))
        (expected,) = torch.autograd.grad(y, x, dy)
        quire.set_rng_state(made, random)
        again = made(x)
    (outside,) = torch.autograd.grad(again, x, dy)
    assert torch.equal(outside, expected)
    if recipe is not ROWS:
        assert "library" not in kernels(lambda: torch.autograd.grad(made_within(made, x), x, dy))


@pytest.mark.parametrize("recipe", [WEIGHT_ONLY, None])
def test_a_delayed_gradient_of_w_has_the_choice_too(recipe):
    made, x, dy = layer(recipe), drawn(7, 288), drawn(7, 200)
    late = quire.Linear(288, 200, recipe=recipe, delay_wgrad_compute=True)
    late.load_state_dict(made.state_dict())
    with quire.batch_invariant():
        made(x).backward(dy)
        late(x).backward(dy)
    late.backward_dw()
    assert torch.equal(late.weight.grad, made.weight.grad)
    with quire.batch_invariant():
        late(x).backward(dy)
    found = kernels(late.backward_dw)
    assert found and "library" not in found


def made_within(made, x):
    with quire.batch_invariant():
        return made(x)


def test_checkpoints_compute_again_what_they_computed():
    made, x = layer(None), drawn(7, 288).requires_grad_()
    with quire.batch_invariant():
        y = quire.checkpoint(made, x)
        other = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
    y.sum().backward()
    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="kernels=batch_invariant"):
        other.sum().backward()


# ------------------------------------------------------------ runners

INPUTS = {"row scaled": {"x": "nvfp4:row_scaled"}, "none": {"x": "none"}, "static": {"input_scale": 0.01}}
PARTS = [7, 153]


def cancelling(rows, seed):
    """Whose products with TOKENS are 0 but for the rounding of sums, so that bfloat16 shows their order."""
    half = drawn(rows, 256, seed=seed) * COLUMNS
    return torch.cat([half, -half], 1).bfloat16()


def linear_runner(**options):
    return quire.runners.LinearRunner(cancelling(256, seed=3), **options)


def moe_runner(**options):
    w13, w2 = cancelling(4 * 128, seed=4), drawn(4 * 512, 64, seed=5).bfloat16()
    stacks = w13.view(4, 128, 512), w2.view(4, 512, 64)
    return quire.runners.MoERunner(*stacks, **options)


COLUMNS = 2.0 ** torch.randint(-6, 7, (1, 256), generator=torch.Generator().manual_seed(6))
TOKENS = (drawn(160, 256, seed=7) * COLUMNS).bfloat16().repeat(1, 2)
RUNNERS = {
    "linear": (linear_runner, lambda runner: lambda x: quire.nvfp4_linear(x, runner, 256)),
    "mixture": (
        moe_runner,
        lambda runner: lambda x: quire.nvfp4_moe_routed(x, x[:, :4], "softmax:topk=2", runner, 512),
    ),
}


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [*(("linear", name) for name in INPUTS), ("mixture", "row scaled"), ("mixture", "none")],
)
def test_runners_obey_eager_compiled_and_exported(kind, inputs, equal_bits, compiler):
    make, calling = RUNNERS[kind]
    with quire.runners.register(make(**INPUTS[inputs]), name="obeys"):
        call = calling("obeys")

        class Program(torch.nn.Module):
            def forward(self, x):
                return call(x)

        with quire.batch_invariant():
            whole = call(TOKENS)
            exported = torch.export.export(Program(), (TOKENS,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
            for function in (call, torch.compile(call, backend="eager", fullgraph=True, dynamic=True)):
                equal_bits(torch.cat([function(part) for part in TOKENS.split(PARTS)]), whole)
        equal_bits(torch.cat([exported.module()(part) for part in TOKENS.split(PARTS)]), whole)


@pytest.mark.parametrize("kind", RUNNERS)
def test_runners_whose_tokens_share_a_scale_are_refused(kind):
    make, calling = RUNNERS[kind]
    with quire.runners.register(make()) as runner:
        calling(runner)(TOKENS)
        with (
            quire.batch_invariant(),
            pytest.raises(RuntimeError, match="runner: x=nvfp4 quantizes x with one scale for"),
        ):
            calling(runner)(TOKENS)


def test_the_function_of_a_python_runner_sees_the_state():
    def function(x):
        return torch.full_like(x, quire.is_batch_invariant_enabled())

    with quire.runners.register(quire.runners.PythonRunner(function, 512, 512)) as runner:
        assert not quire.nvfp4_linear(TOKENS, runner, 512).any()
        with quire.batch_invariant():
            assert quire.nvfp4_linear(TOKENS, runner, 512).all()


# ------------------------------------------------------------ what it refuses


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4", "x=nvfp4,w=mxfp8,dy=mxfp8"])
def test_one_scale_for_all_tokens_is_refused_with_the_remedy(recipe):
    made, x = layer(recipe), drawn(7, 288)
    remedy = "fp8_row, nvfp4:row_scaled.*row_scaled_activation=True.*quire.calibrate"
    with quire.batch_invariant(), pytest.raises(RuntimeError, match=remedy) as raised:
        made(x)
    assert [note[:12] for note in raised.value.__notes__] == ["In the layer"]  # not that it has static scales
    made(x)


def test_so_is_delayed_scaling_and_a_tile_of_several_tokens():
    made, x = layer(None), drawn(7, 288)
    with quire.batch_invariant():
        with quire.autocast(recipe="fp8_delayed"), pytest.raises(RuntimeError, match="one scale for all tokens"):
            made(x)
        tiles = recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
        with quire.autocast(recipe=tiles), pytest.raises(RuntimeError, match="tiles of several tokens"):
            made(x)


def test_static_scales_are_taken():
    made = layer("x=fp8_tensor:given:nan,w=fp8_tensor:nan,dy=mxfp8:e5m2")
    made.input_scale.fill_(0.5)
    x = drawn(40, 288)
    with quire.batch_invariant(), torch.no_grad():
        assert torch.equal(made(x)[:7], made(x[:7]))


def test_the_text_of_a_recipe():
    texts = ["x=mxfp8,w=mxfp8,dy=mxfp8", "x=mxfp8,w=mxfp8,dy=mxfp8,dx=mxfp8,backward=requantized"]
    for text in texts:
        assert torch.ops.quire.canonical_recipe(f"{text},kernels=batch_invariant") == f"{text},kernels=batch_invariant"
    for wrong in ("kernels=fast", "kernels="):
        with pytest.raises(RuntimeError, match="recipe: "):
            torch.ops.quire.canonical_recipe(f"{texts[0]},{wrong}")
