"""Record what a real vLLM answers, as examples for the tests: tests/data/vllm_replies/*.json.

Usage: python scripts/record_vllm_replies.py URL MODEL_FOLDER [FOLDER]

URL: a vLLM that serves the dense starter model in MODEL_FOLDER as `policy` with the launch line of
docs/vllm.md and `--max-model-len 256`. Each file holds the call, the status and the body as they were.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PROMPT = [3, 57, 76, 93, 76, 89, 90, 76, 33, 7, 72, 73, 74, 75, 1, 4]


class Engine:
    """One vLLM, asked without a session."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(
        self, route: str, body: Any = None, *, method: str = "POST", request_id: str = ""
    ) -> dict[str, Any]:
        """The call and its answer; the body as text when it is not JSON."""
        headers = {"Content-Type": "application/json"} | ({"X-Request-Id": request_id} if request_id else {})
        data = None if method == "GET" else json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(self.url + route, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=60) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            content = json.loads(text)
        except json.JSONDecodeError:
            content = text
        return {"call": {"method": method, "route": route, "body": body}, "status": status, "body": content}

    def generate(self, name: str, token_ids: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
        """One generate call with a request id of its own."""
        body = {"model": "policy", "token_ids": token_ids or PROMPT, "sampling_params": sampling}
        return self.ask("/inference/v1/generate", body, request_id=name)


def record(engine: Engine, weights: str) -> dict[str, dict[str, Any]]:
    """All examples by name."""
    plain = {"logprobs": 1, "detokenize": False, "max_tokens": 4}
    found = {
        "sampled": engine.generate("sampled", **plain, seed=1),
        "greedy": engine.generate("greedy", **plain, temperature=0.0),
        "head_4": engine.generate("head_4", **{**plain, "logprobs": 4}, seed=3, flat_logprobs=True),
        "truncated_head_4": engine.generate("truncated", **{**plain, "logprobs": 4}, seed=2, top_k=2),
        "stop_token": engine.generate(
            "stop", **{**plain, "max_tokens": 40}, seed=5, stop_token_ids=list(range(2, 128))
        ),
        "end_of_text": _ended(engine),
        "length_of_model": engine.generate(
            "length", [7] * 254, **{**plain, "max_tokens": 9}, seed=1, ignore_eos=True
        ),
        "too_long": engine.generate("too_long", [7] * 256, **plain),
        "out_of_vocabulary": engine.generate("vocabulary", [4096], **plain),
        "head_too_large": engine.generate("head", **{**plain, "logprobs": 500}),
        "models": engine.ask("/v1/models", method="GET"),
        "health": engine.ask("/health", method="GET"),
        "metrics": engine.ask("/metrics", method="GET"),
        "no_route": engine.ask("/no/such/route", method="GET"),
    }
    unknown = {"model": "nobody", "token_ids": PROMPT, "sampling_params": plain}
    found["unknown_model"] = engine.ask("/inference/v1/generate", unknown)
    found["metrics"]["body"] = "\n".join(
        line
        for line in found["metrics"]["body"].splitlines()
        if "num_requests" in line or "kv_cache_usage" in line
    )
    return found | _update(engine, weights) | _abort(engine)


def _ended(engine: Engine) -> dict[str, Any]:
    """The shortest of some completions that end with the end-of-text token."""
    tries = [
        engine.generate("end", logprobs=1, detokenize=False, max_tokens=60, seed=seed) for seed in range(40)
    ]
    ended = [t for t in tries if t["body"]["choices"][0]["finish_reason"] == "stop"]
    return min(ended, key=lambda t: t["body"]["usage"]["completion_tokens"])


def _update(engine: Engine, weights: str) -> dict[str, dict[str, Any]]:
    """A request over which the weights are loaded again, and the control answers on the way."""
    engine.ask("/update_weight_version", {"new_version": "3"})
    held: list[dict[str, Any]] = []
    long = {"logprobs": 1, "detokenize": False, "max_tokens": 200, "ignore_eos": True, "seed": 1}
    thread = threading.Thread(target=lambda: held.append(engine.generate("spanning", **long)))
    thread.start()
    time.sleep(0.3)
    answers = {
        "pause": engine.ask("/pause?mode=keep&clear_cache=true"),
        "is_paused": engine.ask("/is_paused", method="GET"),
        "reload": engine.ask(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": weights}}
        ),
        "label": engine.ask("/update_weight_version", {"new_version": "4"}),
        "resume": engine.ask("/resume"),
        "weight_info": engine.ask("/weight_info", method="GET"),
    }
    thread.join()
    answers["reload"]["call"]["body"]["kwargs"]["weights_path"] = "FOLDER"
    return answers | {"spanning_an_update": held[0]}


def _abort(engine: Engine) -> dict[str, dict[str, Any]]:
    held: list[dict[str, Any]] = []
    long = {"logprobs": 1, "detokenize": False, "max_tokens": 200, "ignore_eos": True}
    thread = threading.Thread(target=lambda: held.append(engine.generate("aborted", **long)))
    thread.start()
    time.sleep(0.1)
    answer = engine.ask("/abort_requests", {"request_ids": ["generate-tokens-aborted"]})
    thread.join()
    return {"abort": answer, "aborted": held[0]}


def main() -> None:
    url, weights = sys.argv[1:3]
    folder = Path(sys.argv[3] if len(sys.argv) > 3 else "tests/data/vllm_replies")
    folder.mkdir(parents=True, exist_ok=True)
    for name, example in record(Engine(url), weights).items():
        text = json.dumps(example, separators=(",", ":")).replace(weights, "FOLDER")
        (folder / f"{name}.json").write_text(text + "\n")
        print(f"{name}: {example['status']}, {len(text)} characters")


if __name__ == "__main__":
    main()
