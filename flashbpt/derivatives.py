"""Backwards that have no derivative of their own."""

import torch


def run_backward(op, arguments, advice):
    """op(*arguments); under create_graph its derivative is an error that gives the advice."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Once.apply(op, advice, *arguments)
    return op(*arguments)


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(op, advice, *arguments):
        return op(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.advice = inputs[1]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(ctx.advice)
