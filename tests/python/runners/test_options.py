"""Shared experts and static scales of runners."""

import pytest
import torch

import quire
from python.runners.runner_inputs import INNER, E, H, N, choices, linear_bits, nothing_stays_registered, rand  # noqa: F401  a fixture of every test
from quire import runners
from steps import assert_rounded

GATED = (rand(E, 2 * INNER, H, seed=3), rand(E, H, INNER, seed=4))
SHARED = (rand(2 * 40, H, seed=5), rand(H, 40, seed=6))
RECIPE = quire.recipe.CustomRecipe(lambda role: "nvfp4")


def run(made, *arguments):
    with runners.register(made) as runner:
        if len(arguments) == 1:
            return quire.nvfp4_linear(*arguments, runner, N)
        return quire.nvfp4_moe(*arguments, runner, H)


# ---------------------------------------------------------------- shared experts


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"weight_on_input": True}], ids=str)
def test_a_runner_gives_the_bits_of_a_layer_with_a_shared_expert(options):
    torch.manual_seed(1)
    layer = quire.MoE(
        H, INNER, E, top_k=2, shared_ffn_hidden_size=40, single_grouped_weight=True, renormalize=True,
        params_dtype=torch.bfloat16, **options,
    )  # fmt: skip
    x = rand(9, H)
    with torch.no_grad(), quire.autocast(recipe=RECIPE):
        for name, parameter in layer.named_parameters():
            if "bias" in name:
                parameter.copy_(rand(*parameter.shape, seed=8))
        expected, routing = layer(x, return_routing=True)
    fc1, fc2, shared1, shared2 = layer.fc1, layer.fc2, layer.shared_fc1, layer.shared_fc2
    biases = {}
    if "bias" in options:
        biases = {"w13_bias": fc1.bias, "w2_bias": fc2.bias}
        biases |= {"shared_w13_bias": shared1.bias, "shared_w2_bias": shared2.bias}
    made = runners.MoERunner(
        fc1.weight, fc2.weight, shared_w13=shared1.weight, shared_w2=shared2.weight, **biases,
        weight_on_input=options.get("weight_on_input", False),
    )  # fmt: skip
    y = run(made, x, routing.topk_weights, routing.topk_ids)
    assert torch.equal(y, expected)


def test_a_shared_expert_may_be_quantized_already():
    x, (weights, ids) = rand(7, H), choices()
    expected = run(runners.MoERunner(*GATED, shared_w13=SHARED[0], shared_w2=SHARED[1]), x, weights, ids)
    stacks = [[quire.quantize(w, "nvfp4") for w in stack] for stack in GATED]
    shared = [quire.quantize(w, "nvfp4") for w in SHARED]
    made = runners.MoERunner(*stacks, shared_w13=shared[0], shared_w2=shared[1])
    assert torch.equal(run(made, x, weights, ids), expected)
    mixed = runners.MoERunner(*stacks, shared_w13=SHARED[0], shared_w2=SHARED[1])
    assert torch.equal(run(mixed, x, weights, ids), expected)
    assert not torch.equal(run(runners.MoERunner(*GATED), x, weights, ids), expected)


# ---------------------------------------------------------------- static scales


def calibrated_bits(x, w, scale, bias=None):
    """A product whose x has the amax 2688 * scale, since a token that is left out again has it."""
    outlier = torch.zeros(1, x.shape[1], dtype=x.dtype)
    outlier[0, 0] = 2688 * scale
    assert outlier[0, 0] == 2688 * scale >= x.abs().max()
    return linear_bits(torch.cat([x, outlier]), w, bias)[:-1]


@pytest.mark.parametrize(
    "form", [float, lambda s: torch.tensor(s), lambda s: torch.tensor([s], dtype=torch.float64), lambda s: [s]]
)
def test_an_input_scale_is_amax_by_6_times_448(form):
    x, w, bias = rand(5, H), rand(N, H, seed=1), rand(N, seed=2)
    scale = 2.0**-8  # an amax of 10.5
    y = run(runners.LinearRunner(w, bias, input_scale=form(scale)), x)
    assert torch.equal(y, calibrated_bits(x, w, scale, bias))
    assert not torch.equal(y, linear_bits(x, w, bias))
    for token in range(5):
        one = run(runners.LinearRunner(w, bias, input_scale=form(scale)), x[token : token + 1])
        assert torch.equal(one, y[token : token + 1])


def test_an_input_scale_belongs_to_any_weights():
    x, w = rand(5, H), rand(N, H, seed=1)
    expected = run(runners.LinearRunner(w, input_scale=2.0**-8), x)
    assert torch.equal(run(runners.LinearRunner(quire.quantize(w, "nvfp4"), input_scale=2.0**-8), x), expected)
    quantized = runners.LinearRunner(w, input_scale=2.0**-8, w="mxfp8")
    assert not torch.equal(run(quantized, x), expected)


