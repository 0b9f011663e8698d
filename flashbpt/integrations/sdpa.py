"""Put flashbpt behind ``torch.nn.functional.scaled_dot_product_attention``.

``patch_sdpa()`` replaces the attribute of ``torch.nn.functional`` by a Python function of the same
name and signature, the shim. Every call then takes one of three ways:

1. to ``__torch_function__``, when an argument or an active mode has one, as PyTorch's own does;
2. to ``flashbpt.attention``;
3. to the original function: when only the MATH backend is enabled, which is how one asks PyTorch
   for its reference, and when flashbpt refuses the arguments. A refusal is warned about once a
   reason and counted in ``handle.fallbacks``.
"""

import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import _disable_current_modes

from flashbpt.attention import attention
from flashbpt.backend import which_kernel
from flashbpt.version import __version__

# Failures of the machine, not refusals: another function would fail too, or hide a fault.
_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError, RecursionError)
_FAILURE_TEXTS = ("INTERNAL ASSERT FAILED", "can't allocate memory", "CUDA error")

# Dynamo records nn.MultiheadAttention as one call, and compiled code kept on disk is found by that
# record. Code traced under the patch must not be found without it, nor the other way round.
_CACHE_TAG = f"flashbpt.patch_sdpa/{__version__}"

_lock = threading.Lock()
# By the id of the function behind the shim; the value keeps that function alive.
_shims: dict[int, "_Shim"] = {}


class SdpaPatch:
    """What ``patch_sdpa()`` returns: the patch, to be counted and undone.

    Attributes:
        fallbacks: how many calls went to the original function because flashbpt refused them, by
            reason. Numbers in a reason are written ``#``, so that one reason does not become many.
            A call inside a compiled graph counts once, when it is traced. Calls under
            ``sdpa_kernel(SDPBackend.MATH)`` are not refusals and do not count.
    """

    def __init__(self, shim: "_Shim"):
        self.fallbacks: Counter = Counter()
        self._shim = shim

    @property
    def active(self) -> bool:
        """True until ``undo()``."""
        return self in self._shim.patches

    def undo(self) -> None:
        """Take this patch away; a second call does nothing.

        The last patch to go puts the original function back.
        """
        with _lock:
            self._shim.remove(self)

    def __enter__(self) -> "SdpaPatch":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "active" if self.active else "undone"
        return f"<SdpaPatch {state}, {sum(self.fallbacks.values())} fallbacks>"


class _Shim:
    """A shim, the function behind it, and the patches that hold it in place."""

    def __init__(self, original: Callable[..., torch.Tensor]):
        self.original = original
        self.patches: tuple[SdpaPatch, ...] = ()
        self.active = False  # what the shim reads: one bool, so that nesting recompiles no graph
        self.function = _make_function(self)

    def add(self) -> SdpaPatch:
        patch = SdpaPatch(self)
        self.patches += (patch,)
        self.active = True
        torch.nn.functional.scaled_dot_product_attention = self.function
        _tag_compile_cache(True)
        return patch

    def remove(self, patch: SdpaPatch) -> None:
        self.patches = tuple(p for p in self.patches if p is not patch)
        if self.patches or not self.active:
            return
        self.active = False
        _tag_compile_cache(any(shim.active for shim in _shims.values()))
        # Somebody else may have put a wrapper of their own on top. It stays, and the shim under it
        # only passes calls through.
        if torch.nn.functional.scaled_dot_product_attention is self.function:
            torch.nn.functional.scaled_dot_product_attention = self.original


def _tag_compile_cache(tagged: bool) -> None:
    config = torch.compiler.config
    others = [tag for tag in config.cache_key_tag.split(";") if tag not in ("", _CACHE_TAG)]
    config.cache_key_tag = ";".join([*others, _CACHE_TAG] if tagged else others)


def patch_sdpa() -> SdpaPatch:
    """Serve ``torch.nn.functional.scaled_dot_product_attention`` by :func:`flashbpt.attention`.

    Both forms do the same::

        handle = patch_sdpa()
        ...
        handle.undo()

        with patch_sdpa() as handle:
            ...

    Patches nest and may be undone in any order. They are process-wide, and every thread sees them.

    What is reached: every call that looks the function up in ``torch.nn.functional`` when it is
    made. That is ``F.scaled_dot_product_attention(...)``, ``nn.MultiheadAttention`` with
    ``need_weights=False``, ``nn.TransformerEncoderLayer`` and its relatives in training, and
    ``torch.compile(fullgraph=True)`` of all of these. A graph that was compiled before is compiled
    again, but for ``nn.MultiheadAttention``, which Dynamo does not look into: a graph with it stays
    as it was compiled, so patch first.

    What goes to the original function:

    - calls while ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` or its like leaves no backend
      but MATH (read when a graph is traced, under ``torch.compile``);
    - nested tensors, and whatever flashbpt refuses, with one warning a reason and a count in
      ``handle.fallbacks``. Where the original raises too, its exception is what the caller sees,
      without warning and count.

    ``torch.nn.attention.bias.causal_upper_left`` and ``causal_lower_right`` are served without a
    mask being built. Tensor subclasses and function modes with a ``__torch_function__`` get the
    call first, with what ``torch.nn.functional.scaled_dot_product_attention`` then is as function.

    What is not reached: names bound before (``from torch.nn.functional import
    scaled_dot_product_attention``), ``torch.ops.aten``, C++ callers such as the inference fast path
    of ``nn.TransformerEncoderLayer``, and TorchScript (script a model before the patch). What
    cannot be known when a call is made is not a refusal: a second derivative raises in the backward
    and names the MATH backend, under which the forward has to run for that.

    Returns:
        The :class:`SdpaPatch`, with ``undo()`` and ``fallbacks``.
    """
    with _lock:
        current = torch.nn.functional.scaled_dot_product_attention
        # A shim that is in place already, or was left under somebody else's wrapper.
        shim = next((s for s in _shims.values() if s.function is current), None)
        if shim is None:
            shim = _shims.get(id(current))
        if shim is None:
            shim = _shims[id(current)] = _Shim(current)
        return shim.add()


