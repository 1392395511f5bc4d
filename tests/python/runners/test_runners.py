"""quire.runners: what may be registered, how long it lives, Python functions, threads and processes."""

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch

import quire
from python.runners.runner_inputs import INNER, E, H, N, choices, linear_bits, nothing_stays_registered, rand  # noqa: F401  a fixture of every test
from quire import runners

ROOT = Path(__file__).parents[3]


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "w", ["nvfp4", "nvfp4:16x16", "mxfp8", "mxfp4", "fp8_row", "fp8_block:128x128", "mxfp8:swizzled"]
)
def test_a_linear_runner_takes_weights_of_any_dtype_and_spec(dtype, w):
    x, weight, bias = rand(5, H), rand(N, H, dtype=dtype, seed=1), rand(N, dtype=dtype, seed=2)
    x_spec = w.split(":")[0]
    with runners.register(runners.LinearRunner(weight, bias, x=x_spec, w=quire.QuantSpec(w))) as runner:
        expected = linear_bits(x, weight, bias, x_spec, w)
        assert torch.equal(quire.nvfp4_linear(x, runner, N), expected)
    quantized = quire.quantize(weight, w)
    with runners.register(runners.LinearRunner(quantized, bias, x=x_spec)) as runner:
        assert torch.equal(quire.nvfp4_linear(x, runner, N), expected)


@pytest.mark.parametrize("w", ["nvfp4:16x16", "mxfp8:interleaved", "mxfp4", "fp8_row", "fp8_block:128x128"])
def test_inputs_of_quantized_weights_have_their_family_by_default(w):
    x, family = rand(5, H), w.split(":")[0]
    weight = quire.quantize(rand(N, H, seed=1), w, columnwise=False)
    with runners.register(runners.LinearRunner(weight)) as runner:
        assert torch.equal(quire.nvfp4_linear(x, runner, N), linear_bits(x, rand(N, H, seed=1), None, family, w))
    experts = [
        [quire.quantize(one, w, columnwise=False) for one in rand(E, *shape)] for shape in ((INNER, H), (H, INNER))
    ]
    weights, ids = choices()
    with runners.register(runners.MoERunner(*experts, activation="relu")) as default:
        given = runners.register(runners.MoERunner(*experts, activation="relu", x=family))
        each = [quire.nvfp4_moe(rand(7, H), weights, ids, runner, H) for runner in (default, given)]
    assert torch.equal(*each)


def test_values_are_copied_when_a_runner_is_registered():
    x, weight, bias = rand(5, H), rand(N, H, seed=1), rand(N, seed=2)
    quantized = quire.quantize(weight, "nvfp4")
    expected = linear_bits(x, weight, bias)
    for w in (weight, quantized):
        with runners.register(runners.LinearRunner(w, bias)) as runner:
            (w.rowwise_data if w is quantized else w).zero_()
            bias.zero_()
            assert torch.equal(quire.nvfp4_linear(x, runner, N), expected)
        bias.copy_(rand(N, seed=2))


def moe_expected(x, weights, ids, w13, w2, **options):
    from_loop = torch.zeros(len(x), ids.shape[1], H)
    for e in range(E):
        token, choice = torch.nonzero(ids == e, as_tuple=True)
        on_input = options.get("weight_on_input", False)
        scale = weights[token, choice, None]
        rows = (x[token].float() * scale).bfloat16() if on_input else x[token]
        biases = [options[name][e] if name in options else None for name in ("w13_bias", "w2_bias")]
        h = linear_bits(rows, w13[e], biases[0])
        act = torch.ops.quire.activation(h, options.get("activation", "swiglu"), torch.bfloat16)[0]
        out = linear_bits(act, w2[e], biases[1]).float()
        from_loop[token, choice] = out if on_input else out * scale
    return (from_loop[:, 0] + from_loop[:, 1]).bfloat16()


GATED = (rand(E, 2 * INNER, H, seed=3), rand(E, H, INNER, seed=4))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_on_input": True},
        {"activation": "clamped_swiglu:limit=7:alpha=1.702:glu_linear_offset=1"},
        {"activation": "clamped_swiglu:limit=0.5:alpha=1:glu_linear_offset=0"},
        {"activation": "geglu"},
        {"w13_bias": rand(E, 2 * INNER, seed=5), "w2_bias": rand(E, H, seed=6, dtype=torch.float32)},
    ],
    ids=str,
)
def test_a_mixture_is_a_loop_over_its_experts(options):
    x, (weights, ids) = rand(7, H), choices()
    with runners.register(runners.MoERunner(*GATED, **options)) as runner:
        y = quire.nvfp4_moe(x, weights, ids, runner, H)
    assert torch.equal(y, moe_expected(x, weights, ids, *GATED, **options))


