"""Quantization of a model's weights by its data: calibrate() for static scales, quantize_model() with GPTQ."""
