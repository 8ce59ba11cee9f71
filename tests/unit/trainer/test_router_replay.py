"""Router replay over families: same ids give the same values, others change them, the gate still learns."""

from __future__ import annotations

import pytest
import torch

from moorage.core.errors import ConfigError
from moorage.engine.builtin.routers import find_routers
from moorage.engine.builtin.routing import RouterTap
from moorage.trainer.attention import implementation_name, make_layout
from moorage.trainer.model import TrainedModel
from moorage.trainer.router_replay import RouterReplay, load_imbalance
from moorage.trainer.world import World
from tests.unit.trainer.models import gradients, make_module

MOE_FAMILIES = ["qwen3_moe", "qwen3_moe_dense", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3"]
LENGTHS = (9, 5)


def _model(family: str, **options) -> TrainedModel:
    module = make_module(family, **options)
    return TrainedModel(module, World(0, 1, torch.device("cpu")), RouterReplay(module))


def _forward(model: TrainedModel, ids: torch.Tensor | None = None) -> torch.Tensor:
    layout = make_layout(LENGTHS)
    row = torch.randint(2, 96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(2))
    with model.row(layout, ids):
        return model.logits(row, layout, torch.arange(len(row)))


def _record(model: TrainedModel) -> torch.Tensor:
    assert model.replay is not None
    with model.replay.recording():
        _forward(model)
    return model.replay.recorded()


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_replaying_the_routers_own_choices_changes_nothing(family: str) -> None:
    model = _model(family)
    ids = _record(model)
    plain = _forward(model)
    expected = gradients(model.module, plain.log_softmax(-1)[:, 3].sum())
    replayed = _forward(model, ids)
    assert torch.equal(replayed, plain)
    layout = make_layout(LENGTHS)
    with model.row(layout, ids):
        actual = gradients(model.module, replayed.log_softmax(-1)[:, 3].sum())
    assert all(torch.equal(actual[name], grad) for name, grad in expected.items())


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_engines_rows_over_all_layers_are_replayed_layer_by_layer(family: str) -> None:
    engine, trainer = make_module(family), _model(family)
    tap = RouterTap(engine)
    row = torch.randint(2, 96, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        engine.set_attn_implementation("sdpa" if engine._supports_sdpa else "eager")
        engine(input_ids=row[None], use_cache=False)
    rows = tap.take()  # of other tokens than the trainer's: its own choices differ
    assert rows.shape == (len(row), engine.config.num_hidden_layers, 2)
    with torch.no_grad():
        own, _ = _record(trainer), _forward(trainer, rows)
    assert torch.equal(trainer.replay.recorded(), rows)
    assert not torch.equal(own, rows)
    dense = [layer for layer in range(rows.shape[1]) if layer not in trainer.replay.layers]
    assert not rows[:, dense].any()
    assert bool(dense) == (family in ("qwen3_moe_dense", "deepseek_v3"))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_other_choices_change_the_values_and_reach_the_gate(family: str) -> None:
    model = _model(family)
    ids = _record(model)
    other = torch.zeros_like(ids)
    other[:, model.replay.layers] = (ids[:, model.replay.layers] + 1) % model.replay.num_experts
    replayed = _forward(model, other)
    assert (replayed - _forward(model)).abs().max() > 1e-3
    found = gradients(model.module, replayed.log_softmax(-1)[:, 3].sum())
    for router in model.replay.routers:
        gates = [grad for key, grad in found.items() if key.startswith(router.name)]
        assert any(float(grad.abs().max()) > 0 for grad in gates), router.name
    assert torch.equal(model.replay.recorded().sort(-1).values, other.sort(-1).values)


def test_a_row_of_minus_one_leaves_that_token_to_the_router() -> None:
    model = _model("qwen3_moe")
    ids = _record(model)
    forced = torch.full_like(ids, -1)
    forced[3] = (ids[3] + 1) % 8
    chosen = ids.clone()
    _forward(model, forced)
    chosen[3] = forced[3]
    replayed = model.replay.recorded()
    assert torch.equal(replayed[:, 0], chosen[:, 0])  # later layers see another hidden state at token 3
    assert torch.equal(replayed[:3], ids[:3])


def test_kept_choices_survive_a_change_of_the_gate() -> None:
    model = _model("mixtral")
    ids = _record(model)
    with torch.no_grad():
        for router in model.replay.routers:
            router.module.weight.copy_(torch.randn_like(router.module.weight))
    _forward(model, ids)
    assert torch.equal(model.replay.recorded(), ids)


def test_ids_above_255_are_replayed() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.unit.trainer.models import MOE

    config = AutoConfig.for_model("qwen3_moe", **{**MOE, "num_experts": 300, "moe_intermediate_size": 4})
    module = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation_name("packed_sdpa")
    ).eval()
    model = TrainedModel(module, World(0, 1, torch.device("cpu")), RouterReplay(module))
    ids = torch.tensor([299, 257]).expand(sum(LENGTHS), 2, 2)
    _forward(model, ids)
    assert torch.equal(model.replay.recorded(), ids)


def test_layers_are_in_model_order_beyond_ten() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.unit.trainer.models import MOE

    config = AutoConfig.for_model("qwen3_moe", **{**MOE, "num_hidden_layers": 12})
    routers = find_routers(AutoModelForCausalLM.from_config(config))
    assert [router.layer for router in routers] == list(range(12))
    assert [int(router.name.split(".")[2]) for router in routers] == list(range(12))


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        (
            (14, 2, 2),
            0,
            r"3 hidden layers \(2 with a router\)",
        ),  # one column per router is not the engine's form
        ((14, 4, 2), 0, "3 hidden layers"),
        ((14, 3, 3), 0, "chooses 2"),
        ((14, 3, 2), 8, "expert 8 of 8"),
    ],
)
def test_rows_that_do_not_fit_the_model_are_refused(shape: tuple, value: int, message: str) -> None:
    model = _model("qwen3_moe_dense")
    with pytest.raises(ConfigError, match=message):
        _forward(model, torch.full(shape, value))


