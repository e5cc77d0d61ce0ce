"""Requests that are refused without a legible number: the calls after them run at once, and no other order changes."""

import asyncio
import json

import pytest
import zstandard

from asynchronous import in_a_loop
from orchestrated import MODEL, forward_backward, options, over_http, serving, step
from xorl.server.messages import Unreadable

OTHER = "session-1:train:1"
PROTOBUF = {"content-type": "application/x-protobuf"}
GARBAGE = {
    "protobuf": (b"\xff\xfe garbage", PROTOBUF),
    "compressed protobuf": (b"no zstd", PROTOBUF | {"content-encoding": "zstd"}),
    "JSON": (b'{"forward_backward_input": {"da', {}),
    "nothing": (b"\x00", {}),
    "unknown encoding": (b"{}", {"content-encoding": "br"}),
}


def datum(token):
    return {"model_input": {"input_ids": [token]}, "loss_fn_inputs": {"target_tokens": [token]}}


def call(token, seq, model=MODEL):
    return {"model_id": model, "seq_id": seq, "forward_backward_input": {"data": [datum(token)], "loss_fn": "ce"}}


async def send(http, body, agent="a", headers=None):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"user-agent": agent, **(headers or {})}
    return await http.post("/api/v1/forward_backward", content=content, headers=headers)


async def loss_of(client, answer):
    assert answer.status_code == 200, answer.text
    return (await client.result(answer.json()["request_id"])).metrics["loss:sum"]


async def waits(client, answer):
    await asyncio.sleep(0.2)
    return client.orchestrator.state.open.get(answer.json()["request_id"]) is not None


@pytest.mark.parametrize(("content", "headers"), GARBAGE.values(), ids=GARBAGE)
@in_a_loop
async def test_the_call_after_a_body_without_a_legible_number_does_not_wait(tmp_path, content, headers):
    """Catches a client that goes on after a damaged body and waits six minutes for the number that was in it."""
    async with serving(options(tmp_path)) as (client, _), over_http(client) as http:
        await client.create()
        assert await loss_of(client, await send(http, call(1, 1))) == 1
        for _ in range(2):
            refused = await send(http, content, headers=headers)
            assert refused.status_code in (400, 415)
            assert refused.headers["x-should-retry"] == "false"
        assert await loss_of(client, await send(http, call(4, 4))) == 4
        # The two are accounted for: a number that is missing now is only late.
        late = await send(http, call(6, 6))
        assert await waits(client, late)
        assert await loss_of(client, await send(http, call(5, 5))) == 5
        assert await loss_of(client, late) == 6


@in_a_loop
async def test_an_illegible_body_skips_a_number_that_was_already_waited_for(tmp_path):
    """Catches a gap that is only looked for before the garbage has arrived, or while no earlier call runs."""
    async with serving(options(tmp_path), delay_s=0.3) as (client, _), over_http(client) as http:
        await client.create()
        first, third = await send(http, call(1, 1)), await send(http, call(3, 3))
        await send(http, b"garbage")
        assert await loss_of(client, first) == 1
        assert await loss_of(client, third) == 3
        again = await send(http, call(2, 2))
        assert (again.status_code, "already accepted or skipped" in again.text) == (400, True)


@in_a_loop
async def test_garbage_skips_no_number_that_may_still_arrive(tmp_path):
    """Catches a call that is refused, as if it came too late, because of another client or another model."""
    async with serving(options(tmp_path)) as (client, _), over_http(client) as http:
        await client.create()
        await client.create(OTHER)
        await send(http, b"garbage", agent="another program")
        waiting = [await send(http, call(2, 2)), await send(http, call(3, 3, OTHER))]
        assert await waits(client, waiting[0])
        # Either model may lack a number because of this one.
        await send(http, b"garbage")
        assert await waits(client, waiting[0])
        assert await loss_of(client, await send(http, call(1, 1))) == 1
        assert await loss_of(client, waiting[0]) == 2
        # The other model lacks two, and one was illegible.
        assert await waits(client, waiting[1])
        assert await loss_of(client, await send(http, call(1, 1, OTHER))) == 1
        assert await loss_of(client, waiting[1]) == 3


@in_a_loop
async def test_garbage_is_forgotten_when_no_call_can_wait_for_it_any_more(tmp_path):
    """Catches a number that is skipped because of what another call sent long ago."""
    async with serving(options(tmp_path, gap_timeout_s=0.2)) as (client, _):
        await client.create()
        await client.answer(Unreadable(""))
        await asyncio.sleep(0.3)
        waiting = await client.send(step(), 2)
        first = await client.send(forward_backward(1), 1)
        assert (await client.result(first)).metrics["loss:sum"] == 1
        assert (await client.result(waiting)).metrics["step"] == 1


@in_a_loop
async def test_a_number_at_the_end_of_a_long_body_is_found(tmp_path):
    """Catches a client that writes its data first, whose refused calls leave gaps."""
    async with serving(options(tmp_path)) as (client, _), over_http(client) as http:
        await client.create()
        data = [datum(-1) for _ in range(1000)]
        body = {"forward_backward_input": {"data": data, "loss_fn": "ce"}, "model_id": MODEL, "seq_id": 1}
        encoded = json.dumps(body).encode()
        for content, headers in ((encoded, {}), (zstandard.compress(encoded), {"content-encoding": "zstd"})):
            assert (await send(http, content, "b", headers)).status_code == 400
        assert await loss_of(client, await send(http, call(2, 2), "another program")) == 2
