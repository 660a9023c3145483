"""Contract of 00_preflight: what a run would fail at fails before it, with the remedy; the rest passes or warns.

The verifier is Kimi-K2.5's stand-in at its true sizes, whole or broken in one way. GPUs are facts in a `Box`: that of
8 x RTX PRO 6000 is written down here, that of this machine is looked up.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3_train import box_checks, preflight
from eagle3_train.box import Links, look
from eagle3_train.box_checks import FAIL, GIB, PASS, WARN, Check
from eagle3_train.config import Config, parse
from eagle3_train.errors import ConfigError, PipelineError
from eagle3_train.preflight import FOLDER, REPORT, disk_need, expected, inspect, main, memory_need, table
from tests import kimi_standin
from tests.boxes import CPU_BOX, RTX, RTX_BOX
from tests.conftest import PROJECT, run_stage

MIB = 1 << 20
TINY = ["--preset", str(PROJECT / "presets" / "tiny.yaml")]


def kimi_config(path: Path, *flags: str) -> Config:
    """The sizes of a run with Kimi-K2.5 at `path` on eight GPUs, other than in `flags`."""
    _, config = parse(
        [
            *("--run", "unused", *TINY),
            *("--verifier.path", str(path), "--verifier.tensor_parallel_size", "8", "--verifier.trust_remote_code"),
            *("--verifier.dtype", "auto", "--generation.max_tokens", "16384", "--server.max_model_len", "32768"),
            *("--server.gpu_memory_utilization", "0.93", "--training.data_workers", "4", "--max-samples", "100"),
            *("--training.pack_tokens", "8192", "--training.epochs", "1"),
            *("--draft.num_attention_heads", "64", "--draft.num_key_value_heads", "64", "--draft.head_dim", "128"),
            *("--draft.intermediate_size", "12288", "--vocabulary.draft_size", "32000", "--no-draft.norm_before_fc"),
            *flags,
        ],
        "",
    )
    return config


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen times less is written to measure the disk: here only the verdict counts."""
    monkeypatch.setattr(preflight, "WRITE_PROBE_BYTES", 16 * MIB)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's directory as `main` prepares it."""
    (tmp_path / "run" / FOLDER).mkdir(parents=True)
    return tmp_path / "run"


def the(name: str, checks: list[Check]) -> Check:
    """The one check of that name."""
    (found,) = (check for check in checks if check.name == name)
    return found


def assert_fails(check: Check, *parts: str, remedy: str) -> None:
    assert check.status == FAIL, check
    for part in parts:
        assert part in check.found
    assert remedy in check.remedy


# The whole of it -----------------------------------------------------------------------------------------------------


def test_the_tiny_preset_passes_on_this_machine_and_the_report_agrees_with_the_table(tmp_path: Path) -> None:
    done = run_stage("00_preflight.py", "--run", str(tmp_path / "run"), *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "run" / FOLDER / REPORT).read_text())
    assert report["passed"] is True
    assert report["hardware"]
    assert table([Check(**check) for check in report["checks"]]) in done.stdout
    assert {check["status"] for check in report["checks"]} <= {PASS, WARN}
    assert [path.name for path in (tmp_path / "run" / FOLDER).iterdir()] == [REPORT]


def test_a_box_that_lacks_the_gpus_of_the_preset_says_all_that_is_missing(
    kimi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if look().gpus:
        pytest.skip("this machine has a GPU")
    flags = ["--verifier.path", str(kimi), "--verifier.tensor_parallel_size", "8", "--verifier.trust_remote_code"]
    code = main(["--run", str(tmp_path / "run"), *TINY, *flags], "")
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "run" / FOLDER / REPORT).read_text())
    checks = [Check(**check) for check in report["checks"]]
    assert (code, report["passed"]) == (1, False)
    assert table(checks) in printed
    assert_fails(the("gpus", checks), "no CUDA GPU", "tensor_parallel_size is 8", remedy="box of 8 GPUs")
    assert_fails(the("driver", checks), remedy="install NVIDIA's driver")
    assert_fails(the("kernels", checks), "CPU build", remedy="PLATFORM=cuda")
    assert_fails(the("packages", checks), "vllm is missing", remedy="requirements.txt")
    for name in ("verifier files", "verifier layers", "verifier head", "tokenizer", "chat template"):
        assert the(name, checks).status == PASS


