"""QuantizedStack: quantized matrices as one tensor. What it is compared with are the same matrices one by one."""

import copy
import io

import pytest
import torch

import quire
from quire import QuantizedStack, QuantizedTensor, TensorProto, quantize
from steps import same

pytestmark = pytest.mark.any_device

SPECS = [
    *("fp8_tensor", "fp8_row", "fp8_block", "fp8_block:128x128", "mxfp8", "mxfp8:32x32", "mxfp4"),
    *("nvfp4", "nvfp4:16x16", "nvfp4:rht", "nvfp4:swizzled", "nvfp4:16x16:interleaved"),
]
every_spec = pytest.mark.parametrize("spec", SPECS)


def has_parts(stack, parts):
    return same(stack.parts(), parts)


def values(count=3, dtype=torch.float32):
    torch.manual_seed(0)
    # Matrices of different magnitude, so that an amax of another one shows.
    return (torch.randn(count, 48, 96) * torch.tensor([1.0, 300, 0.01, 7])[:count, None, None]).to(dtype)


def matrices(spec, device="cpu"):
    return [quantize(one, spec, columnwise=True) for one in values().to(device)]


@every_spec
def test_it_is_its_matrices(spec, equal_bits, device):
    parts = matrices(spec, device)
    stack = QuantizedStack.of(parts)
    assert isinstance(stack, QuantizedTensor) and stack.shape == (3, 48, 96) and stack.spec_text == parts[0].spec_text
    assert has_parts(stack, parts) and has_parts(stack, matrices(spec))
    assert stack.nbytes == sum(part.nbytes for part in parts)
    assert equal_bits(stack.dequantize(), torch.stack([part.dequantize() for part in parts]))
    assert equal_bits(stack.flat_buffers()[0], torch.cat([part.rowwise_data.flatten() for part in parts]))
    assert equal_bits(stack + 1, stack.dequantize() + 1) and type(stack + 1) is torch.Tensor
    described = {name: (tuple(t.shape), t.dtype) for name, t in stack.buffers().items()}
    assert stack.proto.buffers() == described
    assert {name: (tuple(t.shape), t.dtype) for name, t in stack.proto.create_tensor().buffers().items()} == described
    again = QuantizedStack.from_buffers(stack.buffers(), stack.spec, stack.shape)
    assert has_parts(again, parts) and type(again) is QuantizedStack


@every_spec
def test_views_are_matrices_and_share_memory(spec, device):
    parts = matrices(spec, device)
    stack = QuantizedStack.of(parts)
    for one in (stack[1], stack.select(0, 1), stack.unbind()[1], list(stack)[1], stack[1:2].squeeze(0)):
        assert type(one) is QuantizedTensor and has_parts([one] and _of(one), parts[1:2])
    assert type(stack[1:]) is QuantizedStack and has_parts(stack[1:], parts[1:])
    assert type(stack.view(3, 48, 96)) is QuantizedStack
    assert not any(isinstance(one, QuantizedTensor) for one in (stack.view(144, 96), stack[:, :16], stack[:0]))
    assert torch.equal(stack[:, :16], stack.dequantize()[:, :16]) and stack[:0].shape == (0, 48, 96)
    new = torch.randn(48, 96).to(device)
    with torch.no_grad():
        stack[1].copy_(new)
        stack[2:].copy_(new[None] * 2)
    assert has_parts(stack, [parts[0], *[quantize(one, spec, columnwise=True) for one in (new, new * 2)]])


class _of:
    """A matrix as if it were a stack of one."""

    def __init__(self, one):
        self.one = one

    def parts(self):
        return [self.one]


@pytest.mark.parametrize("master", [False, True])
@every_spec
def test_writes_are_those_of_the_matrices(spec, master, device):
    parts, update = matrices(spec, device), torch.randn(3, 48, 96).to(device)
    if master:
        for part, one in zip(parts, values().to(device), strict=True):
            part.master = one.clone()
    stack = QuantizedStack.of(parts)
    with torch.no_grad():
        stack.add_(update, alpha=0.5).mul_(3)
        torch._foreach_sub_([stack], [update])
        for part, one in zip(parts, update, strict=True):
            part.add_(one, alpha=0.5).mul_(3)
            torch._foreach_sub_([part], [one])
    assert has_parts(stack, parts)
    stack.quantize_(update)
    assert has_parts(stack, [part.quantize_(one) for part, one in zip(parts, update, strict=True)])
    stack.copy_(QuantizedStack.of(matrices(spec, device)))
    assert has_parts(stack, [part.copy_(one) for part, one in zip(parts, matrices(spec, device), strict=True)])


