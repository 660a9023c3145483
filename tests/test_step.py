"""Contract of the training step: speculators' loss and gradients, without its arithmetic, and no word between the
documents of a pack.

Reference: speculators' own collating and forward, in float32 on a CPU, and counts written out row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8
from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import LossConfig, resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import CollateFn
from torch import Tensor
from transformers import LlamaConfig

from eagle3_train.expected import names_of_sums, steps_begun, summarise
from eagle3_train.packs import Pack, lay_out, rows_kept
from eagle3_train.step import TrainingStep

HIDDEN, VOCABULARY, STEPS = 64, 96, 3
YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 8.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.2,
}  # fmt: skip
Sample = dict[str, Tensor]


def draft(
    *,
    kv_heads: int = 2,
    layers: int = 1,
    window: int | None = None,
    implementation: str = "sdpa",
    vocabulary: int = 48,
    rope: dict[str, Any] | None = None,
    hidden_act: str = "silu",
    biased: bool = False,
    std: float = 0.15,
    **settings: bool,
) -> Eagle3DraftModel:
    """A small draft with random weights, frozen where a real one is."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=512,
        rms_norm_eps=1e-5, rope_parameters=rope or {"rope_type": "default", "rope_theta": 50000.0},
        hidden_act=hidden_act, mlp_bias=biased,
    )  # fmt: skip
    shape._attn_implementation = implementation
    shape.layer_types = ["sliding_attention" if window else "full_attention"] * layers
    shape.sliding_window = window
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=shape,
            draft_vocab_size=vocabulary,
            eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["None"]),
            ),
            **{"norm_before_residual": True, **settings},
        )
    )
    kept = torch.arange(VOCABULARY) < vocabulary
    model.load_vocab_mappings(kept, torch.zeros(vocabulary, dtype=torch.long))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
        else:
            parameter.data.copy_(1 + 0.2 * torch.randn_like(parameter))
    for frozen in (model.lm_head, model.verifier_lm_head, model.embed_tokens, model.verifier_norm):
        frozen.weight.requires_grad_(False)
    return model


def sample(mask: Sequence[int], seed: int) -> Sample:
    """A document of random tokens and states."""
    generator = torch.Generator().manual_seed(seed)
    length = len(mask)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (length,), generator=generator),
        "hidden_states": torch.randn(length, 3 * HIDDEN, generator=generator),
        "verifier_last_hidden_states": torch.randn(length, HIDDEN, generator=generator),
        "loss_mask": torch.tensor(mask),
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }


def samples_of(*masks: Sequence[int]) -> list[Sample]:
    return [sample(mask, seed) for seed, mask in enumerate(masks)]


# One turn, two turns, a prompt alone, and an answer that does not reach the end.
SAMPLES = samples_of([0] * 5 + [1] * 15, [0] * 9 + [1] * 6 + [0] * 7 + [1] * 11, [0] * 12, [0] * 4 + [1] * 9 + [0] * 4)


def step_of(
    model: Eagle3DraftModel, loss: str | LossConfig = "kl_div", decay: float = 1.0, **settings: Any
) -> TrainingStep:
    config = resolve_loss_config(loss, "eager") if isinstance(loss, str) else loss
    settings = {"dtype": torch.float32, **settings}
    return TrainingStep(model, ttt_steps=STEPS, loss_config=config, loss_decay=decay, **settings)


def pack_of(
    samples: Sequence[Sample], tokens: int = 1000, whole: bool = False, dtype: torch.dtype = torch.float32
) -> Pack:
    kept = rows_kept([len(item["input_ids"]) for item in samples], tokens)
    states = [stored(item)[:rows] for item, rows in zip(samples, kept, strict=True)]
    ids, masks = ([item[name] for item in samples] for name in ("input_ids", "loss_mask"))
    return lay_out(ids, masks, torch.cat(states).to(dtype), pack_tokens=tokens, ttt_steps=STEPS, whole=whole)


def stored(item: Sample) -> Tensor:
    """[L, A + 1, H]"""
    return torch.cat([item["hidden_states"], item["verifier_last_hidden_states"]], dim=1).unflatten(1, (-1, HIDDEN))


def gradients(model: Eagle3DraftModel, loss: Tensor) -> dict[str, Tensor]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))


