"""Contract of Muon: the update of torch.optim.Muon, whole or in blocks, with a state that a training can resume from.

Reference: torch's own Newton-Schulz iterations in bfloat16, and the same polynomial in float64.
"""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as torchs

from eagle3_train import muon
from eagle3_train.muon import Muon, orthogonalised, orthogonalised_by_block
from eagle3_train.symmetric import symmetric_product

QUINTIC = (3.4445, -4.7750, 2.0315)
SHAPES = [(64, 300), (128, 200), (256, 128), (1, 40), (40, 1)]


def drawn(shape: tuple[int, int], kind: str = "normal", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(shape, generator=generator)
    if kind == "nearly of rank 6":
        wide = torch.randn(shape[0], 6, generator=generator) @ torch.randn(6, shape[1], generator=generator)
        return wide + 0.01 * matrix
    return matrix


def in_float64(gradient: Tensor) -> Tensor:
    rows = gradient.double() if gradient.shape[0] <= gradient.shape[1] else gradient.double().t()
    rows = rows / rows.norm()
    for _ in range(5):
        gram = rows @ rows.t()
        rows = QUINTIC[0] * rows + (QUINTIC[1] * gram + QUINTIC[2] * gram @ gram) @ rows
    return rows if gradient.shape[0] <= gradient.shape[1] else rows.t()


def in_torch(gradient: Tensor) -> Tensor:
    return torchs(gradient.clone(), QUINTIC, 5, 1e-7)


def far(one: Tensor, other: Tensor) -> float:
    """Distance as a share of the second."""
    return float((one.double() - other.double()).norm() / other.double().norm())


# ---- one direction


@pytest.mark.parametrize("shape", SHAPES)
def test_the_direction_is_five_quintic_iterations(shape: tuple[int, int]) -> None:
    gradient = drawn(shape)
    ours = orthogonalised(gradient)
    assert ours.dtype == torch.bfloat16
    assert far(ours, in_float64(gradient)) < 0.05
    assert far(ours, in_torch(gradient)) < 0.05


def test_a_square_matrix_whose_smallest_values_vanish_is_a_little_further_off() -> None:
    assert far(orthogonalised(drawn((96, 96))), in_float64(drawn((96, 96)))) < 0.1


@pytest.mark.parametrize("shape", [(64, 300), (128, 200), (256, 128)])
def test_small_singular_values_are_no_worse_than_torchs(shape: tuple[int, int]) -> None:
    """The worst case of the Gram matrix in bfloat16, where torch's own is a third off."""
    gradient = drawn(shape, "nearly of rank 6")
    exact = in_float64(gradient)
    assert far(orthogonalised(gradient), exact) < 1.05 * far(in_torch(gradient), exact)
    assert float(torch.linalg.svdvals(orthogonalised(gradient).float())[0]) < 1.25


def test_singular_values_come_near_one() -> None:
    for shape in SHAPES:
        values = torch.linalg.svdvals(orthogonalised(drawn(shape)).float())
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.25


def test_the_direction_does_not_depend_on_the_gradients_size() -> None:
    gradient = drawn((64, 96))
    assert torch.equal(orthogonalised(gradient * 2**-20), orthogonalised(gradient))
    assert torch.equal(orthogonalised(gradient * 2**20), orthogonalised(gradient))


@pytest.mark.parametrize("by", [orthogonalised, orthogonalised_by_block])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 48), (48, 32)])
def test_the_gradient_is_left_as_it_was(by, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gradient = drawn(shape).to(dtype)
    before = gradient.clone()
    by(gradient)
    assert torch.equal(gradient, before)


@pytest.mark.parametrize("by", [orthogonalised, orthogonalised_by_block])
def test_no_gradient_no_direction(by) -> None:
    assert torch.equal(by(torch.zeros(8, 12)), torch.zeros(8, 12).bfloat16())


@pytest.mark.parametrize("shape", [(40, 100), (100, 40)])
def test_blocks_of_the_smaller_side_are_orthogonalised_each_on_its_own(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "_BLOCK_ROWS", 16)
    gradient = drawn(shape)
    side = 0 if shape[0] < shape[1] else 1
    expected = torch.cat([in_float64(block) for block in gradient.split(16, side)], side)
    assert far(orthogonalised_by_block(gradient), expected) < 0.05
    assert far(orthogonalised_by_block(gradient), in_float64(gradient)) > 0.2


def test_a_matrix_of_one_block_is_orthogonalised_whole() -> None:
    gradient = drawn((200, 90))
    assert torch.equal(orthogonalised_by_block(gradient), orthogonalised(gradient))


# ---- the optimizer


def walk(optimizer: torch.optim.Optimizer, parameters: list[Tensor], steps: range, scale: float = 1.0) -> None:
    """A step for each number, with a gradient of that number's own."""
    for step in steps:
        for place, parameter in enumerate(parameters):
            parameter.grad = drawn(tuple(parameter.shape), seed=100 * place + step) * scale * (1 + step)
        optimizer.step()


def parameters_of(*shapes: tuple[int, int]) -> list[Tensor]:
    return [torch.nn.Parameter(drawn(shape, seed=7)) for shape in shapes]


@pytest.mark.parametrize("shape", [(64, 160), (160, 64)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_those_of_torchs_muon_scaled_as_adamws(shape: tuple[int, int], decay: float) -> None:
    (ours,), (theirs,) = parameters_of(shape), parameters_of(shape)
    start = ours.detach().clone()
    walk(Muon([ours], lr=0.05, weight_decay=decay), [ours], range(6))
    walk(torch.optim.Muon([theirs], lr=0.05, weight_decay=decay, adjust_lr_fn="match_rms_adamw"), [theirs], range(6))
    assert far(ours.detach() - start, theirs.detach() - start) < 0.045


def test_defaults_are_torchs() -> None:
    (parameter,) = parameters_of((4, 4))
    theirs = torch.optim.Muon([parameter]).defaults
    assert {name: Muon([parameter], lr=1.0).defaults[name] for name in ("weight_decay", "momentum")} == {
        name: theirs[name] for name in ("weight_decay", "momentum")
    }


def test_an_update_is_as_large_as_adamws() -> None:
    """A root mean square of about 0.2 * lr for a matrix of any shape."""
    for shape in [(64, 256), (256, 64), (128, 128)]:
        (parameter,) = parameters_of(shape)
        start = parameter.detach().clone()
        walk(Muon([parameter], lr=0.01, weight_decay=0.0), [parameter], range(1))
        moved = float((parameter.detach() - start).square().mean().sqrt())
        assert moved == pytest.approx(0.2 * 0.01, rel=0.25)


def test_a_step_leaves_the_gradient_as_it_was() -> None:
    (parameter,) = parameters_of((8, 12))
    walk(Muon([parameter], lr=0.1), [parameter], range(1))
    assert torch.equal(parameter.grad, drawn((8, 12), seed=0))


def test_weight_decay_is_decoupled_from_the_gradient() -> None:
    (parameter,) = parameters_of((8, 12))
    start = parameter.detach().clone()
    walk(Muon([parameter], lr=0.1, weight_decay=0.5), [parameter], range(2), scale=0.0)
    torch.testing.assert_close(parameter.detach(), start * 0.95**2)


@pytest.mark.parametrize(("period", "whole"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (7, [0])])
def test_a_matrix_is_whole_on_every_kth_step_and_in_blocks_between(
    period: int, whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muon, "_BLOCK_ROWS", 16)
    (parameter,) = parameters_of((48, 80))
    optimizer = Muon([parameter], lr=0.01, weight_decay=0.0, momentum=0.0, period=period)
    for step in range(7):
        before = parameter.detach().clone()
        walk(optimizer, [parameter], range(step, step + 1))
        update = (before - parameter.detach()) / (0.01 * 0.2 * 80**0.5)
        as_whole, as_blocks = in_float64(parameter.grad), torch.cat([in_float64(b) for b in parameter.grad.split(16)])
        assert far(update, as_whole if step in whole else as_blocks) < 0.1, step


def test_every_matrix_of_a_group_counts_its_own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had no gradient at first begins with a whole step."""
    monkeypatch.setattr(muon, "_BLOCK_ROWS", 16)
    first, second = parameters_of((48, 80), (48, 80))
    optimizer = Muon([first, second], lr=0.01, weight_decay=0.0, period=2)
    before = second.detach().clone()
    walk(optimizer, [first], range(1))
    assert torch.equal(second, before)
    assert second not in optimizer.state
    walk(optimizer, [first, second], range(1, 2))
    assert [optimizer.state[parameter]["step"] for parameter in (first, second)] == [2, 1]


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("stopped", [1, 2, 5])
def test_a_resumed_optimizer_goes_on_bit_for_bit(period: int, stopped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_BLOCK_ROWS", 16)
    shapes = ((48, 80), (80, 48))
    undisturbed = parameters_of(*shapes)
    walk(Muon(undisturbed, lr=0.02, period=period), undisturbed, range(8))

    before = parameters_of(*shapes)
    optimizer = Muon(before, lr=0.02, period=period)
    walk(optimizer, before, range(stopped))
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), [parameter.detach() for parameter in before]], file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    after = [torch.nn.Parameter(weight) for weight in weights]
    resumed = Muon(after, lr=9.9, period=period)
    resumed.load_state_dict(state)
    walk(resumed, after, range(stopped, 8))
    assert all(torch.equal(one, other) for one, other in zip(after, undisturbed, strict=True))


def test_a_schedule_moves_the_learning_rate() -> None:
    (parameter,) = parameters_of((8, 12))
    optimizer = Muon([parameter], lr=1.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    walk(optimizer, [parameter], range(1))
    schedule.step()
    before = parameter.detach().clone()
    walk(optimizer, [parameter], range(1, 2))
    assert torch.equal(parameter, before)


# ---- symmetric products


def test_a_symmetric_product_is_the_plain_one() -> None:
    left = drawn((24, 40)).double()
    gram = left @ left.t()
    torch.testing.assert_close(symmetric_product(left, left), gram)
    torch.testing.assert_close(symmetric_product(left, left, alpha=-2), -2 * gram)
    torch.testing.assert_close(
        symmetric_product(gram, gram, gram, alpha=2.5, beta=-3.5), 2.5 * gram @ gram - 3.5 * gram
    )