@pytest.mark.parametrize("per_expert", [False, True])
def test_scales_of_a_mixture_are_one_or_one_for_each_expert(per_expert):
    x, (weights, ids) = rand(7, H), choices()
    first = torch.tensor([2.0**-8, 2.0**-7, 2.0**-8, 2.0**-6]) if per_expert else torch.full((E,), 2.0**-8)
    second = torch.tensor([2.0**-3, 2.0**-2, 2.0**-4, 2.0**-3]) if per_expert else torch.full((E,), 2.0**-3)
    given = (first, second.tolist()) if per_expert else (2.0**-8, second[:1])
    made = runners.MoERunner(*GATED, w13_input_scale=given[0], w2_input_scale=given[1])
    y = torch.zeros(7, 2, H)
    for e in range(E):
        token, choice = torch.nonzero(ids == e, as_tuple=True)
        h = calibrated_bits(x[token], GATED[0][e], first[e].item())
        act = torch.ops.quire.activation(h, "swiglu", torch.bfloat16)[0]
        out = calibrated_bits(act, GATED[1][e], second[e].item())
        y[token, choice] = out.float() * weights[token, choice, None]
    assert torch.equal(run(made, x, weights, ids), (y[:, 0] + y[:, 1]).bfloat16())


def test_a_shared_expert_has_scales_of_its_own():
    x, (weights, ids) = rand(7, H), choices()
    ids = torch.full_like(ids, -1)
    shared = {"shared_w13": SHARED[0], "shared_w2": SHARED[1]}
    scales = {"shared_w13_input_scale": 2.0**-8, "shared_w2_input_scale": 2.0**-3}
    h = calibrated_bits(x, SHARED[0], 2.0**-8)
    act = torch.ops.quire.activation(h, "swiglu", torch.bfloat16)[0]
    expected = calibrated_bits(act, SHARED[1], 2.0**-3)
    assert torch.equal(run(runners.MoERunner(*GATED, **shared, **scales), x, weights, ids), expected)
    assert not torch.equal(run(runners.MoERunner(*GATED, **shared), x, weights, ids), expected)


NOT_FINITE = "an input_scale must be positive and finite; got .* or its reciprocal if you have"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        *((lambda s=s: runners.LinearRunner(rand(N, H), input_scale=s), RuntimeError, NOT_FINITE)
          for s in (0, -1.0, float("nan"), float("inf"), 1e36, torch.tensor(0.0))),
        (lambda: runners.LinearRunner(rand(N, H), input_scale="1"), TypeError, "input_scale must be a number, got '1'"),
        (lambda: runners.LinearRunner(rand(N, H), input_scale=["1"]), TypeError, "must be a number, got '1'"),
        (lambda: runners.LinearRunner(rand(N, H), input_scale=[]), ValueError, "each expert, got an empty list"),
        *((lambda x=x: runners.LinearRunner(rand(N, H), input_scale=0, x=x), RuntimeError, words)
          for x, words in (("fp8_tensor", "amax / 448 of the calibration for x=fp8_tensor"),
                           ("nvfp4", r"and amax / \(6 \* 448\) for x=nvfp4"))),
        (
            lambda: runners.MoERunner(*GATED, w13_input_scale=[0.1] * (E + 1)),
            RuntimeError,
            r"w13's input_scale must be .* one for each of 4, got Double \[5\]",
        ),
        (lambda: runners.MoERunner(*GATED, w2_input_scale=[1.0, 1.0, 0.0, 1.0]), RuntimeError, NOT_FINITE),
        (
            lambda: runners.LinearRunner(rand(N, H), input_scale=torch.tensor([1])),
            ValueError,
            r"one or one for each expert, got torch.int64 \[1\]",
        ),
        (
            lambda: runners.LinearRunner(rand(N, H), input_scale=torch.ones(2)),
            RuntimeError,
            r"weight's input_scale must be float32 or float64 with values, one or one for each of 1, got Float \[2\]",
        ),
        (
            lambda: runners.LinearRunner(rand(N, H), input_scale=torch.ones(1, device="meta")),
            RuntimeError,
            "with values, .* on meta",
        ),
        (
            lambda: runners.LinearRunner(rand(N, H), input_scale=0.5, x="mxfp8"),
            RuntimeError,
            "one of activations with one scale of the tensor; got x=mxfp8; leave the input_scale out, or take x=nvfp4",
        ),
        (
            lambda: runners.MoERunner(*GATED, w13_input_scale=torch.ones(E + 1)),
            RuntimeError,
            r"w13's input_scale must be .* one for each of 4, got Float \[5\]",
        ),
        (
            lambda: runners.MoERunner(*GATED, w2_input_scale=torch.tensor([1.0, 1.0, 0.0, 1.0])),
            RuntimeError,
            NOT_FINITE,
        ),
        (lambda: runners.MoERunner(*GATED, shared_w13=SHARED[0]), ValueError, "pass both, or neither"),
        (
            lambda: runners.MoERunner(*GATED, shared_w2_input_scale=1.0),
            ValueError,
            "shared_w2_input_scale belongs to a shared expert; pass shared_w13 and shared_w2 too",
        ),
        (
            lambda: runners.MoERunner(*GATED, shared_w13=rand(32, 64), shared_w2=rand(64, 16)),
            RuntimeError,
            "the shared expert must have the experts' H, 48; got 64",
        ),
        (
            lambda: runners.MoERunner(*GATED, shared_w13=SHARED[1], shared_w2=SHARED[0]),
            RuntimeError,
            r"\[48, 40\] and \[80, 48\] for the shared expert",
        ),
        (
            lambda: runners.MoERunner(
                *GATED, shared_w13=quire.quantize(SHARED[0], "mxfp8"), shared_w2=quire.quantize(SHARED[1], "mxfp8")
            ),
            ValueError,
            "all weights must have one spec, got nvfp4 and mxfp8",
        ),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_in_words(make, error, words):
    before = runners.registered()
    with pytest.raises(error, match=words):
        runners.register(make())
    assert runners.registered() == before


