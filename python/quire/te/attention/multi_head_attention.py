"""Attention with its projections: queries, keys, values and output are quire's linear layers."""

import torch

from quire.checks import check_type, errors_name
from quire.distributed.groups import group_size
from quire.nn.te_extra_state import drop_extra_state
from quire.te.arguments import Given, part_name, takes
from quire.te.attention.dot_product_attention import DotProductAttention, refuse_context_parallel
from quire.te.attention.rope import apply_rotary_pos_emb, positions_of, turn
from quire.te.layers import LayerNorm, LayerNormLinear, Linear, RMSNorm

_WHAT = "quire.te.MultiheadAttention"
_OPTIONS = {
    "kv_channels": None,
    "attention_dropout": 0.1,
    "layernorm_epsilon": 1e-5,
    "init_method": None,
    "output_layer_init_method": None,
    "layer_number": None,
    "attn_mask_type": "causal",
    "window_size": None,
    "bottom_right_diagonal": None,
    "tp_group": None,
    "tp_size": 1,
    "num_gqa_groups": None,
    "fuse_wgrad_accumulation": False,
    "get_rng_state_tracker": None,
    "sequence_parallel": False,
    "params_dtype": None,
    "return_bias": False,
    "return_layernorm_output": False,
    "input_layernorm": False,
    "attention_type": "self",
    "set_parallel_mode": False,
    "fuse_qkv_params": False,
    "zero_centered_gamma": False,
    "qkv_weight_interleaved": True,
    "rotary_pos_interleaved": False,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "bias": True,
    "normalization": "LayerNorm",
    "device": None,
    "qkv_format": "sbhd",
    "name": None,
    "qk_norm_type": None,
    "qk_norm_eps": 1e-6,
    "qk_norm_before_rope": False,
    "seq_length": None,
    "micro_batch_size": None,
    "softmax_type": "vanilla",
}
#: Of forward, here and in TransformerLayer, after those that say what attends to what.
SHARED_CALL = {
    "is_first_microbatch": None,
    "checkpoint_core_attention": False,
    "inference_params": None,
    "rotary_pos_emb": None,
    "core_attention_bias_type": "no_bias",
    "core_attention_bias": None,
    "alibi_slopes": None,
    "cu_seqlens_q": None,
    "cu_seqlens_kv": None,
    "cu_seqlens_q_padded": None,
    "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None,
    "max_seqlen_kv": None,
    "fast_zero_fill": True,
    "pad_between_seqs": None,
}
_CALL = {
    "attention_mask": None,
    "encoder_output": None,
    "attn_mask_type": None,
    "window_size": None,
    "bottom_right_diagonal": None,
    **SHARED_CALL,
}
#: The options among these that are passed to DotProductAttention unchanged.
_OF_CORE = [name for name in _CALL if name not in ("encoder_output", "is_first_microbatch", "rotary_pos_emb")]


def normal_values(weight: torch.Tensor) -> None:
    """TransformerEngine's initial values: a normal distribution with the standard deviation 0.023."""
    torch.nn.init.normal_(weight, mean=0.0, std=0.023)


