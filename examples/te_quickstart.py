"""A first script of a user of TransformerEngine: a norm with an MLP and a linear layer learn under delayed scaling.

import transformer_engine.pytorch as te         import quire.te.pytorch as te
from transformer_engine.common import recipe    from quire.te.common import recipe
"""

import torch

import quire.te.pytorch as te
from quire.te.common import recipe

device = "cuda" if torch.cuda.is_available() else "cpu"
features, hidden, rows, steps = 64, 128, 96, 30


class Regressor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = te.LayerNormMLP(features, hidden, activation="relu", device=device)
        self.head = te.Linear(features, 16, bias=True, device=device)

    def forward(self, x):
        return self.head(self.mlp(x))


def main():
    torch.manual_seed(0)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.randn(rows, features, device=device)
    target = torch.tanh(x @ torch.randn(features, 16, device=device) / 8)
    # The history is short in the first steps, while activations still change a lot.
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3, amax_history_len=1)
    for step in range(steps):
        if step == 10:
            fp8_recipe.amax_history_len = 8
            fp8_recipe.fp8_format = recipe.Format.HYBRID
        with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
            y = model(x)
            loss = torch.nn.functional.mse_loss(y, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:2} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
