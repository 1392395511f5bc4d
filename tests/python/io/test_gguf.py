"""GGUF files: blocks of MXFP4 keep their codes, other types are decoded, and split models are read whole."""

import shutil

import numpy as np
import pytest
import torch

import quire
from quire import io
from quire.io.__main__ import main

gguf = pytest.importorskip("gguf")
Q = gguf.GGMLQuantizationType
ROWS, COLUMNS = 6, 512


def halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block, as a column."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float64)


def nibbles(data: np.ndarray) -> np.ndarray:
    """All low halves of the bytes, then all high ones."""
    return np.concatenate([data & 15, data >> 4], 1).astype(np.float64)


def fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return 16.0 * bits


# Each formula gives the two terms whose sum is the value.


def q8_0(blocks):
    return halves(blocks, 0) * blocks[:, 2:].view(np.int8), 0


def q4_0(blocks):
    return halves(blocks, 0) * (nibbles(blocks[:, 2:]) - 8), 0


def q4_1(blocks):
    return halves(blocks, 0) * nibbles(blocks[:, 4:]), halves(blocks, 2)


def q5_0(blocks):
    return halves(blocks, 0) * (nibbles(blocks[:, 6:]) + fifth_bits(blocks, 2) - 16), 0


def q5_1(blocks):
    return halves(blocks, 0) * (nibbles(blocks[:, 8:]) + fifth_bits(blocks, 4)), halves(blocks, 2)


