"""A stand-in for an SGLang server: its HTTP calls, and the receiving side over a real process group.

`python fake_sglang.py --port 0 [--ranks 2] [--device cuda:1] [FAULTS]` prints `port=N` when it answers. It keeps what
it was sent: GET /seen says names, dtypes, shapes and a hash of the bytes of each tensor, and every call in its order.
Its `/generate` continues a prompt by a rule that depends on the version of the weights, so a test can tell which it is.
Nothing of xorl is imported: the group is built as torch builds one of a name over a store, as SGLang has it built.
"""

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

TIMEOUT = timedelta(seconds=60)
VOCAB = 50


class Refused(Exception):
    """Answered by 400."""


class Ranks:
    """The ranks of the server in one group; those behind the first are threads, each with its own end."""

    def __init__(self, body: dict[str, Any], num_ranks: int, device: torch.device) -> None:
        self.name, self.device, self.num_ranks = body["group_name"], device, num_ranks
        ends: list[Any] = [None] * num_ranks

        def join(index: int) -> None:
            store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], False, TIMEOUT)
            named = dist.PrefixStore(self.name, store)
            rank, size = body["rank_offset"] + index, body["world_size"]
            if index == 0:
                backend = c10d.Backend(body["backend"])
                end, _ = c10d._new_process_group_helper(
                    size, rank, [], backend, named, group_name=self.name, timeout=TIMEOUT
                )
                c10d._world.pg_group_ranks[end] = {i: i for i in range(size)}
                ends[index] = end
            else:
                kind = "cpu/" if body["backend"] == "gloo" else "cuda/"
                inner = dist.PrefixStore(kind, dist.PrefixStore(f"{self.name}/", named))
                ends[index] = dist.ProcessGroupGloo(inner, rank, size, TIMEOUT)

        threads = [threading.Thread(target=join, args=(index,)) for index in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.ends = ends

    def receive(self, num_bytes: int) -> list[torch.Tensor]:
        """What each rank got."""
        buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in self.ends]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        works = [end.broadcast([buffer], options) for end, buffer in zip(self.ends, buffers, strict=True)]
        for work in works:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return buffers

    def destroy(self) -> None:
        dist.destroy_process_group(self.ends[0])


