"""Attention under TransformerEngine's names. It stays in high precision; only layers of weights quantize.

multi_head_attention.py has quire's linear layers around dot_product_attention.py, transformer_layer.py has both and an
MLP. masks.py says what attends to what.
"""

from quire.te.attention.dot_product_attention import DotProductAttention
from quire.te.attention.key_value_cache import InferenceParams
from quire.te.attention.multi_head_attention import MultiheadAttention
from quire.te.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from quire.te.attention.transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
]
