"""The served model: any transformers causal LM whose attention the slot cache can carry.

`Runner` feeds tokens and gives next-token logits; it owns weights, cache and router tap. Promises:
- `check()` compares the cached path with a plain forward of the same model, so a family that the cache cannot
  carry is refused at start and not served wrongly;
- `reload()` changes all weights or none;
- a sequence's logits do not depend on what else is in the batch (beyond float rounding).
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from moorage.core.errors import ConfigError
from moorage.engine.builtin import attention
from moorage.engine.builtin.cache import Layout, SlotCache
from moorage.engine.builtin.routing import RouterTap
from moorage.engine.builtin.weights import model_tensors, read_weights

KEY_ROUND = 16
"""Keys read per row are rounded up to a multiple of this, so that kernels see few shapes."""

_NONE = np.zeros(0, dtype=np.int64)
_CARRIED_LAYERS = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class Runner:
    """One forward after another, for sequences in slots."""

    def __init__(self, model: PreTrainedModel, *, routed_experts: bool = False) -> None:
        self.model = model.eval()
        self.device = model.device
        text = model.config.get_text_config()
        check_config(text)
        self.vocab_size = int(text.vocab_size)
        self.num_layers = int(text.num_hidden_layers)
        self.max_positions = getattr(text, "max_position_embeddings", None)
        self.window = getattr(text, "sliding_window", None)
        attention.register()
        model.set_attn_implementation(attention.NAME)
        self.router = RouterTap(model) if routed_experts else None
        row_shape = (self.num_layers, self.router.k) if self.router else None
        row_dtype = torch.uint8 if self.router and self.router.num_experts <= 256 else torch.int16
        self.cache = SlotCache(self.num_layers, row_shape, row_dtype)
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._picked: torch.Tensor | None = None
        head = model.get_output_embeddings()
        if head is None:
            raise ConfigError(
                f"{type(model).__name__} has no output embedding; it is not a causal language model"
            )
        head.register_forward_pre_hook(self._pick_rows)

    def _pick_rows(self, _: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hook before the output embedding: only the rows whose next token is wanted."""
        return None if self._picked is None else (args[0][:, self._picked], *args[1:])

    def step(
        self, last: np.ndarray, positions: np.ndarray, sequences: list[np.ndarray], cached: list[int]
    ) -> torch.Tensor:
        """One forward: a token for each running slot, and the beginning of new sequences.

        `last` and `positions` (int64 [n]): the token of each of slots 0..n-1 and where it goes.
        sequences[i] is fed into slot n + i from token cached[i] on; what is before lies in the slot
        already. Returns logits [n + len(sequences), vocab] of the tokens that come next.
        """
        n = len(last)
        longest = int(positions.max()) + 1 if n else 0
        fed, counts, starts = _rectangle(sequences, cached)
        width = fed.shape[1]
        fed_keys = int(starts.max()) + width if sequences else 0
        self.cache.reserve(n + len(sequences), max(longest, fed_keys))
        fresh = not starts.any()
        layout = Layout(
            decode_at=torch.from_numpy(positions).to(self.device),
            decode_keys=self._round(longest),
            fed_at=torch.from_numpy(starts[:, None] + np.arange(width)).to(self.device),
            fed_keys=width if fresh else self._round(fed_keys),
            fresh=fresh,
            cache=self.cache,
        )
        ids = np.concatenate((last, fed.ravel())) if sequences else last
        if sequences:
            ends = n + np.arange(len(sequences)) * width + counts - 1
            self._picked = torch.from_numpy(np.concatenate((np.arange(n), ends))).to(self.device)
        try:
            return self._forward(torch.from_numpy(ids).to(self.device), layout)
        finally:
            self._picked = None

    def _forward(self, ids: torch.Tensor, layout: Layout) -> torch.Tensor:
        self.cache.begin(layout)
        out = self.model(
            input_ids=ids[None],
            position_ids=layout.positions,
            use_cache=True,
            layout=layout,
            return_dict=True,
            **{self._cache_name: self.cache},
        )
        if self.router is not None:
            self.cache.put_rows(self.router.take())
        return out.logits[0]

    def _round(self, num_keys: int) -> int:
        return min(self.cache.length, -(-num_keys // KEY_ROUND) * KEY_ROUND)

    def take_rows(self, slot: int, start: int, end: int) -> np.ndarray | None:
        """Routing rows [end - start, layers, k] of a slot; None without a router or before any forward."""
        if self.router is None or self.cache.rows is None:
            return None
        rows = self.cache.rows[slot, start:end].cpu().numpy()
        return rows.copy() if rows.dtype == np.uint8 else rows.astype(np.uint16)

    @torch.inference_mode()
    def reload(self, folder: Path) -> None:
        """Take the weights of `folder`. Raises EngineError and keeps the old ones when they do not fit."""
        new = read_weights(folder, self.model)
        for name, tensor in model_tensors(self.model).items():
            tensor.copy_(new[name])

    @torch.inference_mode()
    def check(self) -> None:
        """Compare prefill and decode with a plain forward. Raises ConfigError when they differ."""
        length = 24 if not self.window or self.window > 56 else self.window + 8
        tokens = (np.arange(length, dtype=np.int64) * 7919 + 3) % self.vocab_size
        half = length // 2
        try:
            steps = [self.step(_NONE, _NONE, [tokens[:half]], [0])]
            for at in range(half, length):
                steps.append(self.step(tokens[at : at + 1], np.array([at]), [], []))
            cached = torch.cat(steps).float().log_softmax(-1)
        except (TypeError, AttributeError, RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"the built-in engine cannot run {type(self.model).__name__} ({error!r}); "
                'use inference.backend = "vllm"'
            ) from error
        plain = self.plain_logprobs(tokens)[half - 1 :]
        error = float((cached - plain).abs().max())
        allowed = 1e-3 if self.model.dtype == torch.float32 else 0.5
        if not error <= allowed:
            raise ConfigError(
                f"the built-in engine computes {type(self.model).__name__} wrongly (log-probabilities differ "
                f'by {error:.3g} from a plain forward); use inference.backend = "vllm"'
            )

    @torch.inference_mode()
    def plain_logprobs(self, tokens: np.ndarray) -> torch.Tensor:
        """log_softmax of a plain forward (no cache, transformers' own attention), float32 [len, vocab]."""
        self.model.set_attn_implementation("sdpa")
        try:
            ids = torch.from_numpy(tokens).to(self.device)[None]
            return self.model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        finally:
            self.model.set_attn_implementation(attention.NAME)


def _rectangle(sequences: list[np.ndarray], cached: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens to feed, right-padded [rows, width]; how many are real; position of the first) per sequence."""
    starts = np.asarray(cached, dtype=np.int64)
    counts = np.asarray([len(sequence) for sequence in sequences], dtype=np.int64) - starts
    fed = np.zeros((len(sequences), int(counts.max()) if sequences else 0), dtype=np.int64)
    for row, (sequence, start) in enumerate(zip(sequences, cached, strict=True)):
        fed[row, : counts[row]] = sequence[start:]
    return fed, counts, starts


def check_config(config: Any) -> None:
    """Refuse what the slot cache cannot carry. Raises ConfigError naming it."""
    layers = set(getattr(config, "layer_types", None) or ()) - _CARRIED_LAYERS
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else "default"
    if layers:
        raise ConfigError(f"layer types {sorted(layers)} are not served by the built-in engine")
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(
            f"rope_type {kind!r} makes a sequence's values depend on its neighbours' length; the built-in "
            "engine does not serve it"
        )


def load_runner(path: str, *, device: str, dtype: str, routed_experts: bool = False) -> Runner:
    """The model of a Hugging Face folder. Raises ConfigError when it cannot be served."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path {path!r} holds no config.json; give a folder in Hugging Face layout")
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path {path!r} cannot be loaded: {error}") from error
    model.to(pick_device(device))  # type: ignore[arg-type]
    runner = Runner(model, routed_experts=routed_experts)
    runner.check()
    return runner


def pick_device(name: str) -> torch.device:
    """The device of a config value; `auto` is a CUDA device when there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"inference.device {name!r} is no torch device; write cpu, cuda or cuda:0"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"inference.device is {name!r} but torch sees no CUDA device; write cpu or auto")
    return device
