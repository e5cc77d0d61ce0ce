"""An orchestrator that computes its answers at once, for tests of the API: on the true channel, and it trains nothing.

The log-probability of target t after token s is -(s + t) / 64, and a sample of prompt p goes on with p[-1] + 1, + 2 ...
"""

import asyncio
import threading
import time
from contextlib import contextmanager

import httpx
import numpy as np
import uvicorn

from sockets import ipc_address
from xorl.server import endpoint_queries, messages, queries, status_queries
from xorl.server import operations as ops
from xorl.server.api import ApiSettings, create_app
from xorl.server.channel import ChannelServer
from xorl.server.datum import Array
from xorl.server.identifiers import CheckpointRef, checkpoint_folder

VOCAB = 64
SLOW_LOSS = "slow"
STUCK_LOSS = "stuck"
STUCK_SEED = 404
DELAYS_S = {SLOW_LOSS: 0.5, STUCK_LOSS: 1e6}
FAILING_LOSS = "failing"
LORA = ops.LoraSpec(rank=8, alpha=16.0)
STORAGE = status_queries.Storage(
    1_500_000,
    [
        status_queries.StoredKind("training", 2, 900_000),
        status_queries.StoredKind("recovery", 1, 300_000),
        status_queries.StoredKind("other", 0, 1),
    ],
)


