"""The linear layers of groups of tokens, such as the experts of a mixture, as one layer."""

from collections.abc import Callable, Sequence

import torch

from quire.checks import check_device, check_type, check_type_or_none, describe
from quire.nn.call import active_call
from quire.nn.initial_values import initialise
from quire.nn.layer_path import name_layer
from quire.nn.linear import own_recipe
from quire.nn.product import Product
from quire.nn.product_module import ProductModule
from quire.recipe import Recipe
from quire.tensor import QuantizedStack, QuantizedTensor


class GroupedLinear(ProductModule):
    """For each of num_gemms groups of tokens y = x w^T + bias, with a separate weight and bias for each group. The
    active recipe determines the quantization (quire.autocast); without a recipe the layer computes in high precision.
    The tokens of each group get the same bits as from a quire.Linear with the weight of that group.

    weight0, bias0, weight1, ..., in this order: [out_features, in_features] and [out_features], in params_dtype (or
    `dtype`; None: torch's default), initialised as in torch.nn.Linear. With single_grouped_weight there is one
    parameter `weight` [num_gemms, out_features, in_features], within quantized_model_init a QuantizedStack. With
    single_grouped_bias there is one `bias` [num_gemms, out_features]. A state dict of either form loads into either
    form.

    init_method: called with each weight; biases are then 0. return_bias: forward returns (y, [biases]), and y does not
    include them.
    fuse_wgrad_accumulation, delay_wgrad_compute: as for quire.Linear, for each weight.
    save_original_input: as for quire.Linear.
    recipe: used outside of any quire.autocast; None is high precision. Delayed scaling is not allowed.
    name: stored as an attribute.

    `sr_state` is as in quire.Linear; group e rounds with seed + e (numerics.md 0.19). `delayed` has the slots of each
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
        recipe: Recipe | str | None = None,
        name: str | None = None,
    ) -> None:
        check_type("quire.GroupedLinear", int, num_gemms=num_gemms)
        if num_gemms < 1:
            raise ValueError(f"quire.GroupedLinear: num_gemms must be at least 1, got {num_gemms}")
        flags = {"bias": bias, "return_bias": return_bias, "single_grouped_weight": single_grouped_weight}
        flags |= {"fuse_wgrad_accumulation": fuse_wgrad_accumulation, "delay_wgrad_compute": delay_wgrad_compute}
        flags["save_original_input"] = save_original_input
        check_type("quire.GroupedLinear", bool, single_grouped_bias=single_grouped_bias, **flags)
        check_device("quire.GroupedLinear", device)
        recipe = own_recipe("quire.GroupedLinear", recipe)
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
        """Name -> parameter: one for each group, or one for all groups."""
        return {name: getattr(self, name) for name in self.weight_names}

    def biases(self, product: str = "") -> list[torch.Tensor]:
        """One for each group, or one for all groups, or none."""
        return [getattr(self, name) for name in self.bias_names]

    def reset_parameters(self) -> None:
        """Initialises the weights as torch.nn.Linear or by init_method, and sets a new seed with the counter at 0."""
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

        m_splits: the number of rows of each group, an integer tensor [num_gemms] (which stays on its device; the host
            reads no value of it) or a list. Groups can be empty. Rows after the last group belong to no group, give
            zero and get a zero gradient. Raises RuntimeError if the sum exceeds the rows of x.
        is_first_microbatch: as for quire.Linear.
        out: contiguous memory to which y is copied, [rows of x, out_features] or of y's shape, in y's dtype. It must
            not need a gradient or share memory with another argument. The returned result is a separate tensor and has
            the gradient. `out` has no gradient and can be passed again in the next call.
        dgrad_out: the same for dx, [rows of x, in_features] or of x's shape; the backward pass copies dx there. This is
            the dx of this matmul only; autograd adds the gradients from other uses of x elsewhere. If x needs no
            gradient, dgrad_out is not changed.

        The dtype of the result is as for quire.Linear. Raises RuntimeError, before any computation, if shapes, dtypes
        or devices do not fit.
        """
        try:
            check_type("quire.GroupedLinear.forward", torch.Tensor, x=x)
            check_type_or_none("quire.GroupedLinear.forward", torch.Tensor, out=out, dgrad_out=dgrad_out)
            product = Product(self, "", active_call(self, x, is_first_microbatch))
            product.given |= {"out": out, "dgrad_out": dgrad_out}
            biases = self.biases()
            y = product.run(x, [] if self.return_bias else biases, offsets_of(m_splits, x, self.groups))
            product.commit()
            return (y, biases) if self.return_bias else y
        except Exception as error:
            name_layer(error, self)
            raise

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        for kind, names in (("weight", self.weight_names), ("bias", self.bias_names)):
            _convert(state_dict, prefix + kind, names == (kind,), self.num_gemms)
        super()._load_from_state_dict(state_dict, prefix, *options)

    def extra_repr(self) -> str:
        own = "" if self.recipe is None else f", recipe={type(self.recipe).__name__}"
        sizes = f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={bool(self.bias_names)}{own}"


_INTEGERS = (torch.int32, torch.int64)


def offsets_of(m_splits: torch.Tensor | Sequence[int], x: torch.Tensor, groups: int) -> torch.Tensor:
    """The row at which each group ends, int64 [groups], from the number of rows of each group. Raises TypeError for
    values that are not integers, RuntimeError for a wrong number of groups and for a list that does not fit x.
    Operators check the values of a tensor."""
    sizes = None if isinstance(m_splits, torch.Tensor) else m_splits
    if isinstance(sizes, Sequence):
        m_splits = torch.tensor(sizes, device=x.device)
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


def _convert(state_dict: dict[str, object], name: str, single: bool, groups: int) -> None:
    """Gives the entries of a weight or bias the form of the module: one for all groups, or one for each."""
    each = [f"{name}{group}" for group in range(groups)]
    if single and name not in state_dict and all(one in state_dict for one in each):
        parts = [state_dict.pop(one) for one in each]
        quantized = all([isinstance(part, QuantizedTensor) for part in parts])
        state_dict[name] = QuantizedStack.of(parts) if quantized else torch.stack(parts)
    elif not single and name in state_dict and len(state_dict[name]) == groups:
        state_dict.update(zip(each, state_dict.pop(name), strict=True))
