from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moorage.config.base import make_config
from moorage.config.derive import derive
from moorage.config.engine import InferenceConfig
from moorage.config.limits import engine_conflicts
from moorage.config.model import is_mixture_of_experts
from moorage.config.run import ProcessFacts, RunConfig
from moorage.core.errors import ConfigError
from moorage.engine.launch import LaunchLine, make_launch_line

EXPECTED = Path(__file__).parent / "launch_lines"
FACTS = ProcessFacts(run_dir="runs/x", run_id="x", max_steps=5, seq_len=4096)


def make_run(
    *, sampling: dict[str, Any] | None = None, inference: dict[str, Any] | None = None, **changes: Any
) -> RunConfig:
    source = {"env": {"taskset": {"id": "moorage.tasksets.reverse_text"}}}
    data = {
        "max_steps": 5,
        "seq_len": 4096,
        "model": {"path": "/models/policy", "name": "policy"},
        "inference": {"backend": "vllm", "python": "/venv/bin/python", **(inference or {})},
        "orchestrator": {"train": [source], "sampling": sampling or {}, **changes.pop("orchestrator", {})},
        **changes,
    }
    return make_config(RunConfig, data)


def launch(run: RunConfig, *, is_moe: bool = False, on_cpu: bool = False) -> LaunchLine:
    """The line of a run's first engine, by the way every run takes."""
    engine = derive(run, FACTS, engine_ports=[8000], is_moe=is_moe).inference[0]
    return make_launch_line(engine.inference, engine.model, port=8000, is_moe=is_moe, on_cpu=on_cpu)


def show(line: LaunchLine) -> str:
    """One flag with its value a line, the environment first."""
    text = "".join(f"{key}={value}\n" for key, value in {**line.defaults, **line.env}.items())
    for arg in line.argv:
        text += (
            f"\n{arg}" if arg.startswith("-") or not text.rsplit("\n", 1)[-1].startswith("--") else f" {arg}"
        )
    return text + "\n"


MOE = {
    "trainer": {"loss": {"head_k": 128}},
    "sampling": {"top_k": 256, "top_p": 0.95},
    "inference": {
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "data_parallel_size": 4,
        "max_num_seqs": 256,
    },
}


@pytest.mark.parametrize(
    ("name", "run", "facts"),
    [
        ("dense", {}, {}),
        (
            "dense_bfloat16",
            {"inference": {"dtype": "bfloat16", "seed": 7, "enable_prefix_caching": False}},
            {},
        ),
        (
            "dense_on_cpu",
            {"inference": {"device": "cpu", "extra_args": ["--block-size", "32"]}},
            {"on_cpu": True},
        ),
        ("moe_without_replay", {"trainer": {"router_replay": False}}, {"is_moe": True}),
        ("moe_routing_masks_and_head_128", MOE, {"is_moe": True}),
    ],
)
def test_the_launch_line_equals_the_one_on_record(
    name: str, run: dict[str, Any], facts: dict[str, Any]
) -> None:
    path = EXPECTED / f"{name}.txt"
    assert show(launch(make_run(**run), **facts)) == path.read_text(), f"see {path}"


def test_without_a_python_the_program_on_the_path_is_run() -> None:
    line = launch(make_run(inference={"python": None}))
    assert line.argv[:2] == ("vllm", "serve")


@pytest.mark.parametrize(
    ("run", "is_moe", "reason"),
    [
        ({"sampling": {"top_p": 0.9}}, False, "without top_k > 0 and temperature > 0 \\(top_k is 0"),
        ({"sampling": {"top_k": 20, "temperature": 0.0}}, False, "temperature 0\\)"),
        ({"sampling": {"top_k": 20}, "inference": {"sampling_mask": False}}, False, "could not be compared"),
        ({"inference": {"routed_experts": True}}, False, "the model has no experts"),
        ({"trainer": {"router_replay": True}}, False, "router_replay is on, but the model has no experts"),
        ({"inference": {"routed_experts": False}}, True, "router_replay needs inference.routed_experts"),
        ({"inference": {"enable_prefix_caching": False}}, True, "only with inference.enable_prefix_caching"),
        (
            {"inference": {"extra_args": ["--pipeline-parallel-size", "2"]}},
            True,
            "refuses --pipeline-parallel",
        ),
        ({"inference": {"extra_args": ["--kv-transfer-config={}"]}}, True, "refuses --kv-transfer-config"),
        ({"inference": {"device": "cpu"}}, True, "on a CPU returns neither routed experts nor"),
        ({"inference": {"device": "cuda:1"}}, False, "set CUDA_VISIBLE_DEVICES"),
        ({"inference": {"num_threads": 4}}, False, "num_threads has no effect on vLLM"),
        ({"inference": {"extra_args": ["--port", "1"]}}, False, "--port is set by inference.port"),
        (
            {"inference": {"extra_args": ["--max_logprobs=5"]}},
            False,
            "--max-logprobs is set by inference.head_k",
        ),
        ({"inference": {"extra_args": ["--logprobs-mode=raw"]}}, False, "--logprobs-mode is fixed"),
        ({"model": {"path": "m", "dtype": "float64"}}, False, "no engine computes in float64"),
        (
            {"inference": {"extra_args": ["--logits-processors", "a"]}, "sampling": {"top_k": 9}},
            False,
            "refuses --logits-processors together with sampling masks",
        ),
        ({"trainer": {"loss": {"head_k": 8}}, "inference": {"head_k": 4}}, False, "inference.head_k only 4"),
        (
            {"inference": {"backend": "builtin"}},
            False,
            "inference.python has no effect on the built-in engine",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    run: dict[str, Any], is_moe: bool, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        derive(make_run(**run), FACTS, engine_ports=[8000], is_moe=is_moe)


def test_a_greedy_eval_beside_truncated_training_is_refused_by_its_name() -> None:
    sources = [{"env": {"taskset": {"id": "moorage.tasksets.arithmetic"}}, "name": "sums"}]
    run = make_run(
        sampling={"top_k": 20},
        orchestrator={"eval": {"sources": sources, "sampling": {"temperature": 0.0}}},
    )
    with pytest.raises(ValueError, match=r"eval source 'sums': with sampling masks vLLM refuses"):
        derive(run, FACTS, engine_ports=[8000], is_moe=False)
    builtin = run.model_copy(update={"inference": InferenceConfig()})
    derive(builtin, FACTS, engine_ports=[8000], is_moe=False)


def test_an_engine_started_by_hand_is_refused_alike() -> None:
    run = make_run()
    engine = InferenceConfig(backend="vllm", routed_experts=True)
    assert engine_conflicts(engine, is_moe=True) == []
    with pytest.raises(ConfigError, match="no experts"):
        make_launch_line(engine, run.model, port=1, is_moe=False)


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({"num_experts": 8}, True),
        ({"num_local_experts": 8}, True),
        ({"text_config": {"n_routed_experts": 64}}, True),
        ({"num_experts": 1}, False),
        ({"num_experts": None}, False),
        ({}, False),
    ],
)
def test_a_mixture_of_experts_is_told_by_its_config(described: dict[str, Any], expected: bool) -> None:
    assert is_mixture_of_experts(described) is expected


def test_replicas_draw_from_seeds_of_their_own() -> None:
    run = make_run(seed=5, inference={"replicas": 2})
    seeds = [e.inference.seed for e in derive(run, FACTS, engine_ports=[1, 2], is_moe=False).inference]
    assert seeds == [5, 6]
