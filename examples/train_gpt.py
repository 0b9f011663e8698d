"""Train a byte-level GPT on real text through `flashbpt.attention`.

    python examples/train_gpt.py                      # on the standard library's own sources
    python examples/train_gpt.py --data book.txt      # on any file
    python examples/train_gpt.py --attention sdpa     # the same model through PyTorch's attention
    python examples/train_gpt.py --blockwise          # its layers as flashbpt.nn.TransformerBlock
    python examples/train_gpt.py --resume             # go on from the last checkpoint

The model (gpt.py) is today's usual decoder: pre-norm RMSNorm, rotary positions, grouped-query
attention and SwiGLU. A fresh run first trains a few steps with both attentions from one seed and
compares the losses. It leaves `checkpoint.pt`, `metrics.json`, `loss.png` and `memory.png` in the
output folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sysconfig
import time
import zlib
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import BYTES, GPT, Attention, Block, Settings, rotary_tables, to_blockwise
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

Texts = tuple[Tensor, Tensor]  # to train on, and held out

LN2 = math.log(2.0)
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # between the losses of the two attentions, in nats
# Folders of the standard library that are not part of the text.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

PRESETS = {
    "cpu": Settings(3, 256, 4, 2, context=256, batch=4, steps=500, lr=1.2e-3),
    "cuda": Settings(8, 512, 8, 2, context=1024, batch=32, steps=1000, lr=1.2e-3),
}


def parse_args() -> argparse.Namespace:
    """Read the command line; a setting that is not given comes from the device's preset."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT on real text through flashbpt.attention.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, help="file to learn; without it the standard library's sources")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="folder for what the run leaves")
    add("--attention", choices=("flashbpt", "sdpa"), default="flashbpt", help="who computes it")
    add("--blockwise", action="store_true", help="layers that keep no activations for the backward")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to train")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="bf16 is autocast")
    add("--minutes", type=float, default=3.0, help="time budget, 0 for none")
    add("--compare-steps", type=int, default=5, help="steps to train with both attentions first")
    add("--eval-every", type=int, default=50, help="steps between validations, and checkpoints")
    add("--stop-at", type=int, metavar="STEP", help="save and leave there, to be resumed later")
    add("--resume", action="store_true", help="go on from the checkpoint in the output folder")
    add("--memory-tokens", type=int, default=8192, help="longest of the memory plot, 0 for none")
    add("--prompt", default="class Reader:\n    def ", help="what the sample continues")
    add("--sample-bytes", type=int, default=300, help="length of the sample")
    group = parser.add_argument_group("settings of the model and its training")
    for field in dataclasses.fields(Settings):
        kind = type(getattr(PRESETS["cpu"], field.name))
        name = "--" + field.name.replace("_", "-")
        group.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=kind.__name__)
    args = parser.parse_args()
    if args.blockwise and args.attention != "flashbpt":
        parser.error("--blockwise layers are flashbpt's, whose attention is --attention flashbpt")
    return args


def choose_device(attention: str) -> str:
    """ "cuda" where there is a GPU and the attention can train on it, else "cpu"."""
    if not torch.cuda.is_available():
        return "cpu"
    if attention == "flashbpt":
        import flashbpt

        q = torch.zeros(1, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        k = v = q[:, :2]
        ask = partial(flashbpt.which_kernel, q, k, v, is_causal=True, enable_gqa=True)
        try:
            choices = [ask(backward=False), ask(backward=True)]
            unserved = [choice for choice in choices if choice.kernel is None]
            refusals = [f"{name}: {why}" for c in unserved for name, why in c.refused.items()]
        except (NotImplementedError, RuntimeError) as error:
            refusals = str(error).splitlines()
        if refusals:
            print(f"on the CPU, because this build of flashbpt refuses the GPU: {refusals[0]}")
            return "cpu"
    return "cuda"


def choose_dtype(device: str) -> str:
    """bf16 autocast where the hardware multiplies in bf16; elsewhere fp32 is many times faster."""
    if device == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        features = torch.cpu.get_capabilities()
        fast = features.get("avx512_bf16") or features.get("amx_bf16")
    return "bf16" if fast else "fp32"


def load_attention(name: str) -> Attention:
    """The function behind every layer; both take the same arguments."""
    if name == "sdpa":
        return F.scaled_dot_product_attention
    import flashbpt

    return flashbpt.attention


# ---- Text ----------------------------------------------------------------------------------------


def load_texts(path: Path | None) -> Texts:
    """The bytes to train on and those held out.

    Of a file the last tenth is held out. Of the standard library whole top-level packages are,
    chosen by a hash of the name, so that near-copies inside a package never lie on both sides.
    """
    train, held_out = bytearray(), bytearray()
    if path is not None:
        text = path.read_bytes()
        cut = len(text) - len(text) // 10
        train, held_out = bytearray(text[:cut]), bytearray(text[cut:])
    else:
        root = Path(sysconfig.get_path("stdlib"))
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).parts
            if SKIPPED.isdisjoint(parts):
                package = parts[0].removesuffix(".py")
                side = held_out if zlib.crc32(package.encode()) % 16 == 0 else train
                side += file.read_bytes()
    if not train or not held_out:
        raise SystemExit(f"no text in {path or root}; name one with --data FILE")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def unigram_entropy(text: Tensor) -> float:
    """Nats a byte that even the best model without context needs on this text."""
    p = torch.bincount(text.int(), minlength=BYTES).double() / text.numel()
    return torch.special.entr(p).sum().item()


