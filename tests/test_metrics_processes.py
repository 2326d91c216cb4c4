"""Two real processes; few imports, as each process makes them again."""

import warnings

import pytest
import torch
from torch.multiprocessing import spawn

from calm_lightning.metrics import ClasswiseECE, ConfidenceECE, TokenECE, confidence_ece


def rows(n):
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(n, 4, generator=generator).softmax(-1)
    return probs, torch.randint(4, (n,), generator=generator)


def _worker(rank, folder):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    warnings.simplefilter("ignore")  # rank 1 computes without an update
    probs, target = rows(100)
    ragged, idle = ConfidenceECE(keep_samples=True), ConfidenceECE(keep_samples=True)
    classes, tokens = ClasswiseECE(4), TokenECE()
    part = slice(0, 70) if rank == 0 else slice(70, 100)
    for batch in zip(probs[part].split(16), target[part].split(16), strict=True):
        ragged.update(*batch)
    if rank == 0:
        idle.update(probs, target)
        classes.update(probs, target)
        tokens.update(probs.log(), target)
    result = {
        "ragged": (ragged.compute(), ragged.reliability().count, ragged.samples()),
        "idle": (idle.compute(), idle.reliability().count, idle.samples()),
        "own": ragged.bins[0].sum(),
        "classes": classes.compute(),
        "tokens": tokens.compute(),
    }
    torch.save(result, f"{folder}/{rank}.pt")


@pytest.mark.slow  # each process imports torchmetrics again
def test_d10_ragged_and_empty_processes_neither_hang_nor_lose_rows(tmp_path):
    spawn(_worker, (str(tmp_path),), nprocs=2)
    probs, target = rows(100)
    whole, by_class, tokens = ConfidenceECE(keep_samples=True), ClasswiseECE(4), TokenECE()
    whole.update(probs, target)
    by_class.update(probs, target)
    tokens.update(probs.log(), target)
    for rank, own in ((0, 70), (1, 30)):
        got = torch.load(tmp_path / f"{rank}.pt")
        for value, count, samples in (got["ragged"], got["idle"]):
            assert value == confidence_ece(probs, target)
            assert torch.equal(count, whole.reliability().count)
            assert all(map(torch.equal, samples, whole.samples()))
        assert got["own"] == own  # afterwards each holds its own rows again
        assert got["classes"] == by_class.compute()
        assert got["tokens"] == tokens.compute()
