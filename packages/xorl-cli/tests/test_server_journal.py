"""The journal: what was acknowledged is there after a kill, once, and what nobody needs goes."""

import asyncio
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap

import msgspec
import pytest

from asynchronous import in_a_loop
from tiny_models import hf_config, write_config
from xorl.server.operations import ClientOperation, ClientResult
from xorl.server.orchestrator import journal as journals
from xorl.server.orchestrator.commit import JournalError, OtherVersion
from xorl.server.orchestrator.inference import Added
from xorl.server.orchestrator.registry import CheckpointRecord, KeptRecord, ModelRecord, SamplerRecord, SessionRecord
from xorl.server.supervise import BAD_INPUT


def submission(name, *, key=None, body=b"body", lane="m#1", seq=None, **extra):
    return journals.Submission(
        name, key, body[:4], lane, seq, "c", "tinker", "ForwardBackward", None, 1.0, body, **extra
    )


def with_journal(tmp_path, scenario):
    async def whole():
        journal = journals.Journal(tmp_path / "journal.sqlite")
        try:
            return await scenario(journal)
        finally:
            journal.close()

    return asyncio.run(whole())


def within_a_journal(test):
    """A test that is a coroutine of a journal and its folder, as a plain function."""
    return lambda tmp_path: with_journal(tmp_path, lambda journal: test(journal, tmp_path))


@within_a_journal
async def test_a_retry_finds_the_first_request_and_another_body_does_not_pass_for_it(journal, tmp_path):
    """Catches a retried chunk that is trained on twice."""
    first = await journal.submit(submission("a", key="m/1"))
    retries = await asyncio.gather(*(journal.submit(submission(f"b{i}", key="m/1")) for i in range(20)))
    assert first.number is not None
    assert {(w.request_id, w.number, w.is_same) for w in retries} == {("a", None, True)}
    other = await journal.submit(submission("c", key="m/1", body=b"else"))
    assert (other.request_id, other.is_same) == ("a", False)
    assert (await journal.submit(submission("a"))).number is None
    assert [r.request_id for r in journal.unfinished()] == ["a"]
    assert journal.operation("a") == b"body"


def test_what_was_acknowledged_before_a_kill_is_there_after_it(tmp_path):
    """Catches an acknowledgement that comes before the journal is on the disk, and a journal that a kill breaks."""
    code = """
        import asyncio, sys
        from pathlib import Path
        from xorl.server.orchestrator.journal import Journal, Submission

        async def client(journal, name):
            for index in range(10**6):
                await journal.submit(Submission(f"{name}-{index}", f"{name}-{index}", b"", None, None, "c", "xorl", "k",
                                                None, 1.0, b"x" * 500))
                print(f"{name}-{index}", flush=True)

        async def main():
            journal = Journal(Path(sys.argv[1]))
            await asyncio.gather(*(client(journal, name) for name in "abcdefgh"))

        asyncio.run(main())
    """
    path = tmp_path / "journal.sqlite"
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    acknowledged = [process.stdout.readline().strip() for _ in range(400)]
    os.kill(process.pid, signal.SIGKILL)
    rest = process.communicate()[0].splitlines(keepends=True)
    acknowledged += [line.strip() for line in rest if line.endswith("\n")]

    async def scenario(journal):
        kept = [request.request_id for request in journal.unfinished()]
        assert set(acknowledged) <= set(kept)
        assert len(kept) == len(set(kept))

    with_journal(tmp_path, scenario)


@within_a_journal
async def test_results_the_tail_and_records_are_one_transaction_and_a_second_result_changes_nothing(journal, tmp_path):
    """Catches a step that is in the tail twice, or a result whose model's record says that it did not run."""
    for index in range(1, 6):
        await journal.submit(submission(str(index), seq=index, body=f"body {index}".encode()))
    kinds = ["changes", "settles", "changes", None, "changes"]
    for index, tail in enumerate(kinds, start=1):
        record = journals.Record("model", "m", str(index).encode())
        outcome = journals.Outcome(str(index), f"result {index}".encode(), 10.0, tail, None, "m#1", [record])
        await journal.finish([outcome])
        await journal.finish([outcome])
    assert [journal.tail_operation(n) for n in journal.tail("m#1")] == [b"body 1", b"body 2", b"body 3", b"body 5"]
    assert journal.num_settled("m#1") == 2
    assert journal.records("model") == [("m", b"5")]
    assert journal.find("4").result == b"result 4"
    await journal.submit(submission("6"))
    await journal.finish([journals.Outcome("6", b"saved", 10.0, None, "settled", "m#1")])
    assert [journal.tail_operation(n) for n in journal.tail("m#1")] == [b"body 3", b"body 5"]
    await journal.submit(submission("7", lane="m#2", ends_lane="m#1", records=[journals.Record("model", "m", b"new")]))
    assert journal.tail("m#1") == []
    assert journal.unfinished()[0].lane == "m#2"


