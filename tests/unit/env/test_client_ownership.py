"""An ack under way when its caller is cancelled: the episode is never without an owner (R24)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import verifiers.v1 as vf
import zmq
from verifiers.v1.trace import AgentInfo, TraceTask

from moorage.core.errors import EnvServerError
from moorage.env import protocol as wire
from moorage.env.client import EnvClient, RolloutCall
from moorage.env.port import Port
from moorage.env.runner import dump_episode

CALL = RolloutCall({"data": {"prompt": "p"}}, "policy", "http://127.0.0.1:9", 0, {}, 30.0)


class Peer:
    """A hand-written server: it answers at once, but acks only when told to."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.port_number = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.acks: list[tuple[bytes, bytes, tuple[str, ...]]] = []
        self.cancelled: list[str] = []
        self.acked = asyncio.Event()
        self.port = Port(self.socket, self.on_frames)

    def on_frames(self, frames: list[bytes]) -> None:
        identity, request_id, method, body = frames
        fields = msgspec.msgpack.decode(body)
        if method == b"hello":
            reply: Any = wire.HelloReply(
                env_id="e",
                num_tasks=1,
                scores_groups=False,
                store="s",
                payload_url="u",
                server_id="1",
                versions={},
            )
        elif method == b"run_rollout":
            reply = dump_episode(make_episode())
        elif method == b"ack":
            self.acks.append((identity, request_id, tuple(fields["ids"])))
            self.acked.set()
            return
        else:
            self.cancelled += fields["ids"]
            reply = wire.CancelReply(live=())
        self.port.send([identity, request_id, wire.REPLY, wire.encode(reply)])

    def answer_acks(self, *, owned: bool) -> None:
        for identity, request_id, ids in self.acks:
            reply = wire.AckReply(owned=ids if owned else (), unknown=() if owned else ids)
            self.port.send([identity, request_id, wire.REPLY, wire.encode(reply)])

    def close(self) -> None:
        self.port.close()
        self.context.term()


def make_episode() -> vf.Episode:
    task = TraceTask(type="Task", data=vf.TaskData.model_validate({"prompt": "p"}))
    trace = vf.Trace(task=task, agent=AgentInfo(config=vf.AgentConfig(), name="agent"), ok=True)
    return vf.Episode(task=task, traces=[trace], ok=True)


def with_peer(body: Any) -> None:
    async def run() -> None:
        peer = Peer()
        address = f"tcp://127.0.0.1:{peer.port_number}"
        client = EnvClient(address, token="t", run_id="r", attempt=1, source="train/x")
        try:
            await client.connect(10)
            await body(peer, client)
        finally:
            await client.close()
            peer.close()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("cancels", [1, 2, 3])
@pytest.mark.parametrize("owned", [True, False])
def test_an_ack_that_is_answered_after_the_cancel(cancels: int, owned: bool) -> None:
    async def body(peer: Peer, client: EnvClient) -> None:
        task = asyncio.create_task(client.run_rollout(CALL))
        await peer.acked.wait()
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0.02)
        assert task.done() == (cancels > 1), "one cancel waits for the answer, a second one does not"
        peer.answer_acks(owned=owned)
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if client.in_flight:
                await asyncio.sleep(0.02)
        assert client.in_flight == 0
        assert len(client.take_abandoned()) == owned
        assert not peer.cancelled, "after an ack there is no cancel"

    with_peer(body)


@pytest.mark.parametrize("turns", range(6))
def test_a_cancel_that_crosses_the_answer(turns: int) -> None:
    """Either the caller has the episode, or it is abandoned: never both, never neither."""

    async def body(peer: Peer, client: EnvClient) -> None:
        task = asyncio.create_task(client.run_rollout(CALL))
        await peer.acked.wait()
        peer.answer_acks(owned=True)
        await asyncio.sleep(0)
        call = client._calls.runs[0]
        assert call.ack is not None
        await asyncio.wait({call.ack})
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError) == (len(client.take_abandoned()) == 1)

    with_peer(body)


def test_a_client_that_is_closed_ends_a_call_whose_ack_has_no_answer() -> None:
    async def body(peer: Peer, client: EnvClient) -> None:
        task = asyncio.create_task(client.run_rollout(CALL))
        await peer.acked.wait()
        await client.close()
        with pytest.raises(EnvServerError, match="was closed"):
            await task

    with_peer(body)
