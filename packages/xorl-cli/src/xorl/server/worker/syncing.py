"""Sends a model's weights to inference servers: adapts the SyncWeights operation to `xorl.train.sync`."""

from __future__ import annotations

from xorl.core.models import Decoder
from xorl.lora.quantize import checkpoint_linears
from xorl.server.operations import EndpointSynced, SyncResult, SyncWeights
from xorl.server.worker.base import Base
from xorl.server.worker.models import Models
from xorl.train.export.hf_weights import hf_groups, in_block_fp8
from xorl.train.sync import ReceiverAddress, SyncOptions, SyncOutcome, WeightSender


class WeightSyncer:
    """Sends models of this worker, adapters merged into the base; collective."""

    def __init__(self, base: Base, models: Models) -> None:
        self._base = base
        self._models = models
        self._sender = WeightSender(base.device)

    def send(self, operation: SyncWeights) -> SyncResult:
        """Send a model to the endpoints of the operation; each endpoint may fail independently.

        Raises ValueError, before anything is sent, if the operation is invalid.
        """
        if not operation.endpoints:
            raise ValueError("no endpoints to send weights to: add one with add_inference_endpoint")
        options = SyncOptions(
            master_address=operation.master_address,
            master_port=operation.master_port,
            group_name=operation.group_name,
            bucket_bytes=operation.buffer_size_mb << 20,
            pause_mode=operation.pause_mode,
            flush_cache=operation.flush_cache,
            weight_version=operation.weight_version,
        )
        base = self._base
        files = self._models.adapter_files(operation.model_id)
        groups = hf_groups(
            base.model,
            base.architecture.recipes(merge_qkv=base.local.model.merge_qkv),
            dtype=base.module.compute_dtype,
            device=base.device,
            merged_adapters=None if files is None else files.by_layer,
        )
        if operation.quantization is not None:
            if base.rest.stacks_experts:
                raise ValueError(
                    f"quantization: files of a {base.rest.architecture} stack the experts of a layer in one tensor, "
                    "for which block fp8 has no format: set it to null"
                )
            # Every rank names all layers: buckets are planned alike, whichever stage of a pipeline holds them.
            whole = base.model.whole
            assert isinstance(whole, Decoder)
            groups = in_block_fp8(groups, checkpoint_linears(whole, operation.quantization.exclude))
        groups = base.rest.in_files(groups)
        addresses = [ReceiverAddress(one.host, one.port, one.world_size) for one in operation.endpoints]
        outcome = self._sender.send(groups, addresses, options)
        return SyncResult(True, "", []) if outcome is None else _result(outcome, operation.weight_version)


def _result(outcome: SyncOutcome, weight_version: str | None) -> SyncResult:
    failed = [one for one in outcome.receivers if not one.success]
    message = f"{len(outcome.receivers) - len(failed)} of {len(outcome.receivers)} endpoints have the weights"
    if failed:
        message += "; " + "; ".join(f"{one.address.host}:{one.address.port}: {one.message}" for one in failed)
    return SyncResult(
        outcome.success,
        message,
        [
            EndpointSynced(one.address.host, one.address.port, one.success, one.weights, one.message)
            for one in outcome.receivers
        ],
        weight_version,
        outcome.seconds,
        outcome.num_bytes,
        outcome.num_tensors,
        outcome.num_buckets,
        outcome.timing_s,
    )
