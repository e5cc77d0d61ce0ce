"""/generate, in the format of an inference engine."""

from pathlib import Path

from answering_orchestrator import asked_at


def test_likely_tokens_are_told_by_the_call_of_an_inference_engine(client, orchestrator):
    """Catches an option of /generate that is computed and not answered."""
    asked = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 2}, "return_logprob": True}
    meta = client.post("/generate", json={**asked, "top_logprobs_num": 2, "logprob_start_len": 1}).json()["meta_info"]
    assert [[token for _, token, _ in row] for row in meta["output_top_logprobs"]] == [[8, 9], [9, 10]]
    assert [row[1] for row in meta["input_token_logprobs"]] == [6, 7]
    assert [len(row) for row in meta["input_top_logprobs"]] == [2, 2]
    assert not [name for name in client.post("/generate", json=asked).json()["meta_info"] if "top" in name]


def test_the_call_of_an_inference_engine_may_be_about_the_prompt_alone(client, orchestrator):
    """Catches an error of the service for clients that score a prompt without a token behind it."""
    params = {"max_new_tokens": 0}
    asked = {"input_ids": [5, 6, 7], "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    answer = client.post("/generate", json=asked)
    assert answer.status_code == 200, answer.text
    scored = answer.json()
    assert (scored["output_ids"], scored["meta_info"]["output_token_logprobs"]) == ([], [])
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert [row[1] for row in scored["meta_info"]["input_token_logprobs"]] == [5, 6, 7]
    each = client.post("/generate", json=asked | {"sampling_params": params | {"n": 2}}).json()
    assert [one["output_ids"] for one in each] == [[], []]


def test_the_call_of_an_inference_engine_has_text_and_tokens_as_the_engine_returns_them(tmp_path):
    """Catches a stop string in a text, a text prompt whose tokens are missing, and an option that does nothing."""
    tokenizer = Path(__file__).parents[2] / "configs" / "quickstart"
    with asked_at(tmp_path, tokenizer=str(tokenizer)) as (client, orchestrator):

        def generated(**params):
            asked = {"text": "AB", "return_logprob": True, "logprob_start_len": 0}
            answer = client.post("/generate", json={**asked, "sampling_params": {"max_new_tokens": 3, **params}})
            assert answer.status_code == 200, answer.text
            return answer.json()

        whole = generated()
        prompt = orchestrator.submits[-1].operation.prompt.numpy().tolist()
        meta = whole["meta_info"]
        assert [row[1] for row in meta["input_token_logprobs"]] == prompt
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), 3)
        text = whole["text"]
        stopped = generated(stop=[text[1]])
        assert (stopped["text"], stopped["output_ids"]) == (text[0], whole["output_ids"])
        assert generated(stop=[text[1]], no_stop_trim=True)["text"] == text[:2]
        orchestrator.says = [1, 40, 41, 42]
        kept, skipped = (generated(skip_special_tokens=skip)["text"] for skip in (False, True))
        assert kept == f"<|pad|>{skipped}"
