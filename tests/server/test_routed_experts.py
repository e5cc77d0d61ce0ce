"""Recorded experts on their way through the API: every form that engines send, and those that it returns."""

import base64

import numpy as np
import pytest

from answering_orchestrator import json_datum, routes_of

RECORD = np.arange(3 * 2 * 2).reshape(3, 2, 2)


def text(dtype: str) -> str:
    return base64.b64encode(RECORD.astype(dtype).tobytes()).decode()


def array(data: object, **fields: object) -> dict[str, object]:
    return {"data": data, "shape": [3, 2, 2], **fields}


# As vLLM (an int16 array), SGLang (int32 bytes, with or without a shape) and prime-rl (bytes, shape and dtype) send it.
FORMS: dict[str, object] = {
    "nested": RECORD.tolist(),
    "bytes": text("<i4"),
    "bytes, shape": array(text("<i4")),
    "int16": array(text("<i2"), dtype="int16"),
    "uint8": array(text("u1"), dtype="uint8"),
    "values": array(RECORD.ravel().tolist(), dtype="int64"),
}


@pytest.mark.parametrize("path", ["forward_backward", "forward"])
@pytest.mark.parametrize("form", FORMS)
def test_all_forms_of_a_record_mean_the_same(client, orchestrator, path: str, form: str) -> None:
    # Catches a form that is read in another order of its axes, or in another dtype.
    record = FORMS[form]
    calls = (
        {"data": [json_datum(routed_experts=record), json_datum()]},
        {"data": [json_datum(), json_datum()], "routed_experts": [record, None]},
    )
    for seq_id, call in enumerate(calls, 1):
        body = {"model_id": "m", "seq_id": seq_id, f"{path}_input": call}
        answer = client.post(f"/api/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text
        first, second = orchestrator.submits[-1].operation.data
        assert second.routed_experts is None
        found = first.routed_experts.numpy()
        assert found.dtype == np.int16
        np.testing.assert_array_equal(found, RECORD.ravel() if form == "bytes" else RECORD)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("?", r"data\[0\]\.routed_experts: the text is not base64"),
        (base64.b64encode(b"12345").decode(), "5 bytes are no int32 values"),
        ([[[1, 2]], [[1]]], "all tokens must have the same number of layers"),
        ([[[1, 2]], []], "all tokens must have the same number of layers"),
        ([[1, 2]], r"routed_experts\[0\]\[0\]"),
        ([[[1, -(2**40)]]], "is not the index of an expert"),
        ([[[1, 2**15]]], "32768 is not the index of an expert"),
        (array(text("<i4"), dtype="float32"), "dtype must be one of uint8, .* got 'float32'"),
        (array(text("<i4"), shape=[3, 2, 3]), r"shape must be \[tokens, layers, experts per token\] of the 12 values"),
        (array(text("<i4"), shape=[3, 4]), "shape must be"),
        (array(text("<i4"), rows=3), "unknown field `rows`"),
    ],
)
def test_what_is_no_record_is_refused(client, orchestrator, record: object, message: str) -> None:
    # Catches a record that is dropped, and one that is cut to fit.
    body = {"model_id": "m", "seq_id": 1, "forward_backward_input": {"data": [json_datum(routed_experts=record)]}}
    answer = client.post("/api/v1/forward_backward", json=body)
    assert answer.status_code == 400
    with pytest.raises(ValueError, match=message):
        raise ValueError(answer.json()["detail"])
    assert orchestrator.submits == []


def test_records_that_belong_to_no_datum_are_refused(client, orchestrator) -> None:
    # Catches weights that are ignored, and records for other data than the client means.
    record = RECORD.tolist()
    for call, message in (
        (
            {"data": [json_datum()], "routed_expert_logits": [[[[0.5]]]]},
            "experts are weighted by the trainer's own scores",
        ),
        (
            {"data": [json_datum(), json_datum()], "routed_experts": [record]},
            "routed_experts has 1 records for 2 datums",
        ),
        ({"data": [json_datum(routed_experts=record)], "routed_experts": [record]}, "datum 0 are given twice"),
    ):
        body = {"model_id": "m", "seq_id": 1, "forward_backward_input": call}
        answer = client.post("/api/v1/forward_backward", json=body)
        assert answer.status_code == 400
        assert message in answer.json()["detail"]
    assert orchestrator.submits == []


def test_samples_return_the_experts_of_all_tokens_but_the_last(client, orchestrator) -> None:
    # Catches the rows of another sample, a form that engines do not have, and an encoding that loses them.
    expected = [routes_of(np.array([5, 6, *range(7 + index, 10 + index)])).numpy() for index in range(2)]
    params = {"max_new_tokens": 3, "n": 2}
    asked = {"input_ids": [5, 6, 7], "sampling_params": params, "return_routed_experts": True}
    for answer, routes in zip(client.post("/generate", json=asked).json(), expected, strict=True):
        found = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
        np.testing.assert_array_equal(found.reshape(-1, 3, 2), routes)
    [meta] = [client.post("/generate", json=asked | {"sampling_params": {}}).json()["meta_info"]]
    assert "routed_experts" in meta
    del asked["return_routed_experts"]
    assert "routed_experts" not in client.post("/generate", json=asked).json()[0]["meta_info"]

    prompt = {"prompt": {"input_ids": [5, 6, 7]}, "sampling_params": {"max_tokens": 3}, "num_samples": 2}
    for headers in ({}, {"accept": "application/x-protobuf"}):
        sent = client.post("/api/v1/asample", json=prompt | {"return_routed_experts": True}).json()
        answer = client.post("/api/v1/retrieve_future", json={"request_id": sent["request_id"]}, headers=headers)
        for sequence, routes in zip(answer.json()["sequences"], expected, strict=True):
            record = sequence["routed_experts"]
            assert (record["shape"], record["dtype"]) == ([5, 3, 2], "int32")
            found = np.frombuffer(base64.b64decode(record["data"]), "<i4").reshape(record["shape"])
            np.testing.assert_array_equal(found, routes)