class Server:
    """State of the server; `faults` say what goes wrong."""

    def __init__(self, faults: argparse.Namespace) -> None:
        self.faults = faults
        self.device = torch.device(faults.device)
        self.groups: dict[str, Ranks] = {}
        self.tensors: dict[str, dict[str, Any]] = {}
        self.order: list[str] = []
        self.calls: list[str] = []
        self.buckets: list[int] = []
        self.version = "default"
        self.is_paused = False
        self.adapters: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.parameters: dict[str, torch.Tensor] = {}

    def call(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a POST."""
        self.calls.append(path)
        if path == self.faults.refuse:
            raise Refused(f"{path} was told to fail")
        handlers = {
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/init_weights_update_group": self.join,
            "/update_weights_from_distributed": self.update,
            "/destroy_weights_update_group": self.leave,
            "/update_weights_from_disk": self.read_from_disk,
            "/flush_cache": self.flush,
            "/generate": self.generate,
            "/load_lora_adapter": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
        }
        if path not in handlers:
            raise LookupError(path)
        return handlers[path](body)

    def pause(self, body: dict[str, Any]) -> Any:
        assert body["mode"] in ("abort", "retract", "in_place")
        self.is_paused = True
        return {"status": "ok", "message": "Generation paused successfully."}

    def resume(self, body: dict[str, Any]) -> Any:
        self.is_paused = False
        return {"status": "ok", "message": "Generation continued successfully."}

    def join(self, body: dict[str, Any]) -> Any:
        if body["world_size"] != self.faults.ranks + 1 or body["group_name"] in self.groups:
            raise Refused(f"world_size {body['world_size']}, group {body['group_name']}")
        self.groups[body["group_name"]] = Ranks(body, self.faults.ranks, self.device)
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def leave(self, body: dict[str, Any]) -> Any:
        self.groups.pop(body["group_name"]).destroy()
        return {"success": True, "message": "Succeeded to destroy custom process group."}

    def update(self, body: dict[str, Any]) -> Any:
        if not self.is_paused:
            raise Refused("weights while generating")
        if body["load_format"] != "flattened_bucket" or body["flush_cache"]:
            raise Refused("one bucket without a flush is wanted")
        if body["group_name"] not in self.groups:
            raise Refused(f"no group {body['group_name']}")
        index = self.calls.count("/update_weights_from_distributed") - 1
        if index == self.faults.refuse_bucket:
            raise Refused(f"bucket {index} was told to fail")
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)
        ]
        if index == self.faults.die_at_bucket:
            os._exit(9)
        if index == self.faults.hang_at_bucket:
            time.sleep(3600)
        copies = self.groups[body["group_name"]].receive(sum(sizes))
        if index == self.faults.die_after_bucket:
            os._exit(9)
        assert all(torch.equal(copies[0], other) for other in copies[1:]), "ranks got different bytes"
        start = 0
        for name, dtype, shape, size in zip(body["names"], dtypes, body["shapes"], sizes, strict=True):
            # As a receiver views it: in place, in the tensor's own dtype.
            tensor = copies[0][start : start + size].view(dtype).reshape(shape)
            start += size
            if self.faults.load:
                self.parameters.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
                continue
            data = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
            self.order.append(name)
            self.tensors[name] = {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": shape,
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.buckets.append(sum(sizes))
        self.version = body.get("weight_version") or self.version
        return {"success": True, "message": "Succeeded to update parameter online."}

    def read_from_disk(self, body: dict[str, Any]) -> Any:
        self.version = body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def flush(self, body: dict[str, Any]) -> Any:
        if self.faults.flush_fails:
            raise Refused("Flush cache failed: there are pending requests")
        return {"success": True, "message": "Cache flushed."}

    def load_adapter(self, body: dict[str, Any]) -> Any:
        if body["lora_name"] in self.adapters or not os.path.exists(f"{body['lora_path']}/adapter_config.json"):
            raise Refused(f"LoRA adapter {body['lora_name']} cannot be loaded from {body['lora_path']}")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return {"success": True, "loaded_adapters": self.adapters}

    def unload_adapter(self, body: dict[str, Any]) -> Any:
        if self.adapters.pop(body["lora_name"], None) is None:
            raise Refused(f"LoRA adapter {body['lora_name']} is not loaded")
        return {"success": True, "loaded_adapters": self.adapters}

    def generate(self, body: dict[str, Any]) -> Any:
        """Token i after a prompt is a sum: of its tokens, the seed, the length of the version and i."""
        if self.is_paused:
            raise Refused("generation is paused")
        self.requests.append(body)
        time.sleep(self.faults.generate_s)
        asked = body.get("lora_path")
        for adapter in asked if isinstance(asked, list) else [asked]:
            if adapter is not None and adapter not in self.adapters:
                raise Refused(f"The following requested LoRA adapters are not loaded: {adapter}")
        prompts = body["input_ids"]
        is_batch = bool(prompts) and isinstance(prompts[0], list)
        params = body["sampling_params"]
        if not is_batch:
            prompts, params = [prompts] * params.get("n", 1), [params] * params.get("n", 1)
        answers = [self.continued(prompt, one, body) for prompt, one in zip(prompts, params, strict=True)]
        return answers if is_batch or len(answers) > 1 else answers[0]

    def continued(self, prompt: list[int], params: dict[str, Any], body: dict[str, Any]) -> Any:
        start = sum(prompt) + params.get("sampling_seed", 0) + len(self.version)
        tokens, stop = [], None
        for index in range(params["max_new_tokens"]):
            tokens.append((start + index) % VOCAB)
            if tokens[-1] in params.get("stop_token_ids", []):
                stop = {"type": "stop", "matched": tokens[-1]}
                break
        top = body.get("top_logprobs_num", 0)
        meta: dict[str, Any] = {
            "finish_reason": stop or {"type": "length", "length": len(tokens)},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": self.version,
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5 - i, token, None] for i, token in enumerate(tokens)]
            meta["output_top_logprobs"] = [[[-0.1 * k, k, None] for k in range(top)] for _ in tokens]
            if body.get("logprob_start_len", -1) == 0:
                inputs = [[None if i == 0 else -0.25 * i, token, None] for i, token in enumerate(prompt)]
                meta["input_token_logprobs"] = inputs
                meta["input_top_logprobs"] = [
                    None if i == 0 else [[-0.1 * k, k, None] for k in range(top)] for i in range(len(prompt))
                ]
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def read(self, path: str) -> Any:
        """The answer to a GET."""
        if path in ("/health", "/health_generate"):
            return {}
        if path in ("/server_info", "/get_server_info"):
            info = {"model_path": "fake", "tp_size": self.faults.ranks, "enable_lora": True, "max_lora_rank": 64}
            return {**info, "version": "0.5.9", "served_model_name": "fake", "weight_version": self.version}
        if path in ("/model_info", "/get_model_info"):
            return {"model_path": "fake", "weight_version": self.version, "is_generation": True}
        if path == "/v1/models":
            names = [{"id": "fake", "parent": None}, *({"id": name, "parent": "fake"} for name in self.adapters)]
            return {"object": "list", "data": names}
        if path == "/seen":
            return {
                "tensors": self.tensors,
                "order": self.order,
                "calls": self.calls,
                "buckets": self.buckets,
                "version": self.version,
                "is_paused": self.is_paused,
                "groups": list(self.groups),
                "requests": self.requests,
            }
        raise LookupError(path)


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    """The HTTP side of `server`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet: the second of two would wait for the first one's receipt
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._reply(lambda: server.read(self.path.partition("?")[0]))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            self._reply(lambda: server.call(self.path.partition("?")[0], body))

        def _reply(self, answer: Any) -> None:
            try:
                status, content = 200, answer()
            except Refused as refused:
                status, content = 400, {"success": False, "message": str(refused)}
            except LookupError as missing:
                status, content = 404, {"detail": f"Not Found: {missing}"}
            except Exception as error:  # noqa: BLE001 - as a server answers
                status, content = 500, {"success": False, "message": f"{type(error).__name__}: {error}"}
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def serve(arguments: Sequence[str], say_port: Callable[[int], object]) -> None:
    """Serves until it is killed, or a fault ends it; `say_port` is called when it answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load", action="store_true", help="copy weights to where a server has them, and hash nothing")
    parser.add_argument("--refuse", help="the path of a call to answer with 400")
    parser.add_argument("--refuse-bucket", type=int)
    parser.add_argument("--die-at-bucket", type=int, help="before it is received")
    parser.add_argument("--die-after-bucket", type=int, help="when it is received, before the answer")
    parser.add_argument("--hang-at-bucket", type=int, help="never receive it")
    parser.add_argument("--flush-fails", action="store_true")
    parser.add_argument("--generate-s", type=float, default=0.0, help="how long each /generate takes")
    faults = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as SGLang does
    if faults.device != "cpu":
        torch.cuda.set_device(torch.device(faults.device))
    http = ThreadingHTTPServer(("127.0.0.1", faults.port), handler(Server(faults)))
    http.daemon_threads = True
    say_port(http.server_address[1])
    http.serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1:], lambda port: print(f"port={port}", flush=True))  # noqa: T201 - for whoever started it
