"""quire::grouped_linear refuses what does not fit before anything is computed, and nothing has changed then."""

import pytest
import torch

import quire
from quire.functional import grouped_linear, norm, quantize

pytestmark = pytest.mark.any_device

ops = torch.ops.quire
NVFP4 = "x=nvfp4,w=nvfp4,dy=nvfp4:sr"
FP8 = "x=fp8_tensor,w=fp8_tensor,dy=fp8_tensor"


def codes(t, spec="nvfp4", columnwise=True):
    absent = torch.empty(0, dtype=torch.uint8)
    return [absent if b is None else b for b in quantize(t, spec, columnwise=columnwise).buffer_list()]


@pytest.mark.parametrize(
    "weights, words",
    [
        (lambda: [torch.ones(32, 64)], "one tensor for each of the 3 groups"),
        (lambda: [torch.ones(32, 64) for _ in range(5)], "one tensor for each of the 3 groups"),
        (lambda: [torch.ones(2, 32, 64)], r"w must be \[3, 32, 64\], got \[2, 32, 64\]"),
        (lambda: [torch.ones(32, 64), torch.ones(7, 64), torch.ones(32, 64)], r"w must be \[32, 64\], got \[7, 64\]"),
        (lambda: [torch.ones(32, 64, dtype=torch.float64) for _ in range(3)], "w must be float32.*got Double"),
        (lambda: [torch.ones(32, 64, device="meta") for _ in range(3)], "w and x must be on one device"),
    ],
)
def test_weights_that_are_given_quantized_are_as_many_and_as_large_as_their_gradients(weights, words):
    w = [one.requires_grad_() for one in weights()]
    given = [b for _ in range(3) for b in codes(torch.ones(32, 64))]
    with pytest.raises(RuntimeError, match=words):
        grouped_linear(
            *(torch.ones(8, 64), w, [], torch.tensor([3, 5, 8]), NVFP4),
            **{"dtype": torch.float32, "w_buffers": given, "sr_state": torch.zeros(2, dtype=torch.int64)},
        )


@pytest.mark.parametrize("offsets", [None, torch.tensor([8])])
@pytest.mark.parametrize("wrong", ["absent", "short"])
@pytest.mark.parametrize("where", ["grad", "main_grad"])
def test_codes_of_x_that_backward_cannot_use_change_no_state(offsets, wrong, where):
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    state, main_grad = torch.tensor([5, 0]), torch.zeros(32, 64)
    given = [b.flatten() for b in codes(x.detach(), columnwise=wrong != "absent")]
    if wrong == "short":
        given[3] = given[3][:64].clone()
    destination = {"main_grad": [main_grad]} if where == "main_grad" else {}
    with pytest.raises(RuntimeError, match="columnwise_data"):
        y = grouped_linear(
            x, [w], [], offsets, NVFP4, dtype=torch.float32, x_buffers=given, sr_state=state, **destination
        )
        y[0].sum().backward()
    assert state.tolist() == [5, 0] and not main_grad.any() and w.grad is None


@pytest.mark.parametrize("recipe", ["", NVFP4])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("apart, words", [(0, "groups 0 and 2"), (16, "groups 0 and 2"), (32, "")])
def test_groups_that_share_a_main_grad_are_refused(apart, words, overwrite, recipe):
    """Memory of group 2 begins so many rows beyond that of group 0."""
    memory = torch.zeros(64, 64)
    main_grad = [memory[:32], torch.zeros(32, 64), memory[apart : apart + 32]]
    w = [torch.ones(32, 64).requires_grad_() for _ in main_grad]
    options = {"main_grad": main_grad, "overwrite_main_grad": overwrite, "sr_state": torch.tensor([5, 0])}
    y = grouped_linear(torch.ones(8, 64), w, [], torch.tensor([3, 5, 8]), recipe, dtype=torch.float32, **options)[0]
    if words:
        with pytest.raises(RuntimeError, match=f"main_grad of the {words} share memory"):
            y.sum().backward()
        assert not memory.count_nonzero() and not main_grad[1].count_nonzero()
    else:
        y.sum().backward()
        assert all(one.count_nonzero() for one in main_grad)


def test_a_norm_that_made_no_columnwise_codes_is_refused_in_forward():
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    spec = {"spec": "nvfp4", "rowwise": True, "columnwise": False}
    y, buffers = norm(x, torch.ones(64), None, "RMSNorm", torch.float32, **spec)
    state = torch.tensor([5, 0])
    with pytest.raises(RuntimeError, match="x is given without columnwise_data"):
        grouped_linear(y, [w], [], None, NVFP4, dtype=torch.float32, x_buffers=buffers, sr_state=state)


