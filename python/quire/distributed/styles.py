"""Styles for torch.distributed.tensor.parallel.parallelize_module: of linear layers, which gather codes and not values,
and of mixtures of experts."""

import dataclasses
from functools import partial

import torch
from torch import distributed

from quire.checks import check_type, check_type_or_none
from quire.distributed.experts import check_exchange
from quire.distributed.parallel import Parallel, check_reduce, refuse_quantized, sharded_dims
from quire.distributed.placements import check_own_parameter, is_dtensor
from quire.tensor import QuantizedActivation, QuantizedTensor

if distributed.is_available():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import (
        DTensor,
        Partial,
        Placement,
        Replicate,
        Shard,
        distribute_module,
        distribute_tensor,
    )
    from torch.distributed.tensor.parallel.style import ParallelStyle
else:
    ParallelStyle = object


class _Style(ParallelStyle):
    mode: str

    def __init__(
        self,
        *,
        input_layouts: "Placement | None" = None,
        output_layouts: "Placement | None" = None,
        use_local_output: bool = True,
        reduce: str = "",
        overlap: str | None = None,
    ) -> None:
        what = type(self).__name__
        if not distributed.is_available():
            raise RuntimeError(f"{what}: this PyTorch was built without torch.distributed; install one that has it")
        check_type_or_none(what, Placement, input_layouts=input_layouts, output_layouts=output_layouts)
        check_type(what, bool, use_local_output=use_local_output)
        check_reduce(what, reduce)
        if overlap not in (None, "ring"):
            raise ValueError(f"{what}: overlap must be None or 'ring', got {overlap!r}")
        self.input_layouts = input_layouts or (Replicate() if self.mode == "column" else Shard(-1))
        self.output_layouts, self.use_local_output, self.reduce = output_layouts, use_local_output, reduce
        self.overlap = overlap

    def _apply(self, module: torch.nn.Module, device_mesh: "DeviceMesh") -> torch.nn.Module:
        """Shards a module. parallelize_module() calls it."""
        what = f"{type(self).__name__} of a {type(module).__name__}"
        _check_mesh(what, device_mesh, "tp")
        dims = _dims(what, module, self.mode)
        _check_parameters(what, module, dims, device_mesh.size())
        output = self.output_layouts or self._default_output(module)
        sequence = (self.input_layouts if self.mode == "column" else output) == Shard(0)
        if self.overlap is not None and not sequence:
            raise ValueError(
                f"{what}: overlap={self.overlap!r} exchanges tokens in pieces, and goes with "
                f"{'input' if self.mode == 'column' else 'output'}_layouts=Shard(0); got {self}"
            )
        how = {"sequence": sequence, "reduce": self.reduce, "overlap": self.overlap}
        distribute_module(
            module,
            device_mesh,
            partial(_shard, dims, self.src_data_rank),
            partial(_input, self.mode, self.input_layouts),
            partial(_output, output, self.use_local_output),
        )
        if _of_quire(module):
            for product in module.products:
                module.set_sharding(product, dataclasses.replace(module.of(product, "parallel"), **how))
        elif type(module) is torch.nn.Linear:  # quire.convert reads it
            module.parallel = Parallel(self.mode, device_mesh.get_group(), **how)
        return module

    def _default_output(self, module: torch.nn.Module) -> "Placement":
        if _of_quire(module) and len(module.products) > 1:
            return self.input_layouts
        return Shard(-1) if self.mode == "column" else Replicate()

    def __repr__(self) -> str:
        layouts = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        more = f", reduce={self.reduce!r}" if self.reduce else ""
        more += f", overlap={self.overlap!r}" if self.overlap else ""
        return f"{type(self).__name__}({layouts}, use_local_output={self.use_local_output}{more})"


class ColumnParallel(_Style):
    """A style for parallelize_module, like PyTorch's ColwiseParallel: it shards a layer over the ranks of a mesh. It
    shards the outputs of a quire.Linear, quire.LayerNormLinear or torch.nn.Linear, and the inner features of a
    quire.LayerNormMLP.

    Parameters become DTensors: weights Shard(0) (fc2_weight Shard(1)), biases Shard(0), others Replicate(). A
    torch.nn.Linear computes in high precision until quire.convert converts it.

    Args:
        input_layouts: how x is sharded if it is a plain tensor. Replicate(), or None: not at all. Shard(dim): by
            tokens. The layer gathers codes of x with Shard(0), and x itself with another dim. A DTensor x has its own
            placements.
        output_layouts: how the result is sharded. None: Shard(-1), or for a LayerNormMLP the same as input_layouts.
        use_local_output: True: the result is a plain tensor, this rank's shard. False: it is a DTensor.
        reduce: how the gradient of x is summed (Parallel). For a LayerNormMLP, how y is summed, too.
        overlap: "ring" exchanges tokens in pieces (Parallel). It needs Shard(0).

    Raises:
        NotImplementedError: for other modules, for a gated LayerNormMLP and for quantized weights.
        TypeError: for an argument of another type.
        ValueError: for a reduce or an overlap that a Parallel does not take. When the style is applied: if sizes are
            not multiples of the mesh's size, and for a mesh of several dimensions. The module is then unchanged.
    """

    mode = "column"


