"""Tensors that python/quire makes say their dtype and device.

torch.set_default_dtype and torch.set_default_device change both for whoever says neither: then a scale is rounded to
bfloat16, or a table has no values. `dtype=None` or `device=None` says that the default is wanted, for parameters.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import tree

#: Functions of torch that take both from the defaults: what torch.utils._device._device_constructors() lists.
FACTORIES = frozenset(
    "arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_quantized empty_strided eye "
    "fft_fftfreq fft_rfftfreq full hamming_window hann_window kaiser_window linspace logspace nested_tensor ones rand "
    "randint randn randperm range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor "
    "sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices zeros".split()
)


def _missing(call: ast.Call) -> list[str]:
    """Which of the two a call of torch.<factory> leaves out; a dict of options may have both."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in FACTORIES:
        return []
    if not isinstance(function.value, ast.Name) or function.value.id != "torch":
        return []
    given = {keyword.arg for keyword in call.keywords}
    return [] if None in given else [name for name in ("dtype", "device") if name not in given]


def check(root: Path) -> Iterator[str]:
    for path in tree.files(root / "python", ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and (missing := _missing(node)):
                options = " and ".join(f"{name}=" for name in missing)
                yield f"{place}: torch.{node.func.attr} without {options}, which the caller's default would decide"
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                for name in FACTORIES.intersection(alias.name for alias in node.names):
                    yield f"{place}: imports {name} from torch, which hides its calls; write torch.{name}"


if __name__ == "__main__":
    tree.main(check)