def of_speculators(
    model: Eagle3DraftModel, samples: Sequence[Sample], loss: str, decay: float, tokens: int
) -> tuple[Tensor, dict[str, Any]]:
    collate = CollateFn(tokens, HIDDEN, 3, dtype=torch.float32, preprocess=shift_batch)
    batch = {name: value for name, value in collate([dict(item) for item in samples]).items() if torch.is_tensor(value)}
    arguments, _ = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn=loss, loss_implementation="eager", ttt_steps=STEPS, ttt_step_loss_decay=decay
    )
    _, total, metrics = model(**batch, **arguments)
    return total, metrics


def assert_same(
    model: Eagle3DraftModel,
    samples: Sequence[Sample] = SAMPLES,
    loss: str = "kl_div",
    decay: float = 1.0,
    **settings: Any,
) -> None:
    """Loss of every TTT step, and every trained parameter's gradient."""
    whole = len(model.layers) > 1
    theirs, metrics = of_speculators(model, samples, loss, decay, 100)
    expected = gradients(model, theirs)
    ours, sums = step_of(model, loss, decay, **settings)(pack_of(samples, whole=whole))
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    for step in range(STEPS):
        assert float(sums[f"loss_{step}"]) == pytest.approx(float(metrics[f"loss_{step}_sum"]), rel=1e-5)
    found = gradients(model, ours)
    assert len(found) >= 12
    far = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    assert {name: distance for name, distance in far.items() if not distance < 1e-5} == {}


# ---- the same function as speculators'


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="two key heads"),
        pytest.param({"kv_heads": 4}, id="a key head for each"),
        pytest.param({"kv_heads": 1}, id="one key head"),
        pytest.param({"window": 5}, id="sliding window"),
        pytest.param({"window": 1}, id="a window of one"),
        pytest.param({"norm_before_residual": False}, id="residual before the norm"),
        pytest.param({"norm_before_fc": True, "norm_output": True}, id="norm before fc, output normed"),
        pytest.param({"fc_norm": True, "norm_output": True}, id="a norm for each captured layer"),
        pytest.param({"norm_before_fc": True, "norm_before_residual": False}, id="norm before fc"),
        pytest.param({"layers": 2}, id="two layers"),
        pytest.param({"layers": 2, "window": 7, "norm_before_residual": False}, id="two layers in a window"),
        pytest.param({"rope": YARN}, id="yarn"),
    ],
)
def test_loss_and_gradients_are_speculators(shape: dict[str, Any], implementation: str) -> None:
    assert_same(draft(implementation=implementation, **shape))


@pytest.mark.parametrize(
    "loss",
    [
        "kl_div",
        "ce",
        "tv",
        "rkl",
        "nla",
        '{"ce": 0.3, "tv": 0.7}',
        '{"kl_div": 1.0, "lk_hybrid": 0.5, "jsd": 2.0}',
    ],
)
def test_every_loss_and_mix_is_speculators(loss: str) -> None:
    assert_same(draft(), loss=loss, decay=0.8)


@pytest.mark.parametrize("decay", [0.5, 1.0, 0.0])
def test_later_steps_weigh_less(decay: float) -> None:
    assert_same(draft(), decay=decay)


@pytest.mark.parametrize("tokens", [26, 38])
def test_what_is_cut_off_has_no_part_in_the_loss(tokens: int) -> None:
    """The second document in its prompt, or between its turns."""
    model = draft()
    cut = {name: value[: tokens - 20] for name, value in SAMPLES[1].items()} | {"lengths": torch.tensor([tokens - 20])}
    ours, _ = step_of(model)(pack_of(SAMPLES, tokens))
    theirs, _ = of_speculators(model, [SAMPLES[0], cut], "kl_div", 1.0, 100)
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)


def test_states_stored_in_fp8_are_used_as_speculators_restores_them() -> None:
    model = draft()
    quantised, scales = quantize_tensor_to_fp8(stored(SAMPLES[1]))
    ids, masks = [SAMPLES[1]["input_ids"]], [SAMPLES[1]["loss_mask"]]
    losses = [
        step_of(model)(lay_out(ids, masks, *states, pack_tokens=100, ttt_steps=STEPS))[0].detach()
        for states in ((quantised, scales), (dequantize_fp8_tensor(quantised, scales, torch.float32),))
    ]
    assert torch.equal(*losses)


def test_one_document_alone_has_the_same_loss() -> None:
    assert_same(draft(), SAMPLES[1:2])
    assert_same(draft(), samples_of([0, 1] * 20))


