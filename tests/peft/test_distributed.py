"""DDP and FSDP2 over two gloo processes give the gradients of one process (L16)."""

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fastlora
from fastlora.ops import few_rows

from . import models
from .models import kinds, pair


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _loss(model, batch):
    return model(input_ids=batch, use_cache=False).logits.square().mean()


def _gradients(model, full=lambda p: p):
    grads = ((n.removeprefix("module."), p) for n, p in model.named_parameters())
    return {n: full(p.grad).clone() for n, p in grads if p.grad is not None}


def _worker(rank: int, port: int, queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        _run(rank)
        queue.put((rank, ""))
    except BaseException as error:
        queue.put((rank, f"{type(error).__name__}: {error}"))
        raise
    finally:
        dist.destroy_process_group()


def _run(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    few_rows.LIMIT = 0  # the fused operations, however small the batch

    reference, fused = pair()
    batches = [models.ids(2, 6), models.ids(2, 6).flip(1)]
    for batch in batches:
        (_loss(reference, batch) / 2).backward()
    want = _gradients(reference)

    ddp = DistributedDataParallel(copy.deepcopy(fused))
    _loss(ddp, batches[rank]).backward()
    models.assert_same(_gradients(ddp), want)

    for fuse_last in (False, True):
        model = copy.deepcopy(reference if fuse_last else fused)
        model.zero_grad()
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        if fuse_last:
            fastlora.fuse(model)
        assert kinds(model) == {"linear": 14}  # as far as can be told before it gathers
        row = models.row(model, "q_proj")
        assert row.reason == "once FSDP2 has gathered its parameters"
        _loss(model, batches[rank]).backward()
        models.assert_same(_gradients(model, lambda g: g.full_tensor()), want)
        fastlora.unfuse(model)
        model.zero_grad()
        _loss(model, batches[rank]).backward()
        models.assert_same(_gradients(model, lambda g: g.full_tensor()), want)

    # One of the three projections sharded on its own: it is gathered by its own call alone.
    model = copy.deepcopy(reference)
    model.zero_grad()
    attention = model.base_model.model.model.layers[0].self_attn
    fully_shard(attention.k_proj)
    fastlora.fuse(model)
    assert "sharded on its own" in models.row(model, "0.self_attn.k_proj").reason
    _loss(model, batches[rank]).backward()
    fastlora.unfuse(model)

    model = copy.deepcopy(fused)
    model.zero_grad()
    attention = model.base_model.model.model.layers[0].self_attn
    fully_shard(attention.k_proj)
    _loss(model, batches[rank]).backward()
    assert attention.k_proj.lora_A["default"].weight.grad.full_tensor().isfinite().all()
    with pytest.raises(ValueError, match="fully_shard made of a fused layer"):
        fastlora.unfuse(model)


def test_ddp_and_fsdp2():
    context = mp.get_context("spawn")
    queue, port = context.Queue(), _free_port()
    workers = [context.Process(target=_worker, args=(rank, port, queue)) for rank in range(2)]
    for worker in workers:
        worker.start()
    try:
        results = dict(queue.get(timeout=240) for _ in workers)
    finally:
        for worker in workers:
            worker.join(20)
            worker.kill()
    assert results == {0: "", 1: ""}
