"""`/metrics`: the gauges and counters that clients read, under vLLM's names, as Prometheus text."""

from __future__ import annotations

from collections.abc import Mapping

from moorage.engine.builtin.service import Service


def render(service: Service) -> str:
    """The exposition text. Reads counts that the engine thread writes: each is exact, not all of one
    moment."""
    scheduler, totals = service.scheduler, service.scheduler.totals
    label = f'engine="0",model_name="{service.name}"'
    lines: list[str] = []

    def series(kind: str, name: str, text: str, values: Mapping[str, float]) -> None:
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{{{label}{extra}}} {float(value)}" for extra, value in values.items())

    series("gauge", "vllm:num_requests_running", "Requests being decoded.", {"": len(scheduler.running)})
    series(
        "gauge", "vllm:num_requests_waiting", "Requests that wait for a slot.", {"": len(scheduler.waiting)}
    )
    series(
        "gauge",
        "vllm:kv_cache_usage_perc",
        "Share of the cache in use, 0 to 1.",
        {"": scheduler.cache_share()},
    )
    counters = {
        "prompt_tokens": ("Prompt tokens fed or taken from stored prefixes.", totals.prompt_tokens),
        "prompt_tokens_cached": ("Prompt tokens taken from stored prefixes.", totals.cached_tokens),
        "generation_tokens": ("Tokens drawn.", totals.generation_tokens),
        "num_preemptions": ("Requests whose cache was dropped and computed again.", totals.preemptions),
        "prefix_cache_queries": ("Prompt tokens looked up among stored prefixes.", totals.prompt_tokens),
        "prefix_cache_hits": ("Prompt tokens found among stored prefixes.", totals.cached_tokens),
    }
    for name, (text, value) in counters.items():
        series("counter", f"vllm:{name}_total", text, {"": value})
    ended = {f',finished_reason="{reason}"': count for reason, count in service.counts.items()}
    series("counter", "vllm:request_success_total", "Requests that ended.", ended)
    return "\n".join(lines) + "\n"
