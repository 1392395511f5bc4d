"""The golden Linear: every quantized operand byte for byte, outputs and gradients within their bound."""

import pytest
import torch

import quire
from every_recipe import TABLE

#: The vectors' names of rows of the table; NVFP4's vectors round to nearest.
RECIPES = {
    "current_hybrid": TABLE["fp8_current"],
    "current_e4m3": TABLE["fp8_current_e4m3"],
    "block_pow2": TABLE["fp8_block"],
    "block_fp32": TABLE["fp8_block_f32"],
    "mxfp8": TABLE["mxfp8"],
    "mxfp8_w2d": TABLE["mxfp8_2d"],
    "nvfp4_rht_nosr": TABLE["nvfp4_no_sr"],
    "nvfp4_norht_nosr": TABLE["nvfp4_no_sr_no_rht"],
    "nvfp4_4over6_norht": TABLE["nvfp4_4over6_mae_no_sr"],
}


@pytest.fixture(params=RECIPES)
def run(request, golden, tensor_of, compiler, device):
    """The golden case, and what a layer computed for it: results by name, and its operands by role."""
    case, recipe = golden.get(f"linear/{request.param}"), RECIPES[request.param]
    layer = quire.Linear(96, 32, dtype=torch.bfloat16, device=device)
    layer.weight.data, layer.bias.data = tensor_of(case, "w"), tensor_of(case, "bias")
    x = tensor_of(case, "x").requires_grad_()

    def compute(function):
        layer.zero_grad()
        x.grad = None
        with quire.debug.operands() as records, quire.autocast(recipe=recipe):
            y = function(x)
            y.backward(tensor_of(case, "dy"))
        results = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}
        results = {name: result.cpu() for name, result in results.items()}
        return case, results, {record.role: record.tensor for record in records}

    return compute, layer, compiler


def check_operands(case, operands):
    for role, name in (("x", "x"), ("w", "w"), ("dy", "g")):
        for side, direction in (("row", "rowwise"), ("col", "columnwise")):
            for kind, buffer in (("codes", "data"), ("scales", "scale"), ("amax", "amax")):
                stored = getattr(operands[role], f"{direction}_{buffer}")
                if (vector := f"{name}_{side}_{kind}") in case:
                    assert torch.equal(torch.from_numpy(case[vector].copy()), stored.cpu()), f"{case.id}: {vector}"


def check_results(case, results):
    contraction = {"y": 96, "dx": 32, "dw": 64, "db": 64}
    for name, result in results.items():
        exact = torch.from_numpy(case[name].copy())
        if name == "db":
            size = torch.from_numpy(case["dy"].copy()).view(torch.bfloat16).double().abs().sum(0)
        else:
            size = torch.from_numpy(case[f"{name}_abs"].copy()).double()
        bound = (contraction[name] + 6) * 2.0**-24 * size
        rounding = 2.0**-8 * (exact.abs() + bound)  # half a unit in the last place of bfloat16, at most
        assert (result.double() - exact).abs().le(bound + rounding).all(), f"{case.id}: {name}"


def test_the_golden_linear_is_met(run, device):
    compute, layer, _ = run
    case, results, operands = compute(layer)
    check_operands(case, operands)
    check_results(case, results)


def test_the_golden_linear_is_met_by_a_compiled_layer(run, device):
    compute, layer, compiler = run
    case, results, operands = compute(compiler(layer))
    check_operands(case, operands)
    check_results(case, results)
    assert compiler.graphs == 1


def test_the_checks_notice_a_wrong_byte_and_a_wrong_sum(run):
    compute, layer, _ = run
    case, results, operands = compute(layer)
    operands["dy"].columnwise_data[3, 2] ^= 1
    with pytest.raises(AssertionError, match="g_col_codes"):
        check_operands(case, operands)
    results["dw"][5, 7] *= 1.01
    with pytest.raises(AssertionError, match="dw"):
        check_results(case, results)
