"""quire.debug: what can be observed, and of whom. Its numbers are in golden/test_quantize.py."""

import threading

import pytest
import torch

import quire
from quire.recipe import MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.any_device


@pytest.mark.cpu_only
def test_cast_keeps_shape_and_lists_formats():
    x = torch.tensor([[[1.0, -0.0], [1e9, float("nan")]]])
    assert quire.debug.cast(x, "e4m3").tolist() == [[[0x38, 0x80], [0x7E, 0x7F]]]
    assert quire.debug.cast(x.half(), "e2m1").tolist() == [[[2, 8], [7, 7]]]
    assert quire.debug.cast(x[0, 0, 0], "e4m3").tolist() == 0x38
    with pytest.raises(RuntimeError, match="unknown element format 'e9m9'; use one of e4m3, e5m2, e2m1"):
        quire.debug.cast(x, "e9m9")


WRONG_KINDS = {
    "codes of None": (lambda: quire.debug.cast(None, "e4m3"), "debug.cast: x must be a tensor, got None"),
    "codes in no format": (lambda: quire.debug.cast(torch.ones(4), None), "debug.cast: format must be .* got None"),
    "a transform of None": (lambda: quire.debug.rht(None), "debug.rht: x must be a tensor, got None"),
    "signs of None": (lambda: quire.debug.rht(torch.ones(16, 16), None), "debug.rht: signs must be a bool, got None"),
    "a layout of None": (lambda: quire.debug.swizzle(None), "debug.swizzle: scale must be a tensor, got None"),
    "scales of None": (
        lambda: quire.debug.unswizzle(None, 1, 1),
        "debug.unswizzle: swizzled must be a tensor, got None",
    ),
    "half a row": (
        lambda: quire.debug.unswizzle(torch.ones(4), 0.5, 1),
        "debug.unswizzle: rows must be an int, got 0.5",
    ),
    "words of None": (lambda: quire.debug.philox(0, 0, None), "debug.philox: blocks must be a tensor, got None"),
    "a history of None": (
        lambda: quire.debug.delayed_update(None, torch.ones(1), torch.ones(1)),
        "debug.delayed_update: history must be a tensor, got None",
    ),
    "no algorithm": (
        lambda: quire.debug.delayed_update(torch.ones(4, 1), torch.ones(1), torch.ones(1), algorithm=None),
        "debug.delayed_update: algorithm must be .* got None",
    ),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", WRONG_KINDS)
def test_an_argument_of_a_wrong_kind_is_refused_in_words(name):
    call, words = WRONG_KINDS[name]
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.cpu_only
def test_the_hadamard_transform_pads_to_16_tokens_and_keeps_the_norm():
    x = torch.randint(-8, 9, (33, 5)).float()  # the results have at most 128 steps of 1/4: bfloat16 holds them
    out = quire.debug.rht(x)
    assert out.shape == (5, 48) and out.dtype == torch.bfloat16
    assert out.double().square().sum() == x.double().square().sum()
    assert torch.equal(quire.debug.rht(torch.eye(16), signs=False)[0].float(), torch.full((16,), 0.25))


@pytest.mark.cpu_only
def test_swizzle_rounds_sizes_up_and_pads_with_zero():
    swizzled = quire.debug.swizzle(torch.ones(130, 5, dtype=torch.uint8))
    assert swizzled.shape == (256, 8) and swizzled.sum() == 650
    with pytest.raises(RuntimeError, match=r"layout of \[129, 9\] holds 3072 uint8 values, got .* \[256, 8\]"):
        quire.debug.unswizzle(swizzled, 129, 9)


@pytest.mark.cpu_only
def test_philox_takes_unsigned_keys():
    blocks = torch.tensor([0])
    assert torch.equal(quire.debug.philox(2**64 - 1, 2**63, blocks), quire.debug.philox(-1, -(2**63), blocks))
    with pytest.raises(ValueError, match="seed must fit into 64 bits"):
        quire.debug.philox(2**64, 0, blocks)


@pytest.mark.cpu_only
def test_a_delayed_update_changes_nothing_in_place():
    history, scale = torch.tensor([[3.0], [1.0], [2.0], [5.0]]), torch.ones(1)
    new_history, new_scale = quire.debug.delayed_update(history, scale, torch.tensor([3.0]))
    assert new_history.tolist() == [[0.0], [2.0], [5.0], [3.0]] and new_scale == torch.tensor(448.0) / 5
    assert history[0] == 3 and scale == 1
    assert quire.debug.delayed_update(history, scale, torch.tensor([3.0]), maximum=448)[1] == new_scale
    with pytest.raises(RuntimeError, match="debug_delayed_update"):
        quire.debug.delayed_update(history, scale, torch.zeros(2))


def roles(records):
    return [record.role for record in records]


def test_operands_records_what_products_used_in_order(make_layer, make_x):
    layer, x = make_layer(), make_x(2, 16, 96)
    with quire.debug.operands() as records:
        assert records == []
        with quire.autocast(recipe=NVFP4BlockScaling()):
            layer(x).sum().backward()
        with quire.autocast(), torch.no_grad():
            layer(x)
    assert roles(records) == ["x", "w", "dy", "x", "w"]
    x_used, dy_used, x_inference = records[0].tensor, records[2].tensor, records[3].tensor
    assert x_used.shape == (32, 96) and x_used.columnwise_data.shape == (96, 16) and str(x_used.spec) == "nvfp4:rht:nan"
    assert dy_used.shape == (32, 64) and dy_used.rowwise_data is not None and dy_used.columnwise_data is not None
    assert x_inference.columnwise_data is None and str(x_inference.spec) == "mxfp8:nan"


def test_operands_records_copies(make_layer, make_x, equal_bits):
    layer, x = make_layer(), make_x(16, 96)
    with quire.debug.operands() as records, quire.autocast():
        y = layer(x)
    for record in records:
        for buffer in record.tensor.buffers().values():
            buffer.zero_()
    y.sum().backward()
    expected = x.grad.clone()
    x.grad = None
    with quire.autocast():
        layer(x).sum().backward()
    assert equal_bits(x.grad, expected)


def test_operands_records_empty_batches(make_layer, make_x):
    layer = make_layer()
    with quire.debug.operands() as records, quire.autocast():
        layer(make_x(0, 96)).sum().backward()
    assert [record.tensor.dequantize().shape for record in records] == [(0, 96), (64, 96), (0, 64)]


def test_operands_stops_recording_when_left_and_survives_errors(make_layer, make_x):
    layer, x = make_layer(), make_x(16, 96)
    with pytest.raises(KeyError), quire.debug.operands() as records, quire.autocast():
        layer(x)
        raise KeyError
    with quire.autocast():
        layer(x)
    assert roles(records) == ["x", "w"]
    assert len(torch.ops.quire.debug_recorded()) == 6 * 2
    with quire.debug.operands() as again:
        pass
    assert again == []


def test_operands_records_all_threads_and_only_once_at_a_time(make_layer, make_x):
    layer, x = make_layer(), make_x(16, 96)

    def work():
        with quire.autocast(recipe=MXFP8BlockScaling()):
            layer(x)

    with quire.debug.operands() as records:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="already recording in this process; leave that context first"):
            with quire.debug.operands():
                pass
    assert roles(records) == ["x", "w"]
