"""A stack of TransformerEngine's transformer layers under delayed scaling learns to name the token before the last one.

import transformer_engine.pytorch as te                              import quire.te.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format  from quire.te.common.recipe import ...
"""

import torch

import quire.te.pytorch as te
from quire.te.common.recipe import DelayedScaling, Format

device = "cuda" if torch.cuda.is_available() else "cpu"
tokens, hidden, heads, layers, length, batch = 12, 64, 4, 2, 12, 16


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(tokens, hidden, device=device)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                hidden,
                2 * hidden,
                heads,
                layer_number=number + 1,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                fuse_qkv_params=True,
                params_dtype=torch.float32,
                device=device,
            )
            for number in range(layers)
        )
        self.output = te.LayerNormLinear(hidden, tokens, bias=False, device=device)
        self.angles = te.RotaryPositionEmbedding(hidden // heads)

    def forward(self, ids):
        x = self.embedding(ids)
        angles = self.angles(len(ids)).to(x.device)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return self.output(x)


def main():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, amax_compute_algo="max")
    for step in range(80):
        ids = torch.randint(tokens, (length, batch), device=device)
        with te.autocast(enabled=True, recipe=recipe):
            logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits[1:].float().flatten(0, 1), ids[:-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:2} loss {loss.item():.3f}")
    model.eval()
    ids = torch.randint(tokens, (length, batch), device=device)
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        named = model(ids)[1:].argmax(-1)
    print(f"accuracy {(named == ids[:-1]).float().mean().item():.3f}")


if __name__ == "__main__":
    main()
