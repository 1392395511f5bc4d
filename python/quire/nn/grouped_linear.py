"""The linear layers of groups of tokens, such as the experts of a mixture, as one layer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.checks import check_sizes, check_type, check_type_or_none, describe, with_known_options
from quire.distributed import check_ranks
from quire.distributed.experts import ExpertGroup
from quire.distributed.parallel import Parallel
from quire.distributed.placements import is_dtensor, local, part_for
from quire.nn.layer_base import check_factory, initialise, name_layer
from quire.nn.product import Product, active_call
from quire.nn.product_module import Parameters, ProductModule, Sharding, check_bias, checked_recipe
from quire.recipe import Recipe
from quire.tensor import QuantizedStack, QuantizedTensor


class GroupedLinear(ProductModule):
    """For each of num_gemms groups of tokens y = x w^T + bias, with a separate weight and bias for each group. The
    active recipe determines the quantization (quire.autocast); without a recipe the layer computes in high precision.
    The tokens of each group get the same bits as from a quire.Linear with the weight of that group; on CUDA devices
    groups have kernels of their own, and the bits can differ within the bounds of numerics.md 7.5 to 7.7.

    weight0, bias0, weight1, ..., in this order: [out_features, in_features] and [out_features], in params_dtype (or
    `dtype`; None: torch's default), initialised as in torch.nn.Linear. With single_grouped_weight there is one
    parameter `weight` [num_gemms, out_features, in_features], within quantized_model_init a QuantizedStack. With
    single_grouped_bias there is one `bias` [num_gemms, out_features]. A state dict of either form loads into either
    form.

    `sr_state` is as in quire.Linear; group e rounds with seed + e (numerics.md 0.19). `delayed` has the slots of each
    group.

    Args:
        num_gemms: the number of groups.
        in_features: as for quire.Linear.
        out_features: as for quire.Linear.
        bias: as for quire.Linear, for each group.
        params_dtype: as for quire.Linear.
        device: as for quire.Linear.
        dtype: as for quire.Linear.
        init_method: called with each weight; biases are then 0.
        return_bias: forward returns (y, [biases]), or (y, bias) with single_grouped_bias, and y does not include them.
        single_grouped_weight: whether the weights are one parameter of three dimensions.
        single_grouped_bias: whether the biases are one parameter of two dimensions.
        fuse_wgrad_accumulation: as for quire.Linear, for each weight.
        delay_wgrad_compute: as for quire.Linear, for each weight.
        save_original_input: as for quire.Linear.
        recipe: used outside of any quire.autocast; None is high precision. Delayed scaling is not allowed.
        name: an attribute for the caller; quire does not use it.
        ep_group: a process group, or its name (quire.distributed.name_group). Each of its ranks has an equal number of
            consecutive groups, and only their parameters. Their names are those that they have in one process: of four
            groups, the second of two ranks has weight2 and weight3. With single_grouped_weight it has `weight`
            [num_gemms / size, out_features, in_features]. x and m_splits are those of this rank's groups. A rank can
            load the state dict of one process. This layer sends no rows; quire.MoE does.
        parallel: how each weight is sharded over ranks (quire.distributed.Parallel, without sequence). in_features and
            out_features are those of the whole weight. x has all features, or for mode "row" this rank's features.
            m_splits are the same on all ranks. The first rank adds the bias of a "row" layer to its result, before the
            sum.

    Raises:
        TypeError: for an unknown option, and for a value of the wrong type. bias is a bool; a recipe goes to recipe=.
        ValueError: if num_gemms is less than 1 or no multiple of the number of ranks of ep_group, for a size below 0,
            if recipe has an unknown name or is delayed, and for sizes or options that parallel does not take.
        RuntimeError: as for quire.Linear.

    Shape:
        - x: `[*, in_features]`. Its rows are the tokens of the first group, then those of the second one, and so on.
        - y: `[*, out_features]`.

    Examples:
        >>> layer = quire.GroupedLinear(2, 64, 96)
        >>> layer(torch.randn(32, 64), [20, 12]).shape
        torch.Size([32, 96])
    """

    #: How each weight is a part of a larger one, of which this rank draws all and keeps its part.
    drawn_as: Parallel | None = None

    @with_known_options
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init_method: Callable[[torch.Tensor], object] | None = None,
        return_bias: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        recipe: Recipe | str | None = None,
        name: str | None = None,
        ep_group: "torch.distributed.ProcessGroup | str | None" = None,
        parallel: Parallel | None = None,
    ) -> None:
        check_type("quire.GroupedLinear", int, num_gemms=num_gemms)
        if num_gemms < 1:
            raise ValueError(f"quire.GroupedLinear: num_gemms must be at least 1, got {num_gemms}")
        check_bias("quire.GroupedLinear", bias)
        flags = {"return_bias": return_bias, "single_grouped_weight": single_grouped_weight}
        flags |= {"fuse_wgrad_accumulation": fuse_wgrad_accumulation, "delay_wgrad_compute": delay_wgrad_compute}
        flags["save_original_input"] = save_original_input
        check_type("quire.GroupedLinear", bool, single_grouped_bias=single_grouped_bias, **flags)
        check_factory("quire.GroupedLinear", device, params_dtype=params_dtype, dtype=dtype)
        check_sizes("quire.GroupedLinear", in_features=in_features, out_features=out_features)
        check_type_or_none("quire.GroupedLinear", Callable, init_method=init_method)
        recipe = checked_recipe("quire.GroupedLinear", recipe)
        check_type_or_none("quire.GroupedLinear", Parallel, parallel=parallel)
        _check_parallel(parallel, single_grouped_weight and ep_group is not None, single_grouped_bias and bias)
        super().__init__()
        self.num_gemms = self.groups = num_gemms
        if ep_group is not None:
            self.expert_group = ExpertGroup.of("quire.GroupedLinear", ep_group, num_gemms)
            self.groups = self.expert_group.each
        if parallel is not None:
            in_features, out_features = parallel.sizes("quire.GroupedLinear", in_features, out_features)
            self.parallel = self.drawn_as = parallel
        self.in_features, self.out_features = in_features, out_features
        self.init_method, self.return_bias, self.name = init_method, return_bias, name
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.save_original_input, self.recipe = save_original_input, recipe
        factory = {"dtype": params_dtype if dtype is None else dtype, "device": device}
        sizes = {"weight": (out_features, in_features)} | ({"bias": (out_features,)} if bias else {})
        self._add(sizes, {"weight": single_grouped_weight, "bias": single_grouped_bias}, factory)
        self._add_states()
        self.reset_parameters()
        self._quantize_weights()

    def _add(self, sizes: dict[str, tuple[int, ...]], single: dict[str, bool], factory: dict[str, object]) -> None:
        """Parameters, uninitialised. Optimizers number their state by the order: group after group, then those that
        all groups share."""
        each = [(f"{kind}{group}", kind, ()) for group in self.own_groups() for kind in sizes if not single[kind]]
        for name, kind, groups in (*each, *((kind, kind, (self.groups,)) for kind in sizes if single[kind])):
            self.register_parameter(name, torch.nn.Parameter(torch.empty((*groups, *sizes[kind]), **factory)))
        self._find_names()

    @property
    def single_grouped_weight(self) -> bool:
        """Whether all groups have one weight."""
        return "weight" in self._parameters

    @property
    def single_grouped_bias(self) -> bool:
        """Whether all groups have one bias."""
        return "bias" in self._parameters

    def _find_names(self) -> None:
        of_kind = [tuple(name for name in self._parameters if name.startswith(kind)) for kind in ("weight", "bias")]
        self.weight_names, self.bias_names = of_kind

    def own_groups(self) -> range:
        """The groups that this rank has."""
        return range(self.num_gemms) if self.expert_group is None else self.expert_group.own()

    def weights(self, product: str, parameters: Parameters | None = None) -> dict[str, torch.Tensor]:
        """Name -> parameter: one for each group, or one for all groups. parameters: as for ProductModule.weights()."""
        return {name: self.parameter(name) if parameters is None else parameters[name] for name in self.weight_names}

    def biases(self, product: str = "", parameters: Parameters | None = None) -> list[torch.Tensor]:
        """One for each group, or one for all groups, or none. parameters: as for weights()."""
        return [self.parameter(name) if parameters is None else parameters[name] for name in self.bias_names]

    def reset_parameters(self) -> None:
        """Initialises the weights as torch.nn.Linear or by init_method, and sets a new seed with the counter at 0. A
        rank draws the weights of other ranks too, one after the other, so that ranks together have what one
        process has after the same seed."""
        weights, own = self.group_weights(""), self.own_groups()
        biases = [local(bias) for bias in self.biases()]
        if biases and biases[0].dim() == 2:
            biases = list(biases[0].unbind())
        first = weights[0]  # of all groups
        with torch.no_grad():
            for group in range(self.num_gemms):
                if group in own:
                    bias = biases[group - own.start] if biases else None
                    initialise(weights[group - own.start], bias, self.init_method, self.drawn_as)
                elif not weights[0].is_meta:
                    like = (weights[0], *biases[:1])  # which may be quantized
                    others = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in like]
                    initialise(others[0], others[1] if biases else None, self.init_method, self.drawn_as)
                    first = others[0] if group == 0 else first
        if self.expert_group is not None and not isinstance(weights[0], QuantizedTensor):
            check_ranks.note_drawn(next(iter(self.weights("").values())), first)
        self._reset_sr_states()

    def _reset_sr_states(self) -> None:
        super()._reset_sr_states()
        self.sr_state[:1] += self.first_stream()
        if self.parallel is not None and self.expert_group is not None:
            self._share_stream()

    def _share_stream(self) -> None:
        """Parts of one weight get the random stream of the first of them. All ranks must call it."""
        shared = torch.cat([self.sr_state, self.sr_state.new_tensor([self.stream])])
        self.parallel.share_first(shared)
        if not shared.is_meta:
            self.sr_state.copy_(shared[:2])
            self.stream = int(shared[2])

    def first_stream(self) -> int:
        """Group e of all groups rounds with seed + e."""
        return self.own_groups().start

    def take_stream(self) -> int:
        """As for other layers; all ranks of ep_group draw from one stream, whichever data they compute on."""
        if self.expert_group is None:
            return super().take_stream()
        self.stream = self.expert_group.first_rank()
        return self.stream

    def own_parts(self) -> dict[str, Sharding]:
        """Parameters and static scales that other ranks have under the same name, with other values."""
        if self.expert_group is None:
            return self._parts_of_groups()
        found: dict[str, Sharding] = dict.fromkeys(self.input_scales(), self.expert_group)
        if self.drawn_as is not None:  # each group has a parameter, whose name no other rank of ep_group has
            return found | self._parts_of_groups()
        stacked = [name for name in ("weight", "bias") if name in self._parameters]
        return found | {name: self.expert_group for name in stacked if not is_dtensor(self._parameters[name])}

    def _parts_of_groups(self) -> dict[str, Sharding]:
        if self.drawn_as is None:
            return {}
        column_biases = self.bias_names if self.drawn_as.mode == "column" else ()
        return dict.fromkeys((*self.weight_names, *column_biases), self.drawn_as)

    def check_unsharded(self, parallel: Parallel | None = None) -> None:
        """Raises NotImplementedError for parameters that shard_groups() does not take, or, if there is `parallel`,
        shard_each_weight() behind it; ValueError for sizes that it does not take."""
        if parallel is not None:
            stacked = [name in self._parameters for name in ("weight", "bias")]
            _check_parallel(parallel, *stacked)
            parallel.sizes("quire.GroupedLinear", self.in_features, self.out_features)
        for name, parameter in self._parameters.items():
            if isinstance(parameter, QuantizedTensor) or is_dtensor(parameter):
                raise NotImplementedError(
                    f"quire.GroupedLinear: {name} must be a plain parameter to be sharded over ranks, got a "
                    f"{type(parameter).__name__}; shard the layer before fully_shard, or make it with ep_group= "
                    "within quire.quantized_model_init"
                )

    def shard_groups(
        self, experts: ExpertGroup, shard: Callable[[torch.Tensor], torch.Tensor], source: int | None
    ) -> None:
        """Keeps the groups of this rank, of all that it has. All ranks must call it.

        shard: makes a parameter of all groups a DTensor. source: the rank of the group whose values the others take;
        None: their own.
        """
        self.expert_group, self.groups, own = experts, experts.each, experts.own()
        for name, parameter in list(self._parameters.items()):
            if name in ("weight", "bias"):
                self._parameters[name] = torch.nn.Parameter(shard(parameter.detach()), parameter.requires_grad)
                continue
            if source is not None:
                experts.broadcast(parameter.detach(), source)
            if int(name.removeprefix("weight").removeprefix("bias")) not in own:
                del self._parameters[name]
        for name in self.input_scales():
            scale = self._buffers[name]
            if source is not None:
                experts.broadcast(scale, source)
            self._buffers[name] = scale[own.start : own.stop].clone()
        self._find_names()
        self.delayed = self.new_delayed_state()
        if source is not None:
            shared = torch.cat([self.sr_state, self.sr_state.new_tensor([self.stream])])
            experts.broadcast(shared, source)
            self.sr_state.copy_(shared[:2])
            self.stream = self.stream if shared.is_meta else int(shared[2])
        self.sr_state[:1] += own.start
        self._forget_weights()

    def shard_each_weight(self, parallel: Parallel, source: int | None) -> None:
        """Keeps this rank's shard of the weight of each group, of whole ones. All ranks must call it. source:
        0, the values of the first rank; None, each its own."""
        if source is not None:
            for t in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
                parallel.share_first(t.detach())
        for name in (*self.weight_names, *self.bias_names):
            whole, wanted = self._parameters[name].detach(), self._parameters[name].requires_grad
            part = parallel.part_of(whole, bias=name in self.bias_names)
            self._parameters[name] = torch.nn.Parameter(part.clone(), wanted)
        self.in_features, self.out_features = parallel.sizes("quire.GroupedLinear", self.in_features, self.out_features)
        self.parallel = self.drawn_as = parallel
        self.has_parts, self.part = True, parallel.place(self.sr_state.device)
        self._share_stream()
        self._forget_weights()

    def forward(
        self,
        x: torch.Tensor,
        m_splits: torch.Tensor | Sequence[int],
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor] | torch.Tensor]:
        """x `[*, in_features]`, whose rows are sorted by group -> `[*, out_features]`.

        The dtype of the result is as for quire.Linear.

        Args:
            x: `[*, in_features]`, whose rows are sorted by group: a plain tensor or a QuantizedTensor.
            m_splits: the number of rows of each group, an integer tensor [num_gemms] (which stays on its device; the
                host reads no value of it) or a list. Groups can be empty. Rows after the last group belong to no group,
                give zero and get a zero gradient.
            is_first_microbatch: as for quire.Linear.
            out: contiguous memory for y, [rows of x, out_features] or of y's shape, in y's dtype. It must not need a
                gradient or share memory with another argument. Its rows after the last group stay as they are. The
                result is a view of it (in a compiled function a copy), and `out` itself gets no gradient: it can be
                passed again.
            dgrad_out: the same for dx, [rows of x, in_features] or of x's shape; the backward pass copies dx there.
                This is the dx of this matmul only; autograd adds other gradients of x elsewhere. Not used if x needs no
                gradient.

        Raises:
            NotImplementedError: with parallel=, for out and dgrad_out.
            RuntimeError: if shapes or devices do not fit, and if the sum of m_splits exceeds the rows of x. Otherwise
                as quire.Linear.forward.
            TypeError: for a QuantizedActivation, if dtypes do not fit, and if m_splits are not integers.
            ValueError: if out or dgrad_out has another shape.
        """
        try:
            check_type("quire.GroupedLinear.forward", torch.Tensor, x=x)
            check_type_or_none("quire.GroupedLinear.forward", torch.Tensor, out=out, dgrad_out=dgrad_out)
            check_memory(x, out=(out, self.out_features), dgrad_out=(dgrad_out, self.in_features))
            product = Product(self, "", active_call(self, x, is_first_microbatch))
            if self.parallel is None:
                product.given |= {"out": out, "dgrad_out": dgrad_out}
            elif out is not None or dgrad_out is not None:
                raise NotImplementedError(
                    "quire.GroupedLinear, sharded over ranks: out and dgrad_out are not available; copy the result"
                )
            ends = offsets_of(m_splits, x, self.groups)
            y = product.run(x, ends, bias=not self.return_bias)
            product.commit()
            y = y if out is None else in_memory(y, out, ends)
            if not self.return_bias:
                return y
            biases = self.biases("", product.call.parameters)
            return y, biases[0] if self.bias_names == ("bias",) else biases
        except Exception as error:
            name_layer(error, self)
            raise

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        for kind, names in (("weight", self.weight_names), ("bias", self.bias_names)):
            if names:
                self._convert(state_dict, prefix + kind, getattr(self, kind) if names == (kind,) else None)
        own = self.own_groups()
        for name in [prefix + name for name in self.input_scales()]:
            if isinstance(scale := state_dict.get(name), torch.Tensor) and scale.shape == (self.num_gemms,):
                state_dict[name] = scale[own.start : own.stop]
        super()._load_from_state_dict(state_dict, prefix, *options)

    def _convert(self, state_dict: dict[str, object], name: str, single: torch.Tensor | None) -> None:
        """Gives the entries of a weight or bias the form of the module: one for all groups, or one for each; of the
        groups that this rank has. single: the module's parameter, if there is one for all groups."""
        own, each = self.own_groups(), [f"{name}{group}" for group in range(self.num_gemms)]
        mine, stacked = each[own.start : own.stop], state_dict.get(name)
        if single is None:
            if stacked is not None and len(stacked) in (len(each), len(mine)):
                names = each if len(stacked) == len(each) else mine
                state_dict.update(zip(names, state_dict.pop(name), strict=True))
            for other in set(each).difference(mine):
                state_dict.pop(other, None)
            return
        wanted = each if is_dtensor(single) else mine
        if stacked is None and all(one in state_dict for one in wanted):
            stacked = state_dict[name] = _stack([state_dict[one] for one in wanted])
            for one in each:
                state_dict.pop(one, None)
        if stacked is None or is_dtensor(stacked) or self.expert_group is None:
            return
        if is_dtensor(single):
            state_dict[name] = part_for(single, stacked)
        elif len(stacked) == len(each):
            state_dict[name] = stacked[own.start : own.stop]

    def extra_repr(self) -> str:
        own = self._recipe_text()
        own += "" if self.parallel is None else f", parallel={self.parallel.text!r}"
        own += "" if self.expert_group is None else f", ep_group={self.expert_group.name!r}, own={self.own_groups()}"
        sizes = f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={bool(self.bias_names)}{own}"


def _check_parallel(parallel: Parallel | None, stacked_twice: bool, stacked_bias: bool) -> None:
    """Raises NotImplementedError for parameters whose parts have no place in a checkpoint, ValueError for tokens that
    are sharded."""
    if parallel is None:
        return
    if parallel.sequence:
        raise ValueError(
            f"quire.GroupedLinear: groups of tokens are the same on all ranks of {parallel.group!r}; leave "
            "sequence out of parallel"
        )
    if stacked_twice or stacked_bias:
        raise NotImplementedError(
            "quire.GroupedLinear: with parallel, single_grouped_weight does not go with an ep_group, nor "
            "single_grouped_bias with bias=True; leave single_grouped_weight and single_grouped_bias out"
        )


_INTEGERS = (torch.int32, torch.int64)


def offsets_of(m_splits: torch.Tensor | Sequence[int], x: torch.Tensor, groups: int) -> torch.Tensor:
    """The row at which each group ends, int64 [groups], from the number of rows of each group. Raises TypeError for
    values that are not integers, RuntimeError for a wrong number of groups and for a list that does not fit x.
    Operators check the values of a tensor."""
    sizes = None if isinstance(m_splits, torch.Tensor) else m_splits
    if isinstance(sizes, Sequence) and not isinstance(sizes, str):
        m_splits = torch.tensor(sizes, dtype=None, device=x.device)  # of ints int64, of others refused below
    if not isinstance(m_splits, torch.Tensor) or m_splits.dtype not in _INTEGERS or m_splits.dim() != 1:
        is_tensor = isinstance(m_splits, torch.Tensor)
        got = f"{m_splits.dtype} of shape {list(m_splits.shape)}" if is_tensor else describe(m_splits)
        raise TypeError(
            "quire.GroupedLinear: m_splits must be one int for each group, as a list or an int32 or int64 vector; got "
            f"{got}"
        )
    if m_splits.shape[0] != groups:
        raise RuntimeError(
            f"quire.GroupedLinear: m_splits must have one size for each of the {groups} groups (num_gemms); got "
            f"{m_splits.shape[0]}"
        )
    # A graph leaves the check to the operator, as a nested x does.
    if sizes is not None and not torch.compiler.is_compiling() and not x.is_nested:
        rows = x.numel() // max(x.shape[-1], 1)
        if min(sizes) < 0 or sum(sizes) > rows:
            raise RuntimeError(
                f"quire.GroupedLinear: the sizes in m_splits must not be negative and must add up to at most the "
                f"{rows} rows of x; got {list(sizes)}, which add up to {sum(sizes)}"
            )
    # In 64 bits a sum that wraps is negative, which the operators refuse.
    return m_splits.cumsum(0, dtype=torch.int64)


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    quantized = all([isinstance(part, QuantizedTensor) for part in parts])
    return QuantizedStack.of(parts) if quantized else torch.stack(parts)


# ------------------------------------------------------------ results in memory of the caller's (out, dgrad_out)


class _InMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.view(y.shape).detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None


def in_memory(y: torch.Tensor, out: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """y, whose rows of groups an operator has copied to out, as a view of out. In a graph a tensor of its own with the
    same values: a graph cannot return its arguments' memory as a new tensor with a gradient."""
    if not torch.compiler.is_compiling():
        return _InMemory.apply(y, out)
    return torch.where(_in_groups(y, ends), y, out.view(y.shape))


def copied(y: torch.Tensor, out: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same of a y that no operator has copied."""
    memory = out.view(y.shape)
    with torch.no_grad():
        memory.copy_(torch.where(_in_groups(y, ends), y, memory))
    return in_memory(y, out, ends)


def _in_groups(y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Whether each row of y [*, N] belongs to a group: bool [*, 1]."""
    rows = torch.arange(y.shape[:-1].numel(), dtype=torch.int64, device=y.device)
    return (rows < ends[-1]).view(*y.shape[:-1], 1)


def check_memory(x: torch.Tensor, **memory: tuple[torch.Tensor | None, int]) -> None:
    """Raises ValueError unless memory, if there is any, has the shape of a result of a width: name -> both. In a graph
    the operator checks it."""
    for name, (given, width) in memory.items():
        if given is None or x.is_nested or x.dim() == 0 or torch.compiler.is_compiling():
            continue
        shapes = [[*x.shape[:-1], width], [x.shape[:-1].numel(), width]]
        if list(given.shape) not in shapes:
            either = ", or ".join(dict.fromkeys(map(str, shapes)))
            raise ValueError(f"quire.GroupedLinear: {name} must be {either}, got {list(given.shape)}")
