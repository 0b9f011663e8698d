"""examples/train_gpt.py as a user runs it, small: train, compare, interrupt, resume, sample."""

import dataclasses
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import flashbpt

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
pytest.importorskip("tqdm", reason="the demo shows its progress with tqdm")

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"
STEPS = 60
TINY = (
    "--device cpu --dtype fp32 --layers 2 --width 32 --heads 4 --kv-heads 2 --context 48 "
    f"--batch 8 --steps {STEPS} --warmup-steps 5 --lr 0.01 --eval-every 20 --minutes 0 "
    "--sample-bytes 40 --memory-tokens 512"
).split()


def words(count, seed=0):
    """Text of a few words in random order: far below its unigram entropy for whoever reads it."""
    draw = random.Random(seed)
    vocabulary = ["attention", "block", "kernel", "query", "softmax", "tile", "window", "zero"]
    return " ".join(draw.choice(vocabulary) for _ in range(count))


@pytest.fixture(scope="module")
def demo():
    """The script as a module; it imports its neighbour."""
    sys.path.insert(0, str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    module = sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    for name in ("train_gpt", "gpt"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "words.txt"
    path.write_text(words(4000))
    return path


@pytest.fixture
def tiny(demo):
    """Settings and texts for a trainer in this process."""
    settings = demo.Settings(
        layers=2, width=32, heads=4, kv_heads=2, context=48, batch=8, steps=STEPS, lr=0.01
    )
    texts = tuple(
        torch.tensor(list(words(count, seed=count).encode()), dtype=torch.uint8)
        for count in (2000, 200)
    )
    return settings, texts


def run(text, out, *options):
    """Run the script; returns what it printed and, where it wrote them, its metrics."""
    package = str(Path(flashbpt.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--data", str(text), "--out", str(out), *TINY, *options],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # tiny: threads only wait
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = out / "metrics.json"
    return done.stdout + done.stderr, json.loads(metrics.read_text()) if metrics.exists() else None


def test_train_interrupt_resume(text, tmp_path):
    """One run learns and leaves its results; the same run in two sittings has the same losses."""
    printed, whole = run(text, tmp_path / "whole", "--compare-steps", "3", "--prompt", "query ")
    assert whole["attention"] == "flashbpt"
    assert whole["step"] == len(whole["train_losses"]) == STEPS
    assert [step for step, _ in whole["validation_losses"]] == [20, 40, 60]
    assert whole["validation_loss"] == whole["validation_losses"][-1][1]
    assert whole["validation_loss"] < 0.8 * whole["unigram_entropy"]
    for image in ("loss.png", "memory.png"):
        assert (tmp_path / "whole" / image).read_bytes().startswith(b"\x89PNG")

    compared = re.search(r"compared: 3 steps .* at most (\S+) \(allowed 1e-04\)", printed)
    assert float(compared[1]) <= 1e-4
    assert re.search(r"tokens/s", printed)
    assert f"validation loss  {whole['validation_loss']:.3f} nats a byte" in printed
    assert f"unigram entropy  {whole['unigram_entropy']:.3f} nats a byte" in printed
    sample = re.search(r"---- sample ----\n(.*)\n------", printed, re.S)[1]
    assert sample.startswith("query ")
    assert len(sample) == len("query ") + 40

    parts = tmp_path / "parts"
    printed, metrics = run(text, parts, "--compare-steps", "0", "--stop-at", "27")
    assert metrics is None
    assert "saved at step 27" in printed
    assert "compared" not in printed
    printed, resumed = run(text, parts, "--resume")
    assert "resumed at step 27" in printed
    assert resumed["train_losses"] == whole["train_losses"]
    assert resumed["validation_losses"] == whole["validation_losses"]


def test_blockwise_layers(text, demo, tmp_path):
    """--blockwise trains as the plain layers do; its checkpoint goes on, and serves a plain GPT."""
    printed, plain = run(text, tmp_path / "plain", "--compare-steps", "0", "--steps", "8")
    printed, metrics = run(text, tmp_path / "blocks", "--blockwise", "--steps", "8")
    assert re.search(r"compared: 5 steps through flashbpt in blocks .* at most (\S+) ", printed)
    assert (plain["blockwise"], metrics["blockwise"]) == (False, True)
    assert metrics["train_losses"] == pytest.approx(plain["train_losses"], abs=1e-4)

    memory = metrics["layer_memory"]
    assert memory["tokens"] == sorted(memory["tokens"])
    for name in ("plain", "blockwise"):
        kept, peak = memory[name]["kept"], memory[name]["peak"]
        assert len(kept) == len(peak) == len(memory["tokens"])
        assert kept == sorted(kept) and all(k < p for k, p in zip(kept, peak))
    assert all(b < p / 4 for b, p in zip(memory["blockwise"]["kept"], memory["plain"]["kept"]))
    assert re.search(r"a blockwise layer over 512 tokens in fp32 keeps \d+ MiB", printed)

    state = torch.load(tmp_path / "blocks" / "checkpoint.pt", weights_only=True)
    fields = {field.name for field in dataclasses.fields(demo.Settings)}
    settings = demo.Settings(**{k: v for k, v in state["conditions"].items() if k in fields})
    in_blocks = demo.GPT(settings, F.scaled_dot_product_attention, blockwise=True)
    in_blocks.load_state_dict(state["model"])
    model = demo.GPT(settings, F.scaled_dot_product_attention)
    model.load_state_dict(sys.modules["gpt"].plain_names(state["model"]))
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(in_blocks(tokens), model(tokens), rtol=1e-4, atol=1e-4)


def test_resume_refuses_another_run(demo, tiny, tmp_path):
    """A checkpoint goes on only under its own settings and over its own text."""
    settings, texts = tiny
    demo.Trainer(settings, texts, "sdpa", "cpu", "fp32").save(tmp_path / "checkpoint.pt")
    demo.Trainer(settings, texts, "flashbpt", "cpu", "fp32").load(tmp_path / "checkpoint.pt")
    faster = dataclasses.replace(settings, lr=0.02)
    with pytest.raises(SystemExit, match=r"lr was 0\.01, is 0\.02"):
        demo.Trainer(faster, texts, "sdpa", "cpu", "fp32").load(tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match="bytes of text was"):
        demo.Trainer(settings, texts[::-1], "sdpa", "cpu", "fp32").load(tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match="blockwise was False, is True"):
        demo.Trainer(settings, texts, "flashbpt", "cpu", "fp32", blockwise=True).load(
            tmp_path / "checkpoint.pt"
        )
    with pytest.raises(SystemExit, match="there is no"):
        demo.Trainer(settings, texts, "sdpa", "cpu", "fp32").load(tmp_path / "another.pt")


def test_comparison_catches_a_wrong_attention(demo, tiny, monkeypatch, capsys):
    """One key too few for one query ends the program; PyTorch against itself does not."""

    def wrong(q, k, v, **options):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask[20, 20] = False
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    settings, texts = tiny
    attentions = {"flashbpt": wrong, "sdpa": F.scaled_dot_product_attention}
    monkeypatch.setattr(demo, "load_attention", attentions.get)
    with pytest.raises(SystemExit, match="losses differ"):
        demo.compare(settings, texts, 3, "cpu", "fp32")
    attentions["flashbpt"] = F.scaled_dot_product_attention
    demo.compare(settings, texts, 3, "cpu", "fp32")
    assert "at most 0.0e+00" in capsys.readouterr().out


def test_comparison_calls_flashbpt(demo, tiny, monkeypatch):
    """The layers of the one run call flashbpt.attention, and those of the other do not."""
    settings, texts = tiny
    calls = []
    attention = flashbpt.attention

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(flashbpt, "attention", counted)
    demo.compare(settings, texts, 2, "cpu", "fp32")
    assert calls == [{"is_causal": True, "enable_gqa": True}] * 2 * settings.layers


def test_comparison_in_bf16(demo, tiny, monkeypatch, capsys):
    """--dtype bf16: flashbpt is handed bf16 by autocast, and agrees with PyTorch."""
    settings, texts = tiny
    seen = []
    attention = flashbpt.attention

    def spy(q, k, v, **options):
        out = attention(q, k, v, **options)
        seen.append({x.dtype for x in (q, k, v, out)})
        return out

    monkeypatch.setattr(flashbpt, "attention", spy)
    demo.compare(settings, texts, 2, "cpu", "bf16")
    assert seen == [{torch.bfloat16}] * 2 * settings.layers
    assert "(allowed 1e-02)" in capsys.readouterr().out


def test_blockwise_in_bf16(demo, tiny, capsys):
    """--blockwise --dtype bf16 agrees with plain layers through PyTorch."""
    demo.compare(*tiny, 2, "cpu", "bf16", blockwise=True)
    assert "(allowed 1e-02)" in capsys.readouterr().out


def test_time_budget_ends_the_run(demo, tiny):
    """The rate falls to its end with the steps or with the time, whichever is used up first."""
    settings, texts = tiny
    trainer = demo.Trainer(settings, texts, "sdpa", "cpu", "fp32")
    trainer.step = settings.warmup_steps
    peak = trainer.learning_rate(spent=0.0)
    assert peak == pytest.approx(settings.lr)
    assert trainer.learning_rate(spent=settings.warmup_steps / settings.steps) == peak
    assert trainer.learning_rate(spent=1.0) < 0.3 * settings.lr
    trainer.step = settings.steps
    assert trainer.learning_rate(spent=0.0) == pytest.approx(settings.lr * settings.final_lr)


def test_model_does_not_see_the_future(demo, tiny):
    """A later byte changes no earlier prediction, and does change its own."""
    settings, texts = tiny
    model = demo.GPT(settings, flashbpt.attention)
    tokens = texts[0][: settings.context].long()[None]
    other = tokens.clone()
    other[0, 30] ^= 1
    with torch.no_grad():
        before, after = model(tokens)[0], model(other)[0]
    torch.testing.assert_close(before[:30], after[:30], rtol=0, atol=1e-5)
    assert (before[30:] - after[30:]).abs().amax(dim=-1).min() > 1e-4


def test_held_out_text_is_apart(demo, text):
    """A file is cut in two; of the standard library the same whole packages are held out."""
    train, held_out = (part.numpy().tobytes() for part in demo.load_texts(text))
    assert train + held_out == text.read_bytes()
    assert len(held_out) == len(train + held_out) // 10

    train, held_out = demo.load_texts(None)
    assert all(map(torch.equal, (train, held_out), demo.load_texts(None)))
    assert train.numel() > 4 * held_out.numel() > 400_000
    lines = {line for line in train.numpy().tobytes().splitlines() if len(line) > 60}
    ours = [line for line in held_out.numpy().tobytes().splitlines() if len(line) > 60]
    assert sum(line in lines for line in ours) < 0.05 * len(ours)


def test_unigram_entropy(demo):
    text = torch.tensor([1, 1, 2, 3], dtype=torch.uint8)
    assert demo.unigram_entropy(text) == pytest.approx(1.5 * demo.LN2)