def _make_function(shim: _Shim) -> Callable[..., torch.Tensor]:
    original = shim.original

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        if not shim.active:
            return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

        nested = _any_nested(query, key, value)
        biased = isinstance(attn_mask, CausalBias)
        overridable = (query, key, value, attn_mask)
        if has_torch_function(overridable):
            # A mode comes before everything, and calls the shim again without itself.
            mode = has_torch_function((None,))
            # Two classes are served here: a jagged tensor knows the original, not the shim, and a
            # CausalBias would call PyTorch's kernels itself.
            served = nested or (biased and not has_torch_function((query, key, value)))
            if mode or not served:
                return handle_torch_function(
                    scaled_dot_product_attention,
                    overridable,
                    query,
                    key,
                    value,
                    attn_mask=attn_mask,
                    dropout_p=dropout_p,
                    is_causal=is_causal,
                    **options,
                )

        align = "upper-left"
        if biased:
            if is_causal:
                raise ValueError("CausalBias should not be used with causal=True")
            lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
            if lengths[0] == lengths[1] or attn_mask.variant == CausalVariant.UPPER_LEFT:
                attn_mask, is_causal = None, True
            elif not nested and lengths == (query.shape[-2], key.shape[-2]):
                attn_mask, is_causal, align = None, True, "lower-right"
            else:  # lengths that do not fit: let the mask meet the scores and be refused there
                attn_mask = attn_mask._materialize(query.device)

        reason = None
        if nested and not _math_only():
            reason = "nested tensors are not supported"
        elif not _math_only() and _are_tensors(query, key, value):
            out, reason = _serve(
                query, key, value, attn_mask, dropout_p, is_causal, causal_align=align, **options
            )
            if reason is None:
                return out

        if align == "lower-right":
            attn_mask, is_causal = _lower_right_mask(query, key), False
        out = original(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if reason is not None:
            _note_refusal(shim.original, reason)
        return out

    # Under the name it is found by: torch.fx writes it into code, pickle looks it up.
    scaled_dot_product_attention.__module__ = "torch.nn.functional"
    scaled_dot_product_attention.__qualname__ = "scaled_dot_product_attention"
    scaled_dot_product_attention.__doc__ = original.__doc__
    return scaled_dot_product_attention


def _serve(
    query: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor | None, str | None]:
    """(output, None) of flashbpt, or (None, why it refuses)."""
    if torch.compiler.is_compiling():
        value = args[1] if len(args) > 1 else kwargs.get("value", query)
        fits = query.shape[-1] <= 512 and value.shape[-1] <= 512
        dim = 64 if fits else 513  # a traced size has no value to ask with
        reason = _refusal_of_the_build(query.device.type, query.dtype, dim)
        if reason is not None:
            return None, reason
    try:
        return attention(query, *args, **kwargs), None
    except _FAILURES:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        if torch.compiler.is_compiling():
            # A traced exception's text can hold symbolic sizes, which no counter can.
            return None, "a call was refused under torch.compile; without, it says why"
        if _is_failure(str(error)):
            raise
        return None, str(error)


def _any_nested(*tensors: Any) -> bool:
    # "is True", since what a proxy of torch.fx answers has no truth value.
    return any(getattr(t, "is_nested", False) is True for t in tensors)


def _are_tensors(*arguments: Any) -> bool:
    return all(isinstance(t, torch.Tensor) for t in arguments)


def _is_failure(text: str) -> bool:
    return any(known in text for known in _FAILURE_TEXTS)


def _lower_right_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    len_q, len_k = query.shape[-2], key.shape[-2]
    ones = torch.ones(len_q, len_k, dtype=torch.bool, device=query.device)
    return ones.tril(len_k - len_q)


@torch.compiler.assume_constant_result  # read when a graph is traced, as PyTorch's own choice is
def _math_only() -> bool:
    """No fused backend is enabled: the caller wants PyTorch's own composition."""
    return not (
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_cudnn_sdp_enabled()
        or torch._C._get_overrideable_sdp_enabled()
    )


@torch.compiler.assume_constant_result
def _refusal_of_the_build(device_type: str, dtype: torch.dtype, dim: int) -> str | None:
    """Why no call of this device, dtype and head dim can be served, asked when a graph is traced.

    The op itself would say so only when the graph runs, too late to go elsewhere.
    """
    with _disable_current_modes(), torch.no_grad():
        probe = torch.empty(1, 1, 1, dim, device=device_type, dtype=dtype)
        if device_type == "meta":
            return None
        try:
            choice = which_kernel(probe, probe, probe)
        except RuntimeError as refused:
            return str(refused)
    return None if choice else f"no kernel serves this call. {choice}"


@torch.compiler.assume_constant_result  # runs when a graph is traced, and leaves nothing in it
def _note_refusal(original: Callable[..., torch.Tensor], reason: str) -> None:
    first_line = reason.strip().split("\n")[0]
    kind = re.sub(r"\b\d+(\.\d+)?\b", "#", first_line)
    with _lock:
        patches = _shims[id(original)].patches
        known = any(kind in patch.fallbacks for patch in patches)
        for patch in patches:
            patch.fallbacks[kind] += 1
    if not known:
        warnings.warn(
            "scaled_dot_product_attention is served by PyTorch where flashbpt refuses a call (said "
            f"once, counted in fallbacks): {first_line}",
            UserWarning,
            stacklevel=3,
        )
