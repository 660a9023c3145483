"""One training step at Kimi-K2.5's draft size: ours beside speculators', on one GPU, in one process.

The draft: hidden 7168, 64 heads of 128, intermediate 12288, draft vocabulary 32,000, 3 TTT steps. The data: documents
that can be learnt (each token's states come from a table, tokens follow a chain), one tenth of each a prompt, packed to
8,192 tokens; both sides get the same samples, fresh ones each step. speculators' side is its model, its collation and
its Trainer's step (autocast, its AdamW or torch's Muon, clipping at 1); ours is eagle3_train.step. Medians.

    python -m benchmarks.train_step bf16 | fp8 | muon | curve | memory | profile      1-2 minutes each on one H200

Writes benchmarks/results/train_step_<what>.json, or where $OUT names a folder there.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common import spread, write_result
from eagle3_train.muon import Muon
from eagle3_train.packs import lay_out
from eagle3_train.step import TrainingStep

HIDDEN, VOCABULARY, DRAFT_VOCABULARY, TTT_STEPS = 7168, 163840, 32000, 3
PACK, DOCUMENT = 8192, 2048
WARM_UP, MEASURED = 3, 10  # two periods of Muon
LR, CLIP = 1e-4, 1.0
MUON_PERIOD = 5  # as in MuonBP (arXiv 2510.16981)
GFLOP_PER_TOKEN_OF_SPECULATORS = 17.7  # forward and backward, counted by torch's FlopCounterMode

Sample = dict[str, torch.Tensor]


def draft_model(device: str = "cuda") -> Any:
    """speculators' Eagle3DraftModel at Kimi's size with random weights; frozen where the verifier's are."""
    from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=12288,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        rope_theta=50000.0,
    )
    layer._attn_implementation = "simple_flex_attention"
    layer.layer_types = ["full_attention"]
    proposal = GreedyTokenProposalConfig(speculative_tokens=TTT_STEPS)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCABULARY,
        norm_before_residual=True,
        norm_before_fc=True,
        norm_output=True,
        eagle_aux_hidden_state_layer_ids=[2, 30, 58],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["KimiK25ForConditionalGeneration"]),
        ),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Eagle3DraftModel(config)
        t2d = torch.arange(VOCABULARY) < DRAFT_VOCABULARY
        model.load_vocab_mappings(t2d, torch.zeros(DRAFT_VOCABULARY, dtype=torch.long))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    for frozen in (model.lm_head, model.verifier_lm_head, model.embed_tokens, model.verifier_norm):
        frozen.weight.requires_grad_(False)
    model.lm_head.weight.data.copy_(model.verifier_lm_head.weight)
    return model.to(device).float()


