"""The tolerance rule: at most twice the error of the plain composition in the same dtype.

`check(inputs)` evaluates one call three times: the function under test, the reference in float64
and the plain composition in the inputs' dtype, and compares output, LSE and every gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import reference
import torch

# Roundings of the result itself, in units of the dtype's eps times the largest value of the tensor.
OUT_ULPS, GRAD_ULPS = 1.0, 2.0
# A sum of n terms that cancel leaves this many eps of the accumulator's dtype times sqrt(n), times
# the size of the terms.
ZERO_ULPS = 8.0
# Without an additive mask the backward rebuilds weights as exp(score - lse): it carries the
# rounding of a number as large as the LSE, which the plain softmax does not.
LARGEST_LSE = 500.0
# Of delta's own sum, and of the product it is taken from.
DELTA_ULPS = 4.0
# A gradient of fewer elements than MANY is compared with this many draws of a random error.
MANY, DRAWS = 256, 8
# float64 has no coarser composition to be held against: the reference rounds as much as the rest.
FLOAT64_FACTOR = 100.0


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def coarser(*dtypes):
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _describe(name, what, at, got, exact, plain, extra=""):
    index = tuple(at.tolist())
    line = (
        f"{name}: {what} at {index}: got {got[index].item():.9g}, right {exact[index].item():.9g}"
    )
    if plain is not None:
        line += f", plain composition {plain[index].item():.9g}"
    return line + extra


def _first(flags):
    return flags.nonzero()[0]


def _same_special_values(name, got, exact, plain):
    for what, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(exact)
        if wrong.any():
            n, of = int(wrong.sum()), wrong.numel()
            raise AssertionError(
                _describe(
                    name, f"{what} differs in {n} of {of}, first", _first(wrong), got, exact, plain
                )
            )


def largest(x):
    x = x[torch.isfinite(x)]
    return float(x.abs().max()) if x.numel() else 0.0


def atol_of(dtype, size, ulps, terms, unit):
    total = accumulator(dtype)
    zero = ZERO_ULPS * terms**0.5 * torch.finfo(total).eps * max(unit, 1.0)
    factor = FLOAT64_FACTOR if dtype == torch.float64 else 1.0
    return factor * (ulps * torch.finfo(dtype).eps * size + zero)


def assert_close(
    name, got, exact, plain=None, *, dtype=None, ulps=OUT_ULPS, noise=0.0, terms=16, unit=1.0
):
    """|got - exact| <= 2 * (max |plain - exact| + noise) + atol; NaN and inf at the same places.

    dtype: the dtype whose rounding the result carries (default: got's); noise: an error to be
    granted beside the plain composition's; terms: how many scores are summed into an element; unit:
    their size, where it is above 1.
    """
    assert got is not None, f"{name}: got None"
    assert got.shape == exact.shape, (
        f"{name}: shape {tuple(got.shape)}, right is {tuple(exact.shape)}"
    )
    dtype = dtype or got.dtype
    exact = exact.detach().double()
    got = got.detach().double().to(exact.device)
    plain = None if plain is None else plain.detach().double().to(exact.device)
    _same_special_values(name, got, exact, plain)
    finite = torch.isfinite(exact)
    error = torch.where(finite, got - exact, torch.zeros_like(got)).abs()
    plain_error = 0.0 if plain is None else largest((plain - exact)[finite])
    atol = atol_of(dtype, largest(exact), ulps, terms, unit)
    allowed = 2.0 * (plain_error + noise) + atol
    if error.numel() and float(error.max()) > allowed:
        at = torch.stack(torch.unravel_index(error.argmax(), error.shape))
        wrong = int((error > allowed).sum())
        extra = (
            f"; error {float(error.max()):.3g}, allowed {allowed:.3g} (plain composition's "
            f"{plain_error:.3g}, atol {atol:.3g}); {wrong} of {error.numel()} are wrong, "
            f"largest right value {largest(exact):.3g}"
        )
        raise AssertionError(_describe(name, "worst element", at, got, exact, plain, extra))


def assert_bitwise(name, a, b):
    """The same bits, where equal NaN count as equal."""
    assert a.dtype == b.dtype and a.shape == b.shape, (
        f"{name}: {a.dtype} {tuple(a.shape)}, {b.dtype} {tuple(b.shape)}"
    )
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    if not same.all():
        raise AssertionError(
            _describe(
                name, f"{int((~same).sum())} elements differ, first", _first(~same), a, b, None
            )
        )


def same_arguments(leaves):
    return leaves


@dataclass
class Inputs:
    """One call. `leaves` are the tensors by argument name of the function (a view of them if `view`
    says so).
    """

    leaves: dict
    options: dict = field(default_factory=dict)
    grads: tuple = ()  # names of the leaves that require grad
    view: Callable = same_arguments  # leaves -> arguments, so that leaves may be packed or expanded
    grad_out: torch.Tensor | None = None  # random if None
    grad_lse: torch.Tensor | None = None  # None: the LSE takes no part in the backward
    use_lse: bool = False  # draw a random grad_lse
    reference_options: dict = field(default_factory=dict)

    @property
    def dtype(self):
        return self.view(self.leaves)["query"].dtype


REFERENCE_NAMES = {"query": "q", "key": "k", "value": "v"}


def call(fn, inputs, leaves, **more):
    arguments = dict(inputs.view(leaves))
    if fn in (reference.attention, reference.varlen_attention):
        arguments = {REFERENCE_NAMES.get(name, name): x for name, x in arguments.items()}
        more = {**inputs.reference_options, **more}
    return fn(**arguments, **{**inputs.options, **more}, return_lse=True)


def evaluate(fn, inputs, convert=None, **more):
    """{"out", "lse", "d<leaf>"...} of one call, on leaves that went through convert."""
    leaves = {}
    for name, x in inputs.leaves.items():
        x = x.detach() if convert is None else convert(x.detach())
        leaves[name] = x.requires_grad_() if name in inputs.grads else x
    out, lse = call(fn, inputs, leaves, **more)
    results = {"out": out.detach(), "lse": lse.detach()}
    wanted = [leaves[name] for name in inputs.grads]
    if not wanted:
        return results
    outputs, cotangents = [out], [inputs.grad_out.to(out)]
    if inputs.grad_lse is not None:
        outputs, cotangents = [out, lse], cotangents + [inputs.grad_lse.to(lse)]
    live = [(o, g) for o, g in zip(outputs, cotangents, strict=True) if o.requires_grad]
    gradients = torch.autograd.grad(
        [o for o, _ in live], wanted, [g for _, g in live], allow_unused=True, retain_graph=True
    )
    for name, leaf, gradient in zip(inputs.grads, wanted, gradients, strict=True):
        if fn in (reference.attention, reference.varlen_attention) and gradient is None:
            gradient = torch.zeros_like(leaf)
        results["d" + name] = gradient
    results["graph"] = (out, lse, dict(zip(inputs.grads, wanted, strict=True)))
    return results


def rounding_of_delta(exact, plain, inputs):
    """{leaf: error} that comes from delta = rowsum(grad_out * out), out made of weights rounded to
    the inputs' dtype, as the plain composition's is, rounded itself, and the sum to the
    accumulator's.

    An error e in delta is an error -P * e in dS, which is what a cotangent -e of the LSE gives. It
    is drawn, row by row. A leaf of few elements sums over many rows, where one draw may cancel by
    chance: twice the root mean square of several stands for it.
    """
    out, lse, leaves = exact["graph"]
    if not lse.requires_grad:
        return dict.fromkeys(leaves, 0.0)
    value, grad_out = out.detach(), inputs.grad_out.to(out)
    rounded = value.to(inputs.dtype).double() - value
    eps = DELTA_ULPS * torch.finfo(accumulator(inputs.dtype)).eps
    size = (grad_out * rounded).square().sum(-1).sqrt() + eps * (grad_out * value).abs().sum(-1)
    of_weights = (grad_out * (plain["out"].to(value) - value)).sum(-1)
    size = torch.nan_to_num(size.hypot(of_weights), 0.0, 0.0, 0.0)
    draws = DRAWS if min(x.numel() for x in leaves.values()) < MANY else 1
    errors = {name: [] for name in leaves}
    for _ in range(draws):
        cotangent = size * torch.randn_like(size)
        gradients = torch.autograd.grad(
            lse, list(leaves.values()), cotangent, allow_unused=True, retain_graph=True
        )
        for name, g in zip(leaves, gradients, strict=True):
            if g is not None:
                errors[name].append(torch.nan_to_num(g, 0.0, 0.0, 0.0))
    return {name: noise_of(torch.stack(e)) if e else 0.0 for name, e in errors.items()}


def noise_of(draws):
    if draws[0].numel() >= MANY:
        return largest(draws)
    return 2.0 * largest(draws.square().mean(0).sqrt())


# Products of one matrix product of a call: above it the truth is computed where the inputs are.
MUCH_WORK = 2**27


def as_truth(x):
    """On the CPU, floating tensors in float64."""
    return as_truth_here(x.cpu())


def as_truth_here(x):
    return x.double() if x.is_floating_point() else x


def truth_of(inputs):
    """as_truth, or as_truth_here for a call of much work."""
    arguments = inputs.view(inputs.leaves)
    lk = arguments["key"].size(0 if "cu_seqlens_q" in inputs.options else -2)
    return as_truth_here if arguments["query"].numel() * lk > MUCH_WORK else as_truth


def rounding_of_lse(inputs, exact):
    """Relative error of a weight rebuilt from the LSE; an additive mask keeps its low part too."""
    mask = inputs.leaves.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        return 0.0
    eps = torch.finfo(accumulator(inputs.dtype)).eps
    return 0.5 * eps * min(largest(exact["lse"]), LARGEST_LSE)


def with_cotangents(inputs, exact):
    """inputs with a random grad_out (and grad_lse) of the output's shape where none was given."""
    changes = {}
    if inputs.grad_out is None:
        changes["grad_out"] = torch.randn(exact["out"].shape).to(inputs.dtype)
    if inputs.use_lse and inputs.grad_lse is None:
        lse = exact["lse"]
        draw = torch.randn(lse.shape).to(accumulator(inputs.dtype))
        changes["grad_lse"] = draw.masked_fill(~torch.isfinite(lse).cpu(), 0.0)
    return replace(inputs, **changes)


def terms_of(name, inputs, exact):
    """How many scores are summed into one element of a gradient (of the slopes: times a distance).

    q, k and v have few terms at a time that do not average out; an expanded one has all its copies.
    """
    arguments, leaf = inputs.view(inputs.leaves), max(inputs.leaves[name].numel(), 1)
    if name not in ("attn_mask", "sinks", "alibi_slopes"):
        return 16 * arguments[name].numel() / leaf if name in arguments else 16
    lk = arguments["key"].size(0 if "cu_seqlens_q" in inputs.options else -2)
    terms = exact["lse"].numel() * lk / leaf
    return max(16, terms * lk if name == "alibi_slopes" else terms)


def check(inputs, fn=None, truth=reference.attention):
    """Compare fn (default flashbpt.attention) with the reference; returns fn's results."""
    if fn is None:
        import flashbpt

        fn = flashbpt.attention
    low, convert = inputs.dtype, truth_of(inputs)
    exact = evaluate(truth, replace(inputs, grads=()), convert=convert)
    inputs = with_cotangents(inputs, exact)
    exact = evaluate(truth, inputs, convert=convert)
    plain = evaluate(truth, inputs, product=low, softmax=accumulator(low))
    got = evaluate(fn, inputs)
    noise = rounding_of_delta(exact, plain, inputs) if inputs.grads else {}
    assert got["out"].dtype == low, f"output dtype {got['out'].dtype}, query {low}"
    assert got["lse"].dtype == accumulator(low), f"LSE dtype {got['lse'].dtype} for query {low}"
    assert_close("out", got["out"], exact["out"], plain["out"], unit=largest(exact["out"]))
    assert_close("lse", got["lse"], exact["lse"], plain["lse"])
    for name in inputs.grads:
        check_gradient(name, inputs, got, exact, plain, noise[name])
    return got


def check_gradient(name, inputs, got, exact, plain, noise):
    leaf, gradient = inputs.leaves[name], got["d" + name]
    assert gradient is not None, f"d{name} is None"
    assert gradient.dtype == leaf.dtype, f"d{name} is {gradient.dtype}, its input {leaf.dtype}"
    assert_close(
        "d" + name,
        gradient,
        exact["d" + name],
        plain["d" + name],
        dtype=coarser(inputs.dtype, leaf.dtype),
        ulps=GRAD_ULPS,
        noise=noise + rounding_of_lse(inputs, exact) * largest(exact["d" + name]),
        terms=terms_of(name, inputs, exact),
    )
