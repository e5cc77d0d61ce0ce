"""Caller: a client that speaks the clients' own protocol and chooses the numbers of its calls itself."""

import time
import uuid

import httpx

from service import Service

MODEL = "xorl/quickstart"
TOKENS = list(range(10, 42))
NEAR = 1e-4  # what is run again may be packed otherwise


class Caller:
    """A client that chooses its numbers itself. Every call is one of the clients' own protocol."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.connect()
        self.model_id = f"faults-{uuid.uuid4().hex[:8]}"
        lora = {"rank": 8, "seed": 0}
        created = self.post("create_model", model_id=self.model_id, base_model=MODEL, lora_config=lora)
        self.result(created["request_id"])

    def connect(self) -> None:
        """Begin with new connections, as the API may be another process."""
        self.http = httpx.Client(base_url=self.service.url, timeout=60, trust_env=False)

    def post(self, call: str, **body: object) -> dict:
        answer = self.http.post(f"/api/v1/{call}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def forward_backward(self, seq: int, shift: int = 0) -> str:
        return self.post("forward_backward", **self.body(seq, shift))["request_id"]

    def body(self, seq: int, shift: int = 0, num: int = 1) -> dict:
        tokens = [token + shift for token in TOKENS]
        targets = {"data": [*tokens[1:], 1], "dtype": "int64", "shape": [len(tokens)]}
        datum = {"model_input": {"input_ids": tokens}, "loss_fn_inputs": {"target_tokens": targets}}
        call = {"data": [datum] * num, "loss_fn": "cross_entropy"}
        return {"model_id": self.model_id, "seq_id": seq, "forward_backward_input": call}

    def step(self, seq: int) -> str:
        adam = {"learning_rate": 1e-2}
        return self.post("optim_step", model_id=self.model_id, seq_id=seq, adam_params=adam)["request_id"]

    def poll(self, request_id: str) -> dict:
        return self.http.post("/api/v1/retrieve_future", json={"request_id": request_id}).json()

    def result(self, request_id: str, timeout_s: float = 90) -> dict:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            answer = self.poll(request_id)
            if answer.get("type") != "try_again":
                return answer
        raise AssertionError(f"{request_id} hangs: {answer}")

    def loss(self, request_id: str) -> float:
        answer = self.result(request_id)
        assert "metrics" in answer, answer
        return answer["metrics"]["loss:sum"]


def rounds(caller: Caller, count: int) -> list[float]:
    """The losses of plain rounds of two calls and a step, one after the other."""
    losses = []
    for index in range(count):
        first, second = caller.forward_backward(3 * index + 1), caller.forward_backward(3 * index + 2, shift=5)
        stepped = caller.result(caller.step(3 * index + 3))
        assert stepped["metrics"]["step"] == index + 1
        losses += [caller.loss(first), caller.loss(second)]
    return losses
