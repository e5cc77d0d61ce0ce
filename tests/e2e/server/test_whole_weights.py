"""A service that trains all weights, sharded over its workers, for one client at a time."""

import pytest
import torch
import transformers

from child import in_a_child, in_child
from engines import continued, fake_engines
from service import Serve, Service

MODEL = "xorl/quickstart"
GENERATOR = torch.Generator().manual_seed(0)
SEQUENCES = [torch.randint(3, 280, (length,), generator=GENERATOR) for length in (6, 40, 3, 18)]


@pytest.fixture(scope="module")
def service(serve: Serve) -> Service:
    return serve(
        enable_lora=False,
        lora_rank=32,
        lora_alpha=16,
        lora_target_modules=None,
        data_parallel_mode="fsdp2",
        data_parallel_replicate_size=1,
        data_parallel_shard_size=2,
    )


def exported(service: Service, model_id: str) -> transformers.PreTrainedModel:
    """The model as transformers reads the service's export of it."""
    service.post("api/v1/save_full_weights_safetensors", model_id=model_id, name="start", dtype="float32")
    folder = service.output_dir / "external_weights" / model_id.replace(":", "~") / "start"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def plain_loss(model: transformers.PreTrainedModel) -> torch.Tensor:
    """Summed over all tokens."""
    losses = []
    for tokens in SEQUENCES:
        logits = model(input_ids=tokens[None, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
    return torch.stack(losses).sum()


def test_a_script_that_ends_without_closing_its_session_delays_the_next_one_by_half_a_minute(service: Service) -> None:
    # Catches every second run of a researcher that fails: the client that has ended counts as active.
    def run(*, closes: bool) -> None:
        client = service.tinker()
        client.create_lora_training_client(base_model=MODEL, rank=4).result(timeout=90)
        if closes:
            client.close("success").result()

    in_child(lambda: run(closes=False))
    in_child(lambda: run(closes=True))


@in_a_child
def test_steps_of_all_weights_are_those_of_plain_torch(service: Service) -> None:
    # Would catch a gradient that is averaged over shards, a number of Adam that is lost, other weights exported.
    from tinker import types  # noqa: PLC0415  (a dependency group that is not always there)

    client = service.tinker()
    training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    info = training.get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    other = service.post("api/v1/create_model", model_id="other", base_model=MODEL)["request_id"]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": torch.ones(len(tokens) - 1)},
        )
        for tokens in SEQUENCES
    ]
    adam = types.AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.5, grad_clip_norm=50.0)
    model = exported(service, training.model_id)
    parameters = list(model.parameters())
    plain = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    for _ in range(3):
        trained = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(adam).result()
        loss = plain_loss(model)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 50.0)
        plain.step()
        plain.zero_grad()
        assert trained.result().metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
        assert stepped.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    saved = training.save_state("end").result()
    sampler = training.save_weights_and_get_sampling_client()
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(SEQUENCES[1].tolist())).result()
    after = training.forward(data, "cross_entropy").result()
    assert scored[1:] == pytest.approx(after.loss_fn_outputs[1]["logprobs"].to_torch().tolist(), abs=1e-4)
    assert after.metrics["loss:sum"] == pytest.approx(plain_loss(model).item(), rel=1e-5)
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(adam).result()
    training.load_state(saved.path).result()
    assert training.forward(data, "cross_entropy").result().metrics == after.metrics
    waits = service.post("api/v1/retrieve_future", request_id=other)
    assert waits["type"] == "try_again"
    assert waits["queue_state_reason"].startswith(f"model {training.model_id} uses the base")
    client.close("success").result()
    created = service.post("api/v1/retrieve_future", request_id=other)
    assert created["model_id"] == "other", "it does not get the base when the session ends"
    service.post("api/v1/unload_model", model_id="other")


def test_weights_are_sampled_where_they_were_sent(service: Service) -> None:
    # Catches shards that are sent as wholes, and samples of a step that the endpoint does not hold.
    tokens = [5, 6, 7, 8]
    with fake_engines([]) as (engine,):
        endpoint = {"host": "127.0.0.1", "port": engine.port}
        assert service.post("add_inference_endpoint", **endpoint)["success"]

        def drive() -> tuple[list[int], list[int], list[int]]:
            import tinker  # noqa: PLC0415  (a dependency group that is not always there)

            with service.tinker() as client:
                training = client.create_lora_training_client(base_model=MODEL, rank=8)
                target = tinker.TensorData(data=[6, 7, 8, 9], dtype="int64", shape=[4])
                prompt = tinker.ModelInput.from_ints(tokens)
                data = tinker.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": target})
                params = tinker.SamplingParams(max_tokens=3, temperature=1.0, seed=4)

                def sampled() -> list[int]:
                    sampler = training.save_weights_and_get_sampling_client()
                    return list(sampler.sample(prompt, 1, params).result().sequences[0].tokens)

                def step() -> None:
                    training.forward_backward([data], "cross_entropy").result()
                    training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()

                step()
                model_id = training.get_info().model_id
                sync = {"model_id": model_id, "buffer_size_mb": 1}
                before = sampled()
                assert service.post("sync_inference_weights", **sync)["success"]
                at_endpoint = sampled()
                step()
                after = sampled()
                form = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["down_proj"]}
                service.post("api/v1/set_sync_quantization", quantization=form)
                assert service.post("sync_inference_weights", **sync)["success"]
                return before, at_endpoint, after

        before, at_endpoint, after = in_child(drive)
        seen = engine.seen()
        service.post("remove_inference_endpoint", **endpoint)
        assert at_endpoint == continued(tokens, seen["version"], 3, seed=4)
        assert len(seen["requests"]) == 1, "the others are of weights that the endpoint did not hold"
        assert len(before) == len(after) == 3
        assert [tensor["shape"][0] for name, tensor in seen["tensors"].items() if "embed" in name] == [288]
        scales = {name.removesuffix("_scale_inv") for name in seen["tensors"] if name.endswith("_scale_inv")}
        assert scales == {name for name, one in seen["tensors"].items() if one["dtype"] == "float8_e4m3fn"}
        modules = {name.split(".")[-2].removesuffix("_proj") for name in scales}
        assert modules == {"q", "k", "v", "o", "gate", "up"}