class RowParallel(_Style):
    """A style for parallelize_module, like PyTorch's RowwiseParallel: it shards the inputs of a quire.Linear or
    torch.nn.Linear over the ranks of a mesh.

    The weight becomes a DTensor Shard(1), the bias Replicate(). Raises the errors of ColumnParallel, and ValueError for
    a LayerNormLinear or LayerNormMLP.

    Args:
        input_layouts: how x is sharded if it is a plain tensor. None: Shard(-1). A DTensor x has its own placements.
        output_layouts: how the result is sharded. Replicate(), or None: not at all. Shard(dim): by tokens. With
            Shard(0) the result is reduced and scattered, and codes of its gradient are gathered. With another dim an
            all-reduce sums the whole result.
        use_local_output: True: the result is a plain tensor, this rank's shard. False: it is a DTensor.
        reduce: how y is summed (Parallel).
        overlap: "ring" exchanges tokens in pieces (Parallel). It needs output_layouts=Shard(0).
    """

    mode = "row"


class ExpertParallel(ParallelStyle):
    """A style for parallelize_module: it shards the experts of a quire.MoE over the ranks of a mesh, as MoE(ep_group=)
    does. Over a mesh of two dimensions it shards the experts along the first one, and each expert along the second one,
    as MoE(ep_group=, tp_group=) does. But shared experts stay whole.

    Each rank keeps the parameters of its experts as plain tensors. Their names, such as fc1.weight4, differ between
    ranks. With single_grouped_weight the parameter becomes a DTensor Shard(0). The router and shared experts are whole
    on every rank. x and y are plain tensors with this rank's tokens.

    Args:
        capacity: ep_capacity of quire.MoE.
        overflow: ep_overflow of quire.MoE.
        dispatch: ep_dispatch of quire.MoE.

    Raises:
        NotImplementedError: for another module, for quantized experts, and for parameters that are DTensors already.
        TypeError: for a capacity of another type.
        ValueError: for a capacity less than 1, for another overflow or dispatch. When the style is applied: if the
            number of experts is not a multiple of the number of ranks, and for a mesh of more than two dimensions. The
            module is then unchanged.
    """

    def __init__(self, *, capacity: int | None = None, overflow: str = "raise", dispatch: str = "values") -> None:
        if not distributed.is_available():
            raise RuntimeError("ExpertParallel: this PyTorch was built without torch.distributed; install one with it")
        check_exchange("ExpertParallel", capacity, overflow, dispatch)
        self.exchange = {"capacity": capacity, "overflow": overflow, "dispatch": dispatch}

    def _apply(self, module: torch.nn.Module, device_mesh: "DeviceMesh") -> torch.nn.Module:
        """Shards a module. parallelize_module() calls it."""
        what = f"ExpertParallel of a {type(module).__name__}"
        over_two = device_mesh.ndim == 2
        if not over_two:
            _check_mesh(what, device_mesh, "ep")
        if not hasattr(module, "shard_experts"):
            raise NotImplementedError(f"{what}: only a quire.MoE has experts that can be sharded")

        def shard(parameter: torch.Tensor) -> torch.Tensor:
            return distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)

        tp_group = device_mesh.get_group(1) if over_two else None
        module.shard_experts(device_mesh.get_group(0), shard, self.src_data_rank, tp_group=tp_group, **self.exchange)
        return module

    def __repr__(self) -> str:
        return f"ExpertParallel({', '.join(f'{name}={value!r}' for name, value in self.exchange.items())})"


def _check_mesh(what: str, mesh: "DeviceMesh", name: str) -> None:
    if mesh.ndim != 1:
        raise ValueError(f"{what}: device_mesh must have one dimension, such as mesh[{name!r}], got {mesh}")


def _of_quire(module: torch.nn.Module) -> bool:
    return hasattr(module, "sharded_dims")


