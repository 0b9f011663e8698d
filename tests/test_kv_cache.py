"""PagedKVCache and RadixCache against naive models (hypothesis), edge cases and messages."""

import itertools
import pickle
from collections import Counter

import pytest
import torch
from conftest import SEED
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashbpt.kv_cache import OutOfPages, PagedKVCache, RadixCache

SETTINGS = settings(max_examples=100, stateful_step_count=30, deadline=None, database=None)
some_tokens = st.lists(st.integers(0, 1), max_size=12)


def make_cache(pages=8, page_size=4, device=None):
    """Caches of NaN, so that what is read before it is written shows."""
    options = {"value_dim": 1, "layers": 2, "dtype": torch.float64, "device": device}
    cache = PagedKVCache(pages, page_size, 1, 2, **options)
    for one in cache.keys + cache.values:
        one.fill_(torch.nan)
    return cache


def write(cache, slots, numbers):
    """One number a token, shifted by a part that tells layers, keys and values apart."""
    numbers = torch.tensor(numbers, dtype=torch.float64, device=cache.device)[:, None, None]
    for i, one in enumerate(cache.keys + cache.values):
        one.view(-1, *one.shape[2:])[slots] = numbers + i / 8


def slots_of(cache):
    """The number in every slot, -1 where there is none."""
    caches = enumerate(cache.keys + cache.values)
    rows = torch.cat([one.flatten(0, 1)[:, 0] - i / 8 for i, one in caches], 1).nan_to_num(-1.0)
    assert (rows == rows[:, :1]).all(), "layers, keys or values differ"
    return rows[:, 0].tolist()


