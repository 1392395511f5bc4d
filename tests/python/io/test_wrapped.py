"""A model that torch.compile or a class of PyTorch wraps is saved and loaded as the model within, under its names."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import quire
from python.io.checkpoint_files import raw
from python.io.checkpoint_models import Model, tokens, write
from quire import io


def with_compiled_layers(model: Model) -> Model:
    """Wrappers within the model, also around a quire.MoE, whose parts are found by the names of its parent."""
    for layer in model.model.layers:
        layer.mlp = torch.compile(layer.mlp, backend="eager")
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    return model


#: How a model is wrapped, and the attributes that lead to the model within.
WRAPPED = {
    "compiled": (lambda model: torch.compile(model, backend="eager"), ("_orig_mod",)),
    "averaged": (torch.optim.swa_utils.AveragedModel, ("module",)),
    "data parallel": (torch.nn.DataParallel, ("module",)),
    "compiled, then data parallel": (
        lambda model: torch.nn.DataParallel(torch.compile(model, backend="eager")),
        ("module", "_orig_mod"),
    ),
    "compiled layers": (with_compiled_layers, ()),
}


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source")


def within(model: torch.nn.Module, path: tuple[str, ...]) -> torch.nn.Module:
    for name in path:
        model = getattr(model, name)
    return model


@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapped_model_is_loaded_and_saved_under_the_names_of_the_model_within(how, source, tmp_path):
    wrap, path = WRAPPED[how]
    plain, model = Model(), wrap(Model())
    wanted, report = io.load(plain, source), io.load(model, source)
    assert (report.quantized, report.plain, report.notes) == (wanted.quantized, wanted.plain, wanted.notes)
    with torch.no_grad():
        assert torch.equal(model(tokens()), plain(tokens()))
    io.save(model, tmp_path / "a")
    io.save(within(model, path), tmp_path / "b")  # which remembers its checkpoint
    assert raw(tmp_path / "a") == raw(tmp_path / "b") == raw(source)
    again = wrap(plain)  # loaded before it was wrapped
    io.save(again, tmp_path / "c")
    assert raw(tmp_path / "c") == raw(source)


@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapped_model_without_values_is_reported_under_the_names_of_the_model_within(how, source):
    with torch.device("meta"):
        inner = Model()
        inner.register_buffer("table", torch.ones(4))
    report = io.load(WRAPPED[how][0](inner), source, strict=False)
    assert report.on_meta == report.missing == ("table",)


@pytest.mark.parametrize("dialect", ["modelopt", "quire"])
@pytest.mark.parametrize("how", WRAPPED)
def test_a_converted_model_is_saved_wrapped_as_without(how, dialect, tmp_path):
    torch.manual_seed(0)
    model = quire.quantize_model(Model(tied=False), "mxfp8", filter=lambda module, name: "mlp" in name)
    io.save(model, tmp_path / "a", dialect=dialect)
    io.save(WRAPPED[how][0](model), tmp_path / "b", dialect=dialect)
    assert raw(tmp_path / "a") == raw(tmp_path / "b")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_files_with_the_names_of_a_wrapped_model_are_loaded(prefix, tmp_path):
    model, other = Model(), Model()
    io.write(tmp_path, {prefix + name: value for name, value in model.state_dict().items()}, dialect=None)
    for target in (other, torch.compile(Model(), backend="eager"), torch.nn.DataParallel(Model())):
        io.load(target, tmp_path)
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), target.parameters(), strict=True))


@pytest.mark.parametrize("how", WRAPPED)
def test_a_wrapped_model_is_refitted_from_a_file(how, tmp_path):
    torch.manual_seed(0)
    wrap, path = WRAPPED[how]
    old, new = (quire.quantize_model(Model(tied=False), "mxfp8", filter=lambda m, name: "o_proj" in name) for _ in "ab")
    io.save(new, tmp_path, dialect="modelopt")
    model = wrap(old)
    report = quire.refit(model, tmp_path)
    assert not report.left and not report.unused and len(report.copied) == 2
    for one, two in zip(within(model, path).parameters(), new.parameters(), strict=True):
        one, two = (p.dequantize() if isinstance(p, quire.QuantizedTensor) else p for p in (one, two))
        assert torch.equal(one, two)
