"""Which experts a mixture-of-experts model chose, for any transformers family.

The router class is what the model itself declares for `router_logits`. While a router's forward runs, calls
of `torch.topk` on [tokens, experts] with the router's k are seen, and the indices kept. A router must make
exactly one such call, so a family that chooses in another way fails at once and loudly, instead of
reporting wrong rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moorage.core.errors import ConfigError

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class _TopkTap(TorchFunctionMode):
    def __init__(self, num_experts: int, k: int, num_tokens: int) -> None:
        super().__init__()
        self._shape = (num_tokens, num_experts)
        self._k = k
        self.seen: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.topk or func is torch.Tensor.topk:
            scores = args[0] if args else kwargs["input"]
            k = args[1] if len(args) > 1 else kwargs["k"]
            if tuple(scores.shape) == self._shape and k == self._k:
                self.seen.append(out.indices)
        return out


class RouterTap:
    """Records the choices of every router of `model` during each forward.

    `take()` gives int64 [tokens, hidden layers, k] of the last forward; layers without a router hold 0.
    """

    def __init__(self, model: nn.Module, num_layers: int) -> None:
        self.num_layers = num_layers
        self.routers = find_routers(model)
        if not self.routers:
            raise ConfigError(
                "routed_experts is on but the model has no router; set inference.routed_experts = false"
            )
        sizes = {(router_size(name, module)) for name, module in self.routers}
        if len(sizes) > 1:
            raise ConfigError(f"routers of different sizes are not supported: {sorted(sizes)}")
        self.num_experts, self.k = sizes.pop()
        self._chosen: list[torch.Tensor | None] = [None] * len(self.routers)
        self._layers = [layer_of(name) for name, _ in self.routers]
        for index, (name, module) in enumerate(self.routers):
            module.forward = self._wrap(index, name, module.forward)  # type: ignore[method-assign]

    def _wrap(self, index: int, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else next(iter(kwargs.values()))
            tap = _TopkTap(self.num_experts, self.k, hidden.numel() // hidden.shape[-1])
            with tap:
                out = forward(*args, **kwargs)
            if len(tap.seen) != 1:
                raise ConfigError(
                    f"router {name} made {len(tap.seen)} top-k choices where one was expected; this family's "
                    "routing cannot be captured: set inference.routed_experts = false"
                )
            self._chosen[index] = tap.seen[0]
            return out

        return tapped

    def take(self) -> torch.Tensor:
        """The choices of the forward that just ran, and forget them."""
        chosen = [c for c in self._chosen if c is not None]
        assert len(chosen) == len(self.routers), "take() without a forward"
        self._chosen = [None] * len(self.routers)
        if self._layers == list(range(self.num_layers)):
            return torch.stack(chosen, dim=1)
        rows = chosen[0].new_zeros(chosen[0].shape[0], self.num_layers, self.k)
        rows[:, self._layers] = torch.stack(chosen, dim=1)
        return rows

    def close(self) -> None:
        """Give the routers their own forward back."""
        for _, module in self.routers:
            module.__dict__.pop("forward", None)


def find_routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of every router, in model order: the class that the model declares for router logits."""
    classes: tuple[type, ...] = ()
    for module in model.modules():
        declared = (getattr(type(module), "_can_record_outputs", None) or {}).get("router_logits")
        if declared is not None:
            items = declared if isinstance(declared, list | tuple) else [declared]
            classes = tuple(getattr(item, "target_class", item) for item in items)
            break
    return [
        (name, module) for name, module in model.named_modules() if classes and isinstance(module, classes)
    ]


def router_size(name: str, module: nn.Module) -> tuple[int, int]:
    """(experts, experts per token) of a router. Raises ConfigError when it does not say."""
    weight = getattr(module, "weight", None)
    experts = next(
        (getattr(module, key) for key in ("num_experts", "n_routed_experts") if hasattr(module, key)), None
    )
    experts = experts or (weight.shape[0] if weight is not None else None)
    k = next((getattr(module, key) for key in ("top_k", "num_experts_per_tok") if hasattr(module, key)), None)
    if not experts or not k:
        raise ConfigError(f"router {name} ({type(module).__name__}) does not say how many experts it chooses")
    return int(experts), int(k)


def layer_of(name: str) -> int:
    """Index of the hidden layer that a module belongs to."""
    found = _LAYER.search(name + ".")
    if found is None:
        raise ConfigError(f"router {name} lies in no numbered layer")
    return int(found.group(1))
