"""What a file system tells of a lock that another host may hold."""

import pytest

from laserbatch.pipeline.storage.lock_probe import has_shared_locks, probe_lock


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("ext4", "rw", True),
        ("nfs4", "rw,vers=4.2,local_lock=none", True),
        ("nfs", "rw,nolock,local_lock=all", False),
        ("nfs", "rw,local_lock=flock", False),
        ("lustre", "rw,flock", True),
        ("lustre", "rw,localflock", False),
        ("fuse.gcsfuse", "rw", False),
        ("virtiofs", "rw", False),
    ],
)
def test_whether_locks_of_other_hosts_are_seen(tmp_path, kind, options, expected):
    mounts, folder = tmp_path / "mountinfo", tmp_path / "a b"
    folder.mkdir()
    at = str(folder.resolve()).replace(" ", "\\040")
    mounts.write_text(
        f"1 0 0:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {at} rw,relatime shared:1 - {kind} there {options}\n"
    )
    assert has_shared_locks(folder / "LOCK", mounts) is expected
    assert has_shared_locks(tmp_path / "LOCK", mounts)


def test_nothing_is_known_without_the_mounts_or_the_file(tmp_path):
    assert not has_shared_locks(tmp_path, tmp_path / "none") and probe_lock(tmp_path / "none") == "unknown"
