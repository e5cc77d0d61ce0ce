"""Both public clients on a service that trains: its numbers against plain torch, and every call that they have."""

import os
import pickle
import signal
import socket
import time
from pathlib import Path

import httpx
import peft
import pytest
import torch
import transformers
import zmq
from torch import Tensor

from child import in_a_child, in_child
from service import Service
from xorl.server.channel.wire import encode_header

MODEL = "xorl/quickstart"
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = (5, 17, 3, 30)
SEQUENCES = [torch.randint(3, 280, (length + 1,), generator=GENERATOR) for length in LENGTHS]
WEIGHTS = [torch.rand(length, generator=GENERATOR) for length in LENGTHS]
ADVANTAGES = [torch.randn(length, generator=GENERATOR) for length in LENGTHS]
OLD = [-5 + torch.randn(length, generator=GENERATOR) for length in LENGTHS]
MASKS = [(torch.arange(length) >= length // 2).float() for length in LENGTHS]


def gspo(new, old, adv):
    marked = torch.arange(len(new)) >= len(new) // 2
    ratio = torch.exp((new - old).detach()[marked].mean() + new - new.detach())
    return -torch.min(ratio * adv, ratio.clamp(0.7, 1.1) * adv).sum()


# The losses as they are published, each a sum over tokens of its log-probability, the old one and the advantage.
FORMULAS = {
    "importance_sampling": ({}, lambda new, old, adv: -(torch.exp(new - old) * adv).sum()),
    "ppo": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
        lambda new, old, adv: -torch.min(torch.exp(new - old) * adv, torch.exp(new - old).clamp(0.7, 1.1) * adv).sum(),
    ),
    "gspo": ({"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}, gspo),
    "cispo": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
        lambda new, old, adv: -(torch.exp(new - old).clamp(0.5, 2.0).detach() * new * adv).sum(),
    ),
    "dro": ({"beta": 0.1}, lambda new, old, adv: -(new * adv - 0.05 * (new - old) ** 2).sum()),
}


def datums(types, *, weights=False, policy=False):
    made = []
    for tokens, weight, advantage, old, mask in zip(SEQUENCES, WEIGHTS, ADVANTAGES, OLD, MASKS, strict=True):
        inputs = {"target_tokens": tokens[1:]}
        if weights:
            inputs["weights"] = weight
        if policy:
            inputs |= {"logprobs": old, "advantages": advantage, "sequence_ratio_mask": mask}
        # One client takes tensors and the other lists.
        if not types.__name__.startswith("tinker"):
            inputs = {name: values.tolist() for name, values in inputs.items()}
        made.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs))
    return made


def plain_logprobs(model) -> list[Tensor]:
    """Of each target, a sequence at a time."""
    found = []
    for tokens in SEQUENCES:
        logits = model(input_ids=tokens[None, :-1]).logits[0]
        found.append(torch.log_softmax(logits.float(), -1).gather(1, tokens[1:, None])[:, 0])
    return found


def plain_model(service: Service, base_model_id: str, adapter: Path) -> peft.PeftModel:
    """What transformers and peft make of the service's exports."""
    base = service.output_dir / "external_weights" / base_model_id / "base"
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)