def test_a_box_of_8_rtx_pro_6000_passes_for_kimi(kimi: Path, run: Path) -> None:
    checks = inspect(kimi_config(kimi), run, RTX_BOX)
    # This machine's own disk, and its packages for a CPU, are not the box's.
    assert {check.name for check in checks if check.status == FAIL} <= {"packages", "disk"}
    assert the("gpus", checks).found == "8 x NVIDIA RTX PRO 6000 Blackwell (95 GiB)"
    assert the("links", checks).found.startswith("PCIe, no NVLink; P2P possible; copies at 40 GB/s or more")
    assert "4 on NUMA node 0, 4 on NUMA node 1" in the("links", checks).found
    assert "163607" in the("chat template", checks).found
    assert "[2, 30, 58, 61] of 61" in the("verifier layers", checks).found


def test_what_does_not_pass_always_has_a_remedy(kimi: Path, run: Path) -> None:
    poor = replace(CPU_BOX, memory_free_bytes=0, shared_memory_free_bytes=0, open_files=10)
    for check in inspect(kimi_config(kimi, "--max-samples", "10000000"), run, poor):
        assert bool(check.remedy) == (check.status != PASS), check


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--verifier.pth", "x"], 2, "verifier.path"),
        (["--preset", "presets/nowhere.yaml"], 2, "presets/tiny.yaml"),
    ],
)
def test_wrong_arguments_end_with_2_and_write_nothing(
    tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    done = run_stage("00_preflight.py", "--run", str(tmp_path / "run"), *TINY, *arguments)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_new_run_without_a_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="new run"):
        main(["--run", str(tmp_path / "run")], "")


def test_a_run_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PipelineError, match="cannot be made"):
        main(["--run", str(tmp_path / "file" / "run"), *TINY], "")


def test_long_findings_are_wrapped_and_counted() -> None:
    text = table([Check("a", PASS, "short"), Check("longer", FAIL, "word " * 60, "do this " * 20)])
    assert max(map(len, text.splitlines())) <= 120
    assert text.endswith("2 checks: 1 pass, 0 warn, 1 fail")
    assert "-> do this" in text


# The machine ---------------------------------------------------------------------------------------------------------


def test_this_machine_is_looked_at_without_an_error() -> None:
    box = look()
    assert box.memory_free_bytes > 0
    assert box.open_files > 0
    assert len(box.gpus) <= (box.driver_gpus if box.driver_gpus is not None else len(box.gpus))


def test_fewer_gpus_than_the_verifier_is_split_over_fail(kimi: Path) -> None:
    check = box_checks.gpus(kimi_config(kimi), replace(RTX_BOX, gpus=(RTX,) * 4, driver_gpus=4))
    assert_fails(check, "4 x NVIDIA RTX", "tensor_parallel_size is 8", remedy="box of 8 GPUs")


def test_gpus_that_the_driver_sees_and_torch_does_not_are_told_apart(kimi: Path) -> None:
    check = box_checks.gpus(kimi_config(kimi), replace(CPU_BOX, driver_gpus=8))
    assert_fails(check, "8 for the driver", remedy="CUDA_VISIBLE_DEVICES")


def test_unequal_gpus_warn(kimi: Path) -> None:
    mixed = (replace(RTX, name="NVIDIA RTX 6000 Ada"), *(RTX,) * 7)
    assert box_checks.gpus(kimi_config(kimi), replace(RTX_BOX, gpus=mixed)).status == WARN


