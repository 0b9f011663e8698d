"""Keys and values in pages with reference counts, and a prefix tree that finds pages again.

Both keep their books on the host in plain Python, for one thread. They hand out slots, which
`flashbpt.append_paged_kv` writes to, and block tables, which `flashbpt.paged_attention` reads
through. One request, as a server runs it:

    pages, matched, node = tree.match(prompt[:-1])  # the last token is computed in any case
    tree.lock(node)
    sequence = cache.allocate(pages)
    slots = cache.append([sequence], [len(prompt) - matched])  # OutOfPages: tree.evict, try again
    ...                                             # then one token at a time
    tree.insert(tokens[: cache.length(sequence)], cache.pages(sequence))
    tree.unlock(node)
    cache.free(sequence)
"""

import heapq
import itertools
import operator
from array import array
from collections import Counter
from dataclasses import dataclass, field

import torch

__all__ = ["OutOfPages", "PagedKVCache", "RadixCache"]


class OutOfPages(RuntimeError):
    """A call wants more pages than are free: `wanted` of `free`, out of `total`."""

    def __init__(self, wanted, free, total):
        super().__init__(wanted, free, total)
        self.wanted, self.free, self.total = wanted, free, total

    def __str__(self):
        return f"out of pages: {self.wanted} wanted, {self.free} free, {self.total} in total"


@dataclass
class _Sequence:
    pages: array  # int32, as a row of the block table
    length: int  # in tokens; ends in the last page


