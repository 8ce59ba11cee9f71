"""Groups and outcomes against a small model: random completions, failures, retries, cancellations."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moorage.orchestrator.admission import Admission
from moorage.orchestrator.groups import Group, Groups, Split, Work
from moorage.orchestrator.outcomes import DROP_REASONS, Outcomes

CAP = 12


def make_group(
    group_id: str, size: int, *, split: Split = "train", version: int = 0, indivisible: bool = False
):
    return Group(
        id=group_id,
        split=split,
        source="s",
        task={},
        step=1,
        version=version,
        size=size,
        indivisible=indivisible,
        opened_at=0.0,
        deadline_at=100.0,
    )


class Dispatching(RuleBasedStateMachine):
    """What the dispatcher's shell does with the pure parts, in any order; the model counts by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = Groups(retries=1)
        self.admission = Admission(CAP)
        self.outcomes = Outcomes()
        self.running: list[Work] = []
        self.gone: list[Work] = []
        self.version = 0
        self.opened: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.final = {"trained": 0, "errored": 0, "cancelled": 0, "dropped": 0}
        self.started = 0
        self.waiting = 0

    @rule(size=st.integers(1, 5), indivisible=st.booleans())
    def open(self, size, indivisible):
        group = make_group(f"g{len(self.opened)}", size, version=self.version, indivisible=indivisible)
        self.groups.open(group)
        self.opened[group.id] = size
        self.ended[group.id] = 0

    @rule()
    def dispatch(self):
        group = self.groups.first_unscheduled("train")
        if group is None or self.admission.wait_s(group.cost, 0.0) != 0.0:
            return
        work = self.groups.dispatch(group)
        self.admission.take("train", work.num_episodes, 0.0)
        if work.attempt == 0:
            self.outcomes.start(work.num_episodes)
            self.started += work.num_episodes
        self.running.append(work)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["ok", "task_error", "infra"]))
    def end(self, data, how):
        work = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if how == "infra" and self.groups.retry(work):
            self.admission.release("train", work.num_episodes, natural=True)
            return
        if self.groups.finish(work) is None:
            raise AssertionError("a running work of an open group must be known")
        self.admission.release("train", work.num_episodes, natural=True)
        self.ended[work.group_id] += work.num_episodes
        if how == "ok":
            self.outcomes.arrive(work.num_episodes)
            self.waiting += work.num_episodes
        else:
            self.outcomes.error(work.num_episodes)
            self.final["errored"] += work.num_episodes

    @precondition(lambda self: self.gone)
    @rule()
    def come_back_after_drop(self):
        work = self.gone.pop()
        assert not self.groups.retry(work)
        assert self.groups.finish(work) is None

    @rule(data=st.data())
    def drop(self, data):
        groups = list(self.groups)
        if groups:
            self._drop(data.draw(st.sampled_from(groups)).id)

    @rule()
    def bump(self):
        self.version += 1
        for group_id in self.groups.stale(self.version - 2):
            self._drop(group_id)

    @rule(num=st.integers(1, 4))
    def cut(self, num):
        for group_id in self.groups.youngest(num):
            self._drop(group_id)

    def _drop(self, group_id: str) -> None:
        cancellation = self.groups.drop(group_id, "stale")
        assert cancellation is not None
        assert self.groups.drop(group_id, "stale") is None
        if cancellation.num_running:
            self.admission.release("train", cancellation.num_running, natural=False)
        self.outcomes.cancel(cancellation.num_started)
        self.final["cancelled"] += cancellation.num_started
        self.ended[group_id] += cancellation.count
        dropped = {work.id for work in cancellation.works}
        self.gone += [work for work in self.running if work.id in dropped]
        self.running = [work for work in self.running if work.id not in dropped]

    @precondition(lambda self: self.waiting)
    @rule(trained=st.booleans(), reason=st.sampled_from(DROP_REASONS))
    def settle(self, trained, reason):
        self.waiting -= 1
        if trained:
            self.outcomes.train()
            self.final["trained"] += 1
        else:
            self.outcomes.drop(reason)
            self.final["dropped"] += 1

    @invariant()
    def counts_add_up(self):
        counts = self.outcomes.counts
        assert counts.started == self.started
        assert self.outcomes.waiting == self.waiting
        assert counts.trained == self.final["trained"]
        assert counts.errored == self.final["errored"]
        assert counts.cancelled == self.final["cancelled"]
        assert sum(counts.dropped.values()) == self.final["dropped"]
        assert self.started == sum(self.final.values()) + self.waiting + self.outcomes.in_flight

    @invariant()
    def permits_are_what_runs(self):
        running = sum(work.num_episodes for work in self.running)
        assert self.admission.total == running == self.groups.in_flight("train")
        assert running <= CAP

    @invariant()
    def every_episode_of_a_group_ends_at_most_once(self):
        open_ids = {group.id for group in self.groups}
        for group_id, size in self.opened.items():
            assert self.ended[group_id] <= size
            assert (group_id in open_ids) == (self.ended[group_id] < size)

    def teardown(self):
        for group in list(self.groups):
            self._drop(group.id)
        assert self.admission.total == 0
        assert self.outcomes.in_flight == 0
        assert self.ended == self.opened


TestDispatching = Dispatching.TestCase
TestDispatching.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_a_group_stays_first_until_all_its_episodes_are_dispatched():
    groups = Groups(0)
    first, second = groups.open(make_group("a", 2)), groups.open(make_group("b", 2))
    assert [groups.dispatch(groups.first_unscheduled("train")).group_id for _ in range(3)] == ["a", "a", "b"]
    assert groups.first_unscheduled("train") is second
    assert first.num_running == 2


def test_an_indivisible_group_is_one_work_of_its_whole_size():
    groups = Groups(0)
    group = groups.open(make_group("a", 4, indivisible=True))
    assert group.cost == 4
    work = groups.dispatch(group)
    assert work.num_episodes == 4
    assert groups.first_unscheduled("train") is None
    assert groups.finish(work) is group
    assert len(groups) == 0


def test_infrastructure_failures_are_retried_so_many_times_and_no_more():
    groups = Groups(2)
    group = groups.open(make_group("a", 1))
    for attempt in (0, 1):
        work = groups.dispatch(group)
        assert work.attempt == attempt
        assert groups.retry(work)
    assert not groups.retry(groups.dispatch(group))


def test_eval_and_frozen_groups_never_age():
    groups = Groups(0)
    groups.open(make_group("eval", 1, split="eval"))
    frozen = make_group("frozen", 1)
    frozen.version = None
    groups.open(frozen)
    groups.open(make_group("live", 1, version=3))
    assert groups.stale(4) == ["live"]
    assert groups.stale(3) == []


def test_a_cut_takes_the_youngest_groups_and_counts_what_runs():
    groups = Groups(0)
    for name in "abc":
        group = groups.open(make_group(name, 3))
        for _ in range(2):
            groups.dispatch(group)
    groups.open(make_group("waiting", 3))
    assert groups.youngest(3) == ["c", "b"]
    assert groups.youngest(0) == []


def test_a_group_expires_at_its_deadline():
    groups = Groups(0)
    groups.open(make_group("a", 1))
    assert groups.expired(99.0) == []
    assert groups.expired(100.0) == ["a"]
