"""The base class of modules with matmuls y = x w^T: the state that lasts from call to call for each matmul."""

import secrets
from collections.abc import Callable, Iterable, Mapping

import torch

from quire import delayed, functional
from quire.checks import check_type, describe
from quire.distributed.data_parallel import Shards, declared_rank
from quire.distributed.experts import ExpertGroup
from quire.distributed.fully_sharded import Gathering
from quire.distributed.groups import group_size, named_group
from quire.distributed.parallel import Parallel, refuse_quantized
from quire.distributed.pieces import PlainPart
from quire.distributed.placements import is_dtensor, local, placed_like, sharding_of
from quire.loading.deferred import mark_static
from quire.loading.devices import HOST, has_values
from quire.loading.transforms import at_the_end
from quire.nn.input_scale import of_same_amax
from quire.nn.layer_base import Float32Buffers, ShownName
from quire.nn.random_state import own_rank, reset_streams
from quire.nn.te_extra_state import drop_extra_state
from quire.nn.weight import initial_weight, kept_attributes, why_not_loaded
from quire.recipe import Recipe, as_recipe
from quire.tensor import DTYPES, QuantizedTensor

#: What the metadata of a state dict has of a layer with static scales: its scale_spec.
SCALE_SPEC = "scale_spec"
#: Says by pieces() where this rank's shard lies in the whole tensor.
Sharding = Parallel | ExpertGroup
#: Parameters of a module by name, as far as somebody has read them. A parametrized one is computed whenever it is read.
Parameters = Mapping[str, torch.Tensor | None]


def named(product: str, what: str) -> str:
    """The attribute of a module that holds `what` of a matmul: "weight", or "fc1_weight" for the matmul "fc1"."""
    return f"{product}_{what}" if product else what


