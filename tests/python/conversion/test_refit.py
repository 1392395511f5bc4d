"""quire.refit: the bytes of a new conversion, at the addresses of the old weights; and nothing, if it is refused."""

import copy
import io
import json
import re
from pathlib import Path

import pytest
import torch

import pytorch
import quire
from every_recipe import DEFAULTS, STATIC, VARIANTS, each
from pairwise import pairwise
from python.conversion import refit_ranks
from quire.tensor import QuantizedTensor

EVERY = DEFAULTS | VARIANTS | STATIC
IN = 256


@pytest.fixture(autouse=True)
def grad_mode():
    with torch.no_grad():
        yield


class Layers(torch.nn.Module):
    """A layer of each kind, and what stays in high precision."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, IN)
        self.plain = torch.nn.Linear(IN, IN)
        self.small = torch.nn.Linear(IN, 3)
        self.normed = quire.LayerNormLinear(IN, 64)
        self.mlp = quire.LayerNormMLP(64, 96, activation="swiglu")
        self.listed = quire.GroupedLinear(2, 64, 48)
        self.stacked = quire.GroupedLinear(2, 48, 64, single_grouped_weight=True, single_grouped_bias=True)
        self.experts = quire.MoE(64, 32, 4, top_k=2, expert_bias=True)


def pair():
    return torch.nn.Sequential(torch.nn.Linear(IN, 300), torch.nn.Linear(300, IN, bias=False))


def made(seed, kind=Layers):
    torch.manual_seed(seed)
    return kind()


def served(model, recipe, **options):
    model = quire.convert(copy.deepcopy(model), recipe, for_inference=True, tokens=None, **options)
    for name, buffer in model.named_buffers():
        if name.endswith("input_scale"):
            buffer.fill_(0.03)
    return model.eval()


def stored(model):
    """Name -> every plain tensor of the model's state, and of its quantized weights the buffers."""
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, QuantizedTensor):
            found |= {f"{name}.{own}": t for own, t in value.named().items() if t is not None}
        else:
            found[name] = value.detach()
    return found


def places(model):
    return {name: (t.data_ptr(), tuple(t.stride())) for name, t in stored(model).items()}


def bytes_of(model):
    return {name: t.contiguous().flatten().view(torch.uint8).cpu().clone() for name, t in stored(model).items()}


def assert_same_bytes(model, expected):
    one, other = bytes_of(model), bytes_of(expected)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# ------------------------------------------------------------ the bytes of a new conversion, in the same memory


@pytest.mark.any_device
@each(EVERY)
def test_the_bytes_are_those_of_a_new_conversion_in_the_memory_of_the_old_one(recipe):
    old, new = made(1), made(2)
    model, expected = served(old, recipe), served(new, recipe)
    before, codes = places(model), {id(p) for p in model.parameters()}
    report = quire.refit(model, new.state_dict())
    assert_same_bytes(model, expected)
    assert places(model) == before and {id(p) for p in model.parameters()} == codes
    assert len(report.quantized) == _codes(model) and not report.left and not report.unused
    assert report.nbytes == sum(t.numel() * t.element_size() for t in stored(model).values()) - _scales(model)


def _codes(model):
    return sum(isinstance(p, QuantizedTensor) for p in model.parameters())


def _scales(model):
    return sum(t.nbytes for name, t in model.named_buffers() if name.endswith("input_scale"))


@pytest.mark.parametrize(
    ("dtype", "given", "form"),
    pairwise(
        [torch.float32, torch.bfloat16, torch.float16], ["float32", "bfloat16", "float16"], ["t", "inference", "step"]
    ),
)
def test_values_of_any_precision_and_memory_are_rounded_as_load_state_dict_does(dtype, given, form):
    old, new = made(1, pair).to(dtype), made(2, pair).to(getattr(torch, given))
    weights = new.state_dict()
    for name, value in weights.items():
        if form == "inference":
            with torch.inference_mode():
                weights[name] = value.clone()
        elif value.dim() == 2:
            weights[name] = value.t().contiguous().t() if form == "t" else value.repeat_interleave(2, 1)[:, ::2]
    loaded = copy.deepcopy(old)
    loaded.load_state_dict(weights)
    model = served(old, "mxfp8")
    quire.refit(model, weights)
    assert_same_bytes(model, served(loaded, "mxfp8"))


