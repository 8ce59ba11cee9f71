"""Router replay over families: same ids give the same values, others change them, the gate still learns."""

from __future__ import annotations

import pytest
import torch

from moorage.core.errors import ConfigError
from moorage.trainer.attention import implementation_name, make_layout
from moorage.trainer.model import TrainedModel
from moorage.trainer.router_replay import RouterReplay, find_routers, load_imbalance
from moorage.trainer.world import World
from tests.unit.trainer.models import gradients, make_module

MOE_FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3"]
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
def test_other_choices_change_the_values_and_reach_the_gate(family: str) -> None:
    model = _model(family)
    ids = _record(model)
    other = (ids + 1) % model.replay.num_experts
    replayed = _forward(model, other)
    assert (replayed - _forward(model)).abs().max() > 1e-3
    found = gradients(model.module, replayed.log_softmax(-1)[:, 3].sum())
    for name, router in find_routers(model.module):
        del router
        gates = [grad for key, grad in found.items() if key.startswith(name)]
        assert any(float(grad.abs().max()) > 0 for grad in gates), name
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
        for _, router in find_routers(model.module):
            router.weight.copy_(torch.randn_like(router.weight))
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
    names = [name for name, _ in find_routers(AutoModelForCausalLM.from_config(config))]
    assert [int(name.split(".")[2]) for name in names] == list(range(12))


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [((14, 3, 2), 0, "2 routers"), ((14, 2, 3), 0, "choose 2"), ((14, 2, 2), 8, "expert 8 of 8")],
)
def test_rows_that_do_not_fit_the_model_are_refused(shape: tuple, value: int, message: str) -> None:
    model = _model("qwen3_moe")
    with pytest.raises(ConfigError, match=message):
        _forward(model, torch.full(shape, value))


def test_a_dense_model_has_nothing_to_replay() -> None:
    with pytest.raises(ConfigError, match="router_replay = false"):
        RouterReplay(make_module("qwen3"))


def test_a_router_without_one_top_k_call_fails_loudly() -> None:
    model = _model("qwen3_moe")
    router = find_routers(model.module)[0][1]
    inner = type(router).forward

    def silent(hidden: torch.Tensor):
        return inner(router, hidden[:0])

    model.replay.close()
    router.forward = silent
    model.replay._interpose(0, "router", router)
    with pytest.raises(ConfigError, match="top-k calls instead of one"):
        _forward(model, torch.zeros(14, 2, 2, dtype=torch.long))


def test_closing_gives_the_routers_back() -> None:
    model = _model("olmoe")
    model.replay.close()
    assert all("forward" not in vars(router) for _, router in find_routers(model.module))


def test_imbalance_is_zero_when_every_expert_gets_the_same() -> None:
    even = torch.arange(8).repeat(4).reshape(16, 1, 2)
    assert load_imbalance(even, 8) == pytest.approx(0.0)
    assert load_imbalance(torch.zeros(16, 1, 2, dtype=torch.long), 8) == pytest.approx(7.0)
