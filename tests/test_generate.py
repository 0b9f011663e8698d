"""examples/generate.py: batches over paged caches write what the model writes alone."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
pytest.importorskip("tqdm", reason="the demo shows its progress with tqdm")

pytestmark = pytest.mark.usefixtures("one_thread")
EXAMPLES = Path(__file__).parents[1] / "examples"
# In the last two a request and a half have room.
SIZES = [(1, 400), (1, 90), (4, 100), (5, 16), (16, 64), (1, 36), (4, 14)]


@pytest.fixture(scope="module")
def generate():
    """The script as a module; it imports its neighbour."""
    sys.path.insert(0, str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("generate", EXAMPLES / "generate.py")
    module = sys.modules["generate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(EXAMPLES))
    for name in ("generate", "train_gpt"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(generate):
    torch.manual_seed(3)
    settings = generate.Settings(2, 64, 4, 2, context=96, batch=1, steps=0, lr=0.0)
    return generate.GPT(settings, generate.load_attention("flashbpt")).eval()


def requests(generate, count=9, prefix=21):
    shared = torch.randint(256, (prefix,)).tolist()
    own = [torch.randint(256, (1 + i % 5,)).tolist() for i in range(count)]
    return [generate.Request(shared + some, 4 + i % 7) for i, some in enumerate(own)]


@torch.no_grad()
def alone(model, prompt, limit):
    """The same answer the slow way: the whole text through the model for every byte."""
    text = list(prompt)
    for _ in range(limit):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("page_size, pages", SIZES)
def test_answers_are_those_without_a_cache(generate, model, page_size, pages, sharing):
    """Few pages make requests wait, give way to each other and evict prefixes."""
    work = requests(generate)
    server = generate.Server(model, pages, page_size, 4, sharing)
    server.serve(work)
    for request in work:
        assert request.written == alone(model, request.prompt, request.limit)
        assert request.written == generate.without_cache(model, request)
    if server.tree is not None:
        server.tree.clear()
    assert server.cache.free_pages == pages


def test_shared_prefixes_are_computed_once(generate, model):
    work = requests(generate, count=8, prefix=40)
    computed = []
    for sharing in (False, True):
        server = generate.Server(model, 400, 4, 1, sharing)
        server.serve([generate.Request(r.prompt, r.limit) for r in work])
        computed.append(server.computed)
    assert computed[0] - computed[1] >= 7 * 40


def test_what_never_fits_is_refused(generate, model):
    server = generate.Server(model, 4, 4, 2, True)
    with pytest.raises(RuntimeError, match="does not fit the cache of 4 pages of 4"):
        server.serve([generate.Request([1] * 13, 5)])
    server.serve([generate.Request([1] * 13, 4)])


def test_the_program(generate, tmp_path, monkeypatch, capsys):
    """Without a checkpoint and with one that a training left; wrong answers end it."""
    data, checkpoint = tmp_path / "text", tmp_path / "checkpoint.pt"
    data.write_bytes(bytes(range(256)) * 8)
    arguments = "--device cpu --requests 3 --prefix-bytes 20 --bytes 4 --pages 24".split()
    arguments += ["--data", str(data), "--checkpoint", str(checkpoint)]
    monkeypatch.setattr(sys, "argv", ["generate.py", *arguments])
    generate.main()
    settings = generate.Settings(2, 64, 4, 2, context=96, batch=1, steps=0, lr=0.0)
    texts = generate.load_texts(data)
    trainer = sys.modules["train_gpt"].Trainer(settings, texts, "flashbpt", "cpu", "fp32")
    trainer.save(checkpoint)
    generate.main()
    printed = capsys.readouterr().out
    assert printed.count("every answer equals the one without a cache") == 2
    assert printed.count("the model is not trained") == 1
    monkeypatch.setattr(generate, "without_cache", lambda model, request: [])
    with pytest.raises(SystemExit, match="3 of 3 answers differ"):
        generate.main()
