"""Versions of pools: published as a whole, frozen, and selected by a pointer."""

import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from drafts import draft

from laserbatch.retrieval_pools.errors import PoolError
from laserbatch.retrieval_pools.index.build import PoolText, build_pool
from laserbatch.retrieval_pools.index.manifest import FORMAT_VERSION
from laserbatch.retrieval_pools.index.pool import Pool
from laserbatch.retrieval_pools.index.store import PoolStore


def publish(store, version, text=(1, 2, 3), sides=("user", "item")):
    with store.publish(version) as folder:
        for side in sides:
            rows = [PoolText(np.array(text, np.int32), "g")]
            build_pool(rows, folder / side, side=side, tokenizer_hash="t", model_id="m")
        (folder / "router").mkdir(exist_ok=True)
        (folder / "router" / "note.json").write_text("{}")
    return version


def tree_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_first_version_is_published_and_current(tmp_path):
    store = PoolStore(tmp_path / "pools")
    assert store.current_version() is None
    assert store.list() == []
    assert publish(store, "2025-03-01-aa") == "2025-03-01-aa"
    assert store.current_version() == "2025-03-01-aa"
    assert (store.folder("2025-03-01-aa") / "router" / "note.json").exists()
    assert store.open("2025-03-01-aa", "user", "t", verify=True).manifest.num_tokens == 3
    [version] = store.list()
    assert version.is_current and version.problem is None and set(version.pools) == {"user", "item"}


