"""What 00_preflight asks of the machine: GPUs, driver, kernels, links, packages, limits, port, clock.

Every check is a function of facts (the configuration, the `Box`) that returns a `Check`. What the run would fail at
fails here, with the remedy; what only costs time, or cannot be known here, warns.
"""

from __future__ import annotations

import importlib.metadata
import math
import shutil
import sys
import time
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from eagle3_train import server as vllm
from eagle3_train.box import Box
from eagle3_train.config import Config

PASS, WARN, FAIL = "pass", "warn", "fail"
PROJECT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
# vLLM's message ring between its processes (10 chunks of 24 MiB), and NCCL's segment for each of them.
RING_BYTES, NCCL_SEGMENT_BYTES = 240 << 20, 64 << 20
# Files that Python, CUDA and vLLM hold open, and sockets and shards of a request in flight.
OPEN_FILES, OPEN_FILES_PER_REQUEST = 1024, 8
CLOCK_TOLERANCE_S = 5.0


@dataclass(frozen=True)
class Check:
    """What was asked, whether it will do (`pass`, `warn` or `fail`), what was found, and what to do about it."""

    name: str
    status: str
    found: str
    remedy: str = ""


class Served(NamedTuple):
    """What one stage's server takes of every GPU.

    Attributes:
        stage: its number, 01b for instance.
        gpus: that it is spread over, tensor times data parallel.
        memory_share: of each GPU's memory.
        value_bytes: of one value in the KV cache.
        max_model_len: longest sequence [tokens].
        saves_states: the captured states lie in the KV cache as well.
        numa_bind: its workers are bound by numactl.
    """

    stage: str
    gpus: int
    memory_share: float
    value_bytes: int
    max_model_len: int
    saves_states: bool
    numa_bind: bool


def served(config: Config) -> list[Served]:
    """Each stage's server by the common settings, and by what its own arguments put in their place."""
    verifier, server, found = config.verifier, config.server, []
    one_pass = config.generation.capture == "one_pass"
    capturing = config.extraction.server_args
    for stage, own, states in (
        ("01b", [*config.generation.server_args, *(capturing if one_pass else [])], one_pass),
        ("02", capturing, True),
        ("06", config.evaluation.server_args, False),
    ):
        given = _arguments([*server.args, *own])
        parallel = int(given.get("--tensor-parallel-size", verifier.tensor_parallel_size))
        cache, weights = given.get("--kv-cache-dtype", "auto"), given.get("--dtype", verifier.dtype)
        found.append(
            Served(
                stage,
                parallel * int(given.get("--data-parallel-size", 1)),
                float(given.get("--gpu-memory-utilization", server.gpu_memory_utilization)),
                1 if cache.startswith("fp8") else 4 if (weights if cache == "auto" else cache) == "float32" else 2,
                int(given.get("--max-model-len", server.max_model_len)),
                saves_states=states,
                numa_bind="--numa-bind" in given,
            )
        )
    return found


def _arguments(words: list[str]) -> dict[str, str]:
    """`--flag=value`, `--flag value` and `--flag` as a mapping; the last one counts, as for vLLM."""
    given: dict[str, str] = {}
    flag = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            flag = name.replace("_", "-")
            given[flag] = value
        elif flag:
            given[flag] = word
    return given


def gpus(config: Config, box: Box) -> Check:
    """As many GPUs as the verifier is spread over, of one kind."""
    most = max(served(config), key=lambda server: server.gpus)
    wanted, parallel = most.gpus, config.verifier.tensor_parallel_size
    setting = (
        f"verifier.tensor_parallel_size is {parallel}"
        if wanted == parallel
        else f"{most.stage} is spread over {wanted}"
    )
    kinds = sorted({f"{gpu.name} ({gpu.total_bytes / GIB:.0f} GiB)" for gpu in box.gpus})
    found = f"{len(box.gpus)} x {', '.join(kinds)}" if box.gpus else "no CUDA GPU"
    if len(box.gpus) < wanted and (box.gpus or wanted > 1):
        remedy = f"run this preset on a box of {wanted} GPUs, or choose another preset"
        if (box.driver_gpus or 0) >= wanted:
            found += f" for torch, {box.driver_gpus} for the driver"
            remedy = "look at CUDA_VISIBLE_DEVICES; with a CPU build of torch: PLATFORM=cuda bash run_pipeline.sh"
        return Check("gpus", FAIL, f"{found}; {setting}", remedy)
    if len(kinds) > 1:
        return Check("gpus", WARN, found, "the slowest sets the pace: name equal ones in CUDA_VISIBLE_DEVICES")
    return Check("gpus", PASS, found if box.gpus else f"{found}: vLLM and the trainer run on the CPU")


