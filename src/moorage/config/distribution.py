"""Which sampling parameters may reach an engine beside a train source's own sampling block. Pure.

The trainer computes the log-probability of a sampled token from the logits, the source's `temperature`, and
the kept sets recorded for its `top_p`, `top_k` and `min_p`. Anything else that shapes the distribution
(penalties, biases, grammars, `min_tokens`, which forbids stop tokens before normalising) would spoil every
importance ratio without a sign. Two side ways lead to the engine: `sampling.extra_body`, and the `sampling`
of an agent in the env block, which verifiers merges over the run's. For training both may carry only what is
known to leave the distribution alone; for measuring they may carry anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

OWNED = frozenset({"temperature", "top_p", "top_k", "min_p"})
"""Parameters that the trainer follows, when they stand in the source's sampling block."""

HARMLESS = frozenset(
    {
        "cache_salt",
        "detokenize",
        "ignore_eos",
        "include_stop_str_in_output",
        "max_completion_tokens",
        "max_tokens",
        "reasoning_effort",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
    }
)
"""Parameters that end or label a completion and leave the distribution of its tokens alone."""


def body_refusals(extra_body: Mapping[str, Any]) -> list[str]:
    """Why a train source cannot carry this `sampling.extra_body`: one reason per key."""
    return [_reason(f"sampling.extra_body.{key}", key) for key in _shaping(extra_body)]


def agent_refusals(agents: Mapping[str, Any], policy: str | None = None) -> list[str]:
    """Why agents of a train source cannot have the sampling of their own that they have, one reason per key.

    `agents`: tables by name, as an env block or verifiers' resolved config holds them; what is no agent's is
    passed over. `policy`: the name of the trained model. An agent with a `client` or another `model` of its
    own is never trained and may have any.
    """
    found = []
    for name, agent in agents.items():
        if (
            isinstance(agent, Mapping)
            and agent.get("client") is None
            and agent.get("model") in (None, policy)
        ):
            found += [_reason(f"env.{name}.sampling.{key}", key) for key in _shaping(agent.get("sampling"))]
    return found


def _shaping(parameters: Any) -> Iterator[str]:
    """The keys that (may) shape the distribution. verifiers lifts what `extra_body` holds."""
    if not isinstance(parameters, Mapping):
        return
    for key, value in sorted(parameters.items()):
        if key == "extra_body":
            yield from _shaping(value)
        elif key not in HARMLESS:
            yield key


def _reason(where: str, key: str) -> str:
    if key in OWNED:
        return (
            f"{where} would change what is sampled and not what the trainer computes with; set `{key}` in "
            "the source's sampling block instead"
        )
    return (
        f"{where} may change the distribution that is sampled from, and the trainer knows only the sampling "
        "block's temperature, top_p, top_k and min_p; leave it out, or keep it for eval sources"
    )
