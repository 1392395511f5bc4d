"""What `import quire` loads, and what it leaves until somebody needs it. In every order of imports PyTorch treats
quire's classes and operators alike."""

import importlib
import subprocess
import sys
import threading

import pytest

from quire.loading.deferred import _FINDER, when_imported

#: These take longer to import than quire, or are optional.
LATER = ("torch._dynamo", "torch._inductor", "torch.distributed.", "torch.onnx", "sympy", "triton", "numpy.random")
LATER += ("transformers", "safetensors", "gguf", "accelerate", "lightning", "tqdm")
#: Parts of quire that few programs use.
LATER += tuple(f"quire.{name}." for name in ("golden", "info", "integrations", "io", "quantization"))


def python(code, *arguments):
    """What a new Python prints that runs the code."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_loads_its_own_modules_and_no_others_that_take_long():
    code = "import torch, sys; before = {*sys.modules}; import quire; print(*{*sys.modules} - before)"
    new = python(code).split()
    assert "quire.nn.linear" in new and not [name for name in new if f"{name}.".startswith(LATER)]
    own = {*sys.stdlib_module_names, "quire", "quire_python", "torch"}
    assert {name.partition(".")[0] for name in new} <= own


def test_what_is_loaded_later_is_there_when_it_is_asked_for():
    code = """if True:
        import sys, quire
        assert not [name for name in sys.modules if name.startswith("quire.quantization")]
        assert {"calibrate", "quantize_model", "io"} <= set(dir(quire))
        from quire import *
        assert calibrate is quire.calibrate is quire.quantization.calibrate.calibrate
        assert quantize_model is quire.quantize_model and CalibrationReport.__module__ == "quire.quantization.calibrate"
        assert quire.integrations and quire.io and LayerCalibration
        assert quire.integrations.transformers.register and quire.integrations.peft.prepare
        assert not {"peft", "transformers"} & set(sys.modules)
        for name in ("lightning", "torchtitan", "vllm"):
            sys.modules[name] = None  # as if it were not installed
            try:
                getattr(quire.integrations, name)
            except ImportError as error:
                assert name in str(error), error
            else:
                assert False, name
        try:
            quire.integrations.transformer
        except AttributeError as error:
            assert "transformers" in str(error), error
        print("done")"""
    assert python(code) == "done\n"


#: Does in one process what depends on a registration with a module of PyTorch.
PROGRAM = """
import importlib, io, sys, warnings

for name in sys.argv[1:]:
    importlib.import_module(name)
import torch, quire

assert ("torch._dynamo" in sys.modules) == ("torch._dynamo" in sys.argv)

# assume_constant_result, and allow_in_graph, without which Dynamo of PyTorch 2.13 only warns.
warnings.filterwarnings("error", message="Dynamo detected a call to a `functools.lru_cache`")
def values(x):
    q = quire.quantize(x, "mxfp8")
    return q.sum() + 1 if x.requires_grad else q.dequantize()

x = torch.randn(32, 64)
for given in (x, x.clone().requires_grad_()):
    compiled = torch.compile(values, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(given), values(given))

# The registry of pytrees, and safe globals.
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = quire.Linear(64, 32)
    def forward(self, x):
        with quire.autocast(recipe="mxfp8"):
            return self.linear(x)

layer, activation = Layer(), quire.quantize(x.clone().requires_grad_(), "mxfp8")
assert isinstance(activation, quire.QuantizedActivation)
file = io.BytesIO()
torch.export.save(torch.export.export(layer, (activation,)), file)
file.seek(0)
assert torch.equal(torch.export.load(file).module()(activation), layer(activation))
file = io.BytesIO()
torch.save([quire.quantize(x, "mxfp8"), quire.QuantizedStack.of([quire.quantize(x, "nvfp4")])], file)
file.seek(0)
assert [type(q).__name__ for q in torch.load(file, weights_only=True)] == ["QuantizedTensor", "QuantizedStack"]

# Formulas of flops.
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter, torch.no_grad():
    layer(x)
assert counter.get_total_flops() == 2 * 32 * 64 * 32

# DTensors.
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
mesh = init_device_mesh("cpu", (2,))
style = quire.distributed.ColumnParallel(use_local_output=False)
sharded = parallelize_module(quire.Linear(64, 32), mesh, style)
assert sharded.parallel.mode == "column" and isinstance(sharded(x), DTensor)
print("done")
"""
ORDERS = {
    "quire": ["quire", "torch.distributed.tensor"],
    "compilers": ["torch._dynamo", "torch.export"],
    "distributed": ["torch.distributed.tensor", "torch.utils.flop_counter"],
}


@pytest.mark.slow
@pytest.mark.parametrize("modules", ORDERS.values(), ids=ORDERS)
def test_all_that_is_registered_with_pytorch_works_in_every_order_of_imports(modules):
    assert python(PROGRAM, *modules) == "done\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that has not been imported, and the function that writes its code."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "package_for_test_import"
    package.mkdir()
    (package / "__init__.py").write_text("")

    def write(code):
        (package / "late.py").write_text(code)
        importlib.invalidate_caches()

    write("value = 1")
    yield "package_for_test_import.late", write
    for name in ("package_for_test_import", "package_for_test_import.late"):
        sys.modules.pop(name, None)


def test_what_waits_for_a_module_runs_once_in_order_before_its_importer_goes_on(module):
    name, _ = module
    seen = []
    when_imported(name, lambda late: seen.append(("first", late.value)))
    when_imported(name, lambda late: seen.append(("second", late.value)))
    assert importlib.util.find_spec(name).name == name and seen == []
    late = importlib.import_module(name)
    assert seen == [("first", 1), ("second", 1)]
    when_imported(name, lambda late: seen.append(("third", late.value)))
    assert seen[2:] == [("third", 1)]
    importlib.reload(late)
    assert len(seen) == 3


def test_a_module_for_which_something_waited_has_its_own_loader(module):
    name, _ = module
    when_imported(name, lambda late: None)
    late, known = importlib.import_module(name), importlib.import_module("package_for_test_import")
    assert type(late.__loader__) is type(late.__spec__.loader) is type(known.__loader__)
    assert late.__loader__.get_source(name) == "value = 1"


def test_what_waits_goes_on_waiting_where_an_import_fails(module):
    name, write = module
    seen = []
    when_imported(name, seen.append)
    write("raise ImportError('not yet')")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(name)
    assert seen == []
    write("value = 22")
    assert seen == [importlib.import_module(name)]


def test_what_waits_runs_although_another_thread_looks_for_the_module(module):
    name, _ = module
    ran, found = [], []
    when_imported(name, ran.append)
    _FINDER.asked.add(name)  # as while this thread looks for it
    try:
        thread = threading.Thread(target=lambda: found.append(importlib.import_module(name)))
        thread.start()
        thread.join()
    finally:
        _FINDER.asked.remove(name)
    assert ran == found and len(ran) == 1
