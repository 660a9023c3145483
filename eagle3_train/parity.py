"""The parity gate: are the captured states the verifier's own? Asked before anything is kept, and at every restart.

A few canaries (the beginnings of traces, chosen by id, fixed in the run) are captured alone, then together in a full
batch, and held against four things, of which a wrong capture breaks at least one:

final layer   `lm_head(norm(last))` must give the log-probs that the server itself gives for the same tokens. A state
              one layer early, another norm, the rows of another sample, or rows shifted from somewhere on do not.
batch         a token's states must not depend on what shares its batch.
depth         the nearer a layer is to the end, the more its state resembles the last one; the farther from the
              beginning, the less it resembles the token's embedding. Layers in another order do not.
reference     the canaries' first states, kept in the run: another verifier, other layers, another vLLM show here.

That id k is the stream ENTERING layer k holds for all layers or for none, because vLLM counts them in one loop: where
the last id n passes the first test, the auxiliary ids are counted from the same zero.

Shapes: T tokens, L captured layers, D hidden size, V vocabulary. Distances are of whole rows: |a - b| / |b|.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_train import verifier
from eagle3_train.asking import SetAside
from eagle3_train.config import FLOAT8, Config, Verifier
from eagle3_train.errors import PipelineError
from eagle3_train.run import JsonlLog, save_tensors, write_text

if TYPE_CHECKING:
    import torch

    from eagle3_train.capture import Captured, Capturer

CANARIES, REFERENCE, LOG = "canaries.json", "canary_states", "parity.jsonl"
_COUNT, _LONGEST = 8, 256
_ROWS_AT_ONCE = 256
# Differences of log-probs that rounding explains: bfloat16 logits of a large vocabulary lie 0.06 to 0.125 apart. Mean
# over half a canary; and of one token, whose state and log-prob come from the same forward pass. On the tiny verifier
# in bfloat16 rounding makes at most 0.012 and 0.055 (float8: 0.045 and 0.14), the least of the faults 0.5 on average.
_FINAL_GAP, _TOKEN_GAP = 0.15, 0.5
_FLOAT8_FINAL_GAP, _FLOAT8_TOKEN_GAP = 0.25, 1.5
# A row this far off is another state; a share of them may be, for an expert's tie falls either way in another batch.
_FAR_ROW, _FAR_SHARE = 0.15, 0.03
_FARTHEST_Z = 6.0
_GREEDY_GAP = 0.05


def allowed_gaps(storage_dtype: str) -> tuple[float, float]:
    """Allowed difference of log-probs, for states kept in this type: mean over tokens, and of one token."""
    if storage_dtype == FLOAT8:
        return _FLOAT8_FINAL_GAP, _FLOAT8_TOKEN_GAP
    return _FINAL_GAP, _TOKEN_GAP


class Head:
    """The verifier's final norm and head, as its own last step: RMSNorm, then `lm_head`, both in float32."""

    def __init__(self, settings: Verifier):
        weights = verifier.head_weights(settings)
        self._epsilon = verifier.text_config(settings).rms_norm_eps
        self._norm_D = weights[verifier.FINAL_NORM].float()
        self._head_VD = weights[verifier.LM_HEAD].float()
        self.embedding_VD = weights[verifier.EMBEDDING]

    def logits(self, last_TD: torch.Tensor) -> torch.Tensor:
        """[T, V] float32 of the last layer's outputs before the final norm."""
        import torch

        last_TD = last_TD.float()
        normed_TD = last_TD * torch.rsqrt(last_TD.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return (normed_TD * self._norm_D) @ self._head_VD.T

    def log_probs(self, last_TD: torch.Tensor, next_ids_T: torch.Tensor) -> torch.Tensor:
        """[T] float32, of the token `next_ids_T[t]` after the state `last_TD[t]`; some rows at a time."""
        import torch

        parts = [
            self.logits(rows).log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            for rows, ids in zip(last_TD.split(_ROWS_AT_ONCE), next_ids_T.split(_ROWS_AT_ONCE), strict=True)
        ]
        return torch.cat(parts)


def chosen(ids: Iterable[str]) -> list[str]:
    """Which traces, or prompts, the canaries are taken from: those of the lowest ids, which are hashes."""
    return sorted(ids)[:_COUNT]


def most_tokens(config: Config, longest: int) -> int:
    """Tokens whose states the gate may have on disk at a time, where no sample has more than `longest`."""
    return (2 * _COUNT + config.extraction.concurrency) * min(longest, _LONGEST)


async def pass_gate(capturer: Capturer, candidates: Sequence[list[int]], folder: Path, config: Config) -> None:
    """Capture the run's canaries and hold their states against what they must be; the numbers go to `parity.jsonl`.

    Args:
        capturer: of the server that will capture.
        candidates: token ids to take the canaries from, when the run has none yet.
        folder: of the stage; keeps canaries.json, canary_states/ and parity.jsonl.
        config: the run's configuration.

    Raises:
        PipelineError: the states are not the verifier's own, with the numbers.
    """
    canaries = _fixed(folder, candidates)
    head = Head(config.verifier)
    try:
        alone = [await _look(capturer, ids, f"canary-{number}", log_probs=True) for number, ids in enumerate(canaries)]
        copies = -(-config.extraction.concurrency // len(canaries))
        together = await asyncio.gather(
            *(
                _look(capturer, ids, f"canary-{number}-batch-{copy}")
                for copy in range(copies)
                for number, ids in enumerate(canaries)
            )
        )
    except SetAside as problem:
        raise _refusal(f"a canary's states are not sound: {problem}") from None
    row: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "canaries": len(canaries),
        "tokens": sum(map(len, canaries)),
        "vllm": alone[0].header.get("vllm"),
        "base": alone[0].header.get("base"),
    }
    allowed, _ = allowed_gaps(config.extraction.storage_dtype)
    with JsonlLog(folder / LOG) as log:
        try:
            row["final_gap"] = max(
                check_final_layer(head, captured.states, ids, captured.log_probs, allowed, f"canary {number}")
                for number, (captured, ids) in enumerate(zip(alone, canaries, strict=True))
                if captured.log_probs is not None
            )
            row["batch_distance"] = max(
                check_same(
                    captured.states, alone[place % len(canaries)].states, f"canary {place % len(canaries)}", "alone"
                )
                for place, captured in enumerate(together)
            )
            row["depth"] = check_depth(
                head, [captured.states for captured in alone], canaries, capturer.expected.layer_ids
            )
            row["reference_distance"] = _against_reference(folder / REFERENCE, [captured.states for captured in alone])
        except PipelineError as error:
            log.append({**row, "passed": False, "error": str(error)})
            raise
        log.append({**row, "passed": True})
    print(
        f"parity: {len(canaries)} canaries, log-probs within {row['final_gap']:.3f} of the server's, "
        f"alone and in a batch within {row['batch_distance']:.2%}"
    )


async def _look(capturer: Capturer, token_ids: list[int], name: str, *, log_probs: bool = False) -> Captured:
    answer = await capturer.prefill(token_ids, name, log_probs=log_probs)
    return await capturer.look(answer, token_ids)


def _fixed(folder: Path, candidates: Sequence[list[int]]) -> list[list[int]]:
    """The run's canaries; of `candidates` when it has none, and the same ever after."""
    path = folder / CANARIES
    if not path.exists():
        write_text(path, json.dumps([ids[:_LONGEST] for ids in candidates][:_COUNT]) + "\n")
    canaries: list[list[int]] = json.loads(path.read_text(encoding="utf-8"))
    return canaries


def check_final_layer(
    head: Head,
    states_TLD: torch.Tensor,
    token_ids: list[int],
    log_probs: torch.Tensor | None,
    allowed: float,
    whose: str,
) -> float:
    """Mean difference between the log-probs from the last state and the server's own [T - 1] of the same tokens.

    Raises:
        PipelineError: it is above `allowed`.
    """
    import torch

    assert log_probs is not None
    ours = head.log_probs(states_TLD[:-1, -1], torch.tensor(token_ids[1:]))
    gaps = (ours - log_probs).abs()
    # Of the worse half as well: what is right up to some row and wrong from there on must not pass as a small mean.
    mean, half = gaps.mean().item(), max(part.mean().item() for part in gaps.tensor_split(2) if len(part))
    if half > allowed or not gaps.isfinite().all():
        first = int((gaps > 2 * allowed).float().argmax())
        raise _refusal(
            f"{whose}: the head over the last state gives log-probs {mean:.3f} away from the server's own (mean of "
            f"{len(gaps)} tokens; {half:.3f} in the worse half, {gaps.max():.2f} at most; allowed are {allowed}), "
            f"first at row {first}. The last layer, the norm or the order of the rows is not the verifier's"
        )
    return half


def row_distances(ours_TLD: torch.Tensor, theirs_TLD: torch.Tensor) -> torch.Tensor:
    """[T, L] relative distances of two captures' rows."""
    ours, theirs = ours_TLD.float(), theirs_TLD.float()
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-12)


