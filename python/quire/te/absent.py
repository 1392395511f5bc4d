"""Names of TransformerEngine that quire has nothing for: why, and what to use instead."""

_USERBUFFERS = (
    "communication is PyTorch's own here",
    "torch.distributed.tensor.parallel, whose async tensor parallelism overlaps it",
)
_AUTOGRAD = ("saving is autograd's own here", "ctx.save_for_backward, which takes a QuantizedTensor as it is")
_OFFLOADING = ("offloading is PyTorch's own here", "torch.autograd.graph.save_on_cpu")
_HYBRID = (
    "a tensor has one spec for both directions",
    "quire.recipe.CustomRecipe, with a spec for each operand, or backward_override",
)
_IDENTITY = (
    "tensors in high precision are plain tensors",
    "quire.te.IdentityQuantizer, which returns them as they are",
)
_COLLECTIVES = (
    "layers communicate themselves",
    "tensor_parallel_mode of quire.te.ops.Linear, or torch.distributed.nn.functional",
)
_FUSION = (
    "operations are composed of layers and never fused",
    "any torch.nn.Module in quire.te.ops.Sequential",
)

#: Name -> (reason, alternative).
NAMES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), _USERBUFFERS),
    **dict.fromkeys(("prepare_for_saving", "restore_from_saved", "restore_from_func_ctx"), _AUTOGRAD),
    **dict.fromkeys(("get_cpu_offload_context", "mark_not_offload", "ManualOffloadSynchronizer"), _OFFLOADING),
    **dict.fromkeys(("HybridQuantizer", "HybridQuantizedTensor", "HybridQuantizedTensorStorage"), _HYBRID),
    **dict.fromkeys(("IdentityTensor", "IdentityTensorStorage"), _IDENTITY),
    **dict.fromkeys(("CusolverMpCtx", "newton_schulz"), ("optimizers are PyTorch's own here", "torch.optim.Muon")),
    "FusedMLAQUpProjRopeQuant": (
        "there is no multi-latent attention",
        "quire.Linear, quire.te.apply_rotary_pos_emb and quire.te.DotProductAttention",
    ),
    "GroupedTensorStorage": ("a GroupedTensor has no other class for internal use", "quire.te.GroupedTensor"),
    **dict.fromkeys(("AllGather", "AllReduce", "ReduceScatter"), _COLLECTIVES),
    "fused": _FUSION,
    "get_cudnn_version": ("quire does not use cuDNN", "torch.backends.cudnn.version"),
    "get_device_compute_capability": (
        "is_fp8_available(), is_mxfp8_available() and so on run a computation, and look at no version",
        "torch.cuda.get_device_capability",
    ),
    "onnx_export": ("ONNX has no operators for these formats", "torch.export.export and AOTInductor"),
    "optimizers": ("optimizers are PyTorch's own here", "torch.optim.AdamW with fused=True"),
    "parallel_cross_entropy": (
        "losses are PyTorch's own here",
        "torch.nn.functional.cross_entropy within torch.distributed.tensor.parallel.loss_parallel",
    ),
}


def message(name: str, module: str = "quire.te") -> str:
    """What a module says when asked for a name that it has not. An AttributeError, so that code which asks by
    hasattr() or catches ImportError finds its other way."""
    if name not in NAMES:
        return f"module {module!r} has no attribute {name!r}"
    reason, alternative = NAMES[name]
    return f"{module}.{name} is not available: {reason}. Use {alternative}"