def test_an_activation_without_a_gate_takes_half_as_many_rows():
    x, (weights, ids), (w13, w2) = rand(7, H), choices(), GATED
    with runners.register(runners.MoERunner(w13[:, :INNER], w2, activation="srelu")) as runner:
        y = quire.nvfp4_moe(x, weights, ids, runner, H)
    assert torch.equal(y, moe_expected(x, weights, ids, w13[:, :INNER], w2, activation="srelu"))


def test_experts_come_in_one_tensor_or_one_by_one_quantized_or_not():
    x, (weights, ids), (w13, w2) = rand(7, H), choices(), GATED
    expected = moe_expected(x, weights, ids, w13, w2)

    def quantized(stack):
        return [quire.quantize(w, "nvfp4") for w in stack]

    for given in (GATED, (list(w13), tuple(w2)), (quantized(w13), quantized(w2))):
        with runners.register(runners.MoERunner(*given)) as runner:
            assert torch.equal(quire.nvfp4_moe(x, weights, ids, runner, H), expected)
    # One tensor quantized as a whole has one amax for all experts.
    stacks = [quire.quantize(stack, "nvfp4") for stack in GATED]
    with (
        runners.register(runners.MoERunner(*stacks)) as one,
        runners.register(runners.MoERunner(*[[stack[e] for e in range(E)] for stack in stacks])) as parts,
    ):
        y = quire.nvfp4_moe(x, weights, ids, one, H)
        assert torch.equal(y, quire.nvfp4_moe(x, weights, ids, parts, H)) and not torch.equal(y, expected)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: rand(N, H), TypeError, "expected a LinearRunner, MoERunner or PythonRunner .* got Tensor"),
        (lambda: runners.LinearRunner(None), TypeError, "weight must be a tensor, got None"),
        (lambda: runners.LinearRunner(rand(N)), ValueError, r"must be a matrix for each expert, got the shape \[32\]"),
        (lambda: runners.LinearRunner(rand(0, H)), RuntimeError, r"at least one of each; got \[0, 48\]"),
        (lambda: runners.LinearRunner(rand(N, H).int()), RuntimeError, "weight must be float32, float16 or bfloat16"),
        (lambda: runners.LinearRunner(rand(N, H), rand(H)), RuntimeError, "bias must have 32 features for each of 1"),
        (lambda: runners.LinearRunner(rand(N, H), w="nvfp4:sr"), RuntimeError, "rounds stochastically"),
        (lambda: runners.LinearRunner(rand(N, H), x="nvfp5"), ValueError, "nvfp5"),
        (
            lambda: runners.LinearRunner(quire.quantize(rand(N, H), "nvfp4"), w="mxfp8"),
            ValueError,
            "is quantized as nvfp4 but w says mxfp8; leave w out",
        ),
        (
            lambda: runners.LinearRunner(quire.quantize(rand(N, H), "nvfp4", False, True)),
            ValueError,
            "has no rowwise codes; quantize it with rowwise=True",
        ),
        (
            lambda: runners.LinearRunner(rand(N, H).to("meta")),
            RuntimeError,
            "weight must have values, and is on the meta device",
        ),
        (lambda: runners.MoERunner([], []), ValueError, "the sequence is empty"),
        (lambda: runners.MoERunner(rand(N, H), GATED[1]), ValueError, "must be a matrix for each expert"),
        (lambda: runners.MoERunner(GATED[0], GATED[1][:3]), RuntimeError, "as many experts, got 4 and 3"),
        (lambda: runners.MoERunner(GATED[1], GATED[0]), RuntimeError, r"must be w13 \[2 \* I, H\] and w2 \[H, I\]"),
        (
            lambda: runners.MoERunner([quire.quantize(GATED[0][0], "nvfp4"), GATED[0][1]], GATED[1]),
            ValueError,
            "matrices of one spec and shape, got Tensor among nvfp4",
        ),
        (
            lambda: runners.MoERunner([quire.quantize(w, "mxfp8") for w in GATED[0]], GATED[1]),
            ValueError,
            "must have one spec, got mxfp8 and nvfp4",
        ),
        (lambda: runners.PythonRunner(3, H, N), TypeError, "function must be a function, got 3"),
        (lambda: runners.PythonRunner(len, "a", N), TypeError, "in_features must be an int"),
        (lambda: runners.PythonRunner(len, 0, N), RuntimeError, "must be at least 1; got 0, 32 and 0"),
        (
            lambda: runners.PythonRunner(len, H, N, experts=-1),
            RuntimeError,
            "^PythonRunner: .* must be at least 1; got 48, 32 and -1; experts=0 is a linear layer",
        ),
        (lambda: runners.PythonRunner(len, 2**70, N), RuntimeError, "^PythonRunner: .* below 2\\*\\*63; got a?.*11805"),
        (lambda: runners.PythonRunner(len, H, N, device="a"), RuntimeError, "^PythonRunner: device must be .* got 'a'"),
        (
            lambda: runners.PythonRunner(len, H, N, device=[]),
            RuntimeError,
            r"^PythonRunner: device must be .* got \[\]",
        ),
        (
            lambda: runners.LinearRunner(rand(N, H), rand(N).double()),
            RuntimeError,
            "^LinearRunner: bias must be float32, float16 or bfloat16, got torch.float64; convert it with .to",
        ),
        (lambda: runners.LinearRunner(rand(N, H), 3), TypeError, "^LinearRunner: bias must be a tensor, got 3"),
        (
            lambda: runners.LinearRunner(rand(N, H), rand(N).to_sparse()),
            TypeError,
            "^LinearRunner: bias must be a dense",
        ),
        (lambda: runners.LinearRunner(None), TypeError, "^LinearRunner: weight must be a tensor, got None"),
        (
            lambda: runners.MoERunner(*GATED, w2_bias=rand(E, H).int()),
            RuntimeError,
            "^MoERunner: w2_bias must be float32, float16 or bfloat16, got torch.int32",
        ),
        (
            lambda: runners.MoERunner(None, GATED[1]),
            TypeError,
            "^MoERunner: w13 must be a tensor, or a sequence of tensors, got None",
        ),
        (lambda: runners.MoERunner(GATED[0], 3), TypeError, "^MoERunner: w2 must be .* sequence of tensors, got 3"),
        (
            lambda: runners.MoERunner([*GATED[0][:3], GATED[0][3, :5]], GATED[1]),
            RuntimeError,
            r"^MoERunner: w13 must have one shape and device for all experts, got \[32, 48\] on cpu and \[5, 48\] on",
        ),
        (
            lambda: runners.MoERunner(GATED[0], [*GATED[1][:3], GATED[1][3].to("meta")]),
            RuntimeError,
            r"^MoERunner: w2 must have one shape and device for all experts, got \[48, 16\] on cpu and .* on meta",
        ),
        (
            lambda: runners.MoERunner(*GATED, weight_on_input="a"),
            TypeError,
            "^MoERunner: weight_on_input must be a bool, got 'a'",
        ),
        (
            lambda: runners.MoERunner(*GATED, activation=None),
            TypeError,
            "^MoERunner: activation must be a str, got None",
        ),
    ],
)
def test_what_cannot_be_registered_is_refused_in_words(make, error, words):
    with pytest.raises(error, match=words):
        runners.register(make())


