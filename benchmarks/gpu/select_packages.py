"""Copies the packages of this environment that the GPU machine lacks.

    python select_packages.py TARGET

By distribution, from pip's own record of its files: what is listed in machine_packages.txt stays out, and so do the
packages and files below, which vLLM runs without on a Hopper GPU with unquantised models. Of the project itself only
metadata is written: vLLM finds the plugin through it, and the code is the checkout's.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Kernels and formats that the stages never reach: other GPUs, quantised weights, video, compilers of kernels.
UNUSED = {
    "cuda-python",
    "cuda-tile",
    "fastsafetensors",
    "flashinfer-python",
    "humming-kernels",
    "pynvvideocodec",
    "quack-kernels",
    "tilelang",
    "tokenspeed-mla",
    "tokenspeed-triton",
    "torchcodec",
    "z3-solver",
}
UNUSED_PREFIXES = ("nvidia-",)
UNUSED_FILES = re.compile(
    r"vllm/(vllm-rs$|third_party/(fmha_sm100|deep_gemm)/|vllm_flash_attn/_vllm_fa2_C|_qutlass_C)"
    r"|pycountry/locales/|mistral_common/data/|(^|/)__pycache__/|^\.\./"
)


def main() -> None:
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    there = _names((HERE / "machine_packages.txt").read_text(encoding="utf-8"))
    packed = {_normalised(d.name): _copy(d, target) for d in distributions() if _is_wanted(_normalised(d.name), there)}
    _write_project_metadata(target)
    for name, size in sorted(packed.items(), key=lambda item: -item[1])[:12]:
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{sum(packed.values()) / 1e6:8.1f} MB  in {len(packed)} packages")


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(text: str) -> set[str]:
    return {_normalised(name) for line in text.splitlines() if (name := line.split("#")[0].strip())}


def _is_wanted(name: str, there: set[str]) -> bool:
    return name not in there | UNUSED and not name.startswith(UNUSED_PREFIXES) and name != "eagle3-train"


def _write_project_metadata(target: Path) -> None:
    project = tomllib.loads((HERE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = target / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _copy(distribution: Distribution, target: Path) -> int:
    """Copy a distribution's files; returns their size in bytes."""
    size = 0
    for file in distribution.files or []:
        source = Path(str(file.locate()))
        if UNUSED_FILES.search(file.as_posix()) or not source.is_file():
            continue
        destination = target / file
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, destination)
        size += source.stat().st_size
    return size


if __name__ == "__main__":
    main()
