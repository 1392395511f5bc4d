"""quire.checkpoint: a forward pass computed again is the forward pass that was."""

import pytest
import torch

import quire
from every_recipe import DEFAULTS, DELAYED, each, some


def make():
    torch.manual_seed(1)
    return torch.nn.Sequential(quire.Linear(64, 64), torch.nn.GELU(), quire.Linear(64, 64))


def train(model, recipe, call, interleave, growth=100.0):
    """Steps whose inputs grow by that factor; backward runs outside of autocast, and with `interleave` after the next
    forward pass. Returns the gradients."""
    found, pending = [], []
    generator = torch.Generator().manual_seed(3)
    for i in range(4):
        x = (torch.randn(33, 64, generator=generator) * growth**i).requires_grad_()
        with quire.autocast(recipe=recipe):
            pending.append((x, call(model, x)))
        while len(pending) > interleave:
            leaf, y = pending.pop(0)
            y.sum().backward()
            found += [leaf.grad, *(p.grad.clone() for p in model.parameters())]
            model.zero_grad()
    return found


@each(some("mxfp8", "nvfp4", "delayed"))
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("interleave", [0, 1])
def test_gradients_are_those_without_a_checkpoint(recipe, reentrant, interleave):
    expected = train(make(), recipe, lambda model, x: model(x), interleave)
    got = train(make(), recipe, lambda model, x: quire.checkpoint(model, x, use_reentrant=reentrant), interleave)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("growth", [100.0, 0.01])
def test_a_checkpoint_within_a_checkpoint_has_the_scales_of_its_forward_pass(growth):
    def nested(model, x):
        return quire.checkpoint(lambda x: model[1:](quire.checkpoint(model[0], x)), x)

    results = []
    for call in (lambda model, x: model(x), nested):
        model = make()
        found = train(model, DELAYED, call, 1, growth)
        results.append([*found, *(model[i].delayed.fwd_amax for i in (0, 2))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_keywords_of_the_function_are_not_refused(reentrant):
    def call(model, x):
        return quire.checkpoint(
            lambda x, *, factor: model(x) * factor, x, use_reentrant=reentrant, preserve_rng_state=False, factor=2
        )

    recipe = DEFAULTS["mxfp8"]
    expected = train(make(), recipe, lambda model, x: model(x) * 2, 0)
    assert all(torch.equal(a, b) for a, b in zip(train(make(), recipe, call, 0), expected, strict=True))
    with pytest.raises(ValueError, match="context_fn"):
        quire.checkpoint(make(), torch.ones(1, 64), use_reentrant=True, context_fn=list)


def test_a_recomputed_output_adds_nothing_to_a_later_step():
    layer, recipe = quire.Linear(64, 64), DELAYED
    x = torch.randn(5, 64, requires_grad=True)
    with quire.autocast(recipe=recipe):
        y = quire.checkpoint(lambda x: layer(x, fp8_output=True).dequantize(), 1000 * x)
    with quire.autocast(recipe=recipe):  # ends the step of y
        assert layer.delayed.fwd_amax[2] == 0
    y.sum().backward()
    assert layer.delayed.fwd_amax[2] == 0


@each(some("mxfp8", "nvfp4", "delayed"))
def test_it_compiles(recipe, compiler):
    expected = train(make(), recipe, lambda model, x: model(x), 0)
    function = compiler(lambda model, x: quire.checkpoint(model, x))
    # aot_eager and GELU: the operators around ours are eager's own.
    got = train(make(), recipe, function, 0)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_pytorchs_own_checkpoint_outside_of_autocast_shows_why():
    """The control: without the recipe, what is computed again is another forward pass."""
    model, x = make(), torch.randn(33, 64, requires_grad=True)
    with quire.autocast():
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()


def test_saved_tensors_are_plain_and_may_leave_the_device(make_x):
    seen = []
    model, x = make(), make_x(33, 64, dtype=torch.float32)
    for context in (torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t), None):
        model.zero_grad()
        with context or torch.autograd.graph.save_on_cpu(), quire.autocast():
            y = model(quire.quantize(x, "mxfp8", columnwise=True) if context is None else x)
        y.sum().backward()
    assert seen and all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in seen)


def test_options_of_parallelism_are_refused():
    with pytest.raises(NotImplementedError, match="quire.checkpoint: tp_group is not available"):
        quire.checkpoint(make(), torch.randn(3, 64), tp_group=object())
