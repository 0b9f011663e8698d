"""Which backend serves a call: forcing one, asking which, and checks that cost a sync."""

from dataclasses import dataclass

import torch

# The numbers that the ops take.
BACKENDS = {"auto": 0, "cpu": 1, "sm80": 2, "sm90": 3, "aten": 4}


class _State:
    backend = 0
    debug_checks = False


class use_backend:
    """Serve every call of this process by one backend.

    "auto" takes the first that serves a call: "sm90" (kernels for Hopper), "sm80" (kernels for
    every GPU of compute capability 8.0 or newer; fp32, bf16, fp16, head dims up to 512), "aten"
    (PyTorch operations over all scores in memory: fp64 on a GPU, for gradcheck), "cpu". By name,
    "aten" serves any dtype on any device.

    Takes effect at once; as a context manager, which may be entered again, it puts the former
    setting back at the end. A backward follows the setting of its forward. A backend that cannot
    serve a call refuses it.

    Raises ValueError for any other name.
    """

    def __init__(self, name):
        if name not in BACKENDS:
            raise ValueError(f"unknown backend {name!r}; use one of {', '.join(BACKENDS)}")
        self._backend = BACKENDS[name]
        self._before_call = _State.backend
        self._former = []  # what each open block puts back
        _State.backend = self._backend

    def __enter__(self):
        # `with use_backend(...)`: the call made the setting, and the block puts back what was there
        # before the call. Any other block puts back what it found.
        former, self._before_call = self._before_call, None
        if former is None or _State.backend != self._backend:
            former = _State.backend
        self._former.append(former)
        _State.backend = self._backend
        return self

    def __exit__(self, *exc):
        _State.backend = self._former.pop()


def set_debug_checks(on):
    """Check the contents of cu_seqlens, page tables, lengths and slot mappings on the GPU too, at
    the price of a sync a call.

    On the CPU they are always checked.
    """
    _State.debug_checks = bool(on)


@dataclass(frozen=True)
class KernelChoice:
    """What `which_kernel` found: the backend, and why the faster ones were refused."""

    kernel: str | None
    refused: dict[str, str]
    config: str | None = None  # of a CUDA kernel: which of `flashbpt._C.kernels()`, by name

    def __bool__(self):
        return self.kernel is not None

    def __str__(self):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.refused.items())
        name = f"{self.kernel} {self.config}" if self.config else str(self.kernel)
        return f"{name} ({reasons})" if reasons else name


def which_kernel(*args, op="attention", backward=False, **kwargs):
    """Name the kernel that would serve a call, and why the faster ones are refused.

    Takes the arguments of the function that `op` names ("attention", "varlen_attention" or
    "paged_attention") and runs nothing. `backward=True` asks for the kernel of the backward.

    Returns a KernelChoice: `kernel` is None where no kernel serves the call, `refused` maps each
    other backend, fastest first, to the reason, `config` names the tile configuration. Raises what
    the function itself would raise for malformed arguments.
    """
    from flashbpt.attention import prepare_attention
    from flashbpt.paged import prepare_paged
    from flashbpt.varlen import prepare_varlen

    prepare = {
        "attention": prepare_attention,
        "varlen_attention": prepare_varlen,
        "paged_attention": prepare_paged,
    }.get(op)
    if prepare is None:
        raise ValueError(
            f"unknown op {op!r}; use 'attention', 'varlen_attention' or 'paged_attention'"
        )
    kwargs.pop("return_lse", None)
    if op == "paged_attention":
        kwargs.pop("out", None)
        if backward:
            raise ValueError("paged_attention has no backward")
        text = torch.ops.flashbpt.paged_attention_kernel.default(*prepare(*args, **kwargs))
    else:
        kwargs.pop("deterministic", None)
        arguments = prepare(*args, **kwargs)
        if op == "attention":
            arguments, _ = arguments
        with torch.no_grad():
            text = torch.ops.flashbpt.attention_kernel.default(*arguments, backward)
    first, *lines = text.split("\n")
    name, _, config = first.partition(" ")
    refused = dict(line.split(": ", 1) for line in lines)
    return KernelChoice(None if name == "none" else name, refused, config or None)
