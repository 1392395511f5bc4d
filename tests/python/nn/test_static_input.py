"""Layers and runners whose x has a scale of the layer, `input_scale` (numerics.md 2.5, 5.9)."""

import copy
import pickle

import pytest
import torch

import quire
from quire import runners

pytestmark = pytest.mark.any_device

K, N = 64, 48
FP8 = "x=fp8_tensor:given,w=fp8_row,dy=mxfp8"
NVFP4 = "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=nvfp4"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Values of x under a static scale, by PyTorch's own cast; float64."""
    multiplier = torch.tensor(1.0) / torch.tensor(scale)
    codes = (x.float() * multiplier).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * torch.tensor(scale).double()


def nvfp4(x: torch.Tensor, g: float) -> torch.Tensor:
    """The same of whole blocks under a global scale that multiplies."""
    g = torch.tensor(g)
    blocks = x.float().unflatten(-1, (-1, 16))
    encode = (torch.tensor(1.0) / g) * torch.tensor(1 / 6, dtype=torch.float32)
    scale = (blocks.abs().amax(-1, keepdim=True) * encode).clamp(max=448).to(torch.float8_e4m3fn).float()
    scaled = (blocks * (1 / (scale * g))).double()
    nearest = (scaled.abs().unsqueeze(-1) - E2M1).abs()
    # Ties to the even index, which comes first among equals where the lower index is even.
    lower = nearest.argmin(-1, keepdim=True)
    tie = (lower < 7) & (nearest.gather(-1, lower) == nearest.gather(-1, (lower + 1).clamp(max=7)))
    index = torch.where(tie & (lower % 2 == 1), lower + 1, lower).squeeze(-1)
    return (E2M1[index] * scaled.sign() * (scale * g).double()).flatten(-2)


CASES = {"fp8": (FP8, fp8, 0.0123), "nvfp4": (NVFP4, nvfp4, 0.00131)}
cases = pytest.mark.parametrize("case", list(CASES))


def x_of(rows: int = 21, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype) * 2


def loaded(recipe: str, scale: float, **options: object) -> quire.Linear:
    torch.manual_seed(0)
    layer = quire.Linear(K, N, recipe=recipe, **options)
    state = layer.state_dict() | {"input_scale": torch.tensor([scale])}
    layer.load_state_dict(state)
    return layer


