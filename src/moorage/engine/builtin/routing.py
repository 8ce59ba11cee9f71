"""Which experts a mixture-of-experts model chose, while it is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moorage.core.errors import ConfigError
from moorage.engine.builtin.routers import Router, count_layers, find_routers, route, to_rows


class RouterTap:
    """Records the choices of every router of `model` during each forward.

    `take()` gives int64 [tokens, hidden layers, k] of the last forward; layers without a router hold 0.
    """

    def __init__(self, model: Any) -> None:
        self.num_layers = count_layers(model)
        self.routers = find_routers(model)
        if not self.routers:
            raise ConfigError(
                "routed_experts is on but the model has no router; set inference.routed_experts = false"
            )
        self.num_experts, self.k = self.routers[0].num_experts, self.routers[0].k
        self._chosen: list[torch.Tensor | None] = [None] * len(self.routers)
        for index, router in enumerate(self.routers):
            router.module.forward = self._wrap(index, router)  # type: ignore[method-assign]

    def _wrap(self, index: int, router: Router) -> Callable[..., Any]:
        run = router.module.forward

        def tapped(*args: Any, **kwargs: Any) -> Any:
            output, self._chosen[index] = route(router, run, args, kwargs)
            return output

        return tapped

    def take(self) -> torch.Tensor:
        """The choices of the forward that just ran, and forget them."""
        chosen = [ids for ids in self._chosen if ids is not None]
        assert len(chosen) == len(self.routers), "take() without a forward"
        self._chosen = [None] * len(self.routers)
        return to_rows(self.routers, chosen, self.num_layers)

    def close(self) -> None:
        """Give the routers their own forward back."""
        for router in self.routers:
            router.module.__dict__.pop("forward", None)
