"""The table of docs/server.md of what the service serves of tinker's SDK: complete, and true.

If it is not, the first test fails and shows the right one.
"""

import importlib.metadata
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch

from child import in_a_child
from service import Service
from xorl.server.api import model_bodies
from xorl.server.api.control_routes import SessionBody
from xorl.server.api.data_bodies import AdamJson, DatumJson, ForwardJson
from xorl.server.api.openai_fields import field_names
from xorl.server.api.sampling_bodies import SampleBody, SamplingParamsJson
from xorl.server.api.sampling_routes import SamplingSessionBody
from xorl.server.api.search_routes import SearchBody

ROOT = Path(__file__).resolve().parents[3]
HEADER = "| of tinker {version} | served | not served |\n|---|---|---|"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
# The requests that clients build, and what reads them here.
REQUESTS = {
    "CreateSessionRequest": SessionBody,
    "CreateModelRequest": model_bodies.CreateModelBody,
    "LoraConfig": model_bodies.LoraJson,
    "Datum": DatumJson,
    "ForwardBackwardInput": ForwardJson,
    "AdamParams": AdamJson,
    "LoadWeightsRequest": model_bodies.LoadWeightsBody,
    "SaveWeightsRequest": model_bodies.SaveWeightsBody,
    "SaveWeightsForSamplerRequest": model_bodies.SaveForSamplerBody,
    "SaveWeightsExternalRequest": model_bodies.SaveExternalBody,
    "CreateSamplingSessionRequest": SamplingSessionBody,
    "SampleRequest": SampleBody,
    "SamplingParams": SamplingParamsJson,
    "SessionSearchRequest": SearchBody,
}
# Calls that do not reach the service.
LOCAL = {"get_telemetry", "on_queue_state_change", "create_rest_client"}
NOT_SERVED = {
    "ServiceClient": ("copy_weights", "create_custom_loss", "get_console_url"),
    "TrainingClient": ("get_console_url",),
    "RestClient": (
        *("assign_session_project", "copy_weights", "export_session_trace", "get_audit_log", "get_billing_usage"),
        *("publish_checkpoint_from_tinker_path", "unpublish_checkpoint_from_tinker_path", "whoami"),
    ),
    "AdminClient": ("get_audit_log", "get_billing_usage"),
    "CreateSessionRequest": ("project_id",),
    "CreateModelRequest": ("optimizer_config other than AdamW",),
    "Datum": ("model_input_spans (ignored: only stable_reinforce reads them)", "loss_fn_input_spans (likewise)"),
    "ForwardBackwardInput": ("loss_fn stable_reinforce",),
    "LoadWeightsRequest": ("weights_access_token",),
    "SaveWeightsForSamplerRequest": ("kind inflight",),
    "SaveWeightsExternalRequest": ("age_encryption_recipients",),
    "SampleRequest": ("record_stability_info", "prompt with images or sounds"),
    "SessionSearchRequest": ("project_ids", "owner user"),
}
# What the bodies refuse, and a value that asks for it.
REFUSED = {
    "create_session": [("project_id", "a")],
    "create_model": [("optimizer_config", {"type": "dimuon"})],
    "load_weights": [("weights_access_token", "a")],
    "save_weights_for_sampler": [("kind", "inflight")],
    "save_weights_external": [("age_encryption_recipients", ["a"])],
    "asample": [
        ("record_stability_info", True),
        ("prompt", {"chunks": [{"type": "image", "data": "", "format": "png"}]}),
    ],
    "sessions/search": [("project_ids", ["a"]), ("owner", {"type": "user", "owner_urns": ["a"]})],
}
BODIES = {
    "create_session": {},
    "create_model": {"base_model": "xorl/quickstart"},
    "load_weights": {"path": "tinker://a/weights/b"},
    "save_weights_for_sampler": {"path": "x"},
    "save_weights_external": {"path": "x"},
    "asample": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5]}]}, "sampling_params": {"max_tokens": 1}},
    "sessions/search": {},
}


def methods(name: str) -> set[str]:
    """The public calls of a client; those named ..._async are the same and deprecated."""
    tinker = pytest.importorskip("tinker")
    found = inspect.getmembers(getattr(tinker, name), callable)
    return {call for call, _ in found if call[0] != "_" and not call.endswith("_async")} - LOCAL


def fields(name: str) -> set[str]:
    """The fields of a request, but for the constant that names its type."""
    kind = getattr(pytest.importorskip("tinker").types, name)
    names = getattr(kind, "model_fields", None) or kind.__dataclass_fields__
    return set(names) - {"type"}


def served(name: str) -> set[str]:
    """What the table says is served: all that is not in NOT_SERVED as a whole."""
    everything = methods(name) if name in CLIENTS else fields(name)
    whole = {entry.partition(" ")[0] for entry in NOT_SERVED.get(name, ()) if " " not in entry or "(" in entry}
    return everything - whole


def table() -> str:
    """The table."""
    rows = [HEADER.format(version=importlib.metadata.version("tinker"))]
    for name in (*CLIENTS, *REQUESTS):
        there = ", ".join(f"`{one}`" for one in sorted(served(name)))
        missing = ", ".join(re.sub(r"^\w+", r"`\g<0>`", one) for one in NOT_SERVED.get(name, ()))
        rows.append(f"| `{name}` | {there} | {missing} |")
    return "\n".join(rows)


def outcome(call: Callable[[], object]) -> object:
    """What a call of the client returns in the end."""
    answer = call()
    return answer.result() if hasattr(answer, "result") else answer