def test_side_without_a_pool_is_none(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1", sides=("item",))
    assert store.open("v1", "user") is None
    assert set(store.list()[0].pools) == {"item"}


def test_use_switches_and_unknown_versions_are_refused(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    publish(store, "v2", text=(4, 5))
    assert store.current_version() == "v2"
    store.use("v1")
    assert store.current_version() == "v1"
    assert [version.is_current for version in store.list()] == [True, False]
    for refused in (store.use, store.folder, lambda name: store.open(name, "item")):
        with pytest.raises(PoolError, match=r"no pools 'v3' .*there are: v1, v2"):
            refused("v3")
    with pytest.raises(PoolError, match="there are none"):
        PoolStore(tmp_path / "nowhere").use("v1")


def test_damaged_version_is_listed_but_not_used(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    publish(store, "v2", text=(4, 5))
    order = tmp_path / "v1" / "item" / "order.npy"
    content = order.read_bytes()
    order.write_bytes(content[:-1] + b"\x7f")  # the size is unchanged, so only a read of every byte notices it
    assert store.list()[0].problem is None
    with pytest.raises(PoolError, match=r"order.npy is damaged: .*sha256"):
        store.use("v1")
    order.unlink()
    assert "order.npy is missing" in store.list()[0].problem
    with pytest.raises(PoolError, match=r"order.npy is missing"):
        store.use("v1")
    assert store.current_version() == "v2"


@pytest.mark.parametrize("lost", ["user", "router", "router/note.json"])
def test_a_version_that_has_lost_a_part_of_it_is_refused(tmp_path, lost):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    shutil.rmtree(tmp_path / "v1" / lost) if "." not in lost else (tmp_path / "v1" / lost).unlink()
    refused = rf"v1/{lost}.* is missing. Run `laserbatch pools rebuild`"
    assert re.search(refused, store.list()[0].problem)
    for use in (store.use, store.folder, lambda name: store.open(name, "user")):
        with pytest.raises(PoolError, match=refused):
            use("v1")
    publish(store, "v1")
    assert store.verify("v1") == ("user", "item") and store.list()[0].problem is None


def test_what_belongs_to_pools_is_compared_with_its_checksum_too(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    (tmp_path / "v1" / "router" / "note.json").write_text("[]")
    with pytest.raises(PoolError, match=r"note.json is damaged: .*its checksum in .*checksums.json"):
        store.verify("v1")
    (tmp_path / "v1" / "checksums.json").write_text("[1]")
    with pytest.raises(PoolError, match=r"checksums.json is damaged"):
        store.folder("v1")
    (tmp_path / "v1" / "checksums.json").unlink()  # an earlier laserbatch wrote no checksums
    assert store.verify("v1") == ("user", "item")


def test_failed_build_changes_nothing(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    before = tree_of(tmp_path)
    with pytest.raises(RuntimeError, match="killed"), store.publish("v2") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError("killed")
    with pytest.raises(OSError, match=f"No space.*{tmp_path}/v2"), store.publish("v2"):
        raise OSError(28, "No space left on device")
    assert tree_of(tmp_path) == before
    assert store.current_version() == "v1"


def test_publishing_the_same_again_keeps_the_files(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    inode = os.stat(tmp_path / "v1").st_ino
    publish(store, "v1")
    assert os.stat(tmp_path / "v1").st_ino == inode
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


def test_rebuilding_a_damaged_version_mends_it_under_open_pools(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    opened = store.open("v1", "item")
    (tmp_path / "v1" / "item" / "manifest.json").write_text("{}")
    publish(store, "v1")
    assert store.list()[0].problem is None
    assert draft(opened, np.array([1], np.int32), 0, min_acceptance=0).token_ids.tolist() == [2, 3]
    assert draft(store.open("v1", "item"), np.array([1], np.int32), 0, min_acceptance=0).token_ids.tolist() == [2, 3]


def test_a_version_that_is_rebuilt_while_it_is_opened_is_opened_as_it_becomes(tmp_path, monkeypatch):
    store, opened, open_pool = PoolStore(tmp_path), [], Pool.open

    def rebuilt_meanwhile(folder, *arguments, **options):
        opened.append(folder)
        if len(opened) == 1:
            publish(store, "v1", text=(4, 5, 6, 7))
        return open_pool(folder, *arguments, **options)

    publish(store, "v1")
    monkeypatch.setattr(Pool, "open", rebuilt_meanwhile)
    assert store.open("v1", "user").manifest.num_tokens == 4
    assert (opened[0].parent.name, opened[-1].parent.name) == ("v1", "v1@2")


def test_a_builder_killed_at_any_of_its_file_operations_leaves_a_version_that_is_whole(tmp_path):
    """A version with other content replaces the current one; after a kill one of them is whole."""
    start, new = PoolStore(tmp_path / "start"), tmp_path / "new"
    publish(start, "v1")
    shutil.copytree(start.root / "v1", new)
    (new / "router" / "note.json").write_text('{"it": "differs"}')
    seen, death = set(), 0
    while "done" not in seen:
        death += 1
        place = tmp_path / str(death)
        shutil.copytree(start.root, place)
        store = PoolStore(place)
        opened = store.open("v1", "item")
        code = killed_at(place, death, lambda store=store: put(store, "v1", new))
        assert code in (0, -signal.SIGKILL)
        assert store.current_version() == "v1" and store.verify("v1") == ("user", "item"), death
        assert (store.folder("v1") / "router" / "note.json").read_text() in ("{}", '{"it": "differs"}')
        assert draft(opened, np.array([1], np.int32), 0, min_acceptance=0).token_ids.tolist() == [2, 3]
        put(store, "v1", new)
        store.collect(1)
        assert sorted(os.listdir(place)) == ["CURRENT", "v1@2"] and tree_of(store.folder("v1")) == tree_of(new)
        seen.add("done" if code == 0 else "died")
    assert death > 20


def put(store, version, content):
    with store.publish(version) as folder:
        shutil.copytree(content, folder, dirs_exist_ok=True)


def killed_at(folder, number, work):
    """Run `work` in a process killed at the `number`-th change of files in `folder`; returns its exit code."""
    names = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = [number]

    def audited(event, arguments):
        is_ours = event in names and isinstance(arguments[0], str | os.PathLike) and str(folder) in str(arguments[0])
        if is_ours and (event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(audited)
        work()
        code = 0
    finally:
        os._exit(code)


def test_pointer_to_nothing_says_what_to_do(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    (tmp_path / "CURRENT").write_text("v9\n")
    with pytest.raises(PoolError, match=r"names the pools 'v9', which do not exist; there are: v1.*pools use VERSION"):
        store.current_version()


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "CURRENT", "a b"])
def test_names_that_cannot_be_folders_are_refused(tmp_path, name):
    with pytest.raises(PoolError, match="cannot name pools"), PoolStore(tmp_path).publish(name):
        pass
    assert os.listdir(tmp_path) == []


def test_collection_keeps_the_newest_the_current_and_those_in_use(tmp_path):
    store = PoolStore(tmp_path)
    for number in range(1, 7):
        publish(store, f"v{number}", text=(number, 2))
    store.use("v2")
    planned = store.collect(2, {"v4"}, dry_run=True)
    assert planned.versions == ("v1", "v3", "v5") and planned.num_bytes > 0
    assert [version.version for version in store.list()] == [f"v{number}" for number in range(1, 7)]
    opened = store.open("v1", "item")
    assert store.collect(2, {"v4"}) == planned
    assert [version.version for version in store.list()] == ["v2", "v4", "v6"]
    assert all(version.problem is None for version in store.list())
    assert draft(opened, np.array([1], np.int32), 0).token_ids.tolist() == [2]  # readers keep their version
    assert store.collect(1, {"gone"}).versions == ("v4", "v6")
    assert store.collect(1).versions == () and store.current_version() == "v2"


def test_collection_removes_what_dead_builders_left_and_nothing_else(tmp_path):
    store = PoolStore(tmp_path)
    assert PoolStore(tmp_path / "nothing").collect(1).versions == ()
    publish(store, "v1")
    before = tree_of(tmp_path)
    (tmp_path / ".v2.123-abc.tmp" / "user").mkdir(parents=True)
    (tmp_path / ".v2.123-abc.tmp" / "user" / "tokens.npy").write_bytes(b"x" * 100)
    (tmp_path / ".CURRENT.123-abc.tmp").write_text("v2")
    assert [version.version for version in store.list()] == ["v1"]
    planned = store.collect(1, dry_run=True)
    assert (planned.versions, planned.num_leftovers, planned.num_bytes) == ((), 2, 102)
    assert store.collect(1) == planned
    assert tree_of(tmp_path) == before


def test_version_of_another_format_is_not_used(tmp_path):
    store = PoolStore(tmp_path)
    publish(store, "v1")
    path = tmp_path / "v1" / "user" / "manifest.json"
    path.write_text(path.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 1'))
    [version] = store.list()
    assert f"format 1; this version expects {FORMAT_VERSION}. Run `laserbatch pools rebuild`" in version.problem
    with pytest.raises(PoolError, match="pools rebuild"):
        store.use("v1")


def test_full_disk_leaves_the_published_version_as_it_was(small_disk):
    store = PoolStore(small_disk)
    publish(store, "v1")
    before = tree_of(small_disk)
    with pytest.raises(OSError, match=r"No space left on device.*/v2/item"), store.publish("v2") as folder:
        rows = (PoolText(np.arange(1000, dtype=np.int32)) for _ in range(1000))
        build_pool(rows, folder / "item", side="item", tokenizer_hash="t", model_id="m")
    assert tree_of(small_disk) == before
    assert store.current_version() == "v1"
    assert store.open("v1", "item", verify=True).manifest.num_tokens == 3


READER = """
import sys
import numpy as np
from laserbatch.retrieval_pools.index.pool import Pool
pool = Pool.open(sys.argv[1])
print(sum(int(np.sum(array)) for array in pool.index[:4]), flush=True)  # touches every page
input()
shared = private = 0
inside = False
for line in open("/proc/self/smaps"):
    words = line.split()
    if not words[0].endswith(":"):
        inside = line.rstrip().endswith(".npy")
    elif inside and words[0] == "Shared_Clean:":
        shared += int(words[1])
    elif inside and words[0] in ("Private_Clean:", "Private_Dirty:", "Shared_Dirty:"):
        private += int(words[1])
print(shared, private, flush=True)
input()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="this system does not tell who shares pages")
def test_readers_of_one_machine_share_one_copy(tmp_path):
    rows = (PoolText(np.arange(1000, dtype=np.int32)) for _ in range(200))
    pool = build_pool(rows, tmp_path / "p", side="item", tokenizer_hash="t", model_id="m")
    os.sync()  # pages that are not on the disk yet are not clean
    size_kb = pool.manifest.size_bytes // 1024
    del pool  # this process may have mapped the file, too
    start = [sys.executable, "-c", READER, str(tmp_path / "p")]
    readers = [subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        assert len({reader.stdout.readline() for reader in readers}) == 1
        for reader in readers:
            reader.stdin.write("\n")
            reader.stdin.flush()
            shared_kb, private_kb = map(int, reader.stdout.readline().split())
            assert shared_kb >= 0.95 * size_kb
            assert private_kb <= 0.05 * size_kb
    finally:
        for reader in readers:
            reader.communicate("\n")
