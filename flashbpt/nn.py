"""Modules: `TransformerBlock`, a layer of a decoder whose activations are not kept.

block = flashbpt.nn.TransformerBlock(
    4096, 32, kv_heads=8, ffn_dim=14336, rope="half", rope_theta=500000.0, eps=1e-5,
    dtype=torch.bfloat16, device="cuda",
)
block.load_from(llama.state_dict(), prefix="model.layers.0")
y = block(x)  # (B, S, 4096), or packed (tokens, 4096) with cu_seqlens
"""

import dataclasses
import math

import torch

from flashbpt.block_config import WEIGHTS, BlockConfig, BlockWeights
from flashbpt.blockwise import transformer_block
from flashbpt.weight_layouts import BIASES, distributed_like, match, under_prefix

__all__ = ["TransformerBlock"]

# The biases that the argument `bias` stands for; the norms' are LayerNorm's alone.
_LINEAR_BIASES = ("bq", "bk", "bv", "bo", "b_gate", "b_up", "b_down")
_NORM_BIASES = ("norm1_bias", "norm2_bias")


class TransformerBlock(torch.nn.Module):
    """A pre-norm decoder layer through `flashbpt.transformer_block`: a module, as torch's are.

        h = x + dropout(attention(rope(qk_norm(norm1(x) Wq^T)), ...) Wo^T + bo)
        y = h + dropout(feed_forward(norm2(h)))

    Attention is causal. The feed-forward is (act(n Wgate^T) * (n Wup^T)) Wdown^T, or
    act(n Wup^T) Wdown^T where it is not gated. Forward and backward go over blocks of tokens; what
    lies between x and y is computed again in the backward, as `save` says.

    Args:
        dim: width H of x and y.
        heads: query heads Hq.
        ffn_dim: width F of the feed-forward.
        kv_heads: key and value heads Hkv, a divisor of heads; None: heads.
        head_dim: width D of a head; None: dim / heads.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm).
        eps: of both norms, and of the norms of queries and keys.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        gated: whether the feed-forward has a gate.
        bias: which biases there are: False, True (all, LayerNorm's too), "qkv" (queries, keys and
            values: Qwen2), "attention" (those and the output projection), or their names, as in
            ("b_up", "b_down", "norm1_bias", "norm2_bias").
        rope, rope_theta: rotary positions: "half" (Llama in Hugging Face's layout), "interleaved"
            (Meta's) or None, and their base.
        qk_norm: RMSNorm of each head of queries and keys before the rotation (Qwen3).
        sinks: one learned logit a query head that joins the softmax denominator.
        window: how many keys before its own a query sees; None: all.
        softcap: cap of the scores, cap * tanh(score / cap); 0: none.
        scale: of the scores; None: D ** -0.5.
        attention_dropout, residual_dropout: probabilities of dropping a softmax weight, and an
            element of either branch before it joins the residual. Both are off in `eval()`.
        save, offload, rows, deterministic: what is kept for the backward ("x+o", "x", "all"), where
            (None: on the device, "cpu"), rows a block ("auto" or a number), and whether gradients
            repeat bit by bit (None: torch's setting). See `flashbpt.BlockConfig`.
        device, dtype: of the parameters.

    Attributes:
        config: the `flashbpt.BlockConfig` of the next forward, without dropout in `eval()`.

    Parameters are named like the fields of `flashbpt.BlockWeights` and lie as torch.nn.Linear's:
    norm1, norm2 (H), wq (Hq * D, H), wk, wv (Hkv * D, H), wo (H, Hq * D), w_gate, w_up (F, H),
    w_down (H, F), and where they were asked for bq, bk, bv, bo, b_gate, b_up, b_down, norm1_bias,
    norm2_bias, q_norm, k_norm (D), sinks (Hq); the others are None. Where a parameter has an
    attribute `main_grad` (fp32, its shape), the backward adds its gradient into that.

    Raises ValueError for sizes that do not fit together and for options that there are not.

    Source: Blockwise Parallel Transformer (Liu and Abbeel, NeurIPS 2023, arXiv:2305.19370).
    """

    def __init__(
        self,
        dim,
        heads,
        *,
        ffn_dim,
        kv_heads=None,
        head_dim=None,
        norm="rms",
        eps=1e-5,
        activation="silu",
        gated=True,
        bias=False,
        rope="half",
        rope_theta=10000.0,
        qk_norm=False,
        sinks=False,
        window=None,
        softcap=0.0,
        scale=None,
        attention_dropout=0.0,
        residual_dropout=0.0,
        save="x+o",
        offload=None,
        rows="auto",
        deterministic=None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"dim": dim, "heads": heads, "kv_heads": kv_heads, "ffn_dim": ffn_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(
                    f"dim must be a multiple of heads where head_dim is not given, got {dim} and "
                    f"{heads}"
                )
            head_dim = dim // heads
        self.dim, self.head_dim, self.ffn_dim = dim, head_dim, ffn_dim
        self._config = BlockConfig(
            heads=heads,
            kv_heads=kv_heads,
            norm=norm,
            eps=eps,
            activation=activation,
            rope=rope,
            rope_theta=rope_theta,
            qk_norm=qk_norm,
            window=window,
            softcap=softcap,
            scale=scale,
            attention_dropout=attention_dropout,
            residual_dropout=residual_dropout,
            save=save,
            offload=offload,
            rows=rows,
            deterministic=deterministic,
        )
        q_rows, kv_rows = heads * head_dim, kv_heads * head_dim
        shapes = {
            "norm1": (dim,),
            "wq": (q_rows, dim),
            "wk": (kv_rows, dim),
            "wv": (kv_rows, dim),
            "wo": (dim, q_rows),
            "norm2": (dim,),
            "w_gate": (ffn_dim, dim) if gated else None,
            "w_up": (ffn_dim, dim),
            "w_down": (dim, ffn_dim),
            "q_norm": (head_dim,) if qk_norm else None,
            "k_norm": (head_dim,) if qk_norm else None,
            "sinks": (heads,) if sinks else None,
        }
        biases = _biases(bias, norm)
        for weight, name in BIASES.items():
            shapes[name] = shapes[weight] and shapes[weight][:1] if name in biases else None
        for name in WEIGHTS:
            shape = shapes[name]
            new = None if shape is None else torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, None if new is None else torch.nn.Parameter(new))
        self.reset_parameters()

    def reset_parameters(self):
        """Draw the parameters anew, as torch.nn.Linear and its norms do; sinks are 0."""
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dim() == 2:
                torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
            elif name in ("norm1", "norm2", "q_norm", "k_norm"):
                torch.nn.init.ones_(parameter)
            else:
                torch.nn.init.zeros_(parameter)
        for weight, name in BIASES.items():
            bias, weight = getattr(self, name), getattr(self, weight)
            if bias is not None and weight.dim() == 2:
                bound = weight.shape[1] ** -0.5
                torch.nn.init.uniform_(bias, -bound, bound)

    @property
    def config(self):
        """The `flashbpt.BlockConfig` of the next forward, without dropout in `eval()`."""
        config = self._config
        if not self.training and (config.attention_dropout or config.residual_dropout):
            return dataclasses.replace(config, attention_dropout=0.0, residual_dropout=0.0)
        return config

    def forward(self, x, *, cos=None, sin=None, cu_seqlens=None, return_kv=False):
        """y of x's shape: (B, S, H), or packed (tokens, H) with cu_seqlens.

        Args:
            x: (B, S, H) or (tokens, H), of the parameters' dtype.
            cos, sin: (positions, pairs), rotary tables in place of those of rope_theta.
            cu_seqlens: (N + 1,) int32 or int64, where packed sequences start and end.
            return_kv: also return the keys and values, (B, S, Hkv, D) or (tokens, Hkv, D), keys
                rotated: what a paged cache takes.

        Returns y, or (y, (k, v)). Errors are those of `flashbpt.transformer_block`.
        """
        parameters = {name: getattr(self, name) for name in WEIGHTS}
        main_grad = {
            name: parameter.main_grad
            for name, parameter in parameters.items()
            if getattr(parameter, "main_grad", None) is not None
        }
        weights = BlockWeights(**parameters, main_grad=main_grad or None)
        return transformer_block(
            x,
            weights,
            self.config,
            cos=cos,
            sin=sin,
            cu_seqlens=cu_seqlens,
            return_kv=return_kv,
        )

    def extra_repr(self):
        sizes = {"dim": self.dim, "heads": self._config.heads, "kv_heads": self._config.kv_heads}
        sizes |= {"head_dim": self.head_dim, "ffn_dim": self.ffn_dim}
        options = {
            field.name: getattr(self._config, field.name)
            for field in dataclasses.fields(self._config)
            if field.name not in sizes
        }
        shown = ("norm", "activation", "rope")
        defaults = {field.name: field.default for field in dataclasses.fields(self._config)}
        options = {k: v for k, v in options.items() if k in shown or v != defaults[k]}
        flags = {"gated": self.w_gate is not None, "sinks": self.sinks is not None}
        biases = [name for name in BIASES.values() if getattr(self, name) is not None]
        flags |= {"bias": " ".join(biases) or False}
        return ", ".join(f"{name}={value}" for name, value in (sizes | flags | options).items())

    @torch.no_grad()
    def load_from(self, source, prefix=""):
        """Copy the weights of another layer into this one; returns the block.

        Args:
            source: a module (a LlamaDecoderLayer, say) or a state dict, of a layer or a model.
            prefix: what the names of this layer begin with in it, as "model.layers.3".

        Known are the names and layouts of Hugging Face's decoders (Llama, Mistral, Qwen2, Qwen3,
        StarCoder2; Phi-3 with fused projections; GPT-2; OPT; MPT), Meta's Llama, nanoGPT,
        flash_attn, torch.nn.TransformerEncoderLayer, examples/gpt.py and this block itself.
        They tell nothing of eps, activation, rotation and window, which must be right already;
        Gemma's norms, which add 1 to their weight, must have it added. Values are converted to the
        dtype and device of the parameters, which may be sharded (DTensor); each rank then passes
        the whole layer.

        Raises ValueError, and copies nothing, where names are unknown, missing or given twice, or
        shapes are wrong, with what was seen and expected by the nearest of these layouts; for
        parameters on the meta device too.
        """
        if isinstance(source, torch.nn.Module):
            source = source.state_dict()
        tensors = under_prefix(source, prefix)
        parameters = dict(self.named_parameters(recurse=False))
        if any(parameter.is_meta for parameter in parameters.values()):
            raise ValueError(
                "the block's parameters are on the meta device: give it memory with "
                'to_empty(device="...") before load_from'
            )
        for name, value in match(tensors, parameters).items():
            parameters[name].copy_(distributed_like(parameters[name], value))
        return self


def _biases(bias, norm):
    """Names of the biases that the argument `bias` stands for."""
    named = {False: (), "qkv": _LINEAR_BIASES[:3], "attention": _LINEAR_BIASES[:4]}
    named[True] = _LINEAR_BIASES + (_NORM_BIASES if norm == "layer" else ())
    if isinstance(bias, (bool, str)):
        names = named.get(bias, (bias,))
    else:
        names = tuple(bias)
    if not set(names) <= set(BIASES.values()):
        raise ValueError(
            f'bias must be True, False, "qkv", "attention" or names of '
            f"{', '.join(BIASES.values())}, got {bias!r}"
        )
    return names