@pytest.mark.parametrize("layers", [1, 2])
def test_recomputing_changes_no_bit(layers: int) -> None:
    model = draft(layers=layers)
    pack = pack_of(SAMPLES, whole=layers > 1)
    kept, again = (step_of(model, recompute=recompute)(pack)[0] for recompute in (False, True))
    assert torch.equal(kept, again)
    found, expected = gradients(model, again), gradients(model, kept)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_recomputed_step_keeps_less_for_the_gradient() -> None:
    def kept(recompute: bool) -> int:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            step_of(draft(), recompute=recompute)(pack_of(SAMPLES))
        return sum(sizes)

    assert kept(True) < 0.7 * kept(False)


def test_computing_every_row_changes_nothing() -> None:
    """With one layer the prompts' outputs are read by no loss."""
    model = draft()
    lean, whole = (step_of(model)(pack_of(SAMPLES, whole=every))[0] for every in (False, True))
    torch.testing.assert_close(lean, whole)
    torch.testing.assert_close(gradients(model, lean), gradients(model, whole), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [{}, {"fc_norm": True}, {"layers": 2}])
@pytest.mark.parametrize(("use_fp8", "share"), [(False, 0.03), (True, 0.15)])
def test_in_16_and_8_bits_loss_and_gradients_are_near(shape: dict[str, Any], use_fp8: bool, share: float) -> None:
    """Weights as small as a real draft's: large ones multiply the rounding."""
    model, whole = draft(std=0.05, **shape), "layers" in shape
    exact = step_of(model)(pack_of(SAMPLES, whole=whole))[0]
    expected = gradients(model, exact)
    pack = pack_of(SAMPLES, whole=whole, dtype=torch.bfloat16)
    ours = step_of(model, dtype=torch.bfloat16, use_fp8=use_fp8)(pack)[0]
    assert ours.dtype == torch.float32
    assert float(ours.detach()) == pytest.approx(float(exact.detach()), rel=0.01)
    found = gradients(model, ours)
    assert {gradient.dtype for gradient in found.values()} == {torch.float32}
    far = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    assert {name: distance for name, distance in far.items() if not distance < share} == {}


# ---- what speculators does not do: a document that is learnt from its first token


def test_a_document_learnt_from_its_first_token_is_guessed_by_no_other() -> None:
    """speculators lets the rows before it, another document's, guess its first tokens; here the loss of a pack is the
    mean over its documents' own guesses."""
    samples = samples_of([0] * 5 + [1] * 8, [0] + [1] * 9, [1] * 12)
    model = draft()
    _, sums = step_of(model)(pack_of(samples))
    alone = [of_speculators(model, [item], "kl_div", 1.0, 100)[1] for item in samples]
    _, together = of_speculators(model, samples, "kl_div", 1.0, 100)
    for step in range(STEPS):
        guesses = [int(item["loss_mask"][1 + step :].sum()) for item in samples]
        losses = [float(metrics[f"loss_{step}_sum"]) for metrics in alone]
        mean = sum(count * loss for count, loss in zip(guesses, losses, strict=True)) / sum(guesses)
        assert float(sums[f"loss_{step}"]) == pytest.approx(mean, rel=1e-5)
        theirs = float(together[f"loss_{step}_sum"])
        assert (theirs == pytest.approx(mean, rel=1e-5)) == (step == 0)


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("masks", [([0] * 12,), ([1],), ([1], [0] * 5), ([0, 1],), ([0], [0] * 6, [0, 0, 1])])
def test_a_pack_with_little_or_nothing_to_learn_has_a_finite_gradient_for_every_parameter(
    masks: tuple[list[int], ...], use_fp8: bool
) -> None:
    """Several GPUs wait for every parameter's gradient."""
    dtype = torch.bfloat16 if use_fp8 else torch.float32
    model = draft()
    loss, sums = step_of(model, dtype=dtype, use_fp8=use_fp8)(pack_of(samples_of(*masks), dtype=dtype), measure=True)
    learnt = any(1 in mask[1:] for mask in masks)
    assert (float(loss.detach()) > 0) == learnt
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(model, loss).values())
    assert float(sums["drafts_0"]) == learnt


# ---- no word between documents


