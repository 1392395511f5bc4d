"""TransformerEngine's names for quire's own things."""

import contextlib
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quire
from quire import recipe as recipes
from quire import te


def test_scripts_find_every_name_in_every_module_that_transformer_engine_has():
    import quire.te as te
    import quire.te.pytorch
    from quire.te.common import recipe

    assert te.pytorch is quire.te.pytorch and te.common.recipe is recipe
    for module in (te, te.pytorch):
        assert all(getattr(module, name) is getattr(te.pytorch, name) for name in te.pytorch.__all__)
        with pytest.raises(AttributeError, match="quire.te.onnx_export is not available: .* Use torch.export"):
            _ = module.onnx_export
    from quire.te.pytorch.quantization import FP8GlobalStateManager, autocast
    from quire.te.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    from quire.te import recipe as same

    assert same is recipe and te.recipe is recipe and set(recipe.__all__) <= set(recipes.__all__)
    assert autocast is te.autocast and MXFP8Quantizer is te.MXFP8Quantizer
    assert FP8GlobalStateManager is te.FP8GlobalStateManager


#: Class -> the module that pickles name.
WHERE = {
    quire.Linear: "quire.nn.linear",
    quire.LayerNormLinear: "quire.nn.layernorm_linear",
    quire.LayerNormMLP: "quire.nn.layernorm_mlp",
    quire.GroupedLinear: "quire.nn.grouped_linear",
    quire.MoE: "quire.nn.moe",
    quire.RMSNorm: "quire.nn.norm",
    quire.QuantizedTensor: "quire.tensor.quantized",
    quire.QuantizedStack: "quire.tensor.stack",
    quire.QuantizedActivation: "quire.tensor.activation",
    quire.QuantSpec: "quire.tensor.spec",
    quire.TensorProto: "quire.tensor.buffers",
    recipes.NVFP4BlockScaling: "quire.recipe.nvfp4",
    recipes.MXFP8BlockScaling: "quire.recipe.block",
    recipes.DelayedScaling: "quire.recipe.per_tensor",
    recipes.CustomRecipe: "quire.recipe.custom",
    recipes.Format: "quire.recipe.base",
    quire.delayed.DelayedState: "quire.delayed.state",
}


@pytest.mark.parametrize("kind", WHERE, ids=lambda kind: kind.__name__)
def test_pickles_find_a_class_by_its_module(kind):
    assert pickle.loads(f"c{WHERE[kind]}\n{kind.__qualname__}\n.".encode()) is kind


def test_libraries_find_a_version_and_what_is_supported_under_older_names():
    from quire.te.pytorch import fp8

    assert int(te.__version__.partition(".")[0]) >= 2
    for name in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        assert getattr(fp8, f"check_{name}_support")() == getattr(te, f"is_{name}_available")(return_reason=True)


def test_the_error_of_fp8_autocast_names_its_own_keyword():
    with pytest.raises(TypeError, match="fp8_autocast: calibrating must be a bool.*is passed as fp8_recipe="):
        te.fp8_autocast(True, te.recipe.DelayedScaling())


def test_fp8_autocast_is_autocast_with_its_older_keywords(compiler):
    names = list(inspect.signature(te.fp8_autocast).parameters)
    assert names == ["enabled", "calibrating", "fp8_recipe", "fp8_group", "_graph"]
    assert quire.active_recipe() is None
    layer, x = quire.Linear(32, 32), torch.randn(4, 32)
    with quire.autocast(recipe=recipes.NVFP4BlockScaling()):
        expected = layer(x)
    with te.fp8_autocast(True, fp8_recipe=recipes.NVFP4BlockScaling()):
        assert torch.equal(layer(x), expected)
    with te.fp8_autocast(enabled=False):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))

    def inside(x):
        with te.fp8_autocast(enabled=True, fp8_recipe=recipes.NVFP4BlockScaling()):
            return layer(x)

    assert torch.equal(compiler(inside)(x), expected)
    with pytest.raises(NotImplementedError, match="_graph=True"):
        te.fp8_autocast(_graph=True)


