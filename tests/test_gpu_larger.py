"""`benchmarks/gpu/larger.py` without a server: its arithmetic, its verifier, and that no part takes another with it."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.gpu import larger, larger_model
from benchmarks.gpu.check import Reference
from benchmarks.gpu.larger import Part, Report, break_even, covered, shares_of
from eagle3_train import export, parity, verifier
from eagle3_train.asking import watch_server
from eagle3_train.config import Verifier


def test_time_that_two_writers_share_counts_once_and_only_within_the_window() -> None:
    assert covered([(5.0, 7.0), (1.0, 3.0), (2.0, 4.0), (9.0, 12.0)], (1.5, 10.0)) == pytest.approx(2.5 + 2 + 1)
    assert covered([(0.0, 9.0), (2.0, 3.0)], (0.0, 10.0)) == pytest.approx(9)


def test_shares_are_of_the_measured_window_alone() -> None:
    records = [
        {"submit_s": 5.0, "ended": 9.0},  # before
        {"submit_s": 0.1, "ended": 11.0},
        {"wait_s": 0.2, "write_s": 1.0, "tokens": 1000, "ended": 13.0},
        {"wait_s": 0.2, "write_s": 1.0, "tokens": 1000, "ended": 13.5},
    ]
    found = shares_of(records, [(14.0, 15.0), (14.5, 15.0)], (10.0, 20.0), bytes_per_token=1_000_000)
    assert found["engine_thread_share"] == pytest.approx(0.01)
    assert found["writing_share"] == pytest.approx(0.15)
    assert found["mean_writers"] == pytest.approx(0.2)
    assert found["written_gb_per_s"] == pytest.approx(0.2)
    assert found["written_gb_per_s_while_writing"] == pytest.approx(2 / 1.5, abs=1e-3)
    assert found["checking_share"] == pytest.approx(0.1)


def test_break_even_is_the_ratio_of_step_times_whatever_length_is_imposed() -> None:
    step_alone, step_drafted, in_flight = 0.002, 0.0028, 8
    row = {
        "alone": in_flight / step_alone,
        "drafted": {
            length: {"tokens_per_s": in_flight * length / step_drafted, "acceptance_length": length}
            for length in (1.5, 3.0)
        },
    }
    found = break_even({in_flight: [row, row]})[str(in_flight)]
    assert found["break_even_length"]["median"] == pytest.approx(1.4)
    assert found["break_even_length"]["max"] == pytest.approx(1.4)
    assert found["imposed_3"]["to_alone"]["median"] == pytest.approx(3.0 / 1.4, abs=1e-3)


class _StillThere:
    def check_alive(self) -> None: ...


class _NoServers:
    def stop(self, names: Any) -> None: ...
    def start(self, names: Any, patience_s: float) -> None: ...


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    return SimpleNamespace(
        report=Report(tmp_path / larger.NAME, {}),
        fleet=_NoServers(),
        sizes=larger.DRY,
        staging={},
        lengths=[],
        share_cache=lambda *_: None,
    )


def test_a_part_that_fails_or_hangs_is_named_and_the_others_keep_their_figures(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: Any) -> None:
        bench.report.add("fails", before=1)
        raise ValueError("no such kernel")

    parts = {
        "fails": Part(fails, (), 10),
        "hangs": Part(lambda _: asyncio.run(watch_server(_StillThere(), [asyncio.sleep(60)])), (), 0.2),
        "works": Part(lambda bench: bench.report.add("works", ratio=0.9), (), 10),
    }
    monkeypatch.setattr(larger, "PARTS", parts)
    larger._round(bench, list(parts), deadline=time.monotonic() + 100)
    written = json.loads((tmp_path / larger.NAME).read_text())
    assert written["figures"] == {"fails": {"before": 1}, "works": {"ratio": 0.9}}
    assert "no such kernel" in written["errors"]["fails"]
    assert "stopped after" in written["errors"]["hangs"]
    assert "works" not in written["errors"]


def test_when_no_time_is_left_nothing_is_begun_and_the_report_says_so(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(larger, "PARTS", {"late": Part(lambda bench: bench.report.add("late", ratio=1), (), 10)})
    larger._round(bench, ["late"], deadline=time.monotonic() + larger.ENDING_S)
    written = json.loads((tmp_path / larger.NAME).read_text())
    assert written["figures"] == {}
    assert written["errors"] == {"late": "no time was left"}


def test_its_verifier_has_plausible_states_and_says_plain_text_alone(tmp_path: Path) -> None:
    folder = tmp_path / "verifier"
    larger_model.build_verifier(folder, Path(verifier.location(Verifier())), larger_model.TINY)
    reference = Reference(Verifier(path=str(folder)))
    token_ids = torch.randint(20, 512, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    states_TLD = reference.states(token_ids)
    assert 0.9 < states_TLD.pow(2).mean(-1).sqrt().median() < 3
    parity.check_depth(parity.Head(Verifier(path=str(folder))), [states_TLD], [token_ids], reference.layer_ids)
    said = reference.logits(token_ids).softmax(-1)
    silent = torch.ones(512, dtype=torch.bool)
    silent[larger_model.text_ids(folder)] = False
    assert said[:, silent].sum(-1).max() < 1e-3
    assert said.max(-1).values.median() < 0.9  # and does not always say the same


def test_its_draft_is_one_that_vllm_takes(tmp_path: Path) -> None:
    folder = tmp_path / "verifier"
    larger_model.build_verifier(folder, Path(verifier.location(Verifier())), larger_model.TINY)
    larger_model.build_draft(tmp_path / "draft", folder, larger_model.TINY)
    flat = json.loads((tmp_path / "draft" / export.CONFIG).read_text())
    tensors = load_file(tmp_path / "draft" / export.WEIGHTS)
    export.check_tensors(tensors, flat)
    targets = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()
    assert set(targets) <= set(larger_model.text_ids(folder))