def six_bits(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight scales and eight minima of six bits in twelve bytes."""
    scales, minima = np.zeros((2, len(packed), 8))
    for j in range(4):
        scales[:, j], minima[:, j] = packed[:, j] & 63, packed[:, j + 4] & 63
        scales[:, j + 4] = packed[:, j + 8] & 15 | packed[:, j] >> 6 << 4
        minima[:, j + 4] = packed[:, j + 8] >> 4 | packed[:, j + 4] >> 6 << 4
    return scales, minima


def of_groups(each: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(each, size, 1)


def q4_k(blocks):
    scales, minima = six_bits(blocks[:, 4:16])
    codes = np.concatenate([nibbles(blocks[:, at : at + 32]) for at in range(16, 144, 32)], 1)
    return halves(blocks, 0) * of_groups(scales, 32) * codes, -halves(blocks, 2) * of_groups(minima, 32)


def q5_k(blocks):
    scales, minima = six_bits(blocks[:, 4:16])
    codes = np.concatenate([nibbles(blocks[:, at : at + 32]) for at in range(48, 176, 32)], 1)
    high = np.concatenate([blocks[:, 16:48] >> bit & 1 for bit in range(8)], 1) * 16.0
    return halves(blocks, 0) * of_groups(scales, 32) * (codes + high), -halves(blocks, 2) * of_groups(minima, 32)


def q6_k(blocks):
    low, high, scales = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208].view(np.int8).astype(np.float64)
    codes = []
    for half in range(2):
        nib, two = low[:, 64 * half : 64 * half + 64], high[:, 32 * half : 32 * half + 32]
        for number in range(4):
            of_low = nib[:, 32 * (number % 2) : 32 * (number % 2) + 32]
            of_low = of_low & 15 if number < 2 else of_low >> 4
            codes.append((of_low | (two >> 2 * number & 3) << 4).astype(np.float64) - 32)
    return halves(blocks, 208) * of_groups(scales, 16) * np.concatenate(codes, 1), 0


def q2_k(blocks):
    packed, data = blocks[:, :16], blocks[:, 16:80]
    codes = [data[:, 32 * half : 32 * half + 32] >> 2 * bit & 3 for half in range(2) for bit in range(4)]
    scaled = halves(blocks, 80) * of_groups(packed & 15, 16).astype(np.float64) * np.concatenate(codes, 1)
    return scaled, -halves(blocks, 82) * of_groups(packed >> 4, 16).astype(np.float64)


#: Type -> bytes where float16 numbers begin in a block, and the formula of its values.
FORMULAS = {
    Q.Q8_0: ((0,), q8_0),
    Q.Q4_0: ((0,), q4_0),
    Q.Q4_1: ((0, 2), q4_1),
    Q.Q5_0: ((0,), q5_0),
    Q.Q5_1: ((0, 2), q5_1),
    Q.Q2_K: ((80, 82), q2_k),
    Q.Q4_K: ((0, 2), q4_k),
    Q.Q5_K: ((0, 2), q5_k),
    Q.Q6_K: ((208,), q6_k),
}
#: Types without a formula here: read as the package decodes one row after another.
OTHERS = (Q.Q3_K, Q.IQ4_NL, Q.IQ4_XS, Q.IQ3_S, Q.IQ2_XXS, Q.IQ1_M, Q.TQ1_0, Q.TQ2_0)


def blocks_of(kind, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bytes of a tensor, whose scales are numbers near 1."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (int(np.prod(shape)) // elements, size), dtype=np.uint8)
    for at in FORMULAS[kind][0] if kind in FORMULAS else ():
        scale = random.standard_normal((len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(path, tensors, **options):
    """tensors: name -> (type or None, data)."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def mxfp4(rows: int = 24, columns: int = 96) -> np.ndarray:
    values = np.random.default_rng(1).standard_normal((rows, columns), dtype=np.float32)
    return gguf.quants.quantize(values, Q.MXFP4)


@pytest.mark.parametrize("kind", FORMULAS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (2, 3, COLUMNS), (COLUMNS,)], ids=str)
def test_values_of_other_types_are_those_of_their_formula(kind, shape, tmp_path):
    data = blocks_of(kind, shape)
    path = write(
        tmp_path / "a.gguf", {"blk.0.ffn_up.weight": (kind, data), "blk.0.ffn_down.weight": (Q.MXFP4, mxfp4())}
    )
    checkpoint = io.read(path)
    assert checkpoint.groups.keys() == {"blk.0.ffn_down.weight"}
    found = checkpoint["blk.0.ffn_up.weight"]
    assert found.dtype == torch.float32 and tuple(found.shape) == shape
    assert checkpoint.outline("blk.0.ffn_up.weight").shape == found.shape
    terms = FORMULAS[kind][1](data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]))
    first, second = (np.broadcast_to(term, terms[0].shape).reshape(shape) for term in terms)
    # float32 rounds the product of scales, that with the code, and the sum.
    assert np.all(np.abs(found.double().numpy() - (first + second)) <= 2.0**-22 * (np.abs(first) + np.abs(second)))


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_every_type_that_the_package_decodes_is_read(kind, tmp_path):
    data = blocks_of(kind, (ROWS, COLUMNS))
    found = io.read(write(tmp_path / "a.gguf", {"blk.0.ffn_up.weight": (kind, data)}))["blk.0.ffn_up.weight"]
    rows = np.concatenate([gguf.quants.dequantize(row[None], kind) for row in data])
    assert found.dtype == torch.float32 and np.array_equal(found.numpy(), rows, equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_plain_tensors_keep_their_dtype(dtype, tmp_path):
    values = np.random.default_rng(2).standard_normal((ROWS, COLUMNS)).astype(dtype)
    bf16 = torch.randn(ROWS, COLUMNS).bfloat16()
    raw = bf16.view(torch.uint8).numpy()
    checkpoint = io.read(write(tmp_path / "a.gguf", {"a.weight": (None, values), "b.weight": (Q.BF16, raw)}))
    assert np.array_equal(checkpoint["a.weight"].numpy(), values) and checkpoint["a.weight"].numpy().dtype == dtype
    assert torch.equal(checkpoint["b.weight"], bf16)


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    layers = {name: torch.nn.Linear(512, 24, bias=False, dtype=dtype) for name in ("q", "k")}
    return torch.nn.ModuleDict({**layers, "down": torch.nn.Linear(96, 24, bias=False, dtype=dtype)})


def tensors() -> dict:
    found = {"q.weight": (Q.Q8_0, blocks_of(Q.Q8_0, (24, 512))), "k.weight": (Q.Q6_K, blocks_of(Q.Q6_K, (24, 512)))}
    return {**found, "down.weight": (Q.MXFP4, mxfp4())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_gets_values_and_codes(dtype, device, tmp_path):
    with torch.device(device):
        loaded = model(dtype)
    report = io.load(loaded, write(tmp_path / "a.gguf", tensors()))
    assert list(report.quantized) == ["down.weight"] and isinstance(loaded["down"], quire.Linear)
    assert [note for note in report.notes if "Q8_0" in note and "q.weight" in note]
    for name, kind in (("q", Q.Q8_0), ("k", Q.Q6_K)):
        data = blocks_of(kind, (24, 512))
        product, _ = FORMULAS[kind][1](data.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1]))
        # d times a scale of 8 bits is a number of float32, so that only the product with the code is rounded.
        true = torch.from_numpy(product.astype(np.float32).reshape(24, 512)).to(dtype)
        assert torch.equal(loaded[name].weight.detach(), true)


def test_what_was_decoded_is_saved_in_the_dtype_of_the_model(tmp_path):
    loaded = model(torch.bfloat16)
    io.load(loaded, write(tmp_path / "a.gguf", tensors()))
    io.save(loaded, tmp_path / "b", dialect="quire")
    found = io.read(tmp_path / "b")
    assert found["q.weight"].dtype == torch.bfloat16 and torch.equal(found["q.weight"], loaded["q"].weight)


