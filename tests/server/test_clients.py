"""Both public clients, unmodified, before the API and an orchestrator that computes its answers.

They need the dependency group `clients`: `uv sync --group clients`. What they get from a service that trains is in
tests/e2e/server.
"""

import importlib.util

import numpy as np
import pytest

from answering_orchestrator import FAILING_LOSS, served
from child import in_a_child
from xorl.server.operations import CreateModel, ForwardBackward, OptimStep, Sample

MISSING = [name for name in ("tinker", "xorl_client") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason="needs the public clients: uv sync --group clients")
TOKENS, TARGETS = [1, 2, 3], [2, 3, 4]
LOGPROBS = [-3 / 64, -5 / 64, -7 / 64]


def with_tinker(**settings):
    """A test of (module, ServiceClient, orchestrator), in a process that the client's threads end with."""

    def decorate(test):
        @in_a_child
        def run(tmp_path):
            with served(tmp_path, **settings) as (url, orchestrator):
                import tinker  # noqa: PLC0415  (a dependency group that is not always there)

                with tinker.ServiceClient(base_url=url, api_key="tml-nobody-checks-it") as client:
                    test(tinker, client, orchestrator)

        return run

    return decorate


def with_xorl(test):
    """The same of the other client, and its URL."""

    @in_a_child
    def run(tmp_path):
        with served(tmp_path) as (url, orchestrator):
            import xorl_client  # noqa: PLC0415  (a dependency group that is not always there)

            client = xorl_client.ServiceClient(base_url=url, api_key="tml-nobody-checks-it")
            test(xorl_client, client, orchestrator, url)

    return run


def tinker_datum(tinker, tokens=TOKENS, **inputs):
    import torch  # noqa: PLC0415

    targets = torch.tensor([token + 1 for token in tokens])
    return tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(list(tokens)), loss_fn_inputs={"target_tokens": targets, **inputs}
    )


@with_tinker()
def test_one_client_trains(tinker, client, orchestrator):
    """Catches a call that it cannot make, a number that is lost, and a failed call after which it is of no use."""
    import torch  # noqa: PLC0415

    training = client.create_lora_training_client(base_model="tiny", rank=4, seed=3, train_mlp=False).result()
    info = training.get_info()
    assert (info.is_lora, info.lora_rank, info.model_name) == (True, 8, "tiny")
    data = [tinker_datum(tinker, weights=torch.tensor([0.0, 0.5, 1.0])), tinker_datum(tinker, [7, 8])]
    calls = [
        training.forward_backward(data, "cross_entropy"),
        training.optim_step(tinker.types.AdamParams(learning_rate=0.5, weight_decay=0.25, grad_clip_norm=2.0)),
        training.forward(data, "ppo", loss_fn_config={"clip_low_threshold": 0.5}),
    ]
    trained, stepped, seen = (call.result() for call in calls)
    assert trained.loss_fn_outputs[0]["logprobs"].tolist() == LOGPROBS
    assert trained.loss_fn_outputs[1]["logprobs"].tolist() == [-15 / 64, -17 / 64]
    assert trained.metrics["loss:sum"] == pytest.approx((2.5 + 7 + 32) / 64)
    assert stepped.metrics["learning_rate"] == 0.5
    # Loops log these metrics over a `step` of their own, from which they also go on.
    assert stepped.metrics["optimizer_step"] == 1
    assert "step" not in stepped.metrics
    assert seen.metrics["options:sum"] == 1
    with pytest.raises(tinker.RequestFailedError, match="there is no loss"):
        training.forward_backward(data, FAILING_LOSS).result()
    with pytest.raises(tinker.BadRequestError, match="token ids must be"):
        training.forward_backward([tinker_datum(tinker, [1, 10_000])], "cross_entropy").result()
    assert training.forward(data, "cross_entropy").result().metrics["loss:sum"] > 0

    operations = [submit.operation for submit in orchestrator.submits]
    (created,) = [one for one in operations if isinstance(one, CreateModel)]
    assert (created.lora.rank, created.lora.seed, created.lora.train_mlp, created.lora.train_attn) == (
        4,
        3,
        False,
        True,
    )
    (step,) = [one for one in operations if isinstance(one, OptimStep)]
    assert (step.learning_rate, step.weight_decay, step.grad_clip_norm, step.beta2) == (0.5, 0.25, 2.0, 0.95)
    forwards = [one.forward_only for one in operations if isinstance(one, ForwardBackward)]
    assert forwards == [False, True, False, True]
    # 5 was refused at the door.
    assert [submit.seq_id for submit in orchestrator.submits if submit.seq_id] == [1, 2, 3, 4, 6]
    assert orchestrator.tombstones == [(training.model_id, 5)]


