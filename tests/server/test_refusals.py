"""What the API refuses by name, since it is not built or not served here."""

import pytest

from answering_orchestrator import json_datum


def test_what_is_not_built_is_refused_by_name(client, orchestrator):
    """Catches an option of a client that is taken and does nothing."""
    prompt = {"prompt": {"chunks": [{"tokens": [1]}]}}
    for path, body, says in (
        ("api/v1/create_model", {"base_model": "b", "lora_config": {"dropout": 0.1}}, "dropout"),
        ("api/v1/create_model", {"base_model": "b", "lora_config": {"rank": 100000}}, "0 (full weights) to 65536, got"),
        ("api/v1/create_model", {"base_model": "b", "lora_config": {"rank": 0}}, "a rank of 1 or more, or start a"),
        ("api/v1/create_model", {"base_model": "b", "optimizer_config": {"type": "dimuon"}}, "dimuon"),
        ("api/v1/asample", {**prompt, "prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k must be 0 to"),
        ("api/v1/asample", {**prompt, "prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n needs prompt_logprobs"),
        ("api/v1/asample", {**prompt, "record_stability_info": True}, "another loss_fn, such as ppo, cispo or gspo"),
        ("api/v1/asample", {**prompt, "sampling_params": {"stop": [3, 64]}}, "stop has token 64, but token ids"),
        ("api/v1/asample", {**prompt, "sampling_params": {"stop": [2**70]}}, "stop has values that are not token ids"),
        ("generate", {"input_ids": [1], "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids has token -1"),
        ("api/v1/asample", {**prompt, "sampling_params": {"min_p": 0.5}}, "sampling_params.min_p is not a parameter"),
        ("api/v1/asample", {**prompt, "sampling_params": {"max_token": 5}}, "did you mean max_tokens?"),
        ("api/v1/asample", {**prompt, "sampling_params": {"stop": ""}}, "stop must be non-empty"),
        ("api/v1/asample", {**prompt, "base_model": "other"}, "this service samples from tiny, got 'other'"),
        (
            "api/v1/asample",
            {**prompt, "sampling_session_id": "s", "model_path": "tinker://m/sampler_weights/a"},
            "both choose the weights",
        ),
        ("api/v1/optim_step", {"adam_params": {"beta3": 0.5}}, "adam_params.beta3 is not a parameter"),
        (
            "api/v1/forward_backward",
            {
                "forward_backward_input": {
                    "data": [json_datum()],
                    "loss_fn_params": {"a": 1},
                    "loss_fn_config": {"b": 2},
                }
            },
            "loss_fn_params and loss_fn_config are synonyms",
        ),
        ("api/v1/create_model", {"base_model": "b", "lora_config": {"use_rslora": True}}, "lora_config.use_rslora"),
        ("generate", {"input_ids": [1], "sampling_params": {"max_tokens": 5}}, "did you mean max_new_tokens?"),
        ("generate", {"input_ids": [1], "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ("generate", {"input_ids": [1], "sampling_params": {"n": 0}}, "n must be 1 to"),
        ("generate", {"input_ids": [1], "token_ids_logprob": [5]}, "token_ids_logprob is not supported"),
        ("generate", {"input_ids": [1], "image_data": "a.png"}, "image_data is not supported"),
        ("api/v1/save_weights_for_sampler", {"kind": "inflight", "path": "x"}, "inflight"),
        ("api/v1/save_weights_external", {"path": "x", "age_encryption_recipients": ["a"]}, "encrypt"),
        ("generate", {"input_ids": [1], "stream": True}, "stream"),
        ("generate", {"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p"),
        ("sync_inference_weights", {"sync_method": "rdma_direct"}, "sync_method"),
        ("sync_inference_weights", {"quantization": {"quant_method": "awq"}}, 'quant_method must be "fp8"'),
        ("sync_inference_weights", {"quantization": {"weight_block_size": [64, 64]}}, "[128, 128]"),
        ("api/v1/set_sync_quantization", {"quantization": {"activation_scheme": "static"}}, "activation_scheme"),
        ("api/v1/set_sync_quantization", {"quantization": {"scale_fmt": "ue8m0"}}, "unknown scale_fmt"),
        ("api/v1/set_sync_quantization", {"quantization": {"modules_to_not_convert": "x"}}, "a list of names"),
        ("sync_inference_weights", {"pools": ["default"]}, "weights are sent to all endpoints"),
        ("sync_inference_weights", {"buffer_size_mb": 0}, "buffer_size_mb must be 1 or more"),
        ("add_inference_endpoint", {"host": "h", "port": 1, "pool": "other"}, "pool"),
        ("add_inference_endpoint", {"host": "h", "port": 1, "buffer_size_mb": 0}, "buffer_size_mb must be 1 or more"),
        ("add_inference_endpoint", {"host": "h", "port": 1, "buffer_size_mb": -5}, "buffer_size_mb must be 1 or more"),
        ("add_inference_endpoint", {"host": "h", "port": 1, "master_port": 70000}, "master_port must be 1 to 65535"),
    ):
        answer = client.post(f"/{path}", json=body)
        assert answer.status_code == 400, path
        assert says in answer.json()["detail"]
    assert (orchestrator.submits, orchestrator.endpoints) == ([], {})


def test_unknown_parameters_that_request_nothing_are_ignored(client, orchestrator):
    """Catches a newer release of a client, whose defaults of new parameters are refused."""
    later = {"later": None, "later_flag": False, "later_number": 0.0, "later_list": [], "later_text": ""}
    prompt = {"chunks": [{"tokens": [1]}]}
    engine = {"no_stop_trim": True, "spaces_between_special_tokens": False, "custom_params": None, "stream_interval": 1}
    for path, body in (
        ("api/v1/asample", {"prompt": prompt, "sampling_params": {"max_tokens": 2, **later}}),
        ("api/v1/optim_step", {"model_id": "m", "adam_params": {"learning_rate": 0.5, **later}}),
        ("api/v1/create_model", {"base_model": "tiny", "lora_config": {"rank": 4, **later}}),
        ("generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 2, **engine, **later}, "stream": False}),
    ):
        answer = client.post(f"/{path}", json=body)
        assert answer.status_code == 200, answer.text
    sampled, step, created, generated = (each.operation for each in orchestrator.submits)
    assert (sampled.max_tokens, step.learning_rate, created.lora.rank, generated.max_tokens) == (2, 0.5, 4, 2)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("update_serverless_weights", 400, "add_inference_endpoint and sync_inference_weights"),
        ("update_dedicated_endpoint", 400, "add_inference_endpoint and sync_inference_weights"),
        ("create_custom_loss", 400, "forward_backward_custom computes a loss in the client"),
        ("no_such_call", 404, "no POST /api/v1/no_such_call"),
    ],
)
def test_a_call_that_is_not_served_leaves_no_gap(client, orchestrator, path, status, says):
    """Catches a model whose next call waits for a number that went to a path of another service."""
    answer = client.post(f"/api/v1/{path}", json={"model_id": "m", "seq_id": 3, "hf_token": "secret"})
    assert answer.status_code == status
    assert says in answer.json()["detail"]
    assert "secret" not in answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert (orchestrator.submits, orchestrator.tombstones) == ([], [("m", 3)])
    assert client.post(f"/api/v1/{path}", content=b"no JSON").status_code == status
    assert client.get(f"/api/v1/{path}").status_code == 404


def test_what_has_no_meaning_here_is_refused_with_the_reason(client, orchestrator):
    """Catches a client that is told of a wrong address, when it asks for what a service of one key cannot have."""
    checkpoint = "api/v1/training_runs/m/checkpoints/weights/one"
    for method, path, says in (
        ("POST", "api/v1/copy_weights", "no projects to copy weights between"),
        ("POST", f"{checkpoint}/publish", "can already read any checkpoint"),
        ("DELETE", f"{checkpoint}/publish", "can already read any checkpoint"),
        ("PUT", "api/v1/sessions/s/project", "has no projects"),
        ("GET", "api/v1/sessions/s/trace_export", "records no traces"),
        ("POST", "api/v1/join_sampling_session", "a clone samples without it"),
    ):
        answer = client.request(method, f"/{path}")
        assert (answer.status_code, says in answer.json()["detail"]) == (400, True), answer.text
        assert answer.headers["x-should-retry"] == "false"
    forward = {"data": [json_datum()], "loss_fn": "stable_reinforce"}
    call = {"model_id": "m", "seq_id": 1, "forward_backward_input": forward}
    answer = client.post("/api/v1/forward_backward", json=call)
    assert (answer.status_code, "its objective is not published" in answer.json()["detail"]) == (400, True)
    assert orchestrator.tombstones == [("m", 1)]
