"""flashbpt.nn.TransformerBlock against the same layer written with torch's own functions."""

import copy
import dataclasses
import io

import pytest
import torch
import torch.nn.functional as F
from block_cases import ACTIVATIONS
from nn_cases import DIM, FFN, GPT2, HEADS, KINDS, TOKENS, make

from flashbpt.nn import TransformerBlock

pytestmark = pytest.mark.usefixtures("one_thread")


def rotary(length, dim, theta):
    angle = torch.arange(length).double()[:, None] * theta ** (
        -torch.arange(dim // 2).double() / (dim // 2)
    )
    return angle.cos(), angle.sin()


def rotated(x, cos, sin, kind):
    """x (B, heads, S, D)."""
    a, b = x.chunk(2, -1) if kind == "half" else (x[..., ::2], x[..., 1::2])
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.cat(turned, -1) if kind == "half" else torch.stack(turned, -1).flatten(-2)


def plain(block, x, tables=None):
    """(y, k, v) of x (B, S, H), computed by torch alone, in its dtype; k, v (B, S, Hkv, D)."""
    p = dict(block._parameters)  # None for what there is not
    c, d, length = block.config, block.head_dim, x.shape[1]

    def norm(t, name):
        if c.norm == "rms":
            return F.rms_norm(t, t.shape[-1:], p[name], c.eps)
        return F.layer_norm(t, t.shape[-1:], p[name], p[name + "_bias"], c.eps)

    n = norm(x, "norm1")
    q, k, v = (
        F.linear(n, p["w" + name], p["b" + name]).unflatten(-1, (-1, d)).transpose(1, 2)
        for name in "qkv"
    )
    if c.qk_norm:
        q, k = (F.rms_norm(t, (d,), p[name], c.eps) for t, name in ((q, "q_norm"), (k, "k_norm")))
    if c.rope:
        cos, sin = (t.to(x.dtype) for t in tables or rotary(length, d, c.rope_theta))
        q, k = rotated(q, cos, sin, c.rope), rotated(k, cos, sin, c.rope)
    kv = k.transpose(1, 2), v.transpose(1, 2)
    k, v = (t.repeat_interleave(c.heads // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (d**-0.5 if c.scale is None else c.scale)
    if c.softcap:
        scores = c.softcap * (scores / c.softcap).tanh()
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if c.window:
        seen = seen.triu(-c.window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if p["sinks"] is not None:
        sink = p["sinks"][:, None, None].expand(len(x), -1, length, 1)
        scores = torch.cat((scores, sink), -1)
    o = scores.softmax(-1)[..., :length] @ v
    h = x + F.linear(o.transpose(1, 2).flatten(2), p["wo"], p["bo"])
    n, act = norm(h, "norm2"), ACTIVATIONS[c.activation]
    up = F.linear(n, p["w_up"], p["b_up"])
    inner = act(up) if p["w_gate"] is None else act(F.linear(n, p["w_gate"], p["b_gate"])) * up
    return h + F.linear(inner, p["w_down"], p["b_down"]), *kv


def results(block, run, x, grad):
    """{name: value} of the output and of all gradients of `run(block, x)`."""
    x = x.detach().clone().requires_grad_()
    block.zero_grad(set_to_none=True)
    y = run(block, x)
    y.backward(grad)
    found = {"y": y.detach(), "x": x.grad}
    return found | {name: p.grad for name, p in block.named_parameters()}


def close(block, run, plain_run, x):
    """Compare with the plain layer: fp64 tightly, others by their error against fp64."""
    grad = torch.randn_like(x)
    ours = results(block, run, x, grad)
    theirs = results(block, plain_run, x, grad)
    assert None not in ours.values() and None not in theirs.values()
    exact = theirs
    if x.dtype != torch.float64:
        exact = results(copy.deepcopy(block).double(), plain_run, x.double(), grad.double())
    eps = torch.finfo(x.dtype).eps * (500 if x.dtype == torch.float64 else 8)
    largest = max(value.abs().max().item() for value in exact.values())
    for name, value in ours.items():
        assert value.shape == exact[name].shape and value.dtype == x.dtype
        size = exact[name].abs().max().item()
        error, theirs_error = (
            (got - exact[name]).abs().max().item() for got in (value, theirs[name])
        )
        # Some are a sum that cancels: bk, without rope, to 0.
        allowed = 2 * theirs_error + eps * max(size, 0.1 * largest)
        assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}, size {size:.2e}"


# ------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_plain_layer(kind, dtype):
    """Output and every gradient of a batch."""
    x = torch.randn(2, TOKENS, DIM, dtype=dtype) + 0.5
    close(make(kind, dtype), lambda b, x: b(x), lambda b, x: plain(b, x)[0], x)


@pytest.mark.parametrize("save", ["x+o", "x", "all"])
@pytest.mark.parametrize("rows", [16, "auto"])
def test_equals_the_plain_layer_however_it_is_cut(save, rows):
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    block = make("llama", torch.float64, save=save, rows=rows)
    close(block, lambda b, x: b(x), lambda b, x: plain(b, x)[0], x)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "local"])
def test_packed_equals_one_sequence_at_a_time(kind):
    """An empty sequence and one of a single token are among them."""
    lengths = [5, 0, 19, 1, 12]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    x = torch.randn(sum(lengths), DIM, dtype=torch.float64)

    def one_by_one(block, x):
        return torch.cat([plain(block, part[None])[0][0] for part in x.split(lengths)])

    close(make(kind, torch.float64), lambda b, x: b(x, cu_seqlens=ends), one_by_one, x)


def test_tables_in_place_of_theta():
    """cos and sin of other angles than rope_theta's."""
    tables = [t.float() for t in rotary(TOKENS, DIM // HEADS, 77.0)]
    x = torch.randn(1, TOKENS, DIM)
    close(
        make("llama"),
        lambda b, x: b(x, cos=tables[0], sin=tables[1]),
        lambda b, x: plain(b, x, tables)[0],
        x,
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_returns_keys_and_values(kind):
    block, x = make(kind, torch.float64), torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    with torch.no_grad():
        y, (k, v) = block(x, return_kv=True)
        torch.testing.assert_close((y, k, v), plain(block, x))
        ends = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)
        y, (k, v) = block(x.flatten(0, 1), cu_seqlens=ends, return_kv=True)
        packed = tuple(t.unflatten(0, (2, TOKENS)) for t in (y, k, v))
        torch.testing.assert_close(packed, plain(block, x))


def test_equals_torch_encoder_layer():
    """torch's own pre-norm layer with a causal mask, forward and backward."""
    layer = torch.nn.TransformerEncoderLayer(
        DIM, HEADS, FFN, 0.0, F.gelu, batch_first=True, norm_first=True, dtype=torch.float64
    )
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    options = {**GPT2, "activation": "gelu"}
    block = TransformerBlock(DIM, HEADS, ffn_dim=FFN, dtype=torch.float64, **options)
    assert block.load_from(layer) is block
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=x.dtype)
    grad = torch.randn_like(x)
    theirs, ours = layer(x, src_mask=mask, is_causal=True), block(x)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad, True) for y in (ours, theirs)))
    for y in (ours, theirs):
        y.backward(grad)
    torch.testing.assert_close(
        torch.cat((block.wq.grad, block.wk.grad, block.wv.grad)),
        layer.self_attn.in_proj_weight.grad,
    )
    torch.testing.assert_close(block.norm1_bias.grad, layer.norm1.bias.grad)
    torch.testing.assert_close(block.w_down.grad, layer.linear2.weight.grad)


