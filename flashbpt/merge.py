"""Merging of attention partials: the public function, its autograd and its fake kernel."""

import torch

from flashbpt.arguments import without_repeats

__all__ = ["merge_attention_states"]


def merge_attention_states(outs, lses):
    """Attention over the union of disjoint sets of keys, from the attention over each set.

    With ``lse = log(sum_i exp(lses[i]))`` and ``w_i = exp(lses[i] - lse)`` the result is
    ``out = sum_i w_i * outs[i]``, exactly what one softmax over all keys gives. Sums are kept in
    fp32 (fp64 for float64) and rounded once, however many states there are.

    Args:
        outs: sequence of n >= 1 tensors of one shape ``(..., D)``, dtype and device, as attention
            returns them: ``(B, H, L, D)``, ``(tokens, H, D)`` or any other leading shape. float32,
            bfloat16, float16 or float64; any strides. A tensor ``(n, ..., D)`` stands for its
            slices.
        lses: sequence of n tensors of shape ``outs[0].shape[:-1]``: the natural logarithm of each
            partial's softmax denominator. float32; float64 where ``outs`` are float64. Partials
            must carry no sink: it is folded in once, after the merge.

    Returns:
        ``(out, lse)``: contiguous, ``out`` in the dtype of ``outs``, ``lse`` in that of ``lses``.
        They are a state again: merging is associative up to rounding.

    Special values:
        A state with ``lse = -inf`` saw no keys: its weight is 0 and its row of ``outs`` is never
        used, even if it holds NaN. Where all states are empty, ``out`` is 0 and ``lse`` is -inf.
        A NaN in any of ``lses`` makes ``out`` and ``lse`` NaN; ``lse = +inf`` gives ``lse`` +inf
        and ``out`` NaN, as the formula does.

    Gradients flow to ``outs`` and ``lses`` through both results, also twice; empty states get 0.

    Raises:
        RuntimeError: no states, or lengths, shapes, dtypes or devices that do not match; the
            message says what was seen and what is allowed.

    The rescaling is that of the online softmax (Milakov and Gimelshein, arXiv:1805.02867). As an
    operation on attention states it is ``merge_states`` of FlashInfer (Ye et al.,
    arXiv:2501.01005), whose LSE is to base 2.
    """
    outs, lses = list(outs), list(lses)
    if not outs:
        raise RuntimeError("merge_attention_states: outs is empty; at least one state is needed")
    if len(outs) != len(lses):
        raise RuntimeError(
            "merge_attention_states: outs and lses must have the same length, but got "
            f"{len(outs)} outs and {len(lses)} lses"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in outs + lses):
        states = outs + lses
        if torch.compiler.is_compiling():
            states = without_repeats(states)
        return MergeAttentionStates.apply(*states)
    return _merge(outs, lses)


def _merge(outs, lses):
    return torch.ops.flashbpt.merge_attention_states.default(outs, lses)


class MergeAttentionStates(torch.autograd.Function):
    """The arguments are the outs, then as many lses.

    The backward is made of differentiable torch operations on the saved tensors: it needs no kernel
    and has derivatives of its own.
    """

    @staticmethod
    def forward(*states):
        n = len(states) // 2
        return _merge(list(states[:n]), list(states[n:]))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        *states, lse = ctx.saved_tensors
        n = len(states) // 2
        outs, lses = states[:n], states[n:]
        need_outs, need_lses = ctx.needs_input_grad[:n], ctx.needs_input_grad[n:]
        grad_outs, grad_lses = [None] * n, [None] * n
        if grad_out is None and grad_lse is None:
            return (*grad_outs, *grad_lses)

        empty = [one == -torch.inf for one in lses]
        # Where all states are empty the difference is NaN.
        weights = [
            torch.exp(torch.where(no_keys, -torch.inf, one - lse))
            for one, no_keys in zip(lses, empty, strict=True)
        ]

        # d out_i = w_i * d out
        if grad_out is not None:
            grad_out = grad_out.to(lse.dtype)
            for i in range(n):
                if need_outs[i]:
                    grad_outs[i] = (weights[i].unsqueeze(-1) * grad_out).to(outs[i].dtype)
        if not any(need_lses):
            return (*grad_outs, *grad_lses)

        # d lse_i = w_i * (d out . (out_i - out) + d lse). d out . out is taken as the weighted mean
        # of d out . out_i, which does not see the rounding of out.
        along = [0] * n
        common = 0 if grad_lse is None else grad_lse
        if grad_out is not None:
            along = [
                (grad_out * one.masked_fill(no_keys.unsqueeze(-1), 0)).sum(-1)
                for one, no_keys in zip(outs, empty, strict=True)
            ]
            common = common - sum(w * dot for w, dot in zip(weights, along, strict=True))
        for i in range(n):
            if need_lses[i]:
                grad_lses[i] = weights[i] * (along[i] + common)
        return (*grad_outs, *grad_lses)


@torch.library.register_fake("flashbpt::merge_attention_states")
def _(outs, lses):
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)