def test_a_gpu_that_someone_else_uses_fails(kimi: Path) -> None:
    used = (RTX, RTX, replace(RTX, free_bytes=20 * GIB), *(RTX,) * 5)
    check = box_checks.free_gpu_memory(kimi_config(kimi), replace(RTX_BOX, gpus=used))
    assert_fails(check, "GPU 2: 20.0 of 95.0 GiB free", remedy="nvidia-smi")
    assert box_checks.free_gpu_memory(kimi_config(kimi), RTX_BOX).status == PASS


@pytest.mark.parametrize(
    ("facts", "status", "said"),
    [
        ({}, PASS, "580.95.05, for CUDA up to 13.0"),
        ({"driver_cuda": (12, 8)}, FAIL, "torch is built for 13.0"),
        ({"driver_cuda": (13, 2)}, PASS, "13.2"),
        ({"driver": None}, WARN, "NVML"),
        ({"driver": None, "gpus": ()}, FAIL, "no NVIDIA driver"),
    ],
)
def test_a_driver_older_than_torchs_cuda_fails(facts: dict[str, Any], status: str, said: str) -> None:
    check = box_checks.driver(replace(RTX_BOX, **facts))
    assert (check.status, said in check.found) == (status, True), check


@pytest.mark.parametrize(
    ("kernels", "capability", "status"),
    [
        (("sm_90", "sm_120"), (12, 0), PASS),
        (("sm_120",), (12, 1), PASS),
        (("sm_90", "sm_100"), (12, 0), FAIL),
        (("sm_90", "compute_90"), (12, 0), WARN),
        (("compute_120",), (9, 0), FAIL),
        (("sm_100", "sm_103"), (10, 3), PASS),
        (("sm_103",), (10, 0), FAIL),
        (("sm_100f",), (10, 3), PASS),
        (("sm_90a",), (9, 0), PASS),
        (("sm_100a",), (10, 3), FAIL),
        (("sm_80",), (8, 9), PASS),
    ],
)
def test_kernels_are_for_this_gpu_or_it_fails(
    kernels: tuple[str, ...], capability: tuple[int, int], status: str
) -> None:
    check = box_checks.kernels(replace(RTX_BOX, gpus=(replace(RTX, capability=capability),), kernels=kernels))
    assert check.status == status, check
    assert f"SM {capability[0]}.{capability[1]}" in check.found


@pytest.mark.parametrize(
    ("links", "status", "said"),
    [
        (Links(peer_access=True, slowest_copy=40e9, sound=False), FAIL, "came back changed"),
        (Links(peer_access=False, slowest_copy=9e9, sound=True), WARN, "P2P not possible"),
        (Links(peer_access=True, slowest_copy=None, sound=True), PASS, "not tried"),
    ],
)
def test_links_that_change_data_fail_and_slow_ones_warn(links: Links, status: str, said: str) -> None:
    check = box_checks.links(replace(RTX_BOX, links=links))
    assert (check.status, said in check.found) == (status, True), check


def test_nvlinks_are_named(kimi: Path) -> None:
    linked = tuple(replace(gpu, nvlinks=18, numa_node=None) for gpu in RTX_BOX.gpus)
    found = box_checks.links(replace(RTX_BOX, gpus=linked)).found
    assert "NVLink (18 links a GPU)" in found
    assert "NUMA nodes not known" in found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tqdm==4.0.0    # a reason", "tqdm"),
        ("no-such-package-anywhere==1.0", "no-such-package-anywhere is missing, pinned ==1.0"),
    ],
)
def test_a_version_other_than_pinned_fails(tmp_path: Path, line: str, said: str) -> None:
    pins = tmp_path / "requirements.txt"
    pins.write_text((PROJECT / "requirements-cpu.txt").read_text() + line + "\n")
    assert_fails(box_checks.packages(pins), said, remedy="pip install -r requirements.txt")


def test_the_build_of_torch_does_not_make_another_version(tmp_path: Path) -> None:
    import torch

    pins = tmp_path / "requirements.txt"
    pins.write_text(f"torch=={torch.__version__.split('+')[0]}\n")
    assert box_checks.packages(pins).status == PASS