@pytest.mark.parametrize("name", ["main_grad", "sr_state", "bwd_amax", "bwd_scale"])
def test_what_backward_writes_elsewhere_is_refused_in_forward(name):
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    scaling = {"fwd_scale": torch.ones(3), "bwd_scale": torch.ones(2), "bwd_amax": torch.zeros(2)}
    state = scaling | {"main_grad": [torch.zeros(32, 64)], "sr_state": torch.tensor([5, 0])}
    state[name] = [t.to("meta") for t in state[name]] if name == "main_grad" else state[name].to("meta")
    with pytest.raises(RuntimeError, match="one device"):
        grouped_linear(x, [w], [], None, FP8, dtype=torch.float32, **state)


def test_a_bias_with_a_dimension_of_groups_needs_offsets():
    x, w, bias = torch.randn(8, 64), torch.randn(32, 64), torch.zeros(1, 32, requires_grad=True)
    with pytest.raises(RuntimeError, match="bias must be one vector where no offsets"):
        grouped_linear(x, [w], [bias], None, FP8, dtype=torch.float32)


@pytest.mark.parametrize("name", ["out", "dgrad_out"])
def test_memory_that_may_not_be_written_is_not(name):
    with torch.inference_mode():
        memory = torch.zeros(8, 64)
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(64, 64)
    with pytest.raises(RuntimeError, match=f"{name} was made under torch.inference_mode"):
        grouped_linear(x, [w], [], None, FP8, dtype=torch.float32, **{name: memory})
    assert not memory.any()


def test_scales_of_a_forward_pass_that_backward_would_not_use_are_refused():
    x, w = torch.randn(8, 64, requires_grad=True), torch.randn(32, 64, requires_grad=True)
    scaling = {"fwd_scale": torch.full((3,), 0.37), "bwd_scale": torch.ones(2), "bwd_amax": torch.zeros(2)}
    with pytest.raises(RuntimeError, match="backward=requantized does not go with delayed scaling"):
        grouped_linear(x, [w], [], None, f"{FP8},backward=requantized", dtype=torch.float32, **scaling)


@pytest.mark.parametrize("operator", ["grouped_accumulate_", "grouped_wgrad_"])
def test_a_list_of_stacks_is_not_written_in_its_first_alone(operator):
    stacks = [torch.zeros(3, 32, 64) for _ in range(3)]
    made = ops.linear_fwd(torch.randn(8, 64), [torch.randn(32, 64)], [], None, 32, NVFP4, torch.float32, 1, [], [])
    dy = codes(torch.randn(8, 32))[3:]
    calls = {
        "grouped_accumulate_": lambda: ops.grouped_accumulate_(stacks, torch.ones(3, 32, 64)),
        "grouped_wgrad_": lambda: ops.grouped_wgrad_(stacks, *dy, *made[1:4], torch.tensor([3, 5, 8]), 8, NVFP4),
    }
    with pytest.raises(RuntimeError, match="main_grad must be a contiguous float32.*matrix"):
        calls[operator]()
    assert not any(t.any() for t in stacks)


@pytest.mark.parametrize("save", [-1, 4])
def test_an_inner_operator_knows_all_bits_it_is_given(save):
    with pytest.raises(RuntimeError, match="save must be a sum"):
        ops.linear_fwd(torch.ones(2, 64), [torch.ones(32, 64)], [], None, 32, NVFP4, torch.float32, save, [], [])


@pytest.mark.parametrize("offsets", [None, torch.tensor([0])])
def test_a_changed_weight_does_not_matter_to_no_rows(offsets):
    w = torch.randn(32, 64)
    stale, given = ops.fingerprint(w) + 1, codes(w)
    y = grouped_linear(
        torch.ones(0, 64), [w], [], offsets, NVFP4, dtype=torch.float32, w_buffers=given, w_fingerprint=stale
    )[0]
    assert y.shape == (0, 32)


@pytest.mark.parametrize("delay", [False, True])
def test_a_frozen_weight_has_its_main_grad_left_alone(delay):
    m = quire.GroupedLinear(2, 64, 32, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    m.weight0.requires_grad_(False)
    m.weight0.main_grad, m.weight1.main_grad = torch.zeros(32, 64), torch.zeros(32, 64)
    with quire.autocast(recipe=quire.recipe.MXFP8BlockScaling()):
        m(torch.randn(8, 64), [3, 5]).sum().backward()
    if delay:
        m.backward_dw()
    assert not m.weight0.main_grad.any() and m.weight1.main_grad.any()
    del m.weight0.main_grad  # nor does it need one
    with quire.autocast(recipe=quire.recipe.MXFP8BlockScaling()):
        m(torch.randn(8, 64), [3, 5]).sum().backward()