def check_same(ours_TLD: torch.Tensor, theirs_TLD: torch.Tensor, whose: str, other: str) -> float:
    """Median distance of the rows of two captures of the same tokens, in the layer where it is largest.

    Raises:
        PipelineError: more rows are far apart than ties between experts explain.
    """
    distance_TL = row_distances(ours_TLD, theirs_TLD)
    far_L = (distance_TL > _FAR_ROW).float().mean(0)
    # A single row of a short canary may be such a tie.
    if (far_L > max(_FAR_SHARE, 1.5 / len(distance_TL))).any():
        layer = int(far_L.argmax())
        rows = (distance_TL[:, layer] > _FAR_ROW).nonzero().flatten()
        raise _refusal(
            f"{whose}: its states are not those of the same tokens {other}: in captured layer number {layer + 1} of "
            f"{len(far_L)}, {len(rows)} of {len(distance_TL)} rows are more than {_FAR_ROW:.0%} apart, first row "
            f"{int(rows[0])} (distance {distance_TL[rows[0], layer]:.2f})"
        )
    return distance_TL.median(0).values.max().item()


def check_depth(
    head: Head, states: list[torch.Tensor], canaries: Sequence[list[int]], layer_ids: list[int]
) -> dict[str, list[float]]:
    """Median cosine of each layer's states to the last state and to the token's embedding, over all canaries.

    Raises:
        PipelineError: they do not rise towards the last layer, and fall from the embedding, in the layers' order.
    """
    import torch

    states_TLD = torch.cat([captured.float() for captured in states])
    embedded_TD = head.embedding_VD[torch.tensor([token for ids in canaries for token in ids])].float()
    cosine = torch.nn.functional.cosine_similarity
    to_last = cosine(states_TLD, states_TLD[:, -1:], dim=-1).median(0).values
    to_embedding = cosine(states_TLD, embedded_TD[:, None], dim=-1).median(0).values
    found = {
        "to_last": [round(x, 4) for x in to_last.tolist()],
        "to_embedding": [round(x, 4) for x in to_embedding.tolist()],
    }
    if (to_last.diff() <= 0).any() or to_embedding[:-1].argmax() != 0:
        raise _refusal(
            f"the captured layers {layer_ids} are not in this order: the cosine of their states to the last one is "
            f"{found['to_last']} and must rise, to the token's embedding {found['to_embedding']} and must be largest "
            "in the first"
        )
    return found


