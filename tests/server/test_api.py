"""The service's HTTP side before an orchestrator that computes its answers: what is taken, and how it leaves."""

import json
import math
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import zstandard
from starlette.requests import Request

from answering_orchestrator import FAILING_LOSS, STUCK_LOSS, VOCAB, json_datum
from xorl.server.api.context import dialect_of
from xorl.server.api.protobuf import MESSAGES, parse
from xorl.server.api.responses import json_response
from xorl.server.api.results import tensor_json
from xorl.server.datum import Array
from xorl.server.operations import BlockFp8, ForwardBackward, OptimStep, SaveWeights, SyncWeights
from xorl.server.status_queries import ErrorSeen

PROTOBUF = {"content-type": "application/x-protobuf", "x-sdk-version": "0"}


def tensor(values, dtype="float32"):
    return {"data": values, "dtype": dtype, "shape": [len(values)]}


def datum(tokens=(1, 2, 3), **inputs):
    return json_datum(tokens, inputs)


def call(data, seq_id=1, **more):
    return {"model_id": "m", "seq_id": seq_id, "forward_backward_input": {"data": data, **more}}


def result_of(client, answer, **headers):
    assert answer.status_code == 200, answer.text
    for _ in range(50):
        polled = client.post(
            "/api/v1/retrieve_future", json={"request_id": answer.json()["request_id"]}, headers=headers
        )
        if polled.headers["content-type"].startswith("application/x-protobuf"):
            return parse("ForwardBackwardOutput", polled.content)
        if polled.json().get("type") != "try_again":
            return polled.json()
    raise AssertionError("it does not finish")


def protobuf_call(data, seq_id=1, **more):
    return MESSAGES["ForwardBackwardRequest"](model_id="s:train:0", seq_id=seq_id, data=data, loss_fn="ce", **more)


def protobuf_datum(tokens, targets, **csr):
    return MESSAGES["Datum"](
        model_input=[MESSAGES["Chunk"](encoded_text={"tokens": np.array(tokens, "<i4").tobytes()})],
        loss_fn_inputs=[MESSAGES["NamedTensor"](key="target_tokens", value=targets)],
    )


def dense(values):
    values = np.array(values, "<i8")
    return MESSAGES["Tensor"](dense=values.tobytes(), dtype=2, shape=values.shape)


def test_a_call_in_json_gets_its_numbers_back(client, orchestrator):
    """Catches data that is changed, or put in another order, on its way."""
    data = [datum((1, 2, 3), weights=tensor([0.0, 0.5, 1.0])), datum((7, 8))]
    result = result_of(client, client.post("/api/v1/forward_backward", json=call(data, loss_fn_params={"beta": 0.5})))
    assert [one["logprobs"]["data"] for one in result["loss_fn_outputs"]] == [
        [-3 / 64, -5 / 64, -7 / 64],
        [-15 / 64, -17 / 64],
    ]
    assert result["metrics"]["loss:sum"] == pytest.approx((0.5 * 5 + 7 + 32) / 64)
    (submit,) = orchestrator.submits
    assert isinstance(submit.operation, ForwardBackward)
    assert (submit.dialect, submit.key, submit.seq_id) == ("xorl", "call/m/1", 1)
    assert submit.operation.loss_params == {"beta": 0.5}
    assert not submit.operation.forward_only


