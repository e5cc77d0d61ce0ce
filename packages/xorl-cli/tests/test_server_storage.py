"""The storage that the service uses: measured, limited, and given back."""

from asynchronous import in_a_loop
from orchestrated import MODEL, options, over_http, serving
from xorl.server.identifiers import CheckpointRef, checkpoint_folder
from xorl.server.operations import SaveFullWeights, SaveWeights, SaveWeightsForSampler
from xorl.server.status_queries import GetStatus, GetStorage


@in_a_loop
async def test_the_storage_that_is_used_is_known_by_kind(tmp_path):
    """Catches an operator who learns of hidden checkpoints and of the limit from the first save that fails."""
    chosen = options(tmp_path, storage_limit_bytes=10**7)
    async with serving(chosen) as (client, _):
        await client.begin()
        await client.do(SaveWeights(MODEL, "a"), 3)
        await client.do(SaveWeightsForSampler(MODEL, "a"), 4)
        await client.do(SaveFullWeights(MODEL, "a"), 5)
        hidden = checkpoint_folder(chosen.folder, CheckpointRef(MODEL, "weights", "recovery-0"))
        hidden.mkdir()
        (hidden / "state.json").write_bytes(bytes(1000))
        storage = await client.orchestrator.answer(GetStorage())
        found = {kind.kind: (kind.num_checkpoints, kind.size_bytes) for kind in storage.kinds}
        size = (hidden.parent / "a" / "state.json").stat().st_size
        assert {name: found[name] for name in ("training", "sampler", "external", "recovery")} == {
            "training": (1, size),
            "sampler": (1, size),
            "external": (1, size),
            "recovery": (1, 1000),
        }
        assert found["other"][1] > 4096, "the journal"
        assert storage.limit_bytes == 10**7
        status = await client.orchestrator.answer(GetStatus())
        assert status.storage == storage
        async with over_http(client) as http:
            metrics = (await http.get("/metrics")).text
            assert 'xorl_storage_bytes{kind="recovery"} 1000.0' in metrics
            assert "xorl_storage_limit_bytes 10000000.0" in metrics
            refused = await http.get("/api/v1/billing/usage/checkpoints/current", params={"project_id": "p"})
            assert (refused.status_code, "no projects" in refused.text) == (400, True)