@within_a_journal
async def test_a_full_disk_keeps_nothing_of_a_write_and_the_next_one_goes_on(journal, tmp_path):
    """Catches half a request in the journal, and a thread that a full disk ends."""
    await journal.submit(submission("a"))
    await journal._commit.write(lambda connection: connection.execute("PRAGMA max_page_count = 1"))
    with pytest.raises(JournalError, match="full"):
        await journal.submit(submission("b", body=b"x" * 10**6))
    await journal._commit.write(lambda connection: connection.execute("PRAGMA max_page_count = 1000000"))
    await journal.submit(submission("c"))
    assert [r.request_id for r in journal.unfinished()] == ["a", "c"]


@within_a_journal
async def test_a_write_that_cannot_be_done_fails_alone_and_the_next_ones_go_on(journal, tmp_path):
    """Catches a number of more than 64 bits that ends the thread, so that every later write waits for ever."""
    names = ["a", "b", "c", "d"]
    bad = submission("bad", seq=2**63)
    asked = [journal.submit(one) for one in (*map(submission, names[:2]), bad, *map(submission, names[2:]))]
    answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 20)
    assert isinstance(answers.pop(2), JournalError)
    assert [written.request_id for written in answers] == names
    await asyncio.wait_for(journal.submit(submission("e")), 20)
    assert [r.request_id for r in journal.unfinished()] == [*names, "e"]


def test_a_journal_whose_thread_has_ended_ends_the_loop(tmp_path):
    """Catches a service that answers that it is well and keeps nothing any more."""

    async def scenario(journal):
        await asyncio.wait_for(journal._commit.write(lambda _: sys.exit(1)), 20)

    with pytest.raises(RuntimeError, match="stopped"):
        with_journal(tmp_path, scenario)


@within_a_journal
async def test_results_go_when_they_were_had_long_ago_or_are_too_many_and_what_is_needed_stays(journal, tmp_path):
    """Catches a journal that grows for ever, and one that forgets what a client or a restart still asks for."""
    for index in range(6):
        await journal.submit(submission(str(index), key=f"m/{index}"))
    for index in range(5):
        tail = "changes" if index == 0 else None
        await journal.finish([journals.Outcome(str(index), b"r" * 100, 1000.0, tail, None, "m#1")])
    await journal.mark_retrieved(["0", "1"], 1000.0)
    keep = journals.Retention(after_retrieval_s=60, unretrieved_s=3600, result_bytes=10**6, num_requests=100)
    assert await journal.prune(1030.0, keep, {}) == 0
    assert await journal.prune(1061.0, keep, {}) == 2
    assert [journal.find(str(i)).result is None for i in range(6)] == [True, True, False, False, False, True]
    assert journal.find("1").is_finished
    assert journal.find_key("m/1", b"body").request_id == "1"
    assert len(journal.tail("m#1")) == 1
    small = journals.Retention(after_retrieval_s=60, unretrieved_s=3600, result_bytes=250, num_requests=2)
    assert await journal.prune(1062.0, small, {}) == 1
    assert [journal.find(str(i)) is not None for i in range(6)] == [True, False, False, True, True, True]
    assert await journal.prune(1000.0 + 3600, small, {}) == 2
    assert [r.request_id for r in journal.unfinished()] == ["5"]


@within_a_journal
async def test_pages_of_what_has_gone_are_used_again(journal, tmp_path):
    """Catches a file that grows with all requests there ever were."""
    keep = journals.Retention(after_retrieval_s=0, unretrieved_s=0, result_bytes=0, num_requests=50)
    sizes = []
    for index in range(600):
        await journal.submit(submission(str(index), key=str(index), body=b"x" * 5000))
        await journal.finish([journals.Outcome(str(index), b"y" * 5000, 1.0)])
        if index % 50 == 49:
            await journal.prune(2.0, keep, {})
            sizes.append(journal.size_bytes())
    assert sizes[-1] <= 1.2 * sizes[2]


