from __future__ import annotations

from moorage.orchestrator.tables import choose_episodes, sample_rows
from tests.unit.orchestrator.scripted import Says, make_episode, make_task


def test_each_branch_of_each_agent_has_a_row():
    episode = make_episode(
        [Says(agent="solver", branches=2, reward=0.5), Says(agent="judge")], make_task(3), None
    )
    rows = sample_rows([episode], 7, 10)
    assert [(row["agent"], row["branch_idx"], row["reward"]) for row in rows] == [
        ("solver", 0, 0.5),
        ("solver", 1, 0.5),
        ("judge", 0, 1.0),
    ]
    assert rows[0]["messages"] == "[user] task 3\n[assistant] answer"
    assert (rows[0]["step"], rows[0]["env"], rows[0]["task"]) == (7, "scripted", "k3")
    assert len({tuple(row) for row in rows}) == 1


def test_rows_and_episodes_are_bounded_and_chosen_by_the_seed():
    episodes = [make_episode([Says(branches=3)], make_task(at), None) for at in range(9)]
    assert len(sample_rows(episodes, 1, 4)) == 4
    chosen = choose_episodes(episodes, 3, "0/1")
    assert len(chosen) == 3
    assert [each.id for each in choose_episodes(episodes, 3, "0/1")] == [each.id for each in chosen]
    assert choose_episodes(episodes, 20, "0/1") == episodes