@every_spec
def test_copies_moves_and_saving(spec):
    parts = matrices(spec)
    stack = QuantizedStack.of(parts)
    file = io.BytesIO()
    torch.save({"w": stack, "p": torch.nn.Parameter(stack)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded["p"], torch.nn.Parameter) and loaded["p"].requires_grad
    for one in (copy.deepcopy(stack), stack.clone(), stack.detach(), stack.to("cpu", copy=True), *loaded.values()):
        assert type(one) is QuantizedStack and has_parts(one, parts)
    assert copy.deepcopy(stack).rowwise_data.data_ptr() != stack.rowwise_data.data_ptr()
    assert stack.to(torch.bfloat16).dtype == torch.bfloat16 and type(stack.to(torch.bfloat16)) is QuantizedStack
    assert stack.to("meta").is_meta and torch.empty_like(stack).shape == stack.shape
    assert type(torch.empty_like(stack)) is QuantizedStack and type(torch.zeros_like(stack)) is torch.Tensor
    twin = QuantizedTensor.make_like(stack, dtype=torch.float16)
    assert type(twin) is QuantizedStack and "QuantizedStack('" in repr(stack)


@every_spec
def test_directions_are_those_of_the_matrices(spec, device):
    parts = matrices(spec, device)
    stack = QuantizedStack.of(parts)
    for one in (stack, *parts):
        one.update_usage(columnwise_usage=False)
    assert stack.columnwise_data is None and has_parts(stack, parts)
    requantize = {"requantize": True}
    for one in (stack, *parts):
        one.update_usage(columnwise_usage=True, **requantize)
    assert has_parts(stack, parts)


def test_a_stack_and_a_tensor_of_three_dimensions_are_not_confused(device):
    stack = QuantizedStack.of(matrices("mxfp8", device))
    tensor = quantize(values().to(device), "mxfp8", columnwise=True)
    with pytest.raises(ValueError, match="must be contiguous|is missing|should be absent"):
        QuantizedStack.from_buffers(tensor.buffers(), "mxfp8", tensor.shape)
    with pytest.raises(TypeError, match="expected a QuantizedStack of shape"):
        stack.data = tensor
    with torch.no_grad():
        stack.copy_(tensor)  # decoded, and quantized by matrix
    assert has_parts(stack, [quantize(one, "mxfp8", columnwise=True) for one in tensor.dequantize()])
    with pytest.raises(RuntimeError, match="rowwise_scale"):
        quire.functional.linear_prequantized(
            torch.empty(3, 48, 96),
            torch.randn(8, 96),
            None,
            "x=mxfp8,w=mxfp8,dy=mxfp8",
            torch.float32,
            x_buffers=stack.buffer_list(),
        )


def test_wrong_parts_are_refused():
    parts = matrices("mxfp8")
    for wrong in ([], [*parts, quantize(values()[0], "nvfp4")], [*parts, quantize(values()[0], "mxfp8")], [stacked()]):
        with pytest.raises(ValueError, match="expected matrices of one spec, shape and dtype"):
            QuantizedStack.of(wrong)
    with pytest.raises(TypeError, match="parts must be QuantizedTensors, got"):
        QuantizedStack.of([parts[0], torch.ones(48, 96)])
    with pytest.raises(TypeError, match="parts must be a list of QuantizedTensors, got QuantizedTensor"):
        QuantizedStack.of(parts[0])
    with pytest.raises(ValueError, match=r"got mxfp8 \[48, 96\] .*; nvfp4 \[48, 96\] .*_amax. Quantize all of them"):
        QuantizedStack.of([parts[0], quantize(values()[0], "nvfp4")])
    with pytest.raises(ValueError, match="on one device, got .* on cpu .*; .* on meta with"):
        QuantizedStack.of([parts[0], parts[0].to("meta")])
    for shape in ((48, 96), (0, 48, 96)):
        with pytest.raises(
            ValueError, match=r"shape of a stack is \[matrices, rows, columns\], one matrix or more; got"
        ):
            TensorProto(shape, torch.float32, "mxfp8", stacked=True)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        (None, TypeError, "index must be an int, got None"),
        (slice(0, 1), TypeError, r"index must be an int, got slice\(0, 1, None\)"),
        (True, TypeError, "index must be an int, got True"),
        (3, IndexError, "index must be from -3 to 2, got 3"),
        (-4, IndexError, "index must be from -3 to 2, got -4"),
    ],
)
def test_a_part_has_a_number(index, error, words):
    with pytest.raises(error, match=f"^QuantizedStack.part: {words}"):
        stacked().part(index)
    assert same(stacked().part(-1), matrices("mxfp8")[-1])


def stacked():
    return QuantizedStack.of(matrices("mxfp8"))


def test_random_rounding_draws_for_each_matrix(device):
    stack = QuantizedStack.of([quantize(one, "nvfp4:sr", seed=5, columnwise=True) for one in values().to(device)])
    stack.quantize_(values().to(device) * 2, seed=9)
    expected = [quantize(one * 2, "nvfp4:sr", seed=9 + e, columnwise=True) for e, one in enumerate(values().to(device))]
    assert has_parts(stack, expected)
    with pytest.raises(ValueError, match="rounds stochastically and needs a seed"):
        stack.quantize_(values().to(device))
    stack.quantize_(values().to(device), seed=2**64 - 1)  # the number after the last one is 0
    assert same(stack[1].cpu(), quantize(values()[1], "nvfp4:sr", seed=0, columnwise=True))


def test_a_compiled_function_makes_one_of_buffers():
    parts = matrices("nvfp4")
    stack = QuantizedStack.of(parts)

    def made(buffers):
        return QuantizedStack.from_buffers(buffers, "nvfp4", (3, 48, 96))

    again = torch.compile(made, fullgraph=True, backend="aot_eager")(stack.buffers())
    assert type(again) is QuantizedStack and has_parts(again, parts)
