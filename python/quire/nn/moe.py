"""A mixture of experts: each token is processed by a few of many expert networks."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from quire.autocast import is_batch_invariant_enabled
from quire.checks import check_dense, check_sizes, check_type, check_type_or_none, describe, errors_name
from quire.distributed import check_ranks
from quire.distributed.experts import ExpertGroup, Sender, check_exchange, pack, plan, unpack, why_not
from quire.distributed.parallel import Parallel
from quire.distributed.placements import is_dtensor
from quire.functional import (
    Buffers,
    activation_inputs,
    activation_text,
    expert_rows,
    linear,
    permute_rows,
    route,
    unpermute_rows,
)
from quire.functional import activation as activate
from quire.moe import Routing, limit_capacity, tokens_per_expert
from quire.moe.permutation import permute_any
from quire.moe.routing import routing_text
from quire.nn.grouped_linear import GroupedLinear
from quire.nn.layer_base import (
    Float32Buffers,
    ShownName,
    check_factory,
    is_any_autocast_enabled,
    name_layer,
    path_of,
    uses_torch_autocast,
)
from quire.nn.linear import Linear
from quire.nn.product import Product, active_call, specs_of
from quire.nn.product_module import check_bias
from quire.nn.weight import compute_weights
from quire.recipe import Recipe
from quire.recipe.linear_spec import BATCH_INVARIANT, high_precision

_ROUTE_OPTIONS = (
    *("score_function", "softmax_after_topk", "renormalize", "num_groups", "group_topk", "group_best"),
    *("scaling_factor", "capacity"),
)


class Router(torch.nn.Module):
    """Logits of experts, x weight^T. Computed in float32 under every recipe and torch.autocast, because the router is
    small and its rounding errors have the largest effect. weight [num_experts, hidden_size]."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the weight as torch.nn.Linear."""
        bound = self.weight.shape[1] ** -0.5 if self.weight.shape[1] else 0
        torch.nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [*, hidden_size] -> float32 [*, num_experts]."""
        if is_batch_invariant_enabled():
            return linear(x.float(), self.weight.float(), None, BATCH_INVARIANT, torch.float32)
        if not (is_any_autocast_enabled() and uses_torch_autocast(x)):
            return torch.nn.functional.linear(x.float(), self.weight.float())
        with torch.autocast(x.device.type, enabled=False):
            return torch.nn.functional.linear(x.float(), self.weight.float())

    def extra_repr(self) -> str:
        return f"hidden_size={self.weight.shape[1]}, num_experts={self.weight.shape[0]}"


# ------------------------------------------------------------ how tokens reach the experts and come back


class Dispatched(NamedTuple):
    """Tokens at the experts of this rank.

    rows, ends: sorted by expert, and the row at which the tokens of each expert end. codes: buffers of rows, which are
    then not read; or (). give_back: rows of results -> those of this rank's own tokens, in the order of
    row_map. weights, ids: those of the router, without entries that were dropped. shared: the result of the shared
    experts, None without any; to be called once, after the experts.
    """

    rows: torch.Tensor
    ends: torch.Tensor
    codes: Buffers
    give_back: Callable[[torch.Tensor], torch.Tensor]
    row_map: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    shared: Callable[[], torch.Tensor | None]


class OwnExperts(NamedTuple):
    """This process has all experts. weight_on_input: tokens are multiplied by their weights before the experts."""

    num_experts: int
    weight_on_input: bool

    def dispatch(
        self,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        shared: Callable[[], torch.Tensor | None],
    ) -> Dispatched:
        """tokens [T, K], weights and ids [T, k] of the router. shared: computes the shared experts, while the tokens
        travel if they do."""
        factors = weights if self.weight_on_input else None
        row_map, ends = expert_rows(ids, self.num_experts)
        permuted = permute_rows if type(tokens) is torch.Tensor else permute_any
        rows = permuted(tokens, row_map, row_map.numel(), factors)
        return Dispatched(rows, ends, (), lambda results: results, row_map, weights, ids, shared)


class ExpertsOfRanks(NamedTuple):
    """Each rank of a group has some of the experts, and its own tokens. layer: the first one of the experts.
    capacity, overflow, codes: ep_capacity, ep_overflow and whether ep_dispatch is "codes" of quire.MoE."""

    layer: GroupedLinear
    group: ExpertGroup
    weight_on_input: bool
    capacity: int | None
    overflow: str
    codes: bool

    def dispatch(
        self,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        shared: Callable[[], torch.Tensor | None],
    ) -> Dispatched:
        """As OwnExperts.dispatch()."""
        spec = self._sent_spec(tokens)
        sender = Sender(self.group, "" if torch.compiler.is_compiling() else self._announce(tokens))
        # The meta device has no numbers of rows.
        capacity = max(1, ids.numel()) if ids.is_meta else self.capacity
        trip = plan(sender, ids, capacity, self.overflow, lambda sent: self._agree_in_graph(tokens, sent))
        weights = torch.where(trip.ids >= 0, weights, 0.0)
        leaving = permute_rows(tokens, trip.row_map, sum(trip.send), weights if self.weight_on_input else None)
        payload, fields = pack(leaving, spec) if spec else (leaving, ())
        started = sender.start(payload, trip.receive, trip.send)
        computed = shared()
        rows, codes = trip.by_expert(sender.finish(started)), ()
        if spec:
            rows, codes = sender.stand_in(leaving, trip), unpack(rows, fields, spec, trip.ends)

        def give_back(results: torch.Tensor) -> torch.Tensor:
            return sender.exchange(trip.by_process(results), trip.send, trip.receive)

        return Dispatched(rows, trip.ends, codes, give_back, trip.row_map, weights, trip.ids, lambda: computed)

    def _sent_spec(self, tokens: torch.Tensor) -> str:
        """Under which spec rows are sent as codes; "" if they are sent as values. Raises NotImplementedError if the
        recipe does not allow codes."""
        call = active_call(self.layer, tokens)
        if not self.codes or call.recipe is None or self.layer.input_observer is not None:
            return ""
        spec, specs = call.recipe.input_spec, specs_of(self.layer, call)
        trains = torch.is_grad_enabled() and any([weight.requires_grad for weight in self.layer.weights("").values()])
        if call.recipe.weight_only or call.recipe.static_input:
            reason = "is not quantized" if call.recipe.weight_only else "has a scale of its own in each rank"
        else:
            reason = why_not(spec)
        if specs.saves_x or (trains and not reason and specs.backward != "dequantized"):
            reason = "is needed as values, or in blocks of tokens, unless backward_override is 'dequantized'"
        if reason:
            raise NotImplementedError(
                f"quire.MoE: ep_dispatch='codes' does not go with {type(call.recipe).__name__}, whose x, {spec}, "
                f"{reason}; use ep_dispatch='values'"
            )
        return spec

    def _announce(self, tokens: torch.Tensor) -> str:
        """Who calls collectives, for errors. Says to the other ranks what is to be computed: with QUIRE_CHECK_RANKS=1
        in each call, and otherwise where it has changed."""
        path = path_of(self.layer).rpartition(".")[0]
        layer = f"quire.MoE {path!r}" if path else "quire.MoE"
        caller = f"{layer}, rank {self.group.index()} of {self.group.size}"
        recipe = self._recipe(tokens)
        hidden_size, num_experts = tokens.shape[-1], self.layer.num_gemms  # of all ranks

        def said() -> check_ranks.Fields:
            fields = {"layer": layer} | self._sizes(tokens.dtype, hidden_size)
            return fields | check_ranks.fields_of_text(recipe)

        if check_ranks.enabled():
            drawn = check_ranks.drawn(next(iter(self.layer.weights("").values())))
            gradient = {"gradient": "yes" if torch.is_grad_enabled() else "no"}
            self.group.check_ranks(caller, said() | gradient | drawn)
        else:
            sizes = (tokens.dtype, hidden_size, num_experts, self.capacity, self.codes, recipe)
            self.group.agree(self.layer, sizes, lambda: (caller, said()), tokens.device)
        return caller

    def _agree_in_graph(self, tokens: torch.Tensor, sent: torch.Tensor) -> None:
        """What _announce() says, without the layer, whose name no graph has. sent: what is sent first."""
        if not torch.compiler.is_compiling():
            return
        fields = self._sizes(tokens.dtype, self.layer.in_features)
        check_ranks.agree_in_graph(sent, self.group.name, "a mixture", fields, self._recipe(tokens))

    def _recipe(self, tokens: torch.Tensor) -> str:
        """The text of the recipe of the experts' matmuls, as operators get it."""
        call = active_call(self.layer, tokens)
        if call.recipe is None:
            return high_precision(is_batch_invariant_enabled())
        return specs_of(self.layer, call).text

    def _sizes(self, dtype: torch.dtype, hidden_size: int) -> check_ranks.Fields:
        """From which the sizes of what is sent follow, apart from the recipe."""
        return {
            "experts over": f"{self.group.name}, {self.layer.num_gemms} experts",
            "tokens": f"{dtype} [*, {hidden_size}]",
            "capacity": str(self.capacity),
            "dispatch": "codes" if self.codes else "values",
        }