class L2Normalization(torch.nn.Module):
    """x / sqrt(sum(x**2) + eps) over the last dimension, in float32, in x's dtype."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.to(torch.promote_types(x.dtype, torch.float32))
        return (values * torch.rsqrt(values.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        drop_extra_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *options)


_QK_NORMS = {"L2Normalization": L2Normalization, "RMSNorm": RMSNorm, "LayerNorm": LayerNorm}


class MultiheadAttention(torch.nn.Module):
    """Attention with several heads: projections of x to queries, keys and values, DotProductAttention, and a
    projection of its result. Projections run in the active recipe's formats, attention itself in high precision.

    hidden_size, num_attention_heads: of all ranks. kv_channels: features of a head; None: hidden_size /
        num_attention_heads. num_gqa_groups: heads of keys and values; None: as many as of queries.
    attention_type: "self", or "cross", where keys and values are projections of encoder_output.
    input_layernorm: x goes through a norm first (normalization, layernorm_epsilon, zero_centered_gamma);
        return_layernorm_output: its result is returned too.
    fuse_qkv_params: one weight for queries, keys and values (self) or for keys and values (cross), whose rows are head
        by head, or with qkv_weight_interleaved=False all queries, all keys, all values. Without it each has a weight of
        its own, and fuse_wgrad_accumulation and quantized_model_init are not available.
    init_method, output_layer_init_method: of the projections; None: a normal distribution, deviation 0.023.
    qk_norm_type: "L2Normalization", "RMSNorm" or "LayerNorm" of the features of each head of queries and keys, after
        the rotary embedding, or with qk_norm_before_rope before it. qk_norm_eps: its epsilon.
    rotary_pos_interleaved: as apply_rotary_pos_emb()'s interleaved.
    bias, return_bias, params_dtype, device, fuse_wgrad_accumulation, ub_*: as for quire.Linear.
    set_parallel_mode, tp_group, tp_size, sequence_parallel, get_rng_state_tracker: heads are sharded over ranks;
        then qkv_weight_interleaved=False needs fuse_qkv_params=False. Each rank has the gradient that its own heads
        give to a norm of queries and keys.
    attention_dropout, attn_mask_type, window_size, bottom_right_diagonal, qkv_format, layer_number, softmax_type: as
        for DotProductAttention. seq_length and micro_batch_size change nothing.

    Parameters, with the names of TransformerEngine: self: layernorm_qkv or qkv (input_layernorm or not), with weight
    and bias, or query_weight, key_weight, value_weight and so on; cross: layernorm_query or query_layer, and key_value;
    both: proj, q_norm, k_norm, core_attention.softmax_offset.
    """

    @takes(_OPTIONS)
    @errors_name(_WHAT)
    def __init__(self, hidden_size: int, num_attention_heads: int, options: dict[str, object]) -> None:
        super().__init__()
        given = Given(**options)
        tp_size = given.tp_size if given.tp_group is None else group_size(given.tp_group)
        check_type(_WHAT, int, hidden_size=hidden_size, num_attention_heads=num_attention_heads)
        _check(given, tp_size)
        if num_attention_heads < 1:
            raise ValueError(f"{_WHAT}: num_attention_heads must be a positive number, got {num_attention_heads}")
        dim = given.kv_channels or hidden_size // num_attention_heads
        groups = num_attention_heads if given.num_gqa_groups is None else given.num_gqa_groups
        if num_attention_heads % groups or groups % tp_size:
            raise ValueError(
                f"{_WHAT}: num_gqa_groups must divide num_attention_heads, and be a multiple of the number of "
                f"ranks; got {groups} groups, {num_attention_heads} heads and {tp_size} ranks"
            )
        self.attention_type, self.input_layernorm = given.attention_type, given.input_layernorm
        self.return_bias, self.return_layernorm_output = given.return_bias, given.return_layernorm_output
        self.attn_mask_type, self.window_size = given.attn_mask_type, given.window_size
        self.bottom_right_diagonal, self.qkv_format = given.bottom_right_diagonal, given.qkv_format
        self.qkv_weight_interleaved = given.qkv_weight_interleaved and given.fuse_qkv_params
        self.rotary_pos_interleaved = given.rotary_pos_interleaved
        self.qk_norm_before_rope, self.softmax_type, self.name = (
            given.qk_norm_before_rope,
            given.softmax_type,
            given.name,
        )
        self.layer_number = 1 if given.layer_number is None else given.layer_number
        self.tp_group, self.tp_size, self.sequence_parallel = given.tp_group, tp_size, given.sequence_parallel
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.num_attention_heads_per_partition = num_attention_heads // tp_size
        self.num_gqa_groups_per_partition = groups // tp_size
        self.hidden_size_per_attention_head = dim
        self.hidden_size_q, self.hidden_size_kv = dim * num_attention_heads, dim * groups
        self.q_norm, self.k_norm = self._qk_norms(given)
        self._add_projections(hidden_size, given)
        with torch.device(given.device or torch.get_default_device()):  # of softmax_offset
            self.core_attention = self._core(given)

    def _qk_norms(self, given: Given) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
        if given.qk_norm_type is None:
            return None, None
        if given.qk_norm_type not in _QK_NORMS:
            raise ValueError(f"{_WHAT}: qk_norm_type must be one of {', '.join(_QK_NORMS)}, got {given.qk_norm_type!r}")
        kind, size = _QK_NORMS[given.qk_norm_type], self.hidden_size_per_attention_head
        if kind is L2Normalization:
            return kind(given.qk_norm_eps), kind(given.qk_norm_eps)
        options = {"eps": given.qk_norm_eps, "params_dtype": given.params_dtype, "device": given.device}
        return kind(size, **options), kind(size, **options)

    def _add_projections(self, hidden_size: int, given: Given) -> None:
        names = "fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker sequence_parallel params_dtype device"
        common = {name: getattr(given, name) for name in names.split()} | {"bias": given.bias}
        overlaps = {name: getattr(given, name) for name in ("ub_overlap_ag", "ub_overlap_rs_dgrad")}
        overlaps |= {name: getattr(given, name) for name in ("ub_bulk_dgrad", "ub_bulk_wgrad")}
        first = common | {"init_method": given.init_method or normal_values}
        first["parallel_mode"] = "column" if given.set_parallel_mode else None
        normed = first | overlaps | {"eps": given.layernorm_epsilon, "normalization": given.normalization}
        normed |= {name: getattr(given, name) for name in ("return_layernorm_output", "zero_centered_gamma")}
        q, kv = self.hidden_size_q, self.hidden_size_kv
        parts = {"query": q, "key": kv, "value": kv}
        if self.attention_type == "self":
            own = {"parameters_split": None if given.fuse_qkv_params else parts}
            if self.input_layernorm:
                name = part_name(given.name, "layernorm_linear_qkv")
                self.layernorm_qkv = LayerNormLinear(hidden_size, q + 2 * kv, **normed, **own, name=name)
            else:
                name = part_name(given.name, "linear_qkv")
                self.qkv = Linear(hidden_size, q + 2 * kv, **first, **own, name=name)
        else:
            if self.input_layernorm:
                own = {"parameters_split": None if given.fuse_qkv_params else ("query",)}
                name = part_name(given.name, "layernorm_linear_q")
                self.layernorm_query = LayerNormLinear(hidden_size, q, **normed, **own, name=name)
            else:
                self.query_layer = Linear(hidden_size, q, **first, name=part_name(given.name, "linear_q"))
            own = {"parameters_split": None if given.fuse_qkv_params else ("key", "value")}
            self.key_value = Linear(hidden_size, 2 * kv, **first, **own, name=part_name(given.name, "linear_kv"))
        last = common | {name: getattr(given, name) for name in ("return_bias", "ub_overlap_ag", "ub_overlap_rs")}
        last["init_method"] = given.output_layer_init_method or normal_values
        last["name"] = part_name(given.name, "proj")
        self.proj = Linear(q, hidden_size, parallel_mode="row" if given.set_parallel_mode else None, **last)

    def _core(self, given: Given) -> DotProductAttention:
        names = (
            "attention_dropout qkv_format get_rng_state_tracker sequence_parallel tp_group attention_type softmax_type"
        )
        return DotProductAttention(
            self.num_attention_heads,
            self.hidden_size_per_attention_head,
            self.num_gqa_groups,
            layer_number=self.layer_number,
            tp_size=self.tp_size,
            **{name: getattr(given, name) for name in names.split()},
        )

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """Sets the group over whose ranks heads are sharded, for a layer that was made with tp_size (as in
        quire.Linear)."""
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)
        self.tp_group = tp_group

    def set_context_parallel_group(self, cp_group: object, *_: object, **__: object) -> None:
        """Accepts None and groups of one process. Raises NotImplementedError for others."""
        refuse_context_parallel(_WHAT, cp_group)

    @takes(_CALL)
    def forward(
        self, hidden_states: torch.Tensor, options: dict[str, object]
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """x [s, b, hidden_size] -> y [s, b, hidden_size], in the order of qkv_format ("thd": [t, hidden_size]), or with
        return_bias and return_layernorm_output (y, bias, result of the norm).

        encoder_output: [s, b, hidden_size], for attention_type="cross". is_first_microbatch: as for quire.Linear.
        rotary_pos_emb: of RotaryPositionEmbedding, for queries and keys, or a pair of them.
        inference_params: keys and values of earlier calls (InferenceParams). Cross attention does not keep its own: it
            computes the keys and values of encoder_output in each call.
        All other arguments are as in DotProductAttention.forward. Raises ValueError for arguments that do not fit.
        """
        call = Given(**options)
        normed = None
        if self.attention_type == "self":
            projection = self.layernorm_qkv if self.input_layernorm else self.qkv
            mixed = projection(hidden_states, is_first_microbatch=call.is_first_microbatch)
            mixed, normed = mixed if isinstance(mixed, tuple) else (mixed, None)
            q, k, v = self._separate(mixed)
        else:
            q, k, v, normed = self._cross(hidden_states, call)
        q, k = self._with_positions(q, k, call)
        own = {name: options[name] for name in _OF_CORE} | {"qkv_format": self.qkv_format}
        for name in ("attn_mask_type", "window_size", "bottom_right_diagonal"):
            own[name] = getattr(self, name) if options[name] is None else options[name]
        if self.attention_type == "cross":
            own["inference_params"] = None
        y = self.proj(self.core_attention(q, k, v, **own), is_first_microbatch=call.is_first_microbatch)
        results = y if isinstance(y, tuple) else (y,)
        results += (normed,) if self.input_layernorm and self.return_layernorm_output else ()
        return results if len(results) > 1 else results[0]

    def _separate(self, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values [*, heads, dim] of one projection."""
        heads, groups = self.num_attention_heads_per_partition, self.num_gqa_groups_per_partition
        dim = self.hidden_size_per_attention_head
        if self.qkv_weight_interleaved:
            parts = mixed.unflatten(-1, (groups, heads // groups + 2, dim)).split([heads // groups, 1, 1], dim=-2)
            return tuple(part.flatten(-3, -2) for part in parts)
        parts = mixed.split([heads * dim, groups * dim, groups * dim], dim=-1)
        return tuple(part.unflatten(-1, (-1, dim)) for part in parts)

    def _cross(self, x: torch.Tensor, call: Given) -> tuple[torch.Tensor | None, ...]:
        """Queries of x, keys and values of encoder_output, and the result of the norm or None."""
        if call.encoder_output is None:
            raise ValueError(f"{_WHAT}: attention_type='cross' needs encoder_output, got None")
        dim, groups = self.hidden_size_per_attention_head, self.num_gqa_groups_per_partition
        mixed = self.key_value(call.encoder_output, is_first_microbatch=call.is_first_microbatch)
        if self.qkv_weight_interleaved:
            k, v = mixed.unflatten(-1, (groups, 2 * dim)).chunk(2, dim=-1)
        else:
            k, v = mixed.unflatten(-1, (2 * groups, dim)).chunk(2, dim=-2)
        projection = self.layernorm_query if self.input_layernorm else self.query_layer
        q = projection(x, is_first_microbatch=call.is_first_microbatch)
        q, normed = q if isinstance(q, tuple) else (q, None)
        return q.unflatten(-1, (-1, dim)), k, v, normed

    def _with_positions(self, q: torch.Tensor, k: torch.Tensor, call: Given) -> tuple[torch.Tensor, torch.Tensor]:
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if call.rotary_pos_emb is not None:
            pair = call.rotary_pos_emb if isinstance(call.rotary_pos_emb, tuple) else (call.rotary_pos_emb,) * 2
            q = self._turned(q, pair[0], call, "q")
            k = self._turned(k, pair[1], call, "kv")
        if self.q_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k

    def _turned(self, t: torch.Tensor, freqs: torch.Tensor, call: Given, of: str) -> torch.Tensor:
        cache = None if self.attention_type == "cross" and of == "kv" else call.inference_params
        cu_seqlens = getattr(call, f"cu_seqlens_{of}")
        starts = getattr(call, f"cu_seqlens_{of}_padded")
        cu_seqlens = cu_seqlens if starts is None else starts
        if cache is None:
            options = {"interleaved": self.rotary_pos_interleaved, "cu_seqlens": cu_seqlens}
            return apply_rotary_pos_emb(t, freqs, self.qkv_format, **options)
        if freqs.shape[0] < cache.max_sequence_length:
            raise ValueError(
                f"{_WHAT}: rotary_pos_emb has {freqs.shape[0]} positions, and the cache of inference_params room for "
                f"{cache.max_sequence_length} tokens; call RotaryPositionEmbedding with that max_seq_len"
            )
        before = cache.get_seqlens_pre_step().to(t.device)
        if self.qkv_format == "thd":
            cu_seqlens = cache.cu_seqlens_q.to(t.device)
        else:
            before = before[: t.shape[1 if self.qkv_format == "sbhd" else 0]]
        return turn(t, freqs, positions_of(t, self.qkv_format, before, cu_seqlens), self.rotary_pos_interleaved)


def _check(given: Given, tp_size: int) -> None:
    if given.attention_type not in ("self", "cross"):
        raise ValueError(f"{_WHAT}: attention_type must be 'self' or 'cross', got {given.attention_type!r}")
    if given.layer_number is not None and given.layer_number < 1:
        raise ValueError(f"{_WHAT}: layer_number must be a positive number or None, got {given.layer_number}")
    if tp_size > 1 and not given.set_parallel_mode:
        raise NotImplementedError(
            f"{_WHAT}: a group of {tp_size} ranks without set_parallel_mode is not available, because the "
            "projections would not be sharded as the heads are; pass set_parallel_mode=True"
        )
    if tp_size > 1 and given.fuse_qkv_params and not given.qkv_weight_interleaved:
        raise NotImplementedError(
            f"{_WHAT}: fuse_qkv_params=True with qkv_weight_interleaved=False is not available over several ranks; "
            "pass qkv_weight_interleaved=True or fuse_qkv_params=False"
        )
