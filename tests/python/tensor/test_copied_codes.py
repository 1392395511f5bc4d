"""Copies between quantized tensors of two specs: bytes that mean the same under both are copied, others are rounded
again. What bytes mean is read off the operator that decodes them, for every pair of specs of a family."""

import itertools
import pickle
import warnings

import pytest
import torch

import quire
from quire import QuantizedTensor

#: Family -> texts of options, each option at least once.
OPTIONS = {
    "fp8_tensor": ["", ":e5m2", ":pow2", ":eps=0.001", ":given", ":nan", ":given:nan", ":interleaved"],
    "fp8_row": ["", ":e5m2", ":pow2", ":eps=0.001", ":nan", ":pow2:interleaved"],
    "fp8_block": ["", ":e5m2", ":128x128", ":128x128:pow2", ":pow2", ":eps=0.001", ":nan:interleaved"],
    "mxfp8": ["", ":e5m2", ":32x32", ":swizzled", ":nan", ":32x32:interleaved"],
    "mxfp4": ["", ":swizzled", ":nan", ":interleaved"],
    "nvfp4": ["", ":16x16", ":row_scaled", ":rht", ":rht=unsigned", ":sr", ":4over6=mae", ":4over6=mse:256"]
    + [":16x16:4over6=mse", ":16x16:4over6=mae:256", ":global=mul", ":global=div", ":given", ":global=mul:given"]
    + [":4over6=mae:256:global=mul", ":swizzled", ":nan", ":interleaved"],
}
SPECS = [family + options for family, texts in OPTIONS.items() for options in texts]
ROWS, COLS = 64, 96


def values(seed):
    """Rows and columns of different magnitudes, so that another way to scale gives other codes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(ROWS, 1, generator=generator) + 0.5, torch.rand(1, COLS, generator=generator) + 0.5
    return torch.randn(ROWS, COLS, generator=generator) * sizes[0] * sizes[1]


def quantized(spec, seed, device="cpu", **options):
    spec = quire.QuantSpec(spec)
    x = values(seed).to(device)
    if spec.stochastic:
        options["seed"] = 1
    if "given" in spec.options:  # less than the amax: some codes saturate
        scale = 0.7 * x.abs().max() / (448 if spec.family == "fp8_tensor" else 1)
        options["scale"] = scale.reshape(1) / (2688 if "global=mul" in spec.options else 1)
    return quire.quantize(x, spec, columnwise=True, **options)


def plain(spec):
    return spec.removesuffix(":interleaved")


def means_the_same(target, source):
    """Whether the rowwise bytes that quantizing under `source` gives have the layout of `target` and its values."""
    q = quantized(plain(source), 1)
    rowwise = {name: tensor for name, tensor in q.buffers().items() if name.startswith("rowwise")}
    try:
        other = QuantizedTensor.from_buffers(rowwise, plain(target), q.shape, q.dtype)
    except (RuntimeError, ValueError):
        return False
    return torch.equal(other.dequantize(), q.dequantize())


def has(spec, option):
    return option in quire.QuantSpec(spec).options


def breaks_a_promise(target, source):
    """Whether scales of the source are not what the target's are by its spec: powers of two, or equal within tiles."""
    return any(has(target, option) and not has(source, option) for option in ("pow2", "32x32", "16x16"))


def rows(q):
    """The rowwise codes and scales in plain order."""
    buffers = (q.rowwise_data, q.rowwise_scale)
    if not has(q.spec_text, "interleaved"):
        return buffers
    lines = quire.quantize(values(1), plain(q.spec_text))
    likes = (lines.rowwise_data, lines.rowwise_scale)
    return tuple(in_lines(tensor, like) for tensor, like in zip(buffers, likes, strict=True))


def in_lines(tensor, like):
    """numerics.md 2.4, by its formula; scales in float32 keep their order."""
    if tensor.dtype == torch.float32:
        return tensor
    i, j = torch.meshgrid(*map(torch.arange, like.shape), indexing="ij")
    offset = (i // 16 * -(-like.shape[1] // 4) + j // 4) * 64 + i % 16 * 4 + j % 4
    return tensor.cpu().flatten()[offset]


def same_rows(one, other):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(rows(one), rows(other), strict=True))


def transform(spec):
    """The option under which columnwise bytes hold a transform."""
    return [option for option in quire.QuantSpec(spec).options if option.startswith("rht")]


def columns(q):
    """The values of the columnwise bytes alone."""
    buffers = {name: tensor for name, tensor in q.buffers().items() if name.startswith("columnwise")}
    return QuantizedTensor.from_buffers(buffers, q.spec, q.shape, q.dtype).dequantize()


def pairs():
    for target, source in itertools.product(SPECS, SPECS):
        if target.split(":")[0] == source.split(":")[0] and target != source:
            yield target, source


