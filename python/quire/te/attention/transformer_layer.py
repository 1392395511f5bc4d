"""A transformer layer: self attention, for a decoder also attention to an encoder's output, and an MLP."""

import torch

from quire.checks import check_type, errors_name
from quire.distributed.groups import group_size
from quire.nn.layer_base import activation_dtype
from quire.te.arguments import Given, part_name, takes
from quire.te.attention.dot_product_attention import refuse_context_parallel
from quire.te.attention.masks import mask_type_of
from quire.te.attention.multi_head_attention import SHARED_CALL, MultiheadAttention, normal_values
from quire.te.layers import LayerNorm, LayerNormMLP, RMSNorm

_WHAT = "quire.te.TransformerLayer"
_OPTIONS = {
    "num_gqa_groups": None,
    "layernorm_epsilon": 1e-5,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method": None,
    "output_layer_init_method": None,
    "layer_number": None,
    "kv_channels": None,
    "self_attn_mask_type": "causal",
    "window_size": None,
    "bottom_right_diagonal": None,
    "enc_dec_attn_mask_type": "no_mask",
    "enc_dec_bottom_right_diagonal": None,
    "enc_dec_window_size": None,
    "tp_group": None,
    "tp_size": 1,
    "params_dtype": None,
    "get_rng_state_tracker": None,
    "fuse_wgrad_accumulation": False,
    "seq_length": None,
    "micro_batch_size": None,
    "sequence_parallel": False,
    "apply_residual_connection_post_layernorm": False,
    "output_layernorm": False,
    "parallel_attention_mlp": False,
    "layer_type": "encoder",
    "drop_path_rate": 0.0,
    "set_parallel_mode": False,
    "fuse_qkv_params": False,
    "rotary_pos_interleaved": False,
    "zero_centered_gamma": False,
    "qkv_weight_interleaved": True,
    "ub_tp_comm_overlap": False,
    "ub_overlap_ag": True,
    "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True,
    "bias": True,
    "activation": "gelu",
    "activation_params": None,
    "normalization": "LayerNorm",
    "device": None,
    "attn_input_format": "sbhd",
    "name": None,
    "qk_norm_type": None,
    "qk_norm_eps": 1e-6,
    "qk_norm_before_rope": False,
    "softmax_type": "vanilla",
}
_CALL = {
    "attention_mask": None,
    "self_attn_mask_type": None,
    "window_size": None,
    "bottom_right_diagonal": None,
    "encoder_output": None,
    "enc_dec_attn_mask": None,
    "enc_dec_attn_mask_type": None,
    "enc_dec_window_size": None,
    "enc_dec_bottom_right_diagonal": None,
    **SHARED_CALL,
}
#: The options among these that are passed to both attentions unchanged.
_OF_BOTH = (
    "is_first_microbatch checkpoint_core_attention inference_params rotary_pos_emb core_attention_bias_type "
    "core_attention_bias alibi_slopes cu_seqlens_q cu_seqlens_q_padded max_seqlen_q"
).split()
_OVERLAPS = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
#: Arguments of MultiheadAttention and of LayerNormMLP by the same names.
_OF_ALL = (
    "fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker sequence_parallel params_dtype set_parallel_mode "
    "zero_centered_gamma bias normalization device"
).split()
_OF_ATTENTION = (
    "kv_channels attention_dropout layernorm_epsilon layer_number num_gqa_groups fuse_qkv_params "
    "qkv_weight_interleaved rotary_pos_interleaved qk_norm_type qk_norm_eps qk_norm_before_rope softmax_type"
).split()


class DropPath(torch.nn.Module):
    """In training, x / (1 - rate) or zero, with the probability `rate`, for each sample: each entry of dimension
    batch_dim."""

    def __init__(self, rate: float, batch_dim: int) -> None:
        super().__init__()
        self.rate, self.batch_dim = rate, batch_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return x
        shape = [size if dim == self.batch_dim else 1 for dim, size in enumerate(x.shape)]
        kept = torch.rand(shape, dtype=torch.float32, device=x.device) >= self.rate
        return x * (kept.float() / (1 - self.rate or 1)).to(x.dtype)  # of the rate 1, nothing is kept