@within_a_journal
async def test_the_file_is_a_database_that_others_can_read(journal, tmp_path):
    """Catches settings without which a kill of the machine loses what was acknowledged."""
    await journal.submit(submission("a"))
    commit = journal._commit
    assert await commit.write(lambda c: c.execute("PRAGMA journal_mode").fetchone()) == ("wal",)
    assert await commit.write(lambda c: c.execute("PRAGMA synchronous").fetchone()) == (2,)
    with sqlite3.connect(tmp_path / "journal.sqlite") as other:
        assert other.execute("SELECT count(*) FROM requests").fetchone() == (1,)


def test_a_journal_of_another_version_is_left_alone(tmp_path):
    """Catches requests that a newer service reads as something else."""

    async def nothing(journal):
        await journal.submit(submission("a"))

    with_journal(tmp_path, nothing)
    with sqlite3.connect(tmp_path / "journal.sqlite") as file:
        file.execute("PRAGMA user_version = 99")
    with pytest.raises(OtherVersion, match="journal version 99; this one reads version"):
        with_journal(tmp_path, nothing)


def test_what_the_journal_keeps_has_the_form_of_its_version():
    """Catches a change of a request, a result or a record with which the journals of users would be read as something
    else: raise JOURNAL_VERSION with it, unless all that is new are fields whose defaults are what older journals meant,
    and write here what this says."""
    records = (SessionRecord, ModelRecord, SamplerRecord, CheckpointRecord, KeptRecord, Added)
    _, parts = msgspec.json.schema_components((ClientOperation, ClientResult, *records))
    forms = {name: (part["properties"], sorted(part["required"])) for name, part in parts.items()}
    form = hashlib.blake2b(json.dumps([journals.SCHEMA, forms], sort_keys=True).encode(), digest_size=8).hexdigest()
    assert (journals.JOURNAL_VERSION, form) == (5, "20135fafd98c9ffd")


@pytest.mark.parametrize("name", ["run#1", "what?", "100%41"])
def test_the_journal_is_in_its_folder_whatever_that_is_called(tmp_path, name):
    """Catches a journal beside the output_dir, which two services can have, since its name is half of a URI."""

    async def scenario(journal):
        await journal.submit(submission("a"))

    with_journal(tmp_path / name, scenario)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name / "journal.sqlite").stat().st_size


@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_orchestrator_with_a_journal_that_it_cannot_read_is_not_started_again(tmp_path, is_damaged):
    """Catches a service that starts it five times, and then says how often it died and not what to do."""
    write_config(tmp_path / "model", hf_config())
    (tmp_path / "config.yaml").write_text(f"config_path: {tmp_path}/model\noutput_dir: {tmp_path}\n")
    (tmp_path / "service").mkdir()
    with sqlite3.connect(tmp_path / "service" / "journal.sqlite") as file:
        file.execute("CREATE TABLE written_by_another(version)")
    if is_damaged:
        (tmp_path / "service" / "journal.sqlite").write_bytes(b"what is no database" * 1000)
    command = [sys.executable, "-m", "xorl.server.orchestrator", "--config", str(tmp_path / "config.yaml")]
    addresses = ["--bind", f"ipc://{tmp_path}/api", "--workers", f"ipc://{tmp_path}/workers"]
    ended = subprocess.run([*command, *addresses], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == BAD_INPUT, ended.stderr
    assert "or move journal.sqlite and the files beside it away" in ended.stderr
    assert "Traceback" not in ended.stderr


@in_a_loop
async def test_the_file_shrinks_after_a_large_result_has_gone(tmp_path):
    """Catches a journal that stays as large as the largest request there ever was."""
    journal = journals.Journal(tmp_path / "journal.sqlite")
    body = b"x" * 2**25
    await journal.submit(journals.Submission("a", None, b"", None, None, "c", "xorl", "Sample", None, 1.0, body))
    await journal.finish([journals.Outcome("a", body, 1.0)])
    assert journal.size_bytes() > 2**25
    for _ in range(3):
        await journal.prune(1e9, journals.Retention(), {})
    assert journal.size_bytes() < 2**24
    journal.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2**25
