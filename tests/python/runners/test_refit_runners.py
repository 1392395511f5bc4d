"""quire.runners.refit: new weights in the memory of a registered runner."""

import pytest
import torch

import quire
from python.runners.runner_inputs import INNER, E, H, N, choices, nothing_stays_registered, rand  # noqa: F401  a fixture
from quire import runners
from quire.runners import LinearRunner, MoERunner


@pytest.mark.parametrize("w", ["nvfp4", "nvfp4:16x16", "mxfp8", "fp8_row", "mxfp8:swizzled"])
def test_calls_by_the_same_handle_and_name_see_the_new_weight(w, compiler, device):
    x, old, new, bias = (
        rand(*sizes, seed=seed).to(device) for seed, sizes in enumerate([(5, H), (N, H), (N, H), (N,)])
    )
    options = {"x": w.split(":")[0], "w": w}
    with runners.register(LinearRunner(old, bias, **options), "refitted") as runner:
        function = compiler(lambda x: quire.nvfp4_linear(x, runner, N))
        function(x)
        with runners.register(LinearRunner(new, bias + 1, **options)) as other:
            expected = quire.nvfp4_linear(x, other, N)
        values, codes = LinearRunner(new, bias + 1, **options), quire.quantize(new, w)
        for given in (values, LinearRunner(codes, bias + 1, x=options["x"])):
            for named in (runner, "refitted", runner.handle):
                runners.refit(named, LinearRunner(old, bias, **options))
                assert not torch.equal(quire.nvfp4_linear(x, runner, N), expected)
                runners.refit(named, given)
                assert torch.equal(quire.nvfp4_linear(x, "refitted", N), expected)
        assert torch.equal(function(x), expected) and compiler.graphs == 1


@pytest.mark.parametrize("shared", [False, True])
def test_a_mixture_gets_all_of_its_weights(shared, device):
    def made(seed):
        sizes = {"w13": (E, 2 * INNER, H), "w2": (E, H, INNER), "w13_bias": (E, 2 * INNER), "w2_bias": (E, H)}
        if shared:
            sizes |= {"shared_w13": (2 * INNER, H), "shared_w2": (H, INNER), "shared_w2_bias": (H,)}
        return MoERunner(
            **{name: rand(*size, seed=seed + i).to(device) for i, (name, size) in enumerate(sizes.items())}
        )

    x, (weights, ids) = rand(7, H).to(device), (t.to(device) for t in choices())
    with runners.register(made(1)) as runner, runners.register(made(20)) as other:
        expected = quire.nvfp4_moe(x, weights, ids, other, H)
        assert not torch.equal(quire.nvfp4_moe(x, weights, ids, runner, H), expected)
        runners.refit(runner, made(20))
        assert torch.equal(quire.nvfp4_moe(x, weights, ids, runner, H), expected)


def test_static_scales_stay_unless_new_ones_are_given(device):
    x, old, new = (rand(*sizes, seed=seed).to(device) for seed, sizes in enumerate([(5, H), (N, H), (N, H)]))
    with (
        runners.register(LinearRunner(old, input_scale=0.001)) as runner,
        runners.register(LinearRunner(new, input_scale=0.001)) as kept,
        runners.register(LinearRunner(new, input_scale=0.002)) as changed,
    ):
        assert not torch.equal(quire.nvfp4_linear(x, kept, N), quire.nvfp4_linear(x, changed, N))
        runners.refit(runner, LinearRunner(new))
        assert torch.equal(quire.nvfp4_linear(x, runner, N), quire.nvfp4_linear(x, kept, N))
        runners.refit(runner, LinearRunner(new, input_scale=0.002))
        assert torch.equal(quire.nvfp4_linear(x, runner, N), quire.nvfp4_linear(x, changed, N))


def test_weights_of_another_form_are_refused_and_change_nothing(device):
    x, w, b = rand(5, H).to(device), rand(N, H, seed=1).to(device), rand(N, seed=2).to(device)
    experts = rand(E, 2 * INNER, H).to(device), rand(E, H, INNER).to(device)
    wrong = {
        "without a bias; register another": LinearRunner(w),
        "bias in float32; register another": LinearRunner(w, b.float()),
        r"got 1 of \[16, 48\]": LinearRunner(w[:16], b[:16]),
        "got 1 of .* in mxfp8": LinearRunner(w, b, w="mxfp8"),
        "with the same x; this is x=nvfp4,w=nvfp4, got x=mxfp8": LinearRunner(w, b, x="mxfp8"),
        "no static scale of its input, and the new one has": LinearRunner(w, b, input_scale=0.1),
        "takes the weight of another one": MoERunner(*experts),
    }
    with runners.register(LinearRunner(w, b)) as runner:
        before = quire.nvfp4_linear(x, runner, N)
        for message, given in wrong.items():
            with pytest.raises(RuntimeError, match=message):
                runners.refit(runner, given)
        assert torch.equal(quire.nvfp4_linear(x, runner, N), before)
        with pytest.raises(TypeError, match="weights must be a LinearRunner or a MoERunner"):
            runners.refit(runner, w)
    with pytest.raises(RuntimeError, match="no runner has the handle"):
        runners.refit(runner.handle, LinearRunner(w, b))
    with pytest.raises(LookupError, match="no runner has the name"):
        runners.refit("refitted", LinearRunner(w, b))
    own = runners.PythonRunner(lambda x: x, H, H, device=device)
    with (
        runners.register(own) as runner,
        pytest.raises(RuntimeError, match="has no weights that quire can write"),
    ):
        runners.refit(runner, LinearRunner(w, b))
    with runners.register(MoERunner(*experts)) as mixture:
        for other in (MoERunner(*experts, weight_on_input=True), MoERunner(*experts, activation="geglu")):
            with pytest.raises(RuntimeError, match="with the same options"):
                runners.refit(mixture, other)
