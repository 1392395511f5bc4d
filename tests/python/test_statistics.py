"""quire.debug.statistics: counts compared with codes read back and with scales applied in float64."""

import gc
import math
import threading
import weakref
from dataclasses import replace

import pytest
import torch

import quire
from quire.nn import running_layers
from quire.recipe import MXFP8BlockScaling, NVFP4BlockScaling

#: Element format -> (code of 1.0, bits, half a step above the largest value).
ELEMENTS = {"e4m3": (0x38, 8, 464.0), "e5m2": (0x3C, 8, 61440.0), "e2m1": (0x2, 4, 7.0)}
NARROW = {"mxfp4", "nvfp4"}


def element(spec):
    return ELEMENTS["e2m1" if spec.family in NARROW else "e5m2" if "e5m2" in spec.options else "e4m3"]


def codes_of(q, direction):
    """uint8 [outer, contraction]: what the layouts of numerics.md 3.3, 4.3 and 5.5 store, unpacked."""
    data, k = getattr(q, f"{direction}_data"), q.shape[-1]
    rows = data.reshape(-1, data.shape[-1])
    length = k if direction == "rowwise" or q.spec.family == "mxfp8" else columns(q)
    if element(q.spec)[1] == 4:
        rows = torch.stack([rows & 0xF, rows >> 4], dim=-1).flatten(1)[:, :length]
    return rows.t() if direction == "columnwise" and q.spec.family == "mxfp8" else rows