def groups_of(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The weight of each group of a matmul: [out_features, in_features], of a DTensor this rank's shard. weights: those
    of ProductModule.weights()."""
    own = [local(weight) for weight in weights]
    return own if own[0].dim() == 2 else list(own[0].unbind())


def checked_recipe(what: str, recipe: object) -> Recipe | None:
    """as_recipe() of a layer's own recipe. Also raises ValueError for delayed scaling."""
    found = as_recipe(what, recipe)
    if found is not None and found.delayed():
        raise ValueError(
            f"{what}: a layer's own recipe cannot be {type(found).__name__}, whose scales change on entering "
            "quire.autocast. Leave recipe None and run the model within quire.autocast(recipe=...)"
        )
    return found


def check_bias(what: str, bias: object) -> None:
    """Raises TypeError unless it is a bool. It is the third argument of a Linear, where some pass a recipe."""
    if not isinstance(bias, bool):
        raise TypeError(f"{what}: bias must be a bool, got {describe(bias)}; a recipe is passed as recipe=")


class ProductModule(ShownName, Float32Buffers):
    """A module with matmuls, named in `products`: "" for the matmul of `weight`, else "fc1" for that of `fc1_weight`.

    Besides weight and bias it has these attributes for each matmul, with names of the same form. They are in no
    state_dict.
    sr_state: int64 [2] {seed, counter}, for stochastic rounding of gradients (numerics.md 0.11).
    delayed: its DelayedState.
    microbatch_weight, kept_weight: CachedWeight or None (quire/nn/cache.py).
    parallel: how the weight is sharded over ranks, or None. part: that one's place().
    wgrad_stash: int64 [2] {number, count} for deferred weight gradients, which backward_dw() computes, or None. It is
        always on the CPU: the process keeps their operands and finds them by the number.
    recipe: the layer's own, for calls outside of every quire.autocast. What is assigned can be a recipe, its name or
        its text, or None for high precision. A value that checked_recipe() refuses changes nothing. Static scales of
        inputs become those of the same amax for the new recipe.
    None of the states is a buffer, because DistributedDataParallel would copy the first rank's buffers to all ranks.
    All except wgrad_stash are on the device of the parameters, however the parameters were moved there (place_states).
    """

    products: tuple[str, ...] = ("",)
    #: Names of the weights and of their biases.
    weight_names: tuple[str, ...] = ("weight",)
    bias_names: tuple[str, ...] = ("bias",)
    #: Groups of tokens that a product has a weight for, each.
    groups = 1
    #: Of layer_base.path_of(). A copy may be part of another model, and starts without.
    path_in_model: str | None = None
    #: Is shown (name of the matmul, x, offsets) before each matmul; x is then no carrier. For calibration and GPTQ.
    input_observer: Callable[[str, torch.Tensor, torch.Tensor | None], object] | None = None
    fuse_wgrad_accumulation = delay_wgrad_compute = save_original_input = False
    #: The data-parallel rank whose random stream it draws from, and the one that was declared for it.
    stream = 0
    data_rank: int | None = None

    # What a module knows of ranks. One in one process keeps the defaults.
    parallel: Parallel | None = None
    #: Over which ranks the groups are sharded.
    expert_group: ExpertGroup | None = None
    #: Weights that shard_weights() has sharded, and over which ranks.
    shards: dict[str, Shards] | None = None
    #: Of gather_codes().
    gathering: Gathering | None = None
    #: Whether it was made with weights that are this rank's shards.
    has_parts = False

    #: What is read in each call: a graph would need more guards for the property.
    own_recipe: Recipe | None = None
    #: The spec of x for which the buffers of add_input_scales() are; None if there are none.
    scale_spec: str | None = None

    @property
    def recipe(self) -> Recipe | None:
        return self.own_recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | str | None) -> None:
        self.own_recipe = checked_recipe(f"quire.{type(self).__name__}.recipe", recipe)
        if self.scale_spec is not None and self.own_recipe is not None and self.own_recipe.static_input:
            for name in self.input_scales():
                self._buffers[name] = of_same_amax(self._buffers[name], self.scale_spec, self.own_recipe.input_spec)
            self.scale_spec = self.own_recipe.input_spec

    def _recipe_text(self) -> str:
        """What extra_repr() says of it."""
        own = self.recipe
        return "" if own is None else f", recipe={type(own).__name__}({own.specs.text!r})"

    @property
    def external_wgrad(self) -> bool:
        """Whether the gradients of the weights are not returned to autograd."""
        return self.delay_wgrad_compute or self.fuse_wgrad_accumulation

    def of(self, product: str, what: str) -> object:
        """The attribute that holds `what` of a matmul."""
        return getattr(self, named(product, what))

    def parameter(self, name: str) -> torch.Tensor | None:
        """The attribute of that name: a parameter, twenty times as quickly as by Module.__getattr__, or a tensor that
        is computed (parametrized, pruned)."""
        return self._parameters[name] if name in self._parameters else getattr(self, name)

    def weights(self, product: str, parameters: Parameters | None = None) -> dict[str, torch.Tensor]:
        """Name -> weight of a matmul: one, or one for each group. parameters: those of the module, if they have been
        read."""
        name = named(product, "weight")
        return {name: self.parameter(name) if parameters is None else parameters[name]}

    @property
    def use_bias(self) -> bool:
        """Whether the layer has biases."""
        return any([self.parameter(name) is not None for name in self.bias_names])

    def group_weights(self, product: str) -> list[torch.Tensor]:
        """groups_of() the weights of a matmul."""
        return groups_of(self.weights(product).values())

    def biases(self, product: str, parameters: Parameters | None = None) -> list[torch.Tensor]:
        """The bias of a matmul: one, or one for each group, or one for all groups, or none. parameters: as for
        weights()."""
        name = named(product, "bias")
        bias = self.parameter(name) if parameters is None else parameters[name]
        return [] if bias is None else [bias]

    def _device(self) -> torch.device:
        """That of the parameters. Modules within have parametrized ones, and FullyShardedDataParallel has flattened
        ones: what it leaves here are attributes."""
        for parameter in self._parameters.values():
            if parameter is not None:
                return parameter.device
        within = next(self.parameters(), None)
        return next(iter(self.weights(self.products[0]).values() if within is None else [within])).device

    def sr_states(self) -> dict[str, torch.Tensor]:
        """Matmul -> its {seed, counter}."""
        self.place_states()
        return {product: self.of(product, "sr_state") for product in self.products}

    # ------------------------------------------------------------ what constructors call

    def _set_flags(self, **flags: bool) -> None:
        """Options that say yes or no, as attributes of their names. TypeError for another kind of value."""
        check_type(f"quire.{type(self).__name__}", bool, **flags)
        for name, value in flags.items():
            setattr(self, name, value)

    def _add_states(self) -> None:
        """When the parameters are there; seeds are then still to be reset."""
        device = self._device()
        first = self.of(self.products[0], "parallel")
        self.has_parts = first is not None and not any(is_dtensor(p) for p in self._parameters.values())
        for product in self.products:
            setattr(self, named(product, "sr_state"), mark_static(torch.empty(2, dtype=torch.int64, device=device)))
            setattr(self, named(product, "delayed"), self.new_delayed_state())
            if (parallel := self.of(product, "parallel")) is not None:
                setattr(self, named(product, "part"), parallel.place(device))
        self.add_input_scales()
        self._forget_weights()
        self._number_stashes()

    def add_input_scales(self) -> None:
        """Gives each matmul the buffer that the layer's own recipe needs, if x has a scale of the layer: input_scale,
        float32 [groups], NaN until it is loaded. Without such a recipe, takes it away."""
        wanted = self.recipe is not None and self.recipe.static_input
        for product in self.products:
            name = named(product, "input_scale")
            if wanted and name not in self._buffers:
                self.add_float32_buffer(name, self.groups, self._device())
            elif not wanted and name in self._buffers:
                del self._buffers[name]
        self.scale_spec = self.recipe.input_spec if wanted else None

    def own_scale(self, scale: torch.Tensor, spec: str | None) -> torch.Tensor:
        """The static scale for this layer's recipe, from that of a layer with x under `spec`; None: the same as its
        own."""
        known = spec is not None and self.scale_spec is not None
        return of_same_amax(scale, spec, self.scale_spec) if known else scale

    def input_scales(self) -> list[str]:
        """Names of the buffers of add_input_scales() that there are."""
        names = [named(product, "input_scale") for product in self.products]
        return [name for name in names if self._buffers.get(name) is not None]

    def float32_buffers(self) -> list[str]:
        return self.input_scales()

    def fill_new(self, name: str, buffer: torch.Tensor) -> None:
        buffer.fill_(torch.nan)  # which every matmul refuses

    def scale_name(self, weight: str) -> str:
        """The buffer with the static scales of the inputs that a weight is multiplied with, for each group one."""
        product = next(product for product in self.products if weight in self.weights(product))
        return named(product, "input_scale")

    def new_delayed_state(self) -> delayed.DelayedState:
        """For each matmul. What a rank alone has of a layer has amaxes that no other one has."""
        return delayed.DelayedState(self._device(), self.groups, reduced=self.expert_group is None)

    def _quantize_weights(self) -> None:
        """When the parameters have values: within quantized_model_init, weights become quantized ones."""
        for product in self.products:
            parallel = self.of(product, "parallel")
            for name, weight in self.weights(product).items():
                setattr(self, name, initial_weight(weight))
                if parallel is not None and getattr(self, name) is not weight:
                    refuse_quantized(f"quire.{type(self).__name__}", parallel.text)
        self._mark_deferred()

    def _mark_deferred(self) -> None:
        """With delay_wgrad_compute, weights have the mark by which hooks of frameworks know that a backward pass leaves
        no gradient yet."""
        for name in self.weight_names if self.delay_wgrad_compute else ():
            if self._parameters.get(name) is not None:
                self._parameters[name].skip_backward_post_hook = True

    def _reset_sr_states(self) -> None:
        reset_streams(list(self.sr_states().values()), [self.take_stream()] * len(self.products))

    def take_stream(self) -> int:
        """Decides on the data-parallel rank whose random stream the layer draws from, for a new seed, and returns it.
        Parts of one layer draw from one stream."""
        declared = declared_rank()
        if declared is not None:
            self.data_rank = declared
        parallel = self.of(self.products[0], "parallel")
        if self.data_rank is None:
            self.stream = parallel.first_rank() if parallel is not None and parallel.group else own_rank()
        else:
            self.stream = self.data_rank
        return self.stream

    def first_stream(self) -> int:
        """What the seed of this rank's shard of the layer is above the one that a single process has."""
        return 0

    def _forget_weights(self) -> None:
        for product in self.products:
            setattr(self, named(product, "microbatch_weight"), None)
            setattr(self, named(product, "kept_weight"), None)

    # A copy of a module must not share the operands that the original keeps for backward_dw().
    def _number_stashes(self) -> None:
        for product in self.products:
            stash = None
            if self.delay_wgrad_compute:
                number = secrets.randbits(62)
                stash = torch.tensor([number, 0], dtype=torch.int64, device=HOST)
                at_the_end(self, functional.drop_stashed_wgrads, number)
            setattr(self, named(product, "wgrad_stash"), stash)

    # ------------------------------------------------------------ moves and copies

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._number_stashes()
        self._mark_deferred()  # copies of parameters have no attributes
        self.path_in_model = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "ProductModule":
        with kept_attributes(self._parameters):
            super()._apply(fn, recurse)
        self._move_states(self._device())
        self._forget_weights()
        self._mark_deferred()
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, local_metadata: dict[str, object], *options: object
    ) -> None:
        drop_extra_state(self, state_dict, prefix)
        assign, error_msgs = local_metadata.get("assign_to_params_buffers", False), options[-1]
        for name in self.weight_names:
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and (error := why_not_loaded(self, name, value, assign)):
                error_msgs.append(f"{prefix}{name}: {error}")
                return
        for name in self.own_parts():
            if isinstance(value := state_dict.get(prefix + name), PlainPart):
                state_dict[prefix + name] = value.plain()
        for name in self.input_scales():
            if isinstance(value := state_dict.get(prefix + name), torch.Tensor):
                state_dict[prefix + name] = self.own_scale(value, local_metadata.get(SCALE_SPEC))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *options)

    # load_state_dict(assign=True) comes here, and whoever sets an attribute; constructors do before there are states.
    # PyTorch's parallel styles come here too, with a DTensor in place of a plain weight.
    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if named(self.products[-1], "wgrad_stash") not in vars(self):
            super().register_parameter(name, param)
            return
        sharded, product, parallel = self._new_sharding(name, param)
        super().register_parameter(name, param)
        self._mark_deferred()
        self.place_states()
        if sharded:
            self.set_sharding(product, parallel)

    def place_states(self) -> None:
        """Moves states to the device of the parameters if these were moved without this module's methods (accelerate
        writes into _parameters). If the parameters are on the meta device, the states stay where they are: only
        Module.to("meta") discards values. Raises RuntimeError within a compiled function, where no state can be
        created."""
        device, state = self._device(), self.of(self.products[0], "sr_state")
        if state.device == device or not has_values(device):
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"quire.{type(self).__name__}: its parameters are on {device} and its random state is on "
                f"{state.device}, and a compiled function cannot move it; call .to({str(device)!r}) on the model first"
            )
        self._move_states(device)

    def _move_states(self, device: torch.device) -> None:
        """What leaves the meta device is new. States outlast a transform of torch.func in which a functional_call moves
        them, so it does not see this: vmap would refuse to draw a seed."""
        with torch._C._DisableFuncTorch():
            self._move_states_now(device)

    def _move_states_now(self, device: torch.device) -> None:
        leave_meta = self.of(self.products[0], "sr_state").is_meta and has_values(device)
        for product in self.products:
            name = named(product, "sr_state")
            state = getattr(self, name)
            moved = torch.zeros_like(state, device=device) if leave_meta else state.to(device)
            setattr(self, name, mark_static(moved))
            self.of(product, "delayed").to(device)
            if self.of(product, "parallel") is not None and has_values(device):
                setattr(self, named(product, "part"), self.of(product, "part").to(device))
        if leave_meta:
            self._reset_sr_states()

    # ------------------------------------------------------------ shards

    def set_sharding(self, product: str, parallel: Parallel | None) -> None:
        """Records how the weight of a matmul is sharded from now on. The parts of the weight get one random stream, the
        one of part 0: all ranks must call it."""
        setattr(self, named(product, "parallel"), parallel)
        self._forget_weights()
        if parallel is not None:
            state = self.of(product, "sr_state")
            setattr(self, named(product, "part"), parallel.place(state.device))
            if not state.is_meta:
                shared = torch.cat([state, state.new_tensor([self.stream])])
                parallel.share_first(shared)
                state.copy_(shared[:2])
                self.stream = int(shared[2])

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """Gives a process group to a layer that was made with Parallel(mode, None, size=...); all ranks of the group
        must call it. Of other layers it takes None, groups of one process and the layer's own. Raises ValueError for a
        group of another size, NotImplementedError for other groups."""
        size, own = group_size(tp_group), self.of(self.products[0], "parallel")
        if own is not None and not own.group and tp_group is not None:
            sharded = [(product, self.of(product, "parallel").of_group(tp_group)) for product in self.products]
            for product, parallel in sharded:
                self.set_sharding(product, parallel)
            return
        if size != 1 and (own is None or named_group(own.group) != tp_group):
            raise NotImplementedError(
                f"quire.{type(self).__name__}: a layer is sharded over ranks when it is made, and this one was not; "
                f"got a group of {size} ranks. Pass parallel=quire.distributed.Parallel(...) to the constructor"
            )

    def sharded_dims(self, mode: str) -> dict[str, int | None]:
        """Parameter -> the dimension along which a "column" or "row" layer shards it over ranks, None: not at all.
        Raises NotImplementedError if the layer cannot be sharded."""
        raise NotImplementedError(
            f"quire.{type(self).__name__}: it cannot be sharded over ranks; use it for a quire.Linear, "
            "quire.LayerNormLinear or quire.LayerNormMLP"
        )

    def _new_sharding(self, name: str, new: torch.Tensor | None) -> tuple[bool, str, Parallel | None]:
        """Whether a new parameter shards its matmul in another way, the matmul, and how. Raises NotImplementedError if
        the weight was quantized, ValueError for what sharding_of() does not know."""
        old, what = self._parameters.get(name), f"quire.{type(self).__name__}"
        product = next((product for product in self.products if named(product, "weight") == name), None)
        if product is None or new is None or not (is_dtensor(new) or is_dtensor(old)):
            return False, "", None
        if is_dtensor(old) and is_dtensor(new):
            # Data parallelism replaces DTensors that say nothing of how the layer computes.
            same = old.device_mesh == new.device_mesh and old.placements == new.placements
            if same or self.of(product, "parallel") is None:
                return False, "", None
        before, parallel = self.of(product, "parallel"), sharding_of(new, what)
        if isinstance(old, QuantizedTensor) or isinstance(local(new), QuantizedTensor):
            refuse_quantized(what, str(new.placements) if parallel is None else parallel.text)
        if before is not None and not is_dtensor(old):
            raise ValueError(
                f"{what}: {name} is this rank's shard already ({before.text}), and cannot become a DTensor; make the "
                "layer without parallel= and tensor-parallel options, and shard it then"
            )
        return True, product, parallel

    def own_parts(self) -> dict[str, Sharding]:
        """Parameters and buffers that are this rank's shards as plain tensors, by name, and how they are sharded. What
        parallel styles have sharded is not among them: these parameters are DTensors."""
        found = {}
        for product in self.products if self.has_parts else ():
            parallel = self.of(product, "parallel")
            found[named(product, "weight")] = parallel
            if parallel.mode == "column" and self.biases(product):
                found[named(product, "bias")] = parallel
        return found

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # As PyTorch's versions of modules: torch.save keeps it, and files of safetensors do not.
        about = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if about is not None and self.scale_spec is not None:
            about[SCALE_SPEC] = self.scale_spec
        for name in () if keep_vars else self.own_parts():
            # fully_shard has made some DTensors, and parametrizations have other names.
            if type(value := destination.get(prefix + name)) is torch.Tensor:
                destination[prefix + name] = value.as_subclass(PlainPart)

    # ------------------------------------------------------------ weight gradients

    def need_backward_dw(self) -> bool:
        """Whether the module was constructed with delay_wgrad_compute."""
        return self.delay_wgrad_compute

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], object]
    ) -> None:
        """Registers a function without arguments, which backward_dw() calls after it has computed gradients."""
        vars(self).setdefault("wgrad_accumulation_and_reduce_hooks", []).append(wgrad_accumulation_and_reduce_hook)

    def backward_dw(self) -> None:
        """Computes the gradients of the weights for the oldest backward pass whose operands are kept. Adds them to
        weight.main_grad (fuse_wgrad_accumulation) or weight.grad. Skips weights that require no gradient; without
        delay_wgrad_compute it does nothing. Not available within a compiled function. Raises RuntimeError if no
        operands are kept, NotImplementedError for weights that fully_shard has sharded."""
        self._compute_stashed()
        for hook in vars(self).get("wgrad_accumulation_and_reduce_hooks", ()) if self.delay_wgrad_compute else ():
            hook()

    def _compute_stashed(self) -> None:
        for product in reversed(self.products if self.delay_wgrad_compute else ()):
            weights = self.weights(product)
            if self.of(product, "parallel") is None and any(is_dtensor(weight) for weight in weights.values()):
                raise NotImplementedError(
                    f"quire.{type(self).__name__}.backward_dw: fully_shard has sharded {', '.join(weights)}, and "
                    "reduces gradients in the backward pass only; make the layer without delay_wgrad_compute"
                )
            if any(weight.requires_grad for weight in weights.values()):
                with torch.no_grad():
                    self._add_stashed(weights, self.of(product, "wgrad_stash"))

    def _add_stashed(self, named_weights: dict[str, torch.nn.Parameter], stash: torch.Tensor) -> None:
        fused, weights = self.fuse_wgrad_accumulation, list(named_weights.values())
        new = (torch.empty(local(w).shape, dtype=w.dtype, device=w.device) for w in weights)
        grads = main_grads(self, named_weights) if fused else list(new)
        overwrite = not fused or any(getattr(w, "overwrite_main_grad", False) for w in weights)
        if not functional.stashed_wgrad(stash, grads, overwrite):
            raise RuntimeError(
                f"quire.{type(self).__name__}.backward_dw: no backward pass has kept operands for it; call it once "
                "after each backward pass of the layer"
            )
        for weight, grad in zip(weights, () if fused else grads, strict=not fused):
            if weight.requires_grad:
                grad = placed_like(weight, grad)
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def main_grads(module: ProductModule, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors to which gradients of the weights are added. For a weight that requires no gradient this is memory
    that nobody reads. Raises RuntimeError if another weight has no main_grad, or one that does not fit."""
    grads = []
    for name, parameter in weights.items():
        weight, required = local(parameter.detach()), parameter.requires_grad
        if not required:
            grads.append(torch.empty(weight.shape, dtype=weight.dtype, device=weight.device))
            continue
        grad = local(getattr(parameter, "main_grad", None))
        is_tensor = isinstance(grad, torch.Tensor)
        fits = is_tensor and grad.shape == weight.shape and grad.dtype in DTYPES and grad.device == weight.device
        if not fits or grad.layout != torch.strided or not grad.is_contiguous():
            part = f"this rank's shard of {name}" if is_dtensor(parameter) else name
            got = f"{grad.dtype} {list(grad.shape)}, {grad.layout}, on {grad.device}" if is_tensor else describe(grad)
            raise RuntimeError(
                f"quire.{type(module).__name__}: fuse_wgrad_accumulation=True needs {name}.main_grad, a contiguous "
                f"float32, float16 or bfloat16 tensor of {part}'s shape {list(weight.shape)} on {weight.device} to add "
                f"the gradient to; got {got}. Assign one, or make the layer without fuse_wgrad_accumulation, as for "
                "fully_shard, whose gathered weights have none"
            )
        grads.append(grad)
    return grads
