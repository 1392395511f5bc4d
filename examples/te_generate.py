"""A small TransformerEngine model learns sequences that repeat themselves, and continues some with a cache of keys and
values.

import transformer_engine.pytorch as te           import quire.te.pytorch as te
"""

from collections import OrderedDict

import torch

import quire.te.pytorch as te

device = "cuda" if torch.cuda.is_available() else "cpu"
tokens, hidden, heads, longest = 10, 64, 4, 12


def make_layer(number):
    options = {"attn_input_format": "bshd", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(hidden, 2 * hidden, heads, layer_number=number, device=device, **options)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([make_layer(1), make_layer(2)])
        self.embedding = torch.nn.Embedding(tokens, hidden, device=device)
        self.output = te.Linear(hidden, tokens, device=device)
        self.register_buffer("angles", te.RotaryPositionEmbedding(hidden // heads)(longest), persistent=False)

    def forward(self, ids, **options):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, **options)
        return self.output(x)


def train(model):
    """Sequences a b a b a b ..."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        ids = torch.randint(tokens, (24, 2), device=device).repeat(1, longest // 2)
        logits = model(ids[:, :-1], self_attn_mask_type="causal")
        loss = torch.nn.functional.cross_entropy(logits[:, 1:].flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def generate(model, prompts):
    """Appends tokens to each of the prompts, which have different lengths, until all are full."""
    cache = te.InferenceParams(
        max_batch_size=len(prompts),
        max_sequence_length=longest,
        num_heads_kv=heads,
        head_dim_k=hidden // heads,
        dtype=torch.float32,
        qkv_format="bshd",
    )
    texts = [list(prompt) for prompt in prompts]
    new = texts
    while max(map(len, texts)) < longest:
        rows = [part + [0] * (max(map(len, new)) - len(part)) for part in new]
        cache.pre_step(OrderedDict((row, len(part)) for row, part in enumerate(new)))
        logits = model(torch.tensor(rows, device=device), inference_params=cache, self_attn_mask_type="padding_causal")
        new = [[logits[row, len(part) - 1].argmax().item()] for row, part in enumerate(new)]
        texts = [text + part for text, part in zip(texts, new, strict=True)]
    return texts


def main():
    torch.manual_seed(0)
    model = Model()
    train(model)
    model.eval()
    for text in generate(model, [[3, 7, 3], [1, 4, 1, 4, 1], [8, 2]]):
        print("generated", *text)


if __name__ == "__main__":
    main()
