"""The device finds what it is there to find: each mistake is made once, and each device works without one."""

import copy

import pytest
import torch

from device import device as testdevice

NAME, OTHER = testdevice.NAME, f"{testdevice.NAME}:1"
ops = torch.ops.testdevice


def add_one(x, stream=0, device=0, count=None):
    """A launch with a stream, a device and a pointer as given, right or wrong."""
    ops.add_one(x.data_ptr(), x.numel() if count is None else count, device, stream)


def kinds():
    return [violation.kind for violation in testdevice.violations()]


def synchronize(device=NAME):
    torch.accelerator.synchronize(torch.device(device))


def join(side):
    """Before memory that both used is freed."""
    torch.accelerator.current_stream().wait_stream(side)


# ---- A device of PyTorch.


def test_tensors_are_made_moved_and_printed():
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal((x.to(NAME) * 2 + 1).t().contiguous().cpu(), (x * 2 + 1).t())
    assert torch.equal(x.to(NAME).to(OTHER).cpu(), x)
    assert "device='quiretest:0'" in repr(x.to(NAME))
    assert torch.Generator(device=OTHER).device == torch.device(OTHER)


def test_a_model_of_pytorch_trains_as_on_the_cpu():
    def losses(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x = torch.randn(32, 8).to(device)
        for _ in range(3):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()

    assert list(losses(NAME)) == list(losses(OTHER)) == list(losses("cpu"))


def test_modules_are_copied_and_results_of_out_arguments_resized():
    layer = torch.nn.Linear(4, 4).to(NAME)
    assert torch.equal(copy.deepcopy(layer).weight.cpu(), layer.weight.cpu())
    out = torch.empty(0, device=NAME)
    torch.add(torch.ones(3, device=NAME), 1, out=out)
    assert out.tolist() == [2, 2, 2]


def test_random_numbers_follow_a_seed():
    a, b = (torch.rand(4, device=NAME, generator=torch.Generator(device=NAME).manual_seed(3)) for _ in range(2))
    assert torch.equal(a.cpu(), b.cpu()) and not torch.equal(a.cpu(), torch.rand(4, device=NAME).cpu())


# ---- Asynchronous.


def test_launches_return_at_once_and_run_in_order():
    x = torch.zeros(4, device=NAME)
    synchronize()
    ops.set_delay(20_000)
    for _ in range(5):
        x += 1
    assert not torch.accelerator.current_stream().query()
    assert x.tolist() == [5] * 4


def test_an_error_of_a_kernel_is_raised_where_the_host_waits():
    table = torch.arange(4.0, device=NAME)
    table.index_select(0, torch.tensor([7]).to(NAME))
    with pytest.raises(RuntimeError, match="a kernel failed: aten::index_select"):
        synchronize()


def test_what_the_host_waits_for_and_copies_is_counted():
    x = torch.ones(3, device=NAME)
    assert testdevice.waits() == {}
    x.sum().item()
    assert testdevice.waits() == {"item": 1, "synchronize": 1}
    x.copy_(torch.zeros(3))
    assert testdevice.waits() == {"copy host to device": 1}
    x.cpu()
    assert testdevice.waits() == {"copy device to host": 1, "synchronize": 1}
    x.to(OTHER)
    assert testdevice.waits() == {"copy device to device": 1}
    x.nonzero()
    assert testdevice.waits()["synchronous aten::nonzero"] == 1


def test_memory_nobody_wrote_is_not_zero():
    first = torch.empty(8, device=NAME)
    assert first.isnan().all()
    address = first.fill_(1).data_ptr()
    del first
    second = torch.empty(8, device=NAME)
    assert second.data_ptr() == address and second.isnan().all()


# ---- Planted mistakes.


def test_a_read_on_the_host_is_found_with_its_place():
    x = torch.full((4,), 3, dtype=torch.uint8).to(NAME)
    assert ops.peek(x) == 3  # it goes on, with what kernels have computed
    (found,) = testdevice.violations()
    assert found.kind == "host access" and any("libtestdevice" in frame for frame in found.frames)
    ops.peek(x)
    assert kinds() == ["host access"]


def test_a_wrong_stream_is_found_even_when_the_values_are_right():
    x = torch.zeros(4, device=NAME)
    side = torch.Stream(device=NAME)
    synchronize()
    add_one(x)
    add_one(x, stream=side.stream_id)
    (found,) = testdevice.violations()
    assert found.kind == "race" and "nothing orders them" in found.detail
    assert f"'add_one' on stream 0/{side.stream_id} writes what 'add_one' on stream 0/0 writes" in found.detail
    join(side)


def test_a_read_on_another_stream_is_found_whichever_comes_first():
    x, y = torch.zeros(4, device=NAME), torch.zeros(4, device=NAME)
    side = torch.Stream(device=NAME)
    synchronize()
    x += 1
    with side:
        x + 1
    assert kinds() == ["race"]
    with side:
        y + 1
    y += 1
    assert kinds() == ["race"]
    join(side)
    y += 1
    assert kinds() == []


@pytest.mark.parametrize("order", ["event", "wait_stream", "synchronize", "query"])
def test_what_orders_streams_is_known(order):
    x = torch.zeros(4, device=NAME)
    default, side = torch.accelerator.current_stream(), torch.Stream(device=NAME)
    synchronize()
    x += 1
    event = torch.Event(NAME)
    event.record(default)
    if order == "event":
        side.wait_event(event)
    elif order == "wait_stream":
        side.wait_stream(default)
    elif order == "synchronize":
        event.synchronize()
    else:
        while not event.query():
            pass
    with side:
        x += 1
    default.wait_stream(side)
    assert x.tolist() == [2] * 4


def test_a_stream_that_does_not_wait_sees_old_values():
    x = torch.zeros(4, device=NAME)
    side = torch.Stream(device=NAME)
    synchronize()
    ops.set_delay_of(0, 0, 20_000)
    x += 1
    with side:
        assert (x + 0).tolist() == [0] * 4
    assert kinds() == ["race"]
    ops.set_delay_of(0, 0, 0)
    join(side)


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_freed_while_another_stream_uses_it_is_poison(recorded):
    side = torch.Stream(device=NAME)
    x = torch.ones(1000, device=NAME)
    synchronize()
    ops.set_delay_of(0, side.stream_id, 20_000)
    with side:
        y = x * 5
    if recorded:
        x.record_stream(side)
    del x
    with side:
        assert bool((y == 5).all()) == recorded
    assert kinds() == ([] if recorded else ["race"])
    ops.set_delay_of(0, side.stream_id, 0)


def test_freed_memory_is_refused():
    address = torch.ones(4, device=NAME).data_ptr()
    with pytest.raises(RuntimeError, match="'add_one' on stream 0/0 is given memory that was freed"):
        ops.add_one(address, 4, 0, 0)


def test_memory_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="'add_one' on stream 0/0 is given memory of device 1"):
        add_one(torch.ones(4, device=OTHER))
    x = torch.ones(4, device=OTHER)
    add_one(x, device=1)
    assert x.tolist() == [2] * 4


