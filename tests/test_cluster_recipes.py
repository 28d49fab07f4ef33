"""The recipes of examples/clusters: what the files say is what the resolvers understand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cluster import end, environment, launch

from phalanx.cluster.exits import EXIT_LOST, EXIT_PREEMPTED, EXIT_STUCK
from phalanx.cluster.resolvers import find

RECIPES = Path(__file__).parents[1] / "examples" / "clusters"


def documents(name):
    """The Kubernetes objects of a file, by their kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((RECIPES / name).read_text())}


@pytest.mark.parametrize("name", ["kubernetes.yaml", "gke-tpu.yaml"])
def test_pods_of_the_job_find_each_other(name):
    found = documents(name)
    service, job = found["Service"], found["Job"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    job_name, count = job["metadata"]["name"], job["spec"]["completions"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["parallelism"] == count
    specs = [
        find(
            {
                **variables,
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                "JOB_COMPLETION_INDEX": str(i),
                "HOSTNAME": f"{job_name}-{i}",
            }
        )
        for i in range(count)
    ]
    assert [(spec.process_id, spec.num_processes) for spec in specs] == [(i, count) for i in range(count)]
    # The name of pod 0 behind the headless service that selects the job's pods.
    assert {spec.host for spec in specs} == {f"{job_name}-0.{service['metadata']['name']}"}
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job_name}
    assert (RECIPES.parents[1] / container["command"][1]).is_file()
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_failures_worth_another_try_do_not_fail_the_job():
    policy = documents("kubernetes.yaml")["Job"]["spec"]["podFailurePolicy"]["rules"]
    final = [code for rule in policy if rule["action"] == "FailJob" for code in rule["onExitCodes"]["values"]]
    assert not {EXIT_LOST, EXIT_PREEMPTED, EXIT_STUCK} & set(final)


def test_only_pods_of_the_job_reach_its_ports():
    policy = documents("kubernetes.yaml")["NetworkPolicy"]["spec"]
    assert policy["podSelector"] == policy["ingress"][0]["from"][0]["podSelector"]


def test_the_batch_script_starts_the_program_and_requeues_what_is_worth_it(tmp_path):
    script = RECIPES / "train.slurm"
    subprocess.run(["bash", "-n", str(script)], check=True)
    asked = {
        line.removeprefix("#SBATCH --").split("=")[0] for line in script.read_text().splitlines() if "#SBATCH" in line
    }
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "requeue", "signal"} <= asked
    for command, text in (("srun", 'echo "srun $@"; exit $CODE'), ("scontrol", 'echo "scontrol $@"')):
        (tmp_path / command).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / command).chmod(0o700)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/shared"}
    for code, requeued in ((0, False), (1, False), (EXIT_PREEMPTED, True), (EXIT_LOST, True), (EXIT_STUCK, True)):
        ran = subprocess.run(
            ["bash", str(script)], env={**variables, "CODE": str(code)}, capture_output=True, text=True
        )
        started, *rest = ran.stdout.splitlines()
        assert started == "srun --kill-on-bad-exit=1 python examples/clusters/train.py /shared/run"
        assert rest == (["scontrol requeue 7"] if requeued else [])
        assert ran.returncode == (0 if requeued else code)


@pytest.mark.processes
def test_the_program_of_the_recipes_runs_and_goes_on_where_it_was(tmp_path):
    outcome = launch(2, RECIPES / "train.py", str(tmp_path / "run"))
    assert outcome.code == 0, outcome.err[-3000:]
    assert "[0] w = 1.00 -2.00 0.50" in outcome.out
    again = subprocess.run(
        [sys.executable, str(RECIPES / "train.py"), str(tmp_path / "run")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (again.returncode, again.stdout) == (0, "w = 1.00 -2.00 0.50\n")  # on one process; nothing was left to do


@pytest.mark.processes
def test_ray_actors_train_together(tmp_path):
    if importlib.util.find_spec("ray") is None:
        # Ray is no dependency of the tests: then the recipe is only compiled.
        compile((RECIPES / "ray_actors.py").read_text(), "ray_actors.py", "exec")
        return
    process = subprocess.Popen(
        [sys.executable, str(RECIPES / "ray_actors.py"), "2"],
        env=environment(RAY_USAGE_STATS_ENABLED="0", HOME=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    outcome = end(process, 120)
    assert outcome.code == 0, outcome.err[-3000:]
    assert "2 workers, losses 1.0000" in outcome.out