def test_chunks_and_ids_are_the_same_sequence(client, orchestrator):
    """Catches a chunk that is lost: both ways of writing a sequence are one request."""
    chunks = {**datum(), "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}, {"tokens": [2, 3]}]}}
    ids = {client.post("/api/v1/forward_backward", json=call([one])).json()["request_id"] for one in (datum(), chunks)}
    assert len(ids) == 1


def test_a_retry_is_the_first_request_and_another_body_is_refused(client, orchestrator):
    """Catches a retry that trains twice."""
    body = call([datum()], seq_id=5)
    first = client.post("/api/v1/forward_backward", json=body).json()
    assert client.post("/api/v1/forward_backward", json=body).json() == first
    other = client.post("/api/v1/forward_backward", json=call([datum((4, 5))], seq_id=5))
    assert other.status_code == 400
    # The place is taken: a tombstone would end a request that is there.
    assert orchestrator.tombstones == []
    assert len(orchestrator.submits) == 1


@pytest.mark.parametrize(
    ("path", "body", "key"),
    [
        ("create_model", {}, "create/default"),
        ("create_model", {"model_id": "m"}, "create/m"),
        ("create_model", {"session_id": "s", "model_seq_id": 2}, "create/s/2"),
        ("load_weights", {"path": "xorl://m/weights/w", "session_id": "s", "model_seq_id": 2}, "create/s/2"),
    ],
)
def test_a_creation_that_is_sent_again_is_the_first_one(client, orchestrator, path, body, key):
    """Catches a retry after a lost answer that makes another model."""
    ids = {client.post(f"/api/v1/{path}", json={"base_model": "tiny", **body}).json()["request_id"] for _ in range(2)}
    assert len(ids) == 1
    assert [submit.key for submit in orchestrator.submits] == [key]


@pytest.mark.parametrize("compress", [False, True])
def test_a_call_in_protobuf_gets_protobuf_back(client, orchestrator, compress):
    """Catches a field that is read or written by the wrong number, and bodies that arrive compressed."""
    data = [protobuf_datum([1, 2], dense([2, 3])), protobuf_datum([5], dense([6]))]
    options = {"clip_low_threshold": 0.5, "kl": "k3"}
    v2 = [
        MESSAGES["NamedLossOption"](key=key, value={"text": value} if isinstance(value, str) else {"number": value})
        for key, value in options.items()
    ]
    body = protobuf_call(data, loss_fn_config_v2=v2, forward_only=True).SerializeToString()
    headers = dict(PROTOBUF)
    if compress:
        body, headers["content-encoding"] = zstandard.compress(body), "zstd"
    answer = client.post("/api/v1/forward_backward", content=body, headers=headers)
    result = result_of(client, answer, accept="application/x-protobuf", **{"x-sdk-version": "0"})
    (record,) = result.loss_fn_outputs
    (field,) = record.fields
    assert np.frombuffer(field.value.offsets, "<i8").tolist() == [0, 8, 12]
    assert np.frombuffer(field.value.data, "<f4").tolist() == [-3 / 64, -5 / 64, -11 / 64]
    assert record.num_datums == 2
    assert {metric.key for metric in result.metrics} == {"loss:sum", "options:sum"}
    operation = orchestrator.submits[0].operation
    assert operation.forward_only
    assert operation.loss_params == options
    assert orchestrator.submits[0].session_id == "s"


def test_targets_of_two_dimensions_may_be_sparse_and_come_back_in_their_shapes(client, orchestrator):
    """Catches rows and columns of sparse targets that are exchanged, and datums of different widths in one record."""
    csr = {
        "values": np.array([9, 4], "<i8").tobytes(),
        "crow_indices": np.array([0, 1, 2], "<i8").tobytes(),
        "col_indices": np.array([2, 0], "<i8").tobytes(),
    }
    sparse = MESSAGES["Tensor"](sparse_csr=csr, dtype=2, shape=[2, 3])
    body = protobuf_call([protobuf_datum([1, 2], sparse), protobuf_datum([3], dense([[1, 2]]))])
    answer = client.post("/api/v1/forward_backward", content=body.SerializeToString(), headers=PROTOBUF)
    result = result_of(client, answer, accept="application/x-protobuf")
    targets = orchestrator.submits[0].operation.data[0].arrays["target_tokens"].numpy()
    assert targets.tolist() == [[0, 0, 9], [4, 0, 0]]
    shapes = [[*record.fields[0].value.trailing_shape] for record in result.loss_fn_outputs]
    assert shapes == [[3], [2]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"values": b"\0" * 24}, "row starts"),
        ({"crow_indices": np.array([0, 2, 1], "<i8").tobytes()}, "row starts"),
        ({"crow_indices": np.array([1, 1, 2], "<i8").tobytes()}, "row starts"),
        ({"col_indices": np.array([2, 3], "<i8").tobytes()}, "row starts"),
        ({"col_indices": np.array([-1, 0], "<i8").tobytes()}, "row starts"),
        ({"shape": [2**40, 2**20]}, "more than"),
        ({"shape": [-2, 3]}, "0 or more"),
        ({"shape": [2]}, "2 dimensions"),
        ({"shape": [1] * 1000}, "2 dimensions"),
    ],
)
def test_a_sparse_tensor_that_is_none_is_refused_before_it_is_made_dense(client, orchestrator, change, says):
    """Catches a few bytes that allocate terabytes, or write outside of the tensor."""
    shape = change.pop("shape", [2, 3])
    csr = {
        "values": np.array([9, 4], "<i8").tobytes(),
        "crow_indices": np.array([0, 1, 2], "<i8").tobytes(),
        "col_indices": np.array([2, 0], "<i8").tobytes(),
        **change,
    }
    targets = MESSAGES["Tensor"](sparse_csr=csr, dtype=2, shape=shape)
    body = protobuf_call([protobuf_datum([1, 2], targets)]).SerializeToString()
    answer = client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF)
    assert answer.status_code == 400
    assert says in answer.json()["detail"]
    assert orchestrator.tombstones == [("s:train:0", 1)]