def driver(box: Box) -> Check:
    """A driver as new as the CUDA that torch is built for."""
    if box.driver is None or box.driver_cuda is None:
        status, known = (WARN, "not known without NVML") if box.gpus else (FAIL, "no NVIDIA driver answers")
        return Check("driver", status, known, "install NVIDIA's driver; `pip install nvidia-ml-py` lets it be asked")
    found = f"{box.driver}, for CUDA up to {box.driver_cuda[0]}.{box.driver_cuda[1]}"
    if box.torch_cuda and box.torch_cuda[0] > box.driver_cuda[0]:
        built = f"{box.torch_cuda[0]}.{box.torch_cuda[1]}"
        return Check("driver", FAIL, f"{found}; torch is built for {built}", f"install a driver for CUDA {built}")
    return Check("driver", PASS, found)


def kernels(box: Box) -> Check:
    """torch has machine code for every GPU here; intermediate code (PTX) is compiled at first use, for minutes."""
    if box.torch_cuda is None:
        return Check(
            "kernels", FAIL, "this torch is a CPU build", "PLATFORM=cuda bash run_pipeline.sh installs requirements.txt"
        )
    listed = f"torch's kernels: {' '.join(box.kernels)}"
    without: list[str] = []
    compiled: list[str] = []
    for capability in sorted({gpu.capability for gpu in box.gpus}):
        if not any(_runs(kernel, capability) for kernel in box.kernels):
            can_compile = any(_compiles(kernel, capability) for kernel in box.kernels)
            (compiled if can_compile else without).append(f"SM {capability[0]}.{capability[1]}")
    if without:
        remedy = "install a torch build that has them (requirements.txt names the version)"
        return Check("kernels", FAIL, f"none for {', '.join(without)}; {listed}", remedy)
    if compiled:
        remedy = "the first start compiles for many minutes: give server.ready_timeout_s room"
        return Check("kernels", WARN, f"only PTX for {', '.join(compiled)}; {listed}", remedy)
    names = ", ".join(sorted({f"SM {gpu.capability[0]}.{gpu.capability[1]}" for gpu in box.gpus}))
    return Check("kernels", PASS, f"{names or 'no GPU to run them'}; {listed}")


