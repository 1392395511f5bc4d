"""The operators of one weight, called as those of groups of which there is one."""

import torch

ops = torch.ops.quire


def linear(*arguments, main_grad=None, **state):
    """y of grouped_linear() without offsets. arguments: x, w, bias, recipe, dtype, and x_buffers and w_buffers if they
    are given."""
    x, w, bias, recipe, dtype, *buffers = arguments
    x_buffers, w_buffers = map(list, buffers or ((), ()))
    lists = x_buffers, w_buffers, [] if main_grad is None else [main_grad]
    return ops.grouped_linear(x, [w], [] if bias is None else [bias], None, recipe, dtype, *lists, **state)[0]


def forward(x, w, bias, recipe, save):
    """Arguments of linear_fwd, whose result is in float32."""
    biases = [] if bias is None else [bias]
    return x, [w], biases, None, w.shape[0], recipe, torch.float32, save, [], []


def backward(dy, saved, in_features, recipe, *needs_and_state):
    """Arguments of linear_bwd, whose results are in float32. saved: what linear_fwd returned behind y."""
    x, w = saved[:3], [None, None, None, *saved[3:]]
    return dy, None, *x, w, in_features, recipe, torch.float32, *needs_and_state