def test_a_dense_model_has_nothing_to_replay() -> None:
    with pytest.raises(ConfigError, match="router_replay = false"):
        RouterReplay(make_module("qwen3"))


def test_a_router_without_one_top_k_call_fails_loudly() -> None:
    module = make_module("qwen3_moe")
    router = find_routers(module)[0].module
    inner = type(router).forward

    def silent(hidden: torch.Tensor):
        return inner(router, hidden[:0])

    router.forward = silent
    model = TrainedModel(module, World(0, 1, torch.device("cpu")), RouterReplay(module))
    with pytest.raises(ConfigError, match=r"0 top-k calls instead of one.*router_replay = false"):
        _forward(model, torch.zeros(14, 2, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 4}, "2 of 4 experts, .* 2 of 8: routers of different sizes"),
        ({"num_experts": None, "weight": None}, "does not say"),
    ],
)
def test_routers_that_rows_cannot_describe_are_refused(change: dict, message: str) -> None:
    module = make_module("qwen3_moe")
    for name, value in change.items():
        setattr(find_routers(module)[1].module, name, value)
    with pytest.raises(ConfigError, match=message):
        find_routers(module)


def test_closing_gives_the_routers_back() -> None:
    model = _model("olmoe")
    model.replay.close()
    assert all("forward" not in vars(router.module) for router in find_routers(model.module))


def test_imbalance_is_zero_when_every_expert_gets_the_same() -> None:
    even = torch.arange(8).repeat(4).reshape(16, 1, 2)
    assert load_imbalance(even, 8) == pytest.approx(0.0)
    assert load_imbalance(torch.zeros(16, 1, 2, dtype=torch.long), 8) == pytest.approx(7.0)


def test_imbalance_is_measured_over_layers_with_a_router() -> None:
    model = _model("qwen3_moe_dense")
    ids = torch.zeros(16, 3, 2, dtype=torch.long)
    ids[:, 1:] = torch.arange(8).repeat(4).reshape(16, 1, 2)
    _forward(model, ids[: sum(LENGTHS)])
    assert model.replay.imbalance() < 1.0  # the zeros of the dense layer would give 7