@with_tinker(body_bytes=400000)
def test_chunks_of_one_call_arrive_and_are_put_together(tinker, client, orchestrator):
    """Catches chunks that are too large for the service, and an order that is not the datums'."""
    training = client.create_lora_training_client(base_model="tiny").result()
    data = [tinker_datum(tinker, [index % 50 + 1] * 60) for index in range(300)]
    result = training.forward_backward(data, "cross_entropy").result()
    first = [one["logprobs"].tolist()[0] for one in result.loss_fn_outputs]
    assert np.allclose(first, [-(2 * (index % 50) + 3) / 64 for index in range(300)])
    calls = [submit for submit in orchestrator.submits if isinstance(submit.operation, ForwardBackward)]
    assert len(calls) > 1
    assert sorted(submit.seq_id for submit in calls) == list(range(1, len(calls) + 1))


@with_tinker()
def test_its_own_losses_are_computed_in_two_passes(tinker, client, orchestrator):
    """Catches log-probabilities of the first pass, or weights of the second, that are not its own."""
    import torch  # noqa: PLC0415

    training = client.create_lora_training_client(base_model="tiny").result()

    def loss(data, logprobs):
        assert torch.allclose(logprobs[0], torch.tensor(LOGPROBS))
        total = sum((values**2).sum() for values in logprobs)
        return total, {"mine": float(total)}

    result = training.forward_backward_custom([tinker_datum(tinker)], loss).result()
    assert result.metrics["mine"] == pytest.approx(sum(value**2 for value in LOGPROBS))
    first, second = [one.operation for one in orchestrator.submits if isinstance(one.operation, ForwardBackward)]
    assert (first.forward_only, second.forward_only) == (True, False)
    weights = second.data[0].arrays["weights"].numpy()
    assert np.allclose(weights, [-2 * value for value in LOGPROBS])


@with_tinker()
def test_targets_of_two_dimensions_travel_sparse(tinker, client, orchestrator):
    """Catches sparse targets that are read by column."""
    import torch  # noqa: PLC0415

    training = client.create_lora_training_client(base_model="tiny").result()
    targets = torch.zeros(3, 40, dtype=torch.int64)
    targets[0, 5], targets[2, 39] = 7, 9
    datum = tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(TOKENS),
        loss_fn_inputs={"target_tokens": targets, "weights": (targets > 0).float()},
    )
    result = training.forward_backward([datum], "cross_entropy").result()
    assert result.loss_fn_outputs[0]["logprobs"].to_torch().shape == (3, 40)
    seen = orchestrator.submits[-1].operation.data[0].arrays
    assert (seen["target_tokens"].numpy() == targets.numpy()).all()
    assert seen["weights"].numpy().sum() == 2


@with_tinker()
def test_one_client_saves_samples_and_keeps_house(tinker, client, orchestrator):
    """Catches paths, samplers and lists that it cannot read."""
    types = tinker.types
    training = client.create_lora_training_client(base_model="tiny", user_metadata={"run": "a"}).result()
    path = training.save_state("ck0", ttl_seconds=60).result().path
    assert path == f"tinker://{training.model_id}/weights/ck0"
    assert training.load_state(path).result().path == path
    again = client.create_training_client_from_state_with_optimizer(path)
    assert again.get_info().is_lora
    created = orchestrator.models[again.model_id]
    assert (created.checkpoint.name, created.with_optimizer) == ("ck0", True)

    prompt = types.ModelInput.from_ints([1, 2, 3])
    drawn = types.SamplingParams(max_tokens=3, seed=5, temperature=0.5, top_k=4, top_p=0.5, stop=["x"])
    for sampler in (
        client.create_sampling_client(model_path=training.save_weights_for_sampler("sw0").result().path),
        training.save_weights_and_get_sampling_client(),
        client.create_sampling_client(base_model="tiny"),
    ):
        answer = sampler.sample(
            prompt, 2, drawn, include_prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2
        ).result()
        assert [list(sequence.tokens) for sequence in answer.sequences] == [[4, 5, 6], [5, 6, 7]]
        assert answer.sequences[0].logprobs == [-4 / 64, -5 / 64, -6 / 64]
        assert answer.sequences[0].stop_reason == "length"
        assert answer.prompt_logprobs == [None, -2 / 64, -3 / 64]
        assert answer.topk_prompt_logprobs[1:] == [[(2, -2 / 64), (3, -3 / 64)], [(3, -3 / 64), (4, -4 / 64)]]
        assert sampler.compute_logprobs(prompt).result() == [None, -2 / 64, -3 / 64]
        scored = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=0), include_prompt_logprobs=True).result()
        assert (scored.sequences, scored.prompt_logprobs) == ([], [None, -2 / 64, -3 / 64])
    asked = next(one.operation for one in orchestrator.submits if isinstance(one.operation, Sample))
    assert (asked.seed, asked.temperature, asked.top_k, asked.top_p) == (5, 0.5, 4, 0.5)
    assert (asked.stop_strings, asked.stop_ids, asked.ignore_end) == (("x",), (), False)

    rest = client.create_rest_client()
    assert rest.get_server_capabilities().result().supported_models[0].model_name == "tiny"
    assert [run.training_run_id for run in rest.list_training_runs().result().training_runs]
    assert rest.get_training_run(training.model_id).result().lora_rank == 8
    assert len(rest.list_checkpoints(training.model_id).result().checkpoints) == 2
    assert len(rest.list_user_checkpoints().result().checkpoints) == 2
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8
    rest.set_checkpoint_ttl_from_tinker_path(path, 100).result()
    session = training.model_id.partition(":")[0]
    used = rest.get_current_checkpoint_storage_usage().result().data
    assert [(one.user_name, one.checkpoint_count, one.size_bytes) for one in used] == [
        ("training", 2, 900_000),
        ("recovery", 1, 300_000),
        ("other", 0, 1),
    ]
    assert {one.project_id for one in used} == {"storage_limit 1.5 MB"}
    assert rest.get_session(session).result().sampler_ids
    assert session in rest.list_sessions().result().sessions
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert len(rest.list_checkpoints(training.model_id).result().checkpoints) == 1


