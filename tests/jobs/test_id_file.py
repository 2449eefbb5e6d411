"""Files of ids as editors, spreadsheets and databases write them: read right, or refused by line."""

import pytest

from laserbatch.jobs.commands.id_file import read_ids
from laserbatch.pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("held", "ids"),
    [
        (b"u1\nu2\n\nu1\n", {"u1", "u2"}),
        (b"u1 \r\n\t u2\r\n", {"u1", "u2"}),
        (b"u1\ru2\r", {"u1", "u2"}),
        ("\ufeffu1\n".encode(), {"u1"}),
        ("u1\N{NO-BREAK SPACE}\n\N{ZERO WIDTH SPACE}u2\N{LEFT-TO-RIGHT MARK}\n".encode(), {"u1", "u2"}),
        (b"\"u1\"\n' u2 '\n\"a,b\"\n\"say \"\"hi\"\"\"\n", {"u1", "u2", "a,b", 'say "hi"'}),
        ("Zoë-Ω\n7".encode("utf-16"), {"Zoë-Ω", "7"}),
        ("\ufeffu1\r\nu2\r\n".encode("utf-16-be"), {"u1", "u2"}),
        (b"user_id\nu1\n", {"u1"}),
        (b'"user_id"\n"u1"\n', {"u1"}),
        (b"asked_on,user_id\n2025-01-01,u1\n2025-01-01,\"a,b\"\n", {"u1", "a,b"}),
        (b"user_id;why\nu1;\nu2;moved\n", {"u1", "u2"}),
        (b"user_id\twhy\nu1\tmoved\n", {"u1"}),
        (b"\n \n", set()),
        (b"{3F2504E0-4F89}\n[7]x\n", {"{3F2504E0-4F89}", "[7]x"}),
    ],
)  # fmt: skip
def test_ids_are_read_without_what_surrounds_them(held, ids, tmp_path):
    (tmp_path / "ids.txt").write_bytes(held)
    assert read_ids(tmp_path / "ids.txt") == ids


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (b"u1\nu2,2025-01-01\n", "line 2: 'u2,2025-01-01' holds several fields"),
        (b'"u1","2025-01-01"\n', "line 1: '\"u1\",\"2025-01-01\"' holds several fields"),
        (b"id;why\nu1;moved\n", "line 1: 'id;why' holds several fields"),
        (b'u1\n"u2\n', "line 2: '\"u2' has a quote at only one end"),
        (b"user_id,why\nu1,a,b\n", "line 2: 3 fields, but the header has 2"),
        (b"user_id,why\n,a\n", "line 2: the id is empty"),
        (b"user_id,why\n\"u1\",\"a\n", "line 2: not a row of a CSV"),
        (b'""\n', "line 1: the id is empty"),
        (b"u1\ncaf\xe9\n", "line 2: not UTF-8"),
        ("u1\n".encode("utf-16-le"), "holds zero bytes"),
        (b"PK\x03\x04\x14\0", "is not text, but a spreadsheet"),
        (b"u1,\nu2,\n", "line 1: 'u1,' holds several fields"),
        (b'{"user_id": "u1", "why": ""}\n', "line 1: '{\"user_id\": \"u1\", \"why\": \"\"}' holds several fields"),
        (b"PAR1\x15", "is not text, but Parquet"),
        (b"u\x1b1\n", "line 1: 'u\\x1b1' holds a control character"),
    ],
)  # fmt: skip
def test_a_file_whose_ids_are_not_certain_is_refused_by_line(held, message, tmp_path):
    (tmp_path / "ids.txt").write_bytes(held)
    with pytest.raises(ConfigError) as error:
        read_ids(tmp_path / "ids.txt")
    assert f"{tmp_path}/ids.txt" in str(error.value) and message in str(error.value), error.value
    assert "UTF-8" in str(error.value) or "header has" in str(error.value)


def test_what_was_taken_for_an_id_is_said(tmp_path):
    path, notes = tmp_path / "ids.csv", []
    path.write_text("why,user_id\n,u1\n,u2\n")
    read_ids(path, notes.append)
    assert notes == [f"{path}: read 2 ids, from the column user_id; the first is 'u1'"]
