"""tools/doctor.py: what it finds, what it says in an empty environment, and its exit code."""

from __future__ import annotations

import json
import re
import subprocess
import venv
from pathlib import Path

import pytest

from megatron.errors import ConfigError, ExitCode
from megatron.parallel import joining
from megatron.parallel.schedule.building import build_schedule
from megatron.parallel.schedule.schedule_files import schedule_text
from tools import doctor

ROOT = Path(__file__).resolve().parents[2]


def _statuses() -> dict[str, str]:
    return {finding.subject: finding.status for finding in doctor.examine()}


def test_a_machine_that_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "Training can start." in said
    for subject in ("torch", "deepspeed", "gloo", "attention", "index builder"):
        assert re.search(rf"ok +{subject} |slow +{subject} ", said), subject


def test_the_last_sentence_names_what_would_be_faster() -> None:
    def finding(subject: str, status: str = doctor.OK, text: str = "") -> doctor.Finding:
        return doctor.Finding("kernels", subject, status, text)

    slow = [finding("gigatoken", doctor.SLOW), finding("index builder", doctor.SLOW), finding("norm")]
    assert doctor.what_is_slow(slow) == "Slower than necessary: gigatoken, index builder. See the arrows above."
    unbuilt = finding("norm", text="torch: csrc is not built: python tools/build_kernels.py")
    assert doctor.what_is_slow([unbuilt]) == "Compiled kernels would make it faster: python tools/build_kernels.py"
    assert doctor.what_is_slow([finding("norm")]) == "Nothing to improve."


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json"]) == ExitCode.DONE
    report = json.loads(capsys.readouterr().out)
    assert report["can_start"] is True
    assert {"section", "subject", "status", "text", "fix"} == set(report["findings"][0])


