"""Router replay: the trainer uses the expert choices that the engine made.

Works on any transformers mixture-of-experts model whose routers call `torch.topk` once over their scores:
inside a router's forward pass that one call is answered with the given ids and with the router's **own**
scores at those ids. The model's own code then normalises and scales, so gradients reach the gate as usual and
only the selection is fixed.

Promises:
- routers are found through what the model class declares for router logits, in model order: no table of
  models;
- a router that does not make exactly one such call fails loudly, it never silently routes by itself;
- a row that holds -1 leaves that token to the router;
- what the experts were told is kept in `chosen`, for load-balance figures of what really ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from moorage.core.errors import ConfigError

_TOPK = (torch.topk, torch.Tensor.topk)


class RouterReplay:
    """Interposes on every router of a model. `replaying(ids)` encloses forward and backward passes."""

    def __init__(self, model: torch.nn.Module) -> None:
        routers = find_routers(model)
        if not routers:
            raise ConfigError(
                f"trainer.router_replay is on but {type(model).__name__} has no router that can be found; "
                "write trainer.router_replay = false"
            )
        self.names = [name for name, _ in routers]
        self.num_experts, self.top_k = _sizes(*routers[0])
        self.chosen: list[torch.Tensor | None] = [None] * len(routers)
        self._forced: torch.Tensor | None = None
        self._recording = False
        self._routers = [router for _, router in routers]
        for layer, (name, router) in enumerate(routers):
            self._interpose(layer, name, router)

    @property
    def num_layers(self) -> int:
        return len(self._routers)

    @contextmanager
    def replaying(self, ids: torch.Tensor) -> Iterator[None]:
        """Use `ids` [T, layers, k] inside. Raises ConfigError when they do not fit the model."""
        if ids.ndim != 3 or tuple(ids.shape[1:]) != (self.num_layers, self.top_k):
            raise ConfigError(
                f"routing rows have shape {tuple(ids.shape)}, the model has {self.num_layers} routers that "
                f"choose {self.top_k}: engine and trainer run different models"
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
        """The choices of the last forward pass [T, layers, k]."""
        return torch.stack([ids for ids in self.chosen if ids is not None], dim=1)

    def close(self) -> None:
        """Give the routers their own forward back."""
        for router in self._routers:
            router.__dict__.pop("forward", None)

    def _interpose(self, layer: int, name: str, router: torch.nn.Module) -> None:
        num_experts, top_k = _sizes(name, router)
        if (num_experts, top_k) != (self.num_experts, self.top_k):
            raise ConfigError(f"{name} chooses {top_k} of {num_experts} experts, other routers differ")
        run: Callable[..., Any] = router.forward

        @torch.compiler.disable  # a compiled block must not look past the interposed call
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._forced is None and not self._recording:
                return run(*args, **kwargs)
            hidden = args[0] if args else next(iter(kwargs.values()))
            forced = None if self._forced is None else self._forced[:, layer]
            mode = _ForcedTopK(num_experts, top_k, hidden.numel() // hidden.shape[-1], forced)
            with mode:
                output = run(*args, **kwargs)
            if mode.calls != 1:
                raise ConfigError(
                    f"{name} ({type(router).__name__}) made {mode.calls} top-k calls instead of one: it "
                    "cannot be replayed; write trainer.router_replay = false"
                )
            self.chosen[layer] = mode.seen
            return output

        router.forward = forward  # type: ignore[method-assign]


class _ForcedTopK(TorchFunctionMode):
    """Answers the router's one top-k call over [tokens, num_experts] with the forced ids."""

    def __init__(self, num_experts: int, top_k: int, num_tokens: int, forced: torch.Tensor | None) -> None:
        self.wanted = (num_tokens, num_experts)
        self.top_k = top_k
        self.forced = forced
        self.seen: torch.Tensor | None = None
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _TOPK:
            return result
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs.get("k")
        # Grouped routers also take top-k over groups (3-D, or another width): those stay their own.
        if tuple(scores.shape) != self.wanted or k != self.top_k:
            return result
        self.calls += 1
        if self.forced is not None:
            ids = self.forced.to(result.indices.device, torch.int64)
            ids = torch.where((ids < 0).any(-1, keepdim=True), result.indices, ids)
            result = torch.return_types.topk((scores.gather(-1, ids), ids))
        self.seen = result.indices.detach()
        return result


def find_routers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """(name, module) of the routers, in layer order."""
    classes = _router_classes(model)
    found = [
        (name, module) for name, module in model.named_modules() if classes and isinstance(module, classes)
    ]
    return sorted(found, key=lambda item: _natural(item[0]))


def _router_classes(model: torch.nn.Module) -> tuple[type, ...]:
    for module in model.modules():
        declared = getattr(type(module), "_can_record_outputs", None) or {}
        if "router_logits" in declared:
            recorders = declared["router_logits"]
            recorders = recorders if isinstance(recorders, list | tuple) else [recorders]
            return tuple(getattr(recorder, "target_class", recorder) for recorder in recorders)
    return ()


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key in which layer 10 comes after layer 9."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _sizes(name: str, router: torch.nn.Module) -> tuple[int, int]:
    weight = getattr(router, "weight", None)
    num_experts = getattr(router, "num_experts", None) or (weight.shape[0] if weight is not None else None)
    top_k = getattr(router, "top_k", None) or getattr(router, "num_experts_per_tok", None)
    if not isinstance(num_experts, int) or not isinstance(top_k, int):
        raise ConfigError(
            f"{name} ({type(router).__name__}) names no number of experts or of choices; write "
            "trainer.router_replay = false"
        )
    return num_experts, top_k


def load_imbalance(ids: torch.Tensor, num_experts: int) -> float:
    """Largest share of any expert over the mean share, minus one, worst layer: 0 is perfect balance.

    `ids` [T, layers, k].
    """
    worst = 0.0
    for layer in range(ids.shape[1]):
        counts = torch.bincount(ids[:, layer].reshape(-1), minlength=num_experts).float()
        worst = max(worst, float(counts.max() / counts.mean().clamp(min=1e-9)) - 1.0)
    return worst