@in_a_child
def test_losses_gradients_and_steps_are_those_of_plain_torch(service: Service) -> None:
    # Catches a loss that is divided, a shift, a number of Adam that is lost, weights or adapters exported as others.
    other = service.xorl().create_lora_training_client(base_model=MODEL, model_id="plain")
    other.save_full_weights_safetensors("base", dtype="float32").result()
    with service.tinker() as client:
        training = made(client.create_lora_training_client(base_model=MODEL, rank=4, seed=1))
        from tinker import types  # noqa: PLC0415  (a dependency group that is not always there)

        still = types.AdamParams(learning_rate=0.0)
        moved = types.AdamParams(learning_rate=0.03)
        training.forward_backward(datums(types, weights=True), "cross_entropy")
        training.optim_step(moved).result()
        folder = service.output_dir / "weights" / training.model_id.replace(":", "~")
        training.save_state("moved").result()
        model = plain_model(service, "plain", folder / "moved")
        parameters = [one for one in model.parameters() if one.requires_grad]

        def compare(trained, stepped, loss: Tensor, logprobs: list[Tensor]) -> None:
            for output, plain in zip(trained.loss_fn_outputs, logprobs, strict=True):
                torch.testing.assert_close(output["logprobs"].to_torch(), plain.detach(), rtol=1e-5, atol=1e-5)
            assert trained.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-4)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1e9)
            assert stepped.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)

        for name, (options, formula) in FORMULAS.items():
            trained = training.forward_backward(datums(types, policy=True), name, loss_fn_config=options)
            stepped = training.optim_step(still)
            logprobs = plain_logprobs(model)
            loss = sum(map(formula, logprobs, OLD, ADVANTAGES))
            compare(trained.result(), stepped.result(), loss, logprobs)
            model.zero_grad()

        # A fresh optimizer, and steps with every number; two calls make one gradient.
        again = client.create_training_client_from_state(f"tinker://{training.model_id}/weights/moved")
        adam = types.AdamParams(
            learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5, grad_clip_norm=3.0
        )
        plain_adam = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
        data = datums(types, weights=True)
        for _ in range(3):
            again.forward_backward(data[:1], "cross_entropy")
            again.forward_backward(data[1:], "cross_entropy")
            stepped = again.optim_step(adam).result()
            losses = [-(w * values).sum() for w, values in zip(WEIGHTS, plain_logprobs(model), strict=True)]
            sum(losses).backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 3.0)
            assert stepped.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
            plain_adam.step()
            plain_adam.zero_grad()
        final = again.forward(data, "cross_entropy").result()
        loss = -sum((w * values).sum() for w, values in zip(WEIGHTS, plain_logprobs(model), strict=True))
        assert final.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)


