"""Layers and autocast of quire.te take TransformerEngine's arguments, by name and by position."""

import functools
import inspect

import pytest
import torch

import quire
from quire import te
from quire.te.arguments import OVERLAPPING

pytestmark = pytest.mark.any_device

RECIPE = quire.recipe.NVFP4BlockScaling()


TE_LINEAR = "in_features out_features eps bias normalization init_method return_bias params_dtype device name"


TE_LINEAR += " fuse_wgrad_accumulation delay_wgrad_compute"


TE_MLP = "hidden_size ffn_hidden_size eps return_bias init_method bias normalization activation activation_params"


TE_MLP += " output_layer_init_method params_dtype return_layernorm_output zero_centered_gamma device name checkpoint"


TE_MLP += " fuse_wgrad_accumulation delay_wgrad_compute"


TE_PARALLEL = "sequence_parallel get_rng_state_tracker tp_group tp_size ub_overlap_ag ub_overlap_rs ub_overlap_rs_dgrad"


TE_PARALLEL += " ub_bulk_dgrad ub_bulk_wgrad symmetric_ar_type return_layernorm_output_gathered"


DEFAULTS = {"get_rng_state_tracker": None, "tp_group": None, "tp_size": 1, "symmetric_ar_type": None}


@pytest.mark.parametrize("module", [te.LayerNormLinear, te.LayerNormMLP])
def test_options_of_transformer_engine_are_taken_or_refused_by_name(module):
    make, names = functools.partial(module, 96, 400), TE_LINEAR if module is te.LayerNormLinear else TE_MLP
    assert set(names.split()) <= set(inspect.signature(module.__init__).parameters)
    for name in TE_PARALLEL.split():
        make(**{name: DEFAULTS.get(name, False)})
        with pytest.raises((NotImplementedError, TypeError), match=rf"{module.__name__}: {name}(=| must be)"):
            make(**{name: 2})
    with pytest.raises(TypeError, match="there is no option 'colour'; the options are"):
        make(colour=1)
    te.LayerNormMLP(96, 400, seq_length=128, micro_batch_size=2, set_parallel_mode=False)


@pytest.mark.cpu_only
def test_options_are_taken_by_position_in_transformer_engines_order():
    """Values are ones that only the right option takes: TransformerEngine's order after eps, up to device."""
    ones, dtype = torch.nn.init.ones_, torch.bfloat16
    linear = [False, True, None, 1, None, ones, False, "RMSNorm", True, dtype, None, True, False, None, True, "cpu"]
    module = te.LayerNormLinear(8, 4, 1e-3, *linear, delay_wgrad_compute=True)
    assert module.fuse_wgrad_accumulation and module.delay_wgrad_compute and module.return_bias
    assert module.bias is None and module.normalization == "RMSNorm" and module.return_layernorm_output
    assert module.weight.eq(1).all() and module.weight.dtype == dtype and module.layer_norm_weight.eq(0).all()
    mlp = [False, True, None, None, 1, ones, False, "RMSNorm", "clamped_swiglu", {"limit": 2.0}, torch.nn.init.zeros_]
    mlp += [
        True,
        dtype,
        True,
        False,
        16,
        2,
        False,
        True,
        "cpu",
        False,
        "mlp",
        False,
        False,
        False,
        False,
        True,
        None,
        True,
    ]
    module = te.LayerNormMLP(8, 16, 1e-3, *mlp)
    assert module.fuse_wgrad_accumulation and module.delay_wgrad_compute and module.return_bias and module.checkpoint
    assert module.fc1_bias is None and module.return_layernorm_output and module.name == "mlp" and module.eps == 1e-3
    assert module.fc1_weight.eq(1).all() and module.fc2_weight.eq(0).all() and module.fc1_weight.dtype == dtype
    with pytest.raises(TypeError, match="takes at most 32 positional arguments, got 33"):
        te.LayerNormMLP(8, 16, 1e-3, *mlp, None)
    with pytest.raises(TypeError, match="multiple values for (keyword )?argument 'sequence_parallel'"):
        te.LayerNormLinear(8, 4, 1e-3, False, sequence_parallel=False)
    with pytest.raises(NotImplementedError, match="LayerNormLinear: tp_size=2 without tp_group is not available"):
        te.LayerNormLinear(8, 4, 1e-3, False, False, None, 2)


@pytest.mark.parametrize("name", OVERLAPPING)
def test_an_option_that_is_not_available_is_refused_unless_it_asks_for_nothing(name):
    te.Linear(4, 4, **{name: OVERLAPPING[name]})
    with pytest.raises(NotImplementedError, match=f"quire.Linear: {name}=2 is not available in this version"):
        te.Linear(4, 4, **{name: 2})


TE_NORMS = {"layer": te.LayerNorm, "rms": te.RMSNorm}


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", TE_NORMS)
def test_the_signature_of_a_norm_is_transformer_engines(kind):
    signature = inspect.signature(TE_NORMS[kind].__init__).parameters
    names = ["normalized_shape", "eps", "sequence_parallel", "params_dtype", "zero_centered_gamma", "hidden_size"]
    defaults = [None, 1e-5, None, None, False, None]
    assert [signature[name].default for name in names] == defaults
    assert [name for name in signature if name in names] == names


@pytest.mark.parametrize("kind", TE_NORMS)
def test_a_norm_takes_the_options_that_only_transformer_engine_has(kind):
    assert TE_NORMS[kind](hidden_size=16, zero_centered_gamma=True).weight.eq(0).all()
    module = TE_NORMS[kind](16, sequence_parallel=True, params_dtype=torch.bfloat16, device="meta")
    assert module.weight.sequence_parallel and module.weight.is_meta and module.weight.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="normalized_shape and hidden_size are the same option"):
        TE_NORMS[kind]()
    with pytest.raises(TypeError, match="same option"):
        TE_NORMS[kind](4, hidden_size=4)


@pytest.mark.cpu_only
def test_arguments_of_autocast_have_transformer_engines_order():
    with te.autocast(True, False, RECIPE, None, False):
        assert quire.active_recipe() is RECIPE
    with pytest.raises(NotImplementedError, match="_graph=True is what TransformerEngine sets.*leave it False"):
        te.autocast(_graph=True)


@pytest.mark.cpu_only
def test_print_shows_where_a_layer_comes_from():
    layers = te.Linear(8, 8), te.LayerNorm(8), te.ops.Linear(8, 8), te.ops.GELU(), quire.Linear(8, 8)
    names = "quire.te.Linear", "quire.te.LayerNorm", "quire.te.ops.Linear", "quire.te.ops.GELU", "quire.Linear"
    assert [repr(layer).split("(")[0] for layer in layers] == list(names)
