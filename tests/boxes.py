"""Machines as facts: what `look` would find on the two boxes, and on a machine without a GPU.

The GPUs' names, memory and links are those of NVIDIA's data sheets; the rest is what such a box usually offers. No such
box has been looked at by this code yet.

    python -m tests.boxes       rewrites the pre-flight tables of next-steps-eagle.md, which are drawn from these
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

from eagle3_train import preflight
from eagle3_train.box import Box, Gpu, Links
from eagle3_train.config import PRESETS, parse
from eagle3_train.run import write_text
from tests import kimi_standin

MIB, GIB = 1 << 20, 1 << 30
RTX = Gpu("NVIDIA RTX PRO 6000 Blackwell", 97250 * MIB, 96700 * MIB, (12, 0), numa_node=0, nvlinks=0)
RTX_BOX = Box(
    gpus=(RTX,) * 4 + (replace(RTX, numa_node=1),) * 4,
    driver_gpus=8,
    driver="580.95.05",
    driver_cuda=(13, 0),
    torch_cuda=(13, 0),
    kernels=("sm_80", "sm_90", "sm_100", "sm_120"),
    links=Links(peer_access=True, slowest_copy=40e9, sound=True),
    memory_free_bytes=900 * GIB,
    shared_memory_free_bytes=400 * GIB,
    open_files=65536,
    locked_memory_bytes=None,
)
B300 = Gpu("NVIDIA B300 SXM6", 275040 * MIB, 274400 * MIB, (10, 3), numa_node=0, nvlinks=18)
B300_BOX = replace(
    RTX_BOX,
    gpus=(B300,) * 4 + (replace(B300, numa_node=1),) * 4,
    links=Links(peer_access=True, slowest_copy=600e9, sound=True),
)
CPU_BOX = replace(
    RTX_BOX, gpus=(), driver_gpus=None, driver=None, driver_cuda=None, torch_cuda=None, kernels=(), links=None
)
PLAYBOOK = Path(__file__).resolve().parent.parent / "next-steps-eagle.md"
# What is of the machine that looks, and not of the box that is described.
OF_THIS_MACHINE = ("numactl", "packages", "vllm plugin", "port", "disk", "inodes", "write speed", "clock")
TABLES = {
    "rtx6000x8": ("rtx6000x8", RTX_BOX),
    "b300x8": ("b300x8", B300_BOX),
    "without_a_gpu": ("b300x8", CPU_BOX),
}
_MARKED = re.compile(r"(<!-- preflight: (\w+) -->\n).*?(<!-- /preflight -->)", re.DOTALL)


def preflight_tables(verifier: Path) -> dict[str, str]:
    """The text between each pair of markers: a preset's pre-flight on a box, with the verifier at `verifier`."""
    return {name: f"```\n{_table(preset, box, verifier)}\n```" for name, (preset, box) in TABLES.items()}


def _table(preset: str, box: Box, verifier: Path) -> str:
    flags = ["--preset", str(PRESETS / f"kimi-k2.5-{preset}.yaml"), "--verifier.path", str(verifier)]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / preflight.FOLDER).mkdir()
        _, config = parse(["--run", name, *flags], "")
        checks = preflight.inspect(config, Path(name), box)
    return preflight.table([check for check in checks if check.name not in OF_THIS_MACHINE])


def update(verifier: Path) -> None:
    """Rewrite the playbook's pre-flight tables."""
    made, text = preflight_tables(verifier), PLAYBOOK.read_text(encoding="utf-8")
    write_text(PLAYBOOK, _MARKED.sub(lambda match: f"{match[1]}{made[match[2]]}\n{match[3]}", text))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        update(kimi_standin.build(Path(folder) / "Kimi-K2.5", experts=384))
