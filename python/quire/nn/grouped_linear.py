"""The linears of groups of tokens, such as those of a mixture's experts, as one layer."""

from collections.abc import Callable, Sequence

import torch

from quire import delayed
from quire.checks import check_kind, check_kind_or_none
from quire.functional import Buffers, grouped_linear
from quire.nn.cache import cache, cached_weight
from quire.nn.call import Call, active_call, gradient_elsewhere, linear_text, mark_added, starts_from_x
from quire.nn.linear import check_own_recipe
from quire.nn.product import ProductModule, initialise
from quire.nn.weight import stored_weight, weight_operand
from quire.recipe import Recipe
from quire.tensor import QuantizedStack, QuantizedTensor


class GroupedLinear(ProductModule):
    """For each of num_gemms groups of tokens y = x w^T + bias with a weight and a bias of its own, quantized as the
    active recipe says (quire.autocast), else in high precision. Each group's tokens get the bits that a quire.Linear
    with its weight would give them.

    weight0, bias0, weight1, ..., in this order: [out_features, in_features] and [out_features], in params_dtype (or
    `dtype`; None: torch's default), initialised as torch.nn.Linear's. With single_grouped_weight one parameter `weight`
    [num_gemms, out_features, in_features], within quantized_model_init a QuantizedStack; with single_grouped_bias one
    `bias` [num_gemms, out_features]. A state dict of either form loads into either.

    init_method: called with each weight; biases are then 0. return_bias: forward gives (y, [biases]), y without them.
    fuse_wgrad_accumulation, delay_wgrad_compute: as for quire.Linear, of each weight.
    save_original_input: as for quire.Linear.
    recipe: what it runs under outside of any quire.autocast; None is high precision. Not one of delayed scaling.
    name: kept as an attribute.

    `sr_state` is that of quire.Linear; group e rounds with seed + e (numerics.md 0.19). `delayed` has the slots of each
    group.
    """

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
        recipe: Recipe | None = None,
        name: str | None = None,
    ) -> None:
        check_kind("quire.GroupedLinear", int, num_gemms=num_gemms)
        if num_gemms < 1:
            raise ValueError(f"quire.GroupedLinear: num_gemms must be at least 1, got {num_gemms}")
        flags = {"bias": bias, "return_bias": return_bias, "single_grouped_weight": single_grouped_weight}
        flags |= {"fuse_wgrad_accumulation": fuse_wgrad_accumulation, "delay_wgrad_compute": delay_wgrad_compute}
        flags["save_original_input"] = save_original_input
        check_kind("quire.GroupedLinear", bool, single_grouped_bias=single_grouped_bias, **flags)
        check_own_recipe("quire.GroupedLinear", recipe)
        super().__init__()
        self.num_gemms = self.groups = num_gemms
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
        all groups share (quire/nn/optimizer_state.py knows the order of before)."""
        each = [(f"{kind}{group}", kind, ()) for group in range(self.num_gemms) for kind in sizes if not single[kind]]
        for name, kind, groups in (*each, *((kind, kind, (self.num_gemms,)) for kind in sizes if single[kind])):
            self.register_parameter(name, torch.nn.Parameter(torch.empty((*groups, *sizes[kind]), **factory)))
        of_kind = [tuple(name for name in self._parameters if name.startswith(kind)) for kind in ("weight", "bias")]
        self.weight_names, self.bias_names = of_kind

    def weights(self, product: str) -> dict[str, torch.Tensor]:
        """Name -> parameter: one for each group, or one for all."""
        return {name: getattr(self, name) for name in self.weight_names}

    def biases(self) -> list[torch.Tensor]:
        """One for each group, or one for all, or none."""
        return [getattr(self, name) for name in self.bias_names]

    def reset_parameters(self) -> None:
        """New weights, as torch.nn.Linear's or by init_method, and a new seed with the counter at 0."""
        biases = self.biases()
        if biases and biases[0].dim() == 2:
            biases = list(biases[0].unbind())
        with torch.no_grad():
            for group, weight in enumerate(self.group_weights("")):
                initialise(weight, biases[group] if biases else None, self.init_method)
        self._reset_sr_states()

    def forward(
        self,
        x: torch.Tensor,
        m_splits: torch.Tensor | Sequence[int],
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """x [*, in_features], whose rows are sorted by group -> [*, out_features].

        m_splits: how many rows each group has, an integer tensor [num_gemms] (which stays on its device: no value of it
            is asked for) or a list. Groups may be empty; rows that remain belong to none, give zero and get a zero
            gradient. RuntimeError if there are more than x has.
        is_first_microbatch: as for quire.Linear.
        out: contiguous memory that the values of y are copied to, [rows of x, out_features] or of y's shape, in y's
            dtype, which needs no gradient and shares no bytes with another argument. The result is a tensor of its own
            and has the gradient; `out` has none, and may be given again in the next call as it is.
        dgrad_out: the same for dx, [rows of x, in_features] or of x's shape: a backward pass copies it there. It is
            dx of this product, to which autograd adds what arrives from other uses of x; where x needs no gradient,
            dgrad_out is left as it is.

        The dtype of the result is that of quire.Linear's. RuntimeError, before anything is computed, if shapes, dtypes
        or devices do not fit.
        """
        check_kind_or_none("quire.GroupedLinear.forward", torch.Tensor, out=out, dgrad_out=dgrad_out)
        product = GroupedProduct(self, active_call(self, x, is_first_microbatch))
        product.given |= {"out": out, "dgrad_out": dgrad_out}
        y = product.run(x, offsets_of(m_splits, x.device))
        product.remember()
        return (y, self.biases()) if self.return_bias else y

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        for kind, names in (("weight", self.weight_names), ("bias", self.bias_names)):
            _convert(state_dict, prefix + kind, names == (kind,), self.num_gemms)
        super()._load_from_state_dict(state_dict, prefix, *options)

    def extra_repr(self) -> str:
        own = "" if self.recipe is None else f", recipe={type(self.recipe).__name__}"
        sizes = f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={bool(self.bias_names)}{own}"


class GroupedProduct:
    """The product of a GroupedLinear in one call. As for Product, the constructor reads the layer, remember() writes to
    it, run() does neither."""

    def __init__(self, layer: GroupedLinear, call: Call) -> None:
        self.call, self.state, self.groups = call, layer.delayed, layer.groups
        self.layer, self.made = layer, None
        self.weights, self.biases = list(layer.weights("").values()), [] if layer.return_bias else layer.biases()
        self.given: dict[str, object] = {}  # to grouped_linear
        self.w_amax: torch.Tensor | None = None  # of weights that are quantized now, but not by the operator
        recipe = call.recipe
        self.needs_dw = torch.is_grad_enabled() and any([weight.requires_grad for weight in self.weights])
        if self.needs_dw:
            self.given |= gradient_elsewhere(layer, "", call)
        if recipe is None:
            return
        self.text = linear_text(layer, call)
        if recipe.stochastic and torch.is_grad_enabled():
            self.given["sr_state"] = layer.sr_state
        if recipe.delayed():
            self.given["fwd_scale"], self.given["bwd_scale"] = delayed.scales(self.state)
            self.given["bwd_amax"] = self.state.bwd_amax
        if isinstance(self.weights[0], QuantizedTensor):
            self.text = stored_weight(self.text, recipe, self.weights[0].spec_text)
        else:
            self._take_codes(layer)

    def _take_codes(self, layer: GroupedLinear) -> None:
        """Of weights, those that outlive the call: looks for them or makes them."""
        recipe, first = self.call.recipe, self.call.is_first_microbatch
        found = cached_weight(layer, "", recipe, first)
        if found is not None:
            self.text = stored_weight(self.text, recipe, found.stored)
            self.given |= {"w_buffers": found.operand(), "w_fingerprint": found.fingerprint}
        elif first is not None:
            self.made = cache(layer.group_weights(""), recipe, self.given.get("fwd_scale"))
            self.given["w_buffers"] = self.made.buffers
            if self.text.endswith("backward=high_precision"):  # of w itself
                self.given["w_fingerprint"] = self.made.fingerprint
            if recipe.delayed():
                self.w_amax = self.made.buffers[2]

    def input(self) -> dict[str, object]:
        """Keywords of activation() for an x that run() takes."""
        recipe = self.call.recipe
        if recipe is None or starts_from_x(self.text):
            return {}
        scale = self.given["fwd_scale"][: self.groups] if recipe.delayed() else None
        return {"spec": recipe.input_spec, "rowwise": True, "columnwise": self.needs_dw, "scale": scale}

    def run(self, x: torch.Tensor, offsets: torch.Tensor, x_buffers: Buffers = ()) -> torch.Tensor:
        """y = x w^T + bias of each group. offsets: the row at which each ends. x_buffers: what activation() gave with
        these offsets and input()."""
        recipe, weights, given = self.call.recipe, self.weights, dict(self.given)
        if recipe is None:
            return self._high_precision(x, offsets)
        if x_buffers and not starts_from_x(self.text):
            given["x_buffers"] = x_buffers
        if isinstance(weights[0], QuantizedTensor):
            operands = [weight_operand(weight, (x, *self.biases), recipe) for weight in weights]
            weights = [weight for weight, _ in operands]
            given["w_buffers"] = [buffer for _, buffers in operands for buffer in buffers]
        y, x_amax, w_amax = grouped_linear(x, weights, self.biases, offsets, self.text, dtype=self.call.dtype, **given)
        if recipe.delayed():  # now that the arguments are known to fit
            amaxes = x_buffers[2] if x_buffers else x_amax, self.w_amax if "w_buffers" in given else w_amax
            delayed.collect(self.state, self.call.rule, *amaxes)
        return y

    def _high_precision(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        weights = [w.dequantize() if isinstance(w, QuantizedTensor) else w for w in self.weights]
        y = grouped_linear(x, weights, self.biases, offsets, "", dtype=self.call.dtype, **self.given)[0]
        if self.call.rule is not None:  # now that the arguments are known to fit
            each = self.weights if self.weights[0].dim() == 2 else list(self.weights[0].unbind())
            delayed.collect(self.state, self.call.rule, *delayed.measure_groups(self.state, x, offsets, each))
        return y

    def remember(self) -> None:
        """As Product.remember()."""
        if self.made is not None:
            self.layer.microbatch_weight = self.made
        if "placeholder" in self.given:
            mark_added(self.weights)


def offsets_of(m_splits: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """The row at which each group ends, int64 [groups], of how many each has. TypeError for what are no integers."""
    if not isinstance(m_splits, torch.Tensor):
        m_splits = torch.tensor(m_splits, device=device)
    check_kind_or_none("quire.GroupedLinear", torch.Tensor, m_splits=m_splits)
    if m_splits.dtype not in (torch.int32, torch.int64) or m_splits.dim() != 1:
        raise TypeError(
            "quire.GroupedLinear: m_splits must be one int for each group, as a list or an int32 or int64 vector; got "
            f"{m_splits.dtype} of shape {list(m_splits.shape)}"
        )
    # In 64 bits a sum that wraps is negative, which the operators refuse.
    return m_splits.cumsum(0, dtype=torch.int64)


def _convert(state_dict: dict[str, object], name: str, single: bool, groups: int) -> None:
    """Gives the entries of a weight or bias the form of the module: one for all groups, or one for each."""
    each = [f"{name}{group}" for group in range(groups)]
    if single and name not in state_dict and all(one in state_dict for one in each):
        parts = [state_dict.pop(one) for one in each]
        quantized = all([isinstance(part, QuantizedTensor) for part in parts])
        state_dict[name] = QuantizedStack.of(parts) if quantized else torch.stack(parts)
    elif not single and name in state_dict and len(state_dict[name]) == groups:
        state_dict.update(zip(each, state_dict.pop(name), strict=True))