def recorded(model: Eagle3DraftModel, pack: Pack, **settings: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The loss, and what it read: logits and targets of each TTT step."""
    read: list[tuple[Tensor, Tensor]] = []
    kl_div = resolve_loss_config("kl_div", "eager")["kl_div"][0]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        read.append((logits[0].detach(), targets[0]))
        return kl_div(logits, targets)

    return step_of(model, {"kl_div": (loss, 1.0)}, **settings)(pack)[0], read


def documents_of(pack: Pack, step: int) -> Tensor:
    """[n_step], the document of each guess."""
    return torch.bucketize(pack.active[pack.starts[step]], pack.cu_rows[1:].long(), right=True)


isolation = pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ({}, {}),
        ({"window": 5}, {}),
        ({"layers": 2}, {}),
        ({}, {"recompute": True}),
        ({"kv_heads": 4, "fc_norm": True}, {"dtype": torch.bfloat16}),
        ({}, {"dtype": torch.bfloat16, "use_fp8": True}),
    ],
)


@isolation
@pytest.mark.parametrize("other", range(len(SAMPLES)))
def test_another_documents_tokens_and_states_change_no_bit(
    shape: dict[str, Any], settings: dict[str, Any], other: int
) -> None:
    model = draft(**shape)
    dtype = settings.get("dtype", torch.float32)
    changed = list(SAMPLES)
    changed[other] = sample(SAMPLES[other]["loss_mask"].tolist(), seed=77)
    changed[other]["hidden_states"] *= 50
    seen = []
    for samples in (SAMPLES, changed):
        pack = pack_of(samples, whole="layers" in shape, dtype=dtype)
        pack.states.requires_grad_()
        loss, read = recorded(model, pack, **settings)
        (of_states,) = torch.autograd.grad(loss, pack.states)
        seen.append((pack, read, of_states))
    (pack, before, gradient_before), (_, after, gradient_after) = seen
    for step in range(STEPS):
        same = documents_of(pack, step) != other
        assert torch.equal(before[step][0][same], after[step][0][same])
        assert torch.equal(before[step][1][same], after[step][1][same])
        assert same.all() or not torch.equal(before[step][0][~same], after[step][0][~same])
    rows = torch.ones(pack.tokens, dtype=torch.bool)
    rows[slice(*pack.cu_rows[other : other + 2].tolist())] = False
    assert torch.equal(gradient_before[rows], gradient_after[rows])
    assert gradient_before[rows].any()


@isolation
@pytest.mark.parametrize("only", [0, 1, 3])
def test_the_loss_of_one_document_has_no_gradient_in_another(
    shape: dict[str, Any], settings: dict[str, Any], only: int
) -> None:
    samples = [dict(item) for item in SAMPLES]
    for place, item in enumerate(samples):
        if place != only:
            item["loss_mask"] = torch.zeros_like(item["loss_mask"])
    pack = pack_of(samples, whole=True, dtype=settings.get("dtype", torch.float32))
    pack.states.requires_grad_()
    loss, _ = recorded(draft(**shape), pack, **settings)
    (of_states,) = torch.autograd.grad(loss, pack.states)
    rows = torch.zeros(pack.tokens, dtype=torch.bool)
    rows[slice(*pack.cu_rows[only : only + 2].tolist())] = True
    assert not of_states[~rows].any()
    assert of_states[rows].any()


@pytest.mark.parametrize("shape", [{}, {"window": 5}, {"layers": 2}])
def test_the_order_of_documents_in_a_pack_does_not_matter(shape: dict[str, Any]) -> None:
    model = draft(**shape)
    losses = [
        step_of(model)(pack_of([SAMPLES[place] for place in places], whole="layers" in shape))[0]
        for places in ([0, 1, 2, 3], [3, 1, 0, 2])
    ]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(*(gradients(model, loss) for loss in losses), rtol=1e-4, atol=1e-6)


def test_a_guess_does_not_see_the_tokens_it_is_to_guess() -> None:
    """Change the last token: no guess of it, nor any before it, moves."""
    model = draft()
    item = sample([0] * 6 + [1] * 10, 1)
    changed = {**item, "input_ids": item["input_ids"].clone(), "hidden_states": item["hidden_states"].clone()}
    changed["input_ids"][-1] = (changed["input_ids"][-1] + 1) % VOCABULARY
    changed["hidden_states"][-2:] = 9.0
    pack = pack_of([item])
    _, before = recorded(model, pack)
    _, after = recorded(model, pack_of([changed]))
    for step in range(STEPS):
        # Row 14 has the state before the last token, and that token from step 0 on; row 13 reads it in step 1.
        old = pack.active[pack.starts[step]] + step < 14
        assert torch.equal(before[step][0][old], after[step][0][old])
        assert not torch.equal(before[step][0][~old], after[step][0][~old])


# ---- what is refused


@pytest.mark.parametrize("settings", [{"hidden_act": "gelu"}, {"biased": True}])
def test_a_draft_of_another_kind_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a Llama draft with SiLU and no biases is expected"):
        step_of(draft(**settings))


# ---- what validation measures


@contextmanager
def heard(module: torch.nn.Module) -> Iterator[list[Tensor]]:
    """What a module returns, call by call."""
    outputs: list[Tensor] = []
    hook = module.register_forward_hook(lambda *call: outputs.append(call[2][0]))
    yield outputs
    hook.remove()


def plain_counts(model: Eagle3DraftModel, samples: Sequence[Sample]) -> dict[str, float]:
    """Drafts from every row that is the verifier's own, and verifier steps one after the other, followed token by
    token, from speculators' own logits of each document alone."""
    sums = dict.fromkeys(names_of_sums(STEPS), 0.0)
    for item in samples:
        with torch.no_grad(), heard(model.lm_head) as logits, heard(model.verifier_lm_head) as targets:
            of_speculators(model, [item], "kl_div", 1.0, len(item["input_ids"]) + STEPS)
        own = item["loss_mask"][1:].tolist()
        right_until, chance_until = [[0.0] * STEPS for _ in own], [[0.0] * STEPS for _ in own]
        for start in range(len(own)):
            right, accepted = True, 1.0
            for step in range(STEPS):
                if start + step >= len(own) or not all(own[start : start + step + 1]):
                    break
                q, p = logits[step][start].softmax(-1), targets[0][start + step].softmax(-1)
                sums[f"drafts_{step}"] += 1
                sums[f"drafts_right_before_{step}"] += right
                right = right and bool(q.argmax() == p.argmax())
                accepted *= sum(min(float(one), float(other)) for one, other in zip(q, p, strict=True))
                sums[f"drafts_right_{step}"] += right
                right_until[start][step], chance_until[start][step] = float(right), accepted
        for kind, reached in (("greedy", right_until), ("sampled", chance_until)):
            for start, begins in enumerate(plain_steps(own, reached)):
                sums[f"{kind}_steps"] += begins
                for step in range(STEPS):
                    sums[f"{kind}_accepted_{step}"] += begins * reached[start][step]
    return sums


def plain_steps(own: Sequence[int], reached: Sequence[Sequence[float]]) -> list[float]:
    """The chance that a verifier step begins at each row, row after row."""
    begins = [0.0] * (len(own) + STEPS + 1)
    for row, mine in enumerate(own):
        if not mine:
            begins[row] = 0.0
            continue
        if row == 0 or not own[row - 1]:
            begins[row] = 1.0
        until = [1.0, *reached[row], 0.0]
        for accepted in range(STEPS + 1):
            following = row + accepted + 1
            if all(own[row:following]):  # not into the next turn
                begins[following] += begins[row] * (until[accepted] - until[accepted + 1])
    return begins[: len(own)]


MANY = [sample(item["loss_mask"].tolist(), seed) for seed in range(100, 112) for item in SAMPLES]


@pytest.mark.parametrize("shape", [{}, {"layers": 2, "window": 7}])
def test_acceptance_is_that_of_drafts_followed_one_by_one(shape: dict[str, Any]) -> None:
    """Of a vocabulary of three, so that whole chains are right often enough to be counted."""
    model = draft(vocabulary=3, **shape)
    samples = [*MANY, *samples_of([1] * 9, [0, 1], [0, 1, 1], [0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 0])]
    _, sums = step_of(model)(pack_of(samples, 4000, whole="layers" in shape), measure=True)
    expected = plain_counts(model, samples)
    assert {name: float(value) for name, value in sums.items() if name in expected} == pytest.approx(expected, rel=1e-4)
    assert set(expected) < set(sums)
    assert expected["drafts_right_2"] > 10
    assert expected["greedy_steps"] != expected["sampled_steps"] < expected["drafts_0"]
    assert expected["drafts_0"] > expected["drafts_1"] > expected["drafts_2"]


def test_a_draft_ends_with_its_answer_and_its_document() -> None:
    """Answers of three and two tokens: guesses k have k fewer drafts each, and none begins in a prompt."""
    samples = samples_of([0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 0])
    _, sums = step_of(draft())(pack_of(samples), measure=True)
    assert [float(sums[f"drafts_{step}"]) for step in range(STEPS)] == [8, 5, 2]


def test_a_large_vocabularys_overlap_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pack = draft(), pack_of(SAMPLES)
    _, together = step_of(model)(pack, measure=True)
    monkeypatch.setattr("eagle3_train.expected._ROWS_AT_ONCE", 7)
    _, apart = step_of(model)(pack, measure=True)
    assert {name: float(value) for name, value in apart.items()} == pytest.approx(
        {name: float(value) for name, value in together.items()}
    )


def test_a_draft_that_says_what_the_verifier_says_is_always_accepted() -> None:
    """With heads of zero both say every token equally, and the same one first."""
    model = draft()
    model.lm_head.weight.zero_()
    model.verifier_lm_head.weight.zero_()
    loss, sums = step_of(model)(pack_of(SAMPLES), measure=True)
    metrics = summarise({name: float(value) for name, value in sums.items()}, 1, STEPS)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-5)
    for step in range(STEPS):
        assert metrics[f"full_acc_{step}"] == metrics[f"cond_acc_{step}"] == 1
    # Answers of 15, 6 and 11, and of 9 tokens: steps of four, of which the last ends with the answer.
    steps, accepted = 4 + 2 + 3 + 3, (3 * 3 + 3) + (3 + 2) + (3 + 3 + 3) + (3 + 3 + 1)
    for kind in ("", "sampled_"):
        assert metrics[f"expected_{kind}acceptance_length"] == pytest.approx(1 + accepted / steps)


