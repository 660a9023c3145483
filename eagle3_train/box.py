"""What this machine offers a run: GPUs and the links between them, driver, kernels, memory, limits.

torch says most of it; NVML (nvidia-ml-py) what torch does not know: NVLinks and the driver. Without a GPU every list
here is empty, and nothing is raised.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHARED_MEMORY = Path("/dev/shm")
_COPY_BYTES = 256 << 20
_COPIES = 4


@dataclass(frozen=True)
class Gpu:
    """One CUDA device.

    Attributes:
        name: as the driver calls it.
        total_bytes: its memory.
        free_bytes: of it, not taken by anyone.
        capability: (12, 0) is SM 120.
        numa_node: the CPU socket's memory it hangs on; None where the system does not say.
        nvlinks: active NVLinks; None without NVML.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    numa_node: int | None = None
    nvlinks: int | None = None


@dataclass(frozen=True)
class Links:
    """How the first GPU and each other one reach each other.

    Attributes:
        peer_access: whether every pair of GPUs may read each other's memory directly.
        slowest_copy: the slowest of these copies [bytes/s]; None where it could not be tried.
        sound: whether every copy came back as it left.
    """

    peer_access: bool
    slowest_copy: float | None
    sound: bool


@dataclass(frozen=True)
class Box:
    """This machine.

    Attributes:
        gpus: what torch can use.
        driver_gpus: GPUs that the NVIDIA driver sees; None without NVML.
        driver: its version; None without NVML.
        driver_cuda: newest CUDA it supports, (13, 0); None without NVML.
        torch_cuda: CUDA that torch is built for, (13, 0); None for a CPU build.
        kernels: architectures torch has kernels for, as `sm_120` or `compute_120`.
        links: None below two GPUs.
        memory_free_bytes: RAM available to a new process.
        shared_memory_free_bytes: room in /dev/shm.
        open_files: soft limit of open files.
        locked_memory_bytes: soft limit of locked memory; None is unlimited.
    """

    gpus: tuple[Gpu, ...]
    driver_gpus: int | None
    driver: str | None
    driver_cuda: tuple[int, int] | None
    torch_cuda: tuple[int, int] | None
    kernels: tuple[str, ...]
    links: Links | None
    memory_free_bytes: int
    shared_memory_free_bytes: int
    open_files: int
    locked_memory_bytes: int | None


def look() -> Box:
    """Find out what this machine is; with several GPUs a few seconds, for their links are tried."""
    import torch

    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    with _nvml() as nvml:
        gpus = tuple(_gpu(number, nvml) for number in range(torch.cuda.device_count()))
        driver_cuda = nvml.nvmlSystemGetCudaDriverVersion_v2() if nvml else None
        return Box(
            gpus=gpus,
            driver_gpus=nvml.nvmlDeviceGetCount() if nvml else None,
            driver=nvml.nvmlSystemGetDriverVersion() if nvml else None,
            driver_cuda=(driver_cuda // 1000, driver_cuda % 1000 // 10) if driver_cuda else None,
            torch_cuda=_version_pair(torch.version.cuda),
            kernels=tuple(torch.cuda.get_arch_list()),
            links=_links(len(gpus)) if len(gpus) > 1 else None,
            memory_free_bytes=_memory_free_bytes(),
            shared_memory_free_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            locked_memory_bytes=None if locked == resource.RLIM_INFINITY else locked,
        )


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The pynvml module, ready; None where it or the driver is not there."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # its errors are classes of the module that may be missing
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpu(number: int, nvml: Any) -> Gpu:
    import torch

    device = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    node = Path("/sys/bus/pci/devices", address, "numa_node")
    numa_node = int(node.read_text()) if node.exists() else -1
    return Gpu(
        name=device.name,
        total_bytes=total,
        free_bytes=free,
        capability=(device.major, device.minor),
        numa_node=numa_node if numa_node >= 0 else None,  # -1 is the kernel's "not known"
        nvlinks=_active_nvlinks(nvml, str(device.uuid)) if nvml else None,
    )


def _active_nvlinks(nvml: Any, uuid: str) -> int | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return None
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        # A link that the device does not have is an error, not a zero.
        with contextlib.suppress(nvml.NVMLError):
            active += nvml.nvmlDeviceGetNvLinkState(handle, link)
    return active


def _links(count: int) -> Links:
    import torch

    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    peer_access = all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    try:
        sent = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda:0")
        trips = [_round_trip(sent, other) for other in range(1, count)]
    except torch.cuda.OutOfMemoryError:
        return Links(peer_access, None, sound=True)
    return Links(peer_access, min(speed for speed, _ in trips), all(sound for _, sound in trips))


def _round_trip(sent: torch.Tensor, other: int) -> tuple[float, bool]:
    """Speed [bytes/s] of copies from GPU 0 to `other` and back, and whether they arrived whole."""
    import torch

    back = sent.to(f"cuda:{other}").to("cuda:0")
    torch.cuda.synchronize(0)
    started = time.perf_counter()
    for _ in range(_COPIES):
        back = sent.to(f"cuda:{other}").to("cuda:0")
    torch.cuda.synchronize(other)
    torch.cuda.synchronize(0)
    seconds = time.perf_counter() - started
    return 2 * _COPIES * sent.numel() / seconds, torch.equal(sent, back)


def _version_pair(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _memory_free_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text().splitlines() if meminfo.exists() else []:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