def test_weights_that_were_made_in_inference_mode_are_written_to():
    with torch.inference_mode():
        model = served(made(1), "nvfp4")
    quire.refit(model, made(2).state_dict())
    assert_same_bytes(model, served(made(2), "nvfp4"))


def test_layers_that_stayed_in_high_precision_are_copied():
    chosen = lambda layer, name: name != "plain"  # noqa: E731
    model = served(made(1), "mxfp8", filter=chosen)
    report = quire.refit(model, made(2).state_dict())
    assert {"plain.weight", "small.weight", "table.weight", "experts.expert_bias"} <= {*report.plain}
    assert_same_bytes(model, served(made(2), "mxfp8", filter=chosen))


def test_masters_take_the_values_and_codes_are_quantized_from_them():
    def parameters():
        with quire.quantized_model_init(recipe="mxfp8", keep_master=True), torch.enable_grad():
            return torch.nn.Sequential(quire.Linear(64, 64, params_dtype=torch.bfloat16))

    model, weights = made(1, parameters), {"0.weight": torch.randn(64, 64), "0.bias": torch.randn(64)}
    expected = copy.deepcopy(model)
    expected.load_state_dict(weights)
    quire.refit(model, weights)
    assert_same_bytes(model, expected)
    assert torch.equal(model[0].weight.master, weights["0.weight"])
    quire.refit(model, other := made(3, parameters).state_dict())
    assert torch.equal(model[0].weight.master, other["0.weight"].master)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.first = torch.nn.Embedding(IN, IN), torch.nn.Linear(IN, IN, bias=False)
        self.second, self.head = torch.nn.Linear(IN, IN, bias=False), torch.nn.Linear(IN, IN, bias=False)
        self.second.weight, self.head.weight = self.first.weight, self.table.weight


@pytest.mark.filterwarnings("ignore:quire.convert")
def test_tied_weights_are_given_once_or_under_each_name():
    new = made(2, Tied)
    expected, state = served(new, "nvfp4"), new.state_dict()
    for left_out in (None, "head.weight", "second.weight", "first.weight"):
        model = served(made(1, Tied), "nvfp4")
        quire.refit(model, {name: value for name, value in state.items() if name != left_out})
        assert_same_bytes(model, expected)
        assert model.first.weight is model.second.weight
    with pytest.raises(ValueError, match="first.weight is tied in the model, and its names .* have different values"):
        quire.refit(model, state | {"second.weight": torch.zeros(IN, IN)})


def test_values_of_tied_weights_that_are_nan_are_the_same():
    model, state = served(made(1, Tied), "nvfp4"), made(2, Tied).state_dict()
    state = {name: value.clone() for name, value in state.items()}
    state["first.weight"][0, 0] = state["second.weight"][0, 0] = state["head.weight"][0, 0] = torch.nan
    quire.refit(model, state, check_finite=False)
    assert model.first.weight.dequantize().isnan().any()


@pytest.mark.parametrize("wrapped", ["weights", "model", "both"])
def test_names_of_a_wrapped_model_are_found(wrapped):
    inner, new = served(made(1, pair), "mxfp8"), made(2, pair)
    model = torch.optim.swa_utils.AveragedModel(inner) if wrapped != "weights" else inner
    weights = new if wrapped == "model" else torch.optim.swa_utils.AveragedModel(new)
    report = quire.refit(model, weights.state_dict())
    assert not report.left and not report.unused
    assert_same_bytes(model.module if wrapped != "weights" else model, served(new, "mxfp8"))


@pytest.mark.filterwarnings("ignore:quire.convert")
@pytest.mark.parametrize("wrapped", ["before", "afterwards"])
def test_a_tied_weight_of_a_wrapped_model_is_given_once(wrapped):
    new, wrap = made(2, Tied), torch.optim.swa_utils.AveragedModel
    if wrapped == "before":
        model = served(wrap(made(1, Tied)), "nvfp4")
    else:
        model = wrap(served(made(1, Tied), "nvfp4"))
    quire.refit(model, {name: value for name, value in new.state_dict().items() if name != "head.weight"})
    assert_same_bytes(model.module, served(new, "nvfp4"))


def test_two_keys_of_one_weight_are_not_both_taken():
    model, state = served(made(1, pair), "mxfp8"), made(2, pair).state_dict()
    state["0._orig_mod.weight"] = torch.zeros(300, IN)
    with pytest.raises(ValueError, match="the model lacks 0._orig_mod.weight"):
        quire.refit(model, state)