def test_shared_memory_must_hold_what_several_gpus_hand_each_other(kimi: Path) -> None:
    poor = replace(RTX_BOX, shared_memory_free_bytes=64 * MIB)
    assert_fails(box_checks.shared_memory(kimi_config(kimi), poor), remedy="--shm-size=2g")
    assert box_checks.shared_memory(kimi_config(kimi, "--verifier.tensor_parallel_size", "1"), poor).status == PASS
    assert box_checks.shared_memory(kimi_config(kimi), RTX_BOX).status == PASS


def test_too_few_open_files_fail(kimi: Path) -> None:
    config = kimi_config(kimi, "--generation.concurrency", "512")
    assert_fails(box_checks.open_files(config, replace(RTX_BOX, open_files=1024)), "512", remedy="ulimit -n")


def test_limited_locked_memory_warns() -> None:
    assert box_checks.locked_memory(replace(RTX_BOX, locked_memory_bytes=8 * MIB)).status == WARN


def test_a_port_that_is_taken_fails(kimi: Path, run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1]
        checks = inspect(kimi_config(kimi, "--server.port", str(number)), run, CPU_BOX)
    assert_fails(the("port", checks), str(number), "taken", remedy="")


def test_a_clock_behind_the_projects_own_files_warns(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert box_checks.clock(run / FOLDER).status == PASS
    yesterday = time.time() - 86400 * 365
    monkeypatch.setattr(time, "time", lambda: yesterday)
    check = box_checks.clock(run / FOLDER)
    assert (check.status, "behind" in check.found) == (WARN, True)


def test_a_disk_whose_clock_is_another_warns(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = time.time() + 60
    monkeypatch.setattr(time, "time", lambda: ahead)
    assert "disk's clock is -60 s" in box_checks.clock(run / FOLDER).found


# The verifier --------------------------------------------------------------------------------------------------------


def shard(path: Path, number: int) -> Path:
    return path / kimi_standin.shard_name(number)


def leave_out(path: Path, number: int) -> None:
    """The shard without its last tensor, as an index of another revision would meet it."""
    with shard(path, number).open("rb") as file:
        listed = list(json.loads(file.read(int.from_bytes(file.read(8), "little"))))[1:]
    held = {tensor.name: tensor for at, tensor in kimi_standin.tensors() if at == number}
    kimi_standin.write_sparse(shard(path, number), [held[name] for name in listed[:-1]])


def truncate(path: Path, number: int) -> None:
    os.truncate(shard(path, number), shard(path, number).stat().st_size - 1)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda path: shard(path, 7).unlink(), "model-00007-of-000064.safetensors is missing"),
    "a shard is cut short": (lambda path: truncate(path, 9), "its header says"),
    "a shard is too long": (lambda path: os.truncate(shard(path, 9), 1 << 40), "its header says"),
    "a shard is cut in its header": (lambda path: os.truncate(shard(path, 9), 100), "cut short in its header"),
    "a shard is empty": (lambda path: os.truncate(shard(path, 9), 0), "cut short in its header"),
    "a shard is a web page": (lambda path: shard(path, 9).write_text("<html>404</html>"), "no safetensors file"),
    "a header lacks a tensor": (
        lambda path: leave_out(path, 3),
        "lacks language_model.model.layers.2.mlp.experts.3.down_proj.weight_shape",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_checkpoint_that_is_not_whole_fails_naming_the_file(tmp_path: Path, run: Path, damage: str) -> None:
    path = kimi_standin.build(tmp_path / "kimi")
    spoil, said = BROKEN[damage]
    spoil(path)
    check = the("verifier files", inspect(kimi_config(path), run, CPU_BOX))
    assert_fails(check, said, remedy="copy them again")


def test_many_missing_shards_are_counted(tmp_path: Path, run: Path) -> None:
    path = kimi_standin.build(tmp_path / "kimi")
    for number in range(1, 21):
        shard(path, number).unlink()
    checks = inspect(kimi_config(path), run, CPU_BOX)
    assert_fails(the("verifier files", checks), "model-00001", "and 17 more files", remedy="copy")
    assert the("verifier head", checks).status == FAIL


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        (lambda path: (path / "config.json").unlink(), "verifier layers", "config.json is missing"),
        (lambda path: (path / "model.safetensors.index.json").write_text("{"), "verifier files", "not a whole index"),
        (lambda path: (path / "tiktoken.model").unlink(), "tokenizer", "cannot be loaded"),
        (lambda path: (path / "chat_template.jinja").unlink(), "chat template", "cannot be used"),
    ],
    ids=["config", "index", "tokenizer", "template"],
)
def test_a_missing_or_broken_file_fails_in_its_own_check(
    tmp_path: Path, run: Path, change: Callable[[Path], object], check: str, said: str
) -> None:
    path = kimi_standin.build(tmp_path / "kimi")
    change(path)
    assert_fails(the(check, inspect(kimi_config(path), run, CPU_BOX)), said, remedy="")