def columns(q):
    tokens = torch.Size(q.shape[:-1]).numel()
    return -(-tokens // 16) * 16 if q.spec.hadamard else tokens


def ones_like(q, direction):
    """The same tensor with every code that of 1.0: it decodes to the scales.

    Under an infinite amax NVFP4 encodes with the block's scale alone (numerics.md 5.1, 5.11) and could not decode.
    """
    one, bits, _ = element(q.spec)
    fill = one | one << 4 if bits == 4 else one
    buffers = {name: getattr(q, name) for name in q.buffers()}
    buffers[f"{direction}_data"] = torch.full_like(buffers[f"{direction}_data"], fill)
    if q.spec.family == "nvfp4":
        amax = buffers[f"{direction}_amax"]
        stored = {"global=mul": (torch.inf, 1.0), "global=div": (0.0, 1.0)}
        neutral = torch.inf, 6.0 * (256 if "256" in q.spec.options else 448)
        infinite, one_of_them = next((stored[option] for option in q.spec.options if option in stored), neutral)
        buffers[f"{direction}_amax"] = torch.where(amax == infinite, one_of_them, amax)
    return quire.QuantizedTensor(q.spec, q.shape, q.dtype, **{n: buffers.get(n) for n in quire.tensor.BUFFER_NAMES})


def values_of(x, spec, direction):
    """float64 [outer, contraction]: what is encoded."""
    x = x.detach().reshape(-1, x.shape[-1])
    if direction == "rowwise":
        return x.double()
    return quire.debug.rht(x, signs="rht" in spec.options).double() if spec.hadamard else x.t().double()


def expected_counts(role, x, q, direction, decode):
    """Counts, and how many values lie so near to the limit that the rounding of a float32 product decides."""
    values, codes = values_of(x, q.spec, direction), codes_of(q, direction)
    scaled = values / decode(ones_like(q, direction), direction)
    _, bits, limit = element(q.spec)
    finite, decoded = values.isfinite(), decode(q, direction)
    known = finite & decoded.isfinite()
    near = int((finite & ((scaled.abs() / limit - 1).abs() < 1e-6)).sum())
    counts = quire.debug.Counts(
        role,
        str(q.spec),
        direction,
        tensors=1,
        elements=values.numel(),
        saturated=int((finite & (scaled.abs() > limit)).sum()),
        underflowed=int((finite & (values != 0) & (codes & (1 << bits - 1) - 1 == 0)).sum()),
        nonfinite=int((~finite).sum()),
        amax=float(values[finite].abs().max()),
        error=float((decoded - values)[known].norm() / values[known].norm()) if known.any() else math.nan,
    )
    return counts, near


@pytest.fixture
def make_wild(make_x):
    """A tensor with values of many magnitudes, zeros, and, if asked, infinities and NaN."""

    def make(*shape, special=False, dtype=torch.float32):
        x = make_x(*shape, dtype=torch.float32, requires_grad=False)
        x = x * torch.exp2(torch.randint(-40, 18, shape, generator=torch.Generator().manual_seed(3)).float())
        x.view(-1)[::7] = 0
        if special:
            x.view(-1)[5], x.view(-1)[-3] = float("inf"), float("nan")
        return x.to(dtype)

    return make


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_are_those_of_the_codes(make_layer, make_wild, any_recipe, decode, dtype, special):
    layer, x = make_layer(144, 40, dtype), make_wild(19, 144, special=special, dtype=dtype).requires_grad_()
    dy = make_wild(19, 40, special=special, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(make_wild(40, 144, special=special, dtype=dtype))
    with quire.debug.statistics() as counted, quire.debug.operands() as records, quire.autocast(recipe=any_recipe):
        layer(x).backward(dy)
    plain = {"x": x, "w": layer.weight, "dy": dy}
    found = {(row.role, row.direction): row for row in counted}
    for record in records:
        for direction in ("rowwise", "columnwise"):
            row = found.pop((record.role, direction))
            expected, near = expected_counts(record.role, plain[record.role], record.tensor, direction, decode)
            assert abs(row.saturated - expected.saturated) <= near <= 8
            assert row.error == pytest.approx(expected.error, rel=1e-6, nan_ok=True)
            assert replace(row, saturated=expected.saturated, error=expected.error) == expected
    # Under the NaN scale of a whole tensor no code is that of 0.
    whole = special and all("fp8_tensor" in row.spec for row in counted)
    assert not found and (sum(row.underflowed for row in counted) > 100) != whole
    assert (sum(row.nonfinite for row in counted) > 0) == special


def test_a_given_scale_saturates(make_x):
    x = make_x(8, 32, dtype=torch.float32, requires_grad=False)
    scale = torch.tensor([300.0])
    with quire.debug.statistics() as counted:
        q = quire.quantize(x, "fp8_tensor", scale=scale)
    saturated = int((x.double().abs() * 300 > 464).sum())
    assert 10 < saturated < 100
    (row,) = counted
    assert row.error == pytest.approx(float((q.dequantize().double() - x).norm() / x.double().norm()), rel=1e-6)
    amax = float(x.abs().max())
    assert replace(row, error=0) == quire.debug.Counts("", "fp8_tensor", "rowwise", 1, 256, saturated, 0, 0, amax)


def test_delayed_scaling_saturates_where_its_scales_are_old(make_layer, make_x):
    """Its operands are quantized apart from the product, which says later what they were."""
    layer, x = make_layer(96, 64), make_x(16, 96)
    recipe = quire.recipe.DelayedScaling(amax_history_len=1)
    for factor in (1, 1, 8):
        with quire.autocast(recipe=recipe), quire.debug.statistics() as counted:
            layer(factor * x).sum().backward()
    found = {(row.role, row.direction): row for row in counted}
    assert set(found) == set(quire.debug._PRODUCTS)
    for direction in ("rowwise", "columnwise"):
        assert found["x", direction].saturated == int((8 * x.double().abs() * 448 / x.double().abs().max() > 464).sum())
        assert found["w", direction].saturated == 0


def test_a_scale_of_the_tensor_itself_saturates_nothing(make_layer, make_x, any_recipe):
    """Also not by the rounding of the scale: what is nearest to the largest value is not counted."""
    with quire.debug.statistics() as counted, quire.autocast(recipe=any_recipe):
        for rows in range(1, 20):
            make_layer(32, 16, torch.float32)(make_x(rows, 32, dtype=torch.float32))
    assert counted and all(row.saturated == 0 for row in counted)


def test_rows_name_products_and_add_up(make_layer, make_x):
    layer, x = make_layer(96, 64), make_x(16, 96)
    with quire.debug.statistics() as counted:
        for recipe in (NVFP4BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()):
            with quire.autocast(recipe=recipe):
                layer(x).sum().backward()
    assert {(row.role, row.direction): row.product for row in counted} == {
        ("x", "rowwise"): "fprop",
        ("w", "rowwise"): "fprop",
        ("dy", "rowwise"): "dgrad",
        ("w", "columnwise"): "dgrad",
        ("dy", "columnwise"): "wgrad",
        ("x", "columnwise"): "wgrad",
    }
    assert {row.spec: row.tensors for row in counted if row.role == "w"} == {"nvfp4:16x16:nan": 2, "mxfp8:nan": 1}
    assert {row.elements for row in counted if row.spec == "nvfp4:16x16:nan"} == {2 * 64 * 96}
    assert str(counted).splitlines()[0].split() == [
        *("role", "product", "direction", "spec", "tensors", "elements"),
        *("saturated", "underflowed", "nonfinite", "amax", "error"),
    ]
    assert len(str(counted).splitlines()) == 1 + len(counted) == 13


def test_a_single_value_does_not_look_like_none():
    one = quire.debug.Counts("w", "mxfp8", "rowwise", 1, 512 * 512, 1, 1, 1)
    none = quire.debug.Counts("w", "mxfp8", "rowwise", 1, 512 * 512, 0, 0, 3)
    _, first, second = str(quire.debug.Statistics([one, none])).splitlines()
    assert first.split()[-5:-2] == ["<0.001%"] * 3 and second.split()[-5:-2] == ["0.000%", "0.000%", "0.001%"]


def test_compiled_code_is_counted_alike(make_layer, make_x, compiler, recipe):
    layer, x = make_layer(), make_x(16, 96)

    def loss(x):
        with quire.autocast(recipe=recipe):
            return layer(x).square().sum()

    found = []
    for function in (loss, compiler(loss)):
        layer.sr_state[1] = 0
        with quire.debug.statistics() as counted:
            function(x).backward()
        found.append(list(counted))
    assert found[0] == found[1] and len(found[0]) == 6


def steps_of(way, model, x, compiler):
    """A function that trains a step and then quantizes outside of the model."""
    function = compiler(model) if way == "compiled" else model

    def step():
        with quire.autocast(recipe="nvfp4"):
            if way == "checkpointed":
                y = quire.checkpoint(function, x)
            else:
                y = function(x)
        y.sum().backward()
        quire.quantize(torch.ones(3, 32), "mxfp8")

    def in_another_thread():
        (thread := threading.Thread(target=step)).start()
        thread.join()

    return function, in_another_thread if way == "in another thread" else step


def sums_of(counted):
    """The numbers of all layers together."""
    found = {}
    for row in counted:
        numbers = row.tensors, row.elements, row.saturated, row.underflowed, row.nonfinite
        key = row.role, row.spec, row.direction
        found[key] = [a + b for a, b in zip(found.get(key, [0] * 5), numbers, strict=True)]
    return found


@pytest.mark.parametrize("way", ["eager", "compiled", "checkpointed", "in another thread"])
def test_each_layer_has_counts_of_its_own(way, compiler):
    inner = torch.nn.Sequential(torch.nn.GELU(), quire.LayerNormMLP(96, 64))
    model = torch.nn.Sequential(quire.Linear(64, 96), quire.MoE(96, 64, num_experts=4, top_k=2), inner)
    if way == "compiled":
        model[0] = torch.compile(model[0])  # whose wrapper has no name of its own
    x, states = torch.randn(32, 64, requires_grad=True), quire.rng_state(model)
    function, step = steps_of(way, model, x, compiler)
    with quire.debug.statistics() as together:
        step()
    quire.set_rng_state(model, states)
    with quire.debug.statistics(function) as counted:
        step()
    assert list(dict.fromkeys(row.layer for row in counted)) == ["", "0", "1", "2.1"]
    if way != "compiled":  # where Inductor would round otherwise
        assert sums_of(counted) == sums_of(together)
    outside, *_ = counted
    assert (outside.layer, outside.spec, outside.tensors) == ("", "mxfp8", 1)
    first = {(row.role, row.direction): row for row in counted if row.layer == "0"}
    assert set(first) == set(quire.debug._PRODUCTS)
    assert first["x", "rowwise"].amax == x.abs().max() and first["w", "columnwise"].amax == model[0].weight.abs().max()
    assert first["dy", "rowwise"].elements == 32 * 96
    assert str(counted).split()[0] == "layer" and str(together).split()[0] == "role"
    assert not any(module._forward_hooks for module in model.modules())


def test_a_layer_whose_input_has_a_name_leaves_the_layers_before_it_their_rows():
    model = torch.nn.Sequential(quire.Linear(64, 64), quire.Linear(64, 32))
    with quire.debug.statistics(model) as counted, quire.autocast(recipe="mxfp8"):
        x = model[0](torch.randn(8, 64, requires_grad=True))
        model[1](x=x).sum().backward()
    assert [row.elements for row in counted if row.role == "dy" and row.layer == "0"] == [8 * 64] * 2
    assert [row.elements for row in counted if row.role == "dy" and row.layer == "1"] == [8 * 32] * 2


def test_graphs_of_earlier_steps_are_not_held(monkeypatch):
    made, layers = [], running_layers._Layers
    monkeypatch.setattr(running_layers, "_FEW_HOOKS", 20)
    monkeypatch.setattr(running_layers, "_Layers", lambda *given: made.append(layers(*given)) or made[0])
    model = torch.nn.Sequential(quire.Linear(64, 64), quire.Linear(64, 32))
    with quire.debug.statistics(model) as counted:
        for _ in range(30):
            x = torch.randn(8, 64, requires_grad=True)
            with quire.autocast(recipe="mxfp8"):
                y = model(x)
            held = weakref.ref(x)
            del x, y
            gc.collect()
            assert held() is None
        assert len(made) == 1 and len(made[0].of_nodes) < 100
    assert {row.layer for row in counted} == {"0", "1"}


def test_all_threads_are_counted_and_nothing_afterwards(make_layer, make_x):
    models = [(make_layer(), make_x(16, 96)) for _ in range(4)]  # alike; threads would share the seed

    def work(number=0):
        layer, x = models[number]
        with quire.autocast():
            layer(x).sum().backward()

    with quire.debug.statistics() as one:
        work()
    with quire.debug.statistics() as counted:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    work()
    four = [
        replace(row, **{name: 4 * getattr(row, name) for name in ("tensors", "elements", "saturated", "underflowed")})
        for row in one
    ]
    assert list(counted) == four
    with quire.debug.statistics() as nothing:
        pass
    assert list(nothing) == []


def test_it_is_left_by_errors_and_entered_once(make_layer, make_x):
    with pytest.raises(KeyError), quire.debug.statistics() as counted, quire.autocast():
        make_layer()(make_x(16, 96))
        raise KeyError
    assert len(counted) == 4
    with quire.debug.statistics(), pytest.raises(RuntimeError, match="already counting in this process"):
        with quire.debug.statistics():
            pass


def test_empty_tensors_count_nothing(make_layer, make_x, recipe):
    with quire.debug.statistics() as counted, quire.autocast(recipe=recipe):
        make_layer()(make_x(0, 96)).sum().backward()
    assert {row.elements for row in counted if row.role != "w"} == {0}


@pytest.mark.parametrize("explained", [False, True])
@pytest.mark.parametrize("module", [quire.LayerNormLinear, quire.LayerNormMLP])
def test_counting_that_begins_or_ends_during_another_threads_call_does_not_disturb_it(module, explained):
    layer, x, done = module(1024, 64).eval(), torch.randn(256, 1024), threading.Event()

    def count():
        while not done.is_set():
            with quire.debug.statistics():
                pass

    def call():
        with quire.autocast(recipe=MXFP8BlockScaling()), torch.no_grad():
            return layer(x)

    expected = call()
    other = threading.Thread(target=count)
    other.start()
    try:
        for _ in range(100):
            if explained:
                quire.explain(call)
            else:
                assert torch.equal(call(), expected)
    finally:
        done.set()
        other.join()


def test_memory_that_was_used_again_is_not_what_was_quantized_there():
    layer = quire.Linear(512, 32)

    def call():
        before, now = quire.quantize(torch.randn(64, 256), "mxfp8"), quire.quantize(torch.randn(64, 512), "nvfp4")
        codes = now.buffers() | {"rowwise_data": before.rowwise_data}  # as if these bytes had come from another rank
        x = quire.QuantizedTensor(now.spec, now.shape, now.dtype, **codes)
        with torch.no_grad(), quire.autocast(recipe="x=nvfp4,w=nvfp4,dy=nvfp4"):
            return layer(x)

    with quire.debug.statistics() as counts:
        call()
    assert {(row.role, row.spec) for row in counts} == {("", "mxfp8"), ("", "nvfp4"), ("w", "nvfp4")}
    explained = quire.explain(call)
    assert [step.name for step in explained.quantizations] == ["", "", "w"]
    assert [(operand.role, operand.made) for operand in explained.products[0].operands] == [("x", False), ("w", True)]
