"""Names of TransformerEngine that quire has nothing for: why, and what to use instead."""

_USERBUFFERS = (
    "communication is PyTorch's own here",
    "torch.distributed.tensor.parallel, whose async tensor parallelism overlaps it",
)
_AUTOGRAD = ("saving is autograd's own here", "ctx.save_for_backward, which takes a QuantizedTensor as it is")

#: Name -> (reason, alternative).
NAMES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), _USERBUFFERS),
    **dict.fromkeys(("prepare_for_saving", "restore_from_saved", "restore_from_func_ctx"), _AUTOGRAD),
    "make_graphed_callables": (
        "there are no CUDA kernels in this version, and so no CUDA graphs",
        "torch.compile(fullgraph=True)",
    ),
    "get_cpu_offload_context": ("offloading is PyTorch's own here", "torch.autograd.graph.save_on_cpu"),
    "get_cudnn_version": ("quire does not use cuDNN", "torch.backends.cudnn.version"),
    "get_device_compute_capability": (
        "is_fp8_available() and its like try instead of looking at a version",
        "torch.cuda.get_device_capability",
    ),
    "onnx_export": ("ONNX has no operators for these formats", "torch.export.export and AOTInductor"),
    "ops": ("norms and activations are fused inside of layers", "quire.LayerNormLinear and quire.LayerNormMLP"),
    "QBHistogramMode": ("the router has no quantile balancing", "quire.moe.update_expert_bias_"),
    "optimizers": ("optimizers are PyTorch's own here", "torch.optim.AdamW with fused=True"),
    "parallel_cross_entropy": (
        "losses are PyTorch's own here",
        "torch.nn.functional.cross_entropy within torch.distributed.tensor.parallel.loss_parallel",
    ),
}


def message(name: str) -> str:
    """What the module says when asked for a name that it has not. An AttributeError, so that code which asks by
    hasattr() or catches ImportError finds its other way."""
    if name not in NAMES:
        return f"module 'quire' has no attribute {name!r}"
    reason, alternative = NAMES[name]
    return f"quire.{name} is not available: {reason}. Use {alternative}"
