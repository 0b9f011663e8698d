"""TransformerBlock.load_from: layers by the names of other libraries, and what does not fit."""

import pytest
import torch
from nn_cases import DIM, TOKENS, make

pytestmark = pytest.mark.usefixtures("one_thread")


def both(name, weight, bias=None):
    found = {name + ".weight": weight}
    return found if bias is None else found | {name + ".bias": bias}


def llama_names(b):
    attention = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
    found = both("input_layernorm", b.norm1) | both("post_attention_layernorm", b.norm2)
    for name, p in attention.items():
        found |= both("self_attn." + name, getattr(b, "w" + p), getattr(b, "b" + p))
    for name in ("gate", "up", "down"):
        found |= both(f"mlp.{name}_proj", getattr(b, "w_" + name))
    if b.q_norm is not None:
        found |= both("self_attn.q_norm", b.q_norm) | both("self_attn.k_norm", b.k_norm)
    return found | {"self_attn.rotary_emb.inv_freq": torch.ones(4)}


def phi3_names(b):
    found = both("input_layernorm", b.norm1) | both("post_attention_layernorm", b.norm2)
    found |= both("self_attn.qkv_proj", torch.cat((b.wq, b.wk, b.wv)))
    found |= both("mlp.gate_up_proj", torch.cat((b.w_gate, b.w_up)))
    return found | both("self_attn.o_proj", b.wo) | both("mlp.down_proj", b.w_down)


def nanogpt_names(b, turn=lambda w: w):
    qkv, qkv_bias = torch.cat((b.wq, b.wk, b.wv)), torch.cat((b.bq, b.bk, b.bv))
    found = both("ln_1", b.norm1, b.norm1_bias) | both("ln_2", b.norm2, b.norm2_bias)
    found |= both("attn.c_attn", turn(qkv), qkv_bias) | both("attn.c_proj", turn(b.wo), b.bo)
    found |= both("mlp.c_fc", turn(b.w_up), b.b_up) | both("mlp.c_proj", turn(b.w_down), b.b_down)
    return found | {"attn.bias": torch.ones(1, 1, 8, 8).tril()}


def gpt2_names(b):
    found = nanogpt_names(b, lambda w: w.t().contiguous())
    return found | {"attn.masked_bias": torch.tensor(-1e4)}


def opt_names(b):
    found = both("self_attn_layer_norm", b.norm1, b.norm1_bias)
    found |= both("final_layer_norm", b.norm2, b.norm2_bias)
    for name, p in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}.items():
        found |= both("self_attn." + name, getattr(b, "w" + p), getattr(b, "b" + p))
    return found | both("fc1", b.w_up, b.b_up) | both("fc2", b.w_down, b.b_down)


def mpt_names(b):
    found = both("norm_1", b.norm1, b.norm1_bias) | both("norm_2", b.norm2, b.norm2_bias)
    qkv, bias = torch.cat((b.wq, b.wk, b.wv)), torch.cat((b.bq, b.bk, b.bv))
    found |= both("attn.Wqkv", qkv, bias) | both("attn.out_proj", b.wo, b.bo)
    return found | both("ffn.up_proj", b.w_up, b.b_up) | both("ffn.down_proj", b.w_down, b.b_down)


def meta_names(b):
    found = both("attention_norm", b.norm1) | both("ffn_norm", b.norm2)
    found |= {f"attention.w{name}.weight": getattr(b, "w" + name) for name in "qkvo"}
    found |= both("feed_forward.w1", b.w_gate) | both("feed_forward.w3", b.w_up)
    return found | both("feed_forward.w2", b.w_down)


def flash_attn_names(b):
    found = both("norm1", b.norm1, b.norm1_bias) | both("norm2", b.norm2, b.norm2_bias)
    bias = torch.cat((b.bq, b.bk, b.bv))
    found |= both("mixer.Wqkv", torch.cat((b.wq, b.wk, b.wv)), bias)
    found |= both("mixer.out_proj", b.wo, b.bo)
    up, up_bias = b.w_up, b.b_up
    if b.w_gate is not None:
        up, up_bias = torch.cat((b.w_up, b.w_gate)), torch.cat((b.b_up, b.b_gate))
    return found | both("mlp.fc1", up, up_bias) | both("mlp.fc2", b.w_down, b.b_down)


def demo_names(b):
    found = both("attention_norm", b.norm1) | both("feed_forward_norm", b.norm2)
    found |= both("qkv", torch.cat((b.wq, b.wk, b.wv))) | both("proj", b.wo)
    return found | both("gate_up", torch.cat((b.w_gate, b.w_up))) | both("down", b.w_down)