class AnsweringOrchestrator:
    """Keeps what was asked of it in `submits`, `tombstones`, `cancelled` and `quantizations`, for tests to look at."""

    def __init__(self, output_dir, tokenizer="tokenizer"):
        self.vocab_size, self.context_length = VOCAB, 128
        self.says = None  # the tokens of every sample, which then stops; None: counts up
        self.gone = set()
        self.output_dir, self.tokenizer = output_dir, tokenizer
        self.submits, self.tombstones, self.cancelled, self.quantizations, self.keys = [], [], [], [], {}
        self.results, self.sessions, self.models, self.samplers = {}, {}, {}, {}
        self.checkpoints, self.endpoints, self.errors = {}, {}, []
        self.ready = True

    async def answer(self, request):
        return await getattr(self, f"on_{type(request).__name__}")(request)

    async def on_Submit(self, submit: messages.Submit):
        if submit.key in self.keys:
            request_id, body_hash = self.keys[submit.key]
            same = body_hash == submit.body_hash
            return (
                messages.Accepted(request_id)
                if same
                else messages.Rejected(400, f"{submit.key} was used for another request")
            )
        self.submits.append(submit)
        if submit.key is not None:
            self.keys[submit.key] = submit.request_id, submit.body_hash
        done = asyncio.get_running_loop().create_future()
        self.results[submit.request_id] = submit.dialect, done
        operation = submit.operation
        is_stuck = isinstance(operation, ops.Sample) and operation.seed == STUCK_SEED
        delay_s = 1e6 if is_stuck else DELAYS_S.get(getattr(operation, "loss_fn", ""), 0.0)
        asyncio.get_running_loop().call_later(delay_s, done.set_result, self.computed(operation))
        return messages.Accepted(submit.request_id)

    async def on_Tombstone(self, tombstone: messages.Tombstone):
        self.tombstones.append((tombstone.model_id, tombstone.seq_id))
        return messages.Ok()

    async def on_Unreadable(self, unreadable: messages.Unreadable):
        return messages.Ok()

    async def on_Cancel(self, cancel: messages.Cancel):
        self.cancelled.append(cancel.request_id)
        return messages.CancelOutcome(cancel.request_id, "cancelled")

    async def on_Poll(self, poll: messages.Poll):
        if poll.request_id == "gone":
            return messages.Unknown(poll.request_id, was_known=True)
        if poll.request_id not in self.results:
            return messages.Unknown(poll.request_id)
        dialect, done = self.results[poll.request_id]
        await asyncio.wait([done], timeout=poll.wait_s)
        return (
            messages.Finished(poll.request_id, dialect, done.result())
            if done.done()
            else messages.Pending(poll.request_id, position=3)
        )

    def computed(self, operation):
        match operation:
            case ops.CreateModel():
                self.models[operation.model_id] = operation
                return ops.ModelCreated(operation.model_id, 8, 16.0)
            case ops.UnloadModel():
                self.models.pop(operation.model_id, None)
                return ops.Unloaded(operation.model_id)
            case ops.ForwardBackward():
                return loss_of(operation)
            case ops.OptimStep():
                return ops.OptimResult(
                    {"learning_rate": operation.learning_rate, "grad_norm": float("inf"), "step": 1.0}
                )
            case ops.AbortGradients():
                return ops.GradientsAborted(operation.model_id, 0)
            case ops.LoadWeights():
                return ops.Loaded(operation.model_id, operation.checkpoint, 1)
            case ops.Sample():
                return samples_of(operation) if self.says is None else said(operation, self.says)
            case ops.SyncWeights():
                return ops.SyncResult(True, "sent", [], transfer_time_s=0.25, total_bytes=10)
            case ops.SaveWeights():
                return self.saved(CheckpointRef(operation.model_id, "weights", operation.name))
            case ops.SaveFullWeights():
                return self.saved(CheckpointRef(operation.model_id, "external_weights", operation.name))
            case ops.SaveWeightsForSampler(name=None):
                self.samplers[operation.sampler_id] = None
                hidden = CheckpointRef(operation.model_id, "sampler_weights", f"unnamed-{len(self.samplers)}")
                return ops.Saved(hidden, operation.sampler_id)
            case ops.SaveWeightsForSampler():
                return self.saved(CheckpointRef(operation.model_id, "sampler_weights", operation.name))

    def saved(self, ref):
        folder = checkpoint_folder(self.output_dir, ref)
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(b"weights")
        self.checkpoints[ref] = queries.CheckpointInfo(ref, time.time(), 7, {})
        return ops.Saved(ref, size_bytes=7, num_files=1)

    async def on_GetService(self, _: queries.GetService):
        return queries.ServiceInfo(
            model_name="tiny",
            base_names=("tiny",),
            tokenizer=self.tokenizer,
            arch="tiny",
            max_context_length=self.context_length,
            enable_lora=True,
            lora_rank=8,
            lora_alpha=16.0,
            vocab_size=self.vocab_size,
            output_dir=str(self.output_dir),
            ready=self.ready,
        )

    async def on_GetStatus(self, _: status_queries.GetStatus):
        now = time.time()
        sessions = [
            status_queries.SessionStatus(
                one, [], 3, now - 50, now - 5, one in self.gone, asked.display_name, asked.user_metadata
            )
            for one, asked in self.sessions.items()
        ]
        sessions += [status_queries.SessionStatus(one, [one], 0, now - 90, now - 9) for one in self.models]
        models = [
            status_queries.ModelStatus(
                one, None, "ready", 8, 3, 0, now - 90, now - 9, now - 9, [3.5, None, 2.25], 0.5, 1e-4
            )
            for one in self.models
        ]
        return status_queries.Status(
            started=time.time() - 100,
            ready=self.ready,
            workers_connected=True,
            world_size=2,
            queue_depth=4,
            running=[status_queries.RunningCall("r", "ForwardBackward", "m", "m", time.time() - 9, 0)],
            waiting=[status_queries.WaitingCall("w", "CreateModel", "n", "model m uses the base")],
            processes=[status_queries.ProcessStatus("workers", 1, time.time() - 60, "signal=SIGKILL")],
            tokens_per_second=1234.5,
            token_rates=[0.0, 100.0, 1234.5],
            sessions=sessions,
            models=models,
            endpoints=list(self.endpoints.values()),
            gpu_bytes_used=[2**30],
            gpu_bytes_total=[2**31],
            last_errors=self.errors,
            counters={'requests_total{operation="optim_step"}': 7.0, "bad name\n": 1.0},
            gauges={"queue_depth": 4.0},
            storage=STORAGE,
        )

    async def on_GetStorage(self, _: status_queries.GetStorage):
        return STORAGE

    async def on_CreateSession(self, asked: queries.CreateSession):
        session_id = asked.session_id or f"sess-{len(self.sessions)}"
        self.sessions[session_id] = asked
        return queries.SessionCreated(session_id, "hello")

    async def on_Heartbeat(self, beat: queries.Heartbeat):
        return messages.Ok() if beat.session_id in self.sessions else messages.Rejected(410, "the session has ended")

    async def on_FinishSession(self, asked: queries.FinishSession):
        self.sessions.pop(asked.session_id, None)
        return messages.Ok()

    async def on_GetSession(self, asked: queries.GetSession):
        if asked.session_id not in self.sessions:
            return messages.Rejected(404, f"there is no session {asked.session_id}")
        now = time.time()
        return queries.SessionInfo(
            asked.session_id, now, now, list(self.models), list(self.samplers), (), {}, None, False
        )

    async def on_ListSessions(self, asked: queries.ListSessions):
        infos = [await self.on_GetSession(queries.GetSession(one)) for one in self.sessions]
        return queries.Sessions(infos, len(infos))

    async def on_GetModel(self, asked: queries.GetModel):
        if asked.model_id not in self.models:
            return messages.Rejected(404, f"there is no model {asked.model_id}")
        return queries.ModelInfo(asked.model_id, "tiny", "tiny", self.tokenizer, "tiny", LORA, 0, {})

    async def on_CreateSamplingSession(self, asked: queries.CreateSamplingSession):
        if asked.checkpoint is not None and asked.checkpoint not in self.checkpoints:
            return messages.Rejected(404, "there is no such checkpoint")
        name = None if asked.checkpoint is None else asked.checkpoint.name
        session_id = asked.sampling_session_id or f"named:sample:{name}"
        self.samplers[session_id] = asked.checkpoint
        return queries.SamplingSession(session_id, "tiny", asked.checkpoint, name)

    async def on_GetSampler(self, asked: queries.GetSampler):
        if asked.sampling_session_id not in self.samplers:
            return messages.Rejected(404, "there is no such sampler")
        return queries.SamplingSession(
            asked.sampling_session_id, "tiny", self.samplers[asked.sampling_session_id], None
        )

    async def on_FindServedModel(self, asked: queries.FindServedModel):
        found = queries.ServedModel("tiny", 0.0, ops.BaseSampler())
        return found if asked.name == "tiny" else messages.Rejected(404, f"model: there is no {asked.name!r}")

    async def on_ListCheckpoints(self, asked: queries.ListCheckpoints):
        found = [c for ref, c in self.checkpoints.items() if asked.model_id in (None, ref.model_id)]
        return queries.CheckpointList(found[::-1], len(found))

    async def on_DeleteCheckpoint(self, asked: queries.DeleteCheckpoint):
        found = self.checkpoints.pop(asked.checkpoint, None)
        return messages.Ok() if found else messages.Rejected(404, "there is no such checkpoint")

    async def on_SetCheckpointTtl(self, asked: queries.SetCheckpointTtl):
        found = self.checkpoints[asked.checkpoint]
        expires = None if asked.ttl_s is None else time.time() + asked.ttl_s
        self.checkpoints[asked.checkpoint] = queries.CheckpointInfo(found.checkpoint, found.created, 7, {}, expires)
        return messages.Ok()

    async def on_GetWeightsInfo(self, asked: queries.GetWeightsInfo):
        found = self.checkpoints.get(asked.checkpoint)
        is_there = found is not None and (found.expires is None or found.expires > time.time())
        return (
            queries.WeightsInfo("tiny", LORA, 7, 1)
            if is_there
            else messages.Rejected(404, "there is no such checkpoint")
        )

    async def on_ListTrainingRuns(self, asked: queries.ListTrainingRuns):
        runs = [await self.on_GetTrainingRun(queries.GetTrainingRun(one)) for one in self.models]
        return queries.TrainingRuns(runs[asked.offset : asked.offset + asked.limit], len(runs))

    async def on_GetTrainingRun(self, asked: queries.GetTrainingRun):
        last = [c for ref, c in self.checkpoints.items() if ref.model_id == asked.model_id and ref.kind == "weights"]
        return queries.TrainingRun(asked.model_id, "tiny", 8, time.time(), last[-1] if last else None, None, {})

    async def on_AddEndpoint(self, asked: endpoint_queries.AddEndpoint):
        state = endpoint_queries.EndpointState(asked.endpoint, "healthy", "it answers", server_info={"tp_size": 1})
        self.endpoints[asked.endpoint.host, asked.endpoint.port] = state
        return state

    async def on_RemoveEndpoint(self, asked: endpoint_queries.RemoveEndpoint):
        found = self.endpoints.pop((asked.host, asked.port), None)
        return messages.Ok() if found else messages.Rejected(404, f"there is no endpoint {asked.host}:{asked.port}")

    async def on_ListEndpoints(self, _: endpoint_queries.ListEndpoints):
        return endpoint_queries.Endpoints(list(self.endpoints.values()))

    async def on_ConnectEndpoints(self, _: endpoint_queries.ConnectEndpoints):
        return endpoint_queries.Endpoints(list(self.endpoints.values()))

    async def on_DisconnectEndpoints(self, _: endpoint_queries.DisconnectEndpoints):
        return endpoint_queries.Endpoints(
            [endpoint_queries.EndpointState(state.endpoint, "disconnected") for state in self.endpoints.values()]
        )

    async def on_SetSyncQuantization(self, ask: endpoint_queries.SetSyncQuantization):
        self.quantizations.append(ask.quantization)
        return messages.Ok()