# ------------------------------------------------------------ the layer


class MoE(ShownName, Float32Buffers):
    """A mixture of num_experts experts, the networks fc2(activation(fc1(x))). A router chooses top_k of them for each
    token. y is the sum of their results, each multiplied by its routing probability. The active recipe determines the
    quantization of the experts (quire.autocast). The router is never quantized.

    The router has router.weight [num_experts, hidden_size]. fc1 and fc2 are GroupedLinear layers with the weights of
    the experts: fc1.weight0, ..., or with single_grouped_weight one fc1.weight [num_experts, ...]. With a gated
    activation such as "swiglu" fc1 has 2 * ffn_hidden_size outputs, [gate, up] as in checkpoints. With
    shared_ffn_hidden_size there is a shared expert, shared_fc1 and shared_fc2. Its result for all tokens is added.

    The results of experts are added in a fixed order, so bits do not depend on threads. Without an ep_group, or with
    ep_capacity, the host never waits for the routing: sizes depend only on the number of tokens. One graph serves every
    routing.

    Args:
        hidden_size: the number of features of x and y.
        ffn_hidden_size: the number of features between fc1 and fc2 of an expert.
        num_experts: the number of experts.
        top_k: the number of experts of each token.
        activation: as for LayerNormMLP.
        activation_params: as for LayerNormMLP. "clamped_swiglu" has limit, alpha and glu_linear_offset.
        bias: whether experts have biases.
        expert_bias: a buffer expert_bias, float32 [num_experts], which is added to the scores only for the choice of
            experts. It stays float32 when the model is converted. Update it with quire.moe.update_expert_bias_.
        weight_on_input: routing probabilities multiply the input of an expert instead of its result.
        shared_ffn_hidden_size: the number of features between the layers of a shared expert. None: there is none.
        single_grouped_weight: whether the weights of all experts are one parameter of three dimensions.
        init_method: a function that initialises each weight of an expert; biases are then 0.
        params_dtype: the dtype of the parameters. None: torch's default.
        device: the device of the parameters. None: torch's default.
        recipe: the recipe of all layers, as for quire.Linear.
        ep_group: a process group, or its name (quire.distributed.name_group). Each of its ranks has an equal number of
            the experts, and its own tokens (docs/distributed.md). x and y have this rank's tokens, of any number. Rows
            go to the ranks that have their experts, and results come back. fc1 and fc2 have only the parameters of this
            rank's experts. Their names are those that they have in one process (GroupedLinear).
        ep_capacity: with an ep_group, the number of rows that each rank sends to each rank; all sizes follow from it.
            None: exactly the rows that there are. The host must then read their number in each call.
        ep_overflow: what happens if a rank has more rows for another rank than ep_capacity. "raise": every rank raises
            RuntimeError. "drop": the last ones, in the order of its tokens, are dropped, as those beyond `capacity`
            are.
        ep_dispatch: "values": rows are sent to experts in x's dtype. "codes": they are quantized before, and codes and
            scales are sent. Results have the same bits. "codes" needs a recipe under which each row of x has its own
            scales: MXFP8, MXFP4, fp8_block with 1 x 128 blocks, fp8_row, or NVFP4 with row_scaled_activation. If
            experts are trained, it also needs backward_override="dequantized", because gradients of weights otherwise
            use codes of x in blocks of several tokens. Without a recipe, values are sent.
        tp_group: a process group, or its name, over which each expert is sharded: fc1 by its outputs (gate and up each
            by itself), fc2 by its inputs, and shared experts likewise. All its ranks have the same tokens, and get the
            same y. Parameters are this rank's shards, under the names that they have in one process. With an ep_group
            too, the ranks form a mesh: those of one tp_group have the same experts.
        **routing: options of quire.moe.route by keyword: score_function, softmax_after_topk, renormalize, num_groups,
            group_topk, group_best, scaling_factor, capacity (docs/moe.md lists the options of well-known models).

    Raises:
        NotImplementedError: for an unknown activation, and for ep_dispatch="codes" with a tp_group.
        TypeError: for an unknown option, and for a value of the wrong type. bias is a bool; a recipe goes to recipe=.
        ValueError: if top_k is not from 1 to num_experts, for a size below 0, for parameters that the activation does
            not have, if recipe has an unknown name or is delayed, for a capacity less than 1, for ep_capacity without
            an ep_group, and for experts or features that the groups cannot shard evenly.
        RuntimeError: for a value of an option of routing that quire.moe.route does not take.

    Shape:
        - x and y: `[*, hidden_size]`.

    Examples:
        >>> layer = quire.MoE(64, 128, num_experts=4, top_k=2)
        >>> layer(torch.randn(32, 64)).shape
        torch.Size([32, 64])
    """

    @errors_name("quire.MoE")
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        activation: str = "swiglu",
        activation_params: Mapping[str, float] | None = None,
        bias: bool = False,
        expert_bias: bool = False,
        weight_on_input: bool = False,
        shared_ffn_hidden_size: int | None = None,
        single_grouped_weight: bool = False,
        init_method: Callable[[torch.Tensor], object] | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        recipe: Recipe | str | None = None,
        ep_group: "torch.distributed.ProcessGroup | str | None" = None,
        ep_capacity: int | None = None,
        ep_overflow: str = "raise",
        ep_dispatch: str = "values",
        tp_group: "torch.distributed.ProcessGroup | str | None" = None,
        **routing: object,
    ) -> None:
        check_bias("quire.MoE", bias)
        check_factory("quire.MoE", device, params_dtype=params_dtype)
        shared = {} if shared_ffn_hidden_size is None else {"shared_ffn_hidden_size": shared_ffn_hidden_size}
        check_sizes("quire.MoE", hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size, **shared)
        super().__init__()
        flags = {"weight_on_input": weight_on_input, "expert_bias": expert_bias}
        _check(num_experts, top_k, routing, single_grouped_weight=single_grouped_weight, **flags)
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.num_experts, self.top_k, self.weight_on_input = num_experts, top_k, weight_on_input
        self.routing = routing
        self._read_routing()
        _check_exchange(ep_capacity, ep_overflow, ep_dispatch, ep_group is not None)
        self.expert_group = None if ep_group is None else ExpertGroup.of("quire.MoE", ep_group, num_experts)
        self.ep_capacity, self.ep_overflow, self.ep_dispatch = ep_capacity, ep_overflow, ep_dispatch
        self._activation = activation_text("quire.MoE", activation, activation_params)
        halves = activation_inputs(activation)
        factory = {"params_dtype": params_dtype, "device": device}
        self.router = Router(hidden_size, num_experts, dtype=params_dtype, device=device)
        if expert_bias:
            self.add_float32_buffer("expert_bias", num_experts, device)
        else:
            self.register_buffer("expert_bias", None)
        options = {"bias": bias, "init_method": init_method, "recipe": recipe} | factory
        single = {"single_grouped_weight": single_grouped_weight, "single_grouped_bias": single_grouped_weight}
        _check_stacked(single_grouped_weight and tp_group is not None, bias, ep_group is not None)
        each = options | single | {"ep_group": None if self.expert_group is None else self.expert_group.name}
        first, second = _shardings(tp_group, [ffn_hidden_size] * halves, ep_dispatch)
        self.fc1 = GroupedLinear(num_experts, hidden_size, halves * ffn_hidden_size, parallel=first, **each)
        self.fc2 = GroupedLinear(num_experts, ffn_hidden_size, hidden_size, parallel=second, **each)
        self.shared_fc1 = self.shared_fc2 = None
        if shared_ffn_hidden_size is not None:
            first, second = _shardings(tp_group, [shared_ffn_hidden_size] * halves, ep_dispatch)
            self.shared_fc1 = Linear(hidden_size, halves * shared_ffn_hidden_size, parallel=first, **options)
            self.shared_fc2 = Linear(shared_ffn_hidden_size, hidden_size, parallel=second, **options)

    def forward(self, x: torch.Tensor, *, return_routing: bool = False) -> torch.Tensor | tuple[torch.Tensor, Routing]:
        """x `[*, hidden_size]` -> the same shape, in the dtype that quire.Linear would return; with return_routing also
        the Routing.

        Args:
            x: `[*, hidden_size]`.
            return_routing: whether to return (y, quire.moe.Routing).

        Raises:
            NotImplementedError: for a DTensor, and for ep_dispatch="codes" under a recipe that does not allow it.
            RuntimeError: if shapes, dtypes or devices do not fit; with ep_overflow="raise" if a rank has more rows than
                ep_capacity.
            TypeError: for what is no dense tensor; without a recipe if dtypes do not fit.
        """
        try:
            if type(x) is not torch.Tensor or x.layout != torch.strided or x.is_nested or x.is_quantized:
                _check_kind(x)
            if x.dim() == 0 or x.shape[-1] != self.hidden_size:
                raise RuntimeError(
                    f"quire.MoE: x must be [..., hidden_size] = [..., {self.hidden_size}], got {list(x.shape)}"
                )
            if self.expert_bias is not None:
                self.check_float32("quire.MoE", "expert_bias")
            tokens = x.reshape(-1, self.hidden_size)
            logits = self.router(tokens)
            if self._routing_read != (self.top_k, self.routing):
                self._read_routing()
            weights, ids = route(logits, self.expert_bias, self._routing)
            load = tokens_per_expert(ids, self.num_experts) if return_routing else None  # dropped entries count
            if self.routing.get("capacity") is not None:
                weights, ids = limit_capacity(weights, ids, self.num_experts, self.routing["capacity"])
            sent = self._exchange().dispatch(tokens, weights, ids, lambda: self._shared(tokens))
            rows, shared = sent.give_back(self._experts(sent)), sent.shared()
            y = unpermute_rows(rows, sent.row_map, None if self.weight_on_input else sent.weights)
            y = (y if shared is None else y + shared).reshape(x.shape)
            return (y, Routing(logits, sent.weights, sent.ids, load)) if return_routing else y
        except Exception as error:
            name_layer(error, self)
            raise

    def _read_routing(self) -> None:
        """Makes the operator's text of top_k and routing, and remembers what they were: they can be assigned to. Raises
        the errors of route() for values that it does not take."""
        _check(self.num_experts, self.top_k, self.routing)
        options = {name: value for name, value in self.routing.items() if name != "capacity"}
        self._routing = routing_text(self.top_k, num_experts=self.num_experts, **options)
        self._routing_read = self.top_k, dict(self.routing)

    @property
    def recipe(self) -> None:
        """There is none, as hasattr() says."""
        raise AttributeError("quire.MoE has no recipe of its own")

    @recipe.setter
    def recipe(self, value: object) -> None:
        raise AttributeError(
            f"quire.MoE has no recipe of its own, got {describe(value)}; call quire.convert(mixture, recipe), or "
            "assign it to fc1 and fc2, and to shared_fc1 and shared_fc2 if there is a shared expert"
        )

    def float32_buffers(self) -> list[str]:
        return [] if self.expert_bias is None else ["expert_bias"]

    def fill_new(self, name: str, buffer: torch.Tensor) -> None:
        buffer.zero_()

    def shard_experts(
        self,
        group: "torch.distributed.ProcessGroup",
        shard: Callable[[torch.Tensor], torch.Tensor],
        source: int | None,
        tp_group: "torch.distributed.ProcessGroup | None" = None,
        **exchange: int | str | None,
    ) -> None:
        """Keeps this rank's experts, of all, and of each its part if there is a tp_group.
        quire.distributed.ExpertParallel calls it. Arguments are those of GroupedLinear.shard_groups; exchange:
        capacity, overflow and dispatch, the constructor's."""
        _check_exchange(**exchange, sharded=True)
        if self.expert_group is not None:
            raise ValueError("quire.MoE: its experts are sharded over ranks already; shard a mixture once")
        halves = self.fc1.out_features // max(self.ffn_hidden_size, 1)
        _check_stacked(self.fc1.single_grouped_weight and tp_group is not None, bool(self.fc1.bias_names), True)
        shardings = _shardings(tp_group, [self.ffn_hidden_size] * halves, exchange["dispatch"])
        for layer, parallel in zip((self.fc1, self.fc2), shardings, strict=True):
            layer.check_unsharded(parallel)
        self.expert_group = ExpertGroup.of("quire.MoE", group, self.num_experts)
        for name, value in exchange.items():
            setattr(self, f"ep_{name}", value)
        for layer, parallel in zip((self.fc1, self.fc2), shardings, strict=True):
            layer.shard_groups(self.expert_group, shard, source)
            if parallel is not None:
                layer.shard_each_weight(parallel, source)

    def _exchange(self) -> OwnExperts | ExpertsOfRanks:
        """Where the experts are."""
        if self.expert_group is None:
            return OwnExperts(self.num_experts, self.weight_on_input)
        codes = self.ep_dispatch == "codes"
        how = (self.weight_on_input, self.ep_capacity, self.ep_overflow, codes)
        return ExpertsOfRanks(self.fc1, self.expert_group, *how)

    def _shared(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if self.shared_fc1 is None:
            return None
        h = self.shared_fc1(tokens)
        return self.shared_fc2(activate(h, self._activation, h.dtype)[0])

    def _experts(self, sent: Dispatched) -> torch.Tensor:
        for layer in (self.fc1, self.fc2):
            if layer._forward_pre_hooks:
                compute_weights(layer)
        fc1, fc2 = (Product(layer, "", active_call(layer, sent.rows)) for layer in (self.fc1, self.fc2))
        h = fc1.run(sent.rows, sent.ends, sent.codes)
        activated, buffers = activate(h, self._activation, h.dtype, offsets=sent.ends, **fc2.input())
        rows = fc2.run(activated, sent.ends, buffers)
        for product in (fc1, fc2):
            product.commit()
        return rows

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.routing.items())
        return f"top_k={self.top_k}, activation={self._activation}{options}"


