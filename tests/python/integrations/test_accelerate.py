"""accelerate: quire.convert before Accelerator.prepare."""

import copy

import pytest

accelerate = pytest.importorskip("accelerate")
import torch  # noqa: E402

import quire  # noqa: E402


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_converted_before_prepare_trains_with_quire(precision):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    quire.convert(model, "mxfp8", min_features=1)
    by_hand = copy.deepcopy(model)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.utils.data.TensorDataset(torch.randn(32, 64), torch.randint(0, 8, (32,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=16))
    inner = accelerator.unwrap_model(model)
    assert [type(layer) for layer in inner if hasattr(layer, "weight")] == [quire.Linear] * 2
    losses, expected = [], []
    for _ in range(4):
        for x, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(x), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.05)
    for _ in range(4):
        for x, labels in torch.utils.data.DataLoader(data, batch_size=16):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                y = by_hand(x)
            loss = torch.nn.functional.cross_entropy(y.float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
    assert losses == expected and len(set(losses)) == 8
    x = torch.randn(5, 64)
    plain = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    plain.load_state_dict(accelerator.get_state_dict(model))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        high = plain(x)
        quire.convert(plain, "mxfp8", min_features=1)
        assert torch.equal(model(x).float(), plain(x).float()) and not torch.equal(plain(x), high)


def mixture():
    torch.manual_seed(0)
    model = torch.nn.Sequential(quire.MoE(64, 96, 4, 2, expert_bias=True))
    model[0].expert_bias.copy_(1 + torch.arange(4) * 2**-20)  # of 21 bits
    return model


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_bias_that_accelerate_loads_is_float32_or_refused(dtype, tmp_path):
    torch.save(mixture().state_dict(), tmp_path / "model.bin")
    with accelerate.init_empty_weights(include_buffers=True):
        model = mixture()
    accelerate.load_checkpoint_in_model(model, str(tmp_path / "model.bin"), device_map={"": "cpu"}, dtype=dtype)
    if dtype == torch.bfloat16:
        with pytest.raises(TypeError, match="expert_bias must be float32, got torch.bfloat16.*accelerate"):
            model(torch.randn(8, 64, dtype=dtype))
        return
    assert model(torch.randn(8, 64)).isfinite().all()
    assert torch.equal(model[0].expert_bias, mixture()[0].expert_bias)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_bias_stays_float32_in_a_prepared_model(precision):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model = accelerator.prepare(mixture())
    model(torch.randn(8, 64)).sum().backward()
    bias = accelerator.unwrap_model(model)[0].expert_bias
    assert torch.equal(bias, mixture()[0].expert_bias) and bias.dtype == torch.float32
