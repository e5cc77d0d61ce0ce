"""Routes for checkpoints and training runs: list, describe, delete, set an expiry, and download files or archives."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse

from xorl.server.api.archive import Archive
from xorl.server.api.context import api_of, dialect_of
from xorl.server.api.control_routes import iso, page
from xorl.server.api.model_bodies import ModelBody, checkpoint_of, ttl
from xorl.server.api.responses import JSON, Refusal, json_response, refuse_invalid
from xorl.server.identifiers import CheckpointRef, Dialect, checkpoint_folder
from xorl.server.messages import Ok
from xorl.server.queries import (
    CheckpointInfo,
    CheckpointList,
    DeleteCheckpoint,
    GetTrainingRun,
    GetWeightsInfo,
    ListCheckpoints,
    ListTrainingRuns,
    SetCheckpointTtl,
    TrainingRun,
    TrainingRuns,
    WeightsInfo,
)
from xorl.server.sizes import readable_size
from xorl.server.status_queries import GetStorage, Storage

router = APIRouter(prefix="/api/v1")

_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_URL_LIFETIME_S = 3600
# Signs URLs that need no token. The key is random, so URLs become invalid when the process restarts.
_URL_KEY = secrets.token_bytes(32)


class WeightsInfoBody(msgspec.Struct, frozen=True):
    """The body of /weights_info; each client has its own name for the URI."""

    tinker_path: str | None = None
    xorl_path: str | None = None


class DeleteBody(msgspec.Struct, frozen=True):
    """The body of /delete_checkpoint."""

    checkpoint_id: str
    model_id: str = "default"


class TtlBody(msgspec.Struct, frozen=True):
    """The body of .../ttl; None: never expires."""

    ttl_seconds: float | None = None


@router.get("/training_runs")
async def list_training_runs(request: Request, limit: int = 20, offset: int = 0) -> Response:
    """List training runs, most recently active first."""
    listed = await api_of(request).orchestrator.ask(ListTrainingRuns(*page(limit, offset)), TrainingRuns)
    dialect = dialect_of(request)
    return json_response(
        {
            "training_runs": [_run_json(run, dialect) for run in listed.runs],
            "cursor": {"offset": offset, "limit": limit, "total_count": listed.total},
        }
    )


@router.get("/training_runs/{model_id}")
async def get_training_run(request: Request, model_id: str) -> Response:
    """Describe a training run."""
    run = await api_of(request).orchestrator.ask(GetTrainingRun(model_id), TrainingRun)
    return json_response(_run_json(run, dialect_of(request)))


@router.get("/training_runs/{model_id}/checkpoints")
async def list_run_checkpoints(request: Request, model_id: str) -> Response:
    """List a run's checkpoints, newest first."""
    return await _list(request, ListCheckpoints(model_id))


@router.get("/checkpoints")
async def list_all_checkpoints(request: Request, limit: int = 100, offset: int = 0) -> Response:
    """List all checkpoints, newest first."""
    limit, offset = page(limit, offset)
    return await _list(request, ListCheckpoints(None, limit, offset))


@router.post("/list_checkpoints")
async def post_list_checkpoints(request: Request) -> Response:
    """List a model's checkpoints, newest first."""
    given = await api_of(request).bodies.parse(request, ModelBody)
    return await _list(request, ListCheckpoints(given.model_id))


@router.delete("/training_runs/{model_id}/checkpoints/{kind}/{name}")
async def delete_run_checkpoint(request: Request, model_id: str, kind: str, name: str) -> Response:
    """Delete a checkpoint."""
    await api_of(request).orchestrator.ask(DeleteCheckpoint(_ref(model_id, kind, name)), Ok)
    return Response(status_code=204)


@router.post("/delete_checkpoint")
async def post_delete_checkpoint(request: Request) -> Response:
    """Delete a checkpoint, named as KIND/NAME or KIND/MODEL/NAME."""
    api = api_of(request)
    given = await api.bodies.parse(request, DeleteBody)
    with refuse_invalid():
        ref = checkpoint_of(given.checkpoint_id, given.model_id)
    await api.orchestrator.ask(DeleteCheckpoint(ref), Ok)
    return json_response({"success": True, "deleted_path": ref.uri(dialect_of(request)), "error": None})


