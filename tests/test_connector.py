"""Contract of the connector inside vLLM: a file is whole and says what it is, or there is a reason beside its lock.

The writing half runs here without an engine; with one, its states are held against transformers' (test_engine.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hs_connectors import FP8Transfer
from hs_connectors.fp8_utils import quantize_tensor_to_fp8
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3_train import capture, connector
from eagle3_train.capture import Expected, read_states
from eagle3_train.connector import Eagle3HiddenStatesConnector, check_base
from eagle3_train.vllm_plugin import pack_before_the_copy

LAYERS = [2, 4, 5, 8]


class Copied:
    def synchronize(self) -> None:
        return


def writer(storage_dtype: str = "bfloat16") -> Eagle3HiddenStatesConnector:
    """The connector without its engine: only what writes a file."""
    made = object.__new__(Eagle3HiddenStatesConnector)
    made._storage_dtype = storage_dtype
    made._header = {"layer_ids": json.dumps(LAYERS), "dtype": storage_dtype, "verifier": "abc", "vllm": "0.32.0"}
    return made


def tensors(tokens: int = 100) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, len(LAYERS), 16, generator=generator).to(torch.bfloat16)
    return {"hidden_states": states, "token_ids": torch.arange(tokens)}


def copied(captured: dict[str, torch.Tensor], storage_dtype: str) -> dict[str, torch.Tensor]:
    """What reaches the writers of an engine that saves in this type."""
    if storage_dtype != "float8_e4m3":
        return captured
    return captured | {"hidden_states": connector.in_float8(captured["hidden_states"])}


def lock_of(path: Path) -> int:
    """The lock that vLLM takes before it names the file."""
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def is_locked(path: Path) -> bool:
    with Path(f"{path}.lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.mark.parametrize("storage_dtype", ["bfloat16", "float32", "float8_e4m3"])
def test_a_file_holds_the_states_in_the_type_asked_for_and_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage_dtype: str
) -> None:
    monkeypatch.setattr(capture, "_VALUES_AT_ONCE", 3 * len(LAYERS) * 16)
    path = tmp_path / "a.safetensors"
    written = tensors()
    writer(storage_dtype)._write_tensors(copied(written, storage_dtype), Copied(), str(path), lock_of(path))
    held = read_states(path)
    assert held.kept_in == held.header["dtype"] == storage_dtype
    assert json.loads(held.header["layer_ids"]) == LAYERS
    assert held.header["verifier"] == "abc"
    assert torch.equal(held.token_ids, written["token_ids"])
    states = held.restored()
    assert torch.equal(held.last_layer(), states[:, -1])
    assert torch.allclose(held.sizes(), states.float().norm(dim=-1) / 16**0.5)
    if storage_dtype == "float8_e4m3":
        assert (states - written["hidden_states"].float()).abs().max() < 0.2
    else:
        assert torch.equal(states.float(), written["hidden_states"].float())
    with safe_open(path, framework="pt") as file:
        size = file.get_slice("hidden_states").get_shape()
    values = path.stat().st_size
    expected = Expected(LAYERS, 16, storage_dtype, "abc", 1e-3).token_bytes * size[0]
    assert expected <= values < expected + 100 * 8 + 600


def test_float8_is_hs_connectors_own_format(tmp_path: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    written = tensors()
    writer("float8_e4m3")._write_tensors(copied(written, "float8_e4m3"), Copied(), str(path), lock_of(path))
    Path(f"{path}.lock").unlink()
    read = FP8Transfer(tmp_path).get_cached(0)
    ours = read_states(path).restored()
    assert read is not None
    assert read.keys() == {"hidden_states", "token_ids"}
    assert torch.allclose(read["hidden_states"].float(), ours, rtol=2.0**-7, atol=0)
    largest = written["hidden_states"].float().abs().flatten(1).amax(1)
    assert torch.allclose(load_file(path)["hidden_states_scales"].flatten(), largest / 448)


@pytest.mark.parametrize("tokens", [1, 99, 100])
def test_float8_made_some_rows_at_a_time_has_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(connector, "_VALUES_AT_ONCE", 3 * len(LAYERS) * 16)
    states = tensors(tokens)["hidden_states"]
    ours, scales = connector.from_float8(connector.in_float8(states), tokens, len(LAYERS))
    whole, whole_scales = quantize_tensor_to_fp8(states)
    assert torch.equal(ours.view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(scales, whole_scales)


def test_vllms_connector_copies_the_packed_states_however_often_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector.base, "extract_from_kv_cache", connector.base.extract_from_kv_cache)
    cache, slots = torch.randn(3, len(LAYERS), 8, 16).to(torch.bfloat16), torch.tensor([9, 3, 23, 0])
    states = connector.base.extract_from_kv_cache(cache, slots, 3)
    pack_before_the_copy(connector.in_float8)
    pack_before_the_copy(connector.in_float8)
    assert torch.equal(connector.base.extract_from_kv_cache(cache, slots, 3), connector.in_float8(states))
    check_base()


def test_the_lock_is_released_only_when_the_whole_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    lock = lock_of(path)
    seen: list[tuple[bool, bool]] = []
    replace = os.replace

    def watched(source: Any, target: Any) -> None:
        seen.append((is_locked(path), path.exists()))
        replace(source, target)
        seen.append((is_locked(path), path.exists()))

    monkeypatch.setattr(os, "replace", watched)
    writer()._write_tensors(tensors(), Copied(), str(path), lock)
    assert seen == [(True, False), (True, True)]
    assert not is_locked(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "a.safetensors.lock"]


def test_a_failed_write_leaves_its_reason_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any) -> None:
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(connector, "save_tensors", broken)
    path = tmp_path / "a.safetensors"
    with pytest.raises(RuntimeError, match="on fire"):
        writer()._write_tensors(tensors(), Copied(), str(path), lock_of(path))
    assert Path(f"{path}.error").read_text() == "RuntimeError: the disk is on fire"
    assert not path.exists()
    assert not is_locked(path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may mount nothing")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_leaves_no_short_file_and_its_lock_free(small_disk: Path) -> None:
    path = small_disk / "a.safetensors"
    with pytest.raises(Exception, match=r"No space left|os error 28|Errno 28"):
        writer()._write_tensors(tensors(20_000), Copied(), str(path), lock_of(path))
    assert not path.exists()
    assert not is_locked(path)
    assert [file.name for file in small_disk.iterdir() if "tmp" in file.name] == []
    writer()._write_tensors(tensors(20), Copied(), str(path), lock_of(path))
    assert len(load_file(path)["token_ids"]) == 20


# ---- what it is built on


def test_the_installed_vllm_is_what_the_connector_is_built_on() -> None:
    check_base()
    assert connector.vllm_version() in connector.TESTED_WITH
    assert len(connector.base_digest()) == 16


def other_write(tensors: Any, event: Any, path: str) -> None:
    """A function with other parameters than vLLM's has today."""


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (connector.ExampleHiddenStatesConnector, "_write_tensors", r"_write_tensors\('tensors', 'event', 'path'\)"),
        (connector.base, "extract_from_kv_cache", "extract_from_kv_cache"),
    ],
)
def test_a_changed_base_class_is_noticed_at_start(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, said: str
) -> None:
    monkeypatch.setattr(owner, name, staticmethod(other_write) if name.startswith("_") else other_write)
    with pytest.raises(RuntimeError, match=said):
        check_base()


def test_a_function_that_is_gone_is_noticed_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(connector.ExampleHiddenStatesConnector, "_submit_async_write")
    with pytest.raises(RuntimeError, match="_submit_async_write"):
        check_base()