# Hugging Face's configuration and layer, and the block's options.
TRANSFORMERS = {
    "llama": ({"attention_bias": False}, {"kv_heads": 2}),
    "mistral": ({"sliding_window": None, "head_dim": 8}, {"kv_heads": 2}),
    "qwen2": ({}, {"kv_heads": 2, "bias": "qkv"}),
    "qwen3": ({"head_dim": 16}, {"kv_heads": 2, "head_dim": 16, "qk_norm": True}),
    "phi3": ({"pad_token_id": 0}, {"kv_heads": 2}),
    "gpt2": ({}, GPT2),
}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_equals_transformers(family):
    """The layers of Hugging Face's models in fp32, forward and backward."""
    transformers = pytest.importorskip("transformers")
    config_options, options = TRANSFORMERS[family]
    if family == "gpt2":
        config = transformers.GPT2Config(n_embd=DIM, n_head=HEADS, n_inner=FFN, n_layer=1)
        config.resid_pdrop = config.attn_pdrop = config.embd_pdrop = 0.0
        layer_name = "GPT2Block"
    else:
        config = transformers.AutoConfig.for_model(
            family,
            hidden_size=DIM,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            intermediate_size=FFN,
            num_hidden_layers=1,
            **config_options,
        )
        options = {**options, "rope": "half", "eps": config.rms_norm_eps}
        prefix = {"qwen2": "Qwen2", "qwen3": "Qwen3", "phi3": "Phi3"}.get(family, family.title())
        layer_name = prefix + "DecoderLayer"
    config._attn_implementation = "sdpa"
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["*"])
    layer = getattr(module, layer_name)(config, layer_idx=0)
    for name, p in layer.named_parameters():
        if "norm" not in name and "ln" not in name:
            torch.nn.init.normal_(p, std=0.2)
    block = TransformerBlock(DIM, HEADS, ffn_dim=FFN, **options).load_from(layer)

    x = torch.randn(2, TOKENS, DIM, requires_grad=True)
    extra = {}
    if family != "gpt2":
        rotary_class = getattr(module, layer_name.replace("DecoderLayer", "RotaryEmbedding"))
        positions = torch.arange(TOKENS)[None]
        extra = {"position_embeddings": rotary_class(config)(x, positions)}
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    theirs = layer(x, attention_mask=causal, **extra)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs
    ours, grad = block(x), torch.randn_like(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    (ours_dx,), (theirs_dx,) = (torch.autograd.grad(y, x, grad) for y in (ours, theirs))
    torch.testing.assert_close(ours_dx, theirs_dx, rtol=1e-4, atol=1e-3)


# ------------------------------------------------------------------------------- a module


def test_dropout_is_off_in_eval():
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64)
    block = make("llama", torch.float64, attention_dropout=0.3, residual_dropout=0.2)
    trained = block(x)
    assert (block.config.attention_dropout, block.config.residual_dropout) == (0.3, 0.2)
    assert not torch.equal(trained, block(x))  # another draw
    torch.manual_seed(5)
    repeated = block(x)
    torch.manual_seed(5)
    assert torch.equal(repeated, block(x))
    block.eval()
    assert (block.config.attention_dropout, block.config.residual_dropout) == (0.0, 0.0)
    state = torch.get_rng_state()
    close(block, lambda b, x: b(x), lambda b, x: plain(b, x)[0], x)
    torch.set_rng_state(state)
    block(x)
    assert torch.equal(state, torch.get_rng_state())  # nothing was drawn
    block.train()
    assert block.config.attention_dropout == 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_round_trip(kind):
    """By torch.save, into a fresh block."""
    block, other, file = make(kind), make(kind), io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(1, TOKENS, DIM)
    assert torch.equal(block(x), other(x))
    fields = {field.name for field in dataclasses.fields(type(block.config))}
    assert fields >= {"heads", "kv_heads", "save"}
    assert set(block.state_dict()) == {name for name, _ in block.named_parameters()}