def _dims(what: str, module: torch.nn.Module, mode: str) -> dict[str, int | None]:
    """Parameter -> the dimension along which it is sharded; None: not at all."""
    if _of_quire(module):
        return module.sharded_dims(mode)
    if isinstance(module, torch.nn.Linear):
        return sharded_dims(mode)
    raise NotImplementedError(
        f"{what}: only layers with a weight [out_features, in_features] can be sharded; use it for a quire.Linear, "
        "torch.nn.Linear, quire.LayerNormLinear or quire.LayerNormMLP"
    )


def _check_parameters(what: str, module: torch.nn.Module, dims: dict[str, int | None], size: int) -> None:
    for name, dim in dims.items():
        parameter = getattr(module, name)
        if parameter is not None:
            check_own_parameter(f"{what}: {name}", module, name)
        if isinstance(parameter, QuantizedTensor):
            refuse_quantized(what, name)
        if is_dtensor(parameter):
            raise ValueError(f"{what}: {name} is a DTensor already, with {parameter.placements}; shard a layer once")
        if _of_quire(module) and parameter is not None and dim is not None and parameter.shape[dim] % size:
            raise ValueError(
                f"{what}: the sizes of {name} {list(parameter.shape)} along dimension {dim} must be a multiple of the "
                f"{size} ranks of the mesh; choose another size or another mesh"
            )


def _shard(
    dims: "dict[str, int | None]", source: int | None, name: str, module: torch.nn.Module, mesh: "DeviceMesh"
) -> None:
    for parameter_name, dim in dims.items() if not name else ():
        parameter = getattr(module, parameter_name)
        if parameter is not None:
            placement = Replicate() if dim is None else Shard(dim)
            placed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=source)
            module.register_parameter(parameter_name, torch.nn.Parameter(placed, parameter.requires_grad))


def _input(
    mode: str, layout: "Placement", module: torch.nn.Module, inputs: tuple[object, ...], mesh: "DeviceMesh"
) -> tuple[object, ...]:
    if not inputs:
        raise TypeError(f"{type(module).__name__}, sharded by a style: pass x by position")
    x = inputs[0]
    if isinstance(x, QuantizedTensor | QuantizedActivation):
        return inputs  # which the layer refuses
    if not is_dtensor(x):
        if _of_quire(module) and _computes_from(module.of(module.products[0], "parallel"), layout, x):
            return inputs
        x = DTensor.from_local(x, mesh, (layout,), run_check=False)
    if not _of_quire(module):
        x = x.redistribute(placements=(Replicate() if mode == "column" else Shard(-1),))
    return (x, *inputs[1:])


def _computes_from(parallel: Parallel, layout: "Placement", x: torch.Tensor) -> bool:
    """Whether a layer takes a plain x of that layout as it is."""
    if parallel.mode == "column":
        return layout.is_replicate() or (layout == Shard(0) and x.dim() > 1)
    whole_tokens = not parallel.sequence or (x.dim() > 1 and x.shape[0] % parallel.size == 0)
    return layout in (Shard(-1), Shard(x.dim() - 1)) and whole_tokens


def _output(
    layout: "Placement", to_local: bool, module: torch.nn.Module, outputs: object, mesh: "DeviceMesh"
) -> object:
    y, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    if layout == Shard(-1):
        layout = Shard(y.dim() - 1)
    if not is_dtensor(y):
        computed = _computed(module, y)
        if computed != layout or not to_local:
            y = DTensor.from_local(y, mesh, (computed,), run_check=False)
    if is_dtensor(y):
        y = y.redistribute(placements=(layout,)) if y.placements != (layout,) else y
        y = y.to_local() if to_local else y
    if not isinstance(outputs, tuple):
        return y
    return (y, *(_part_beside(other, layout) if to_local else other for other in others))


def _computed(module: torch.nn.Module, y: torch.Tensor) -> "Placement":
    """The placement of a plain result."""
    parallel = module.of(module.products[-1], "parallel")
    if parallel.mode == "column":
        return Shard(y.dim() - 1)
    return Shard(0) if parallel.sequence else Replicate()


def _part_beside(t: object, layout: "Placement") -> object:
    """This rank's shard of a bias or of a norm's result, which is returned beside y of that layout."""
    if not is_dtensor(t):
        return t
    partial_sums = t.dim() == 1 and t.placements[0].is_replicate() and layout.is_shard()
    return t.to_local(grad_placements=(Partial(),) if partial_sums else None)
