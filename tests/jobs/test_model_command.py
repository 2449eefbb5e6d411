"""`laserbatch model import` writes a model folder that a night can use from a GGUF file, or nothing."""

import json

import pytest
from night_world import run_here

pytest.importorskip("gguf", reason="gguf is not installed")
from test_gguf_file import write_sample_gguf

from laserbatch.jobs.settings import Settings


def test_a_gguf_file_becomes_a_model_folder_and_another_file_changes_nothing(tmp_path, capfd):
    path, out = write_sample_gguf(tmp_path / "m.gguf"), tmp_path / "model"
    done = run_here(capfd, "model", "import", str(path), str(out), "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["architecture"], printed["stored_as"]) == ("LlamaForCausalLM", "float32")
    assert printed["next"] == f"laserbatch doctor --model {out}"
    assert Settings(decoding={"model": str(out)}).model_dir == out
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert run_here(capfd, "model", "import", str(path), str(out)).returncode == 3  # the folder exists
    other = write_sample_gguf(tmp_path / "other.gguf", architecture="rwkv9")
    refused = run_here(capfd, "model", "import", str(other), str(out), "--overwrite")
    assert refused.returncode == 3 and "rwkv9" in refused.stderr
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_a_file_in_the_folder_that_would_be_replaced_is_refused(tmp_path, capfd):
    path = write_sample_gguf(tmp_path / "m.gguf")
    refused = run_here(capfd, "model", "import", str(path), str(tmp_path), "--overwrite")
    assert refused.returncode == 3 and "which is being imported" in refused.stderr and path.is_file()