def documents(head: torch.Tensor, seed: int, pack: int = PACK, length: int = DOCUMENT) -> Iterator[list[Sample]]:
    """Endless packs of samples on the GPU: token t is followed by (17 t + noise) mod 1024; the last state is the head's
    row of the next token, and the captured states hold the token's and its predecessor's rows in noise."""
    generator = torch.Generator("cuda").manual_seed(seed)
    while True:
        samples = []
        for _ in range(pack // length):
            jumps = torch.randint(0, 2, (length + 1,), device="cuda", generator=generator).tolist()
            token, ids = int(torch.randint(0, 1024, (1,), device="cuda", generator=generator)), []
            for jump in jumps:
                ids.append(token)
                token = (17 * token + jump) % 1024
            tokens = torch.tensor(ids, device="cuda")
            rows = head[tokens[:-1]]
            noise = torch.randn(length, 3 * HIDDEN, device="cuda", generator=generator)
            states = noise + torch.cat([rows, rows.roll(1, 0), rows.roll(2, 0)], dim=1) * 50
            samples.append(
                {
                    "hidden_states": states.bfloat16(),
                    "input_ids": tokens[:-1],
                    "verifier_last_hidden_states": (head[tokens[1:]] * 50).bfloat16(),
                    "loss_mask": (torch.arange(length, device="cuda") >= length // 10).long(),
                    "lengths": torch.tensor([length]),
                    "position_ids": torch.arange(length, device="cuda"),
                }
            )
        yield samples


class Speculators:
    """Its step as its Trainer drives it."""

    def __init__(self, model: Any, optimizer: str):
        from speculators import Eagle3DraftModel
        from speculators.models.eagle3 import core
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig

        if torch.__version__ < "2.13":  # its fused loss does not pass that version's compiler
            core.compute_metrics = torch._dynamo.disable(core.compute_metrics)
        self.model = model
        self.call, _ = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div", loss_implementation="fused", ttt_steps=TTT_STEPS, ttt_step_loss_decay=1.0
        )
        self.optimizers = build_optimizers(
            model, TrainerConfig(lr=LR, num_epochs=1, save_path="", optimizer=optimizer, muon_lr=LR)
        )
        self._collate = CollateFn(PACK, HIDDEN, 3, dtype=torch.bfloat16, preprocess=shift_batch)

    def pack(self, samples: list[Sample]) -> dict[str, torch.Tensor]:
        batch = self._collate([dict(sample) for sample in samples])
        return {name: value.to("cuda") for name, value in batch.items() if isinstance(value, torch.Tensor)}

    def loss(self, pack: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.model(**pack, **self.call)[1]


class Ours:
    """eagle3_train's step."""

    def __init__(
        self,
        model: Any,
        optimizer: str,
        *,
        use_fp8: bool = False,
        recompute: bool = False,
        pack: int = PACK,
        period: int = 1,
    ):
        from speculators.losses import resolve_loss_config
        from speculators.train.optimizers import split_named_params_for_muon

        self.model = model
        self.step = TrainingStep(
            model,
            ttt_steps=TTT_STEPS,
            loss_config=resolve_loss_config("kl_div", "fused"),
            loss_decay=1.0,
            dtype=torch.bfloat16,
            use_fp8=use_fp8,
            recompute=recompute,
        )
        self.optimizers: list[torch.optim.Optimizer] = []
        rest = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if optimizer == "muon":
            matrices, others = split_named_params_for_muon(model)
            self.optimizers.append(Muon([parameter for _, parameter in matrices], lr=LR, period=period))
            rest = [parameter for _, parameter in others]
        self.optimizers.append(torch.optim.AdamW(rest, lr=LR, weight_decay=0.01, fused=True))
        self._tokens = pack

    def pack(self, samples: list[Sample]) -> Any:
        states = [
            torch.cat([sample["hidden_states"], sample["verifier_last_hidden_states"]], dim=1).unflatten(1, (4, -1))
            for sample in samples
        ]
        ids, masks = ([sample[name].cpu() for sample in samples] for name in ("input_ids", "loss_mask"))
        pack = lay_out(ids, masks, torch.cat(states), pack_tokens=self._tokens, ttt_steps=TTT_STEPS)
        return pack.to("cuda")

    def loss(self, pack: Any) -> torch.Tensor:
        return self.step(pack)[0]


def timed_steps(side: Any, packs: Iterator[list[Sample]], count: int = MEASURED) -> dict[str, Any]:
    """Milliseconds of forward, backward (with clipping) and optimizer, tokens a second, peak GiB and losses."""
    torch.cuda.reset_peak_memory_stats()
    times: list[list[float]] = []
    losses, tokens = [], 0
    for number in range(WARM_UP + count):
        samples = next(packs)
        pack = side.pack(samples)
        tokens = sum(len(sample["input_ids"]) - 1 for sample in samples)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize()
        marks[0].record()
        loss = side.loss(pack)
        marks[1].record()
        for optimizer in side.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(side.model.parameters(), CLIP)
        marks[2].record()
        for optimizer in side.optimizers:
            optimizer.step()
        marks[3].record()
        torch.cuda.synchronize()
        losses.append(loss.item())
        if number >= WARM_UP:
            times.append([marks[i].elapsed_time(marks[i + 1]) for i in range(3)] + [marks[0].elapsed_time(marks[3])])
    forward, backward, optimizer_ms, step = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "forward_ms": round(forward, 1),
        "backward_ms": round(backward, 1),
        "optimizer_ms": round(optimizer_ms, 1),
        "step_ms": spread([row[3] for row in times]),
        "tokens_per_s": round(tokens / step * 1e3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
    }


def gemm_tflops() -> float:
    """What a bare bf16 product of the step's size reaches."""
    a = torch.randn(8192, 7168, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(7168, 12288, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(50):
        a @ b
    torch.cuda.synchronize()
    return 2 * 8192 * 7168 * 12288 * 50 / (time.perf_counter() - started) / 1e12


def compare(what: str) -> None:
    """Both sides, one after the other, from the same weights and on the same samples."""
    optimizer = "muon" if what == "muon" else "adamw"
    ceiling = gemm_tflops()
    sides: dict[str, Callable[[Any], Any]] = {
        "peer": lambda model: Speculators(model, optimizer),
        "ours": lambda model: Ours(model, optimizer, use_fp8=what == "fp8"),
    }
    if what == "muon":
        sides["ours_by_period"] = lambda model: Ours(model, "muon", period=MUON_PERIOD)
    found = {}
    for name, side in sides.items():
        torch.cuda.empty_cache()
        model = draft_model()
        found[name] = timed_steps(side(model), documents(model.lm_head.weight.float(), seed=1))
        del model
    peak = ceiling * 1e3 / GFLOP_PER_TOKEN_OF_SPECULATORS
    notes = [
        f"bare bf16 product {ceiling:.0f} TFLOP/s; at speculators' {GFLOP_PER_TOKEN_OF_SPECULATORS} GFLOP a token "
        f"that would be {peak:.0f} tok/s: speculators reaches {found['peer']['tokens_per_s'] / peak:.2f} of it, "
        f"ours {found['ours']['tokens_per_s'] / peak:.2f} (it does less arithmetic)",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; pack {PACK}, documents of {DOCUMENT}",
    ]
    ours = {name: found[name] for name in found if name != "peer"}
    ratio = {name: round(side["tokens_per_s"] / found["peer"]["tokens_per_s"], 3) for name, side in ours.items()}
    write_result(
        f"train_step_{what}",
        module="train_step",
        ours=ours,
        peer=found["peer"],
        ratio=ratio,
        unit="tokens/s",
        notes=notes,
    )


def curve(steps: int = 80) -> None:
    """The loss after the same tokens, bf16 beside fp8 and AdamW beside both Muons, from the same weights."""
    curves = {}
    ways: dict[str, dict[str, Any]] = {
        "bf16": {"optimizer": "adamw"},
        "fp8": {"optimizer": "adamw", "use_fp8": True},
        "muon": {"optimizer": "muon"},
        f"muon_period_{MUON_PERIOD}": {"optimizer": "muon", "period": MUON_PERIOD},
    }
    for name, arguments in ways.items():
        torch.cuda.empty_cache()
        model = draft_model()
        side = Ours(model, **arguments)
        packs = documents(model.lm_head.weight.float(), seed=2)
        losses = []
        for _ in range(steps):
            loss = side.loss(side.pack(next(packs)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for optimizer in side.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        curves[name] = losses
        print(name, [round(value, 4) for value in losses[::10]], flush=True)
        del model, side
    last = {name: statistics.mean(values[-20:]) for name, values in curves.items()}
    write_result(
        "train_step_curve",
        module="train_step",
        ours={name: [round(value, 4) for value in values] for name, values in curves.items() if name != "bf16"},
        peer={"bf16": [round(value, 4) for value in curves["bf16"]]},
        ratio={
            "fp8_over_bf16_mean_of_last_20": round(last["fp8"] / last["bf16"], 4),
            "muon_period_over_muon_mean_of_last_20": round(last[f"muon_period_{MUON_PERIOD}"] / last["muon"], 4),
        },
        unit="loss",
        notes=[f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {steps} steps of {PACK} tokens"],
    )


def memory() -> None:
    """Peak memory and speed by length of the pack, one document each."""
    table = {}
    for length in (4096, 8192, 16384, 20480):
        for recompute in (False, True):
            torch.cuda.empty_cache()
            model = draft_model()
            side = Ours(model, "adamw", recompute=recompute, pack=length)
            packs = documents(model.lm_head.weight.float(), seed=3, pack=length, length=length)
            row = timed_steps(side, packs, count=3)
            name = f"{length}{' recomputed' if recompute else ''}"
            table[name] = {key: row[key] for key in ("peak_gib", "tokens_per_s")}
            print(name, table[name], flush=True)
            del model, side
    write_result(
        "train_step_memory",
        module="train_step",
        ours=table,
        peer={},
        ratio={},
        unit="GiB",
        notes=[torch.cuda.get_device_name()],
    )


def profile() -> None:
    """Where the time of our step goes, by kernel."""
    for use_fp8 in (False, True):
        torch.cuda.empty_cache()
        model = draft_model()
        side = Ours(model, "adamw", use_fp8=use_fp8)
        packs = documents(model.lm_head.weight.float(), seed=4)
        made = [side.pack(next(packs)) for _ in range(2)]
        for pack in made * 2:
            side.loss(pack).backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for pack in made:
                side.loss(pack).backward()
            torch.cuda.synchronize()
        rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows)
        print(f"fp8={use_fp8}: {total / 2e3:.1f} ms a step")
        for row in rows[:28]:
            share = 100 * row.self_device_time_total / total
            print(
                f"{row.self_device_time_total / 2e3:8.2f} ms {share:5.1f} % {row.count // 2:4d} {row.key[:100]}",
                flush=True,
            )
        del model, side


def main() -> None:
    """One or several of the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measurements = {
        "bf16": lambda: compare("bf16"),
        "fp8": lambda: compare("fp8"),
        "muon": lambda: compare("muon"),
        "curve": curve,
        "memory": memory,
        "profile": profile,
    }
    parser.add_argument("what", nargs="+", choices=measurements)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    for what in arguments.what:
        measurements[what]()


if __name__ == "__main__":
    main()