def test_the_table_is_that_of_the_newest_sdk() -> None:
    """Catches a call or a field of a new release of which the documentation says nothing."""
    page = (ROOT / "docs" / "server.md").read_text()
    assert table() in page, f"docs/server.md needs this table:\n{table()}"


def test_what_the_table_calls_served_has_something_that_serves_it() -> None:
    """Catches a field that the table promises and no body reads, and a call that no test makes."""
    for name, body in REQUESTS.items():
        assert served(name) <= field_names(body), name
    files = ("test_conformance.py", "test_sdk_table.py")
    sources = "".join((Path(__file__).parent / name).read_text() for name in files)
    for name in CLIENTS:
        missing = {call for call in served(name) if f".{call}(" not in sources and f'"{call}"' not in sources}
        assert not missing, f"no test calls {missing} of {name}"


@in_a_child
def test_what_the_table_calls_not_served_is_refused(service: Service) -> None:
    """Catches a call that the table says is refused and that hangs, or does nothing and returns."""
    from tinker import SamplingClient  # noqa: PLC0415  (a dependency group that is not always there)

    with service.tinker() as client:
        training = client.create_lora_training_client("xorl/quickstart", rank=4).result()
        path = training.save_state("table").result().path
        session, rest = training.model_id.partition(":")[0], client.create_rest_client()
        admin = rest._admin_client()
        calls = {
            "ServiceClient": {
                "copy_weights": lambda: client.copy_weights(path, "project"),
                "create_custom_loss": lambda: client.create_custom_loss("a", lambda x: x, {}),
            },
            "RestClient": {
                "assign_session_project": lambda: rest.assign_session_project(session, "project"),
                "copy_weights": lambda: rest.copy_weights(path, "project"),
                "export_session_trace": lambda: rest.export_session_trace(session),
                "get_audit_log": rest.get_audit_log,
                "get_billing_usage": lambda: rest.get_billing_usage("2026-01-01", "2026-01-02"),
                "publish_checkpoint_from_tinker_path": lambda: rest.publish_checkpoint_from_tinker_path(path),
                "unpublish_checkpoint_from_tinker_path": lambda: rest.unpublish_checkpoint_from_tinker_path(path),
                "whoami": rest.whoami,
            },
            "AdminClient": {
                "get_audit_log": admin.get_audit_log,
                "get_billing_usage": lambda: admin.get_billing_usage("2026-01-01", "2026-01-02"),
            },
        }
        for name, not_served in NOT_SERVED.items():
            for call in set(not_served) - {"get_console_url"} if name in CLIENTS else ():
                with pytest.raises(Exception):  # noqa: B017, PT011  (whatever the client makes of it)
                    outcome(calls[name][call])
        assert client.get_console_url().startswith("https://tinker.thinkingmachines.ai/")
        sampler = SamplingClient.create(client.holder, model_path=path).result()
        assert sampler.get_base_model() == str(ROOT / "configs" / "quickstart")
        assert rest.get_sampler(sampler._sampling_session_id).result().base_model == sampler.get_base_model()
        assert rest.get_training_run_by_tinker_path(path).result().training_run_id == training.model_id
        training.load_state(path).result()
        for usage in (rest, admin):
            assert usage.get_current_checkpoint_storage_usage().result() is not None
        client.close("completed")
    with httpx.Client(base_url=f"{service.url}/api/v1", trust_env=False) as http:
        for path, changes in REFUSED.items():
            for name, value in changes:
                answer = http.post(f"/{path}", json=BODIES[path] | {name: value})
                assert (answer.status_code, name in answer.text) == (400, True), answer.text


@in_a_child
def test_the_end_of_a_prompt_and_alternatives_to_its_tokens(service: Service) -> None:
    """Catches scores of the wrong end, and alternatives at another place than the client expects."""
    with service.tinker() as client:
        from tinker import types  # noqa: PLC0415

        sampler = client.create_sampling_client(base_model="configs/quickstart")
        assert sampler.get_tokenizer().decode([40]) != ""
        tokens = torch.randint(3, 280, (40,), generator=torch.Generator().manual_seed(3)).tolist()
        prompt = types.ModelInput.from_ints(tokens)
        whole = sampler.compute_logprobs(prompt).result()
        end = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=3).result()
        assert end[:-3] == [None] * 37
        assert end[-3:] == pytest.approx(whole[-3:], abs=1e-5)
        with pytest.raises(Exception, match="must be 1 to 39"):
            sampler.compute_logprobs(prompt, prompt_logprobs_last_n=40).result()
        params = types.SamplingParams(max_tokens=1, seed=5)
        options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 288, "prompt_alt_tokens_k": 4}
        answer = sampler.sample(prompt, 1, params, **options).result()
        drawn, logprobs = answer.prompt_alt_tokens.tokens.to_torch(), answer.prompt_alt_tokens.logprobs.to_torch()
        assert (drawn.shape, drawn.dtype, logprobs.dtype) == ((39, 4), torch.int64, torch.float32)
        for row, values, top in zip(drawn, logprobs, answer.topk_prompt_logprobs[1:], strict=True):
            assert [dict(top)[int(token)] for token in row] == pytest.approx(values.tolist(), abs=1e-4)
        last = sampler.sample(prompt, 1, params, **options, prompt_logprobs_last_n=2).result()
        assert [pairs is None for pairs in last.topk_prompt_logprobs] == [True] * 38 + [False] * 2
        assert torch.equal(last.prompt_alt_tokens.tokens.to_torch(), drawn)