@router.put("/training_runs/{model_id}/checkpoints/{kind}/{name}/ttl")
async def set_ttl(request: Request, model_id: str, kind: str, name: str) -> Response:
    """Set how long a checkpoint is kept."""
    api = api_of(request)
    given = await api.bodies.parse(request, TtlBody)
    with refuse_invalid():
        ttl_s = ttl(given.ttl_seconds)
    await api.orchestrator.ask(SetCheckpointTtl(_ref(model_id, kind, name), ttl_s), Ok)
    return Response(status_code=204)


@router.get("/billing/usage/checkpoints/current")
async def storage_usage(request: Request, project_id: str | None = None) -> Response:
    """Return the storage used, with a row for each kind of files, in tinker's form of usage by project and user.

    tinker's client shows only the fields of that form, so project_id holds the limit and user_name the kind.
    """
    if project_id is not None:
        raise Refusal(400, "project_id: this service has no projects; leave it out")
    storage = await api_of(request).orchestrator.ask(GetStorage(), Storage)
    rows: list[JSON] = [
        {
            "project_id": f"storage_limit {readable_size(storage.limit_bytes)}",
            "user_name": kind.kind,
            "checkpoint_count": kind.num_checkpoints,
            "size_bytes": kind.size_bytes,
            "size_gigabytes": kind.size_bytes / 1e9,
        }
        for kind in storage.kinds
    ]
    return json_response({"data": rows, "limit_bytes": storage.limit_bytes, "used_bytes": storage.used_bytes})


@router.post("/weights_info")
async def weights_info(request: Request) -> Response:
    """Describe the model in a checkpoint."""
    api = api_of(request)
    given = await api.bodies.parse(request, WeightsInfoBody)
    path = given.tinker_path or given.xorl_path
    if path is None:
        raise Refusal(400, "give tinker_path or xorl_path")
    with refuse_invalid():
        ref = checkpoint_of(path, None)
    info = await api.orchestrator.ask(GetWeightsInfo(ref), WeightsInfo)
    lora = info.lora
    return json_response(
        {
            "base_model": info.base_model,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora.rank,
            "lora_config": None if lora is None else {"lora_rank": lora.rank, "lora_alpha": lora.alpha},
            "train_unembed": None if lora is None else lora.train_unembed,
            "train_mlp": None if lora is None else lora.train_mlp,
            "train_attn": None if lora is None else lora.train_attn,
            "optimizer_config": {"type": "adamw"},
            "step": info.step,
        }
    )


@router.get("/training_runs/{model_id}/checkpoints/{kind}/{name}/external_weights_urls")
async def checkpoint_urls(request: Request, model_id: str, kind: str, name: str) -> Response:
    """Return signed URLs of a checkpoint's files, which need no token and expire after an hour."""
    ref = _ref(model_id, kind, name)
    folder = await _folder(request, ref)
    files = await asyncio.to_thread(_files, folder)
    expires = int(time.time()) + _URL_LIFETIME_S
    urls = {file: _signed_url(request, f"{ref.model_id}/{ref.kind}/{ref.name}/{file}", expires) for file in files}
    return json_response({"urls": urls, "expires": iso(expires)})


@router.get("/training_runs/{model_id}/checkpoints/{kind}/{name}/archive")
async def checkpoint_archive(request: Request, model_id: str, kind: str, name: str) -> Response:
    """Redirect to a signed URL of a checkpoint's archive, which needs no token and expires after an hour."""
    ref = _ref(model_id, kind, name)
    await _folder(request, ref)
    expires = int(time.time()) + _URL_LIFETIME_S
    url = _signed_url(request, f"{ref.model_id}/{ref.kind}/{ref.name}.tar", expires)
    # Clients do not follow the redirect; they read the URL and its expiry from the headers.
    return RedirectResponse(url, 302, {"expires": formatdate(expires, usegmt=True)})


files_router = APIRouter()