def test_in_an_empty_environment_missing_packages_are_reported(tmp_path: Path) -> None:
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "empty")
    finished = subprocess.run(
        [str(tmp_path / "empty" / "bin" / "python"), str(ROOT / "tools" / "doctor.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == ExitCode.HUMAN, finished.stderr
    assert "Training cannot start yet: torch, deepspeed" in finished.stdout
    assert 'pip install "torch>=2.7"' in finished.stdout
    assert "Traceback" not in finished.stderr + finished.stdout


def test_megatron_core_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.installed_version

    monkeypatch.setattr(doctor, "installed_version", lambda name: "0.14.0" if name == "megatron-core" else found(name))
    (finding,) = [one for one in doctor.examine() if one.subject == "megatron-core"]
    assert finding.status == doctor.SLOW
    assert "0.14.0 is also installed and has the same import name megatron" in finding.text
    assert "pip uninstall megatron-core" in finding.fix


@pytest.mark.parametrize(
    ("versions", "subject", "status"),
    [
        ({"torch": "2.1.0"}, "torch", doctor.REFUSED),
        ({"torch": "2.7.0+cu126"}, "torch", doctor.OK),
        ({"torch": "2.13.0"}, "torch", doctor.OK),
        ({"safetensors": None}, "safetensors", doctor.REFUSED),
        ({"gigatoken": None}, "gigatoken", doctor.SLOW),
        ({"wandb": None}, "wandb", doctor.OK),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None], subject: str, status: str) -> None:
    found = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: versions[name] if name in versions else found(name))
    assert _statuses()[subject] == status


def test_a_missing_index_builder_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.data.order import index_map

    monkeypatch.setattr(index_map, "compiled_builder", lambda: None)
    (finding,) = doctor.index_findings()
    assert finding.status == doctor.SLOW and "NumPy" in finding.text and finding.fix


def test_a_torch_without_gloo_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.parallel import backends

    monkeypatch.setattr(backends, "usable_backends", lambda: {"gloo": False, "nccl": False})
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    statuses = {one.subject: one.status for one in doctor.collective_findings()}
    assert statuses == {"gloo": doctor.REFUSED, "nccl": doctor.OK}


def _in_slurm(monkeypatch: pytest.MonkeyPatch, nodelist: str, address: str | None) -> dict[str, doctor.Finding]:
    """What is found in a job, on a machine that knows no host but head-ib."""

    def look_up(host: str, port: object) -> list:
        if host != "head-ib":
            raise OSError(f"{host} is unknown")
        return []

    monkeypatch.setattr(joining.socket, "getaddrinfo", look_up)
    for name, value in (("SLURM_JOB_ID", "77"), ("SLURM_JOB_NODELIST", nodelist), ("MASTER_ADDR", address or "")):
        monkeypatch.setenv(name, value)
    return {finding.subject: finding for finding in doctor.slurm_findings()}


@pytest.mark.parametrize(("address", "status"), [(None, doctor.OK), ("gpu-a03", doctor.OK), ("head-ib", doctor.OK)])
def test_the_address_of_a_slurm_job(monkeypatch: pytest.MonkeyPatch, address: str | None, status: str) -> None:
    found = _in_slurm(monkeypatch, "gpu-a[03,05]", address)
    assert found["MASTER_ADDR"].status == status and "gpu-a03" in found["MASTER_ADDR"].text
    assert found["job 77"].text == "2 nodes, gpu-a03 to gpu-a05"
    assert found["command"].text == "srun --nodes=2 --ntasks-per-node=1 python -u pretrain_gpt.py ..."


@pytest.mark.parametrize(
    ("address", "problem"),
    [("gpu", "not a host name that can be resolved"), ("gpu-a05", "not the first node of the job")],
)
def test_an_address_that_rank_0_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, address: str, problem: str
) -> None:
    found = _in_slurm(monkeypatch, "gpu-a[03,05]", address)["MASTER_ADDR"]
    assert found.status == doctor.REFUSED and f"{address} is {problem}; rank 0 runs on gpu-a03" in found.text
    assert found.fix == "Unset MASTER_ADDR, or set it to gpu-a03."


def test_nothing_is_said_about_slurm_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _in_slurm(monkeypatch, "", None) == {}
    assert list(_in_slurm(monkeypatch, "gpu1", None)) == ["job 77", "MASTER_ADDR", "command"]


def test_a_failing_check_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.kernels.native import report

    def broken() -> list:
        raise ModuleNotFoundError("No module named 'turbo'", name="turbo")

    monkeypatch.setattr(report, "kernel_report", broken)
    assert doctor.main([]) == ExitCode.HUMAN
    said = capsys.readouterr().out
    assert "No module named 'turbo'" in said and "Install turbo." in said


def test_the_lists_agree_with_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    needed = dict(re.findall(r'^    "([a-z0-9-]+)>=([0-9.]+)["; ,]', text.split("[project.optional")[0], flags=re.M))
    listed = {name: oldest for name, oldest, _ in (*doctor.NEEDED, *doctor.FASTER)}
    assert listed == {name: version for name, version in needed.items() if name != "setuptools"}
    for name, extra, _ in doctor.OPTIONAL:
        assert re.search(rf"^{extra} = \[[^]]*\"{name}>=", text, flags=re.M), f"{name} is not in the extra {extra}"
    assert f'name = "{doctor.PROJECT}"' in text


SMALL = ["pretrain_gpt.py", "--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"]


def test_the_layouts_that_a_command_could_have(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*SMALL, "--compile"]
    assert doctor.main(["--layouts", "--", *command]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    test = "(tests/parity/pipeline/test_layout_table.py::test_a_value_trains_with_every_pipeline[ZeRO 2])"
    assert {"ZeRO", f"  works   ZeRO 2  {test}", "  REFUSED ZeRO 3"} <= set(lines)
    assert any(line.startswith("  given   ZeRO 1  (tests/parity/test_parity.py::") for line in lines)
    assert lines[lines.index("  REFUSED ZeRO 3") + 1].startswith("          --compile cannot be combined with --zero-")
    assert doctor.main(["--layouts", "--json", "--", *command]) == ExitCode.DONE
    report = json.loads(capsys.readouterr().out)
    found = {one["value"]: one for one in report["alternatives"]}
    assert report["problems"] == [] and found["ZeRO 3"]["problems"] and not found["ZeRO 2"]["problems"]


def test_flags_that_have_to_go_are_named_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    chunks = ["--pipeline-model-parallel-size", "2", "--virtual-pipeline-model-parallel-size", "2"]
    assert doctor.main(["--layouts", "--", *SMALL, *chunks]) == ExitCode.DONE
    assert "  works   1f1b, without --virtual-pipeline-model-parallel-size  (" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--frobnicate"):
        doctor.main(["--layouts", "--", *SMALL, "--frobnicate", "3"])


def test_of_a_refused_command_the_changes_that_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", "zbv"]
    assert doctor.main(["--layouts", "--", *SMALL, *pipeline, "--zero-stage", "3"]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "REFUSED" and lines[1].startswith(
        "  --zero-stage 3 cannot be combined with --pipeline-model-par"
    )
    assert lines[2] == "One of these changes is sufficient."
    assert [line.split("  (")[0].strip() for line in lines[3:]] == [
        *("pipeline", "works   no pipeline, without --pipeline-schedule"),
        *("ZeRO", "works   ZeRO 1", "works   ZeRO 0", "works   ZeRO 2"),
    ]
    assert doctor.main(["--layouts", "--", *SMALL, *pipeline, "--zero-stage", "3", "--compile"]) == ExitCode.DONE
    assert "No single change of the layout is sufficient." in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["mine.csv", "zbv"])
def test_a_pipeline_that_is_not_in_the_table_has_no_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text(schedule_text(build_schedule("1f1b", 2, 1, 4)))
    pipeline = ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
    engine = [] if schedule == "mine.csv" else ["--pipeline-engine", "deepspeed"]
    assert doctor.main(["--layouts", "--", *SMALL, *pipeline, *engine]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    without = "--pipeline-schedule, --pipeline-engine" if engine else "--pipeline-schedule"
    test = "tests/parity/test_parity.py::test_fp32_layout_equals_reference"
    assert f"  works   no pipeline, without {without}  ({test})" in lines