BAD_DATA = {
    "token outside": (call([datum((1, VOCAB))]), f"token ids must be 0 to {VOCAB - 1}"),
    "token below": (call([datum((1, -1))]), "token ids must be"),
    "token too long": (call([datum((2**70,))]), "400"),
    "empty": (call([datum(())]), "empty"),
    "no data": (call([]), "data is empty"),
    "lengths": (call([datum(weights=tensor([1.0]))]), "for each"),
    "target outside": (call([datum(target_tokens=tensor([1, 2, VOCAB], "int64"))]), "target_tokens"),
    "fractions": (call([datum(target_tokens=tensor([1, 2, 0.5], "int64"))]), "not an integer"),
    "dtype": (call([datum(weights=tensor([1.0, 1.0, 1.0], "complex64"))]), "dtype"),
    "shape": (call([datum(weights={"data": [1.0], "dtype": "float32", "shape": [3]})]), "3 values"),
    "image": (
        call([{**datum(), "model_input": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}]),
        "only tokens are supported",
    ),
    "infinite option": (call([datum()], loss_fn_params={"beta": 1e999}), "400"),
    "nothing": ({"model_id": "m", "seq_id": 1}, "forward_backward_input"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_data_that_cannot_be_trained_on_is_refused_and_leaves_no_gap(client, orchestrator, case):
    """Catches bad data that reaches workers, and a refused number that later calls wait for."""
    body, says = BAD_DATA[case]
    answer = client.post("/api/v1/forward_backward", content=json.dumps(body))
    assert answer.status_code == 400
    assert says == "400" or says in answer.json()["detail"]
    assert answer.headers["x-should-retry"] == "false"
    assert orchestrator.submits == []
    assert orchestrator.tombstones == [("m", 1)]


def test_a_body_beyond_the_limit_is_refused_and_leaves_no_gap(client, orchestrator):
    """Catches a body that fills the memory, also one that grows when it is decompressed, or names no length."""
    long = json.dumps(call([datum(tuple([1] * 60_000))], seq_id=7)).encode()
    head = long[:1000]

    def without_length():
        for start in range(0, len(long), 4096):
            yield long[start : start + 4096]

    bomb = zstandard.compress(head + b" " * 10_000_000)
    for content, headers in ((long, {}), (without_length(), {}), (bomb, {"content-encoding": "zstd"})):
        answer = client.post("/api/v1/forward_backward", content=content, headers=headers)
        assert answer.status_code == 413, answer.text
    assert orchestrator.tombstones == [("m", 7)] * 3


def test_a_place_is_found_in_protobuf_that_is_too_long(client, orchestrator):
    """Catches a gap in the order for the client that sends protobuf."""
    body = protobuf_call([protobuf_datum([1] * 60_000, dense([1]))], seq_id=300).SerializeToString()
    assert client.post("/api/v1/forward_backward", content=body, headers=PROTOBUF).status_code == 413
    assert orchestrator.tombstones == [("s:train:0", 300)]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"\x80\x04\x95", {}, 400),
        (b"[" * 200_0, {}, 400),
        (b'"' + b"\xff" * 10 + b'"', {}, 400),
        (b"{}", {"content-encoding": "gzip"}, 415),
        (b"no zstd", {"content-encoding": "zstd"}, 400),
        (b"\xff\xff\xff", PROTOBUF, 400),
    ],
)
def test_rubbish_is_refused(client, orchestrator, content, headers, status):
    """Catches a parser that dies of what it cannot read."""
    assert client.post("/api/v1/forward_backward", content=content, headers=headers).status_code == status
    assert client.get("/api/v1/healthz").json() == {"status": "ok"}


