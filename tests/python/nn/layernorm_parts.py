"""LayerNormLinear and LayerNormMLP, and what they must equal: quire's norm, quire.Linear and an activation in a row."""

import torch

import quire
from quire.functional import activation


def randomised(module):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn(parameter.shape) / 2 + (name.endswith("layer_norm_weight")))
    return module


def make_linear(normalization="LayerNorm", dtype=torch.bfloat16, **options):
    torch.manual_seed(4)
    return randomised(quire.LayerNormLinear(96, 64, normalization=normalization, params_dtype=dtype, **options))


def make_mlp(normalization="LayerNorm", dtype=torch.bfloat16, **options):
    torch.manual_seed(4)
    return randomised(quire.LayerNormMLP(64, 96, normalization=normalization, params_dtype=dtype, **options))


OPTIONS = ("fuse_wgrad_accumulation", "delay_wgrad_compute", "save_original_input")


class Parts(torch.nn.Module):
    """What a fused module is made of, with copies of its parameters and random states, and with its options; on the
    CPU, wherever that module is."""

    def __init__(self, fused):
        super().__init__()
        self.fused, self.products = [fused], []
        norm = quire.LayerNorm if fused.normalization == "LayerNorm" else quire.RMSNorm
        size, dtype = fused.layer_norm_weight.shape[0], fused.layer_norm_weight.dtype
        self.norm = norm(size, fused.eps, zero_centered_gamma=fused.zero_centered_gamma, dtype=dtype)
        self.named = [("layer_norm_", self.norm)]
        options = {name: getattr(fused, name) for name in OPTIONS}
        for product, state in fused.sr_states().items():
            prefix = f"{product}_" if product else ""
            n, k = getattr(fused, f"{prefix}weight").shape
            linear = quire.Linear(k, n, getattr(fused, f"{prefix}bias") is not None, dtype, **options)
            linear.sr_state.copy_(state)
            self.products.append(linear)
            self.named.append((prefix, linear))
        self.linears = torch.nn.ModuleList(self.products)
        with torch.no_grad():
            for name, parameter in self.by_name().items():
                parameter.copy_(getattr(fused, name))

    def forward(self, x, is_first_microbatch=None, fp8_grad=False, **of_result):
        """of_result: options of the last product only."""
        every = {"is_first_microbatch": is_first_microbatch, "fp8_grad": fp8_grad}
        *before, last = self.products
        y = self.norm(x)
        for product in before:
            h = product(y, **every)
            y = activation(h, self.fused[0]._activation, h.dtype)[0]
        return last(y, **every, **of_result)

    def backward_dw(self):
        for product in self.products:
            product.backward_dw()

    def by_name(self):
        """The parameters under their names in the fused module."""
        return {prefix + name: p for prefix, module in self.named for name, p in module.named_parameters()}

    def gradients(self):
        return {name: parameter.grad for name, parameter in self.by_name().items()}