def test_copies_and_conversions():
    block = make("qwen3")
    twin = copy.deepcopy(block)
    x = torch.randn(1, TOKENS, DIM)
    y = block(x)
    with torch.no_grad():
        twin.wq.zero_()
    assert torch.equal(block(x), y) and not torch.equal(twin(x), y)
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), y)

    half = copy.deepcopy(block).to(torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    z = half(x.bfloat16())
    assert z.dtype == torch.bfloat16
    torch.testing.assert_close(z.float(), y, rtol=0.05, atol=0.1)
    torch.testing.assert_close(block.double()(x.double()).float(), y, rtol=1e-4, atol=1e-4)


def test_functional_call():
    """Weights from outside, as torch.func hands them over."""
    block, other, x = make(), make(), torch.randn(1, TOKENS, DIM)
    y = torch.func.functional_call(block, dict(other.named_parameters()), (x,))
    assert torch.equal(y, other(x))


def test_frozen_weights():
    """Only what requires a gradient gets one."""
    block, x = make(), torch.randn(1, TOKENS, DIM)
    for name, p in block.named_parameters():
        p.requires_grad_(name in ("wq", "w_up"))
    block(x).sum().backward()
    assert {name for name, p in block.named_parameters() if p.grad is not None} == {"wq", "w_up"}


def test_main_grad():
    """Gradients are added into main_grad in fp32, and are those that .grad would have held."""
    block, x = make("qwen2"), torch.randn(1, TOKENS, DIM)
    block(x).square().sum().backward()
    want = {name: p.grad.clone() for name, p in block.named_parameters()}
    block.zero_grad(set_to_none=True)
    for p in block.parameters():
        p.main_grad = torch.ones_like(p)
    for times in (1, 2):
        block(x).square().sum().backward()
        for name, p in block.named_parameters():
            torch.testing.assert_close(
                p.main_grad, 1 + times * want[name], rtol=1e-4, atol=1e-4, msg=name
            )


def test_reset_parameters_as_torch_does():
    """The bounds of torch.nn.Linear, ones and zeros for norms; the same for the same seed."""
    block = TransformerBlock(64, 4, ffn_dim=256, norm="layer", bias=True, qk_norm=True, sinks=True)
    torch.manual_seed(3)
    block.reset_parameters()
    fan_in = {"wo": 64, "w_down": 256, "b_down": 256}
    for name, p in block.named_parameters():
        if "norm" in name:
            assert torch.all(p == ("bias" not in name)), name
        elif name == "sinks":
            assert not p.any()
        else:
            bound = fan_in.get(name, 64) ** -0.5
            assert p.abs().max() <= bound, name
            assert p.abs().max() > 0.8 * bound, name
    before = {name: p.clone() for name, p in block.named_parameters()}
    torch.manual_seed(3)
    block.reset_parameters()
    torch.testing.assert_close(dict(block.named_parameters()), before, rtol=0, atol=0)


def test_repr_tells_what_it_is():
    text = repr(make("local"))
    for part in ("dim=32", "heads=4", "kv_heads=2", "window=9", "sinks=True", "bq bk bv bo"):
        assert part in text
    assert "rope=None" in text and "scale" not in text


def test_biases_by_name():
    block = TransformerBlock(DIM, HEADS, ffn_dim=FFN, norm="layer", bias=("b_up", "norm2_bias"))
    biases = {name for name, _ in block.named_parameters() if name[0] == "b" or "_bias" in name}
    assert biases == {"b_up", "norm2_bias"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "dim must be a multiple of heads .* got 32 and 5"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got 4 and 3"),
        ({"ffn_dim": 0}, "ffn_dim must be at least 1, got 0"),
        ({"bias": "some"}, "bias must be True, False, .* got 'some'"),
        ({"bias": ("b_gate", "bz")}, "bias must be .* got \\('b_gate', 'bz'\\)"),
    ],
)
def test_refuses_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerBlock(DIM, **{"heads": HEADS, "ffn_dim": FFN, **options})


@pytest.mark.parametrize(
    "options",
    [{"norm": "batch"}, {"activation": "tanh"}, {"rope": "quarter"}, {"save": "y"}, {"rows": 0}],
    ids=lambda options: next(iter(options)),
)
def test_refuses_options(options):
    """What there is not is refused where the block is made or where it is called."""
    with pytest.raises((ValueError, RuntimeError), match=next(iter(options.values())) or "rows"):
        TransformerBlock(DIM, HEADS, ffn_dim=FFN, **options)(torch.randn(1, 3, DIM))