def loss_of(call):
    """Log-probabilities by the rule above, the loss that they make with the weights, as a service says them."""
    if call.loss_fn == FAILING_LOSS:
        return ops.Failure("user", 400, "there is no loss 'failing'")
    logprobs, loss = [], 0.0
    for datum in call.data:
        targets = datum.arrays["target_tokens"].numpy()
        tokens = datum.tokens.numpy().reshape(-1, *[1] * (targets.ndim - 1))
        values = (-(tokens + targets) / 64).astype(np.float32)
        weights = datum.arrays["weights"].numpy() if "weights" in datum.arrays else np.ones_like(values)
        loss -= float((weights * values).sum())
        logprobs.append(Array.of(values))
    return ops.LossResult(
        "ArrayRecord", {"logprobs": logprobs}, {"loss:sum": loss, "options:sum": len(call.loss_params)}
    )


def samples_of(call):
    """Continuations that count up from the prompt's last token."""
    prompt = call.prompt.numpy()
    count = 4 if call.max_tokens is None else call.max_tokens
    sequences = []
    for index in range(call.num_samples if count else 0):
        tokens = ((prompt[-1] + 1 + index + np.arange(count)) % VOCAB).astype(np.int32)
        top = top_of(tokens, call.topk_sample_logprobs)
        logprobs = Array.of((-tokens / 64).astype(np.float32))
        routes = routes_of(tokens - 1) if call.routed_experts else None
        sequences.append(ops.SampledSequence(Array.of(tokens), logprobs, "length", top, routed_experts=routes))
    logprobs = (-prompt / 64).astype(np.float32)
    logprobs[0] = np.nan
    targets = call.target_prompt_tokens
    return ops.SampleResult(
        sequences,
        prompt_logprobs=Array.of(logprobs) if call.prompt_logprobs else None,
        topk_prompt_logprobs=top_of(prompt[1:], call.topk_prompt_logprobs),
        target_prompt_logprobs=None if targets is None else asked_about(targets.numpy()),
        num_cached_tokens=1,
        prompt_routed_experts=routes_of(prompt[:-1]) if call.routed_experts else None,
    )


