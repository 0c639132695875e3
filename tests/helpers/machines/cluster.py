"""Two hosts and a controller on this machine, with Slurm on them: network, process and mount namespaces of their own.

Everything ends with one process: when it is killed, the kernel kills all that ran in its process namespace, and the
networks, mounts and host names vanish with it. Nothing outside is changed. Needs root, `unshare`, `nsenter` and `ip`;
Slurm needs slurmctld, slurmd and munged, which are the packages slurm-wlm and munge of Debian and Ubuntu.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.helpers.programs import serve, stand_in_text
from tests.helpers.ranks import LAUNCH_VARIABLES, fork_server_context

REPOSITORY = Path(__file__).resolve().parents[3]
HOSTS = ("node003", "node011")
CONTROLLER = "head"
_START_SECONDS = 120
_PARENT_DEATH_SIGNAL = 1  # prctl(2), PR_SET_PDEATHSIG
_NEW_UTS = 0x04000000  # sched.h, CLONE_NEWUTS
_UNSHARE = ("unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
_SLURM_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol")

# The controller's host is a bridge; the others hang on it. /etc/hosts is replaced in this mount namespace only.
_NETWORK = f"""
set -e
mount -t tmpfs none /run
mkdir -p /run/netns
ip link set lo up
ip link add hub type bridge
ip link set hub up
ip addr add 10.99.0.1/24 dev hub
number=1
printf '127.0.0.1 localhost\\n10.99.0.1 {CONTROLLER}\\n' >"$FOLDER/hosts"
for host in {" ".join(HOSTS)}; do
    number=$((number + 1))
    ip netns add $host
    ip link add up$number type veth peer name eth0 netns $host
    ip link set up$number master hub up
    ip -n $host link set lo up
    ip -n $host addr add 10.99.0.$number/24 dev eth0
    ip -n $host link set eth0 up
    echo "10.99.0.$number $host" >>"$FOLDER/hosts"
done
mount --bind "$FOLDER/hosts" /etc/hosts
hostname {CONTROLLER}
"""
_SLURM = f"""
munged --force --foreground --key-file "$FOLDER/munge.key" --socket /run/munge.socket --pid-file /run/munged.pid \\
    --log-file "$FOLDER/munged.log" --seed-file "$FOLDER/munge.seed" &
until [ -S /run/munge.socket ]; do sleep 0.02; done
slurmctld -D -f "$SLURM_CONF" &
for host in {" ".join(HOSTS)}; do
    ip netns exec $host unshare --uts sh -c "hostname $host; exec slurmd -D -f '$SLURM_CONF' -N $host" &
