"""Ask for a price: the answer is behind a tool, served by one MCP server for the whole taskset."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["PricesTaskset"]

PRICES = {"rope": 12, "anchor": 340, "sail": 95}


class PriceData(vf.TaskData):
    answer: str


class PriceTask(vf.Task[PriceData]):
    @vf.reward
    async def right(self, task: PriceData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


class PriceTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, item: str) -> str:
        """What an item costs."""
        return str(PRICES.get(item, "unknown"))


class PricesTaskset(vf.Taskset[PriceTask]):
    DEFAULT_HARNESS = "moorage.env.direct"

    def load(self) -> Iterable[PriceTask]:
        for item, price in PRICES.items():
            yield PriceTask(PriceData(prompt=f"price of {item}?", answer=str(price)), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:  # noqa: ARG003
        return [PriceTools(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    PriceTools.run()