@pytest.mark.parametrize("name", ["fp8", "fp8_block_scaling", "mxfp8", "nvfp4", "bf16"])
def test_availability_is_that_of_the_device(name):
    available = getattr(te, f"is_{name}_available")
    assert available() is True and available(return_reason=True) == (True, "")
    if not torch.cuda.is_available():
        answer, reason = available(return_reason=True, device="cuda")
        assert answer is False and reason and available(device="cuda") is False


@pytest.mark.parametrize(
    ("name", "rows"),  # TransformerEngine's quantization.py
    [("mxfp8", 32), ("nvfp4", 128), ("fp8_current", 16), ("fp8_block", 16), ("fp8_delayed", 16)],
)
def test_align_size_of_a_recipe(name, rows):
    recipe = recipes.from_name(name)
    assert quire.te.pytorch.get_align_size_for_quantization(recipe) == rows
    with quire.autocast(recipe=recipe):
        assert te.Fp8Padding(1).align_size == rows != te.Fp8Padding(1, 24).align_size == 24
    with pytest.raises(TypeError, match="get_align_size_for_quantization: recipe must be"):
        quire.te.pytorch.get_align_size_for_quantization(name)


def test_a_layer_tells_whether_it_has_biases():
    for bias in (False, True):
        layers = [quire.Linear(8, 8, bias=bias), quire.GroupedLinear(2, 8, 8, bias=bias)]
        layers += [quire.GroupedLinear(2, 8, 8, bias=bias, single_grouped_bias=True)]
        layers += [quire.LayerNormLinear(8, 8, bias=bias), quire.LayerNormMLP(8, 8, bias=bias)]
        layers += [te.Linear(8, 8, bias=bias, parameters_split=("q", "k"))]
        assert [layer.use_bias for layer in layers] == [bias] * len(layers)


def test_the_global_state_manager_tells_what_autocast_has_set(compiler):
    from quire.te.pytorch.fp8 import FP8GlobalStateManager as Manager

    def state():
        return Manager.is_fp8_enabled(), Manager.is_fp8_calibration(), Manager.get_fp8_recipe(), Manager.get_fp8_group()

    assert Manager.reset() is None and state() == (False, False, recipes.default(), None)
    with quire.autocast(recipe="nvfp4"):
        assert state() == (True, False, recipes.NVFP4BlockScaling(), None)
        with pytest.raises(RuntimeError, match="reset: an autocast is active"):
            Manager.reset()
        with quire.autocast(enabled=False, calibrating=True, recipe="fp8_delayed"):
            assert state() == (False, True, recipes.default(), None)
    assert state()[:2] == (False, False)
    assert Manager.is_nvfp4_available() == (True, "") == Manager.is_fp8_available()
    with pytest.raises(AttributeError, match="FP8GlobalStateManager.is_first_fp8_module is not available: .*Use"):
        Manager.is_first_fp8_module()

    def scaled(x):
        return x * 2 if Manager.is_fp8_enabled() else x

    compiled, x = compiler(scaled), torch.ones(2)
    assert compiled(x)[0] == 1
    with quire.autocast(recipe="mxfp8"):
        assert compiled(x)[0] == 2


def test_fp8_model_init_and_get_default_recipe():
    with te.fp8_model_init(enabled=True, recipe=recipes.MXFP8BlockScaling()):
        assert isinstance(quire.Linear(32, 32).weight, quire.QuantizedTensor)
    assert te.get_default_recipe() == recipes.default()


def test_dtype_has_transformer_engines_numbers():
    assert te.DType.kFloat8E4M3 == 7 and te.DType.kFloat8E5M2 == 8 and te.DType.kFloat4E2M1 == 10
    assert te.DType.kBFloat16 == 6 and len(te.DType) == 11


def test_a_tensor_parallel_group_of_more_than_one_process_is_refused_in_words():
    class Two:
        def size(self):
            return 2

    layer = quire.Linear(4, 4)
    layer.set_tensor_parallel_group(None)
    assert layer.weight_names == ("weight",)
    mlp = quire.LayerNormMLP(4, 8)
    assert mlp.weight_names == ("fc1_weight", "fc2_weight") and mlp.bias_names == ("fc1_bias", "fc2_bias")
    with pytest.raises(NotImplementedError, match=r"got a group of 2 ranks. Pass parallel=quire.distributed.Parallel"):
        layer.set_tensor_parallel_group(Two())


