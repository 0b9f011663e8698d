"""flashbpt.nn.TransformerBlock to test: its kinds, and blocks of random weights."""

import torch

from flashbpt.nn import TransformerBlock

DIM, HEADS, FFN, TOKENS = 32, 4, 48, 37
GPT2 = {"norm": "layer", "activation": "gelu_tanh", "gated": False, "bias": True, "rope": None}
KINDS = {
    "llama": {"kv_heads": 2, "rope": "half", "rope_theta": 5e5},
    "meta": {"kv_heads": 1, "rope": "interleaved", "eps": 1e-6},
    "gpt2": GPT2,
    "opt": {**GPT2, "activation": "relu"},
    "qwen2": {"kv_heads": 2, "rope": "half", "bias": "qkv"},
    "qwen3": {"kv_heads": 2, "rope": "half", "qk_norm": True, "head_dim": 16, "eps": 1e-6},
    "local": {
        "kv_heads": 2,
        "window": 9,
        "sinks": True,
        "softcap": 5.0,
        "bias": "attention",
        "rope": None,
    },
    "biased": {"norm": "layer", "bias": True, "activation": "gelu", "scale": 0.3, "rope": None},
}


def make(kind="llama", dtype=torch.float32, **changes):
    """A block of random weights, biases, norms and sinks among them."""
    block = TransformerBlock(DIM, HEADS, ffn_dim=FFN, dtype=dtype, **{**KINDS[kind], **changes})
    with torch.no_grad():
        for name, p in block.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.3 + ("norm" in name and "bias" not in name))
            else:
                p.mul_(2.0)  # attention that is far from uniform
    return block