def read(cache, sequences):
    """The numbers of each sequence, through its row of the block table and its length."""
    table, lengths = cache.block_table(sequences), cache.seq_lens(sequences)
    assert table.dtype == lengths.dtype == torch.int32
    assert table.device == lengths.device == cache.device
    found, slots, size = [], slots_of(cache), cache.page_size
    for row, length in zip(table.tolist(), lengths.tolist(), strict=True):
        assert set(row[-(-length // size) :]) <= {-1}
        found.append([slots[row[i // size] * size + i % size] for i in range(length)])
    return found


def append(cache, sequence, numbers):
    write(cache, cache.append([sequence], [len(numbers)]), numbers)


def sequence_of(cache, numbers):
    sequence = cache.allocate()
    append(cache, sequence, numbers)
    return sequence


def state(cache):
    """All that a call could change."""
    sequences = {handle: (one.pages[:], one.length) for handle, one in cache._sequences.items()}
    contents = torch.cat([one.flatten().nan_to_num(-1.0) for one in cache.keys + cache.values])
    return sequences, cache._owners[:], cache._free[:], contents.tolist()


def rule_for_some(**strategies):
    """A rule of machines that have sequences at the time."""
    made = rule(data=st.data(), **strategies)
    return lambda function: precondition(lambda self: self.sequences)(made(function))


class Machine(RuleBasedStateMachine):
    """The model of a PagedKVCache is a dict from sequence to the list of its tokens."""

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.sequences)))

    @rule_for_some()
    def truncate(self, data):
        sequence = self.pick(data)
        length = data.draw(st.integers(0, len(self.sequences[sequence])))
        self.cache.truncate(sequence, length)
        self.sequences[sequence] = self.sequences[sequence][:length]

    @invariant()
    def contents_and_books(self):
        cache, sequences = self.cache, list(self.sequences)
        assert read(cache, sequences) == list(map(self.numbers, self.sequences.values()))
        owners = Counter(page for sequence in sequences for page in cache.pages(sequence))
        owners.update(self.other_owners())
        assert cache._owners == [owners[page] for page in range(cache.total_pages)]
        assert sorted(cache._free + list(owners)) == list(range(cache.total_pages))
        assert cache.free_pages == cache.total_pages - len(owners)
        for one in cache.keys + cache.values:  # nobody may miss what was in a free page
            one[cache._free] = torch.nan


# -------------------------------------------------------------------------------- PagedKVCache


@seed(SEED)
class PagedMachine(Machine):
    """A token is a number that is written once."""

    numbers = other_owners = staticmethod(lambda tokens=(): tokens)

    @initialize(pages=st.integers(1, 12), page_size=st.sampled_from([1, 2, 3, 16]))
    def start(self, pages, page_size):
        self.cache = make_cache(pages, page_size)
        self.sequences, self.fresh = {}, itertools.count()

    @rule()
    def allocate(self):
        self.sequences[self.cache.allocate()] = []

    @rule_for_some()
    def allocate_from_full_pages(self, data):
        source, size = self.pick(data), self.cache.page_size
        n = data.draw(st.integers(0, len(self.sequences[source]) // size))
        sequence = self.cache.allocate(self.cache.pages(source)[:n])
        self.sequences[sequence] = self.sequences[source][: n * size]

    @rule_for_some()
    def fork(self, data):
        source = self.pick(data)
        self.sequences[self.cache.fork(source)] = self.sequences[source]

    @rule_for_some()
    def free(self, data):
        sequence = self.pick(data)
        self.cache.free(sequence)
        del self.sequences[sequence]

    def pages_wanted(self, sequences, counts):
        """New pages, and copies on write, one sequence after the other."""
        size, owners, wanted = self.cache.page_size, self.cache._owners[:], 0
        for sequence, count in zip(sequences, counts):
            length = len(self.sequences[sequence])
            wanted += -(-(length + count) // size) - -(-length // size)
            if count and length % size and owners[self.cache.pages(sequence)[-1]] > 1:
                owners[self.cache.pages(sequence)[-1]] -= 1
                wanted += 1
        return wanted

    @rule_for_some()
    def append(self, data):
        sequences = data.draw(st.permutations(list(self.sequences)))[: data.draw(st.integers(1, 4))]
        count = st.sampled_from([0, 1, 1, 2, 2 * self.cache.page_size + 1])
        counts = [data.draw(count) for _ in sequences]
        wanted, free = self.pages_wanted(sequences, counts), self.cache.free_pages
        if wanted > free:
            before = state(self.cache)
            with pytest.raises(OutOfPages) as caught:
                self.cache.append(sequences, counts)
            assert (caught.value.wanted, caught.value.free) == (wanted, free)
            assert state(self.cache) == before
            return
        slots = self.cache.append(sequences, counts)
        assert self.cache.free_pages == free - wanted
        assert slots.dtype == torch.int64 and slots.shape == (sum(counts),)
        new = [[next(self.fresh) for _ in range(count)] for count in counts]
        write(self.cache, slots, list(itertools.chain(*new)))
        for sequence, numbers in zip(sequences, new):
            self.sequences[sequence] = self.sequences[sequence] + numbers


TestPagedCacheByAModel = PagedMachine.TestCase
TestPagedCacheByAModel.settings = SETTINGS


def test_shapes(device):
    cache = PagedKVCache(5, 3, 2, 8, value_dim=6, layers=4, dtype=torch.float16, device=device)
    assert [tuple(one.shape) for one in cache.keys] == [(5, 3, 2, 8)] * 4
    assert [tuple(one.shape) for one in cache.values] == [(5, 3, 2, 6)] * 4
    for one in cache.keys + cache.values:
        assert one.dtype == torch.float16 and one.device == cache.device
    assert (cache.total_pages, cache.page_size, cache.device.type) == (5, 3, device)
    plain = PagedKVCache(2, 1, 1, 4)
    assert plain.values[0].shape == (2, 1, 1, 4) and plain.keys[0].dtype == torch.bfloat16


def test_slots_and_tables(device):
    cache = make_cache(5, 3, device)
    one, other, empty = (cache.allocate() for _ in range(3))
    slots = cache.append([one, other, empty], [4, 2, 0])
    assert slots.tolist() == [0, 1, 2, 3, 6, 7] and slots.device == cache.device
    assert cache.append([other, one], torch.tensor([3, 1])).tolist() == [8, 9, 10, 4]
    assert cache.append(iter([one, other]), 1).tolist() == [5, 11]
    cache.append([one], 1)
    assert cache.seq_lens([other, empty, one]).tolist() == [6, 0, 7]
    table = cache.block_table([other, empty, one])
    assert table.tolist() == [[2, 3, -1], [-1, -1, -1], [0, 1, 4]]


def test_nothing_to_do(device):
    cache = make_cache(2, 4, device)
    empty = cache.allocate()
    for slots in (cache.append([], []), cache.append([], 3), cache.append([empty], [0])):
        assert slots.shape == (0,) and slots.dtype == torch.int64 and slots.device == cache.device
    assert cache.block_table([]).shape == (0, 0) and cache.seq_lens([]).shape == (0,)
    assert cache.block_table([empty, empty]).shape == (2, 0)
    fork = cache.fork(empty)
    cache.truncate(fork, 0)
    append(cache, fork, [1, 2])
    assert read(cache, [empty, fork]) == [[], [1, 2]]


def test_fork_then_append_in_both(device):
    cache = make_cache(4, 4, device)
    one = sequence_of(cache, [1, 2, 3, 4, 5])
    other = cache.fork(one)
    append(cache, one, [6])  # takes a copy
    append(cache, other, [7])  # is the only owner by now
    assert cache.pages(one)[0] == cache.pages(other)[0] and cache.free_pages == 1
    assert read(cache, [one, other]) == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]]
    third = cache.fork(other)
    write(cache, cache.append([one, other, third], [0, 1, 1]), [8, 9])  # takes one copy again
    assert read(cache, [other, third]) == [[1, 2, 3, 4, 5, 7, 8], [1, 2, 3, 4, 5, 7, 9]]
    assert cache.free_pages == 0
    cache.free(one), cache.free(third)
    assert cache.free_pages == 2 and read(cache, [other]) == [[1, 2, 3, 4, 5, 7, 8]]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_truncate_across_shared_pages(page_size, device):
    cache = make_cache(50, page_size, device)
    one = sequence_of(cache, range(20))
    other = cache.fork(one)
    cache.truncate(other, 10)
    append(cache, other, [100, 101, 102])
    cache.truncate(one, 12)
    append(cache, one, [200])
    assert read(cache, [one, other]) == [[*range(12), 200], [*range(10), 100, 101, 102]]


def test_share_and_release():
    cache = make_cache()
    one = sequence_of(cache, [1, 2, 3])
    pages = cache.pages(one)
    cache.share(pages)
    append(cache, one, [4])
    assert slots_of(cache)[:4] == [1, 2, 3, -1]
    cache.free(one)
    assert (cache.free_pages, cache.release(pages), cache.free_pages) == (7, 1, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_copies_of_any_dtype(dtype, device):
    cache = PagedKVCache(3, 4, 2, 8, layers=2, dtype=dtype, device=device)
    for one in cache.keys + cache.values:
        one.copy_(torch.randn(one.shape, device=device))
    sequence = cache.allocate()
    cache.append([sequence], [3])
    fork = cache.fork(sequence)
    cache.append([fork], [1])
    (page,), (copy,) = cache.pages(sequence), cache.pages(fork)
    assert page != copy
    for one in cache.keys + cache.values:
        assert torch.equal(one[page, :3].float(), one[copy, :3].float())


def test_out_of_pages():
    cache = make_cache(2, 4)
    one, other = sequence_of(cache, range(3)), cache.allocate()
    with pytest.raises(RuntimeError, match="out of pages: 3 wanted, 1 free, 2 in total") as caught:
        cache.append([other, one], [8, 2])
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, OutOfPages) and vars(again) == {"wanted": 3, "free": 1, "total": 2}


def test_errors_of_handles():
    cache = make_cache()
    gone = cache.allocate()
    cache.free(gone)
    calls = [cache.fork, cache.free, cache.length, cache.pages]
    calls += [lambda one: cache.append([one], 1), lambda one: cache.truncate(one, 0)]
    calls += [lambda one: cache.block_table([one]), lambda one: cache.seq_lens([one])]
    for call in calls:
        for handle in (gone, 99, -1, None, "a"):
            with pytest.raises(KeyError, match=f"sequence {handle!r} was freed, or is not from"):
                call(handle)
    assert cache.allocate() != gone and cache.free_pages == cache.total_pages


def test_errors_of_numbers():
    cache = make_cache(8, 4)
    one, other = sequence_of(cache, range(6)), cache.allocate()
    before = state(cache)
    for error, message, call in [
        (ValueError, r"one for each of 1 seq.*, got \[-1\]", lambda: cache.append([one], [-1])),
        (ValueError, r"at least 0.*, got \[-2, -2\]", lambda: cache.append([one, other], -2)),
        (ValueError, r"one for each of 2 .*\[1\]", lambda: cache.append([one, other], [1])),
        (ValueError, r"differ from each other, got \[0, 0\]", lambda: cache.append([one, one], 1)),
        (TypeError, None, lambda: cache.append([one], [1.5])),
        (TypeError, None, lambda: cache.append([one], 1.0)),
        (TypeError, None, lambda: cache.append(one, 1)),
        (ValueError, "must be 0 to 6, .* got 7", lambda: cache.truncate(one, 7)),
        (ValueError, "must be 0 to 6, .* got -1", lambda: cache.truncate(one, -1)),
        (TypeError, None, lambda: cache.truncate(one, 2.0)),
        (ValueError, "page 5, of 0 to 7, must have 1 .* has 0", lambda: cache.share([0, 5])),
        (ValueError, "page 8, of 0 to 7, must have 1 .* has 0", lambda: cache.allocate([1, 8])),
        (ValueError, "page -8, of 0 to 7", lambda: cache.share([-8])),
        (ValueError, "page 1, .* 2 or more .* has 1", lambda: cache.release([0, 1, 1])),
    ]:
        with pytest.raises(error, match=message):
            call()
        assert state(cache) == before
    for name in ("pages", "page_size", "kv_heads", "head_dim", "value_dim", "layers"):
        sizes = {"pages": 2, "page_size": 2, "kv_heads": 1, "head_dim": 4, name: 0}
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            PagedKVCache(**sizes)


# ---------------------------------------------------------------------------------- RadixCache


@seed(SEED)
class RadixMachine(Machine):
    """A server. The model of the tree: every prefix in whole pages, its last page, its last use."""

    numbers = staticmethod(lambda tokens: [10 * i + token for i, token in enumerate(tokens)])

    @initialize(pages=st.integers(4, 16), page_size=st.sampled_from([1, 2, 3]))
    def start(self, pages, page_size):
        self.cache = make_cache(pages, page_size)
        self.tree = RadixCache(self.cache)
        self.model, self.clock = {}, 0
        self.sequences, self.locks = {}, {}  # sequence: tokens; sequence: (node, prefix)

    def other_owners(self):
        return [page for page, _ in self.model.values()]

    def prefixes(self, tokens):
        size = self.cache.page_size
        return [tuple(tokens[:n]) for n in range(size, len(tokens) + 1, size)]

    def known(self, tokens):
        """The prefixes of tokens in the model, which are the last used by now."""
        self.clock += 1
        known = [prefix for prefix in self.prefixes(tokens) if prefix in self.model]
        for prefix in known:
            self.model[prefix][1] = self.clock
        return known

    def is_locked(self, prefix):
        return any(one[: len(prefix)] == prefix for _, one in self.locks.values())

    def match(self, tokens):
        known = self.known(tokens)
        pages, length, node = self.tree.match(tokens if self.clock % 2 else torch.tensor(tokens))
        assert length == len(known) * self.cache.page_size
        assert pages == [self.model[prefix][0] for prefix in known]
        return pages, node, known[-1] if known else ()

    def insert(self, sequence):
        tokens, pages = self.sequences[sequence], self.cache.pages(sequence)
        known = self.known(tokens)
        assert self.tree.insert(tokens, pages) == len(known) * self.cache.page_size
        for prefix, page in zip(self.prefixes(tokens), pages):
            self.model.setdefault(prefix, [page, self.clock])

    @rule(wanted=st.integers(0, 6))
    def evict(self, wanted):
        used, freed = {page for one in self.sequences for page in self.cache.pages(one)}, 0
        while freed < wanted:
            inner = {prefix[: -self.cache.page_size] for prefix in self.model}
            leaves = [p for p in self.model if p not in inner and not self.is_locked(p)]
            if not leaves:
                break
            page, _ = self.model.pop(min(leaves, key=lambda p: self.model[p][1]))
            freed += page not in used
        assert self.tree.evict(wanted) == freed

    @rule_for_some(tokens=some_tokens)
    def grow(self, data, tokens):
        self.append(self.pick(data), tokens)

    def append(self, sequence, tokens):
        start = self.cache.length(sequence)
        try:
            slots = self.cache.append([sequence], [len(tokens)])
        except OutOfPages as error:
            self.evict(error.wanted - error.free)
            if self.cache.free_pages < error.wanted:
                return
            slots = self.cache.append([sequence], [len(tokens)])
        self.sequences[sequence] = self.sequences[sequence] + tokens
        write(self.cache, slots, self.numbers(self.sequences[sequence])[start:])

    @rule(tokens=some_tokens, at_once=st.booleans())
    def begin(self, tokens, at_once):
        pages, node, prefix = self.match(tokens)
        self.tree.lock(node)
        sequence = self.cache.allocate(pages)
        self.sequences[sequence], self.locks[sequence] = list(prefix), (node, prefix)
        self.append(sequence, tokens[len(prefix) :])
        if at_once:
            self.finish(sequence)

    @rule_for_some()
    def insert_and_run_on(self, data):
        sequence = self.pick(data)
        self.insert(sequence)
        _, node, prefix = self.match(self.sequences[sequence])
        self.tree.lock(node)
        self.tree.unlock(self.locks[sequence][0])
        self.locks[sequence] = node, prefix

    @rule_for_some()
    def finish_one(self, data):
        self.finish(self.pick(data))

    def finish(self, sequence):
        self.insert(sequence)
        self.tree.unlock(self.locks.pop(sequence)[0])
        self.cache.free(sequence)
        del self.sequences[sequence]

    @precondition(lambda self: not self.sequences)
    @rule()
    def clear(self):
        self.tree.clear()
        self.model.clear()
        assert self.cache.free_pages == self.cache.total_pages

    @invariant()
    def tree_holds_the_model(self):
        slots, size = slots_of(self.cache), self.cache.page_size
        for prefix, (page, _) in self.model.items():
            assert slots[page * size :][:size] == self.numbers(prefix)[-size:]
        assert self.tree.total_pages == len(self.model)
        assert self.tree.evictable_pages == sum(not self.is_locked(one) for one in self.model)

    def teardown(self):
        for sequence in list(self.sequences):
            self.finish(sequence)
        self.clear()


TestRadixCacheByAModel = RadixMachine.TestCase
TestRadixCacheByAModel.settings = SETTINGS


def tree_of(*prefixes, pages=8, page_size=1):
    """A tree that alone owns the pages of the prefixes."""
    tree = RadixCache(make_cache(pages, page_size))
    for prefix in prefixes:
        sequence = sequence_of(tree.cache, range(len(prefix)))
        tree.insert(prefix, tree.cache.pages(sequence))
        tree.cache.free(sequence)
    return tree


def held(tree, *prefixes):
    """The length of the match of each, which makes the last the most recently used."""
    return [tree.match(prefix)[1] for prefix in prefixes]


def test_evict_the_least_recently_used_ends():
    tree = tree_of([1, 2, 3, 4], [1, 2, 5], [6, 7])
    assert tree.total_pages == 7 and tree.cache.free_pages == 1
    held(tree, [1, 2, 3, 4])
    assert tree.evict(2) == 2 and tree.cache.free_pages == 3
    assert held(tree, [1, 2, 3, 4], [6, 7], [1, 2, 5]) == [4, 1, 2]
    assert tree.evict(1) == 1
    assert held(tree, [1, 2, 3, 4], [6, 7], [1, 2, 5]) == [3, 1, 2]
    assert tree.evict(0) == 0 and tree.evict(99) == 4 and tree.evict(1) == 0


def test_locks_and_errors_of_the_tree():
    tree = tree_of([1, 2, 3, 4])
    _, _, short = tree.match([1, 2])
    tree.lock(short)
    tree.lock(short)
    assert (tree.evictable_pages, tree.evict(9), tree.evictable_pages) == (2, 2, 0)
    tree.unlock(short)
    with pytest.raises(RuntimeError, match="clear needs a tree without locks, but it has 1"):
        tree.clear()
    tree.unlock(short)
    tree.lock(tree.match([9])[2])  # the root
    with pytest.raises(ValueError, match="this one has 0 locks of its own"):
        tree.unlock(short)
    assert tree.evict(1) == 1
    for call in (tree.lock, tree.unlock, tree_of().lock):
        with pytest.raises(ValueError, match="node is not in this tree: it was evicted or cleared"):
            call(short)
    with pytest.raises(ValueError, match="tokens fill 4 pages, but got 1 pages"):
        tree.insert([1, 2, 3, 4], [0])
    with pytest.raises(ValueError, match="page 5, of 0 to 7, must have 1"):
        tree.insert([1, 2], [0, 5])
    with pytest.raises(ValueError, match="pages must be at least 0, got -1"):
        tree.evict(-1)
    assert tree.total_pages == 1 and held(tree, [1, 2, 3, 4]) == [1]
