"""A storage that is as good as full from the first model on: nothing hangs, and finished sessions make room."""

import pytest

from child import in_a_child
from service import Serve, Service

MODEL = "xorl/quickstart"


@pytest.fixture(scope="module")
def service(serve: Serve) -> Service:
    # A checkpoint to train on takes about 930 KB.
    return serve(storage_limit="1.5MB", data_parallel_replicate_size=1)


@in_a_child
def test_sessions_come_and_go_within_a_storage_for_one_of_them(service: Service) -> None:
    # Catches a DELETE that tinker retries for ever, and runs that cannot save since those before them are finished.
    from tinker import types  # noqa: PLC0415  (a dependency group that is not always there)

    tokens = list(range(10, 42))
    targets = types.TensorData(data=[*tokens[1:], 1], dtype="int64", shape=[len(tokens)])
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": targets})
    rest = service.tinker().create_rest_client()
    for run in range(3):
        client = service.tinker()
        training = client.create_lora_training_client(base_model=MODEL, rank=8).result()
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        if run == 0:
            # The model needs it, and has no room to be saved anew.
            path = f"tinker://{training.model_id}/weights/000000"
            rest.delete_checkpoint_from_tinker_path(path).result(timeout=30)
            assert rest.list_checkpoints(training.model_id).result().checkpoints == []
            service.kill("workers")
            training.forward_backward([datum], "cross_entropy").result()
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            assert stepped.metrics["optimizer_step"] == 2, "the model was not restored as it was"
        client.close("success").result()
    used = rest.get_current_checkpoint_storage_usage().result().data
    # The journal is not limited.
    assert sum(one.size_bytes for one in used if one.user_name != "other") <= 1.5e6
    assert {one.user_name: one.checkpoint_count for one in used}["recovery"] <= 1
    assert "1.5 MB" in str(used[0].project_id)