def test_codes_of_the_same_spec_are_copied_in_whichever_order_they_are():
    model, other = served(made(1), "nvfp4"), served(made(2), "nvfp4")
    plain = copy.deepcopy(other)
    quire.unpack_weights(plain)
    for source in (other, plain):
        quire.refit(model, made(1).state_dict())
        report = quire.refit(model, source.state_dict())
        assert len(report.copied) == _codes(model) and not report.quantized
        assert_same_bytes(model, other)


def test_experts_may_be_stacked_or_listed_and_only_some():
    model, new = served(made(1), "mxfp8"), made(2)
    state = new.state_dict()
    for kind in ("weight", "bias"):
        state[f"listed.{kind}"] = torch.stack([state.pop(f"listed.{kind}{e}") for e in range(2)])
        for e, value in enumerate(state.pop(f"stacked.{kind}")):
            state[f"stacked.{kind}{e}"] = value
    quire.refit(model, state)
    assert_same_bytes(model, served(new, "mxfp8"))

    third, before = made(3), bytes_of(model)
    some = {name: third.state_dict()[name] for name in ("experts.fc1.weight2", "listed.weight0")}
    some["stacked.weight1"] = third.stacked.weight[1]
    report = quire.refit(model, some, strict=False)
    assert report.quantized == ("listed.weight0", "stacked.weight1", "experts.fc1.weight2")
    assert "stacked.weight0" in report.left and "plain.weight" in report.left
    now, expected = bytes_of(model), bytes_of(served(third, "mxfp8"))
    for name, value in now.items():
        if name.startswith("stacked.weight."):
            half = len(value) // 2
            assert torch.equal(value[:half], before[name][:half]) and torch.equal(value[half:], expected[name][half:])
        else:
            written = name.startswith(("experts.fc1.weight2.", "listed.weight0."))
            assert torch.equal(value, (expected if written else before)[name]), name


# ------------------------------------------------------------ refused: nothing changes


