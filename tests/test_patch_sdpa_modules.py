"""patch_sdpa() under modules, autograd, torch.compile and export."""

import pytest
import torch
import torch.nn.functional as F
from sdpa_spy import ORIGINAL, fallbacks_of, inputs, nothing_stays_behind, served
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import flashbpt
import flashbpt.integrations.sdpa as shim_module
from flashbpt import patch_sdpa

__all__ = ["nothing_stays_behind", "served"]  # fixtures


# ---- modules and gradients


def twin_gradients(module, *args, **kwargs):
    module.zero_grad()
    out = module(*args, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in module.named_parameters()}


def test_multihead_attention(served):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 10, 32)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[1, 7:] = True
    kwargs = {"need_weights": False, "key_padding_mask": padding}
    expected = twin_gradients(module, x, x, x, **kwargs)
    with patch_sdpa() as handle:
        actual = twin_gradients(module, x, x, x, **kwargs)
    assert len(served) == 1 and not handle.fallbacks
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_transformer_encoder_layer(served, causal):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 12, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(12) if causal else None
    kwargs = {"src_mask": mask, "is_causal": causal}
    expected = twin_gradients(layer, x, **kwargs)
    with patch_sdpa() as handle:
        actual = twin_gradients(layer, x, **kwargs)
    assert len(served) == 1 and not handle.fallbacks
    torch.testing.assert_close(actual, expected)


def test_decoder_layer(served):
    torch.manual_seed(0)
    layer = torch.nn.TransformerDecoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x, memory = torch.randn(2, 6, 32), torch.randn(2, 9, 32)
    expected = twin_gradients(layer, x, memory)
    with patch_sdpa():
        actual = twin_gradients(layer, x, memory)
    assert len(served) == 2
    torch.testing.assert_close(actual, expected)


def test_mask_gradient(served):
    q, k, v = inputs()
    mask = torch.randn(4, 24, 24, requires_grad=True)
    (expected,) = torch.autograd.grad(ORIGINAL(q, k, v, mask).square().sum(), mask)
    with patch_sdpa():
        out = F.scaled_dot_product_attention(q, k, v, mask)
    (actual,) = torch.autograd.grad(out.square().sum(), mask)
    torch.testing.assert_close(actual, expected)
    assert len(served) == 1


# ---- torch.compile


def compiled(function, **kwargs):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **kwargs)


def ops_in_graph(function, *args):
    """The flashbpt ops that Dynamo's graphs hold, forward only."""
    found = []

    def backend(graph, _):
        found.extend(str(n.target) for m in graph.modules() for n in m.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=backend)(*args)
    return found


def call(q, k, v, **kwargs):
    return F.scaled_dot_product_attention(q, k, v, **kwargs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    with patch_sdpa() as handle:
        function = compiled(call, dynamic=dynamic)
        for length in (24, 40):
            q, k, v = inputs(2, 4, length, 16, requires_grad=True)
            out = function(q, k, v, is_causal=True)
            expected = ORIGINAL(q, k, v, is_causal=True)
            torch.testing.assert_close(out, expected)
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (q, k, v)))
    assert not handle.fallbacks


def test_compiled_graph_holds_the_op_and_nothing_of_the_shim():
    q, k, v = inputs()
    with patch_sdpa():
        served_by = ops_in_graph(call, q, k, v)
        with sdpa_kernel(SDPBackend.MATH):
            math = ops_in_graph(call, q, k, v)
    assert any("flashbpt.attention_forward" in op for op in served_by)
    assert not any("scaled_dot_product" in op or "sdp_enabled" in op for op in served_by)
    assert any("scaled_dot_product" in op for op in math)
    assert not any("flashbpt" in op for op in math)


def test_compiled_before_during_and_after():
    q, k, v = inputs()
    graphs = []

    def backend(graph, _):
        graphs.append("".join(str(n.target) for m in graph.modules() for n in m.graph.nodes))
        return graph.forward

    function = torch.compile(call, fullgraph=True, backend=backend)
    function(q, k, v)
    with patch_sdpa():
        function(q, k, v)
        with patch_sdpa():
            function(q, k, v)  # a second patch needs no new graph
    function(q, k, v)
    with patch_sdpa():
        function(q, k, v)
    assert ["flashbpt" in graph for graph in graphs] == [False, True]