def test_a_head_that_is_packed_or_a_norm_that_is_missing_fails(tmp_path: Path, run: Path) -> None:
    packed = kimi_standin.build(tmp_path / "packed", pack_head=True)
    assert_fails(the("verifier head", inspect(kimi_config(packed), run, CPU_BOX)), "lm_head.weight_packed", remedy="")
    lacking = kimi_standin.build(tmp_path / "lacking", without=("language_model.model.norm.weight",))
    checks = inspect(kimi_config(lacking), run, CPU_BOX)
    assert the("verifier files", checks).status == PASS
    assert_fails(the("verifier head", checks), "language_model.model.norm.weight is missing", remedy="")


def test_remote_code_that_is_not_trusted_fails_with_the_setting(kimi: Path, run: Path) -> None:
    config = kimi_config(kimi, "--no-verifier.trust_remote_code")
    check = the("tokenizer", inspect(config, run, CPU_BOX))
    assert_fails(check, "tokenization_kimi", remedy="verifier.trust_remote_code: true")


def test_a_template_that_does_not_open_think_warns(tmp_path: Path, run: Path) -> None:
    path = kimi_standin.build(tmp_path / "kimi")
    template = (path / "chat_template.jinja").read_text()
    (path / "chat_template.jinja").write_text(template.replace("{%- else -%}<think>{%- endif -%}", "{%- endif -%}"))
    assert the("chat template", inspect(kimi_config(path), run, CPU_BOX)).status == WARN


def test_a_hub_verifier_that_is_not_here_warns_and_downloads_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    check = preflight.verifier_files(kimi_config(Path("moonshotai/Kimi-K2.5")).verifier)
    assert (check.status, "hf download moonshotai/Kimi-K2.5" in check.remedy) == (WARN, True)


# Room ----------------------------------------------------------------------------------------------------------------


