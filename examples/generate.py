"""Let the demo's GPT write for many prompts at once, from paged caches with shared prefixes.

    python examples/train_gpt.py                  # leaves a checkpoint
    python examples/generate.py                   # writes with it, with and without prefix sharing
    python examples/generate.py --requests 64 --prefix-bytes 400

Prompts have a beginning in common. They wait in a queue and are served together: whenever pages and
places are free the next one joins, its prompt in the same step as the others' next bytes; where
pages run out the newest one waits again. What a prefix tree knows of its prompt already is not
computed again. Decoding is greedy, and every answer is compared with what the model writes without
any cache.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, Settings, plain_names, rotate
from torch import Tensor
from tqdm import tqdm
from train_gpt import load_attention, load_texts

import flashbpt
from flashbpt.kv_cache import OutOfPages, PagedKVCache, RadixCache


@dataclass(eq=False)
class Request:
    """A prompt and what has been written behind it."""

    prompt: list[int]
    limit: int  # bytes to write
    written: list[int] = field(default_factory=list)
    sequence: int | None = None  # in the cache
    node: object = None  # of the prefix tree, locked

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.written


class Server:
    """Continuous batching over a paged cache, with or without a prefix tree."""

    def __init__(self, model: GPT, pages: int, page_size: int, batch: int, sharing: bool) -> None:
        self.model, self.batch = model, batch
        block, weight = model.blocks[0], model.embedding.weight
        kv_heads = block.qkv_widths[1] // block.head_dim
        self.cache = PagedKVCache(
            pages,
            page_size,
            kv_heads,
            block.head_dim,
            layers=len(model.blocks),
            dtype=weight.dtype,
            device=weight.device,
        )
        self.tree = RadixCache(self.cache) if sharing else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.computed = 0  # rows that went through the model

    def reserve(self, request: Request, count: int) -> Tensor | None:
        """Slots for the next `count` tokens, or None where the pages do not suffice now."""
        for _ in range(2):
            try:
                return self.cache.append([request.sequence], [count])
            except OutOfPages as error:
                if self.tree is None or not self.tree.evict(error.wanted - error.free):
                    return None
        return None

    def admit(self) -> list[tuple[Request, list[int], Tensor]]:
        """Requests that join now, with the tokens that are not cached and their slots."""
        joined = []
        while self.waiting and len(self.running) < self.batch:
            request = self.waiting[0]
            pages, known, request.node = [], 0, None
            if self.tree is not None:
                # The last token is computed in any case: its logits are the first answer.
                pages, known, request.node = self.tree.match(request.prompt[:-1])
                self.tree.lock(request.node)
            request.sequence = self.cache.allocate(pages)
            slots = self.reserve(request, len(request.prompt) - known)
            if slots is None:
                self.drop(request)
                break
            self.running.append(self.waiting.popleft())
            joined.append((request, request.prompt[known:], slots))
        return joined

    def drop(self, request: Request) -> None:
        """Gives back what a request holds."""
        if request.node is not None:
            self.tree.unlock(request.node)
        self.cache.free(request.sequence)
        request.sequence = request.node = None

    def give_way(self) -> None:
        """The newest request leaves its pages to the older ones and begins again later."""
        request = self.running.pop()
        self.drop(request)
        request.written.clear()
        self.waiting.appendleft(request)

    @torch.no_grad()
    def step(self) -> int:
        """One pass of the model over all running requests; the number of bytes written."""
        work = []
        for request in list(self.running):
            while request in self.running and (slots := self.reserve(request, 1)) is None:
                self.give_way()
            if request in self.running:
                work.append((request, request.tokens[-1:], slots))
        work += self.admit()
        requests = [request for request, _, _ in work]
        logits = self.forward(
            requests, [tokens for _, tokens, _ in work], torch.cat([slots for _, _, slots in work])
        )
        for request, token in zip(requests, logits.argmax(-1).tolist(), strict=True):
            request.written.append(token)
            if len(request.written) == request.limit:
                self.finish(request)
        return len(requests)

    def finish(self, request: Request) -> None:
        """The last byte was written: what is cached of it is for others now."""
        if self.tree is not None:
            cached = request.tokens[: self.cache.length(request.sequence)]
            self.tree.insert(cached, self.cache.pages(request.sequence))
        self.running.remove(request)
        self.drop(request)

    def forward(self, requests: list[Request], tokens: list[list[int]], slots: Tensor) -> Tensor:
        """Logits of each request's last row, (requests, 256)."""
        model, device = self.model, slots.device
        counts = torch.tensor([len(t) for t in tokens])
        sequences = [request.sequence for request in requests]
        lens = self.cache.seq_lens(sequences)
        ends = counts.cumsum(0)
        # Row i of a request with n rows is its key length - n + i.
        first = lens.cpu() - ends
        positions = (torch.arange(int(ends[-1])) + first.repeat_interleave(counts)).to(device)
        cu_seqlens = F.pad(ends, (1, 0)).to(device, torch.int32)
        table = self.cache.block_table(sequences)
        flat = torch.tensor([token for some in tokens for token in some], device=device)
        x = model.embedding(flat)
        cos, sin = model.cos[positions, None], model.sin[positions, None]
        for layer, block in enumerate(model.blocks):
            q, k, v = (
                t.unflatten(-1, (-1, block.head_dim))  # (tokens, heads, head_dim)
                for t in block.qkv(block.attention_norm(x)).split(block.qkv_widths, dim=-1)
            )
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            flashbpt.append_paged_kv(
                k, v, keys, values, slots, cos=model.cos, sin=model.sin, positions=positions
            )
            o = flashbpt.paged_attention(
                rotate(q, cos, sin), keys, values, table, lens, cu_seqlens_q=cu_seqlens
            )
            x = x + block.proj(o.flatten(1))
            gate, up = block.gate_up(block.feed_forward_norm(x)).chunk(2, dim=-1)
            x = x + block.down(F.silu(gate) * up)
        self.computed += len(flat)
        last = model.norm(x[ends.to(device) - 1])
        return F.linear(last, model.embedding.weight)

    def serve(self, requests: list[Request]) -> None:
        """Writes all answers. RuntimeError where one alone would not fit the cache."""
        pages, size = self.cache.total_pages, self.cache.page_size
        for request in requests:
            # The last byte is written and not read.
            if len(request.prompt) + request.limit - 1 > pages * size:
                raise RuntimeError(
                    f"a prompt of {len(request.prompt)} bytes with {request.limit} to write does "
                    f"not fit the cache of {pages} pages of {size}"
                )
        self.waiting.extend(requests)
        with tqdm(total=sum(r.limit for r in requests), unit="B", leave=False) as bar:
            while self.waiting or self.running:
                bar.update(self.step())