@pytest.mark.parametrize(
    ("target", "source"), [pair for pair in pairs() if means_the_same(*pair) and not breaks_a_promise(*pair)]
)
def test_bytes_that_mean_the_same_are_copied(target, source, device):
    q, other = quantized(source, 1, device), quantized(target, 2, device)
    transformed = transform(target) != transform(source)
    if has(target, "sr") and transformed:
        before = other.clone()
        with pytest.raises(ValueError, match="needs a seed"):
            other.copy_(q)
        assert same_rows(other, before)
    else:
        assert other.copy_(q) is other
        assert same_rows(other, q) and torch.equal(other.dequantize(), q.dequantize())
        if not transformed and not transform(source):
            tied = has(target, "16x16") and "4over6" not in target and "4over6" in source
            assert torch.equal(columns(other), other.dequantize() if tied else columns(q))
        elif not transformed:
            assert torch.equal(other.columnwise_data, q.columnwise_data)
    other = quantized(target, 2, device)
    other.update_usage(columnwise_usage=False)
    assert same_rows(other.copy_(q), q)


@pytest.mark.parametrize(
    ("target", "source"), [pair for pair in pairs() if not means_the_same(*pair) or breaks_a_promise(*pair)]
)
def test_other_bytes_are_decoded_and_quantized_under_the_targets_spec(target, source):
    q, other = quantized(source, 1), quantized(target, 2)
    before = other.clone()
    if has(target, "sr"):
        with pytest.raises(ValueError, match="needs a seed"):
            other.copy_(q)
        expected = before
    else:
        other.copy_(q)
        expected = quire.quantize(q.dequantize(), target, columnwise=True, scale=other.given_scale)
    for one, two in zip(other.buffer_list(), expected.buffer_list(), strict=True):
        assert one is two is None or torch.equal(one, two)


def test_a_copy_between_a_scale_and_a_multiplier_keeps_what_later_writes_use():
    static = quantized("fp8_tensor:given", 1)
    moving = quire.quantize(values(2), "fp8_tensor:nan", scale=torch.tensor([8.0]))
    moving.copy_(static)
    moving.copy_(values(3))
    expected = quire.quantize(values(3), "fp8_tensor:nan", scale=1 / static.given_scale)
    assert torch.equal(moving.rowwise_data, expected.rowwise_data)
    static.copy_(quire.quantize(values(2), "fp8_tensor:nan", scale=torch.tensor([8.0])))
    static.copy_(values(3))
    expected = quire.quantize(values(3), "fp8_tensor:given", scale=torch.tensor([0.125]))
    assert torch.equal(static.rowwise_data, expected.rowwise_data)


def test_a_copy_of_a_stack_or_with_a_master_copies_bytes_too():
    parts = [quantized("nvfp4:4over6=mae", seed) for seed in (1, 2)]
    stack, other = quire.QuantizedStack.of(parts), quire.QuantizedStack.of([quantized("nvfp4:nan", 3)] * 2)
    other.master = torch.zeros(2, ROWS, COLS)
    other.copy_(stack)
    assert torch.equal(other.dequantize(), stack.dequantize()) and torch.equal(other.rowwise_data, stack.rowwise_data)
    assert torch.equal(other.master, stack.dequantize())


def test_a_state_dict_whose_bytes_are_taken_over_does_not_warn_of_rounding():
    def layer(spec):
        with quire.quantized_model_init(recipe=quire.recipe.CustomRecipe({"x": "nvfp4", "w": spec, "dy": "nvfp4"}.get)):
            return quire.Linear(COLS, ROWS, bias=False)

    source, target = layer("nvfp4:16x16:4over6=mae"), layer("nvfp4:16x16:nan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(source.state_dict())
    assert torch.equal(target.weight.dequantize(), source.weight.dequantize())
    with pytest.warns(UserWarning, match="decoded and quantized again as nvfp4:16x16:global=mul, which rounds twice"):
        layer("nvfp4:16x16:global=mul").load_state_dict(source.state_dict())


@pytest.mark.parametrize("spec", [spec for spec in SPECS if has(spec, "given")])
def test_a_tensor_of_a_static_scale_is_saved_with_it_and_gets_its_other_direction_by_it(spec):
    q = quantized(spec, 1)
    loaded = pickle.loads(pickle.dumps(q))
    assert torch.equal(loaded.given_scale, q.given_scale) and torch.equal(loaded.rowwise_data, q.rowwise_data)
    q.update_usage(columnwise_usage=False)
    q.update_usage(columnwise_usage=True, requantize=True)
    again = quire.quantize(q.dequantize(), spec, rowwise=False, columnwise=True, scale=q.given_scale)
    assert torch.equal(q.columnwise_data, again.columnwise_data)
    assert torch.equal(q.columnwise_scale, again.columnwise_scale)
