"""How tokens reach the experts of a mixture and how results come back: experts of this process, or of several ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from quire.autocast import is_batch_invariant_enabled
from quire.distributed import check_ranks
from quire.distributed.experts import ExpertGroup, Sender, pack, plan, unpack, why_not
from quire.functional import Buffers, permute_rows
from quire.moe import permute
from quire.nn.grouped_linear import GroupedLinear
from quire.nn.layer_path import path_of
from quire.nn.product import active_call, specs_of
from quire.recipe.linear_spec import high_precision


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
        rows, ends, row_map = permute(tokens, ids, self.num_experts, weights=factors)
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