@files_router.get("/files/{model_id}/{kind}/{name}/{file:path}")
async def get_file(
    request: Request, model_id: str, kind: str, name: str, file: str, expires: int, signature: str
) -> Response:
    """Download a file of a checkpoint by a URL of `checkpoint_urls`."""
    _check_signature(f"{model_id}/{kind}/{name}/{file}", expires, signature)
    folder = await _folder(request, _ref(model_id, kind, name))
    path = folder / file
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise Refusal(404, "the checkpoint has no such file")
    return FileResponse(path, filename=path.name)


@files_router.get("/files/{model_id}/{kind}/{name}.tar")
async def get_archive(
    request: Request, model_id: str, kind: str, name: str, expires: int, signature: str
) -> StreamingResponse:
    """Download a whole checkpoint by the URL of `checkpoint_archive`."""
    _check_signature(f"{model_id}/{kind}/{name}.tar", expires, signature)
    folder = await _folder(request, _ref(model_id, kind, name))
    archive = await asyncio.to_thread(lambda: Archive.of(folder, _files(folder)))
    headers = {"content-length": str(archive.num_bytes), "content-disposition": f'attachment; filename="{name}.tar"'}
    return StreamingResponse(iter(archive), headers=headers, media_type="application/x-tar")


async def _list(request: Request, query: ListCheckpoints) -> Response:
    listed = await api_of(request).orchestrator.ask(query, CheckpointList)
    dialect = dialect_of(request)
    limit = listed.total if query.limit is None else query.limit
    return json_response(
        {
            "checkpoints": [_checkpoint_json(info, dialect) for info in listed.checkpoints],
            "cursor": {"offset": query.offset, "limit": limit, "total_count": listed.total},
        }
    )


async def _folder(request: Request, ref: CheckpointRef) -> Path:
    """The folder of a checkpoint that is visible to clients. Expired ones are refused even if not yet deleted."""
    orchestrator = api_of(request).orchestrator
    await orchestrator.ask(GetWeightsInfo(ref), WeightsInfo)
    return checkpoint_folder(Path((await orchestrator.info()).output_dir), ref)


def _files(folder: Path) -> list[str]:
    """The relative names of a checkpoint's files, without symbolic links, which could lead outside."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path.relative_to(folder).as_posix() for path in found)


def _signed_url(request: Request, path: str, expires: int) -> str:
    base = str(request.base_url).rstrip("/")
    return f"{base}/files/{quote(path, safe='/')}?expires={expires}&signature={_signature(path, expires)}"


def _check_signature(path: str, expires: int, signature: str) -> None:
    if not hmac.compare_digest(signature.encode(), _signature(path, expires).encode()):
        raise Refusal(403, "the signature of this URL is wrong: request the checkpoint's URLs again")
    if expires < time.time():
        raise Refusal(410, "this URL has expired: request the checkpoint's URLs again")


def _signature(path: str, expires: int) -> str:
    return hmac.new(_URL_KEY, f"{expires}/{path}".encode(), hashlib.sha256).hexdigest()


def _ref(model_id: str, kind: str, name: str) -> CheckpointRef:
    with refuse_invalid():
        return checkpoint_of(f"{kind}/{model_id}/{name}", None)


def _run_json(run: TrainingRun, dialect: Dialect) -> dict[str, JSON]:
    last, last_sampler = run.last_checkpoint, run.last_sampler_checkpoint
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": "local",
        "is_lora": run.lora_rank is not None,
        "corrupted": False,
        "lora_rank": run.lora_rank,
        "last_request_time": iso(run.last_active),
        "last_checkpoint": None if last is None else _checkpoint_json(last, dialect),
        "last_sampler_checkpoint": None if last_sampler is None else _checkpoint_json(last_sampler, dialect),
        "user_metadata": run.user_metadata,
    }


def _checkpoint_json(info: CheckpointInfo, dialect: Dialect) -> dict[str, JSON]:
    """A checkpoint's JSON; has both clients' names for the path."""
    ref = info.checkpoint
    return {
        "checkpoint_id": f"{ref.kind}/{ref.name}",
        "checkpoint_type": _TYPES[ref.kind],
        "time": iso(info.created),
        "path": ref.uri(dialect),
        "tinker_path": ref.uri("tinker"),
        "size_bytes": info.size_bytes,
        "public": False,
        "user_metadata": info.user_metadata,
        "expires_at": None if info.expires is None else iso(info.expires),
    }