def test_measuring_changes_neither_loss_nor_gradient() -> None:
    model, pack = draft(), pack_of(SAMPLES)
    plain, measured = (step_of(model)(pack, measure=measure)[0] for measure in (False, True))
    assert torch.equal(plain, measured)
    found, expected = gradients(model, measured), gradients(model, plain)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_steps_follow_each_other_as_a_server_takes_them() -> None:
    """Two answers. The first: four tokens that are guessed, then four that are not; the second is all guessed."""
    pack = pack_of(samples_of([0] * 3 + [1] * 9, [0] * 2 + [1] * 5))
    places = pack.starts[0].tolist()
    first, second = places[0], places[9]
    accepted = torch.zeros(STEPS, len(pack.active))
    for row, count in {first: 3, first + 1: 2, first + 2: 1, **{second + place: 3 for place in range(3)}}.items():
        accepted[:count, row] = 1
    expected = torch.zeros(len(pack.active))
    expected[[first, *range(first + 4, first + 9), second, second + 4]] = 1
    assert torch.equal(steps_begun(pack, accepted), expected)


def test_steps_end_by_chance() -> None:
    """Two guesses in three are accepted, each with its own chance of one half."""
    pack = pack_of(samples_of([0, 1, 1, 1]))
    accepted = torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.25, 0.0], [0.0, 0.0, 0.0]])
    begun = steps_begun(pack, torch.cat((accepted, torch.zeros(STEPS, len(pack.active) - 3)), dim=1))
    assert begun[:3].tolist() == [1, 0.5, 0.25 + 0.5 * 0.5]