def _shardings(
    group: "torch.distributed.ProcessGroup | str | None", parts: list[int], dispatch: str
) -> tuple[Parallel | None, Parallel | None]:
    """How the two weights of an expert are sharded over a tp_group. Raises NotImplementedError for rows that are sent
    as codes."""
    if group is None:
        return None, None
    if dispatch == "codes":
        raise NotImplementedError(
            "quire.MoE: ep_dispatch='codes' does not go with a tp_group, because fc1 makes its codes itself where it "
            "is sharded; use ep_dispatch='values'"
        )
    first = Parallel("column", group, parts=tuple(parts))
    return first, first.then()


def _check_stacked(stacked: bool, bias: bool, over_ranks: bool) -> None:
    """Raises NotImplementedError for stacked weights that a tp_group is to shard, with biases or over an ep_group."""
    if stacked and (bias or over_ranks):
        got = " and ".join([name for name, given in (("bias=True", bias), ("an ep_group", over_ranks)) if given])
        raise NotImplementedError(
            "quire.MoE: with a tp_group, single_grouped_weight goes neither with bias=True nor with an ep_group; got "
            f"{got}; leave single_grouped_weight and single_grouped_bias out"
        )


def _check_exchange(capacity: int | None, overflow: str, dispatch: str, sharded: bool) -> None:
    check_exchange("quire.MoE", capacity, overflow, dispatch, "ep_")
    if capacity is not None and not sharded:
        raise ValueError(f"quire.MoE: ep_capacity goes with an ep_group; got {capacity} without one")


def _check_kind(x: object) -> None:
    check_type("quire.MoE", torch.Tensor, x=x)
    if is_dtensor(x):
        raise NotImplementedError(
            f"quire.MoE: x is a DTensor with {x.placements}; pass this rank's tokens, x.to_local()"
        )
    check_dense("quire.MoE", x=x)


def _check(num_experts: int, top_k: int, routing: Mapping[str, object], **flags: object) -> None:
    check_type("quire.MoE", int, num_experts=num_experts, top_k=top_k)
    check_type("quire.MoE", bool, **flags)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"quire.MoE: top_k must be from 1 to num_experts = {num_experts}, got {top_k}")
    if unknown := [name for name in routing if name not in _ROUTE_OPTIONS]:
        raise TypeError(
            f"quire.MoE got an unexpected keyword argument {unknown[0]!r}; options of routing are "
            f"{', '.join(_ROUTE_OPTIONS)}; the dtype of parameters is params_dtype"
        )
    capacity = routing.get("capacity")
    check_type_or_none("quire.MoE", int, capacity=capacity)
    if capacity is not None and capacity < 1:
        raise ValueError(
            f"quire.MoE: capacity, the number of entries that each expert accepts, must be at least 1, or None for no "
            f"limit, got {capacity}"
        )