class PagedKVCache:
    """Keys and values of many sequences, in pages that sequences can share.

    A sequence is a handle, an int that is never used twice. Its token i lies in slot
    ``pages[i // page_size] * page_size + i % page_size``. A page is free again when its last owner,
    a sequence or who called `share`, lets go of it. Slots that no sequence appended are undefined.

    Args:
        pages, page_size: number of pages, and of tokens a page, from 1 on.
        kv_heads, head_dim, value_dim: heads, width of a key, width of a value (None: head_dim).
        layers: number of layers; one set of pages serves them all.
        dtype, device: of the caches.

    Attributes:
        keys: list of `layers` tensors (pages, page_size, kv_heads, head_dim).
        values: list of `layers` tensors (pages, page_size, kv_heads, value_dim).
        total_pages, page_size, device.

    All methods raise ValueError for numbers out of range, TypeError for what is no whole number,
    KeyError for a handle that was freed or never given out; a call that raises changed nothing.

    Source: PagedAttention (Kwon et al., SOSP 2023, arXiv:2309.06180); slots as in vLLM.
    """

    def __init__(
        self,
        pages,
        page_size,
        kv_heads,
        head_dim,
        *,
        value_dim=None,
        layers=1,
        dtype=torch.bfloat16,
        device=None,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads}
        sizes |= {"head_dim": head_dim, "value_dim": value_dim, "layers": layers}
        for name, size in sizes.items():
            if operator.index(size) < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        shape, options = (pages, page_size, kv_heads), {"dtype": dtype, "device": device}
        self.keys = [torch.empty(*shape, head_dim, **options) for _ in range(layers)]
        self.values = [torch.empty(*shape, value_dim, **options) for _ in range(layers)]
        self.device = self.keys[0].device
        self.total_pages, self.page_size = pages, page_size
        self._free = list(range(pages))[::-1]  # taken from the end
        self._owners = [0] * pages
        self._sequences, self._handles = {}, itertools.count()

    @property
    def free_pages(self):
        """Number of pages without an owner."""
        return len(self._free)

    def allocate(self, pages=()):
        """The handle of a new sequence, empty or made of full pages, which it shares.

        pages: in use, in the order of the tokens, such as those of `RadixCache.match`.
        """
        pages = array("i", pages)
        self.share(pages)
        sequence = next(self._handles)
        self._sequences[sequence] = _Sequence(pages, len(pages) * self.page_size)
        return sequence

    def fork(self, sequence):
        """The handle of a new sequence of the same tokens, which shares all pages.

        Where the last page is partly filled, the first of the two to append gets a copy of it:
        write the slots that were handed out before.
        """
        source = self._find(sequence)
        fork = self.allocate(source.pages)
        self._sequences[fork].length = source.length
        return fork

    def append(self, sequences, counts):
        """Makes room for new tokens at the end of sequences, and says where to write them.

        A sequence that would write to a page with other owners gets a copy of it first, in all
        layers.

        Args:
            sequences: handles, each at most once.
            counts: number of new tokens of each, or one int for all; 0 leaves a sequence as it is.

        Returns:
            slot_mapping (sum of counts,), int64 on the caches' device, sequence by sequence:
            ``keys[layer].view(-1, Hkv, D)[slot_mapping]`` belongs to the new tokens.

        Raises OutOfPages, and changes nothing, where the pages do not suffice for all sequences.
        """
        sequences = list(sequences)
        found = [self._find(sequence) for sequence in sequences]
        counts = [counts] * len(found) if isinstance(counts, int) else list(counts)
        counts = [operator.index(count) for count in counts]
        if len(counts) != len(found) or min(counts, default=0) < 0:
            raise ValueError(
                f"counts must be at least 0, one for each of {len(found)} sequences, got {counts}"
            )
        if len(set(sequences)) < len(found):
            raise ValueError(f"sequences must differ from each other, got {sequences}")

        # What it takes. When all owners of a page leave it for a copy, the last of them keeps it.
        wanted, copying, leaving = 0, [], Counter()
        for sequence, count in zip(found, counts):
            wanted += self._pages_for(sequence.length + count) - len(sequence.pages)
            if count and sequence.length % self.page_size:
                last = sequence.pages[-1]
                if self._owners[last] - leaving[last] > 1:
                    leaving[last] += 1
                    copying.append(sequence)
        wanted += len(copying)
        if wanted > len(self._free):
            raise OutOfPages(wanted, len(self._free), self.total_pages)

        originals = [sequence.pages[-1] for sequence in copying]
        self.release(originals)
        copies = self._take(len(copying))
        for sequence, page in zip(copying, copies):
            sequence.pages[-1] = page
        slots, size = array("q"), self.page_size
        for sequence, count in zip(found, counts):
            pages, start = sequence.pages, sequence.length
            sequence.length += count
            pages.extend(self._take(self._pages_for(sequence.length) - len(pages)))
            slots.extend(pages[i // size] * size + i % size for i in range(start, start + count))

        indices = self._to_device(slots + array("q", copies + originals), torch.int64)
        slots, copies, originals = indices.split([len(slots), len(copies), len(copies)])
        if copying:
            for cache in self.keys + self.values:
                cache[copies] = cache[originals]
        return slots

    def truncate(self, sequence, length):
        """Drops the tokens from `length` on, as speculative decoding does with rejected ones."""
        found = self._find(sequence)
        length = operator.index(length)
        if not 0 <= length <= found.length:
            raise ValueError(f"length must be 0 to {found.length}, the present one, got {length}")
        keep = self._pages_for(length)
        self.release(found.pages[keep:])
        del found.pages[keep:]
        found.length = length

    def free(self, sequence):
        """Ends a sequence: its pages lose an owner, its handle is void."""
        self.release(self._find(sequence).pages)
        del self._sequences[sequence]

    def length(self, sequence):
        """Number of tokens."""
        return self._find(sequence).length

    def pages(self, sequence):
        """List of page numbers in the order of the tokens; the last may be partly filled."""
        return self._find(sequence).pages.tolist()

    def block_table(self, sequences):
        """Pages of sequences, int32 (B, most pages of one) on the caches' device, then -1."""
        rows = [self._find(sequence).pages for sequence in sequences]
        width = max(map(len, rows), default=0)
        table = array("i")
        for row in rows:
            table += row + array("i", [-1]) * (width - len(row))
        return self._to_device(table, torch.int32).view(len(rows), width)

    def seq_lens(self, sequences):
        """Lengths of sequences in tokens, int32 (B,) on the caches' device."""
        return self._to_device(array("i", map(self.length, sequences)), torch.int32)

    def share(self, pages):
        """Makes the caller one more owner of pages, which must be in use, until it releases them.

        What was written there stays: sequences do not write to a page with other owners.
        """
        self._change_owners(pages, 1)

    def release(self, pages):
        """Takes back `share`. Returns the number of pages that came free."""
        before = len(self._free)
        self._change_owners(pages, -1)
        return len(self._free) - before

    def _change_owners(self, pages, change):
        counts = Counter(pages)
        for page, count in counts.items():
            need = count if change < 0 else 1
            owners = self._owners[page] if 0 <= page < self.total_pages else 0
            if owners < need:
                raise ValueError(
                    f"page {page}, of 0 to {self.total_pages - 1}, must have {need} or more owners "
                    f"for that, but has {owners}"
                )
        for page, count in counts.items():
            self._owners[page] += change * count
            if not self._owners[page]:
                self._free.append(page)

    def _take(self, count):
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def _find(self, sequence):
        if sequence not in self._sequences:
            raise KeyError(f"sequence {sequence!r} was freed, or is not from allocate or fork")
        return self._sequences[sequence]

    def _pages_for(self, tokens):
        return -(-tokens // self.page_size)

    def _to_device(self, values, dtype):
        """An array as a tensor, in one copy that the host does not wait for."""
        if not values:
            return torch.empty(0, dtype=dtype, device=self.device)
        host = torch.frombuffer(values, dtype=dtype)
        host = host.pin_memory() if self.device.type == "cuda" else host
        return host.to(self.device, non_blocking=True)


@dataclass(eq=False, repr=False)
class _Node:
    """A run of pages. Those on the path from the root hold the tokens before them."""

    parent: "_Node | None"
    keys: list  # the tokens of each page, as a tuple
    pages: list
    last_use: int = 0
    locks: int = 0  # of this node and all below it
    children: dict = field(default_factory=dict)  # by the first of their keys


class RadixCache:
    """A prefix tree over token ids: finds the pages that hold the keys and values of a prefix.

    It works in whole pages: with page size 1 every token counts. The tree is an owner of its pages
    in `cache`, a PagedKVCache, so that they outlive the sequences that filled them, until they are
    evicted. Time is a count of calls. Tokens are sequences of ints, or tensors (n,).

    Attributes:
        cache, total_pages: number of pages in the tree.

    Source: RadixAttention (Zheng et al., SGLang, NeurIPS 2024, arXiv:2312.07104).
    """

    def __init__(self, cache):
        self.cache = cache
        self.total_pages = self._locked_pages = self._clock = 0
        self._root = _Node(None, [], [])

    @property
    def evictable_pages(self):
        """Number of pages that no lock protects, with those that a sequence would keep in use."""
        return self.total_pages - self._locked_pages

    def match(self, tokens):
        """The longest prefix of tokens that the tree has, in whole pages; marked as just used.

        Returns (pages, length, node): list of pages, number of tokens in them, and where they end,
        for `lock`. Lock the node before anything is evicted.
        """
        node, pages = self._walk(self._keys_of(tokens))
        return pages, len(pages) * self.cache.page_size, node

    def insert(self, tokens, pages):
        """Adds a prefix whose keys and values are written, marked as just used.

        Where the tree has a part already it keeps its own pages; it shares the others.

        Args:
            tokens: ids (n,); a rest that fills no page is left out.
            pages: `PagedKVCache.pages` of a sequence that starts with them, n // page_size or more.

        Returns the number of leading tokens that were there already.
        """
        keys, pages = self._keys_of(tokens), list(pages)
        if len(pages) < len(keys):
            raise ValueError(f"the tokens fill {len(keys)} pages, but got {len(pages)} pages")
        node, known = self._walk(keys)
        keys, pages = keys[len(known) :], pages[len(known) : len(keys)]
        if keys:
            self.cache.share(pages)
            node.children[keys[0]] = _Node(node, keys, pages, self._clock)
            self.total_pages += len(pages)
        return len(known) * self.cache.page_size

    def lock(self, node):
        """Keeps what `match` found until `unlock`. ValueError where the node has left the tree."""
        for step in self._path(node):
            self._locked_pages += 0 if step.locks else len(step.pages)
            step.locks += 1

    def unlock(self, node):
        """Takes back one `lock` of the same node."""
        path = self._path(node)
        if node.locks == sum(child.locks for child in node.children.values()):
            raise ValueError("unlock needs a locked node, but this one has 0 locks of its own")
        for step in path:
            step.locks -= 1
            self._locked_pages -= 0 if step.locks else len(step.pages)

    def evict(self, pages):
        """Removes pages without a lock, from the ends of the least recently used prefixes.

        It goes on until `pages` pages came free in the PagedKVCache, or nothing is left to remove.
        A page that a sequence has too leaves the tree and does not come free: lock the paths of
        running sequences. Returns the number of pages that came free.
        """
        if operator.index(pages) < 0:
            raise ValueError(f"pages must be at least 0, got {pages}")
        freed = 0
        # No two leaves have the same last use: a call walks one path.
        leaves = [(node.last_use, node) for node in self._nodes() if self._evictable(node)]
        heapq.heapify(leaves)
        while leaves and freed < pages:
            _, node = heapq.heappop(leaves)
            keep = len(node.pages)
            while keep and freed < pages:
                keep -= 1
                freed += self.cache.release(node.pages[keep : keep + 1])
            if keep:
                self._split(node, keep)
            self.total_pages -= len(node.pages)
            parent, node.parent = node.parent, None
            del parent.children[node.keys[0]]
            if self._evictable(parent):
                heapq.heappush(leaves, (parent.last_use, parent))
        return freed

    def clear(self):
        """Removes everything. RuntimeError while anything is locked."""
        if self._root.locks:
            raise RuntimeError(f"clear needs a tree without locks, but it has {self._root.locks}")
        self.evict(self.total_pages)

    def _keys_of(self, tokens):
        """The tokens of each whole page, as tuples."""
        tokens = iter(tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens)
        return list(zip(*[tokens] * self.cache.page_size))

    def _walk(self, keys):
        """(node, pages) of the longest known prefix; splits a node so that it ends with one."""
        self._clock += 1
        node, pages = self._root, []
        while len(pages) < len(keys) and (child := node.children.get(keys[len(pages)])):
            equal = map(operator.eq, child.keys, keys[len(pages) : len(pages) + len(child.keys)])
            at = len(list(itertools.takewhile(bool, equal)))
            node = child if at == len(child.keys) else self._split(child, at)
            node.last_use = self._clock
            pages += node.pages
        return node, pages

    def _split(self, node, at):
        """Cuts a node in two. It stays the lower part, so that handles keep their meaning."""
        upper = _Node(node.parent, node.keys[:at], node.pages[:at], node.last_use, node.locks)
        upper.children[node.keys[at]] = node
        node.parent.children[node.keys[0]] = upper
        node.parent, node.keys, node.pages = upper, node.keys[at:], node.pages[at:]
        return upper

    def _evictable(self, node):
        return not node.children and not node.locks and node is not self._root

    def _nodes(self):
        """All nodes but the root."""
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield node

    def _path(self, node):
        """From a node up to the root."""
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        if path[-1] is not self._root:
            raise ValueError("node is not in this tree: it was evicted or cleared; match again")
        return path