def test_a_summary_divides_losses_by_packs_and_counts_by_drafts_and_steps() -> None:
    sums = {"loss": 6.0, "loss_0": 4.0, "loss_1": 2.0, "greedy_steps": 4.0, "sampled_steps": 5.0}
    sums |= {"drafts_0": 10.0, "drafts_right_before_0": 10.0, "drafts_right_0": 5.0}
    sums |= {"drafts_1": 8.0, "drafts_right_before_1": 4.0, "drafts_right_1": 1.0}
    sums |= {"greedy_accepted_0": 3.0, "greedy_accepted_1": 1.0, "sampled_accepted_0": 2.0, "sampled_accepted_1": 1.0}
    assert summarise(sums, 2, 2) == {
        "loss": 3.0, "loss_0": 2.0, "loss_1": 1.0,
        "full_acc_0": 0.5, "cond_acc_0": 0.5, "greedy_acc_0": 0.75, "sampled_acc_0": 0.4,
        "full_acc_1": 0.125, "cond_acc_1": 0.25, "greedy_acc_1": 0.25, "sampled_acc_1": 0.2,
        "expected_acceptance_length": 2.0, "expected_sampled_acceptance_length": pytest.approx(1.6),
    }  # fmt: skip


def test_a_summary_of_no_drafts_is_zero() -> None:
    _, sums = step_of(draft())(pack_of(samples_of([0] * 5)), measure=True)
    metrics = summarise({name: float(value) for name, value in sums.items()}, 1, STEPS)
    assert {name: value for name, value in metrics.items() if value} == {
        "expected_acceptance_length": 1.0, "expected_sampled_acceptance_length": 1.0
    }  # fmt: skip