@with_xorl
def test_the_other_client_trains_samples_and_keeps_house(xorl_client, client, orchestrator, url):
    """Catches what it cannot read, in the calls that it makes beside those of the first."""
    types = xorl_client.types
    training = client.create_lora_training_client(base_model="tiny", rank=32, model_id="mine")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS),
        loss_fn_inputs={"target_tokens": TARGETS, "weights": [0.0, 0.5, 1.0]},
    )
    trained = training.forward_backward([datum], "causallm_loss", loss_fn_params={"beta": 0.5}).result()
    assert trained.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(LOGPROBS)
    assert trained.metrics["loss:sum"] == pytest.approx(9.5 / 64)
    assert training.forward([datum], "causallm_loss").result().metrics["loss:sum"] == pytest.approx(9.5 / 64)
    stepped = training.optim_step(types.AdamParams(learning_rate=0.5)).result()
    assert stepped.metrics["learning_rate"] == 0.5
    saved = training.save_state("ck0").result()
    assert saved.path == "xorl://mine/weights/ck0"
    training.load_state_with_optimizer(saved.path).result()
    sampled = training.save_weights_for_sampler("sw0").result()
    assert sampled.path == "xorl://mine/sampler_weights/sw0"
    sampler = client.create_sampling_client(model_path=sampled.path, base_url=url)
    params = types.SamplingParams(max_tokens=3, temperature=0.5)
    answer = sampler.sample(types.ModelInput.from_ints(TOKENS), num_samples=2, sampling_params=params).result()
    assert [list(one.tokens) for one in answer.sequences] == [[4, 5, 6], [5, 6, 7]]
    assert list(answer.sequences[0].logprobs) == [-4 / 64, -5 / 64, -6 / 64]
    asked = orchestrator.submits[-1].operation
    assert (asked.sampler.name, asked.temperature, asked.max_tokens) == ("sw0", 0.5, 3)

    assert training.health_check()["status"] == "healthy"
    assert len(training.list_checkpoints().result().checkpoints) == 2
    rest = client.create_rest_client()
    assert rest.get_weights_info(saved.path).result().is_lora
    assert rest.list_training_runs().result().training_runs[0].training_run_id == "mine"
    assert training.save_full_weights_safetensors("full").result().num_shards == 1
    assert training.delete_checkpoint("weights/ck0").result().success
    assert training.add_inference_endpoint("127.0.0.1", 9).result().success
    assert training.list_inference_endpoints().result().count == 1
    assert training.connect_inference_endpoint("127.0.0.1").result().success
    assert training.sync_weights_to_inference().result().success
    assert training.disconnect_inference_endpoint().result().success
    assert training.remove_inference_endpoint("127.0.0.1", 9).result().success
    with pytest.raises(Exception, match="does not host models elsewhere"):
        training.update_serverless_weights("hosted", "key", "token", "tiny").result()
    training.forward([datum], "causallm_loss").result()
    numbers = [submit.seq_id for submit in orchestrator.submits if submit.seq_id] + [orchestrator.tombstones[0][1]]
    assert sorted(numbers) == list(range(1, len(numbers) + 1)), "a number that went nowhere is waited for"
    killed = training.kill_session(save_checkpoint=True).result()
    assert killed.success
    assert killed.checkpoint_path.startswith("xorl://mine/weights/killed-")
    assert "mine" not in orchestrator.models


@pytest.mark.parametrize("key", ["tml-the-right-token-of-it", "tml-some-other-token-here"])
@in_a_child
def test_a_token_lets_its_client_in_and_no_other(tmp_path, key):
    """Catches a service with a token that anybody may use, or one of the clients cannot."""
    with served(tmp_path, token="tml-the-right-token-of-it") as (url, orchestrator):
        import tinker  # noqa: PLC0415
        import xorl_client  # noqa: PLC0415

        def clients():
            tinker.ServiceClient(base_url=url, api_key=key).create_lora_training_client("tiny").result()
            xorl_client.ServiceClient(base_url=url, api_key=key).create_lora_training_client("tiny")

        if key.endswith("of-it"):
            clients()
            assert len(orchestrator.models) == 2
            return
        with pytest.raises(tinker.AuthenticationError):
            clients()
        with pytest.raises(Exception, match="token is wrong"):
            xorl_client.ServiceClient(base_url=url, api_key=key).create_lora_training_client("tiny")
        assert orchestrator.models == {}