# ---------------------------------------------------------------- handles


def is_registered(number):
    return number in [runner.handle for runner in runners.registered()]


def test_a_handle_owns_its_runner():
    runner = runners.register(runners.LinearRunner(rand(N, H)), name="owned")
    assert is_registered(runner.handle) and int(runner) == runner.handle and not runner.closed
    assert repr(runner) == f"RunnerHandle({runner.handle}, name='owned')"
    with pytest.raises(RuntimeError, match=f"the name 'owned' belongs to runner {runner.handle}"):
        runners.register(runners.LinearRunner(rand(N, H)), name="owned")
    with runner as same:
        assert same is runner
    assert runner.closed and not is_registered(runner.handle)
    assert repr(runner).endswith(", closed)")
    runner.close()  # a second time does nothing

    with pytest.warns(
        UserWarning, match="the handle of runner [0-9]+ was dropped within 50 ms.*keep the handle"
    ) as told:
        dropped = runners.register(runners.LinearRunner(rand(N, H))).handle
    assert told[0].filename == __file__
    gc.collect()
    assert not is_registered(dropped)


def test_a_copied_model_shares_its_runners_and_the_last_one_ends_them():
    model = torch.nn.Module()
    model.runner = runners.register(runners.LinearRunner(rand(N, H)))
    number, other = model.runner.handle, copy.deepcopy(model)
    assert other.runner is model.runner is copy.copy(model.runner)
    del model
    gc.collect()
    assert is_registered(number)
    del other
    gc.collect()
    assert not is_registered(number)