def test_memory_of_the_host_in_a_launch_is_found():
    x = torch.zeros(4)
    add_one(x)
    assert x.tolist() == [1] * 4 and kinds() == ["host memory"]


def test_a_kernel_that_runs_past_its_memory_is_found():
    x = torch.zeros(1024 - 16, device=NAME)
    add_one(x, count=1024)
    synchronize()
    assert kinds() == ["beyond memory"]
    add_one(x)


def test_a_kernel_with_an_address_that_was_not_translated_is_found():
    x = torch.zeros(4, device=NAME)
    ops.add_one_untranslated(x.data_ptr(), 4)
    synchronize()
    assert kinds() == ["device address in a kernel"]


@pytest.mark.parametrize("captured", [False, True])
def test_a_kernel_that_keeps_a_list_of_the_host_is_found_and_one_that_copies_it_is_not(captured):
    def launch(keep):
        ops.add_listed(x.data_ptr(), [1, 2, 4], keep)

    x = torch.zeros(1, device=NAME)
    for keep, expected in ((False, []), (True, ["list kept"])):
        if captured:
            with testdevice.Graph() as graph:
                launch(keep)
            graph.replay()
        else:
            launch(keep)
        synchronize()
        assert kinds() == expected
    assert x.tolist() == [14]


# ---- Capture.


def test_a_graph_is_replayed_with_new_values():
    x = torch.ones(4, device=NAME)
    with testdevice.Graph() as graph:
        y = (x * 3).clone() + x
    for value in (1.0, 10.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [4 * value] * 4


def test_a_stream_that_waits_for_a_captured_one_joins_the_capture():
    x = torch.ones(4, device=NAME)
    with testdevice.Graph() as graph:
        y, side = x * 3, torch.Stream(device=NAME)
        side.wait_stream(graph.stream)
        with side:
            y += 1
        graph.stream.wait_stream(side)
        y += 1
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [8] * 4


@pytest.mark.parametrize("what", ["item", "to host", "from host", "synchronize", "another stream", "host memory"])
def test_a_capture_refuses(what):
    x, host = torch.ones(4, device=NAME), torch.ones(4)
    act = {
        "item": lambda: x[0].item(),
        "to host": lambda: x.cpu(),
        "from host": lambda: x.copy_(host),
        "synchronize": synchronize,
        "another stream": lambda: add_one(x),
        "host memory": lambda: add_one(host, stream=graph.stream.stream_id),
    }[what]
    with pytest.raises(RuntimeError, match="not allowed while a stream is captured"), testdevice.Graph() as graph:
        x * 2
        act()
    assert kinds() == (["host memory"] if what == "host memory" else [])


def test_a_capture_is_spoiled_even_when_its_error_is_swallowed():
    x = torch.ones(4, device=NAME)
    with pytest.raises(RuntimeError, match="the capture was spoiled"), testdevice.Graph():
        with pytest.raises(RuntimeError):
            x[0].item()


def test_a_host_access_spoils_a_capture():
    x = torch.ones(4, dtype=torch.uint8, device=NAME)
    synchronize()
    with pytest.raises(RuntimeError, match="the host touched memory of the device"), testdevice.Graph():
        ops.peek(x)
    assert kinds() == ["host access"]


def test_a_graph_whose_input_was_freed_is_not_replayed():
    x = torch.ones(4, device=NAME)
    with testdevice.Graph() as graph:
        y = x * 3
    del x
    with pytest.raises(RuntimeError, match="uses memory that was freed since the capture"):
        graph.replay()
    assert y is not None


def test_a_value_read_at_capture_is_the_old_one_at_replay():
    """Why a seed or a number of rows must stay on the device: here it does not."""
    n = torch.tensor(3)
    x = torch.zeros(4, device=NAME)
    with testdevice.Graph() as graph:
        y = x + n
    n.fill_(5)
    graph.replay()
    assert y.tolist() == [3] * 4
