"""The routers of a mixture-of-experts model of any transformers family, and the one choice that each makes.

The engine records the choices, the trainer answers them with recorded ones; both go through `route`.

Promises:
- routers are found through what the model class declares for router logits: no table of models;
- a router must take exactly one `torch.topk` with its own k over [tokens, experts]; a family that chooses in
  another way fails at once and loudly;
- routing rows are [tokens, hidden layers, k] over **all** hidden layers, as vLLM gives them: what a router
  chose lies at the number of its layer, layers without a router hold 0 (`to_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moorage.core.errors import ConfigError

_TOPK = (torch.topk, torch.Tensor.topk)
_REMEDY = "set trainer.router_replay = false, and leave inference.routed_experts out"


@dataclass(frozen=True)
class Router:
    """A router module, in hidden layer `layer` (from 0), that chooses `k` of `num_experts` per token."""

    name: str
    module: nn.Module
    layer: int
    num_experts: int
    k: int


def find_routers(model: Any) -> list[Router]:
    """The routers of a transformers model in layer order; none in a dense one.

    Raises ConfigError when routing rows cannot describe them: no sizes, different sizes, two in one layer.
    """
    classes = _router_classes(model)
    found = [
        _make_router(name, module)
        for name, module in model.named_modules()
        if classes and isinstance(module, classes)
    ]
    found.sort(key=lambda router: router.layer)
    for before, router in pairwise(found):
        if (router.num_experts, router.k) != (before.num_experts, before.k):
            raise ConfigError(
                f"{router.name} chooses {router.k} of {router.num_experts} experts, {before.name} {before.k} "
                f"of {before.num_experts}: routers of different sizes are not supported; {_REMEDY}"
            )
        if router.layer == before.layer:
            raise ConfigError(f"{before.name} and {router.name} are routers of one layer; {_REMEDY}")
    num_layers = count_layers(model)
    if found and found[-1].layer >= num_layers:
        raise ConfigError(f"{found[-1].name} lies beyond the {num_layers} hidden layers; {_REMEDY}")
    return found


def count_layers(model: Any) -> int:
    """Number of hidden layers, with and without routers: the length of the layer axis of routing rows."""
    return int(model.config.get_text_config().num_hidden_layers)


def route(
    router: Router, run: Callable[..., Any], args: Any, kwargs: Any, forced: torch.Tensor | None = None
) -> tuple[Any, torch.Tensor]:
    """`run(*args, **kwargs)`, the router's forward; its output, and the experts [tokens, k] it chose.

    With `forced` [tokens, k] the one top-k is answered by these ids and the router's **own** scores at them,
    but for rows that hold -1. Raises ConfigError when there is not exactly one.
    """
    hidden = args[0] if args else next(iter(kwargs.values()))
    mode = _OneTopK(router, hidden.numel() // hidden.shape[-1], forced)
    with mode:
        output = run(*args, **kwargs)
    if len(mode.seen) != 1:
        raise ConfigError(
            f"router {router.name} ({type(router.module).__name__}) made {len(mode.seen)} top-k calls "
            f"instead of one: its choices can be neither captured nor replayed; {_REMEDY}"
        )
    return output, mode.seen[0]


def to_rows(routers: Sequence[Router], chosen: Sequence[torch.Tensor], num_layers: int) -> torch.Tensor:
    """Routing rows [tokens, num_layers, k] of what each router chose [tokens, k]."""
    stacked = torch.stack(list(chosen), dim=1)
    if len(routers) == num_layers:
        return stacked
    rows = stacked.new_zeros(stacked.shape[0], num_layers, stacked.shape[2])
    rows[:, [router.layer for router in routers]] = stacked
    return rows


class _OneTopK(TorchFunctionMode):
    """Sees, and with `forced` answers, the router's top-k calls over [tokens, experts]."""

    def __init__(self, router: Router, num_tokens: int, forced: torch.Tensor | None) -> None:
        super().__init__()
        self._shape = (num_tokens, router.num_experts)
        self._k = router.k
        self._forced = forced
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _TOPK:
            return result
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        # Grouped routers also take top-k over groups (3-D, or another width): those stay their own.
        if tuple(scores.shape) != self._shape or k != self._k:
            return result
        if self._forced is not None:
            ids = self._forced.to(result.indices.device, torch.int64)
            ids = torch.where((ids < 0).any(-1, keepdim=True), result.indices, ids)
            result = torch.return_types.topk((scores.gather(-1, ids), ids))
        self.seen.append(result.indices.detach())
        return result


def _router_classes(model: nn.Module) -> tuple[type, ...]:
    """What the model declares for its router logits."""
    for module in model.modules():
        declared = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits")
        if declared is not None:
            recorders = declared if isinstance(declared, list | tuple) else [declared]
            return tuple(getattr(recorder, "target_class", recorder) for recorder in recorders)
    return ()


def _make_router(name: str, module: nn.Module) -> Router:
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    weight = getattr(module, "weight", None)
    num_experts = _first(module, "num_experts", "n_routed_experts")
    if num_experts is None and weight is not None:
        num_experts = weight.shape[0]
    k = _first(module, "top_k", "num_experts_per_tok")
    if not numbers or not num_experts or not k:
        raise ConfigError(
            f"router {name} ({type(module).__name__}) does not say its layer, its number of experts and how "
            f"many it chooses; {_REMEDY}"
        )
    return Router(name, module, numbers[0], int(num_experts), int(k))


def _first(module: nn.Module, *names: str) -> int | None:
    return next((getattr(module, name) for name in names if getattr(module, name, None)), None)