WRONG = {
    "missing": (lambda s: s.pop("mlp.fc1_weight"), ValueError, "the weights lack mlp.fc1_weight. Pass the state dict"),
    "extra": (lambda s: s.update(other=torch.ones(1)), ValueError, "the model lacks other. Pass the state dict"),
    "shape": (
        lambda s: s.update({"plain.weight": torch.ones(IN, 1)}),
        ValueError,
        r"plain.weight: has the shape \[256, 1\]",
    ),
    "shape of plain": (lambda s: s.update({"small.bias": torch.ones(4)}), ValueError, "small.bias: has the shape"),
    "float64": (lambda s: s.update({"plain.weight": torch.ones(IN, IN).double()}), ValueError, "is torch.float64"),
    "integers": (lambda s: s.update({"small.bias": torch.ones(3).int()}), ValueError, "is torch.int32"),
    "nan": (
        lambda s: s["stacked.weight"][1, 2, 3].fill_(torch.nan),
        ValueError,
        "stacked.weight: has values that are NaN",
    ),
    "inf": (
        lambda s: s["small.bias"][1:].fill_(torch.inf),
        ValueError,
        "small.bias: has values that are NaN or infinite",
    ),
    "codes of another spec in several layers": (
        lambda s: s.update(
            {name: quire.quantize(s[name], "fp8_row") for name in ("normed.weight", "mlp.fc1_weight", "mlp.fc2_weight")}
        ),
        ValueError,
        "normed.weight, mlp.fc1_weight, mlp.fc2_weight: each is quantized as fp8_row, and the model's as "
        "mxfp8:nan:interleaved; pass values in high precision$",
    ),
    "meta": (
        lambda s: s.update({"plain.bias": torch.ones(IN, device="meta")}),
        ValueError,
        "plain.bias: is on the meta",
    ),
    "sparse": (
        lambda s: s.update({"plain.weight": torch.eye(IN).to_sparse()}),
        ValueError,
        "plain.weight: must be dense",
    ),
    "stack of another size": (
        lambda s: s.update({"listed.weight": torch.ones(3, 48, 64)}) or [s.pop(f"listed.weight{i}") for i in range(2)],
        ValueError,
        r"listed.weight: has the shape \[3, 48, 64\]",
    ),
    "no tensor": (lambda s: s.update({"plain.bias": [1.0]}), ValueError, "plain.bias: must be a tensor"),
    "other codes": (
        lambda s: s.update({"plain.weight": quire.quantize(torch.ones(IN, IN), "fp8_row")}),
        ValueError,
        "plain.weight: is quantized as fp8_row, and the model's as mxfp8:nan:interleaved",
    ),
    "columnwise codes": (
        lambda s: s.update(
            {"plain.weight": quire.quantize(torch.ones(IN, IN), "mxfp8:nan", rowwise=False, columnwise=True)}
        ),
        ValueError,
        "plain.weight: must be a QuantizedTensor with rowwise codes",
    ),
    "codes for plain": (
        lambda s: s.update({"small.weight": quire.quantize(torch.ones(3, IN), "mxfp8:nan")}),
        ValueError,
        "small.weight: is quantized as mxfp8:nan, and the model's is in high precision",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_refused_refit_changes_nothing(what):
    change, kind, message = WRONG[what]
    model, state = served(made(1), "mxfp8"), copy.deepcopy(made(2).state_dict())
    before = bytes_of(model)
    change(state)
    with pytest.raises(kind, match=f"refit: nothing was written: .*{message}"):
        quire.refit(model, state)
    after = bytes_of(model)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_wrong_arguments_are_refused():
    model = served(made(1), "mxfp8")
    with pytest.raises(TypeError, match="weights must be a state dict or the path of a checkpoint, got .*state_dict"):
        quire.refit(model, made(2))
    with pytest.raises(ValueError, match="has no quantized weights; convert it first"):
        quire.refit(made(1), made(2).state_dict())
    with pytest.raises(ValueError, match="the model has none of the names"):
        quire.refit(model, {"other": torch.ones(1)}, strict=False)
    for strict in (True, False):
        with pytest.raises(TypeError, match="refit: a key of weights must be a str, got 1"):
            quire.refit(model, {1: torch.ones(1)}, strict=strict)
    with pytest.raises(ValueError, match="meta device"):
        quire.refit(copy.deepcopy(model).to("meta"), made(2).state_dict())
    expanded = served(made(1), "mxfp8")
    expanded.small.bias = torch.nn.Parameter(torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match=r"elements of small.bias share memory \(strides \(0,\)\)"):
        quire.refit(expanded, made(2).state_dict())
    program = torch.export.export(served(made(1, pair), "mxfp8"), (torch.ones(4, IN),)).run_decompositions()
    with pytest.raises(ValueError, match="this graph has no quantized weights, as a program after run_decompositions"):
        quire.refit(program.module(), made(2, pair).state_dict())
    for name in ("model", "strict", "check_finite"):
        with pytest.raises(TypeError, match=f"refit: {name}"):
            quire.refit(**{"model": model, "weights": {}} | {name: "yes"})


@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, -3.4e38), (torch.float16, 1e5)])
@pytest.mark.parametrize("name", ["0.weight", "0.bias"])
def test_values_that_the_dtype_of_the_model_does_not_have_are_refused(dtype, value, name):
    model, state = served(made(1, pair).to(dtype), "mxfp8"), made(2, pair).state_dict()
    before = bytes_of(model)
    state[name].flatten()[7] = value
    with pytest.raises(
        ValueError, match=f"nothing was written: {name}: has values that are NaN or infinite in {dtype}"
    ):
        quire.refit(model, state)
    after = bytes_of(model)
    assert all(torch.equal(stored, after[its]) for its, stored in before.items())
    state[name].flatten()[7] = 6e4  # which bfloat16 and float16 have
    quire.refit(model, state)
    assert all(
        bool(torch.isfinite(p.dequantize() if isinstance(p, QuantizedTensor) else p).all()) for p in model.parameters()
    )