NAMES = {
    "llama": ("llama", llama_names),
    "qwen2": ("qwen2", llama_names),
    "qwen3": ("qwen3", llama_names),
    "phi3": ("llama", phi3_names),
    "gpt2": ("gpt2", gpt2_names),
    "nanogpt": ("gpt2", nanogpt_names),
    "opt": ("opt", opt_names),
    "mpt": ("gpt2", mpt_names),
    "meta": ("meta", meta_names),
    "flash_attn": ("gpt2", flash_attn_names),
    "flash_attn_gated": ("biased", flash_attn_names),
    "train_gpt": ("llama", demo_names),
    "own": ("local", lambda b: dict(b.named_parameters())),
}


def named(scheme):
    """A block and its weights by the names of another library, detached."""
    kind, names = NAMES[scheme]
    block = make(kind)
    return kind, block, {name: t.detach().clone() for name, t in names(block).items()}


@pytest.mark.parametrize("scheme", NAMES)
def test_load_from(scheme):
    """Out of a whole model's state dict, whatever the dtype of either side."""
    kind, source, weights = named(scheme)
    model = {f"model.layers.3.{name}": t for name, t in weights.items()}
    model |= {f"model.layers.30.{name}": torch.zeros(()) for name in weights}
    model["model.embed.weight"] = torch.zeros(5, 5)
    for prefix in ("model.layers.3", "model.layers.3."):
        block = make(kind)
        assert block.load_from(model, prefix) is block
        for name, p in source.named_parameters():
            assert torch.equal(getattr(block, name), p), name
    wide = make(kind, torch.float64).load_from(weights)
    assert torch.equal(wide.wk, source.wk.double())
    assert wide.wk.requires_grad and wide.wk.is_leaf
    # The block has its own memory.
    for t in weights.values():
        t.fill_(9.0)
    assert torch.equal(wide.w_up, source.w_up.double())


@pytest.mark.parametrize("scheme", NAMES)
def test_load_from_refuses_what_does_not_fit(scheme):
    """A missing, an unknown, a misshapen weight: said by name, and nothing is copied."""
    kind, _, weights = named(scheme)
    block = make(kind)
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    last = [name for name in weights if name not in ("attn.bias", "attn.masked_bias")][-1]
    last = "mlp.down_proj.weight" if last == "self_attn.rotary_emb.inv_freq" else last
    missing = {name: t for name, t in weights.items() if name != last}
    cases = {
        rf"missing: .*{last}": missing,
        r"unknown: adapter\.weight": weights | {"adapter.weight": torch.ones(2)},
        rf"of another shape or dtype: {last} is \(3,\), not \(": weights | {last: torch.ones(3)},
        rf"of another shape or dtype: {last} is torch.int8": weights
        | {last: torch.ones_like(weights[last], dtype=torch.int8)},
    }
    for message, wrong in cases.items():
        with pytest.raises(ValueError, match=message):
            block.load_from(wrong)
    for name, p in block.named_parameters():
        assert torch.equal(p, before[name]), name


def test_load_from_tells_what_the_block_lacks():
    _, _, weights = named("qwen2")
    with pytest.raises(ValueError, match=r"built without: self_attn\.q_proj\.bias, .*v_proj\.bias"):
        make("llama").load_from(weights)
    _, _, weights = named("llama")
    with pytest.raises(ValueError, match=r"missing: self_attn\.q_proj\.bias .*\(for bq\)"):
        make("qwen2").load_from(weights)
    twice = weights | {"self_attn.qkv_proj.weight": torch.zeros(64, DIM)}
    with pytest.raises(ValueError, match="given twice: wq, wk, wv"):
        make("llama").load_from(twice)
    with pytest.raises(ValueError, match=r"begins with 'model\.layers\.', seen: input_layernorm"):
        make("llama").load_from(weights, "model.layers")
    with pytest.raises(ValueError, match="no name of a layer's weights is known, seen: h.0.ln"):
        make("gpt2").load_from({"h.0.ln.weight": torch.ones(DIM)})
    with pytest.raises(ValueError, match="meta device"):
        make("llama", device="meta").load_from(weights)


def test_load_from_into_empty_memory():
    """Made on the meta device, given memory, loaded."""
    source = make("qwen3")
    block = make("qwen3", device="meta")
    assert all(p.is_meta for p in block.parameters())
    block = block.to_empty(device="cpu").load_from(source)
    x = torch.randn(1, TOKENS, DIM)
    assert torch.equal(block(x), source(x))