# Arguments and defaults as TransformerEngine documents them.
SIGNATURES = {
    te.autocast: "enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False",
    te.fp8_autocast: "enabled=True, calibrating=False, fp8_recipe=None, fp8_group=None, _graph=False",
    quire.quantized_model_init: "enabled=True, recipe=None, preserve_high_precision_init_val=False",
    te.fp8_model_init: "enabled=True, recipe=None, preserve_high_precision_init_val=False",
    te.is_fp8_available: "return_reason=False",
    te.get_default_recipe: "",
    te.Linear.forward: "inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False",
    te.Linear.reset_parameters: "defer_init=False",
    recipes.QParams: "power_2_scale=False, amax_epsilon=0.0, random_hadamard_transform=False, "
    "stochastic_rounding=False, fp4_2d_quantization=False",
    te.Float8Quantizer: "scale, amax, fp8_dtype, *, rowwise=True, columnwise=True",
    te.Float8CurrentScalingQuantizer: "fp8_dtype, device, *, rowwise=True, columnwise=True, "
    "use_existing_amax=False, with_amax_reduction=False, amax_reduction_group=None, force_pow_2_scales=False, "
    "amax_epsilon=0.0, scale=None, "
    "amax=None",
    te.MXFP8Quantizer: "fp8_dtype, *, rowwise=True, columnwise=True, with_2d_quantization=False",
    te.Float8BlockQuantizer: "fp8_dtype, *, rowwise=True, columnwise=True, amax_epsilon=0.0, "
    "force_pow_2_scales=True, block_scaling_dim=2",
    te.moe_permute: 'inp, routing_map, num_out_tokens, max_token_num=-1, map_type="mask"',
    te.moe_permute_with_probs: "inp, probs, routing_map, num_out_tokens",
    te.moe_permute_and_pad_with_probs: "inp, probs, routing_map, tokens_per_expert, align_size",
    te.moe_sort_chunks_by_index: "inp, split_sizes, sorted_index",
    te.moe_sort_chunks_by_index_with_probs: "inp, probs, split_sizes, sorted_index",
    te.fused_compute_score_for_moe_aux_loss: "logits, topk, score_function, "
    "routing_map_format=quire.te.RoutingMapFormat.BYTEMAP",
    te.Fp8Padding: "num_gemms, align_size=None",
    te.Fp8Padding.forward: "inp, m_splits",
    te.Fp8Unpadding: "num_gemms, align_size=None",
    te.Fp8Unpadding.forward: "inp, m_splits",
    te.Quantizer.quantize: "tensor, *, out=None, dtype=None",
    te.Quantizer.update_quantized: "src, dst, *, noop_flag=None",
    te.Quantizer.set_usage: "*, rowwise=None, columnwise=None",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signatures_begin_with_transformer_engines(function):
    wanted = eval(f"lambda {SIGNATURES[function]}: 0")
    own = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "args")]
    for theirs, ours in zip(inspect.signature(wanted).parameters.values(), own, strict=False):
        assert theirs.name in (ours.name, "inp") and theirs.kind == ours.kind
        assert theirs.default in (ours.default, inspect.Parameter.empty)
    assert len(own) >= len(inspect.signature(wanted).parameters)


NVFP4_QUANTIZER = {
    "fp4_dtype": te.DType.kFloat4E2M1,
    **dict.fromkeys(("rowwise", "columnwise", "with_random_sign_mask"), True),
    **dict.fromkeys(("with_amax_reduction", "with_rht", "with_post_rht_amax", "with_2d_quantization"), False),
    **dict.fromkeys(("stochastic_rounding", "row_scaled_nvfp4", "nvfp4_use_4over6"), False),
    **{"amax_reduction_group": None, "nvfp4_e4m3_max": 448, "nvfp4_4over6_err_mode": "MAE"},
}
LINEAR = {
    **dict.fromkeys(("sequence_parallel", "fuse_wgrad_accumulation", "return_bias", "delay_wgrad_compute"), False),
    **dict.fromkeys(("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"), False),
    **dict.fromkeys(("tp_group", "get_rng_state_tracker", "rng_tracker_name", "init_method", "params_dtype"), None),
    **dict.fromkeys(("parallel_mode", "parameters_split", "ub_name", "symmetric_ar_type", "name"), None),
    **{"tp_size": 1, "bias": True, "save_original_input": False, "device": "cpu"},
}