@in_a_child
def test_every_call_of_one_client(service: Service) -> None:
    # Catches a call that the service takes otherwise than the client means it, in what surrounds training.
    with service.tinker() as client:
        import tinker  # noqa: PLC0415

        types = tinker.types
        rest = client.create_rest_client()
        # Older releases lack some of these calls (tools/check_clients.py); what they have must work.
        (supported,) = made(getattr(rest, "get_server_capabilities", client.get_server_capabilities)()).supported_models
        assert supported.model_name == MODEL
        training = made(client.create_lora_training_client(MODEL, rank=8, user_metadata={"run": "conformance"}))
        info = training.get_info()
        assert (info.is_lora, info.lora_rank) == (True, 8)
        known = training.get_tokenizer().decode([40, 41, 42])
        assert known
        data = datums(types, weights=True)
        seen = training.forward(data, "cross_entropy").result()

        def squares(data, logprobs):
            return sum((values**2).sum() for values in logprobs), {"mine": 1.0}

        own = training.forward_backward_custom(data, squares).result()
        assert own.metrics["mine"] == 1.0
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01)).result()
        assert stepped.metrics["grad_norm"] > 0

        path = training.save_state("one", ttl_seconds=1000).result().path
        here = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
        assert here != seen.metrics["loss:sum"]
        training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.1)).result()
        training.load_state_with_optimizer(path).result()
        assert training.forward(data, "cross_entropy").result().metrics["loss:sum"] == here
        for again in (
            client.create_training_client_from_state(path),
            client.create_training_client_from_state_with_optimizer(path),
        ):
            assert again.forward(data, "cross_entropy").result().metrics["loss:sum"] == here

        named = training.save_weights_for_sampler("named").result().path
        prompt = types.ModelInput.from_ints(SEQUENCES[1][:-1].tolist())
        logprobs = training.forward(data, "cross_entropy").result().loss_fn_outputs[1]["logprobs"].to_torch()
        greedy = types.SamplingParams(max_tokens=6, temperature=0.0)
        drawn = types.SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, top_k=50, seed=3)
        for sampler in (
            training.save_weights_and_get_sampling_client(),
            client.create_sampling_client(model_path=named),
        ):
            assert sampler.get_tokenizer().decode([40, 41, 42]) == known
            found = sampler.compute_logprobs(prompt).result()
            assert found[0] is None
            torch.testing.assert_close(torch.tensor(found[1:]), logprobs[:-1], rtol=0, atol=1e-4)
            one = sampler.sample(prompt, 1, greedy).result().sequences[0]
            two = sampler.sample(prompt, 2, greedy).result().sequences
            assert [list(other.tokens) for other in two] == [list(one.tokens)] * 2
            texts = [sampler.sample(prompt, 2, drawn, topk_sample_logprobs=3).result() for _ in range(2)]
            assert [list(s.tokens) for s in texts[0].sequences] == [list(s.tokens) for s in texts[1].sequences]
            assert list(texts[0].sequences[0].tokens) != list(texts[0].sequences[1].tokens)
            stop = int(one.tokens[1])
            stopped = sampler.sample(
                prompt, 1, types.SamplingParams(max_tokens=6, temperature=0.0, stop=[stop])
            ).result()
            assert stopped.sequences[0].stop_reason == "stop"
            assert list(stopped.sequences[0].tokens)[-1] == stop
        base = client.create_sampling_client(base_model=MODEL)
        whole_prompt = base.sample(
            prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=2
        ).result()
        assert len(whole_prompt.prompt_logprobs) == len(whole_prompt.topk_prompt_logprobs) == prompt.length

        if hasattr(base, "get_sampler_handle"):
            handle = client.create_sampling_client(model_path=named).get_sampler_handle()
            clone = tinker.SamplingClient.from_sampler_handle(handle, api_key=service.key)
            assert clone.compute_logprobs(prompt).result() == found
        external = training.save_weights_external("adapter").result().path
        urls = rest.get_external_weights_urls(external).result().urls
        # What the client's own command for a hub wants to find.
        assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
        for name, url in urls.items():
            written = service.output_dir / "external_weights" / training.model_id.replace(":", "~") / "adapter" / name
            assert httpx.get(url, trust_env=False).content == written.read_bytes()

        checkpoints = rest.list_checkpoints(training.model_id).result().checkpoints
        assert {"weights/one", "sampler_weights/named"} <= {one.checkpoint_id for one in checkpoints}
        run = rest.get_training_run(training.model_id).result()
        assert (run.is_lora, run.lora_rank, run.base_model) == (True, 8, MODEL)
        assert run.user_metadata == {"run": "conformance"}
        assert training.model_id in [one.training_run_id for one in rest.list_training_runs().result().training_runs]
        assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 8
        rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
        session = training.model_id.partition(":")[0]
        assert training.model_id in rest.get_session(session).result().training_run_ids
        assert session in rest.list_sessions().result().sessions
        if hasattr(rest, "search_sessions"):
            (summary,) = rest.search_sessions(types.SessionSearchRequest(session_id=session)).result().sessions
            assert (summary.status.type, summary.checkpoints_count > 0) == ("active", True)
        with pytest.raises(Exception, match="every client of this service can already read"):
            rest.publish_checkpoint_from_tinker_path(path).result()
        if hasattr(rest, "copy_weights"):
            with pytest.raises(Exception, match="no projects to copy weights between"):
                rest.copy_weights(path, "project").result()
        with pytest.raises(Exception, match="its objective is not published"):
            training.forward_backward(data, "stable_reinforce").result()
        training.save_state("two").result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        left = {one.checkpoint_id for one in rest.list_user_checkpoints().result().checkpoints}
        assert "weights/one" not in left


