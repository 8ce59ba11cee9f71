"""The ranks of one trainer: who I am, which device, which mesh, and the collectives that the step needs.

One rank is started as a plain process (no torchrun, no process group); more are started by torchrun. Without
context or tensor parallelism every rank is a data rank of its own: it reads its own batch file, fetches and
deletes its own payloads.

Does not know: models, batches.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from moorage.config.trainer import TrainerConfig
from moorage.core.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

COLLECTIVE_TIMEOUT_S = 900.0  # a rank that lags this much is dead; torchrun then ends the others


@dataclass(frozen=True)
class World:
    """This process among the trainer's ranks. `mesh` is None when the model is not sharded; `cpu_group`
    (gloo) and `cpu_mesh` carry checkpoints."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh | None = None
    cpu_group: ProcessGroup | None = None
    cpu_mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_reduce(self, values: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """`values` summed (or `max`) over all ranks; returned on the CPU in its own dtype."""
        if self.size == 1:
            return values.cpu()
        import torch.distributed as dist

        moved = values.to(self.device)
        dist.all_reduce(moved, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
        return moved.cpu()

    def all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """`values` of every rank, in rank order; the same shape everywhere."""
        if self.size == 1:
            return [values.cpu()]
        import torch.distributed as dist

        moved = values.to(self.device)
        gathered = [torch.empty_like(moved) for _ in range(self.size)]
        dist.all_gather(gathered, moved)
        return [tensor.cpu() for tensor in gathered]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Leave the process group, when there is one."""
        if self.size > 1 or self.mesh is not None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def make_world(config: TrainerConfig) -> World:
    """Join the trainer's ranks as torchrun's environment says. Raises ConfigError when they do not fit."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size != config.num_ranks:
        raise ConfigError(
            f"trainer.num_ranks is {config.num_ranks} but {size} rank(s) were started; start it with "
            f"torchrun --nproc-per-node {config.num_ranks}, or let `moorage rl` do so"
        )
    torch.set_num_threads(config.num_threads)
    device = _choose_device(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    mixed = config.param_dtype is not None or config.reduce_dtype is not None
    if mixed and config.fsdp is False:
        raise ConfigError(
            "trainer.param_dtype and reduce_dtype act through FSDP; remove trainer.fsdp = false"
        )
    sharded = (size > 1 or mixed) if config.fsdp is None else config.fsdp
    if size == 1 and not sharded:
        return World(rank, size, device)
    return _join(config, rank, size, device, sharded)


def _choose_device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.device is {name!r} but this machine has no CUDA device; write 'cpu'")
    device = torch.device("cuda", local_rank) if name in ("auto", "cuda") else torch.device(name)
    torch.cuda.set_device(device)
    return device


def _join(config: TrainerConfig, rank: int, size: int, device: torch.device, sharded: bool) -> World:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh

    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        if size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    replicate = config.replicate if sharded else size
    if size % replicate:
        raise ConfigError(f"trainer.replicate {replicate} does not divide the {size} ranks")
    shape, names = (size,), ("shard",)
    if replicate > 1:
        shape, names = (replicate, size // replicate), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    cpu_mesh = mesh if device.type == "cpu" else init_device_mesh("cpu", shape, mesh_dim_names=names)
    cpu_group = dist.new_group(backend="gloo", timeout=timeout)
    return World(rank, size, device, mesh, cast("ProcessGroup", cpu_group), cpu_mesh)