def test_polls_wait_and_say_why_in_the_form_that_each_client_takes(client, orchestrator):
    """Catches a poll that is answered at once with nothing, and one client's log full of errors."""
    request_id = client.post("/api/v1/forward_backward", json=call([datum()], loss_fn=STUCK_LOSS)).json()["request_id"]
    began = time.monotonic()
    one = client.post("/api/v1/retrieve_future", json={"request_id": request_id}, headers={"x-sdk-version": "0"})
    assert time.monotonic() - began > 0.15
    other = client.post("/api/v1/retrieve_future", json={"request_id": request_id})
    assert (one.status_code, other.status_code) == (408, 200)
    assert one.json() == other.json()
    assert one.json()["queue_position"] == 3
    assert one.json()["queue_state"] == "active"
    assert "3 requests" in one.json()["queue_state_reason"]


def test_failures_and_lost_results_have_the_codes_that_clients_act_on(client, orchestrator):
    """Catches a failed call that ends the client, and a lost one that is polled for ever."""
    failed = result_of(client, client.post("/api/v1/forward_backward", json=call([datum()], loss_fn=FAILING_LOSS)))
    assert failed == {"error": "there is no loss 'failing'", "category": "user", "status": 400}
    assert client.post("/api/v1/retrieve_future", json={"request_id": "gone"}).status_code == 410
    assert client.post("/api/v1/retrieve_future", json={"request_id": "never"}).status_code == 404


STEPS = [
    ({"adam_params": {"learning_rate": 0.5, "weight_decay": 0.25, "grad_clip_norm": 5.0}}, (0.5, 0.9, 0.25, 5.0)),
    ({"learning_rate": 0.5, "gradient_clip": -1, "adam_params": {"beta1": 0.5}}, (0.5, 0.5, 0.0, 0.0)),
    ({"adam_params": {"learning_rate": -1}}, "learning_rate"),
    ({"adam_params": {"beta2": 1}}, "beta2"),
    ({"adam_params": {"eps": "small"}}, "float"),
    ({"optimizer_params": {"type": "dimuon"}}, "dimuon"),
]


@pytest.mark.parametrize(("params", "wanted"), STEPS)
def test_a_step_takes_all_of_its_numbers(client, orchestrator, params, wanted):
    """Catches a number of Adam that is dropped, and one that no optimizer can take."""
    answer = client.post("/api/v1/optim_step", json={"model_id": "m", "seq_id": 2, **params})
    if isinstance(wanted, str):
        assert answer.status_code == 400
        assert wanted in answer.json()["detail"]
        return
    step = orchestrator.submits[0].operation
    assert isinstance(step, OptimStep)
    assert (step.learning_rate, step.beta1, step.weight_decay, step.grad_clip_norm) == wanted


@pytest.mark.parametrize("values", [[math.inf, -math.inf, 1.0], [math.nan, 2.0], [1.0, 2.0]])
def test_no_number_of_a_tensor_becomes_null(values):
    """Catches a log-probability that is not finite and reaches a client as no number at all."""
    read = json.loads(json_response(tensor_json(Array.of(np.array(values, np.float32)))).body)["data"]
    assert str(read) == str(values)