def test_all_defaults_of_transformer_engine_are_taken_by_name():
    assert te.Linear(8, 8, **LINEAR).weight.shape == (8, 8)
    made = te.NVFP4Quantizer(**NVFP4_QUANTIZER)
    assert repr(made) == repr(te.NVFP4Quantizer()) == "NVFP4Quantizer('nvfp4', rowwise=True, columnwise=True)"


def test_what_a_framework_passes_to_a_layer_of_one_process_asks_for_nothing():
    class One:
        def size(self):
            return 1

    alone = {"tp_group": One(), "tp_size": 1, "parallel_mode": "column", "sequence_parallel": True}
    assert te.Linear(8, 8, **alone).weight.shape == (8, 8)
    with pytest.raises(NotImplementedError, match="quire.Linear: tp_size=2 .* without get_rng_state_tracker"):
        te.Linear(8, 8, parallel_mode="column", tp_size=2)
    with pytest.raises(TypeError, match="quire.Linear: tp_group must be a process group .* got 2"):
        te.Linear(8, 8, parallel_mode="column", tp_group=2)
    with pytest.raises(NotImplementedError, match="parallel_mode='diagonal' is not available"):
        te.Linear(8, 8, parallel_mode="diagonal")


@pytest.mark.parametrize("name", recipes.names())
def test_classes_of_recipes_answer_which_they_are(name):
    predicates = ("delayed", "float8_current_scaling", "float8_block_scaling", "mxfp8", "nvfp4", "mxfp4", "custom")
    right = {"fp8_delayed": 0, "fp8_current": 1, "fp8_block": 2, "mxfp8": 3, "nvfp4": 4, "mxfp4": 5}[name]
    made = recipes.from_name(name)
    for asked in (made, type(made)):
        assert [getattr(asked, predicate)() for predicate in predicates] == [i == right for i in range(7)]
        assert asked.float8_per_tensor_scaling() == (right < 2)


def test_recipes_tell_their_parameters_in_transformer_engines_words():
    nvfp4 = recipes.NVFP4BlockScaling()
    assert nvfp4.fp4_quant_fwd_inp == recipes.QParams(random_hadamard_transform=True)
    assert nvfp4.fp4_quant_fwd_weight == recipes.QParams(fp4_2d_quantization=True)
    assert nvfp4.fp4_quant_bwd_grad == recipes.QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert recipes.Float8BlockScaling().fp8_quant_bwd_grad == recipes.QParams(power_2_scale=True)
    assert recipes.Float8CurrentScaling().fp8_quant_fwd_inp == recipes.QParams()
    assert recipes.Format.HYBRID.value.max_fwd == 448 and recipes.Format.HYBRID.value.max_bwd == 57344
    with pytest.raises(AttributeError):
        nvfp4.fp4_quant_fwd_inp = recipes.QParams()


@pytest.mark.parametrize("extra", [None, torch.empty(0, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)])
def test_a_checkpoint_with_extra_state_loads_strictly(extra, recwarn):
    model = torch.nn.Sequential(quire.Linear(4, 4), quire.LayerNormMLP(4, 4), quire.RMSNorm(4))
    saved = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    model.load_state_dict(saved | {f"{i}._extra_state": extra for i in range(3)})
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    said = [str(warning.message) for warning in recwarn if "_extra_state" in str(warning.message)]
    assert len(said) == (0 if extra is None or not len(extra) else 3)
    remedy = "quire.set_delayed_state(model, quire.io.te_states(model, state_dict))"
    assert all("not read" in words and remedy in words for words in said)
    with pytest.raises(RuntimeError, match="Unexpected key.*0.other_state"):
        model.load_state_dict(saved | {"0.other_state": extra})


