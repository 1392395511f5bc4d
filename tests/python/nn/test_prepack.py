"""Weights whose codes are interleaved: the same numbers in another order."""

import io
import sys

import pytest
import torch

import quire
from every_recipe import ALL, every_recipe
from quire import recipe as recipes

pytestmark = pytest.mark.any_device


def make_quantized(recipe, grad=False, **options):
    """A model of quantized weights; ragged sizes, so that tiles are padded."""
    torch.manual_seed(4)
    with torch.set_grad_enabled(grad), quire.quantized_model_init(recipe=recipe, **options):
        return torch.nn.Sequential(quire.Linear(70, 50), torch.nn.ReLU(), quire.LayerNormMLP(50, 90))


def weights(model):
    return [p for p in model.parameters() if isinstance(p, quire.QuantizedTensor)]


def codes(model):
    return [{name: tensor.clone() for name, tensor in w.buffers().items()} for w in weights(model)]


def run(model, x, recipe):
    with quire.autocast(recipe=recipe):
        return model(x)


def interleaved_bytes(lines):
    """numerics.md 2.4, one byte at a time."""
    count, length = lines.shape
    out = torch.zeros(-(-count // 16) * 16, -(-length // 4) * 4, dtype=torch.uint8)
    flat = out.view(-1)
    for i in range(count):
        for j in range(length):
            flat[(i // 16 * (out.shape[1] // 4) + j // 4) * 64 + i % 16 * 4 + j % 4] = lines[i, j]
    return out


@pytest.mark.parametrize(("recipe", "compiled"), [*((name, False) for name in ALL), ("mxfp8", True), ("nvfp4", True)])
def test_a_prepacked_model_gives_the_same_bits(recipe, compiled, compiler, equal_bits):
    recipe = ALL[recipe]
    model, packed = make_quantized(recipe), make_quantized(recipe)
    quire.prepack_weights(packed)
    function = compiler(packed, backend="inductor") if compiled else packed
    with torch.no_grad(), quire.autocast(recipe=recipe):
        for rows in (1, 3, 16, 40):
            x = torch.randn(rows, 70)
            if rows > 1 or not compiled:
                assert equal_bits(function(x), model(x))


@every_recipe
def test_prepacking_moves_bytes_as_documented_and_unpacking_moves_them_back(recipe):
    model = make_quantized(recipe)
    before, parameters = codes(model), weights(model)
    quire.prepack_weights(model)
    assert all(w is p for w, p in zip(weights(model), parameters, strict=True))
    for w, plain in zip(weights(model), before, strict=True):
        assert w.spec_text == quire.QuantSpec(recipe.weight_spec).text + ":interleaved"
        assert torch.equal(w.rowwise_data, interleaved_bytes(plain["rowwise_data"]))
        if w.rowwise_scale.dtype == torch.uint8:
            assert torch.equal(w.rowwise_scale, interleaved_bytes(plain["rowwise_scale"]))
        assert "columnwise_data" not in w.buffers()
    once = codes(model)
    assert quire.prepack_weights(model) is model  # again: nothing to do
    for one, other in zip(once, codes(model), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert quire.unpack_weights(model) is model
    for one, other in zip(before, codes(model), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert weights(model)[0].spec_text == quire.QuantSpec(recipe.weight_spec).text


@every_recipe
def test_gradients_through_prepacked_weights_are_the_same(recipe, equal_bits):
    results = []
    for prepacks in (False, True):
        model = make_quantized(recipe, grad=True)
        if prepacks:
            quire.prepack_weights(model)
        x = torch.randn(5, 70, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = run(model, x, recipe)
        y.sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    for plain, packed in zip(*results, strict=True):
        assert equal_bits(plain, packed)


def test_an_optimizer_steps_prepacked_weights_as_plain_ones(equal_bits):
    recipe, values = ALL["mxfp8"], []
    for prepacks in (False, True):
        model = make_quantized(recipe, grad=True, keep_master=True)
        if prepacks:
            quire.prepack_weights(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            run(model, torch.ones(3, 70), recipe).sum().backward()
            optimizer.step()
        values.append([w.dequantize() for w in weights(model)])
    assert all(equal_bits(one, other) for one, other in zip(*values, strict=True))


@every_recipe
def test_state_dicts_of_either_order_load_into_parameters_of_either(recipe):
    for saved_packed, loaded_packed in ((True, False), (False, True), (True, True)):
        saved, loaded = make_quantized(recipe), make_quantized(recipe)
        for model, packs in ((saved, saved_packed), (loaded, loaded_packed)):
            for w in weights(model):
                w.data.copy_(torch.randn(w.shape) * (1 if model is saved else 2))
            if packs:
                quire.prepack_weights(model)
        file = io.BytesIO()
        torch.save(saved.state_dict(), file)
        file.seek(0)
        loaded.load_state_dict(torch.load(file, weights_only=False))
        assert all(("interleaved" in w.spec.options) == loaded_packed for w in weights(loaded))
        for model in (saved, loaded):
            if "interleaved" in weights(model)[0].spec.options:
                quire.unpack_weights(model)
        for one, other in zip(codes(saved), codes(loaded), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_weights_are_kept_in_the_order_that_their_device_reads(monkeypatch):
    """Another order than the interleaved one, as on CUDA devices, has the same bits."""
    results = []
    for interleaved in (True, False):
        for user in ("quire.nn.cache", "quire.conversion.inference"):
            monkeypatch.setattr(sys.modules[user], "reads_interleaved", lambda device, answer=interleaved: answer)
        torch.manual_seed(4)
        layer, model, x = quire.Linear(64, 48), torch.nn.Sequential(torch.nn.Linear(256, 256)), torch.randn(5, 256)
        quire.quantize_weights(layer, "mxfp8")
        model = quire.convert(model, "mxfp8", for_inference=True, tokens=None)
        assert layer.kept_weight.stored.endswith("interleaved") == interleaved
        assert ("interleaved" in model[0].weight.spec.options) == interleaved
        results.append((run(layer, x[:, :64], "mxfp8"), model(x)))
    assert all(torch.equal(*each) for each in zip(*results, strict=True))


@pytest.mark.interleaved
@every_recipe
def test_kept_codes_are_interleaved_and_change_no_bit_forward_or_backward(recipe, equal_bits):
    results = []
    for keeps in (False, True):
        torch.manual_seed(5)
        layer = quire.Linear(96, 40)
        if keeps:
            quire.quantize_weights(layer, recipe)
            assert layer.kept_weight.stored == quire.QuantSpec(recipe.weight_spec).text + ":interleaved"
        x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = run(layer, x, recipe)
        y.sum().backward()
        with torch.no_grad():
            results.append([y, x.grad, layer.weight.grad, run(layer, x, recipe)])
    assert all(equal_bits(plain, kept) for plain, kept in zip(*results, strict=True))


@every_recipe
def test_weights_of_groups_are_prepacked_too(recipe, equal_bits):
    torch.manual_seed(6)
    with torch.no_grad(), quire.quantized_model_init(recipe=recipe):
        layer = quire.GroupedLinear(3, 64, 40)
    x, splits = torch.randn(9, 64), [4, 0, 5]
    with torch.no_grad(), quire.autocast(recipe=recipe):
        expected = layer(x, splits)
        quire.prepack_weights(layer)
        assert all("interleaved" in w.spec.options for w in weights(layer))
        assert equal_bits(layer(x, splits), expected)


@every_recipe
def test_kept_codes_of_groups_change_no_bit(recipe, equal_bits):
    torch.manual_seed(6)
    layer = quire.GroupedLinear(2, 64, 40)
    x, splits = torch.randn(9, 64), [4, 5]
    with torch.no_grad(), quire.autocast(recipe=recipe):
        expected = layer(x, splits)
        quire.quantize_weights(layer, recipe)
        assert equal_bits(layer(x, splits), expected)


def test_a_prepacked_model_is_exported(equal_bits):
    recipe = ALL["mxfp8"]
    model = make_quantized(recipe).requires_grad_(False)
    quire.prepack_weights(model)
    x = torch.randn(4, 70)
    with torch.no_grad(), quire.autocast(recipe=recipe):
        expected = model(x)
        program = torch.export.export(model, (x,))
    assert "w=mxfp8:nan:interleaved" in program.graph_module.code
    assert equal_bits(program.module()(x), expected)


@pytest.mark.parametrize("spec", ["fp8_tensor", "fp8_row", "fp8_block", "fp8_block:128x128", "mxfp8", "nvfp4:16x16"])
def test_views_of_whole_tiles_keep_interleaved_codes(spec, equal_bits):
    values = torch.randn(2, 160, 40)
    plain, packed = (quire.quantize(values, s) for s in (spec, f"{spec}:interleaved"))
    assert equal_bits(packed.view(320, 40).dequantize(), plain.dequantize().view(320, 40))
    for rows in (slice(0, 128), slice(128, 320)):
        part = packed.view(320, 40)[rows]
        assert isinstance(part, quire.QuantizedTensor) and part.shape[0] == rows.stop - rows.start
        assert equal_bits(part.dequantize(), plain.dequantize().view(320, 40)[rows])
    assert not isinstance(packed.view(320, 40)[3:5], quire.QuantizedTensor)
    assert equal_bits(packed.view(320, 40)[3:5], plain.dequantize().view(320, 40)[3:5])


def test_what_cannot_be_prepacked_is_refused_in_words():
    plain = quire.Linear(32, 32)
    with pytest.raises(ValueError, match=r"prepack_weights: Linear has no quantized weights; make the model within"):
        quire.prepack_weights(plain)
    with pytest.raises(TypeError, match="model"):
        quire.prepack_weights(plain.weight)
    swizzled = recipes.CustomRecipe({"x": "mxfp8", "w": "mxfp8:swizzled", "dy": "mxfp8"}.get)
    model = make_quantized(swizzled)
    with pytest.raises(RuntimeError, match="scales lie in one order"):
        quire.prepack_weights(model)
    assert weights(model)[0].spec_text == "mxfp8:swizzled"
    with pytest.raises(RuntimeError, match="leave interleaved out"):
        quire.functional.norm(
            torch.ones(3, 32), torch.ones(32), None, "RMSNorm", torch.float32, spec="mxfp8:interleaved", rowwise=True
        )
