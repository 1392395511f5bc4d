"""A quire.GroupedLinear, what goes in, and a loop over quire.Linear that it is compared with."""

import functools

import torch

import quire
from steps import step

#: Sizes of groups: ragged, empty, a single token, whole blocks.
SPLITS = [5, 0, 37, 1, 16, 128]


def grouped(splits=SPLITS, dtype=torch.bfloat16, **options):
    torch.manual_seed(1)
    return quire.GroupedLinear(len(splits), 96, 64, params_dtype=dtype, **options)


def linears(layer):
    """A quire.Linear for each group, with its weights and its stream of random bits."""
    biases = layer.biases()
    biases = list(biases[0]) if biases and biases[0].dim() == 2 else biases
    out = []
    for group, weight in enumerate(layer.group_weights("")):
        options = {"save_original_input": layer.save_original_input}
        one = quire.Linear(96, 64, bias=bool(biases), params_dtype=weight.dtype, device=weight.device, **options)
        with torch.no_grad():
            one.weight.copy_(weight)
            if biases:
                one.bias.copy_(biases[group])
        one.sr_state.copy_(layer.sr_state)
        one.sr_state[0] += group
        out.append(one)
    return out


def inputs(splits, beyond=3, dtype=torch.bfloat16, device="cpu"):
    generator = torch.Generator().manual_seed(sum(splits))
    # Groups of different magnitude, so that an amax of another group shows.
    sizes = torch.tensor([4.0**i for i, n in enumerate(splits) for _ in range(n)] + [1000.0] * beyond)
    x = torch.randn(len(sizes), 96, generator=generator) * sizes[:, None]
    dy = torch.randn(len(sizes), 64, generator=generator) / (sizes[:, None] + 1)
    return x.to(device, dtype), dy.to(device, dtype)


def slices(splits):
    """The rows of each group."""
    ends = torch.tensor(splits).cumsum(0).tolist()
    return [slice(end - rows, end) for end, rows in zip(ends, splits, strict=True)]


def _of_groups(function, sizes, x, **options):
    return function(x, sizes, **options)


def grouped_step(layer, x, dy, splits, recipe, *, function=None, **options):
    sizes = torch.tensor(splits).to(x.device)
    call = functools.partial(_of_groups, layer if function is None else function, sizes)
    y, dx, *_ = step(layer, x, recipe, function=call, dy=lambda y: dy, backward_dw=False, **options)
    names = (*layer.weight_names, *layer.bias_names)
    results = [y, dx, *(getattr(layer, name).grad for name in names)]
    return [None if result is None else result.cpu() for result in results]


def of_linears(layers, x, dy, splits, recipe):
    """The same results from a loop over layers: y, dx, and stacked dw and dbias."""
    y, dx = torch.zeros(len(x), 64, dtype=x.dtype), torch.zeros(x.shape, dtype=x.dtype)
    begin = 0
    for one, rows in zip(layers, splits, strict=True):
        one.zero_grad()
        part = x[begin : begin + rows].detach().requires_grad_()
        with quire.autocast(recipe=recipe):
            out = one(part)
        out.backward(dy[begin : begin + rows])
        y[begin : begin + rows], dx[begin : begin + rows] = out.detach().cpu(), part.grad.cpu()
        begin += rows
    gradients = ([getattr(one, name).grad.cpu() for one in layers] for name in ("weight", "bias"))
    return y, dx, *map(torch.stack, gradients)


def stacked(layer, gradients):
    """Gradients of all weights, and of all biases, in one tensor each."""
    weights, biases = gradients[: len(layer.weight_names)], gradients[len(layer.weight_names) :]
    return [torch.stack(list(g)) if g[0].dim() == d else g[0] for g, d in ((weights, 2), (biases, 1))]


def equal_or_rounded(equal_bits, device):
    """What compares plain products of groups with PyTorch's of each: bits, or on a device the bound of numerics.md 7.7.

    There both are within a rounding to bfloat16 of the exact result, and within the errors of their sums.
    """

    def within_roundings(ours, theirs):
        ours, theirs = ours.cpu().double(), theirs.cpu().double()
        off = 2**-7 * theirs.abs() + 2**-12 * theirs.abs().max()
        return ours.shape == theirs.shape and bool(((ours - theirs).abs() <= off).all())

    return equal_bits if device.type == "cpu" else within_roundings


def check_equal(layer, results, expected, equal_bits):
    y, dx, *gradients = results
    for name, ours, theirs in zip(("y", "dx", "dw", "db"), (y, dx, *stacked(layer, gradients)), expected, strict=True):
        assert equal_bits(ours, theirs), name
