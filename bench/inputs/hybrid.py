"""The shape of a Qwen3.5 of some 9B, whose layers are of one kind or the other: what one costs is counted of each."""

from typing import Any

LAYERS = 32
HYBRID: dict[str, Any] = {
    **{"model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320},
    **{"linear_num_value_heads": 32, "linear_num_key_heads": 16, "dtype": "bfloat16"},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False},
}
"""What `AutoConfig.for_model` takes."""
RECURRENT = {"layer_types": ["linear_attention"] * LAYERS}
ATTENTION = {"layer_types": ["full_attention"] * LAYERS}