def test_kimi_takes_69_gib_of_each_of_eight_gpus_and_127616_bytes_a_token_that_is_captured(kimi: Path) -> None:
    all_bytes = sum(tensor.nbytes for _, tensor in kimi_standin.tensors(experts=384))
    config = kimi_config(kimi, "--generation.server_args", '["--kv-cache-dtype", "fp8"]')
    generating, capturing, _ = box_checks.served(config)
    weights, per_token = memory_need(config, all_bytes, capturing)
    assert weights / GIB == pytest.approx(69.3, abs=0.1)
    # 61 layers x (512 + 64) of MLA's cache, and 4 x 7168 of states, in bf16 and on every GPU.
    assert per_token == 61 * 576 * 2 + 57344
    assert memory_need(config, all_bytes, generating) == (weights, 61 * 576)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [("01b", 8, 0.93, 2, 32768), ("02", 8, 0.93, 2, 32768), ("06", 8, 0.93, 2, 32768)]),
        (
            [
                *("--server.args", '["--kv-cache-dtype=fp8", "--max_model_len", "9000"]'),
                *("--extraction.server_args", '["--kv-cache-dtype=auto", "--gpu-memory-utilization", "0.8"]'),
                *("--generation.server_args", '["--tensor-parallel-size=4", "--data-parallel-size=3"]'),
            ],
            [("01b", 12, 0.93, 1, 9000), ("02", 8, 0.8, 2, 9000), ("06", 8, 0.93, 1, 9000)],
        ),
        (
            [
                *("--generation.capture", "one_pass", "--generation.server_args", '["--kv-cache-dtype=fp8"]'),
                *("--extraction.server_args", '["--kv-cache-dtype=bfloat16", "--gpu-memory-utilization=0.85"]'),
            ],
            [("01b", 8, 0.85, 2, 32768), ("02", 8, 0.85, 2, 32768), ("06", 8, 0.93, 2, 32768)],
        ),
        (["--verifier.dtype", "float32"], [(stage, 8, 0.93, 4, 32768) for stage in ("01b", "02", "06")]),
    ],
)
def test_a_stages_own_server_arguments_replace_the_common_ones(
    kimi: Path, flags: list[str], expected: list[tuple[Any, ...]]
) -> None:
    assert [server[:5] for server in box_checks.served(kimi_config(kimi, *flags))] == expected


def test_a_stage_that_takes_too_little_memory_is_named(tmp_path: Path) -> None:
    path = kimi_standin.build(tmp_path / "kimi", experts=384)
    small = kimi_config(path, "--extraction.server_args", '["--gpu-memory-utilization=0.77"]')
    assert_fails(preflight.memory(small, RTX_BOX), "not enough for 02", "02 77%", remedy="server.max_model_len")
    assert preflight.memory(kimi_config(path), RTX_BOX).status == PASS


def test_data_parallel_servers_want_their_gpus_too(kimi: Path) -> None:
    flags = ["--verifier.tensor_parallel_size", "4", "--generation.server_args", '["--data-parallel-size=2"]']
    four = replace(RTX_BOX, gpus=(RTX,) * 4, driver_gpus=4)
    assert_fails(box_checks.gpus(kimi_config(kimi, *flags), four), "01b is spread over 8", remedy="box of 8 GPUs")
    assert box_checks.gpus(kimi_config(kimi, *flags), RTX_BOX).status == PASS
    used = replace(RTX_BOX, gpus=(*(RTX,) * 7, replace(RTX, free_bytes=GIB)))
    assert box_checks.free_gpu_memory(kimi_config(kimi, *flags), used).status == FAIL