def close(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """y is a b^T within the bound of numerics.md 7.5."""
    bound = (a.shape[1] + 12) * 2.0**-24 * (a.abs() @ b.abs().T)
    return bool(((y.double() - a @ b.T).abs() <= bound).all())


def columns(q: quire.QuantizedTensor) -> torch.Tensor:
    """Values of the columnwise codes of [M, K], as [K, M]; float64."""
    buffers = [torch.empty(0) if buffer is None else buffer for buffer in q.buffer_list()[3:]]
    return torch.ops.quire.dequantize(*buffers, q.spec_text, True, q.shape, torch.float32).double()


@cases
def test_a_layer_quantizes_x_under_its_own_scale(case):
    recipe, values, scale = CASES[case]
    layer = loaded(recipe, scale, bias=False)
    w = quire.quantize(layer.weight.detach(), recipe.split(",")[1][2:]).dequantize().double()
    x = x_of()
    assert (x.abs() > scale * 448 * (1 if case == "fp8" else 6)).any(), "some saturate"
    with torch.no_grad():
        assert close(layer(x), values(x, scale), w)


@cases
def test_gradients_use_the_same_scale(case):
    recipe, values, scale = CASES[case]
    layer = loaded(recipe, scale)
    x, dy = x_of(32).requires_grad_(), torch.randn(32, N, generator=torch.Generator().manual_seed(5))
    layer(x).backward(dy)
    dy_spec, w_spec = recipe.split(",")[2][3:], recipe.split(",")[1][2:]
    across = quire.quantize(dy, dy_spec, columnwise=True)
    if case == "fp8":  # whose columnwise codes are the rowwise ones
        assert close(layer.weight.grad, columns(across), values(x.detach(), scale).T)
    w_columns = columns(quire.quantize(layer.weight.detach(), w_spec, columnwise=True))
    assert close(x.grad, quire.quantize(dy, dy_spec).dequantize().double(), w_columns)


@pytest.mark.cpu_only
@cases
@pytest.mark.parametrize("wrong", [float("nan"), 0.0, -1.0, float("inf")], ids=str)
def test_a_scale_that_is_not_loaded_or_no_scale_is_refused(case, wrong):
    layer = loaded(CASES[case][0], wrong)
    model = torch.nn.Sequential(layer)
    match = "static scale.*must be positive and finite.*load the static scale"
    with pytest.raises(RuntimeError, match=match) as refusal:
        model(x_of())
    said = "".join([str(refusal.value), *getattr(refusal.value, "__notes__", [])])
    assert "In the layer '0'" in said and "quire.calibrate(model, batches, recipe).apply(model)" in said
    weight = layer.weight.grad
    assert weight is None
    compiled = torch.compile(model, fullgraph=True)
    with pytest.raises(RuntimeError, match="must be positive and finite"), torch.no_grad():
        compiled(x_of())


def test_the_buffer_is_new_float32_and_part_of_the_state():
    layer = quire.Linear(K, N, recipe=FP8, dtype=torch.bfloat16)
    assert layer.input_scale.dtype == torch.float32 and layer.input_scale.isnan().all()
    assert "input_scale" in layer.state_dict()
    layer.input_scale.fill_(0.0123)
    for other in (layer.to(torch.float64).to(torch.bfloat16), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.input_scale.dtype == torch.float32
        assert other.input_scale.item() == torch.tensor(0.0123).item()
    missing = {name: value for name, value in layer.state_dict().items() if name != "input_scale"}
    with pytest.raises(RuntimeError, match='Missing key.*"input_scale"'):
        layer.load_state_dict(missing)
    on_meta = quire.Linear(K, N, recipe=FP8, device="meta")
    assert on_meta.input_scale.is_meta
    assert on_meta.to_empty(device="cpu").input_scale.isnan().all()
    assert "input_scale" not in quire.Linear(K, N, recipe="mxfp8").state_dict()


def test_without_a_buffer_the_error_says_how_to_get_one():
    layer, match = quire.Linear(K, N), "no buffer 'input_scale'; give the layer its recipe"
    with quire.autocast(recipe=FP8), pytest.raises(RuntimeError, match=match):
        layer(x_of())


@pytest.mark.cpu_only
@cases
@pytest.mark.parametrize("grad", [False, True])
def test_graphs_give_the_same_bits(case, grad):
    recipe, _, scale = CASES[case]
    layer, x = loaded(recipe, scale), x_of(32)
    compiled = torch.compile(layer, fullgraph=True)

    def run(function):
        layer.zero_grad()
        leaf = x.clone().requires_grad_(grad)
        with torch.set_grad_enabled(grad):
            y = function(leaf)
        if grad:
            y.sum().backward()
        return [y.detach(), *([leaf.grad, layer.weight.grad] if grad else [])]

    assert all(map(torch.equal, run(compiled), run(layer)))
    if not grad:
        exported = torch.export.export(layer, (x,))
        with torch.no_grad():
            assert torch.equal(exported.module()(x), layer(x))


def test_groups_have_a_scale_each():
    scales = torch.tensor([0.01, 0.02, 0.04])
    layer = quire.GroupedLinear(3, K, N, bias=False, recipe=FP8)
    assert layer.input_scale.shape == (3,)
    layer.input_scale.copy_(scales)
    x, splits = x_of(20), [7, 0, 13]
    x = x.requires_grad_()
    y = layer(x, splits)
    y.sum().backward()
    for group, (rows, part) in enumerate(zip(x.detach().split(splits), y.detach().split(splits), strict=True)):
        w = quire.quantize(getattr(layer, f"weight{group}").detach(), "fp8_row").dequantize().double()
        assert close(part, fp8(rows, scales[group].item()), w)
    assert x.grad.isfinite().all()


def test_fused_parts_quantize_as_layers_of_their_own():
    torch.manual_seed(1)
    model = torch.nn.Sequential(quire.LayerNormMLP(K, 96, activation="swiglu"))
    (fused,) = quire.convert(model, FP8, for_inference=True, tokens=None, min_features=1)
    assert fused.fc1_input_scale.isnan().all() and fused.fc2_input_scale.isnan().all()
    fused.fc1_input_scale.fill_(0.01)
    fused.fc2_input_scale.fill_(0.002)
    x = x_of(16)
    with torch.no_grad():
        y = fused(x)
        normed = quire.LayerNorm(K)(x)
        for name, activation in (("fc1", "swiglu"), ("fc2", None)):
            layer = quire.Linear(*getattr(fused, f"{name}_weight").shape[::-1], recipe=FP8)
            layer.weight, layer.bias = getattr(fused, f"{name}_weight"), getattr(fused, f"{name}_bias")
            layer.input_scale.copy_(getattr(fused, f"{name}_input_scale"))
            normed = layer(normed)
            if activation:
                normed = quire.functional.activation(normed, activation, normed.dtype)[0]
    assert torch.equal(y, normed)


def test_what_does_not_go_with_it_is_refused_in_words():
    with pytest.raises(NotImplementedError, match="starts from x itself"):
        loaded(FP8, 0.01, save_original_input=True)(x_of())
    with pytest.raises(ValueError, match="fp8_output=True quantizes the result as x"):
        loaded(FP8, 0.01)(x_of(), fp8_output=True)
    with pytest.raises(ValueError, match="has a scale that a caller gives"):
        loaded(FP8, 0.01)(x_of(), output_spec="fp8_tensor:given")
    with pytest.raises(RuntimeError, match="has its scale from the caller, and there is none"):
        quire.quantize(x_of(), "fp8_tensor:given")


@cases
def test_a_runner_gives_the_bits_of_the_layer(case):
    recipe, _, scale = CASES[case]
    x_spec, w_spec = recipe.split(",")[0][2:], recipe.split(",")[1][2:]
    layer = loaded(recipe, scale, bias=False, dtype=torch.bfloat16)
    x = x_of(dtype=torch.bfloat16)
    for spec in (x_spec, x_spec.removesuffix(":given")):
        runner = runners.LinearRunner(layer.weight.detach(), x=spec, w=w_spec, input_scale=scale)
        with runners.register(runner) as handle, torch.no_grad():
            assert torch.equal(quire.nvfp4_linear(x, handle, N), layer(x))
    with pytest.raises(RuntimeError, match="there is no input_scale"):
        runners.register(runners.LinearRunner(layer.weight.detach(), x=x_spec, w=w_spec))


def test_experts_of_a_runner_have_a_static_scale_too():
    e, hidden, inner = 3, 32, 48
    random = torch.Generator().manual_seed(3)
    w13 = torch.randn(e, 2 * inner, hidden, generator=random).to(torch.bfloat16)
    w2 = torch.randn(e, hidden, inner, generator=random).to(torch.bfloat16)
    x = torch.randn(9, hidden, generator=random).to(torch.bfloat16)
    weights = torch.full((9, 1), 1.0)
    ids = torch.arange(9, dtype=torch.int32)[:, None] % e
    scales = {"w13_input_scale": torch.tensor([0.01, 0.02, 0.03]), "w2_input_scale": 0.5}
    with runners.register(runners.MoERunner(w13, w2, x="fp8_tensor", w="fp8_row", **scales)) as handle:
        y = quire.nvfp4_moe(x, weights, ids, handle, hidden)
    for token in range(9):
        row, expert = x[token : token + 1], token % e
        with torch.no_grad():
            for w, scale in ((w13[expert], [0.01, 0.02, 0.03][expert]), (w2[expert], 0.5)):
                layer = quire.Linear(*w.shape[::-1], bias=False, dtype=torch.bfloat16, recipe=FP8)
                layer.load_state_dict({"weight": w, "input_scale": torch.tensor([scale])}, strict=False)
                row = layer(row)
                if row.shape[1] == 2 * inner:
                    row = quire.functional.activation(row, "swiglu", row.dtype)[0]
        assert torch.equal(y[token], row[0])


@pytest.mark.parametrize("option", ["save_original_input", "backward=high_precision"])
def test_a_norm_before_a_static_input_computes_where_backward_would_start_from_x(option, equal_bits):
    recipe, options = f"{FP8},{option}" if "=" in option else FP8, {} if "=" in option else {option: True}
    fused, norm = quire.LayerNormLinear(K, N, recipe=recipe, **options), quire.LayerNorm(K)
    parts = loaded(recipe, 0.0123, **options)
    fused.load_state_dict(fused.state_dict() | {**parts.state_dict()})
    with torch.no_grad():
        assert equal_bits(fused(x_of()), parts(norm(x_of())))