@in_a_child
def test_every_call_of_the_other_client(service: Service) -> None:
    # Catches the same for the client that has no sessions and speaks JSON.
    from xorl_client import types  # noqa: PLC0415

    client = service.xorl()
    training = client.create_lora_training_client(base_model=MODEL, model_id="other")
    data = datums(types, weights=True)
    adam = types.AdamParams(learning_rate=0.01)
    before = training.forward(data, "causallm_loss").result()
    trained = training.forward_backward(data, "causallm_loss").result()
    assert trained.metrics["loss:sum"] == before.metrics["loss:sum"]
    logprobs = [torch.tensor(one["logprobs"].tolist()) for one in trained.loss_fn_outputs]
    loss = -sum((weight * values).sum() for weight, values in zip(WEIGHTS, logprobs, strict=True))
    assert trained.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    training.optim_step(adam).result()
    path = training.save_state("one").result().path
    here = training.forward(data, "causallm_loss").result().metrics["loss:sum"]
    assert here < before.metrics["loss:sum"]
    training.forward_backward(data, "causallm_loss").result()
    training.optim_step(adam).result()
    training.load_state_with_optimizer(path).result()
    assert training.forward(data, "causallm_loss").result().metrics["loss:sum"] == here

    saved = training.save_weights_for_sampler("sampled").result().path
    sampler = client.create_sampling_client(model_path=saved, base_url=service.url)
    prompt = types.ModelInput.from_ints(SEQUENCES[1][:-1].tolist())
    params = types.SamplingParams(max_tokens=5, temperature=0.0)
    (answer,) = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences
    assert len(answer.tokens) == len(answer.logprobs) == 5
    text = sampler.sample("this", num_samples=2, sampling_params=params).result()
    assert [len(one.tokens) for one in text.sequences] == [5, 5]
    newest = training.save_weights_and_get_sampling_client(inference_base_url=service.url)
    batch = newest.sample_batch([prompt, "this"], sampling_params=params).result()
    assert list(dict(batch.completed)[0].sequences[0].tokens) == list(answer.tokens)
    assert (batch.failed, batch.cancelled) == ([], [])

    assert training.health_check()["status"] == "healthy"
    rest = client.create_rest_client()
    assert rest.get_weights_info(path).result().lora_rank
    assert "other" in [run.training_run_id for run in rest.list_training_runs().result().training_runs]
    listed = training.list_checkpoints().result().checkpoints
    assert {"weights/one", "sampler_weights/sampled"} <= {one.checkpoint_id for one in listed}
    training.save_state("two").result()
    assert training.delete_checkpoint("weights/one").result().success
    assert training.list_inference_endpoints().result().count == 0
    killed = training.kill_session(save_checkpoint=True).result()
    assert killed.success
    for create in (client.create_training_client_from_state_with_optimizer, client.create_training_client_from_state):
        again = create(killed.checkpoint_path)
        assert again.forward(data, "causallm_loss").result().metrics["loss:sum"] == here
    assert again.delete_checkpoint_from_xorl_path("xorl://other/weights/two").result().success
    with pytest.raises(Exception, match=r"endpoint|several models"):
        again.sync_inference_weights("127.0.0.1").result()
    assert again.unload().result().model_id == "other"


def made(created):
    """A new client: older releases of one SDK return it, and newer ones a future of it."""
    return created.result() if hasattr(created, "result") else created


def losses_of(training, types, rate: float) -> list[float]:
    calls = []
    for _ in range(4):
        calls.append(training.forward_backward(datums(types, weights=True), "cross_entropy"))
        training.optim_step(types.AdamParams(learning_rate=rate)).result()
    return [call.result().metrics["loss:sum"] for call in calls]


@in_a_child
def test_both_clients_train_at_the_same_time_as_if_alone(service: Service) -> None:
    # Catches gradients, steps or answers of one client that get into the other's.
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415

    import tinker  # noqa: PLC0415
    import xorl_client  # noqa: PLC0415

    with service.tinker() as client, ThreadPoolExecutor(3) as threads:

        def one(rate: float, seed: int) -> list[float]:
            return losses_of(made(client.create_lora_training_client(MODEL, rank=4, seed=seed)), tinker.types, rate)

        def other(model_id: str) -> list[float]:
            training = service.xorl().create_lora_training_client(base_model=MODEL, model_id=model_id)
            start = training.save_state("start").result().path
            found = losses_of(training, xorl_client.types, 0.01)
            training.load_state_with_optimizer(start).result()
            assert losses_of(training, xorl_client.types, 0.01) == pytest.approx(found, rel=1e-5)
            return found

        alone = one(0.01, 5), one(0.02, 6)
        together = [threads.submit(one, 0.01, 5), threads.submit(one, 0.02, 6), threads.submit(other, "at-once")]
        results = [future.result() for future in together]
        assert results[0] == pytest.approx(alone[0], rel=1e-5)
        assert results[1] == pytest.approx(alone[1], rel=1e-5)
        assert results[2][-1] < results[2][0]


def test_a_policy_learns_a_planted_reward_from_its_own_samples(service: Service) -> None:
    # Catches samples of old weights, advantages or log-probabilities at the wrong places, and signs.
    wanted = range(100, 130)

    def whole() -> list[float]:
        with service.tinker() as client:
            from tinker import types  # noqa: PLC0415

            training = made(client.create_lora_training_client(MODEL, rank=8, seed=2))
            rewards = []
            for step in range(10):
                sampler = training.save_weights_and_get_sampling_client()
                params = types.SamplingParams(max_tokens=4, seed=100 * step, stop=[])
                samples = sampler.sample(types.ModelInput.from_ints([40, 41]), 64, params).result().sequences
                rewards.append(sum(token in wanted for one in samples for token in one.tokens) / (4 * 64))
                data = [policy_datum(types, one, wanted, rewards[-1]) for one in samples]
                trained = training.forward_backward(data, "importance_sampling").result()
                # Sampler and trainer agree, so each ratio is one.
                total = sum(float(one.loss_fn_inputs["advantages"].to_torch().sum()) for one in data)
                assert -trained.metrics["loss:sum"] == pytest.approx(total, abs=0.02)
                training.optim_step(types.AdamParams(learning_rate=0.02)).result()
            return rewards

    rewards = in_child(whole)
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), rewards