def test_the_error_for_a_model_of_runners_names_what_writes_their_weights():
    class Served(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.handle = quire.runners.register(quire.runners.LinearRunner(torch.ones(16, 64)))

    model = Served()
    with pytest.raises(ValueError, match=r"the weights of runners are written by quire\.runners\.refit"):
        quire.refit(model, {})
    model.handle.close()


def test_values_that_are_not_finite_are_taken_on_request():
    new = made(2)
    new.plain.weight[3, 4] = torch.nan
    model = served(made(1), "mxfp8")
    quire.refit(model, new.state_dict(), check_finite=False)
    assert_same_bytes(model, served(new, "mxfp8"))


def test_an_error_in_the_middle_says_where_and_a_second_call_completes_it(monkeypatch):
    model, new = served(made(1), "nvfp4"), made(2)
    before, store, calls = bytes_of(model), QuantizedTensor.store, []

    def fails(self, *arguments, **options):
        calls.append(self)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no memory")
        return store(self, *arguments, **options)

    monkeypatch.setattr(QuantizedTensor, "store", fails)
    with pytest.raises(torch.OutOfMemoryError) as error:
        quire.refit(model, new.state_dict())
    (note,) = error.value.__notes__
    assert "writing mlp.fc1_weight failed, after" in note and "refit it again before it is used" in note
    after = bytes_of(model)
    assert not torch.equal(after["plain.weight.rowwise_data"], before["plain.weight.rowwise_data"])
    assert torch.equal(after["mlp.fc1_weight.rowwise_data"], before["mlp.fc1_weight.rowwise_data"])
    monkeypatch.undo()
    quire.refit(model, new.state_dict())
    assert_same_bytes(model, served(new, "nvfp4"))


def test_codes_that_gptq_has_made_are_replaced_by_codes_only():
    def small():
        return torch.nn.Sequential(torch.nn.Linear(32, 48))

    batches = [torch.randn(64, 32)]
    one, other = (quire.quantize_model(made(seed, small), "nvfp4", batches, "gptq") for seed in (1, 2))
    with pytest.raises(
        ValueError, match="were made by quire.quantize_model\\(method='gptq'\\), while a refit rounds to nearest"
    ):
        quire.refit(copy.deepcopy(one), made(2, small).state_dict())
    quire.refit(one, other.state_dict())
    assert_same_bytes(one, other)


def test_codes_of_quantize_weights_are_said_to_be_old():
    model = served(made(1), "mxfp8", filter=lambda layer, name: name != "normed")
    quire.quantize_weights(model, "mxfp8")
    report = quire.refit(model, made(2).state_dict())
    assert "1 layer with codes of quire.quantize_weights, made from" in str(report)
    with quire.autocast(recipe="mxfp8"), pytest.raises(RuntimeError, match="quantize_weights"):
        model.normed(torch.ones(2, IN))


# ------------------------------------------------------------ whatever has the memory sees the new weights


def test_a_compiled_function_is_not_compiled_again(compiler, equal_bits):
    model, x = served(made(1, pair), "nvfp4"), torch.randn(5, IN)
    function = compiler(model)
    function(x)
    graphs = compiler.graphs
    quire.refit(function, made(2, pair).state_dict())  # the name of the wrapper is in no state dict
    assert equal_bits(function(x), served(made(2, pair), "nvfp4")(x))
    quire.refit(model, torch.compile(made(3, pair)).state_dict())
    assert equal_bits(function(x), served(made(3, pair), "nvfp4")(x)) and compiler.graphs == graphs, compiler


def test_an_exported_program_shares_the_memory_and_a_loaded_one_is_refitted_itself(equal_bits):
    model, x, state = served(made(1, pair), "nvfp4"), torch.randn(5, IN), made(2, pair).state_dict()
    expected = served(made(2, pair), "nvfp4")(x)
    program = torch.export.export(model, (x,))
    module, file = program.module(), io.BytesIO()
    torch.export.save(program, file)
    quire.refit(model, state)
    assert equal_bits(module(x), expected) and equal_bits(program.module()(x), expected)
    file.seek(0)
    loaded = torch.export.load(file).module()
    assert not equal_bits(loaded(x), expected)
    quire.refit(loaded, state)
    assert equal_bits(loaded(x), expected)


class TiedInHighPrecision(torch.nn.Module):
    """An embedding and a head of one weight, of which the head is not converted."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = torch.nn.Embedding(300, IN), torch.nn.Linear(IN, IN)
        self.head = torch.nn.Linear(IN, 300)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids)))


#: The kind of a model, and its input.
PACKAGED = {
    "layers": (pair, torch.randn(5, IN)),
    "a tied weight in high precision": (TiedInHighPrecision, torch.arange(5)),
    "the model is the layer": (lambda: torch.nn.Linear(IN, 300), torch.randn(5, IN)),
}


def constants_of_the_page():
    """The function of docs/inference.md: name of a constant of a package -> the tensor of the model."""
    page = Path(__file__).parents[3] / "docs/inference.md"
    (function,) = re.findall(r"^```py\n(def constants\(.*?)\n\n\n", page.read_text(), re.DOTALL | re.MULTILINE)
    scope = {"quire": quire}
    exec(compile(function, str(page), "exec"), scope)
    return scope["constants"]


@pytest.mark.slow
@pytorch.aotinductor
@pytest.mark.parametrize(("kind", "x"), PACKAGED.values(), ids=PACKAGED)
def test_a_package_whose_constants_are_the_models_sees_the_new_weights(kind, x, equal_bits, tmp_path):
    constants = constants_of_the_page()
    options = {"filter": lambda module, name: name != "head"}
    model, state = served(made(1, kind), "nvfp4", **options), made(2, kind).state_dict()
    program = torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={"always_keep_tensor_constants": True},  # else scales of one element are numbers in its code
    )
    package = torch._inductor.aoti_load_package(path)
    old = package(x).clone()
    quire.refit(model, state)
    assert equal_bits(package(x), old)  # it has copies
    assert constants(model, package).keys() == {*package.get_constant_fqns()}
    package.load_constants(constants(model, package), check_full_update=True, user_managed=True)
    assert equal_bits(package(x), model(x))
    quire.refit(model, made(3, kind).state_dict())
    assert equal_bits(package(x), served(made(3, kind), "nvfp4", **options)(x))


@pytest.mark.slow
@pytest.mark.parametrize("freezing", [False, True])
def test_a_compiled_model_sees_the_new_weights_unless_inductor_freezes_it(freezing, equal_bits):
    model, x = served(made(1, pair), "nvfp4"), torch.randn(5, IN)
    torch._dynamo.reset()
    with torch._inductor.config.patch(freezing=freezing):
        compiled = torch.compile(model)
        compiled(x)
        quire.refit(model, made(2, pair).state_dict())
        assert equal_bits(compiled(x), model(x)) is not freezing
        torch._dynamo.reset()
        assert equal_bits(compiled(x), model(x))


# ------------------------------------------------------------ weights in files, and of several ranks


def test_files_are_read_by_name_with_the_names_that_files_have_for_experts(tmp_path):
    from safetensors.torch import save_file

    new = made(2)
    state = {name: value.contiguous() for name, value in new.state_dict().items()}
    for e in range(4):
        for name, layer in (("w1", "fc1"), ("w2", "fc2")):
            state[f"experts.experts.{e}.{name}.weight"] = state.pop(f"experts.{layer}.weight{e}")
    state["experts.gate.weight"] = state.pop("experts.router.weight")
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in shards.items():
        save_file({name: state[name] for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in shards.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = served(made(1), "mxfp8")
    quire.refit(model, tmp_path)
    assert_same_bytes(model, served(new, "mxfp8"))
    before = bytes_of(model)
    (tmp_path / "b.safetensors").write_bytes(b"no file")
    with pytest.raises(quire.io.CheckpointError):
        quire.refit(model, tmp_path)
    assert all(torch.equal(value, bytes_of(model)[name]) for name, value in before.items())


def test_a_file_of_codes_is_copied(tmp_path):
    other = served(made(2, pair), "mxfp8")
    quire.io.save(other, tmp_path / "codes", dialect="quire")
    model = served(made(1, pair), "mxfp8")
    report = quire.refit(model, tmp_path / "codes")
    assert report.copied and not report.quantized
    assert_same_bytes(model, other)


def test_ranks_give_the_shards_that_they_have(two):
    two.run(refit_ranks.shards_of_a_trainer_become_whole_weights)
    two.run(refit_ranks.a_rank_takes_its_own_experts)
    two.run(refit_ranks.a_layer_that_is_sharded_takes_its_part)


def test_a_rank_that_refuses_keeps_all_from_writing(two):
    two.run(refit_ranks.a_refusal_of_one_rank_is_that_of_all)


#: Of a weight [300, IN] in MXFP8: interleaved codes and scales have whole groups of 16 rows.
NBYTES = 304 * (IN + IN // 32)


def test_a_report_says_what_was_written():
    report = quire.refit(served(made(1, pair), "mxfp8"), {"0.weight": torch.ones(300, IN), "a": None}, strict=False)
    assert report.left == ("0.bias", "1.weight") and report.unused == ("a",) and report.nbytes == NBYTES
    assert str(report).splitlines() == [
        "refit: 0.0803 MB written: 1 quantized, 0 copied as codes, 0 in high precision",
        "  left: 0.bias, 1.weight",
        "  unused: a",
    ]
