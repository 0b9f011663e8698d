"""Names and layouts of a layer's weights in other libraries, and what of a state dict fits them."""

import dataclasses

import torch

from flashbpt.block_config import WEIGHTS

# The bias that belongs to a weight.
BIASES = {
    "norm1": "norm1_bias",
    "wq": "bq",
    "wk": "bk",
    "wv": "bv",
    "wo": "bo",
    "norm2": "norm2_bias",
    "w_gate": "b_gate",
    "w_up": "b_up",
    "w_down": "b_down",
}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Names of a layer's weights in another library.

    weights: a name, with {} in place of "weight", and the parameters that it holds, one below the
    other in the order of its rows. The same name with "bias" holds their biases.
    """

    name: str
    weights: dict
    transposed: bool = False  # matrices are (in, out)
    ignored: tuple = ()  # buffers and the like

    def sources(self):
        """Each name, with the parameters that it holds."""
        found = {}
        for pattern, names in self.weights.items():
            names = names.split()
            found[pattern.format("weight")] = names
            if "{}" in pattern and all(name in BIASES for name in names):
                found[pattern.format("bias")] = [BIASES[name] for name in names]
        return found


_GPT2 = {
    "ln_1.{}": "norm1",
    "attn.c_attn.{}": "wq wk wv",
    "attn.c_proj.{}": "wo",
    "ln_2.{}": "norm2",
    "mlp.c_fc.{}": "w_up",
    "mlp.c_proj.{}": "w_down",
}

_LAYOUTS = (
    _Layout("flashbpt.nn.TransformerBlock", {name: name for name in WEIGHTS}),
    _Layout(
        "a Hugging Face decoder layer (Llama, Mistral, Qwen, Phi-3)",
        {
            "input_layernorm.{}": "norm1",
            "self_attn.q_proj.{}": "wq",
            "self_attn.k_proj.{}": "wk",
            "self_attn.v_proj.{}": "wv",
            "self_attn.qkv_proj.{}": "wq wk wv",
            "self_attn.o_proj.{}": "wo",
            "self_attn.q_norm.{}": "q_norm",
            "self_attn.k_norm.{}": "k_norm",
            "self_attn.sinks": "sinks",
            "post_attention_layernorm.{}": "norm2",
            "mlp.gate_proj.{}": "w_gate",
            "mlp.up_proj.{}": "w_up",
            "mlp.gate_up_proj.{}": "w_gate w_up",
            "mlp.down_proj.{}": "w_down",
            "mlp.c_fc.{}": "w_up",  # StarCoder2
            "mlp.c_proj.{}": "w_down",
        },
        ignored=("self_attn.rotary_emb.inv_freq",),
    ),
    _Layout("GPT-2", _GPT2, transposed=True, ignored=("attn.bias", "attn.masked_bias")),
    _Layout("nanoGPT", _GPT2, ignored=("attn.bias",)),
    _Layout(
        "OPT",
        {
            "self_attn_layer_norm.{}": "norm1",
            "self_attn.q_proj.{}": "wq",
            "self_attn.k_proj.{}": "wk",
            "self_attn.v_proj.{}": "wv",
            "self_attn.out_proj.{}": "wo",
            "final_layer_norm.{}": "norm2",
            "fc1.{}": "w_up",
            "fc2.{}": "w_down",
        },
    ),
    _Layout(
        "MPT",
        {
            "norm_1.{}": "norm1",
            "attn.Wqkv.{}": "wq wk wv",
            "attn.out_proj.{}": "wo",
            "norm_2.{}": "norm2",
            "ffn.up_proj.{}": "w_up",
            "ffn.down_proj.{}": "w_down",
        },
    ),
    _Layout(
        "Meta's Llama",
        {
            "attention_norm.{}": "norm1",
            "attention.wq.{}": "wq",
            "attention.wk.{}": "wk",
            "attention.wv.{}": "wv",
            "attention.wo.{}": "wo",
            "attention.q_norm.{}": "q_norm",
            "attention.k_norm.{}": "k_norm",
            "ffn_norm.{}": "norm2",
            "feed_forward.w1.{}": "w_gate",
            "feed_forward.w3.{}": "w_up",
            "feed_forward.w2.{}": "w_down",
        },
    ),
    _Layout(
        "flash_attn's Block",
        {
            "norm1.{}": "norm1",
            "mixer.Wqkv.{}": "wq wk wv",
            "mixer.out_proj.{}": "wo",
            "norm2.{}": "norm2",
            "mlp.fc1.{}": "w_up w_gate",
            "mlp.fc2.{}": "w_down",
        },
    ),
    _Layout(
        "torch.nn.TransformerEncoderLayer",
        {
            "norm1.{}": "norm1",
            "self_attn.in_proj_{}": "wq wk wv",
            "self_attn.out_proj.{}": "wo",
            "norm2.{}": "norm2",
            "linear1.{}": "w_up",
            "linear2.{}": "w_down",
        },
    ),
    _Layout(
        "examples/gpt.py",
        {
            "attention_norm.{}": "norm1",
            "qkv.{}": "wq wk wv",
            "proj.{}": "wo",
            "feed_forward_norm.{}": "norm2",
            "gate_up.{}": "w_gate w_up",
            "down.{}": "w_down",
        },
    ),
)


def under_prefix(source, prefix):
    """The tensors of a state dict whose names begin with the prefix, by the rest of their names.

    Raises ValueError where there are none.
    """
    prefix = prefix + "." if prefix and not prefix.endswith(".") else prefix
    tensors = {
        name.removeprefix(prefix): value
        for name, value in source.items()
        if name.startswith(prefix) and isinstance(value, torch.Tensor)
    }
    if not tensors:
        raise ValueError(f"no tensor's name begins with {prefix!r}, seen: {_few(source)}")
    return tensors


def match(tensors, parameters):
    """{parameter: what of `tensors` goes there}, by the one layout that they fit.

    Raises ValueError where they fit none, with the faults by the nearest, or several.
    """
    plans = [_Plan(layout, tensors, parameters) for layout in _LAYOUTS]
    plan = min(plans, key=lambda plan: plan.distance)
    if not any(plan.known for plan in plans):
        known = ", ".join(plan.layout.name for plan in plans)
        raise ValueError(
            f"no name of a layer's weights is known, seen: {_few(tensors)}; known are the "
            f"names of {known}, behind the prefix"
        )
    if plan.problems:
        raise ValueError(
            f"cannot load the block from these weights; nearest to the names of "
            f"{plan.layout.name}, but " + "; ".join(plan.problems)
        )
    same = [other.layout.name for other in plans if not other.problems]
    if len(same) > 1:
        raise ValueError(f"the weights fit several layouts, {' and '.join(same)}: rename them")
    return plan.values


class _Plan:
    """What of `tensors` goes to which of `parameters` if they are named as in `layout`.

    values: a view a parameter, complete where there are no problems.
    known: whether any name is one of the layout's.
    problems: sentences, empty where everything fits.
    distance: how far the tensors are from the layout, least first.
    """

    def __init__(self, layout, tensors, parameters):
        self.layout, self.values = layout, {}
        sources = layout.sources()
        unknown, twice, shapes = [], [], []
        for name, tensor in tensors.items():
            held = [p for p in sources.get(name, ()) if p in parameters]
            if not held:
                if name not in layout.ignored:
                    unknown.append(name)
                continue
            twice += [p for p in held if p in self.values]
            rows = [parameters[p].shape[0] for p in held]
            expected = (sum(rows), *parameters[held[0]].shape[1:])
            turned = layout.transposed and len(expected) == 2
            seen = tuple(tensor.shape)
            if seen != (expected[::-1] if turned else expected):
                wanted = expected[::-1] if turned else expected
                shapes.append(f"{name} is {seen}, not {wanted}")
                self.values |= dict.fromkeys(held)
                continue
            if not tensor.is_floating_point():
                shapes.append(f"{name} is {tensor.dtype}, not of a floating-point dtype")
            self.values |= zip(held, (tensor.t() if turned else tensor).split(rows))
        self.known = len(unknown) < len(tensors)
        missing = [
            " or ".join(name for name, held in sources.items() if p in held) + f" (for {p})"
            if layout.weights.get(p) != p
            else p
            for p in parameters
            if p not in self.values
        ]
        self.distance = len(unknown) + len(missing) + len(twice), len(shapes)
        built = [name for name in unknown if name in sources]
        unknown = [name for name in unknown if name not in sources]
        faults = {
            "unknown": unknown,
            "of parameters that this block was built without": built,
            "missing": missing,
            "given twice": twice,
            "of another shape or dtype": shapes,
        }
        self.problems = [f"{fault}: {_few(names)}" for fault, names in faults.items() if names]
        if self.problems:
            self.problems.append(f"seen: {_few(tensors)}")


def _few(names, limit=12):
    """The names in one line, the first ones where there are many."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more


def distributed_like(parameter, value):
    """The value, distributed like the parameter where that is sharded."""
    if not hasattr(parameter, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(parameter.device, parameter.dtype)
    # Every rank has the whole value: each takes its own part, and nothing is sent.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
