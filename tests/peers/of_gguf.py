"""Cases of GGUF."""

from pathlib import Path

import numpy as np
import torch


def blocks(folder: Path) -> None:
    import gguf
    from freeze import expect

    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    values = {}

    def add(name: str, kind: gguf.GGMLQuantizationType, data: np.ndarray) -> None:
        writer.add_tensor(name, data, raw_dtype=kind)
        values[name] = torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float32))

    mxfp4, nvfp4 = gguf.GGMLQuantizationType.MXFP4, gguf.GGMLQuantizationType.NVFP4
    random = np.random.default_rng(0)
    weight = random.standard_normal((24, 96), dtype=np.float32)
    add("blk.0.ffn_down.weight", mxfp4, gguf.quants.quantize(weight, mxfp4))
    bytes_ = random.integers(0, 256, (8, 32 * 17), dtype=np.uint8)
    bytes_[:, ::17] = np.arange(256).reshape(8, 32)
    bytes_[7, 31 * 17] = 254  # 255 means 2^128 here and NaN elsewhere
    add("blk.0.ffn_up.weight", mxfp4, bytes_)
    stack = random.standard_normal((2, 16, 64), dtype=np.float32)
    add("blk.0.ffn_gate_exps.weight", mxfp4, gguf.quants.quantize(stack, mxfp4))
    bytes_ = random.integers(0, 256, (16, 4 * 36), dtype=np.uint8)
    scales = np.arange(16 * 4 * 4).astype(np.uint8).reshape(16, 4, 4) & 0x7F  # 0x7F, which decodes to 0, is among them
    bytes_.reshape(16, 4, 36)[..., :4] = scales
    add("blk.0.attn_q.weight", nvfp4, bytes_)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expect(folder, values, signed_zeros=False)  # its table of E2M1 values has 0 instead of -0


CASES = {"gguf_fp4": blocks}
