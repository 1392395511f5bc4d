"""Specs of quantized tensors under test: every family, and every option that changes what is stored."""

SPECS = ["fp8_tensor", "fp8_tensor:e5m2:pow2", "fp8_row", "fp8_block", "fp8_block:128x128:pow2", "mxfp8", "mxfp8:32x32"]
SPECS += [
    "mxfp8:swizzled",
    "mxfp8:interleaved",
    "nvfp4:16x16:interleaved",
    "mxfp4",
    "nvfp4",
    "nvfp4:16x16",
    "nvfp4:row_scaled",
    "nvfp4:rht",
    "nvfp4:4over6=mse:256",
    "nvfp4:16x16:global=mul",
    "nvfp4:row_scaled:global=div",
]
