"""Checkpoints of TransformerEngine, read without it: states of delayed scaling, and quantized tensors."""

import io

import pytest
import torch

import quire
from python.io.te_classes import (
    DelayedScaling,
    DType,
    Float8BlockQuantizer,
    Format,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Tensor,
    payload,
    state,
)
from quire import recipe as recipes
from quire.io import CheckpointError, te_state, te_states
from quire.io.layout import in_rows, in_tiles

pytestmark = pytest.mark.any_device

# --------------------------------------------------------------- states of delayed scaling


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_state_is_that_of_the_file(te, protocol):
    value = state()
    data = payload(value, protocol)
    for form in (data, data.numpy().tobytes(), bytearray(data.numpy().tobytes())):
        found = te_state(form)
        for name in ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd"):
            assert torch.equal(found[name], value[name])
        assert found["rule"] == recipes.DelayedScaling(amax_history_len=16).rule()


def test_a_layer_goes_on_from_a_state(te):
    """As from the state of a layer of quire that has the same numbers."""
    layer = quire.Linear(32, 32)
    recipe = recipes.DelayedScaling(amax_history_len=16)
    value = state(recipe=DelayedScaling(margin=0))
    quire.set_delayed_state(layer, {"delayed": te_state(payload(value))})
    with quire.autocast(recipe=recipe):
        layer(torch.randn(32, 32)).sum().backward()
    found = quire.delayed_state(layer)["delayed"]
    # Row 0 of the file was not 0, so the step rolled it to the end; the largest amax gives the scale.
    want = value["amax_history_fwd"]
    assert torch.equal(found["amax_history_fwd"][1:15, 0], want[2:, 0])
    assert torch.equal(found["amax_history_fwd"][15, 0], want[0, 0])
    assert torch.equal(found["scale_fwd"][0], torch.tensor(448.0) / want[:, 0].max())


@pytest.mark.parametrize(
    "fields",
    [{"margin": 3}, {"fp8_format": Format.E4M3}, {"amax_compute_algo": "most_recent"}, {"reduce_amax": False}],
    ids=str,
)
def test_the_rule_is_that_of_the_recipe(te, fields):
    ours = {name: recipes.Format[v.name] if isinstance(v, Format) else v for name, v in fields.items()}
    assert (
        te_state(payload(state(recipe=DelayedScaling(**fields))))["rule"]
        == recipes.DelayedScaling(amax_history_len=16, **ours).rule()
    )


