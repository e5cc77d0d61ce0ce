"""Numbers that no journal, message or date can hold: refused at the HTTP side, and never kept."""

import pytest

from xorl.server.identifiers import CheckpointRef
from xorl.server.queries import CheckpointInfo


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("optim_step", {"model_id": "m", "seq_id": 2**53}),
        ("save_weights", {"model_id": "m", "seq_id": 2**63}),
        ("forward_backward", {"model_id": "m", "seq_id": 2**70, "forward_backward_input": {"data": []}}),
        ("create_model", {"base_model": "tiny", "session_id": "s", "model_seq_id": 2**63}),
        ("create_sampling_session", {"session_id": "s", "sampling_session_seq_id": 2**70}),
    ],
)
def test_numbers_that_no_journal_holds_are_refused(client, orchestrator, path, body):
    """Catches a number of a request that ends the journal, and a part of it that is taken for another number."""
    answer = client.post(f"/api/v1/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert "seq_id" in answer.json()["detail"]
    assert answer.headers["x-should-retry"] == "false"
    assert orchestrator.submits == []
    assert [seq_id for _, seq_id in orchestrator.tombstones if seq_id != body["seq_id"]] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("asample", {"prompt": {"input_ids": [1]}, "sampling_params": {"top_k": 10**30}}),
        ("create_model", {"base_model": "tiny", "lora_config": {"rank": 8, "seed": 2**70}}),
        ("add_inference_endpoint", {"host": "localhost", "port": 1, "buffer_size_mb": 2**70}),
    ],
)
def test_numbers_that_no_message_holds_are_refused(client, orchestrator, path, body):
    """Catches a client that sends again and again what can never be taken."""
    answer = client.post(f"/{'' if path.startswith('add') else 'api/v1/'}{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert "64 bits" in answer.json()["detail"]
    assert orchestrator.submits == []


@pytest.mark.parametrize("path", ["sessions", "training_runs", "checkpoints"])
def test_a_listing_from_a_number_that_no_message_holds_is_refused(client, path):
    """Catches a listing that fails where what is asked for is wrong."""
    answer = client.get(f"/api/v1/{path}?offset={10**30}")
    assert answer.status_code == 400, answer.text
    assert "64 bits" in answer.json()["detail"]


@pytest.mark.parametrize("path", ["sessions", "training_runs", "checkpoints"])
def test_a_listing_of_what_is_no_number_is_refused_in_words(client, path):
    """Catches an answer in another form than all others, which clients print as it is."""
    answer = client.get(f"/api/v1/{path}?limit=ten")
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"].startswith("limit: ")
    assert "'ten'" in answer.json()["detail"]


def test_a_checkpoint_is_kept_for_a_hundred_years_at_most_or_for_ever(client, orchestrator):
    """Catches a time that no date can name, and a refused number that later calls wait for."""
    saving = {"model_id": "m", "seq_id": 4, "path": "long", "ttl_seconds": 10**12}
    setting = "/api/v1/training_runs/m/checkpoints/weights/long/ttl"
    for answer in (client.post("/api/v1/save_weights", json=saving), client.put(setting, json={"ttl_seconds": 4e9})):
        assert answer.status_code == 400, answer.text
        assert "at most 3153600000, or left out" in answer.json()["detail"]
    assert orchestrator.submits == []
    assert orchestrator.tombstones == [("m", 4)]


@pytest.mark.parametrize("expires", [1e13, 1e300])
def test_checkpoints_that_are_kept_beyond_all_dates_are_listed_with_the_others(client, orchestrator, expires):
    """Catches one client's checkpoint for which every client's listings fail."""
    ref = CheckpointRef("kept", "weights", "long")
    orchestrator.checkpoints[ref] = CheckpointInfo(ref, 0.0, 7, {}, expires)
    try:
        answer = client.get("/api/v1/checkpoints")
    finally:
        del orchestrator.checkpoints[ref]
    assert answer.status_code == 200, answer.text
    assert answer.json()["checkpoints"][0]["expires_at"] == "9999-12-31T00:00:00+00:00"
