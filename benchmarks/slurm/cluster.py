"""A SLURM cluster of several nodes on one machine: each slurmd in its own network, host-name, mount and process namespace.

Killing the process namespace of a node is the death of that node. Needs root, `ip`, `unshare`, munge and SLURM.
"""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from chronicle.launch.processes import list_processes, read_environment

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "ip", "unshare", "nsenter")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
CONFIG = """\
ClusterName={name}
SlurmctldHost={name}ctl({net}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={short}/munge/socket
StateSaveLocation={base}/state
SlurmdSpoolDir={short}/spool.%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={patience}
MessageTimeout=100
TCPTimeout=60
BatchStartTimeout=300
UnkillableStepTimeout=600
SlurmdParameters=config_overrides
KillWait=30
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2
SrunPortRange=27900-28900
NodeName={name}n[1-{nodes}] CPUs=16 Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """Why there can be no cluster here; "" where there can."""
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if missing:
        return f"missing {', '.join(missing)}: Debian's slurmctld, slurmd, slurm-client, munge and iproute2"
    if os.geteuid() != 0:
        return "slurmd and namespaces want root"
    tried = subprocess.run(
        ["unshare", "-m", "-u", "-n", "-p", "--fork", "true"], capture_output=True, check=False, text=True
    )
    if tried.returncode != 0:
        return f"namespaces are not allowed: {tried.stderr.strip()}"
    trial = f"chrb{os.getpid()}"  # of our own: two tests that try at once are no obstacle
    tried = subprocess.run(["ip", "link", "add", trial, "type", "bridge"], capture_output=True, check=False, text=True)
    subprocess.run(["ip", "link", "del", trial], capture_output=True, check=False)
    return f"no network bridge can be made: {tried.stderr.strip()}" if tried.returncode != 0 else ""


class Cluster:
    """`number` (0 to 9) keeps several clusters on one machine apart.

    `patience`: seconds without an answer after which a node counts as lost. SLURM's other time-outs are so long that a busy
    machine reaches none: a start that waits ten seconds, or a credential older than its life, would be a failed launch.
    Sockets lie in a directory of their own: the name of one has 107 bytes at most, and a job whose socket's is longer is held.
    """

    def __init__(self, base: Path, *, number: int = 0, nodes: int = 3, patience: int = 15) -> None:
        self.base, self.number, self.count, self.patience = base, number, nodes, patience
        self.name, self.net, self.bridge = f"chr{number}", f"10.77.{200 + number}", f"chrbr{number}"
        self.nodes = [f"{self.name}n{one}" for one in range(1, nodes + 1)]
        self.environ = os.environ | {"PATH": PATH, "SLURM_CONF": str(base / "slurm.conf")}
        self._short: Path | None = None  # where the sockets are
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Start all daemons. Raises `RuntimeError` where the nodes do not come up."""
        base = self.base
        (base / "state").mkdir(mode=0o700, parents=True)
        self._short = short = Path(tempfile.mkdtemp(prefix="chr", dir="/tmp"))
        (short / "munge").mkdir(mode=0o700)
        self._ip("link", "add", self.bridge, "type", "bridge")
        self._ip("addr", "add", f"{self.net}.1/24", "dev", self.bridge)
        self._ip("link", "set", self.bridge, "up")
        (short / "munge/key").write_bytes(secrets.token_bytes(1024))
        (short / "munge/key").chmod(0o400)
        hosts = [f"{self.net}.1{place} {node}" for place, node in enumerate(self.nodes, 1)]
        own = Path("/etc/hosts").read_text()
        (base / "hosts").write_text("\n".join([own, *hosts, f"{self.net}.1 {self.name}ctl\n"]))
        words = {"name": self.name, "net": self.net, "port": 27817 + self.number, "patience": self.patience}
        config = CONFIG.format(base=base, short=short, nodes=self.count, **words)
        (base / "slurm.conf").write_text(config)
        words = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        munge = [f"--{word}={short}/munge/{word.removesuffix('-file')}" for word in words]
        self._start("munged", ["munged", "--foreground", "--force", *munge])
        _until(lambda: (short / "munge/socket").exists(), 10)
        inner = f"mount --bind {base}/hosts /etc/hosts; hostname {self.name}ctl; exec slurmctld -D -f {base}/slurm.conf"
        self._start("slurmctld", ["unshare", "-m", "-u", "bash", "-c", inner])
        for place, node in enumerate(self.nodes, 1):
            self._ip("netns", "add", node)
            self._ip("link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", node)
            self._ip("link", "set", f"v{node}", "master", self.bridge, "up")
            self._ip("-n", node, "addr", "add", f"{self.net}.1{place}/24", "dev", "eth0")
            self._ip("-n", node, "link", "set", "eth0", "up")
            self._ip("-n", node, "link", "set", "lo", "up")
            self._ip("-n", node, "route", "add", "default", "via", f"{self.net}.1")
            (short / f"spool.{node}").mkdir()
            self.start_node(node)
        if not _until(lambda: self.ask("sinfo", "-h", "-o", "%D %T").strip() == f"{self.count} idle", 60):
            raise RuntimeError(
                f"the nodes do not come up: {self.ask('sinfo')} {(base / 'slurmctld.out').read_text()[-400:]}"
            )

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, in namespaces of its own."""
        daemon = f"slurmd -D -N {node} -f {self.base}/slurm.conf"
        inner = f"mount --bind {self.base}/hosts /etc/hosts; hostname {node}; exec {daemon}"
        space = ["unshare", "-m", "-u", "-p", "--fork", "--mount-proc", "--kill-child", "bash", "-c", inner]
        self._start(node, ["nsenter", f"--net=/var/run/netns/{node}", *space])

    def kill_node(self, node: str) -> None:
        """End everything on a node at once."""
        daemon = self._daemons[node]
        daemon.kill()  # `--kill-child`: the first process of the namespace dies with it, and so does all the rest
        daemon.wait()

    def ask(self, *words: str) -> str:
        """What a command of SLURM prints, errors included."""
        done = subprocess.run(words, env=self.environ, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def down(self) -> None:
        """End all daemons and what they started, and remove the network."""
        self.ask("scancel", "--user=root")
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for process in list_processes():
            if (read_environment(process.pid) or {}).get("SLURM_CONF") == self.environ["SLURM_CONF"]:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for node in self.nodes:
            self._ip("netns", "del", node, check=False)
        self._ip("link", "del", self.bridge, check=False)
        if self._short is not None:
            shutil.rmtree(self._short, ignore_errors=True)

    def _start(self, name: str, command: list[str]) -> None:
        with open(self.base / f"{name}.out", "ab") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _ip(self, *words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], env=self.environ, check=check, capture_output=True)


def _until(condition, seconds: float) -> bool:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return bool(condition())