class TransformerLayer(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Linear layers run in the active recipe's formats, attention itself
    in high precision.

    hidden_size, ffn_hidden_size, num_attention_heads: of all ranks. activation, activation_params: as for
        quire.LayerNormMLP.
    layer_type: "encoder", or "decoder", which has cross attention between self attention and MLP.
    hidden_dropout: probability that a feature of what is added to x is dropped, in training. drop_path_rate:
        probability that all of it is dropped for a sample.
    apply_residual_connection_post_layernorm: what is added to is the result of the norm, instead of its input.
    output_layernorm: the norm is after the layer, and none before self attention.
    parallel_attention_mlp: x + attention(norm(x)) + mlp(norm(x)).
    self_attn_mask_type, window_size, bottom_right_diagonal: of self attention; enc_dec_*: of cross attention.
    attn_input_format: qkv_format of DotProductAttention: "sbhd", "bshd" or "thd".
    set_parallel_mode, tp_group, tp_size, sequence_parallel, get_rng_state_tracker: as for quire.Linear; heads and
        ffn_hidden_size are sharded. ub_*: only with ub_tp_comm_overlap, then as for quire.Linear.
    All others are those of MultiheadAttention.

    Parameters, with the names of TransformerEngine: those of self_attention and inter_attention (MultiheadAttention),
    of layernorm_mlp (quire.LayerNormMLP) and with output_layernorm of layernorm. Raises ValueError for options that do
    not go together.
    """

    @takes(_OPTIONS)
    @errors_name(_WHAT)
    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, options: dict[str, object]
    ) -> None:
        super().__init__()
        given = Given(**options)
        _check(given)
        for name in _OVERLAPS:
            setattr(given, name, given.ub_tp_comm_overlap and getattr(given, name))
        given.tp_size = given.tp_size if given.tp_group is None else group_size(given.tp_group)
        given.init_method = given.init_method or normal_values
        given.output_layer_init_method = given.output_layer_init_method or normal_values
        self.self_attn_mask_type = mask_type_of(_WHAT, given.self_attn_mask_type)
        self.enc_dec_attn_mask_type = mask_type_of(_WHAT, given.enc_dec_attn_mask_type)
        self.window_size, self.bottom_right_diagonal = given.window_size, given.bottom_right_diagonal
        self.enc_dec_window_size = given.enc_dec_window_size
        self.enc_dec_bottom_right_diagonal = given.enc_dec_bottom_right_diagonal
        self.layer_number, self.layer_type, self.name = given.layer_number, given.layer_type, given.name
        self.output_layernorm, self.parallel_attention_mlp = given.output_layernorm, given.parallel_attention_mlp
        self.apply_residual_connection_post_layernorm = given.apply_residual_connection_post_layernorm
        self.hidden_dropout, self.tp_size = given.hidden_dropout, given.tp_size
        common = {name: getattr(given, name) for name in (*_OF_ALL, *_OVERLAPS, "init_method")}
        common |= {
            "output_layer_init_method": given.output_layer_init_method,
            "return_bias": not given.parallel_attention_mlp,
            "return_layernorm_output": given.apply_residual_connection_post_layernorm,
        }
        own = {name: getattr(given, name) for name in _OF_ATTENTION} | {"qkv_format": given.attn_input_format}
        attention = (hidden_size, num_attention_heads)
        self.self_attention = MultiheadAttention(
            *attention,
            **common,
            **own,
            input_layernorm=not given.output_layernorm,
            name=part_name(given.name, "self_attention"),
        )
        if given.layer_type == "decoder":
            cross = {"input_layernorm": True, "attention_type": "cross"}
            cross["name"] = part_name(given.name, "inter_attention")
            self.inter_attention = MultiheadAttention(*attention, **common, **own, **cross)
        of_mlp = {"activation": given.activation, "activation_params": given.activation_params}
        of_mlp["name"] = part_name(given.name, "layernorm_mlp")
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, given.layernorm_epsilon, **common, **of_mlp)
        batch_dim = 1 if given.attn_input_format == "sbhd" else 0
        self.drop_path = DropPath(given.drop_path_rate, batch_dim) if given.drop_path_rate > 0 else None
        if given.output_layernorm:
            norm = LayerNorm if given.normalization == "LayerNorm" else RMSNorm
            self.layernorm = norm(
                hidden_size,
                given.layernorm_epsilon,
                sequence_parallel=given.tp_size > 1 and given.sequence_parallel,
                params_dtype=given.params_dtype,
                zero_centered_gamma=given.zero_centered_gamma,
                device=given.device,
            )

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """Sets the group over whose ranks the layer is sharded, if it was made with tp_size (as in quire.Linear)."""
        for child in self.children():
            if hasattr(child, "set_tensor_parallel_group"):
                child.set_tensor_parallel_group(tp_group)

    def set_context_parallel_group(self, cp_group: object, *_: object, **__: object) -> None:
        """Accepts None and groups of one process. Raises NotImplementedError for others."""
        refuse_context_parallel(_WHAT, cp_group)

    @takes(_CALL)
    def forward(self, hidden_states: torch.Tensor, options: dict[str, object]) -> torch.Tensor:
        """x [s, b, hidden_size] -> [s, b, hidden_size], in the order of attn_input_format ("thd": [t, hidden_size]).

        attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal: of self attention, as for
            DotProductAttention.forward. cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q: of its queries and keys.
        encoder_output: [s2, b, hidden_size], for a decoder. enc_dec_attn_mask, enc_dec_attn_mask_type,
            enc_dec_window_size, enc_dec_bottom_right_diagonal: of cross attention. cu_seqlens_kv,
            cu_seqlens_kv_padded, max_seqlen_kv: of its keys.
        All other arguments are as in MultiheadAttention.forward. With torch.autocast, x is taken in its dtype.
        """
        check_type(_WHAT, torch.Tensor, hidden_states=hidden_states)
        call, x = Given(**options), hidden_states.to(activation_dtype(hidden_states))
        attended = self.self_attention(x, **self._of_self_attention(options))
        if self.parallel_attention_mlp:
            mlp = self.layernorm_mlp(x, is_first_microbatch=call.is_first_microbatch)
            return self._added(x, attended, mlp, self.drop_path)
        x = self._residual(x, attended, self.drop_path)
        if self.layer_type == "decoder":
            x = self._residual(x, self.inter_attention(x, **self._of_cross_attention(options)), None)
        x = self._residual(x, self.layernorm_mlp(x, is_first_microbatch=call.is_first_microbatch), self.drop_path)
        return self.layernorm(x) if self.output_layernorm else x

    def _of_self_attention(self, options: dict[str, object]) -> dict[str, object]:
        own = {name: options[name] for name in _OF_BOTH}
        own |= {
            f"{name.replace('_q', '_kv')}": own[name]
            for name in ("cu_seqlens_q", "cu_seqlens_q_padded", "max_seqlen_q")
        }
        own |= {"attention_mask": options["attention_mask"]}
        own |= {"attn_mask_type": options["self_attn_mask_type"] or self.self_attn_mask_type}
        for name in ("window_size", "bottom_right_diagonal"):
            own[name] = getattr(self, name) if options[name] is None else options[name]
        return own

    def _of_cross_attention(self, options: dict[str, object]) -> dict[str, object]:
        names = (*_OF_BOTH, "encoder_output", "cu_seqlens_kv", "cu_seqlens_kv_padded", "max_seqlen_kv")
        own = {name: options[name] for name in names} | {"attention_mask": options["enc_dec_attn_mask"]}
        own |= {"attn_mask_type": options["enc_dec_attn_mask_type"] or self.enc_dec_attn_mask_type}
        for name in ("window_size", "bottom_right_diagonal"):
            of_cross = options[f"enc_dec_{name}"]
            own[name] = getattr(self, f"enc_dec_{name}") if of_cross is None else of_cross
        return own

    def _residual(
        self, x: torch.Tensor, results: tuple[torch.Tensor | None, ...], drop_path: DropPath | None
    ) -> torch.Tensor:
        """x plus the results of a part of the layer: (y, bias), or (y, bias, what to add to instead of x)."""
        y, bias = results[:2]
        return self._added(results[2] if len(results) > 2 else x, y, bias, drop_path)

    def _added(
        self, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None, drop_path: DropPath | None
    ) -> torch.Tensor:
        y = y if bias is None else y + bias.to(y.dtype)
        y = torch.nn.functional.dropout(y, self.hidden_dropout, self.training)
        return x + (y if drop_path is None else drop_path(y))


def _check(given: Given) -> None:
    if not 0 <= given.drop_path_rate <= 1:
        raise ValueError(f"{_WHAT}: drop_path_rate must be 0 to 1, got {given.drop_path_rate}")
    if given.layer_type not in ("encoder", "decoder"):
        raise ValueError(f"{_WHAT}: layer_type must be 'encoder' or 'decoder', got {given.layer_type!r}")
    others = {
        "layer_type='decoder'": given.layer_type == "decoder",
        "apply_residual_connection_post_layernorm": given.apply_residual_connection_post_layernorm,
        "output_layernorm": given.output_layernorm,
    }
    wrong = [name for name, asked in others.items() if asked]
    if given.parallel_attention_mlp and wrong:
        raise ValueError(f"{_WHAT}: parallel_attention_mlp does not go with {' and '.join(wrong)}; leave one out")
    if given.fuse_wgrad_accumulation and not given.fuse_qkv_params:
        raise ValueError(f"{_WHAT}: fuse_wgrad_accumulation=True needs fuse_qkv_params=True, got False")