def _against_reference(folder: Path, states: list[torch.Tensor]) -> float | None:
    """Distance to the canaries' first states in this run; keeps them, and gives None, the first time."""
    import torch
    from safetensors.torch import load_file

    distances = []
    folder.mkdir(exist_ok=True)
    for number, captured in enumerate(states):
        path = folder / f"{number}.safetensors"
        if path.exists():
            first = load_file(path)["hidden_states"]
            distances.append(check_same(captured, first, f"canary {number}", "when this run began"))
        else:
            save_tensors(path, {"hidden_states": captured.to(torch.bfloat16)}, {})
    return max(distances, default=None)


def _refusal(what: str) -> PipelineError:
    return PipelineError(
        f"the parity gate is not passed, so nothing more is captured. {what}.\nTraining on such states shows only as "
        "acceptance near 1.0, days later. Is this vLLM one that the connector was tested with (connector.py), and is "
        "verifier.path what the server serves?"
    )


# What was sampled ----------------------------------------------------------------------------------------------------


def checked_places(token_ids: list[int], prompt_tokens: int, spread: int = 8) -> list[int]:
    """Places of sampled tokens in prompt + output that are checked: some of all, and three after each doubled token."""
    last = len(token_ids) - 1
    count = min(spread, last - prompt_tokens + 1)
    places = {prompt_tokens + (last - prompt_tokens) * step // max(count - 1, 1) for step in range(count)}
    for place in range(prompt_tokens, last):
        if token_ids[place] == token_ids[place - 1]:
            places.update(range(place + 1, min(place + 4, last + 1)))
    return sorted(places)


def check_sampled(
    head: Head,
    last_TD: torch.Tensor,
    token_ids: list[int],
    prompt_tokens: int,
    log_probs: Sequence[float],
    allowed: float,
) -> float:
    """Largest difference, at the checked places, between log-probs from the last states and those the server returned.

    Args:
        head: the verifier's.
        last_TD: last layer's states of prompt and output, without the last token.
        token_ids: prompt and output, whole.
        prompt_tokens: length of the prompt.
        log_probs: of each output token, as the server returned them.
        allowed: at most so much.

    Raises:
        SetAside: more; the states are not those that the tokens were sampled from.
    """
    import torch

    places = torch.tensor(checked_places(token_ids, prompt_tokens))
    ours = head.log_probs(last_TD[places - 1], torch.tensor(token_ids)[places])
    theirs = torch.tensor(log_probs)[places - prompt_tokens]
    gaps = (ours - theirs).abs()
    worst = int(gaps.argmax())
    if not gaps.max() <= allowed:
        raise SetAside(
            "its states are not those that its tokens were sampled from",
            f"token {int(places[worst])}: log-prob {ours[worst]:.3f} from the state, {theirs[worst]:.3f} from the "
            f"server, allowed difference {allowed}",
        )
    return gaps.max().item()


def sampling_z(head: Head, samples: Sequence[tuple[torch.Tensor, list[int], int, float, float]]) -> float:
    """How many standard deviations the sampled tokens' log-probs lie above what such sampling gives.

    At each place the states give the whole distribution q that was to be sampled from, so the log-prob of the drawn
    token has a known mean and variance; summed over hundreds of tokens, the score of true draws is a standard normal.
    A sampler that takes something else (another temperature, uninitialised memory, always the likeliest) is far out.

    Args:
        head: the verifier's.
        samples: last layer's states [T, D] of prompt and output without its last token, token ids of both, length of
            the prompt, temperature (above 0), top_p.
    """
    import torch

    above, variance = 0.0, 0.0
    for last_TD, token_ids, prompt_tokens, temperature, top_p in samples:
        drawn = torch.tensor(token_ids[prompt_tokens:])
        logs = (head.logits(last_TD[prompt_tokens - 1 :]) / temperature).log_softmax(-1).double()
        likely, order = logs.exp().sort(-1, descending=True)
        likely = torch.where(likely.cumsum(-1) - likely < top_p, likely, 0.0)
        q = torch.zeros_like(likely).scatter(-1, order, likely / likely.sum(-1, keepdim=True))
        mean = (q * logs).sum(-1)
        above += (logs.gather(-1, drawn[:, None])[:, 0] - mean).sum().item()
        variance += ((q * logs.pow(2)).sum(-1) - mean.pow(2)).clamp(min=0).sum().item()
    # An answer without any choice has no variance; a nat of slack keeps rounding from counting as one.
    return above / (variance + 1.0) ** 0.5


def greedy_gap(head: Head, last_TD: torch.Tensor, token_ids: list[int], prompt_tokens: int) -> float:
    """Mean log-prob that the sampled tokens lack to the likeliest ones; 0 for greedy output."""
    import torch

    logs = head.logits(last_TD[prompt_tokens - 1 :]).log_softmax(-1)
    drawn = logs.gather(-1, torch.tensor(token_ids[prompt_tokens:])[:, None])[:, 0]
    return (logs.max(-1).values - drawn).mean().item()


def check_sampling(z: float | None, gap: float | None) -> None:
    """Refuse a sampler that does not draw from the verifier's own distribution.

    Raises:
        PipelineError: with the numbers.
    """
    if z is not None and not abs(z) <= _FARTHEST_Z:
        raise _refusal(
            f"the canaries' sampled tokens are {abs(z):.1f} standard deviations {'less' if z < 0 else 'more'} likely "
            f"than sampling from the verifier's own distribution makes them (allowed are {_FARTHEST_Z:g}); a plain "
            "server's are not. The sampler of the capturing server is wrong"
        )
    if gap is not None and not gap <= _GREEDY_GAP:
        raise _refusal(
            f"greedy output is not greedy: its tokens are {gap:.3f} nats a token less likely than the likeliest "
            f"(allowed are {_GREEDY_GAP})"
        )