def test_numbers_that_are_not_finite_reach_each_client_as_it_reads_them(client, orchestrator):
    """Catches an answer that one client's strict parser cannot read at all."""
    answers = {}
    for seq_id, headers in ((3, {}), (4, {"x-sdk-version": "0"})):
        answer = client.post("/api/v1/optim_step", json={"model_id": "m", "seq_id": seq_id}, headers=headers)
        polled = client.post("/api/v1/retrieve_future", json=answer.json(), headers=headers)
        answers[seq_id] = polled
    assert answers[3].json()["metrics"]["grad_norm"] == float("inf")
    assert msgspec.json.decode(answers[4].content)["metrics"] == {
        "learning_rate": 1e-4,
        "grad_norm_not_finite": 1.0,
        "optimizer_step": 1.0,
    }


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".x", "", "a\\b", "a\0b", "%2e%2e", "x" * 200])
def test_names_that_are_paths_are_refused_wherever_they_are_sent(client, orchestrator, name):
    """Catches a checkpoint that is written, read or deleted outside of the output folder."""
    for path, body in (
        ("save_weights", {"model_id": "m", "path": name, "seq_id": 1}),
        ("save_weights", {"model_id": name, "path": "x", "seq_id": 1}),
        ("save_weights_for_sampler", {"model_id": "m", "name": name, "seq_id": 1}),
        ("save_full_weights_safetensors", {"model_id": "m", "name": name}),
        ("load_weights", {"model_id": "m", "path": f"xorl://m/weights/{name}", "seq_id": 1}),
        ("delete_checkpoint", {"model_id": "m", "checkpoint_id": f"weights/{name}"}),
        ("weights_info", {"xorl_path": f"xorl://{name}/weights/x"}),
        ("create_sampling_session", {"model_path": f"xorl://m/weights/{name}"}),
    ):
        if body.get("name") == "" or body.get("model_id") == "":
            continue
        # MODEL/NAME is a way to name a checkpoint to delete, and there is none of model a.
        refused = (400, 404) if path == "delete_checkpoint" and name == "a/b" else (400,)
        assert client.post(f"/api/v1/{path}", json=body).status_code in refused, path
    assert orchestrator.submits == []


def test_a_sample_in_json_has_all_that_was_asked_for(client, orchestrator):
    """Catches log-probabilities that are computed and left out, since most clients read them in protobuf."""
    given = {"data": [3, -1, 5, 6], "dtype": "int64", "shape": [2, 2]}
    asked = {"topk_prompt_logprobs": 2, "topk_sample_logprobs": 1, "target_prompt_logprobs": given}
    body = {"prompt": {"input_ids": [1, 2, 3]}, "sampling_params": {"max_tokens": 2}, **asked}
    result = result_of(client, client.post("/api/v1/asample", json=body))
    assert result["topk_prompt_logprobs"] == [None, [[2, -2 / 64], [3, -3 / 64]], [[3, -3 / 64], [4, -4 / 64]]]
    assert result["target_prompt_logprobs"] == {
        "data": [-3 / 64, 0.0, -5 / 64, -6 / 64],
        "dtype": "float32",
        "shape": [2, 2],
    }
    assert result["sequences"][0]["topk_logprobs"] == [[[4, -4 / 64]], [[5, -5 / 64]]]


def test_the_only_model_is_the_one_whose_weights_are_sent(client, orchestrator):
    """Catches a client that cannot send its model, since its call does not say which."""
    orchestrator.models.clear()
    assert client.post("/sync_inference_weights", json={}).status_code == 404
    for name, status, says in (("one", 200, "sent"), ("two", 400, "one, two"), ("default", 200, "sent")):
        client.post("/api/v1/create_model", json={"model_id": name, "base_model": "tiny"})
        answer = client.post("/sync_inference_weights", json={})
        assert answer.status_code == status, name
        assert says in answer.text
    models = [s.operation.model_id for s in orchestrator.submits if isinstance(s.operation, SyncWeights)]
    assert models == ["one", "default"]