def test_binding_to_numa_nodes_without_numactl_fails(kimi: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = kimi_config(kimi, "--server.args", '["--numa-bind"]')
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert_fails(the("numactl", inspect(bound, run, CPU_BOX)), "--numa-bind", remedy="apt-get install numactl")
    assert "numactl" not in {check.name for check in inspect(kimi_config(kimi), run, CPU_BOX)}
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert box_checks.numactl().status == PASS


def test_the_whole_of_kimi_fits_eight_rtx_pro_6000_and_not_four(tmp_path: Path) -> None:
    path = kimi_standin.build(tmp_path / "kimi", experts=384)
    check = preflight.memory(kimi_config(path), RTX_BOX)
    assert check.status == PASS
    assert "69.3 of weights" in check.found
    check = preflight.memory(kimi_config(path, "--verifier.tensor_parallel_size", "4"), RTX_BOX)
    assert_fails(check, "138.6 of weights", remedy="GPUs of")
    assert preflight.memory(kimi_config(path), CPU_BOX).status == WARN
    config = kimi_config(path, "--verifier.tensor_parallel_size", "1")
    assert_fails(preflight.memory(config, replace(CPU_BOX, memory_free_bytes=22 * GIB)), "555", remedy="GPUs")


def test_a_length_that_does_not_fit_the_cache_fails(kimi: Path) -> None:
    config = kimi_config(kimi, "--server.max_model_len", "1000000")
    assert_fails(preflight.memory(config, RTX_BOX), "1000000 x 127616", remedy="server.max_model_len")


def test_states_of_100_samples_of_4096_tokens_take_what_the_arithmetic_says(kimi: Path, run: Path) -> None:
    config = kimi_config(kimi)
    known = expected(config, run)
    assert known is not None
    assert (known.samples, known.tokens) == (100, 409600)
    need = disk_need(config, known.tokens)
    assert need["02_hidden"] == int(409600 * 0.9 * 57344)
    # Of the published size: 0.83 G trained weights, 0.23 G head; the embedding of 1.17 G is the verifier's.
    # Two newest checkpoints and the best are kept while a fourth is written.
    assert need["04_train"] == pytest.approx(4 * (4 * 1.06e9 + 8 * 0.83e9), rel=0.02)
    assert need["05_export"] == pytest.approx(2 * 1.06e9, rel=0.02)


def test_within_a_budget_the_states_take_no_more(kimi: Path) -> None:
    for budget, bytes_ in (("2.5", 2_500_000_000), ("1000", int(409600 * 0.9 * 57344))):
        assert disk_need(kimi_config(kimi, "--extraction.disk_budget_gb", budget), 409600)["02_hidden"] == bytes_


def test_a_disk_too_small_for_the_states_fails(kimi: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(run)
    for free, status in ((1 << 30, FAIL), (70 * GIB, WARN), (1 << 50, PASS)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _path, free=free: usage._replace(free=free))
        check = preflight.disk(kimi_config(kimi), run)
        assert check.status == status, check
        assert ("--max-samples" in check.remedy) == (status != PASS)


def test_what_is_there_already_is_not_wanted_again(kimi: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, usage = kimi_config(kimi), shutil.disk_usage(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=50 * GIB))
    assert preflight.disk(config, run).status == FAIL
    (run / "02_hidden" / "shards").mkdir(parents=True)
    with (run / "02_hidden" / "shards" / "a.safetensors").open("wb") as file:
        file.truncate(30 * GIB)
    assert "02_hidden 0.0" in preflight.disk(config, run).found
    assert preflight.disk(config, run).status != FAIL


def test_a_runs_own_traces_replace_the_assumption(kimi: Path, run: Path) -> None:
    (run / "01_prompts").mkdir()
    (run / "01_prompts" / "prompts.jsonl").write_text("{}\n" * 7)
    known = expected(kimi_config(kimi), run)
    assert known is not None
    assert known.samples == 7
    (run / "01b_traces").mkdir()
    manifest = {"state": "done", "summary": {"traces": 5, "output_tokens": 1000}}
    (run / "01b_traces" / "manifest.json").write_text(json.dumps(manifest))
    known = expected(kimi_config(kimi), run)
    assert known is not None
    assert (known.samples, known.basis) == (5, "this run's traces")


def test_an_unknown_number_of_samples_warns(kimi: Path, run: Path) -> None:
    config = kimi_config(kimi, "--prompts.source", "owner/questions", "--max-samples", "null")
    checks = [preflight.disk(config, run), preflight.inodes(config, run)]
    assert [(check.status, "--max-samples" in check.remedy) for check in checks] == [(WARN, True)] * 2


def test_too_few_inodes_fail(kimi: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(run)

    class Filesystem:
        f_files, f_favail = real.f_files, 500

    monkeypatch.setattr(os, "statvfs", lambda _path: Filesystem)
    assert_fails(preflight.inodes(kimi_config(kimi), run), "1200 files wanted, 500 free", remedy="df -i")


def test_a_disk_slower_than_the_states_arrive_warns(kimi: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(1)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    check = preflight.write_speed(kimi_config(kimi), run)
    assert (check.status, "NVMe" in check.remedy) == (WARN, True)
    assert list((run / FOLDER).iterdir()) == []
