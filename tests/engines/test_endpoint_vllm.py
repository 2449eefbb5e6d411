"""vLLM's server as an endpoint writes the texts of `engine: vllm`; runs in vLLM's environment (`make test-vllm`).

LASERBATCH_SERVED_MODEL may name the folder of a model to use in place of the bundled one.
"""

import importlib.util
import json
import os
import signal
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
MODEL = Path(os.environ.get("LASERBATCH_SERVED_MODEL", SAMPLE))
DATE, START_S = "2025-03-01", 600.0
SMALL_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served(folder: Path, port: int):
    """Run vLLM's server with the model in float32."""
    # Like `vllm serve`, which looks up a package named vllm, while the CPU build is named vllm-cpu.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        MODEL,
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
                    server_log = (folder / "server.log").read_text()[-3000:]
                    assert server.poll() is None and time.monotonic() - began_s < START_S, server_log
                    time.sleep(0.5)
            yield server
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def command_of(folder: Path, name: str, decoding: dict, **night_options) -> list[str]:
    """The command of a night with a separate configuration and workspace."""
    from laserbatch.pipeline.knowledge.domains import of_domain
    from laserbatch.pipeline.knowledge.templates import KnowledgeSettings

    decoding = {"model": str(MODEL), "batch_size": 8, "dtype": "float32", "max_new_tokens": 256} | decoding
    knowledge = of_domain(KnowledgeSettings(), "sample").model_dump(mode="json", exclude_unset=True)
    settings = {
        "workspace": name, "tables": {"path": "tables"}, "decoding": decoding, "knowledge": knowledge,
        "night": {"train_ctr": False} | night_options, "cluster": {"num_workers": 1},
        "gates": {"max_failed_share": 0.9},
    }  # fmt: skip
    config = folder / f"{name}.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-c", "from laserbatch.jobs.cli import main; main()"]
    return [*command, "nightly", "--config", str(config), "--date", DATE, "--json"]


def night(folder: Path, name: str, decoding: dict, **night_options) -> dict[tuple, dict]:
    """The texts of a night by side and entity."""
    command, environment = command_of(folder, name, decoding, **night_options), os.environ | SMALL_CACHE
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
    by_vllm = night(tmp_path, "vllm", {"engine": "vllm", "vllm": {"enforce_eager": True}})
    port = free_port()
    with served(tmp_path, port):
        server = {"url": f"http://127.0.0.1:{port}/v1", "model": "sample"}
        texts = {
            api: night(tmp_path, api, {"engine": "endpoint", "endpoint": server | {"api": api}})
            for api in ("completions", "chat")
        }
    for api, rows in texts.items():
        assert rows.keys() == by_vllm.keys()
        other = [key for key, row in rows.items() if row["token_ids"] != by_vllm[key]["token_ids"]]
        print(f"{api}: {len(other)} of {len(rows)} texts differ")
        assert len(other) <= len(rows) / 20, other  # near-ties: batches differ
        provenance = [json.loads(row["decoding_json"]) for row in rows.values()]
        assert {record["engine"] for record in provenance} == {"endpoint"}
        assert any(record.get("guided") for record in provenance)
    fingerprints = [{key: row["fingerprint"] for key, row in rows.items()} for rows in (texts["completions"], by_vllm)]
    assert fingerprints[0] == fingerprints[1]


def test_a_night_goes_on_when_a_killed_server_is_there_again(tmp_path):
    from laserbatch.pipeline.sample.world import write_sample_world

    write_sample_world(tmp_path / "tables", num_users=8, num_items=12)
    port, options = free_port(), {"shard_size": 2}
    server = {"url": f"http://127.0.0.1:{port}/v1", "model": "sample", "give_up_after_s": 5}
    decoding = {"engine": "endpoint", "endpoint": server}
    with served(tmp_path, port) as process:
        expected = night(tmp_path, "whole", decoding, **options)
        command = command_of(tmp_path, "killed", decoding, **options)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            while not (finished := list((tmp_path / "killed").glob("runs/*/knowledge/*/*.parquet"))):
                assert running.poll() is None
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = running.communicate(timeout=300)
    assert running.returncode == 6 and "the same command continues" in output, output
    before = {path: path.stat().st_mtime_ns for path in finished}
    with served(tmp_path, port):
        texts = night(tmp_path, "killed", decoding, **options)
    assert {path: path.stat().st_mtime_ns for path in finished} == before, "a finished shard was written again"
    assert texts.keys() == expected.keys()
    other = [key for key, row in texts.items() if row["token_ids"] != expected[key]["token_ids"]]
    assert len(other) <= len(texts) / 20, other  # near-ties: batches differ
