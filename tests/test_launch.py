"""The ways to start a run: what they restart and pass on, and the clusters' own files run dry."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import stand_ins
import tiny_runs
import yaml

from searchr1_jax import train
from searchr1_jax.run import cli, distributed

# ml_collections loads config files by a way that Python is about to give up.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

LAUNCH, box = stand_ins.LAUNCH, stand_ins.box
SHELL = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])
TABLE = LAUNCH / "README.md"


@pytest.mark.parametrize("path", SHELL, ids=lambda p: p.name)
def test_shell_files_parse(path):
  subprocess.run(["bash", "-n", path], check=True)
  assert path.suffix == ".sbatch" or os.access(path, os.X_OK)


@pytest.mark.parametrize("ends, starts, code", [
    ((0,), 1, 0), ((75, 0), 2, 0), ((5, 6, 75, "KILL", "ABRT", 0), 6, 0), ((2,), 1, 2),
    ((3,), 1, 3), ((1,), 1, 1), ((75, 2), 2, 2), (("KILL",) * 3, 3, 137), ((5, 5, 6, 0), 3, 6)])
def test_a_run_starts_again_where_that_helps(box, ends, starts, code):
  box.ends(*ends)
  tries = {} if 0 in ends[-1:] and starts > 3 else {"SEARCHR1_TRIES": "3"}
  done = box.run(LAUNCH / "local.sh", "--config=c.py", "--config.a=b c", **tries)
  assert done.returncode == code
  assert box.said("starts") == ["-m searchr1_jax.train --config=c.py --config.a=b c"] * starts


def test_pauses_grow_and_tries_end(box):
  box.ends(*[75] * 20)
  done = box.run(LAUNCH / "local.sh")
  assert done.returncode == 75 and len(box.said("starts")) == 10
  assert box.said("sleep.words") == ["30", "60", "120", "240", "480"] + ["600"] * 4
  assert "exit code 75; start 2 of 10 in 30 s" in done.stderr and "giving up" in done.stderr


def test_every_exit_code_is_restarted_by_all_or_none():
  """restart.sh and jobset.yaml, which cannot call it, against what cli.py says."""
  ask = "source launch/restart.sh; for i in {0..255}; do restartable $i && echo $i; done; true"
  found = subprocess.run(["bash", "-c", ask], cwd=tiny_runs.ROOT, check=True, capture_output=True,
                         text=True)
  again = {cli.RETRIEVER, cli.STORAGE, cli.STOPPED}
  assert set(map(int, found.stdout.split())) == again | set(range(129, 256))  # 128 + a signal
  job = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]["replicatedJobs"][0]
  (rule,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
  codes = {v for k, v in vars(cli).items() if k.isupper() and type(v) is int and k != "LAST_WORDS"}
  assert set(rule["onExitCodes"]["values"]) == codes - again - {cli.DONE} | {1}  # 1: a traceback


@pytest.mark.parametrize("sent, whole_group, heard", [
    (signal.SIGTERM, False, "SIGINT"), (signal.SIGINT, False, "SIGTERM"),
    (signal.SIGHUP, False, "SIGTERM"), (signal.SIGTERM, True, "SIGINT SIGTERM")])
def test_a_launcher_that_is_stopped_hands_it_on_and_starts_nothing(box, sent, whole_group, heard):
  box.put("python", stand_ins.HEEDING)
  child = box.start(LAUNCH / "local.sh")
  assert child.stdout.readline() == "ready\n"
  for pid in [child.pid] + (stand_ins.children_of(child.pid) if whole_group else []):
    os.kill(pid, sent)
  out, err = child.communicate(timeout=20)
  assert (out, child.returncode) == (heard + "\n", 75) and "start 2" not in err


def test_with_one_try_the_trainer_takes_the_launchers_place(box):
  box.put("python", stand_ins.HEEDING)
  child = box.start(LAUNCH / "local.sh", env={"SEARCHR1_TRIES": "1"})
  assert child.stdout.readline() == "ready\n" and stand_ins.children_of(child.pid) == []
  os.kill(child.pid, signal.SIGTERM)
  assert child.communicate(timeout=20)[0] == "SIGTERM\n" and child.returncode == 75


def test_a_second_signal_ends_it_at_once_where_it_is_no_echo_of_the_first(box):
  box.put("python", stand_ins.HEEDING.replace(
      "time.sleep(0.3)", "print('heard', flush=True); time.sleep(9)"))
  child = box.start(LAUNCH / "local.sh")
  assert child.stdout.readline() == "ready\n"
  os.kill(child.pid, signal.SIGINT)
  assert child.stdout.readline() == "heard\n"
  os.kill(child.pid, signal.SIGTERM)
  with pytest.raises(subprocess.TimeoutExpired):
    child.wait(timeout=0.5)
  time.sleep(1.5)
  os.kill(child.pid, signal.SIGINT)
  child.communicate(timeout=20)
  assert child.returncode == 128 + signal.SIGTERM


def test_a_launcher_that_is_stopped_while_it_pauses_starts_nothing(box):
  box.put("python", stand_ins.STUB)
  (box.folder / "ends").write_text("6\n0\n")
  child = box.start(LAUNCH / "local.sh")
  assert "start 2 of 10 in 30 s" in child.stderr.readline()
  os.kill(child.pid, signal.SIGTERM)
  child.communicate(timeout=20)
  assert child.returncode == 6 and len(box.said("starts")) == 1


@pytest.mark.parametrize("given, wanted", [(None, "0.95"), ("0.5", "0.5")])
def test_a_program_takes_the_gpus_memory_that_plans_count_on(monkeypatch, given, wanted):
  """JAX's own default would be three quarters, which a config that fits may exceed."""
  name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
  monkeypatch.setenv(name, given or "")
  if not given:
    monkeypatch.delenv(name)
  monkeypatch.setattr(sys, "argv", ["program"])
  cli.run_program(lambda words: None)
  assert os.environ[name] == wanted