def test_tensors_of_a_modelopt_checkpoint_are_taken_as_they_are():
    generator = torch.Generator().manual_seed(1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat([grid, -grid])
    weight = torch.randint(0, 256, (N, H // 2), generator=generator, dtype=torch.uint8)
    weight_scale = (torch.rand(N, H // 16, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
    weight_scale_2, input_scale = torch.tensor(3e-4), torch.tensor(0.25)
    # Two codes in a byte, the first in its lower half; scales multiply.
    codes = torch.stack([weight & 15, weight >> 4], -1).reshape(N, H).long()
    w = grid[codes].double() * weight_scale.double().repeat_interleave(16, 1) * weight_scale_2.double()
    x = grid[torch.randint(0, 16, (5, H), generator=generator)]
    x[:, ::16] = 6  # under input_scale every block has the scale 4, so that x loses nothing
    buffers = {
        "rowwise_data": weight,
        "rowwise_scale": weight_scale.view(torch.uint8),
        "rowwise_amax": (weight_scale_2 * 2688).reshape(1),
    }
    given = quire.QuantizedTensor.from_buffers(buffers, "nvfp4", (N, H))
    y = run(runners.LinearRunner(given, input_scale=input_scale), x.bfloat16())
    assert_rounded(y, x.double() @ w.t(), x.double().abs() @ w.abs().t(), H + 12)  # x and w are decoded values


# ---------------------------------------------------------------- weights only


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("w", ["nvfp4", "nvfp4:row_scaled:global=mul", "fp8_row", "fp8_block", "mxfp8", "mxfp4"])
def test_a_runner_whose_x_is_not_quantized_multiplies_the_decoded_weight(w, bias):
    x, weight, bias = rand(5, H), rand(N, H, seed=1), rand(N, seed=2) if bias else None
    decoded = quire.quantize(weight, w).dequantize()
    y = run(runners.LinearRunner(weight, bias, x="none", w=w), x)
    assert torch.equal(y, torch.nn.functional.linear(x, decoded, bias))
    assert torch.equal(run(runners.LinearRunner(quire.quantize(weight, w), bias, x="none"), x), y)
    assert not torch.equal(y, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("weight_on_input", [False, True])
def test_a_mixture_whose_x_is_not_quantized_multiplies_decoded_weights(weight_on_input):
    x, (weights, ids) = rand(7, H), choices()
    bias = rand(E, 2 * INNER, seed=9)
    decoded = [[quire.quantize(w, "mxfp4").dequantize() for w in stack] for stack in (*GATED, [SHARED[0]], [SHARED[1]])]

    def ffn(rows, w13, w2, b=None):
        h = torch.nn.functional.linear(rows, w13, b)
        return torch.nn.functional.linear(torch.ops.quire.activation(h, "swiglu", torch.bfloat16)[0], w2)

    expected = torch.zeros(len(x), H)
    for token, (of_token, experts) in enumerate(zip(weights, ids, strict=True)):
        for weight, expert in zip(of_token, experts, strict=True):
            if expert >= 0:
                row = (x[token].float() * weight).bfloat16() if weight_on_input else x[token]
                y = ffn(row[None], decoded[0][expert], decoded[1][expert], bias[expert])
                expected[token] += y[0].float() * (1.0 if weight_on_input else weight)
    expected = expected.bfloat16().float() + ffn(x, decoded[2][0], decoded[3][0]).float()
    made = runners.MoERunner(
        *GATED, w13_bias=bias, shared_w13=SHARED[0], shared_w2=SHARED[1], x="none", w="mxfp4",
        weight_on_input=weight_on_input,
    )  # fmt: skip
    assert torch.equal(run(made, x, weights, ids), expected.bfloat16())
    empty = run(made, x[:0], weights[:0], ids[:0])
    assert empty.shape == (0, H)


def test_an_input_scale_needs_inputs_that_are_quantized():
    with pytest.raises(RuntimeError, match="got x=none; leave the input_scale out"):
        runners.register(runners.LinearRunner(rand(N, H), input_scale=0.5, x="none"))
    with pytest.raises(RuntimeError, match="unknown family"):
        runners.register(runners.LinearRunner(rand(N, H), w="none"))
