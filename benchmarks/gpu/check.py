"""What a run made, against transformers in float32: states, sampled tokens, greedy tokens.

    python -m benchmarks.gpu.check RUN           writes RUN/check.json; about 20 s on a GPU

- States: relative error of each captured layer; rows that are off by more than a tenth (a MoE routing tie in bfloat16
  does this to single rows); and shifted samples, whose rows are the neighbour's, which is what asynchronous scheduling
  does to every row after a doubled token (vLLM issue 56417). Samples with and without a doubled token, apart.
- Sampled tokens: sum of log p(token) + entropy over all tokens, in standard deviations. It is 0 on average for samples
  of exactly this distribution, however sure the verifier is.
- Greedy tokens: how many are not the most likely one, and by how much that one is ahead.

Legend of shapes: T tokens, L captured layers, D hidden size, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3_train import verifier
from eagle3_train.config import Config, Verifier, read_preset
from eagle3_train.run import read_jsonl, write_text

ROW_OFF = 0.1
IMPOSSIBLE = -11.0  # of 160 x 400 tokens, less than one is as unlikely as this


def main() -> None:
    run = Path(sys.argv[1])
    settings = Config(**read_preset(run / "run.yaml")).verifier
    reference = Reference(settings)
    traces = {trace["id"]: trace for trace in read_jsonl(run / "01b_traces" / "traces.jsonl")}
    found = {"states": states(run, traces, reference), **tokens(list(traces.values()), reference)}
    write_text(run / "check.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


class Reference:
    """The verifier's text model by transformers' own loader, in float32."""

    def __init__(self, settings: Verifier):
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        # TF32 has 10 bits: not a reference.
        torch.backends.cuda.matmul.allow_tf32 = False
        raw = verifier.text_config(settings).raw
        config = DeepseekV3Config(**{k: v for k, v in raw.items() if k not in ("architectures", "model_type")})
        weights = load_file(verifier.file(settings, verifier.SINGLE_FILE))
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            text = {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}
            save_file(text, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            self.model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).to(self.device).eval()
        self.layer_ids = verifier.captured_layer_ids(settings)
        self._before_norm: list[torch.Tensor] = []
        self.model.model.norm.register_forward_hook(lambda _m, inputs, _o: self._before_norm.append(inputs[0]))

    @torch.inference_mode()
    def states(self, token_ids: list[int]) -> torch.Tensor:
        """[T, L, D] in the numbering of the run: id k enters layer k, the last is the final norm's input."""
        self._before_norm.clear()
        entering = self.model(torch.tensor([token_ids], device=self.device), output_hidden_states=True).hidden_states
        layers = [entering[layer][0] for layer in self.layer_ids[:-1]]
        return torch.stack([*layers, self._before_norm[0][0]], dim=1)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[T, V]; row i is of the token after token i."""
        return self.model(torch.tensor([token_ids], device=self.device)).logits[0]


def states(run: Path, traces: dict[str, dict[str, Any]], reference: Reference) -> dict[str, Any]:
    """Error of the states on disk: over all samples, and by whether the output holds a doubled token."""
    errors: dict[int, list[float]] = {layer: [] for layer in reference.layer_ids}
    groups: dict[str, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys(("samples", "rows", "rows_off", "shifted"), 0)
    )
    stored_as = ""
    for sample_id, token_ids, kept, stored_as in shards(run):  # noqa: B007
        theirs = reference.states(token_ids)
        ours = kept.to(theirs)
        for position, layer in enumerate(reference.layer_ids):
            difference = (ours[:, position] - theirs[:, position]).norm() / theirs[:, position].norm()
            errors[layer].append(difference.item())
        output = traces[sample_id]["output_token_ids"]
        doubled = any(a == b for a, b in pairwise(output))
        group = groups["doubled token" if doubled else "no doubled token"]
        group["samples"] += 1
        group["rows"] += len(token_ids)
        group["rows_off"] += int((_by_row(ours, theirs) > ROW_OFF).sum())
        group["shifted"] += is_shifted(ours, theirs)
    return {
        "stored_as": stored_as,
        "by_layer": {
            str(layer): {"mean": sum(values) / len(values), "largest": max(values)} for layer, values in errors.items()
        },
        **groups,
    }


def shards(run: Path) -> Iterator[tuple[str, list[int], torch.Tensor, str]]:
    """(id, token ids, states [T, L, D] float32, type on disk) of every shard, read without the project's own reader."""
    for path in sorted((run / "02_hidden" / "shards").glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            stored = shard.get_tensor("hidden_states")
            kept = stored.float()
            if "hidden_states_scales" in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                kept = kept * shard.get_tensor("hidden_states_scales").float()
            name = str(stored.dtype).removeprefix("torch.").removesuffix("fn")
            yield path.stem, shard.get_tensor("token_ids").tolist(), kept, name


def is_shifted(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether rows of states [T, L, D] are better explained by a neighbour's reference than by their own."""
    own = _by_row(ours, theirs)
    of_next = (_by_row(ours[:-1], theirs[1:]) < own[:-1]).sum()
    of_previous = (_by_row(ours[1:], theirs[:-1]) < own[1:]).sum()
    return bool(max(of_next, of_previous) >= 2)


def _by_row(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """[T]: norm of each row's difference over the norm of the reference's row."""
    return (ours - theirs).flatten(1).norm(dim=-1) / theirs.flatten(1).norm(dim=-1)


def tokens(traces: list[dict[str, Any]], reference: Reference) -> dict[str, Any]:
    """How the output of each temperature scores under the reference."""
    sampled: dict[float, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("tokens", "gap", "variance", "low"), 0))
    greedy: dict[str, Any] = {"tokens": 0, "not_the_likeliest": 0, "largest_lead": 0.0}
    for trace in traces:
        temperature = trace["sampling"]["temperature"]
        prompt, output = trace["prompt_token_ids"], trace["output_token_ids"]
        logits = reference.logits(prompt + output)[len(prompt) - 1 : -1]
        said = torch.tensor(output, device=logits.device)[:, None]
        if temperature == 0:
            lead = logits.amax(-1) - logits.gather(1, said)[:, 0]
            greedy["tokens"] += len(output)
            greedy["not_the_likeliest"] += int((lead > 0).sum())
            greedy["largest_lead"] = max(greedy["largest_lead"], lead.max().item())
            continue
        log_p = (logits.double() / temperature).log_softmax(-1)
        p, of_said = log_p.exp(), log_p.gather(1, said)[:, 0]
        entropy = -(p * log_p).sum(-1)
        total = sampled[temperature]
        total["tokens"] += len(output)
        total["gap"] += (of_said + entropy).sum().item()
        total["variance"] += ((p * log_p.square()).sum(-1) - entropy.square()).sum().item()
        total["low"] += int((of_said < IMPOSSIBLE).sum())
    return {
        "greedy": greedy,
        "sampled": {
            str(temperature): {
                "tokens": total["tokens"],
                "mean_log_p_plus_entropy": total["gap"] / total["tokens"],
                "standard_deviations": total["gap"] / total["variance"] ** 0.5,
                "impossible": total["low"],
            }
            for temperature, total in sorted(sampled.items())
        },
    }


if __name__ == "__main__":
    main()