# ---- Training ------------------------------------------------------------------------------------


class Trainer:
    """A model with its texts, its optimizer, its random numbers and the story of its run."""

    STORY = ("step", "seconds", "train_losses", "validation_losses")

    def __init__(
        self,
        s: Settings,
        texts: Texts,
        attention: str,
        device: str,
        dtype: str,
        blockwise: bool = False,
    ) -> None:
        torch.manual_seed(s.seed)
        self.settings, self.device, self.dtype, self.blockwise = s, device, dtype, blockwise
        self.text, self.held_out = texts
        self.model = GPT(s, load_attention(attention), blockwise).to(device)
        parameters = list(self.model.parameters())
        decayed = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": s.weight_decay}
        plain = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW([decayed, plain], betas=(0.9, 0.95), fused=True)
        self.generator = torch.Generator().manual_seed(s.seed)
        self.step = 0
        self.seconds = 0.0  # used up to now, over all sittings
        self.train_losses: list[float] = []
        self.validation_losses: list[list[float]] = []  # [step, loss]

    def logits(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.dtype == "bf16"):
            return self.model(tokens).float()

    def loss(self, text: Tensor, starts: Tensor) -> Tensor:
        """Mean cross-entropy, in nats a byte, over the windows of the text at `starts`."""
        rows = text[starts[:, None] + torch.arange(self.settings.context + 1)]
        rows = rows.long().to(self.device)
        return F.cross_entropy(self.logits(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def learning_rate(self, spent: float) -> float:
        """Linear warm-up, then a cosine over the steps, or over the time where that ends first.

        `spent` is the used share of the time budget. It counts only where it is clearly ahead of
        the steps, so that a run that fits its budget is the same on a fast and on a slow machine.
        """
        s = self.settings
        if self.step < s.warmup_steps:
            return s.lr * (self.step + 1) / s.warmup_steps
        warm = s.warmup_steps / s.steps
        done = min(1.0, (max(self.step / s.steps, spent - 0.05) - warm) / (1 - warm))
        return s.lr * (s.final_lr + (1 - s.final_lr) * 0.5 * (1 + math.cos(math.pi * done)))

    def train_step(self, spent: float = 0.0) -> float:
        """One optimizer step on a random batch; returns its loss."""
        s = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(spent)
        end = self.text.numel() - s.context
        loss = self.loss(self.text, torch.randint(end, (s.batch,), generator=self.generator))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self.optimizer.step()
        self.step += 1
        self.train_losses.append(loss.item())
        return self.train_losses[-1]

    @torch.no_grad()
    def validate(self, windows: int = 64) -> float:
        """Mean loss over windows spread evenly over the held-out text, always the same ones."""
        s = self.settings
        starts = torch.linspace(0, self.held_out.numel() - s.context - 1, windows).long()
        parts = starts.split(s.batch)
        loss = sum(self.loss(self.held_out, p).item() * p.numel() for p in parts) / windows
        self.validation_losses.append([self.step, loss])
        return loss

    @torch.no_grad()
    def sample(self, prompt: bytes, length: int, temperature: float = 0.8) -> bytes:
        """Draw `length` bytes that go on from the prompt."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        text = list(prompt or b"\n")
        for _ in range(length):
            tokens = torch.tensor([text[-self.settings.context :]], device=self.device)
            p = F.softmax(self.logits(tokens)[0, -1].cpu() / temperature, dim=-1)
            text.append(int(torch.multinomial(p, 1, generator=generator)))
        return bytes(text[-length:]) if length else b""

    def conditions(self) -> dict[str, float]:
        """What must be equal where a run goes on."""
        return {**dataclasses.asdict(self.settings), "bytes of text": self.text.numel()}

    def save(self, path: Path) -> None:
        """Write the whole state, so that `path` is never half a file."""
        state = {
            "conditions": self.conditions(),
            "blockwise": self.blockwise,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "story": {name: getattr(self, name) for name in self.STORY},
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        """Go back to a saved state; ends the program where its conditions were others."""
        if not path.exists():
            raise SystemExit(f"nothing to resume: there is no {path}")
        state = torch.load(path, map_location=self.device, weights_only=True)
        was = {**state["conditions"], "blockwise": state.get("blockwise", False)}
        now = {**self.conditions(), "blockwise": self.blockwise}
        changed = [f"{k} was {was.get(k)}, is {v}" for k, v in now.items() if was.get(k) != v]
        if changed:
            raise SystemExit(f"{path} belongs to another run: {'; '.join(changed)}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        for name, value in state["story"].items():
            setattr(self, name, value)


def timed_steps(name: str, trainer: Trainer, steps: int) -> list[float]:
    """The losses of some steps; on CUDA prints their rate and the peak memory too."""
    cuda = trainer.device == "cuda"
    losses = [trainer.train_step()]  # the first one warms up
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin = time.monotonic()
    losses += [trainer.train_step() for _ in range(steps - 1)]
    if cuda and steps > 1:
        rate = (steps - 1) * trainer.settings.batch * trainer.settings.context
        rate /= time.monotonic() - begin
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(f"{name}: {rate:,.0f} tokens/s, {peak:.2f} GB at most")
    return losses


def compare(
    s: Settings, texts: Texts, steps: int, device: str, dtype: str, blockwise: bool = False
) -> None:
    """Train a few steps with each attention from one seed, at the full rate from the start.

    With `blockwise` flashbpt's layers are blockwise; PyTorch's are plain. Prints by how much the
    losses differ; ends the program where that is too much.
    """
    s = dataclasses.replace(s, warmup_steps=0)
    trainers = [
        Trainer(s, texts, "flashbpt", device, dtype, blockwise),
        Trainer(s, texts, "sdpa", device, dtype),
    ]
    names = ["flashbpt in blocks" if blockwise else "flashbpt", "PyTorch"]
    losses = [timed_steps(*each, steps) for each in zip(names, trainers)]
    difference = max(abs(ours - theirs) for ours, theirs in zip(*losses))
    print(
        f"compared: {steps} steps through {names[0]} and through PyTorch's attention, losses "
        f"differ by at most {difference:.1e} (allowed {TOLERANCE[dtype]:.0e})"
    )
    if not difference <= TOLERANCE[dtype]:  # NaN fails too
        raise SystemExit(f"the losses differ: flashbpt {losses[0]}, PyTorch {losses[1]}")


def train(trainer: Trainer, args: argparse.Namespace, begin: float) -> float:
    """Run to the last step, to --stop-at or to the end of the budget; returns tokens a second."""
    s, budget = trainer.settings, 60 * args.minutes or math.inf
    last, begin = min(s.steps, args.stop_at or s.steps), begin - trainer.seconds
    busy, tokens, mean = 0.0, 0, math.nan
    with tqdm(total=s.steps, initial=trainer.step, mininterval=1, dynamic_ncols=True) as bar:
        while trainer.step < last and trainer.seconds < budget:
            start = time.monotonic()
            loss = trainer.train_step(trainer.seconds / budget)
            busy += time.monotonic() - start
            tokens += s.batch * s.context
            mean = loss if math.isnan(mean) else 0.9 * mean + 0.1 * loss
            bar.set_postfix_str(f"loss {mean:.3f}, {tokens / busy:,.0f} tokens/s", refresh=False)
            bar.update()
            if trainer.step % args.eval_every == 0:
                bar.write(f"step {trainer.step}: validation {trainer.validate():.3f}")
                trainer.save(args.out / "checkpoint.pt")
            trainer.seconds = time.monotonic() - begin
    if trainer.step < last:
        print(f"stopped at step {trainer.step} of {s.steps}: {args.minutes:g} minutes are used up")
    return tokens / busy if busy else math.nan


def plot(trainer: Trainer, unigram: float, path: Path) -> None:
    """Draw both losses over the steps, and the unigram entropy that they must beat."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats per byte")
    steps = range(1, len(trainer.train_losses) + 1)
    axes.plot(steps, trainer.train_losses, lw=0.8, alpha=0.6, label="training")
    axes.plot(*zip(*trainer.validation_losses), "o-", ms=4, label="validation")
    axes.axhline(unigram, color="gray", ls="--", label="unigram entropy of the held-out text")
    bits = axes.secondary_yaxis("right", functions=(lambda y: y / LN2, lambda y: y * LN2))
    bits.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def report(trainer: Trainer, rate: float, args: argparse.Namespace) -> None:
    """Leave the results in the output folder and print them."""
    if not trainer.validation_losses or trainer.validation_losses[-1][0] != trainer.step:
        trainer.validate()
    loss, unigram = trainer.validation_losses[-1][1], unigram_entropy(trainer.held_out)
    trainer.save(args.out / "checkpoint.pt")
    plot(trainer, unigram, args.out / "loss.png")
    memory = {}
    if args.attention == "flashbpt" and args.memory_tokens:
        from layer_memory import measure, plot_memory

        s, layer = trainer.settings, Block(trainer.settings, load_attention("flashbpt"))
        layers = {"plain": layer, "blockwise": to_blockwise(layer, rows=512)}
        tables = partial(rotary_tables, head_dim=layer.head_dim)
        memory = measure(layers, s.width, tables, args.memory_tokens)
        plot_memory(memory, args.out / "memory.png")
    metrics = {
        "settings": dataclasses.asdict(trainer.settings),
        "attention": args.attention,
        "blockwise": args.blockwise,
        "device": trainer.device,
        "dtype": trainer.dtype,
        "unigram_entropy": unigram,
        "validation_loss": loss,
        "tokens_per_second": rate,
        "layer_memory": memory,
        **{name: getattr(trainer, name) for name in trainer.STORY},
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    sample = trainer.sample(args.prompt.encode(), args.sample_bytes).decode(errors="replace")
    print(f"\n---- sample ----\n{args.prompt}{sample}\n----------------\n")
    print(f"validation loss  {loss:.3f} nats a byte  {loss / LN2:.3f} bits")
    print(f"unigram entropy  {unigram:.3f} nats a byte  {unigram / LN2:.3f} bits")
    print(f"{trainer.step} steps, {rate:,.0f} tokens/s; curve and checkpoint in {args.out}")


def main() -> None:
    begin = time.monotonic()
    args = parse_args()
    device = choose_device(args.attention) if args.device == "auto" else args.device
    dtype = choose_dtype(device) if args.dtype == "auto" else args.dtype
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Settings) if f.name in args}
    settings = dataclasses.replace(PRESETS[device], **given)
    texts = load_texts(args.data)
    if min(text.numel() for text in texts) <= settings.context:
        raise SystemExit(f"the text is too short for windows of {settings.context + 1} bytes")
    args.out.mkdir(parents=True, exist_ok=True)

    trainer = Trainer(settings, texts, args.attention, device, dtype, args.blockwise)
    size = sum(p.numel() for p in trainer.model.parameters())
    print(f"text: {texts[0].numel():,} bytes to train on, {texts[1].numel():,} held out")
    layers = "blockwise" if args.blockwise else "plain"
    print(
        f"model: {size:,} parameters in {layers} layers, in {dtype} on {device}, "
        f"attention by {args.attention}"
    )
    if args.resume:
        trainer.load(args.out / "checkpoint.pt")
        print(f"resumed at step {trainer.step}")
    elif args.attention == "flashbpt" and args.compare_steps:
        compare(settings, texts, args.compare_steps, device, dtype, args.blockwise)
    rate = train(trainer, args, begin)
    if args.stop_at and trainer.step < settings.steps:
        trainer.save(args.out / "checkpoint.pt")
        print(f"saved at step {trainer.step}; --resume goes on from there")
    else:
        report(trainer, rate, args)


if __name__ == "__main__":
    main()