def test_enumerations_by_name_are_read(te, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickle a member as getattr(class, name)."""
    monkeypatch.setattr(Format, "__reduce_ex__", lambda self, _: (getattr, (Format, self.name)))
    assert te_state(payload(state()))["rule"] == recipes.DelayedScaling(amax_history_len=16).rule()


@pytest.mark.cpu_only
def test_states_without_scales_are_none(te):
    assert te_state(b"") is None and te_state(torch.empty(0, dtype=torch.uint8)) is None
    assert te_state(payload({})) is None and te_state(payload(None)) is None
    assert te_state(payload({"recipe": MXFP8BlockScaling(), "extra_fp8_variables": {}})) is None


def test_a_state_of_version_1_has_no_recipe(te):
    value = state()
    del value["recipe"]
    value["scale_inv_fwd"] = 1 / value["scale_fwd"]
    file = io.BytesIO()
    torch.save(value, file)
    for form in (payload(value), file):
        assert torch.equal(te_state(form)["scale_fwd"], value["scale_fwd"])


def test_states_of_a_model(te):
    model = torch.nn.ModuleDict(
        {"mlp": quire.LayerNormMLP(32, 64), "experts": quire.GroupedLinear(3, 32, 32), "plain": quire.Linear(32, 32)}
    )
    values = {"mlp": state(2), "experts": state(3), "plain": state(1)}
    entries = {f"{name}._extra_state": payload(value) for name, value in values.items()}
    entries |= {"plain.weight": torch.zeros(32, 32), "other._extra_state": torch.empty(0, dtype=torch.uint8)}
    found = te_states(model, entries)
    quire.set_delayed_state(model, found)
    back = quire.delayed_state(model)
    assert found.keys() == back.keys() == {"mlp.fc1_delayed", "mlp.fc2_delayed", "experts.delayed", "plain.delayed"}
    for product, name in enumerate(("fc1", "fc2")):
        one = back[f"mlp.{name}_delayed"]
        assert torch.equal(one["scale_fwd"], values["mlp"]["scale_fwd"][3 * product : 3 * product + 3])
        assert torch.equal(one["amax_history_bwd"], values["mlp"]["amax_history_bwd"][:, 2 * product : 2 * product + 2])
    for slot in range(3):
        for group in range(3):
            ours = back["experts.delayed"]["amax_history_fwd"][:, slot * 3 + group]
            assert torch.equal(ours, values["experts"]["amax_history_fwd"][:, group * 3 + slot])
    with pytest.raises(CheckpointError, match=r"plain._extra_state: the state has 6 forward slots, the layer 3"):
        te_states(model, {"plain._extra_state": payload(state(2))})
    with pytest.raises(ValueError, match=r"te_states: 'gone._extra_state' has a state .* no such layer"):
        te_states(model, {"gone._extra_state": payload(state())})


@pytest.mark.parametrize("wraps", ["model", "layer", "model as module"])
@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module."])
def test_states_of_a_wrapped_model(wraps, prefix, te):
    value = state()
    model = torch.nn.ModuleDict({"plain": quire.Linear(32, 32), "other": torch.nn.Linear(32, 32)})
    entries = {f"{prefix}plain._extra_state": payload(value), f"{prefix}other.weight": torch.zeros(32, 32)}
    if wraps == "layer":
        model["plain"] = torch.compile(model["plain"], backend="eager")
    elif wraps == "model":
        model = torch.compile(model, backend="eager")
    else:
        model = torch.nn.DataParallel(model)
    quire.set_delayed_state(model, te_states(model, entries))
    (found,) = quire.delayed_state(model).values()
    assert torch.equal(found["scale_fwd"], value["scale_fwd"])


@pytest.mark.parametrize(
    "change",
    [
        {"scale_fwd": None},
        {"scale_fwd": torch.ones(4)},
        {"scale_fwd": torch.ones(3, dtype=torch.float64)},
        {"scale_bwd": torch.ones(4), "amax_history_bwd": torch.ones(16, 4)},
        {"amax_history_fwd": torch.ones(0, 3)},
        {"amax_history_fwd": torch.ones(3)},
        {"recipe": 3},
    ],
    ids=lambda change: ",".join(change),
)
def test_states_that_do_not_fit_are_refused(te, change):
    with pytest.raises(CheckpointError):
        te_state(payload(state() | change))


@pytest.mark.cpu_only
@pytest.mark.parametrize("value", ["text", 3, torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)], ids=str)
def test_payloads_of_another_kind_are_refused(value):
    with pytest.raises(TypeError, match="te_state: expected bytes or a uint8 tensor of one dimension"):
        te_state(value)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("model", "state_dict", "text"),
    [
        (None, {}, "model must be a torch.nn.Module, got None"),
        (torch.nn.ReLU(), None, "state_dict must be a dict, got None"),
        (torch.nn.ReLU(), {1: 2}, "a key of state_dict must be a str, got 1"),
    ],
)
def test_states_of_what_is_no_model_are_refused(model, state_dict, text):
    with pytest.raises(TypeError, match=f"te_states: {text}"):
        te_states(model, state_dict)


# --------------------------------------------------------------- quantized tensors


def padded(scale, lines, columns):
    return torch.nn.functional.pad(scale, (0, -scale.shape[1] % columns, 0, -scale.shape[0] % lines))


def arguments(kind, q, element, quantizer, swizzled=False):
    """Of a reconstructor, for a tensor of quire: their layouts are the same but for padding."""

    def scale(way, lines, columns):
        one = getattr(q, f"{way}_scale")
        turned = kind == "mxfp8" and way == "columnwise"
        if not swizzled:
            return padded(one, lines, columns)
        tiles = in_tiles(one.t().contiguous() if turned else one)
        return tiles.reshape(padded(one, lines, columns).shape)

    if kind == "float8":
        return q.rowwise_data, element, q.rowwise_scale, q.dtype, q.shape, None
    if kind == "float8_blockwise":
        data = q.rowwise_data, scale("rowwise", 1, 4), q.columnwise_data, scale("columnwise", 1, 4)
        return q.shape, *data, element, q.dtype, quantizer, "128x128" in q.spec.options, None
    if kind == "mxfp8":
        data = q.rowwise_data, scale("rowwise", 128, 4), q.columnwise_data, scale("columnwise", 4, 128)
        return *data, element, q.dtype, q.shape, quantizer, swizzled
    data = q.rowwise_data, scale("rowwise", 128, 4), q.columnwise_data, scale("columnwise", 128, 4)
    amaxes = q.rowwise_amax, q.columnwise_amax
    options = "row_scaled" in q.spec.options, "256" in q.spec.options, 256 if "256" in q.spec.options else 448
    return q.shape, *data, *amaxes, element, q.dtype, quantizer, swizzled, *options


CASES = [
    ("float8", "fp8_tensor", 7),
    ("float8", "fp8_tensor:e5m2", 8),
    ("float8_blockwise", "fp8_block:128x128", 7),
    ("float8_blockwise", "fp8_block", 7),
    ("mxfp8", "mxfp8", 7),
    ("mxfp8", "mxfp8:e5m2", 8),
    ("nvfp4", "nvfp4", 10),
    ("nvfp4", "nvfp4:16x16", 10),
    ("nvfp4", "nvfp4:row_scaled", 10),
    ("nvfp4", "nvfp4:4over6=mae:256", 10),
]


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("kind", "spec", "element"), CASES, ids=[spec for _, spec, _ in CASES])
def test_tensors_are_read_with_all_codes_and_scales(te, kind, spec, element, swizzled, tmp_path):
    if swizzled and kind not in ("mxfp8", "nvfp4"):
        pytest.skip("has no swizzled scales")
    q = quire.quantize(torch.randn(160, 96, dtype=torch.bfloat16), spec, columnwise=kind != "float8")
    of = {"mxfp8": MXFP8Quantizer, "nvfp4": NVFP4Quantizer}.get(kind, Float8BlockQuantizer)
    quantizer = of(with_rht=False, with_2d_quantization="16x16" in spec, nvfp4_4over6_err_mode="MAE")
    value = Tensor(te[kind], *arguments(kind, q, DType(element), quantizer, swizzled))
    torch.save({"model": {"a.weight": value, "a.bias": torch.ones(3)}, "step": 3}, tmp_path / "model.pt")
    checkpoint = quire.io.read(tmp_path / "model.pt")
    assert list(checkpoint) == ["a.weight", "a.bias"] and torch.equal(checkpoint["a.bias"], torch.ones(3))
    found = checkpoint["a.weight"].weight
    assert found.spec == q.spec and found.dtype == torch.bfloat16
    assert found.buffers().keys() == q.buffers().keys()
    for name, buffer in found.buffers().items():
        if kind != "float8" or not name.endswith("amax"):
            assert torch.equal(buffer, getattr(q, name)), name
    assert torch.equal(found.dequantize(torch.float32), q.dequantize(torch.float32))


def test_columnwise_codes_that_may_be_transformed_are_left_out(te, tmp_path):
    q = quire.quantize(torch.randn(32, 32), "nvfp4", columnwise=True)
    torch.save({"a": Tensor(te["nvfp4"], *arguments("nvfp4", q, DType(10), None))}, tmp_path / "model.pt")
    found = quire.io.read(tmp_path / "model.pt")["a"].weight
    assert found.stores("rowwise") and not found.stores("columnwise")


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.zeros(160, 95, dtype=torch.uint8), "rowwise_data must have 15360 elements"),
        (1, torch.zeros(128, 4, dtype=torch.uint8), r"rowwise_scale must be at least \[160, 3\]"),
        (1, torch.zeros(256, 4), "rowwise_scale must be torch.uint8"),
        (4, 7, "the element format must be"),
        (6, (160, 96, 1), "a weight has two sizes"),
    ],
    ids=["data", "a small scale", "a scale of another dtype", "element", "shape"],
)
def test_damaged_tensors_are_refused(te, index, value, message, tmp_path):
    q = quire.quantize(torch.randn(160, 96), "mxfp8", columnwise=True)
    args = list(arguments("mxfp8", q, DType(7), None))
    args[index] = value
    torch.save({"a": Tensor(te["mxfp8"], *args)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=f"a: {message}"):
        quire.io.read(tmp_path / "model.pt")["a"]


def test_swizzled_scales_lie_where_the_contract_says():
    rows, blocks = 160, 7
    scales = torch.arange(rows * blocks).remainder(251).to(torch.uint8).reshape(rows, blocks)
    flat, columns = in_tiles(scales).flatten(), 2
    for i in (0, 31, 32, 127, 128, 159):
        for j in range(blocks):
            place = ((i // 128) * columns + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4
            assert flat[place] == scales[i, j]
    assert torch.equal(in_rows(flat, rows, blocks), scales)
