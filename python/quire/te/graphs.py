"""make_graphed_callables, by torch.compile."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from quire.autocast import active_recipe, autocast
from quire.recipe import Recipe
from quire.te.arguments import refuse

#: Older names of options.
_OLDER = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
}
#: Options for captures and memory of CUDA graphs. They have no effect here.
_OF_CUDA_GRAPHS = (
    "num_warmup_iters allow_unused_input sample_kwargs cache_quantized_params _order _num_layers_per_chunk pool "
    "retain_graph_in_backward _reuse_graph_input_output_buffers clone_param_grads_on_return"
).split()
_HOOKS = {"pre_warmup_hook": None, "post_warmup_hook": None, "capture_time_hooks": None}
_WHAT = "make_graphed_callables"


def make_graphed_callables(
    modules: Callable[..., Any] | tuple[Callable[..., Any], ...],
    sample_args: object = None,
    num_warmup_iters: int = 3,
    *,
    enabled: bool | tuple[bool, ...] | None = None,
    recipe: Recipe | str | None = None,
    calibrating: bool | None = None,
    amax_reduction_group: object = None,
    **options: Any,
) -> Callable[..., Any] | tuple[Callable[..., Any], ...]:
    """Callables that run as whole graphs of torch.compile(fullgraph=True). A module stays the same object, with the
    same parameters and keys; other callables are wrapped. A tuple gives a tuple. A copy of a module is such a module
    too; one that was pickled and loaded runs in eager mode.

    enabled, recipe, calibrating, amax_reduction_group: of the autocast in which they run where no recipe is active at
        the call; enabled can be a tuple, one for each. An active recipe takes precedence.
    sample_args and all other options of TransformerEngine are of no effect: the first call compiles, for its own
    arguments. is_first_microbatch is passed to forward as usual. Hooks raise NotImplementedError, unknown options
    TypeError.
    """
    given = {"enabled": enabled, "recipe": recipe, "calibrating": calibrating}
    given["amax_reduction_group"] = amax_reduction_group
    for older, name in _OLDER.items():
        value = options.pop(older, None)
        if value is not None and given.get(name) is not None:
            raise TypeError(f"{_WHAT}: {older} and {name} are the same option; pass one of them")
        given[name] = given.get(name) if value is None else value
    refuse(_WHAT, {name: value for name, value in options.items() if name in _HOOKS}, _HOOKS)
    if unknown := [name for name in options if name not in (*_OF_CUDA_GRAPHS, *_HOOKS)]:
        raise TypeError(f"{_WHAT}: {unknown[0]!r} is not one of its options")
    each = modules if isinstance(modules, tuple) else (modules,)
    on = given["enabled"] if isinstance(given["enabled"], tuple) else (given["enabled"],) * len(each)
    if len(on) != len(each):
        raise ValueError(f"{_WHAT}: enabled must be one bool or one for each of {len(each)} callables, got {len(on)}")
    options = {"recipe": given["recipe"], "amax_reduction_group": given["amax_reduction_group"]}
    options["calibrating"] = bool(given["calibrating"])
    made = tuple([_graphed(one, enabled=bool(own), **options) for one, own in zip(each, on, strict=True)])
    return made if isinstance(modules, tuple) else made[0]


def _graphed(function: Callable[..., Any], **context: Any) -> Callable[..., Any]:
    if not isinstance(function, torch.nn.Module):
        return _compiled(function, context)
    own = function.forward
    if getattr(own, "__self__", None) is function:  # a bound method again, which a copy of the module binds to itself
        function.forward = types.MethodType(_compiled(own.__func__, context), function)
    else:
        function.forward = _compiled(own, context)
    return function


def _of_its_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo counts compilations for each code object, and refuses the ninth. All layers of a class have one."""
    if not isinstance(function, types.FunctionType):
        return function
    code, name = function.__code__.replace(), function.__name__
    copied = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return functools.update_wrapper(copied, function, functools.WRAPPER_ASSIGNMENTS + ("__kwdefaults__",))


def _compiled(function: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    compiled = torch.compile(_of_its_own_code(function), fullgraph=True)

    @functools.wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        if active_recipe() is not None or not (context["enabled"] or context["calibrating"]):
            return compiled(*args, **keywords)
        with autocast(**context):
            return compiled(*args, **keywords)

    return run