JOBSET = {"SEARCHR1_COORDINATOR": "searchr1-node-0-0.searchr1", "SEARCHR1_PROCESSES": "2"}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7", "SKYPILOT_NUM_NODES": "2"}


@pytest.mark.parametrize("env, flags", [
    ({**JOBSET, "JOB_COMPLETION_INDEX": "1"},
     "--coordinator=searchr1-node-0-0.searchr1:1234 --processes=2 --process=1"),
    ({**SKY, "SKYPILOT_NODE_RANK": "0", "SEARCHR1_PORT": "99", "SLURM_PROCID": "0"},
     "--coordinator=10.0.0.4:99 --processes=2 --process=0"),
    ({"SLURM_PROCID": "1"}, "--distributed")])
def test_a_node_finds_out_which_process_it_is(box, env, flags):
  box.ends(0)
  assert box.run(LAUNCH / "node.sh", "--workdir=a b", **env).returncode == 0
  assert box.said("starts") == [f"-m searchr1_jax.train --workdir=a b {flags}"]
  words = box.said("starts")[0].split()[4:]
  values, _ = cli.parse(words, distributed.define_flags)  # the trainer knows these flags
  assert values.distributed or (values.processes, values.process) == (2, int(words[-1][-1]))


SRUN = """#!/usr/bin/env bash
echo "$*" "$JAX_LOCAL_DEVICE_IDS" >> {folder}/srun.words
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SLURM = {"SLURM_JOB_ID": "77", "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize("code, restarts, queued", [
    (0, "0", False), (75, "0", True), (5, "3", True), ("ABRT", "0", True), (2, "0", False),
    (3, "0", False), (75, "9", False)])
def test_slurm_queues_again_where_that_helps(box, code, restarts, queued):
  box.ends(code, 0)
  box.put("srun", SRUN)
  box.put("scontrol", stand_ins.NOTED)
  done = box.run("bash", LAUNCH / "slurm.sbatch", "--workdir=w", "--config.mesh.fsdp=16",
                 SLURM_RESTART_COUNT=restarts, **SLURM)
  assert done.returncode == {"ABRT": 134}.get(code, code)
  assert box.said("srun.words") == [
      "--kill-on-bad-exit=0 --cpu-bind=none launch/node.sh --workdir=w --config.mesh.fsdp=16 "
      "0,1,2,3,4,5,6,7"]  # all eight GPUs, where JAX would take one
  assert box.said("starts") == [
      "-m searchr1_jax.train --workdir=w --config.mesh.fsdp=16 --distributed"]  # Slurm restarts
  assert box.said("scontrol.words") == ["requeue 77"] * queued


def test_a_cancelled_slurm_job_is_not_queued_again(box):
  box.put("srun", "#!/usr/bin/env bash\necho ready\nsleep 0.3\nexit 75\n")
  box.put("scontrol", stand_ins.NOTED)
  child = box.start("bash", LAUNCH / "slurm.sbatch", env=SLURM)
  assert child.stdout.readline() == "ready\n"
  os.kill(child.pid, signal.SIGTERM)  # scancel tells the batch script as well as its steps
  child.communicate(timeout=20)
  assert child.returncode != 0 and box.said("scontrol.words") == []


def test_slurm_asks_for_what_the_trainer_needs():
  asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", (LAUNCH / "slurm.sbatch").read_text(),
                          re.MULTILINE))
  assert asked["ntasks-per-node"] == "1" and asked["gpus-per-node"] == "8" and "requeue" in asked
  assert re.fullmatch(r"TERM@\d{3,}", asked["signal"])  # no B: before it: the tasks are meant


def test_tpu_starts_the_same_on_every_worker(box):
  box.put("gcloud", stand_ins.NOTED)
  assert "names the slice" in box.run(LAUNCH / "tpu.sh").stderr
  assert box.said("gcloud.words") == []
  box.run(LAUNCH / "tpu.sh", "--workdir=a b", TPU="slice", ZONE="zone")
  said = "\n".join(box.said("gcloud.words"))
  assert said.startswith("compute tpus tpu-vm ssh slice --zone=zone --worker=all --command=cd ")
  script = said.partition("--command=")[2]
  subprocess.run(["bash", "-n"], input=script, text=True, check=True)
  assert "launch/node.sh --workdir=a\\ b >> train.log" in script


# Every command that a file names, and how many GPUs it is for.

def commands_of(path: pathlib.Path) -> list[list[str]]:
  """The trainer's words in every command that a file names, up to the line's end."""
  lines = re.sub(r"\\\n#?", "", path.read_text()).splitlines()
  inside = lambda line: re.search(r"launch/(?!sweep)[\w.]+ (--config=\S.*)", line)
  return [shlex.split(m[1].strip(" |`")) for line in lines if (m := inside(line))]


def jobset() -> tuple[dict, dict, dict]:
  """The JobSet, its job and its container."""
  whole = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
  (job,) = whole["spec"]["replicatedJobs"]
  (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
  return whole, job, container


@pytest.fixture
def trained(monkeypatch):
  """The configs that `train` would run on, as its own flags read them."""
  found = []
  monkeypatch.setattr(train, "train", lambda config, workdir: found.append((config, workdir)))
  monkeypatch.setattr(distributed, "start", lambda values: None)
  return found


@pytest.mark.parametrize("name", [
    "local.sh", "node.sh", "slurm.sbatch", "tpu.sh", "sky.yaml", "jobset.yaml", "README.md"])
def test_commands_name_flags_and_configs_that_exist(name, trained):
  commands = commands_of(LAUNCH / name) if name != "jobset.yaml" else [jobset()[2]["args"]]
  assert commands
  for words in commands:
    train.main(words)
  chips = {"local.sh": {8}, "README.md": {8, 16}}.get(name, {16})
  assert {math.prod(config.mesh.to_dict().values()) for config, _ in trained} <= chips


def test_the_jobset_is_of_one_piece():
  whole, job, container = jobset()
  env = {e["name"]: e["value"] for e in container["env"]}
  spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
  name = whole["metadata"]["name"]
  assert env["SEARCHR1_COORDINATOR"] == f"{name}-{job['name']}-0-0.{name}"
  assert env["SEARCHR1_TRIES"] == "1"  # the JobSet starts again
  assert spec["parallelism"] == spec["completions"] == int(env["SEARCHR1_PROCESSES"]) == 2
  assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
  assert pod["restartPolicy"] == "Never"
  assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
  assert container["command"] == ["launch/node.sh"] and pod["terminationGracePeriodSeconds"] >= 600
  (rule,) = spec["podFailurePolicy"]["rules"]
  assert rule["onExitCodes"]["containerName"] == container["name"]
  workdir = next(a for a in container["args"] if a.startswith("--workdir=")).partition("=")[2]
  mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
  kept = {v["name"]: v for v in pod["volumes"]}
  assert "persistentVolumeClaim" in kept[mounts["/" + workdir.split("/")[1]]]
  (failing,) = whole["spec"]["failurePolicy"]["rules"]
  assert failing == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def test_the_sky_file_is_of_one_piece():
  task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
  assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:8"
  (words,) = commands_of(LAUNCH / "sky.yaml")
  workdir = next(w for w in words if w.startswith("--workdir=")).partition("=")[2]
  assert any(workdir.startswith(mount + "/") for mount in task["volumes"])
  for part in ("setup", "run"):
    subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)


def test_the_readme_lists_every_file():
  rows = re.findall(r"^\| `([\w.]+)` \|", TABLE.read_text(), re.MULTILINE)
  there = {p.name for p in LAUNCH.iterdir() if p.is_file()}
  assert sorted(rows) == sorted(there - {"README.md"})