def test_math_inside_a_compiled_function():
    def both(q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            a = F.scaled_dot_product_attention(q, k, v)
        return a, F.scaled_dot_product_attention(q, k, v)

    q, k, v = inputs()
    with patch_sdpa():
        ops = ops_in_graph(both, q, k, v)
        assert sum("flashbpt.attention_forward" in op for op in ops) == 1
        assert sum("scaled_dot_product" in op for op in ops) == 1
        torch.testing.assert_close(*compiled(both)(q, k, v))


def test_compiled_refusal_counts_once_and_breaks_no_graph(served):
    q, k, v = inputs()
    served_attention = served.attention

    def refuse(query, *args, **kwargs):
        if query.shape[-1] == 16:
            raise NotImplementedError(f"no kernel for head dimension {query.shape[-1]}")
        return served_attention(query, *args, **kwargs)

    shim_module.attention = refuse  # the fixture puts it back
    with patch_sdpa() as handle, pytest.warns(UserWarning, match="flashbpt refuses"):
        function = compiled(call)
        for _ in range(3):
            torch.testing.assert_close(function(q, k, v), ORIGINAL(q, k, v))
    assert fallbacks_of(handle) == 1  # once a trace


def test_compile_causal_bias():
    q, k, v = inputs(2, 4, 8, 16, keys=24)
    bias = causal_lower_right(8, 24)
    with patch_sdpa() as handle:
        out = compiled(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias))(q, k, v)
    torch.testing.assert_close(out, ORIGINAL(q, k, v, bias._materialize()))
    assert not handle.fallbacks


def test_compile_a_module_that_dynamo_does_not_look_into(served):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.randn(2, 12, 32)
    expected = twin_gradients(layer, x, x, x, need_weights=False)

    def compile_and_run():
        torch._dynamo.reset()
        served.served.clear()
        function = compiled(layer)
        out, grads = twin_gradients(function, x, x, x, need_weights=False)
        traced = len(served)
        function(x, x, x, need_weights=False)
        assert len(served) == traced  # in the graph, not called from it
        grads = {name.removeprefix("_orig_mod."): g for name, g in grads.items()}
        torch.testing.assert_close((out, grads), expected)
        return traced > 0

    assert not compile_and_run()
    with patch_sdpa() as handle:
        assert compile_and_run()
    assert not compile_and_run()
    assert not handle.fallbacks


@pytest.mark.parametrize("former", ["", "mine"])
def test_the_compile_caches_know_the_patch(former):
    """Inductor finds code on disk by Dynamo's graph, where that module is one call either way."""
    config = torch.compiler.config
    with config.patch(cache_key_tag=former):
        with patch_sdpa():
            tag = config.cache_key_tag
            assert tag.startswith(former) and "patch_sdpa" in tag
            with patch_sdpa():
                assert config.cache_key_tag == tag
            assert config.cache_key_tag == tag
        assert config.cache_key_tag == former


def test_compile_where_no_kernel_serves(served):
    """The op would refuse when the graph runs, too late to go elsewhere."""
    q, k, v = inputs()
    with patch_sdpa() as handle, flashbpt.use_backend("sm80"):
        with pytest.warns(UserWarning, match="no kernel"):
            out = compiled(call)(q, k, v)
        with pytest.warns(UserWarning, match="no kernel"):
            eager = F.scaled_dot_product_attention(q, k, v)
    for result in (out, eager):
        torch.testing.assert_close(result, ORIGINAL(q, k, v))
    assert fallbacks_of(handle) == 2 and len(served) == 0


def test_export():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    q, k, v = inputs()
    with patch_sdpa():
        program = torch.export.export(Module(), (q, k, v))
    assert any("flashbpt.attention_forward" in str(n.target) for n in program.graph.nodes)
    torch.testing.assert_close(program.module()(q, k, v), ORIGINAL(q, k, v))