done
"""
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=10
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={hosts} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@functools.cache
def missing_for_hosts() -> str:
    """Why hosts cannot be made here; empty if they can."""
    programs = [name for name in ("unshare", "nsenter", "ip", "mount") if shutil.which(name) is None]
    if not sys.platform.startswith("linux") or programs:
        return f"needs Linux with {', '.join(programs) or 'namespaces'}"
    script = (
        "mount -t tmpfs none /run && mkdir /run/netns && ip netns add one && ip link add up1 type veth peer name up2"
    )
    done = subprocess.run([*_UNSHARE, "sh", "-c", script], capture_output=True, text=True, check=False)
    return f"needs root with the right to make namespaces ({done.stderr.strip()})" if done.returncode else ""


@functools.cache
def missing_for_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    programs = [name for name in _SLURM_PROGRAMS if shutil.which(name) is None]
    if programs:
        return f"needs {', '.join(programs)} (apt-get install slurm-wlm munge)"
    return missing_for_hosts()


def _die_with_parent() -> None:
    """Has Linux kill this process when the one that runs the tests ends, however it does."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _serve_on_host(sandbox: int, host: str, address: str, stand_in: str, tests: Connection) -> None:
    """Enters the namespaces of a host, and runs programs there; only forked processes enter the PID namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    networks = Path(f"/proc/{sandbox}/root/run/netns/{host}")
    places = [networks, *(Path(f"/proc/{sandbox}/ns/{kind}") for kind in ("pid", "mnt"))]
    handles = [os.open(place, os.O_RDONLY) for place in places]
    calls = [library.unshare(_NEW_UTS), *(library.setns(handle, 0) for handle in handles)]
    if any(calls):
        raise OSError(ctypes.get_errno(), f"the namespaces of {host} cannot be entered")
    for handle in handles:
        os.close(handle)
    socket.sethostname(host)
    serve(address, stand_in, tests)


class Cluster:
    """The hosts, for as long as the context is open.

    Args:
        folder: for the configuration and logs of Slurm.
    """

    def __init__(self, folder: Path, *, with_slurm: bool) -> None:
        self.folder = folder
        self._with_slurm = with_slurm
        self._sandbox: subprocess.Popen[bytes] | None = None
        self._init = 0
        self._pipes: list[Connection] = []

    def __enter__(self) -> Cluster:
        script = _NETWORK
        (self.folder / "bin").mkdir()
        Path(self.python).write_text(stand_in_text(f"{self.folder}/socket.$(hostname)"))
        Path(self.python).chmod(0o755)
        if self._with_slurm:
            script += _SLURM
            self._configure()
        script += 'touch "$FOLDER/ready"\nsleep infinity\n'
        with (self.folder / "cluster.log").open("wb") as log:
            self._sandbox = subprocess.Popen(
                [*_UNSHARE, "sh", "-c", script],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=self._environment({}),
                preexec_fn=_die_with_parent,
            )  # fmt: skip
        try:
            self._wait_until((self.folder / "ready").exists)
            children = Path(f"/proc/{self._sandbox.pid}/task/{self._sandbox.pid}/children").read_text()
            self._init = int(children.split()[0])
            for host in HOSTS:
                self._serve_programs(host)
            if self._with_slurm:
                self._wait_until(lambda: self.output("sinfo -h -t idle -o %D").strip() == str(len(HOSTS)))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything that runs on the hosts."""
        for pipe in self._pipes:
            pipe.close()
        if self._sandbox is not None:
            self._sandbox.kill()
            self._sandbox.wait()

    def start(
        self,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Starts a program on a host, in the current folder.

        Args:
            output: a file for what it prints; by default that is kept for `communicate`.
        """
        enter = ["nsenter", f"--target={self._init}", "--mount", "--net", "--uts", "--pid", f"--wd={os.getcwd()}"]
        if host != CONTROLLER:
            rename = f'hostname {host}; exec "$@"'
            enter += ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", rename, "sh"]
        stream = subprocess.PIPE if output is None else output.open("w")
        try:
            return subprocess.Popen(
                [*enter, *command], env=self._environment(environment or {}), stdin=subprocess.DEVNULL, stdout=stream,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        finally:
            if output is not None:
                stream.close()

    def run(self, host: str, command: Sequence[str], **environment: str) -> tuple[int, str]:
        """Runs a program on a host to its end; its exit code, and what it printed."""
        process = self.start(host, command, environment)
        text, _ = process.communicate(timeout=120)
        return process.returncode, text

    def output(self, script: str, **environment: str) -> str:
        """What a shell's script prints on the controller's host."""
        return self.run(CONTROLLER, ["sh", "-c", script], **environment)[1]

    @property
    def python(self) -> str:
        """A stand-in for `sys.executable`, whose programs are forked on the host; see tests/helpers/programs.py."""
        return str(self.folder / "bin" / "python")

    def power_off(self, host: str) -> None:
        """Kills every process on a host, as a power cut would; all but Slurm's daemon, which later tests need."""
        self.output(f"for one in $(ip netns pids {host}); do grep -q slurmd /proc/$one/comm || kill -9 $one; done")

    def power_on(self, host: str) -> None:
        """Has `python` run programs on a host again that was switched off."""
        (self.folder / f"socket.{host}").unlink(missing_ok=True)
        self._serve_programs(host)

    def job_state(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, by field."""
        fields = self.output(f"scontrol -o show job {job}").split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_for_job(self, job: str, *states: str) -> dict[str, str]:
        """Waits until a job is in one of some states."""
        self._wait_until(lambda: self.job_state(job).get("JobState") in states, 120)
        return self.job_state(job)

    def _serve_programs(self, host: str) -> None:
        """Starts the server of `python` on a host, a fork of the one that all tests share."""
        context = fork_server_context()
        ours, theirs = context.Pipe()
        arguments = (self._init, host, str(self.folder / f"socket.{host}"), self.python, theirs)
        context.Process(target=_serve_on_host, args=arguments, daemon=True).start()
        theirs.close()
        self._pipes.append(ours)
        ours.recv()  # it listens

    def _configure(self) -> None:
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        hosts = "node[003,011]"
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(controller=CONTROLLER, folder=self.folder, hosts=hosts)
        )
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", *(f"spool.{host}" for host in HOSTS)):
            (self.folder / name).mkdir()

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
        own = {
            "FOLDER": str(self.folder), "SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
            "PATH": f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
        }  # fmt: skip
        return {**environment, **own, **more}

    def _wait_until(self, condition: Callable[[], bool], seconds: float = _START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self._sandbox is None or self._sandbox.poll() is not None:
                raise RuntimeError(
                    f"the cluster does not get there: {(self.folder / 'cluster.log').read_text()[-3000:]}"
                )
            time.sleep(0.05)