def said(call, tokens):
    """Samples of these tokens, or of those that a part of a stream continues with."""
    rest = tokens[call.num_continued :][: call.max_tokens]
    reason = "stop" if call.num_continued + len(rest) == len(tokens) else "length"
    one = ops.SampledSequence(
        Array.of(np.array(rest, np.int32)), Array.of(np.full(len(rest), -0.5, np.float32)), reason
    )
    return ops.SampleResult([one] * call.num_samples)


def routes_of(tokens):
    """The experts of tokens, which are made of these, in three layers of which the second is dense."""
    routes = tokens[:, None, None] + np.array([[0, 1], [0, 0], [1, 2]])
    routes[:, 1] = 0
    return Array.of(routes.astype(np.int16))


def asked_about(targets):
    return Array.of(np.where(targets < 0, np.nan, -targets / 64).astype(np.float32))


def top_of(tokens, k):
    """The k tokens from each of these on; where the vocabulary ends cells are empty, as an engine's may be."""
    if not k:
        return None
    ids = (tokens[:, None] + np.arange(k)).astype(np.int32)
    logprobs = np.where(ids < VOCAB, -ids / 64, ops.NO_LOGPROB).astype(np.float32)
    return ops.TopLogprobs(Array.of(np.where(ids < VOCAB, ids, 0)), Array.of(logprobs))


@contextmanager
def asked_at(output_dir, path="", **settings):
    """(a client of HTTP below a path of the API, the orchestrator)"""
    with (
        served(output_dir, **settings) as (url, orchestrator),
        httpx.Client(base_url=url + path, timeout=60, trust_env=False) as client,
    ):
        yield client, orchestrator


def json_datum(tokens=(1, 2, 3), inputs={}, **fields):  # noqa: B006 - not changed
    """A datum of a call in JSON, whose targets are the tokens that follow; inputs: of its loss. fields: of its own."""
    targets = {"data": [token + 1 for token in tokens], "dtype": "int64", "shape": [len(tokens)]}
    return {
        "model_input": {"input_ids": list(tokens)},
        "loss_fn_inputs": {"target_tokens": targets, **inputs},
        **fields,
    }


@contextmanager
def served(output_dir, *, tokenizer="tokenizer", **settings):
    """(URL, orchestrator) of the API before an answering orchestrator, both in a thread of their own."""
    orchestrator = AnsweringOrchestrator(output_dir, tokenizer)
    with ipc_address("orchestrator") as address:
        started, stop, found = threading.Event(), asyncio.Event(), {}

        async def run():
            channel = ChannelServer(address, queries.Request, orchestrator.answer)
            await channel.bind()
            answering = asyncio.create_task(channel.serve())
            app = create_app(ApiSettings(address, **settings))
            server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=1))
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            found["url"] = f"http://127.0.0.1:{port}"
            found["loop"] = asyncio.get_running_loop()
            started.set()
            await stop.wait()
            server.should_exit = True
            await serving
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        assert started.wait(20)
        try:
            yield found["url"], orchestrator
        finally:
            found["loop"].call_soon_threadsafe(stop.set)
            thread.join(20)