def test_deferred_initialisation_leaves_parameters_alone():
    for module in (te.Linear(4, 4), te.LayerNormLinear(4, 4), te.LayerNormMLP(4, 4), te.LayerNorm(4)):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(3)
        module.reset_parameters(defer_init=True)
        assert all(torch.all(parameter == 3) for parameter in module.parameters())
        module.reset_parameters()
        assert not all(torch.all(parameter == 3) for parameter in module.parameters())


@pytest.fixture
def mesh(tmp_path):
    """Of this process alone."""
    if not torch.distributed.is_available():
        pytest.skip("this PyTorch has no torch.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("make", [lambda: quire.Linear(32, 32), lambda: quire.LayerNormLinear(32, 32)])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_delayed"])
def test_a_distributed_weight_and_a_plain_x_are_refused_in_words(make, grad, name, mesh):
    layer = make()
    weight = torch.distributed.tensor.distribute_tensor(
        layer.weight.detach(), mesh, [torch.distributed.tensor.Replicate()]
    )
    layer.weight = torch.nn.Parameter(weight)
    words = r"quire.(Linear|LayerNormLinear): weight is a DTensor with .*Replicate.*Use DistributedDataParallel"
    with torch.set_grad_enabled(grad), quire.autocast(recipe=recipes.from_name(name)):
        for context in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            with context, pytest.raises(NotImplementedError, match=words):
                layer(torch.randn(4, 32))


def output_of(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


CLASSES = """
import json, sys
import quire, quire.io, quire.functional, quire.quantization
def classes():
    modules = [module for name, module in [*sys.modules.items()] if name == "quire" or name.startswith("quire.")]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {kind: dict(vars(kind)) for kind in found if kind.__module__.startswith("quire")}
loaded = [name for name in sys.modules if name == "quire.te" or name.startswith("quire.te.")]
before = classes()
import quire.te
changed, new = [], []
for kind, own in before.items():
    changed += [f"{kind.__name__}.{name}" for name, value in own.items() if vars(kind).get(name) is not value]
    new += [f"{kind.__name__}.{name}" for name in vars(kind) if name not in own]
print(json.dumps([len(before), loaded, changed, sorted(new)]))
"""


def test_importing_quire_loads_none_of_it_and_importing_it_changes_no_class():
    """All that importing quire.te adds is what tensor_names.py names."""
    count, loaded, changed, new = json.loads(output_of(CLASSES))
    assert count > 80 and loaded == [] and changed == []
    stack = ["num_tensors", "quantized_tensors", "split_into_quantized_tensors"]
    assert new == [
        "QuantizedActivation.quantizer",
        *(f"QuantizedStack.{name}" for name in stack),
        "QuantizedTensor.quantizer",
    ]


def test_a_script_of_transformer_engine_runs_unchanged():
    script = (Path(__file__).parents[3] / "examples/te_script.py").read_text()
    theirs = script.replace("quire.te", "transformer_engine")
    assert theirs.count("transformer_engine") > script.count("transformer_engine")
    first = "import quire.te\nquire.te.import_as_transformer_engine()\n"
    assert output_of(first + theirs) == output_of(script) != ""
    late = "import sys, types\nsys.modules['transformer_engine'] = types.ModuleType('its own')\n" + first
    with pytest.raises(AssertionError, match="transformer_engine has been imported already; call this before"):
        output_of(late)


def test_modules_have_one_object_under_both_names():
    import quire.te.pytorch.attention.rope

    import quire.te.attention.rope

    assert quire.te.pytorch.attention.rope is quire.te.attention.rope
    assert quire.te.attention.rope.__spec__.name == "quire.te.attention.rope"
    with pytest.raises(ImportError):
        import quire.te.pytorch.no_such_module  # noqa: F401


@pytest.mark.parametrize(
    "statement",
    [
        "import quire.te.pytorch.optimizers",
        "from quire.te.pytorch.optimizers import FusedAdam",
        "from quire.te.pytorch import optimizers",
        "from quire.te import optimizers",
    ],
)
def test_an_import_of_an_absent_name_says_what_to_use(statement):
    with pytest.raises(ImportError, match=r"optimizers is not available: .* Use torch.optim.AdamW with fused=True"):
        exec(statement, {})
    assert not hasattr(quire.te.pytorch, "optimizers")