def test_the_report_has_the_types_and_the_bytes_of_the_file(tmp_path, capsys):
    path = write(tmp_path / "a.gguf", tensors())
    found = io.inspect(path)
    assert found.plain == {"q.weight": "Q8_0 [24, 512]", "k.weight": "Q6_K [24, 512]"} and not found.problems
    assert found.nbytes == sum(data.nbytes for _, data in tensors().values())
    assert main(["inspect", str(path)]) == 0 and "Q8_0 [24, 512]" in capsys.readouterr().out
    assert io.verify(path)


def test_converting_keeps_codes_and_writes_values(tmp_path):
    path = write(tmp_path / "a.gguf", tensors())
    io.convert(path, tmp_path / "b", to="quire")
    one, other = io.read(path), io.read(tmp_path / "b")
    assert torch.equal(other["q.weight"], one["q.weight"])
    values = [each["down.weight"].dequantize(torch.float32) for each in (one, other)]
    assert torch.equal(*values)


def test_a_type_that_the_package_does_not_decode_is_named(tmp_path):
    data = blocks_of(Q.Q8_K, (ROWS, COLUMNS))
    path = write(tmp_path / "a.gguf", {"a.weight": (Q.Q8_K, data)})
    with pytest.raises(io.CheckpointError, match="of type Q8_K") as caught:
        io.read(path)
    assert caught.value.tensor == "a.weight" and "Q8_K" in " ".join(io.inspect(path).problems)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.MXFP4], ids=lambda kind: kind.name)
def test_a_scale_beside_a_quantized_tensor_is_not_left_out(kind, tmp_path):
    data = mxfp4() if kind == Q.MXFP4 else blocks_of(kind, (24, 512))
    scale = (None, np.full(1, 2, dtype=np.float32))
    path = write(tmp_path / "a.gguf", {"a.weight": (kind, data), "a.scale": scale})
    with pytest.raises(io.CheckpointError, match="scale") as caught:
        io.read(path)
    assert caught.value.tensor == "a.scale"


def split(folder, most: int = 1):
    folder.mkdir(exist_ok=True)
    write(folder / "m.gguf", tensors(), split_max_tensors=most)
    files = sorted(folder.glob("*.gguf"))
    assert [file.name for file in files] == [f"m-0000{n}-of-0000{len(files)}.gguf" for n in range(1, len(files) + 1)]
    return files


@pytest.mark.parametrize("most", [1, 2])
def test_a_split_model_is_read_whole_by_any_of_its_files_and_by_its_folder(most, tmp_path):
    whole, files = io.read(write(tmp_path / "whole.gguf", tensors())), split(tmp_path / "split", most)
    assert len(files) == -(-3 // most)
    for path in (*files, tmp_path / "split"):
        checkpoint = io.read(path)
        assert set(checkpoint) == set(whole) and checkpoint.dialect == "gguf"
        assert torch.equal(checkpoint["q.weight"], whole["q.weight"])
        values = [each["down.weight"].dequantize(torch.float32) for each in (checkpoint, whole)]
        assert torch.equal(*values)
        assert io.inspect(path).files == len(files)
    io.load(model(), files[0])


def test_a_split_model_that_is_not_complete_is_refused(tmp_path):
    files = split(tmp_path / "split")

    def expect(path, rule: str) -> None:
        with pytest.raises(io.CheckpointError, match=rule) as caught:
            io.read(path)
        assert caught.value.file and caught.value.remedy

    shutil.copy(files[1], tmp_path / "renamed.gguf")
    expect(tmp_path / "renamed.gguf", "number 2 of 3, its name that of 1 of 1")
    kept = files[2].read_bytes()
    files[2].unlink()
    for path in (files[0], tmp_path / "split"):
        expect(path, "lacks m-00003-of-00003.gguf")
    shutil.copy(files[1], files[2])
    expect(files[0], "number 2 of 3, its name that of 3 of 3")
    files[2].write_bytes(kept[: len(kept) // 2])
    expect(files[0], "no complete GGUF file")
    files[2].write_bytes(kept)
    shutil.copy(files[2], tmp_path / "split/other.gguf")
    expect(tmp_path / "split", "2 models")


def test_files_of_two_models_are_refused(tmp_path):
    files = []
    for name, count in (("a", 4), ("b", 3)):  # two tensors in each file, the last of "b" has one
        some = {f"{name}{number}.weight": (None, np.ones(4, np.float32)) for number in range(count)}
        write(tmp_path / f"{name}.gguf", some, split_max_tensors=2)
        files.append(sorted(tmp_path.glob(f"{name}-*.gguf")))
    shutil.copy(files[1][1], files[0][1])
    with pytest.raises(io.CheckpointError, match="the files have 3 tensors, and the first one says that there are 4"):
        io.read(files[0][0])