def test_weights_are_sent_in_the_form_that_a_checkpoint_in_fp8_has(client, orchestrator):
    """Catches a form that is taken and not handed on, one that cannot be taken back, and names that are lost."""
    client.post("/api/v1/create_model", json={"model_id": "one", "base_model": "tiny"})
    form = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    for quantization in (form, None):
        answer = client.post("/api/v1/set_sync_quantization", json={"quantization": quantization})
        assert answer.status_code == 200, answer.text
        assert answer.json()["quantization"] == quantization
    assert orchestrator.quantizations == [BlockFp8(("lm_head",)), None]
    by_either_name = {**form, "ignored_layers": ["o_proj"]}
    for quantization in ({}, {**by_either_name, "modules_to_not_convert": None}, by_either_name, None):
        assert client.post("/sync_inference_weights", json={"quantization": quantization}).status_code == 200
    sent = [s.operation.quantization for s in orchestrator.submits if isinstance(s.operation, SyncWeights)]
    assert sent == [BlockFp8(), BlockFp8(("o_proj",)), BlockFp8(("lm_head", "o_proj")), None]


def test_a_checkpoint_can_be_fetched_by_urls_and_nothing_else_can(client, orchestrator):
    """Catches a URL that leads out of its checkpoint, is altered, or outlives its time."""
    saved = client.post("/api/v1/save_weights", json={"model_id": "urls", "path": "one", "seq_id": 1})
    assert result_of(client, saved)["path"] == "xorl://urls/weights/one"
    assert isinstance(orchestrator.submits[0].operation, SaveWeights)
    answer = client.get("/api/v1/training_runs/urls/checkpoints/weights/one/external_weights_urls").json()
    (url,) = answer["urls"].values()
    assert client.get(url).content == b"weights"
    for altered in (
        url.replace("adapter_model.safetensors", "..%2f..%2f..%2fsecret"),
        url.replace("adapter_model", "other"),
        url.replace("signature=", "signature=0"),
        url.replace("expires=", "expires=9"),
    ):
        assert client.get(altered).status_code in (400, 403, 404)


def test_the_whole_status_is_told_and_names_of_clients_are_no_markup(client, orchestrator):
    """Catches a page that shows nothing, or runs what a client calls its model."""
    orchestrator.models.clear()
    client.post("/api/v1/create_session", json={"session_id": "shown"})
    orchestrator.errors.append(ErrorSeen(time.time(), "m", "optim_step", "<script>"))
    status = client.get("/status.json").json()
    assert status["tokens_per_second"] == 1234.5
    assert status["last_errors"][0]["message"] == "<script>"
    assert [session["session_id"] for session in status["sessions"]] == ["shown"]
    assert (status["storage"]["limit_bytes"], status["storage"]["used_bytes"]) == (1_500_000, 1_200_001)
    assert status["storage"]["kinds"][0] == {"kind": "training", "num_checkpoints": 2, "size_bytes": 900_000}
    page = client.get("/")
    assert "innerHTML" not in page.text
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_prometheus_reads_both_processes(client, orchestrator):
    """Catches measures under another name, and an id of a client as a label."""
    client.post("/api/v1/training_runs/some-id/x")
    client.get("/api/v1/healthz")
    text = client.get("/metrics").text
    assert 'xorl_requests_total{operation="optim_step"} 7.0' in text
    assert "xorl_orchestrator_up 1" in text
    assert 'xorl_http_requests_total{path="/api/v1/healthz",status="200"}' in text
    assert "some-id" not in text
    assert "bad name" not in text


@pytest.mark.parametrize(
    ("headers", "dialect"),
    [
        ({"x-sdk-version": "0.38.0"}, "tinker"),
        ({"user-agent": "AsyncTinker/Python 0.30.4"}, "tinker"),
        ({"user-agent": "python-httpx/0.28.1"}, "xorl"),
        ({}, "xorl"),
    ],
)
def test_every_release_of_tinker_is_answered_with_its_own_paths(headers, dialect):
    """Catches a release that cannot sample from what it saved: it refuses paths that do not begin with tinker://."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert dialect_of(Request({"type": "http", "headers": encoded})) == dialect


def test_the_api_loads_no_torch():
    """Catches an import that would give the API process gigabytes of a library it has no use for."""
    code = "import sys, xorl.server.api.__main__; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
