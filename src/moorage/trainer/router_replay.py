"""Router replay: the trainer uses the expert choices that the engine made.

Inside a router's forward pass its one top-k call is answered with the engine's ids and with the router's own
scores at those ids (`engine.builtin.routers`). The model's own code then normalises and scales, so gradients
reach the gate as usual and only the selection is fixed.

Promises:
- rows are taken in the form in which engines give them: over all hidden layers, each router reads the column
  of its own layer, columns of dense layers are not read;
- rows of another shape fail loudly, a router never silently routes by itself;
- a row that holds -1 leaves that token to the router;
- what the experts were told is kept in `chosen`, for load-balance figures of what really ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moorage.core.errors import ConfigError
from moorage.engine.builtin.routers import Router, count_layers, find_routers, route, to_rows


class RouterReplay:
    """Interposes on every router of a model. `replaying(ids)` encloses forward and backward passes."""

    def __init__(self, model: Any) -> None:
        self.routers = find_routers(model)
        if not self.routers:
            raise ConfigError(
                f"trainer.router_replay is on but {type(model).__name__} has no router that can be found; "
                "write trainer.router_replay = false"
            )
        self.num_layers = count_layers(model)
        self.num_experts, self.top_k = self.routers[0].num_experts, self.routers[0].k
        self.chosen: list[torch.Tensor | None] = [None] * len(self.routers)
        self._forced: torch.Tensor | None = None
        self._recording = False
        for index, router in enumerate(self.routers):
            self._interpose(index, router)

    @property
    def shape(self) -> tuple[int, int]:
        """(hidden layers, k) of the routing rows that fit the model."""
        return self.num_layers, self.top_k

    @property
    def layers(self) -> list[int]:
        """Numbers of the hidden layers that have a router, ascending."""
        return [router.layer for router in self.routers]

    @contextmanager
    def replaying(self, ids: torch.Tensor) -> Iterator[None]:
        """Use `ids` [T, hidden layers, k] inside. Raises ConfigError when they do not fit the model."""
        if ids.ndim != 3 or tuple(ids.shape[1:]) != self.shape:
            raise ConfigError(
                f"routing rows have shape {tuple(ids.shape)}, the model has {self.num_layers} hidden layers "
                f"({len(self.routers)} with a router) and chooses {self.top_k}: engine and trainer run "
                "different models"
            )
        if int(ids.max()) >= self.num_experts:
            raise ConfigError(f"routing rows name expert {int(ids.max())} of {self.num_experts}")
        self._forced = ids
        try:
            yield
        finally:
            self._forced = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let the routers choose inside, and keep what they chose in `chosen`."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def recorded(self) -> torch.Tensor:
        """The choices of the last forward pass, as rows [T, hidden layers, k]: dense layers hold 0."""
        chosen = [ids for ids in self.chosen if ids is not None]
        return to_rows(self.routers, chosen, self.num_layers)

    def imbalance(self) -> float:
        """`load_imbalance` of the last forward pass, over the layers that have a router."""
        return load_imbalance(self.recorded()[:, self.layers], self.num_experts)

    def close(self) -> None:
        """Give the routers their own forward back."""
        for router in self.routers:
            router.module.__dict__.pop("forward", None)

    def _interpose(self, index: int, router: Router) -> None:
        run = router.module.forward

        @torch.compiler.disable  # a compiled block must not look past the interposed call
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._forced is None and not self._recording:
                return run(*args, **kwargs)
            forced = None if self._forced is None else self._forced[:, router.layer]
            output, self.chosen[index] = route(router, run, args, kwargs, forced)
            return output

        router.module.forward = forward  # type: ignore[method-assign]


def load_imbalance(ids: torch.Tensor, num_experts: int) -> float:
    """Largest share of any expert over the mean share, minus one, worst layer: 0 is perfect balance.

    `ids` [T, layers, k], layers with a router only.
    """
    worst = 0.0
    for layer in range(ids.shape[1]):
        counts = torch.bincount(ids[:, layer].reshape(-1), minlength=num_experts).float()
        worst = max(worst, float(counts.max() / counts.mean().clamp(min=1e-9)) - 1.0)
    return worst
