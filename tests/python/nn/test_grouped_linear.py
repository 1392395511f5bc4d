"""quire.GroupedLinear: each group of tokens gets the bits that a quire.Linear of its own would give it."""

import copy

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked

import quire
from every_recipe import DEFAULTS, params, some
from pairwise import pairwise
from python.nn.grouped_layers import (
    SPLITS,
    check_equal,
    equal_or_rounded,
    grouped,
    grouped_step,
    inputs,
    linears,
    of_linears,
    slices,
    stacked,
)
from quire import recipe as recipes
from steps import assert_rounded

FORMS = [
    pytest.param({}, id="separate"),
    pytest.param({"single_grouped_weight": True, "single_grouped_bias": True}, id="stacked"),
]


@pytest.mark.parametrize("options", FORMS)
def test_groups_are_linears(any_recipe, options, equal_bits, device):
    layer = grouped(**options).to(device)
    x, dy = inputs(SPLITS, device=device)
    expected = of_linears(linears(layer), x, dy, SPLITS, any_recipe)
    check_equal(layer, grouped_step(layer, x, dy, SPLITS, any_recipe), expected, equal_bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(recipe, dtype, equal_bits, device):
    layer = grouped(dtype=dtype).to(device)
    x, dy = inputs(SPLITS[:3], dtype=dtype, device=device)
    layer = grouped(SPLITS[:3], dtype).to(device)
    expected = of_linears(linears(layer), x, dy, SPLITS[:3], recipe)
    check_equal(layer, grouped_step(layer, x, dy, SPLITS[:3], recipe), expected, equal_bits)


@pytest.mark.parametrize("splits", [[0, 0, 0], [0, 40, 0], [1], [16, 16], [33, 7]])
def test_any_sizes_of_groups(recipe, splits, equal_bits, device):
    layer = grouped(splits).to(device)
    x, dy = inputs(splits, device=device)
    expected = of_linears(linears(layer), x, dy, splits, recipe)
    check_equal(layer, grouped_step(layer, x, dy, splits, recipe), expected, equal_bits)


def test_an_empty_group_has_a_gradient_of_zero(recipe, device):
    layer = grouped().to(device)
    _, _, *gradients = grouped_step(layer, *inputs(SPLITS, device=device), SPLITS, recipe)
    assert not gradients[1].any() and not gradients[len(SPLITS) + 1].any()
    assert all(gradients[i].any() for i in (0, 2, 3, 4, 5))


def test_rows_beyond_the_last_group_are_zero(recipe, device):
    layer = grouped().to(device)
    y, dx, *_ = grouped_step(layer, *inputs(SPLITS, beyond=4, device=device), SPLITS, recipe)
    assert y[:-4].any(1).all() and not y[-4:].any() and not dx[-4:].any()


def test_two_steps_of_random_rounding_differ_as_those_of_linears_do(equal_bits, device):
    layer, recipe = grouped().to(device), recipes.NVFP4BlockScaling()
    x, dy = inputs(SPLITS, device=device)
    loop = linears(layer)
    for _ in range(2):
        expected = of_linears(loop, x, dy, SPLITS, recipe)
        check_equal(layer, grouped_step(layer, x, dy, SPLITS, recipe), expected, equal_bits)
    assert layer.sr_state[1] == 2


def test_delayed_scaling_is_that_of_linears(equal_bits):
    recipe = recipes.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
    layer = grouped()
    loop = linears(layer)
    for scale in (1, 300, 0.01, 5):
        x, dy = inputs(SPLITS)
        x, dy = x * scale, dy / scale
        # All layers of one step in one autocast: a step ends on entering the next.
        leaf = x.detach().requires_grad_()
        parts = [part.detach().requires_grad_() for part in x[: sum(SPLITS)].split(SPLITS)]
        layer.zero_grad()
        for one in loop:
            one.zero_grad()
        with quire.autocast(recipe=recipe):
            y = layer(leaf, SPLITS)
            ys = [one(part) for one, part in zip(loop, parts, strict=True)]
        y.backward(dy)
        for out, gradient in zip(ys, dy[: sum(SPLITS)].split(SPLITS), strict=True):
            out.backward(gradient)
        assert equal_bits(y[: sum(SPLITS)], torch.cat(ys))
        assert equal_bits(leaf.grad[: sum(SPLITS)], torch.cat([part.grad for part in parts]))
        for group, one in enumerate(loop):
            assert equal_bits(getattr(layer, f"weight{group}").grad, one.weight.grad)
            assert equal_bits(layer.delayed.fwd_scale[group :: len(SPLITS)], one.delayed.fwd_scale)
    assert layer.delayed.fwd_scale[0] != layer.delayed.fwd_scale[2]


def test_calibration_collects_in_high_precision(equal_bits):
    recipe = recipes.DelayedScaling(amax_history_len=2)
    layer = grouped()
    loop = linears(layer)
    x, _ = inputs(SPLITS)
    with torch.no_grad():
        plain = layer(x, SPLITS)
    with quire.autocast(enabled=False, calibrating=True, recipe=recipe):
        assert equal_bits(layer(x, SPLITS), plain)
        for one, part in zip(loop, x[: sum(SPLITS)].split(SPLITS), strict=True):
            one(part)
    assert layer.delayed.fwd_amax.count_nonzero() == 2 * len(SPLITS) - 1  # an empty group has no amax of x
    for group, one in enumerate(loop):
        assert equal_bits(layer.delayed.fwd_amax[group :: len(SPLITS)], one.delayed.fwd_amax)


def test_in_high_precision_it_is_a_loop_of_products():
    layer = grouped(dtype=torch.float32)
    x, dy = inputs(SPLITS, dtype=torch.float32)
    y, dx, *gradients = grouped_step(layer, x, dy, SPLITS, None)
    begin = 0
    dw, db = stacked(layer, gradients)
    for group, rows in enumerate(SPLITS):
        part = slice(begin, begin + rows)
        wide = [getattr(layer, f"weight{group}"), getattr(layer, f"bias{group}"), x[part], dy[part]]
        exact_results, magnitudes = (
            (x @ w.T + b, dy @ w, dy.T @ x, dy.sum(0))
            for w, b, x, dy in ([t.detach().double() for t in wide], [t.detach().double().abs() for t in wide])
        )
        ours_and_roundings = (y[part], 96 + 1), (dx[part], 64), (dw[group], rows), (db[group], rows)
        for (ours, roundings), exact, magnitude in zip(ours_and_roundings, exact_results, magnitudes, strict=True):
            assert_rounded(ours, exact, magnitude, roundings)
        begin += rows
    assert not y[begin:].any() and not dx[begin:].any()


OVERRIDES = params(
    some("fp8_current_dequantized", "nvfp4_dequantized", "mxfp8_dequantized", "fp8_block_high_precision")
)


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("options", FORMS)
def test_groups_are_linears_where_backward_is_overridden(override, options, equal_bits, device):
    layer = grouped(**options).to(device)
    x, dy = inputs(SPLITS, device=device)
    expected = of_linears(linears(layer), x, dy, SPLITS, override)
    check_equal(layer, grouped_step(layer, x, dy, SPLITS, override), expected, equal_or_rounded(equal_bits, device))
    quantized_backward = grouped_step(layer, x, dy, SPLITS, type(override)())
    assert not equal_bits(quantized_backward[1], expected[1])


def test_an_original_input_is_quantized_in_backward(recipe, equal_bits, device):
    layer = grouped(save_original_input=True).to(device)
    x, dy = inputs(SPLITS, device=device)
    expected = of_linears(linears(layer), x, dy, SPLITS, recipe)
    check_equal(layer, grouped_step(layer, x, dy, SPLITS, recipe), expected, equal_bits)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with quire.autocast(recipe=recipe):
            layer(x, SPLITS)
    assert any(t.shape == x.shape and t.dtype == x.dtype for t in saved)
    delayed = recipes.DelayedScaling()
    with quire.autocast(recipe=delayed), pytest.raises(ValueError, match="save_original_input=True does not go with"):
        layer(x, SPLITS)


def test_backward_override_multiplies_what_came(equal_bits, device):
    layer = grouped(dtype=torch.float32).to(device)
    x, dy = inputs(SPLITS, dtype=torch.float32, device=device)
    plain = grouped_step(layer, x, dy, SPLITS, None)
    override = recipes.MXFP8BlockScaling(backward_override="high_precision")
    ours = grouped_step(layer, x, dy, SPLITS, override)
    assert all(equal_bits(a, b) for a, b in zip(ours[1:], plain[1:], strict=True))
    assert not equal_bits(ours[0], plain[0])


@pytest.mark.parametrize("override", OVERRIDES)
def test_one_graph_where_backward_is_overridden(compiler, override, equal_bits):
    check_one_graph(compiler, grouped(), override, "aot_eager", equal_bits)


def test_one_graph_where_x_is_kept(compiler, recipe, equal_bits):
    check_one_graph(compiler, grouped(save_original_input=True), recipe, "aot_eager", equal_bits)


@pytest.mark.parametrize(("form", "backend", "recipe"), pairwise([0, 1], ["aot_eager", "inductor"], list(DEFAULTS)))
def test_one_graph_for_all_counts(compiler, recipe, form, backend, equal_bits):
    (options,) = FORMS[form].values
    check_one_graph(compiler, grouped(**options), DEFAULTS[recipe], backend, equal_bits)


def check_one_graph(compiler, layer, recipe, backend, equal_bits):
    compiled = compiler(layer, backend)
    for splits in (SPLITS, [0] * 6, [0, 0, 1, 0, 0, 0], [200, 1, 2, 0, 40, 9]):
        x, dy = inputs(splits, beyond=0)
        layer.sr_state[1] = 0
        eager = grouped_step(layer, x, dy, splits, recipe)
        layer.sr_state[1] = 0

        def call(x, m_splits):
            mark_unbacked(x, 0)
            return compiled(x, m_splits)

        ours = grouped_step(layer, x, dy, splits, recipe, function=call)
        assert all(equal_bits(a, b) for a, b in zip(ours, eager, strict=True))
    assert compiler.graphs == 1


def test_delayed_scaling_in_a_graph(compiler, equal_bits):
    recipe = recipes.DelayedScaling(amax_history_len=2)
    first = grouped()
    runs = []
    for compiled in (False, True):
        layer = copy.deepcopy(first)
        function = compiler(layer) if compiled else layer
        runs.append([])
        for scale in (1, 300, 0.01):
            x, dy = inputs(SPLITS)
            runs[-1] += grouped_step(layer, x * scale, dy, SPLITS, recipe, function=function)
            runs[-1] += [layer.delayed.fwd_scale.clone(), layer.delayed.bwd_scale.clone()]
    assert all(equal_bits(a, b) for a, b in zip(*runs, strict=True))
    assert compiler.graphs == 1
    assert runs[0][-2].unique().numel() > len(SPLITS)


def test_quantized_parameters_give_the_same_bits(recipe, equal_bits, device):
    plain = grouped().to(device)
    with quire.quantized_model_init(recipe=recipe):
        quantized = grouped().to(device)
    x, dy = inputs(SPLITS, device=device)
    plain.sr_state.copy_(quantized.sr_state)
    ours, theirs = (grouped_step(layer, x, dy, SPLITS, recipe) for layer in (quantized, plain))
    assert all(equal_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert type(quantized.weight0.grad) is torch.Tensor
    with torch.no_grad(), quire.autocast(recipe=recipe):
        assert equal_bits(quantized(x, SPLITS), ours[0])
    with torch.no_grad():
        for of_plain, of_quantized in zip(plain.group_weights(""), quantized.group_weights(""), strict=True):
            of_plain.copy_(of_quantized.dequantize())
    ours, theirs = (grouped_step(layer, x, dy, SPLITS, None) for layer in (quantized, plain))
    assert all(equal_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", FORMS)
def test_kept_codes_give_the_same_bits_and_are_never_stale(recipe, options, equal_bits):
    layer = grouped(**options)
    x, dy = inputs(SPLITS)
    expected = grouped_step(layer, x, dy, SPLITS, recipe)
    quire.quantize_weights(layer, recipe)
    layer.sr_state[1] = 0
    assert all(equal_bits(a, b) for a, b in zip(grouped_step(layer, x, dy, SPLITS, recipe), expected, strict=True))
    with torch.no_grad(), quire.autocast(recipe=recipe):
        assert equal_bits(layer(x, SPLITS), expected[0])
        next(layer.parameters()).data.reshape(-1)[-1] += 1
        with pytest.raises(RuntimeError, match="has changed since it was quantized"):
            layer(x, SPLITS)


@pytest.mark.parametrize("override", OVERRIDES)
def test_quantized_parameters_where_backward_is_overridden(override, equal_bits):
    with quire.quantized_model_init(recipe=override):
        layer = grouped()
    x, dy = inputs(SPLITS)
    results = grouped_step(layer, x, dy, SPLITS, override)
    for group, (one, part) in enumerate(zip(linears(layer), slices(SPLITS), strict=True)):
        with quire.quantized_model_init(recipe=override):
            quantized = quire.Linear(96, 64, bias=True, params_dtype=torch.bfloat16)
        quantized.load_state_dict(one.state_dict() | {"weight": getattr(layer, f"weight{group}").detach()})
        own = x[part].detach().requires_grad_()
        with quire.autocast(recipe=override):
            y = quantized(own)
        y.backward(dy[part])
        expected = y, own.grad, quantized.weight.grad, quantized.bias.grad
        ours = results[0][part], results[1][part], results[2 + group], results[2 + len(SPLITS) + group]
        assert all(equal_bits(a, b) for a, b in zip(ours, expected, strict=True)), group


@pytest.mark.parametrize("override", [None, *OVERRIDES])
def test_microbatches_quantize_once(recipe, override, equal_bits, device):
    recipe = override or recipe
    layer = grouped().to(device)
    x, dy = inputs(SPLITS, device=device)
    expected = grouped_step(layer, x, dy, SPLITS, recipe)
    for first in (True, False):
        layer.sr_state[1] = 0
        ours = grouped_step(layer, x, dy, SPLITS, recipe, is_first_microbatch=first)
        assert all(equal_bits(a, b) for a, b in zip(ours, expected, strict=True))
    assert layer.microbatch_weight.fingerprint.shape == (len(SPLITS),)


@pytest.mark.parametrize("ours", FORMS)
@pytest.mark.parametrize("theirs", FORMS)
def test_state_dicts_load_into_either_form(ours, theirs, equal_bits):
    source, target = grouped(**theirs), grouped(**ours)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    target.load_state_dict(source.state_dict(), strict=True)
    pairs = zip(source.group_weights(""), target.group_weights(""), strict=True)
    assert all(equal_bits(a, b) for a, b in pairs)
    x, dy = inputs(SPLITS)
    assert equal_bits(grouped_step(source, x, dy, SPLITS, None)[0], grouped_step(target, x, dy, SPLITS, None)[0])


def test_gradients_only_where_they_are_wanted(recipe, equal_bits):
    layer = grouped()
    x, dy = inputs(SPLITS)
    expected = grouped_step(layer, x, dy, SPLITS, recipe)
    layer.weight2.requires_grad_(False)
    layer.bias0.requires_grad_(False)
    layer.sr_state[1] = 0
    ours = grouped_step(layer, x, dy, SPLITS, recipe)
    missing = {2 + 2, 2 + len(SPLITS)}
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert a is None if i in missing else equal_bits(a, b)


def test_ranks_and_strides_of_x(recipe, equal_bits):
    layer = grouped([3, 5])
    x = inputs([3, 5], beyond=0)[0]
    wide = torch.zeros(8, 200, dtype=x.dtype)
    wide[:, :96] = x
    with torch.no_grad(), quire.autocast(recipe=recipe):
        y = layer(x, [3, 5])
        assert equal_bits(layer(wide[:, :96], [3, 5]), y)
        assert equal_bits(layer(x.reshape(2, 4, 96), [3, 5]), y.reshape(2, 4, 64))
        assert equal_bits(layer(x, torch.tensor([3, 5], dtype=torch.int32)), y)


def test_results_do_not_depend_on_threads(recipe, equal_bits):
    layer = grouped()
    x, dy = inputs(SPLITS)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        layer.sr_state[1] = 0
        results.append(grouped_step(layer, x, dy, SPLITS, recipe))
    torch.set_num_threads(threads)
    assert all(equal_bits(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("m_splits", "message"),
    [
        (torch.tensor([5, -1, 3]), r"offsets must not decrease .* 0 to 8.*group 1 ends at 4, the one before at 5"),
        (torch.tensor([5, 2, 2]), r"group 2 ends at 9"),
        ([5, -1, 3], r"must not be negative and .* got \[5, -1, 3\]"),
        ([5, 2, 2], r"must add up to at most the 8 rows of x; got \[5, 2, 2\], which add up to 9"),
        ([5, 3], r"one size for each of the 3 groups \(num_gemms\); got 2"),
    ],
)
def test_wrong_groups_are_refused(recipe, m_splits, message):
    layer = grouped([1, 1, 1])
    x = inputs([8], beyond=0)[0]
    with quire.autocast(recipe=recipe), pytest.raises(RuntimeError, match=message):
        layer(x, m_splits)


@pytest.mark.parametrize("given", [list, torch.tensor])
@pytest.mark.parametrize("m_splits", [[2**32 + 3, 5], [3, 2**32 + 5], [2**63 - 1, 2**63 - 1], [2**63 - 1, 2]])
def test_sizes_of_groups_of_64_bits_do_not_wrap(m_splits, given):
    layer = grouped([1, 1])
    for enabled in (False, True):
        with (
            quire.autocast(enabled=enabled),
            pytest.raises(RuntimeError, match="offsets must not decrease and be from|at most the 8 rows of x"),
        ):
            layer(inputs([8], beyond=0)[0], given(m_splits))


def test_wrong_arguments_are_refused(recipe):
    layer = grouped([4, 4])
    x = inputs([8], beyond=0)[0]
    with quire.autocast(recipe=recipe):
        with pytest.raises(TypeError, match="m_splits must be one int for each group"):
            layer(x, torch.tensor([4.0, 4.0]))
        with pytest.raises(RuntimeError, match=r"x and w must agree on K; got x \[..., 95\]"):
            layer(x[:, :95], [4, 4])
        with pytest.raises(TypeError, match="weight0 must have the dtype of x"):
            layer(x.float(), [4, 4])
    with pytest.raises(ValueError, match="num_gemms must be at least 1, got 0"):
        quire.GroupedLinear(0, 4, 4)
    with pytest.raises(TypeError, match="save_original_input must be a bool"):
        quire.GroupedLinear(2, 4, 4, save_original_input=1)
    assert layer(x, [4, 4], None, out=None, dgrad_out=None).shape == (8, 64)
    with pytest.raises(TypeError, match="unexpected keyword argument 'outs'"):
        layer(x, [4, 4], outs=None)


def test_copies_and_moves(recipe, equal_bits):
    layer = grouped()
    x, dy = inputs(SPLITS)
    expected = grouped_step(layer, x, dy, SPLITS, recipe)
    twin = copy.deepcopy(layer)
    twin.sr_state[1] = 0
    assert all(equal_bits(a, b) for a, b in zip(grouped_step(twin, x, dy, SPLITS, recipe), expected, strict=True))
    meta = quire.GroupedLinear(6, 96, 64, device="meta", params_dtype=torch.bfloat16)
    with quire.autocast(recipe=recipe):
        assert meta(torch.empty(9, 96, device="meta", dtype=torch.bfloat16), [9, 0, 0, 0, 0, 0]).shape == (9, 64)
    meta.to_empty(device="cpu").reset_parameters()
    assert grouped_step(meta, x, dy, SPLITS, recipe)[0].isfinite().all()
    assert repr(layer) == "quire.GroupedLinear(num_gemms=6, in_features=96, out_features=64, bias=True)"