@torch.no_grad()
def without_cache(model: GPT, request: Request) -> list[int]:
    """What the model writes behind the prompt and behind each beginning of the answer, in one pass.

    Where that is the answer itself, it is what the model without a cache writes byte by byte.
    """
    tokens = torch.tensor([request.tokens[:-1]], device=model.embedding.weight.device)
    return model(tokens)[0, len(request.prompt) - 1 :].argmax(-1).tolist()


def load_model(checkpoint: Path, device: str) -> tuple[GPT, Settings]:
    """The trained model; a fresh one where there is no checkpoint."""
    if not checkpoint.exists():
        print(f"there is no {checkpoint}: the model is not trained, and writes noise")
        settings = Settings(3, 256, 4, 2, context=512, batch=4, steps=0, lr=0.0)
        torch.manual_seed(settings.seed)
        return GPT(settings, load_attention("flashbpt")).to(device).eval(), settings
    state = torch.load(checkpoint, map_location=device, weights_only=True)
    conditions = {k: v for k, v in state["conditions"].items() if k != "bytes of text"}
    settings = Settings(**conditions)
    model = GPT(settings, load_attention("flashbpt")).to(device)
    weights = state["model"]
    model.load_state_dict(plain_names(weights) if state.get("blockwise") else weights)
    return model.eval(), settings


def make_requests(args: argparse.Namespace, context: int) -> list[Request]:
    """Prompts of one beginning and different ends, out of the text."""
    text = load_texts(args.data)[1].tolist()
    limit = min(args.bytes, context // 4)
    own = min(32, context // 8)
    prefix = text[: max(0, min(args.prefix_bytes, context - limit - own))]
    starts = range(len(prefix), len(text) - own, max(1, (len(text) - own) // args.requests))
    return [Request(prefix + text[i : i + own], limit) for i in starts][: args.requests]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write with the demo's GPT for many prompts at once, from paged caches.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", type=Path, default=Path("runs/train_gpt/checkpoint.pt"), help="the model")
    add("--data", type=Path, help="file of the prompts; without it the standard library's sources")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute")
    add("--requests", type=int, default=24, help="number of prompts")
    add("--prefix-bytes", type=int, default=128, help="bytes that all prompts begin with")
    add("--bytes", type=int, default=32, help="bytes to write for each prompt")
    add("--batch", type=int, default=8, help="requests that run together at most")
    add("--page-size", type=int, default=16, help="tokens of a page")
    add("--pages", type=int, default=256, help="pages of the cache")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    device = device if args.device == "auto" else args.device
    model, settings = load_model(args.checkpoint, device)
    for sharing in (False, True):
        requests = make_requests(args, settings.context)
        server = Server(model, args.pages, args.page_size, args.batch, sharing)
        begin = time.monotonic()
        server.serve(requests)
        seconds = time.monotonic() - begin
        total = sum(len(request.written) for request in requests)
        print(
            f"{'with' if sharing else 'without'} prefix sharing: {total / seconds:,.0f} tokens/s, "
            f"{total} written, {server.computed} computed for {len(requests)} prompts"
        )
        differing = sum(r.written != without_cache(model, r) for r in requests)
        if differing:
            raise SystemExit(
                f"{differing} of {len(requests)} answers differ from those without a cache "
                f"({'with' if sharing else 'without'} prefix sharing)"
            )
    print("every answer equals the one without a cache, token for token")
    print(f"\n{bytes(requests[0].tokens).decode('utf-8', 'replace')}")


if __name__ == "__main__":
    main()