def policy_datum(types, sample, wanted: range, mean: float):
    """A sample after two tokens of prompt, each of its tokens with its own reward."""
    tokens = [40, 41, *map(int, sample.tokens)]
    advantages = [float(token in wanted) - mean for token in sample.tokens]
    inputs = {
        "target_tokens": torch.tensor(tokens[1:]),
        "logprobs": torch.tensor([0.0, *sample.logprobs]),
        "advantages": torch.tensor([0.0, *advantages]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


class Ran:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def sockets_of(service: Service) -> list[str]:
    """Of all processes of the service, as addresses."""
    inodes = set()
    for pid in [*service.worker_pids(), service.pids("orchestrator")[-1], service.pids("API")[-1]]:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
        inodes |= {link[8:-1] for link in links if link.startswith("socket:")}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({f"ipc://{row[7]}" for row in rows if len(row) == 8 and row[6] in inodes and row[7][0] == "/"})


def test_pickles_and_rubbish_on_every_socket_change_nothing(service: Service, tmp_path: Path) -> None:
    # Catches a process that unpickles, or dies of, what it is sent.
    bomb = pickle.dumps(Ran(tmp_path / "ran"))
    context = zmq.Context()
    addresses = sockets_of(service)
    assert len(addresses) == 2, "the orchestrator's and the first worker's"
    pids = [service.pids("API")[-1], service.pids("orchestrator")[-1], *service.worker_pids()]
    for address in addresses:
        for frames in ([bomb], [bomb, bomb], [b"", bomb], [encode_header("request"), bomb], [b"\x91" * 10_000] * 2):
            raw = context.socket(zmq.DEALER)
            raw.connect(address)
            raw.send_multipart(frames)
        with socket.socket(socket.AF_UNIX) as plain:
            plain.connect(address.removeprefix("ipc://"))
            plain.sendall(bomb)
    with httpx.Client(base_url=service.url, trust_env=False) as client:
        for path in ("forward_backward", "create_model", "asample", "retrieve_future", "client/config"):
            for kind in ("application/json", "application/x-protobuf", "application/octet-stream"):
                answer = client.post(f"/api/v1/{path}", content=bomb, headers={"content-type": kind})
                assert answer.status_code in (200, 400)
        time.sleep(0.5)
        context.destroy(linger=0)
        assert not (tmp_path / "ran").exists()
        assert client.get("/health").status_code == 200
        created = client.post("/api/v1/create_model", json={"model_id": "after-rubbish", "base_model": MODEL}).json()
        assert client.post("/api/v1/retrieve_future", json=created).json()["model_id"] == "after-rubbish"
    assert pids == [service.pids("API")[-1], service.pids("orchestrator")[-1], *service.worker_pids()]


def test_a_saved_model_goes_on_to_the_bit_after_a_restart(service: Service) -> None:
    # Catches a checkpoint that lacks a moment of Adam, a step, or is not on the disk when its save is answered.
    def before() -> tuple[str, list[float]]:
        with service.tinker() as client:
            from tinker import types  # noqa: PLC0415

            training = made(client.create_lora_training_client(MODEL, rank=4, seed=9))
            losses_of(training, types, 0.01)
            path = training.save_state("durable").result().path
            return path, losses_of(training, types, 0.01)

    def after() -> list[float]:
        with service.tinker() as client:
            from tinker import types  # noqa: PLC0415

            return losses_of(client.create_training_client_from_state_with_optimizer(path), types, 0.01)

    path, losses = in_child(before)
    written = len(service.log)
    assert service.process is not None
    service.process.send_signal(signal.SIGTERM)  # and once more below: one stop is often told twice
    assert service.stop() == 0
    assert "event=killed" not in service.log[written:]
    service.start()
    began = time.monotonic()
    assert in_child(after) == losses
    assert time.monotonic() - began < 60
