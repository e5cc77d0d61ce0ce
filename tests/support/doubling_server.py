"""A server of a channel whose answers are computed, in the process of a test or in one of its own."""

import asyncio

from xorl.server.channel import ChannelServer, Limits
from xorl.server.messages import Ok, Rejected, Tombstone
from xorl.server.operations import OptimResult, OptimStep, UnloadModel

ASKED = OptimStep | Tombstone | UnloadModel
ANSWERED = OptimResult | Ok | Rejected
QUICK = Limits(message_bytes=2**20, ping_every_s=0.1, lost_after_s=1.0)


async def doubled(message: OptimStep | Tombstone | UnloadModel) -> OptimResult | Ok:
    """Answers with a computed value; a Tombstone takes its seq_id in ms, UnloadModel raises."""
    if isinstance(message, Tombstone):
        await asyncio.sleep(message.seq_id / 1000)
        return Ok()
    if isinstance(message, UnloadModel):
        raise ValueError(f"no model {message.model_id}")
    return OptimResult({"doubled": 2 * message.learning_rate})


def serve_forever(address: str) -> None:
    """Serves at `address` until the process is killed."""

    async def run() -> None:
        server = ChannelServer(address, ASKED, doubled, limits=QUICK)
        await server.bind()
        await server.serve()

    asyncio.run(run())