def _runs(kernel: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on its own major version, from its minor version up; `sm_90a` on 9.0 alone."""
    kind, number = kernel.split("_", 1)
    digits = number.rstrip("af")
    made_for = int(digits[:-1]), int(digits[-1])
    if kind != "sm":
        return False
    if number.endswith("a"):
        return made_for == capability
    return made_for[0] == capability[0] and made_for[1] <= capability[1]


def _compiles(kernel: str, capability: tuple[int, int]) -> bool:
    kind, number = kernel.split("_", 1)
    digits = number.rstrip("af")
    return kind == "compute" and digits == number and (int(digits[:-1]), int(digits[-1])) <= capability


def free_gpu_memory(config: Config, box: Box) -> Check:
    """vLLM refuses to start where less is free than the share it was promised."""
    servers = served(config)
    share = max(server.memory_share for server in servers)
    short = [
        f"GPU {number}: {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        for number, gpu in enumerate(box.gpus[: max(server.gpus for server in servers)])
        if gpu.free_bytes < share * gpu.total_bytes
    ]
    if short:
        remedy = f"stop what holds it (nvidia-smi names it), or lower server.gpu_memory_utilization (now {share})"
        return Check("free gpu memory", FAIL, "; ".join(short), remedy)
    least = min(gpu.free_bytes / gpu.total_bytes for gpu in box.gpus)
    return Check("free gpu memory", PASS, f"at least {least:.0%} of each GPU; vLLM takes {share:.0%}")


def links(box: Box) -> Check:
    """The GPUs reach each other directly, and what is copied arrives."""
    assert box.links is not None
    nodes: dict[int | None, int] = defaultdict(int)
    for gpu in box.gpus:
        nodes[gpu.numa_node] += 1
    known = {node: count for node, count in nodes.items() if node is not None}
    numa = ", ".join(f"{count} on NUMA node {node}" for node, count in sorted(known.items())) or "NUMA nodes not known"
    nvlinks = [gpu.nvlinks for gpu in box.gpus]
    if None in nvlinks:
        kind = "NVLink or PCIe: not known without NVML"
    else:
        kind = f"NVLink ({min(n or 0 for n in nvlinks)} links a GPU)" if all(nvlinks) else "PCIe, no NVLink"
    speed = box.links.slowest_copy
    measured = f"copies at {speed / 1e9:.0f} GB/s or more" if speed else "copies not tried, a GPU is full"
    found = f"{kind}; P2P {'possible' if box.links.peer_access else 'not possible'}; {measured}; {numa}"
    if not box.links.sound:
        remedy = "switch PCIe access control (ACS) or the IOMMU off, or put NCCL_P2P_DISABLE=1 in server.env"
        return Check("links", FAIL, f"a copy between GPUs came back changed; {found}", remedy)
    if not box.links.peer_access:
        remedy = "every all-reduce goes through RAM: switch the IOMMU off, or rent a box with P2P or NVLink"
        return Check("links", WARN, found, remedy)
    return Check("links", PASS, found)


def numactl() -> Check:
    """vLLM binds its workers to their GPU's cores and memory through it, and dies without."""
    found = shutil.which("numactl")
    if found is None:
        remedy = "install it (apt-get install numactl), or take --numa-bind out of server.args"
        return Check("numactl", FAIL, "not installed, and vLLM is told to bind its workers (--numa-bind)", remedy)
    return Check("numactl", PASS, f"{found}, for --numa-bind")


def packages(requirements: Path) -> Check:
    """Python and every pinned package are of the version this was measured with."""
    from packaging.requirements import Requirement

    lines = [line.partition("#")[0].strip() for line in requirements.read_text(encoding="utf-8").splitlines()]
    pins = [Requirement(line) for line in lines if line and not line.startswith("-")]
    wrong = []
    for pin in pins:
        try:
            installed = importlib.metadata.version(pin.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{pin.name} is missing, pinned {pin.specifier}")
            continue
        if not pin.specifier.contains(installed, prereleases=True):
            wrong.append(f"{pin.name} {installed}, pinned {pin.specifier}")
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = ".".join(map(str, sys.version_info[:3]))
    if not Requirement(f"python{project['requires-python']}").specifier.contains(python):
        wrong.append(f"python {python}, wanted {project['requires-python']}")
    if wrong:
        remedy = f"bash run_pipeline.sh sets up .venv; by hand: pip install -r {requirements.name}"
        return Check("packages", FAIL, "; ".join(wrong), remedy)
    return Check("packages", PASS, f"python {python} and {len(pins)} packages as pinned in {requirements.name}")


def vllm_plugin() -> Check:
    """vLLM finds our plugin in every process it starts: without it no states are saved."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="eagle3_train")
    if not found:
        return Check("vllm plugin", FAIL, "eagle3_train is not installed", "pip install --no-deps -e . in this venv")
    return Check("vllm plugin", PASS, f"{next(iter(found)).value} is installed")


def shared_memory(config: Config, box: Box) -> Check:
    """/dev/shm holds what the processes of vLLM, and NCCL between GPUs, hand each other."""
    parallel = max(server.gpus for server in served(config))
    need = RING_BYTES + parallel * NCCL_SEGMENT_BYTES if parallel > 1 else 0
    found = f"{box.shared_memory_free_bytes / GIB:.1f} GiB free in /dev/shm, {need / GIB:.1f} wanted"
    if box.shared_memory_free_bytes < need:
        remedy = f"docker run --shm-size={math.ceil(need / GIB) + 1}g, or mount -o remount,size=... /dev/shm"
        return Check("shared memory", FAIL, found, remedy)
    return Check("shared memory", PASS, found)


def open_files(config: Config, box: Box) -> Check:
    """The limit of open files leaves room for every request in flight."""
    requests = max(
        config.generation.concurrency,
        config.extraction.concurrency,
        config.evaluation.concurrency,
        *config.evaluation.load_concurrency,
    )
    need = OPEN_FILES + OPEN_FILES_PER_REQUEST * requests
    found = f"{box.open_files} allowed, {need} wanted for {requests} requests in flight"
    if box.open_files < need:
        return Check("open files", FAIL, found, "ulimit -n 65536 in this shell (docker: --ulimit nofile=65536)")
    return Check("open files", PASS, found)


def locked_memory(box: Box) -> Check:
    """Locked memory is unlimited: over InfiniBand NCCL fails without."""
    if box.locked_memory_bytes is not None:
        found = f"{box.locked_memory_bytes / GIB:.2f} GiB allowed"
        return Check("locked memory", WARN, found, "ulimit -l unlimited (docker: --ulimit memlock=-1)")
    return Check("locked memory", PASS, "unlimited")


def port(config: Config) -> Check:
    """The server's port is free."""
    wanted = config.server.port
    chosen = vllm.choose_port(wanted)
    return Check("port", PASS, f"{chosen} is free" if wanted else "any free one (server.port is null)")


def clock(folder: Path) -> Check:
    """The clock agrees with the disk's, and is not behind the project's own files."""
    probe = folder / ".clock-probe"
    probe.touch()
    now, on_disk = time.time(), probe.stat().st_mtime
    probe.unlink()
    newest = max(path.stat().st_mtime for path in PROJECT.glob("*.py"))
    if newest > now + CLOCK_TOLERANCE_S:
        found = f"{time.ctime(now)}, behind the project's own files by {newest - now:.0f} s"
        return Check("clock", WARN, found, "timings and certificates would be wrong: set it (timedatectl set-ntp true)")
    if abs(on_disk - now) > CLOCK_TOLERANCE_S:
        found = f"the disk's clock is {on_disk - now:+.0f} s from this machine's"
        return Check("clock", WARN, found, "synchronise both with NTP")
    return Check("clock", PASS, time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now)))
