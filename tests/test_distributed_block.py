"""TransformerBlock under data parallelism: two gloo ranks on the CPU against one process."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from flashbpt.nn import TransformerBlock

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS, BATCH, TOKENS, DIM, STEPS = 2, 4, 19, 32, 3
HOW = ("ddp", "fsdp2", "fsdp2 loaded")


class Model(nn.Module):
    """Two layers of different kinds and a head; it predicts the next vector."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"heads": 4, "ffn_dim": 48, "rows": 16, "dtype": torch.float64}
        gpt2 = {"norm": "layer", "activation": "gelu", "gated": False, "bias": True, "rope": None}
        self.blocks = nn.ModuleList(
            [
                TransformerBlock(DIM, kv_heads=2, qk_norm=True, sinks=True, **options),
                TransformerBlock(DIM, **gpt2, **options),
            ]
        )
        self.head = nn.Linear(DIM, DIM, bias=False, dtype=torch.float64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model, batches):
    """The loss of each step of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for x in batches:
        loss = (model(x[:, :-1]) - x[:, 1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches():
    """The same sequences at each step, to be learnt."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, DIM, dtype=torch.float64, generator=generator)
    return x.expand(STEPS, *x.shape)


def wrapped(model, how):
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_sharded(how, rank):
    """Mean losses over the ranks, and whole weights; each rank trains on its part of each batch."""
    model = Model()
    sharded = wrapped(model, how)
    if how == "fsdp2 loaded":  # the weights come after sharding, from whole layers
        for block, whole in zip(model.blocks, Model().blocks):
            block.reset_parameters()
            block.load_from(whole)
    part = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
    losses = torch.tensor(train(sharded, batches()[:, part]), dtype=torch.float64)
    dist.all_reduce(losses)
    weights = {
        name: (p if how == "ddp" else p.full_tensor()).detach()
        for name, p in model.named_parameters()
    }
    return losses / RANKS, weights


def work(rank, folder):
    """One rank; the first leaves the results in a file a case."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    for how in HOW:
        result = train_sharded(how, rank)
        if rank == 0:
            torch.save(result, f"{folder}/{how}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder that two ranks left their results in; they start once, which takes seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder),), nprocs=RANKS)
    return folder


@pytest.mark.parametrize("how", HOW)
def test_two_ranks_train_as_one_process(how, results):
    """Losses and weights after three steps are those of the whole batch in one process."""
    losses, weights = torch.load(results / f"{how}.pt")
    model = Model()
    expected = torch.tensor(train(model, batches()), dtype=torch.float64)
    assert expected[-1] < 0.95 * expected[0]
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0)
    assert set(weights) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(weights[name], p.detach(), rtol=1e-8, atol=1e-10, msg=name)