def test_a_handle_is_not_pickled():
    with runners.register(runners.LinearRunner(rand(N, H))) as runner:
        with pytest.raises(TypeError, match="belongs to its process and cannot be pickled; save the weights"):
            pickle.dumps(runner)


X, WEIGHTS, IDS = rand(5, H), torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.int32)
ROUTED = (X, rand(5, E), "softmax:topk=2")
WRONG_CALLS = {
    "nvfp4_linear: x must be a tensor, got None": lambda m: quire.nvfp4_linear(None, m, N),
    "nvfp4_linear: out_features must be an int.*got 1.5": lambda m: quire.nvfp4_linear(X, m, 1.5),
    "nvfp4_moe: hidden_states must be a tensor, got 3": lambda m: quire.nvfp4_moe(3, WEIGHTS, IDS, m, H),
    "nvfp4_moe: topk_weights must be a tensor, got None": lambda m: quire.nvfp4_moe(X, None, IDS, m, H),
    "nvfp4_moe: topk_ids must be a tensor, got None": lambda m: quire.nvfp4_moe(X, WEIGHTS, None, m, H),
    "nvfp4_moe: hidden_size must be an int.*got None": lambda m: quire.nvfp4_moe(X, WEIGHTS, IDS, m, None),
    "nvfp4_moe_routed: hidden_states must be a t": lambda m: quire.nvfp4_moe_routed(None, *ROUTED[1:], m, H),
    "nvfp4_moe_routed: router_logits must be a t": lambda m: quire.nvfp4_moe_routed(X, None, ROUTED[2], m, H),
    "nvfp4_moe_routed: routing must be a str, got N": lambda m: quire.nvfp4_moe_routed(*ROUTED[:2], None, m, H),
    "nvfp4_moe_routed: hidden_size must be an int": lambda m: quire.nvfp4_moe_routed(*ROUTED, m, "a"),
    "nvfp4_moe_routed: expert_bias must be a tensor": lambda m: quire.nvfp4_moe_routed(*ROUTED, m, H, expert_bias=3),
}


@pytest.mark.parametrize("words", WRONG_CALLS)
def test_arguments_of_a_call_that_have_another_type_are_refused(words):
    with pytest.raises(TypeError, match=f"^{words}"):
        WRONG_CALLS[words](1)


def test_what_is_no_name_of_a_runner_is_refused_in_words():
    for runner in (runners.LinearRunner(rand(N, H)), None, 1.5):
        with pytest.raises(TypeError, match="a runner is named by a RunnerHandle, its number or its name, got"):
            quire.nvfp4_linear(rand(5, H), runner, N)


def test_runners_are_listed_and_found():
    with (
        runners.register(runners.LinearRunner(rand(N, H), x="nvfp4:row_scaled"), name="a list's first") as first,
        runners.register(runners.MoERunner(*GATED, weight_on_input=True)) as second,
    ):
        listed = [runner for runner in runners.registered() if runner.handle in (first.handle, second.handle)]
        assert listed == [
            runners.RegisteredRunner(
                first.handle, "a list's first", "linear", "cpu", H, N, 0, "x=nvfp4:row_scaled,w=nvfp4"
            ),
            runners.RegisteredRunner(
                second.handle, "", "moe", "cpu", H, H, E, "x=nvfp4,w=nvfp4 swiglu, weights on input"
            ),
        ]
        assert runners.find("a list's first") == listed[0]
        with pytest.raises(LookupError, match="no runner has the name 'b'; registered are \"a list's first\""):
            runners.find("b")


def test_a_number_of_no_python_function_is_refused_in_words():
    """Not by a KeyError: the operator is called with a number that somebody else has registered."""
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    with pytest.raises(LookupError, match="runners: no Python function has the number 12345678; register"):
        torch.ops.quire.runner_call_python(12345678, [x])
    handle = torch.ops.quire.runner_register_python("", 12345678, 16, 16, 0, "cpu", "somebody else's")
    try:
        with pytest.raises(LookupError, match="no Python function has the number 12345678"):
            quire.nvfp4_linear(x, handle, 16)
    finally:
        torch.ops.quire.runner_unregister(handle)
