"""A training script as users of TransformerEngine write them; only the imports differ.

import transformer_engine.pytorch as te                              import quire.te.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format  from quire.te.common.recipe import ...
"""

import io

import torch

import quire.te.pytorch as te
from quire.te.common.recipe import DelayedScaling, Format

torch.manual_seed(0)
hidden, tokens, microbatches = 64, 48, 2
recipe = DelayedScaling(margin=0, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = te.LayerNormLinear(hidden, 3 * hidden, eps=1e-5, bias=True, params_dtype=torch.bfloat16)
        self.proj = te.Linear(hidden, hidden, bias=True, params_dtype=torch.bfloat16)
        self.mlp = te.LayerNormMLP(hidden, 4 * hidden, activation="swiglu", params_dtype=torch.bfloat16)

    def forward(self, x, is_first_microbatch=None):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended, is_first_microbatch=is_first_microbatch)
        return x + te.checkpoint(self.mlp, x, use_reentrant=False)


def main():
    available, reason = te.is_fp8_available(return_reason=True)
    assert available, reason
    model = torch.nn.ModuleList(Block() for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.randn(microbatches, 1, tokens, hidden, dtype=torch.bfloat16)
    for step in range(20):
        total = 0.0
        for i, x in enumerate(data):
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                y = x
                for block in model:
                    y = block(y, is_first_microbatch=i == 0)
                loss = (y.float() - x.roll(1, dims=1).float()).square().mean() / microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:2} loss {total:.4f}")
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        y = model[0](data[0])
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True))
    return y


if __name__ == "__main__":
    main()
