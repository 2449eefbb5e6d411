"""vLLM's server as that of a night, in vLLM's environment (`make test-vllm`): the texts of `engine: vllm`."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-vllm` does it", allow_module_level=True)
pytest.importorskip("openai")
pytest.importorskip("ray")

SAMPLE = Path(__file__).resolve().parents[2] / "models" / "sample"
DATE, START_S = "2025-03-01", 600.0
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


@contextmanager
def served(folder: Path):
    """The URL of the sample model, served by vLLM in float32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As `vllm serve`, whose command looks for a package of that name, while this one is called vllm-cpu.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        SAMPLE,
        "--served-model-name",
        "sample",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", 8, "--load-format", "safetensors"]
    command += ["--structured-outputs-config", '{"backend": "guidance"}']
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(
            list(map(str, command)), env=os.environ | ON_A_CPU, stdout=log, stderr=log, start_new_session=True
        )
        try:
            began_s = time.monotonic()
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                    break
                except OSError:
                    said = (folder / "server.log").read_text()[-3000:]
                    assert server.poll() is None and time.monotonic() - began_s < START_S, said
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def night(folder: Path, name: str, decoding: dict) -> dict[tuple, dict]:
    """The texts of a night by side and entity."""
    settings = {
        "workspace": name, "tables": {"path": "tables"}, "decoding": {"batch_size": 8, "dtype": "float32"} | decoding,
        "night": {"train_ctr": False}, "cluster": {"num_workers": 1},
    }  # fmt: skip
    config = folder / f"{name}.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-c", "from laserbatch.jobs.cli import main; main()"]
    command += ["nightly", "--config", str(config), "--date", DATE, "--json"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    run = folder / name / "runs" / json.loads(ran.stdout)["run_id"]
    return {
        (row["side"], row["entity_id"]): row
        for side in ("user", "item")
        for row in pq.read_table(run / "knowledge" / side).to_pylist()
    }


def test_a_night_of_a_server_has_the_texts_of_engine_vllm(tmp_path):
    from laserbatch.pipeline.sample.world import write_sample_world

    write_sample_world(tmp_path / "tables", num_users=8, num_items=12)
    theirs = night(tmp_path, "vllm", {"engine": "vllm", "vllm": {"enforce_eager": True}})
    with served(tmp_path) as url:
        server = {"url": url, "model": "sample"}
        found = {
            api: night(tmp_path, api, {"engine": "endpoint", "endpoint": server | {"api": api}})
            for api in ("completions", "chat")
        }
    for api, rows in found.items():
        assert rows.keys() == theirs.keys()
        other = [key for key, row in rows.items() if row["token_ids"] != theirs[key]["token_ids"]]
        print(f"{api}: {len(other)} of {len(rows)} texts differ")
        assert len(other) <= len(rows) / 20, other  # near-ties: batches differ
        provenance = [json.loads(row["decoding_json"]) for row in rows.values()]
        assert {one["engine"] for one in provenance} == {"endpoint"} and any(one.get("guided") for one in provenance)
    fingerprints = [{key: row["fingerprint"] for key, row in rows.items()} for rows in (found["completions"], theirs)]
    assert fingerprints[0] == fingerprints[1]
