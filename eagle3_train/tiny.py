"""The embedded verifier: Kimi-K2.5's shape at 4 M parameters, and the questions it can answer.

Everything that reads a verifier (nested `text_config`, `language_model.` weights, a chat template that
opens `<think>`, DeepSeek-V3 layers with a routed MoE) meets the real structure; only the size changes.
The model is trained here, on text made by the same generator that made `data/tiny_prompts.jsonl`,
until it thinks and answers in a regular way that a draft can learn.

    python -m eagle3_train.tiny verifier models/tiny-kimi-k2.5
    python -m eagle3_train.tiny prompts data/tiny_prompts.jsonl

Legend of shapes: B sequences, T tokens.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import DeepseekV3Config, PreTrainedModel, PreTrainedTokenizerFast

SEED = 0
TRAIN_STEPS = 280
BATCH_SEQUENCES = 16
MUON_LR = 5e-3
ADAMW_LR = 3e-3
CORPUS_SEQUENCES = 6000
NUM_PROMPTS = 400
VOCAB_SIZE = 512
HEAD_DIM = 32  # Kimi's own 128 is what vLLM's MLA kernels on a GPU accept, and doubles the parameters

SPECIAL_TOKENS = (
    "[BOS]",
    "[EOS]",
    "[PAD]",
    "[UNK]",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|media_pad|>",
)

# Kimi-K2.5's template, without tools and images: the generation prompt opens `<think>`, thinking
# switched off closes it at once, and an assistant turn keeps its reasoning.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "<|im_system|>system<|im_middle|>{{ message['content'] }}<|im_end|>"
    "{%- elif message['role'] == 'user' -%}"
    "<|im_user|>user<|im_middle|>{{ message['content'] }}<|im_end|>"
    "{%- else -%}"
    "<|im_assistant|>assistant<|im_middle|><think>"
    "{{ message.get('reasoning') or message.get('reasoning_content') or '' }}</think>"
    "{{ message['content'] }}<|im_end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "<|im_assistant|>assistant<|im_middle|>"
    "{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}"
    "{%- endif -%}"
)


class Exchange(NamedTuple):
    """One question with the reasoning and the answer that the verifier is taught."""

    question: str
    reasoning: str
    answer: str


def _sum_or_difference(rng: random.Random) -> Exchange:
    a, b, sign = rng.randint(1, 30), rng.randint(1, 30), rng.choice("+-")
    result = a + b if sign == "+" else a - b
    return Exchange(
        rng.choice((f"What is {a} {sign} {b}?", f"Compute {a} {sign} {b}.")),
        f"The user asks for {a} {sign} {b}. I compute it step by step. {a} {sign} {b} = {result}. "
        f"So the result is {result}.",
        f"The answer is {result}.",
    )


def _larger(rng: random.Random) -> Exchange:
    a, b = rng.sample(range(1, 100), 2)
    return Exchange(
        rng.choice((f"Which is larger, {a} or {b}?", f"Pick the larger number: {a} or {b}.")),
        f"The user gives {a} and {b}. I compare them. {max(a, b)} is more than {min(a, b)}. "
        f"So the larger one is {max(a, b)}.",
        f"{max(a, b)} is larger than {min(a, b)}.",
    )


def _sequence(rng: random.Random) -> Exchange:
    start, step = rng.randint(1, 20), rng.randint(1, 9)
    shown = [start + i * step for i in range(4)]
    following = shown[-1] + step
    listed = ", ".join(map(str, shown))
    return Exchange(
        f"What comes next: {listed}?",
        f"The user lists {listed}. Each number grows by {step}. {shown[-1]} + {step} = {following}. "
        f"So the next number is {following}.",
        f"The next number is {following}.",
    )


def _story(rng: random.Random) -> Exchange:
    name = rng.choice(("Ana", "Ben", "Chen", "Dora", "Emil", "Fatou"))
    thing = rng.choice(("apples", "books", "coins", "pens"))
    a, b = rng.randint(1, 20), rng.randint(1, 20)
    return Exchange(
        f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?",
        f"{name} starts with {a} {thing}. Then {name} gets {b} more. {a} + {b} = {a + b}. "
        f"So {name} has {a + b} {thing}.",
        f"{name} has {a + b} {thing}.",
    )


_KINDS = (_sum_or_difference, _larger, _sequence, _story)


def exchanges(seed: int) -> Iterator[Exchange]:
    """Endless, deterministic stream of exchanges for `seed`, the kinds taking turns."""
    rng = random.Random(seed)
    while True:
        for kind in _KINDS:
            yield kind(rng)


def render(exchange: Exchange) -> str:
    """The text of an exchange as the chat template gives it."""
    return (
        f"<|im_user|>user<|im_middle|>{exchange.question}<|im_end|>"
        f"<|im_assistant|>assistant<|im_middle|><think>{exchange.reasoning}</think>{exchange.answer}<|im_end|>"
    )


def write_prompts(path: Path, seed: int = SEED + 1, count: int = NUM_PROMPTS) -> None:
    """Write `count` distinct questions in open-perfectblend's form (`conversations`, `source`), one a line."""
    seen: set[str] = set()
    lines: list[str] = []
    for exchange in exchanges(seed):
        if len(lines) == count:
            break
        if exchange.question in seen:
            continue
        seen.add(exchange.question)
        answer = f"<think>{exchange.reasoning}</think>{exchange.answer}"
        row = {
            "conversations": [{"from": "human", "value": exchange.question}, {"from": "gpt", "value": answer}],
            "source": "eagle3-train/tiny",
        }
        lines.append(json.dumps(row))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _train_tokenizer(corpus: list[str]) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # One token a digit: copying and adding numbers is learnt in minutes instead of hours.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIAL_TOKENS),
            # All 256 bytes: a user's own prompts may hold any text.
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="[BOS]",
        eos_token="<|im_end|>",
        pad_token="[PAD]",
        unk_token="[UNK]",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _text_config(eos_token_id: int, head_dim: int = HEAD_DIM) -> DeepseekV3Config:
    from transformers import DeepseekV3Config

    # kv_lora_rank 512 and qk_rope_head_dim 64 are Kimi's own: vLLM's MLA kernels accept no others.
    # 8 layers give aux layer ids 2, 4, 5, which must differ: vLLM crashes on repeated ids.
    return DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        routed_scaling_factor=1.0,
        kv_lora_rank=512,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=head_dim,
        v_head_dim=head_dim,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        bos_token_id=SPECIAL_TOKENS.index("[BOS]"),
        eos_token_id=eos_token_id,
        pad_token_id=SPECIAL_TOKENS.index("[PAD]"),
        tie_word_embeddings=False,
        rope_interleave=True,
    )


def _train(model: PreTrainedModel, sequences: list[list[int]], rng: random.Random) -> None:
    """Teach `model` to continue after `<think>`, on `sequences` of token ids, with a bar.

    Muon on the matrices: the copying that reasoning needs appears within 100 steps, where AdamW had
    not found it after 360. The question is not a target: its numbers are random and teach nothing.
    """
    import torch

    from eagle3_train.progress import bar

    pad, think = SPECIAL_TOKENS.index("[PAD]"), SPECIAL_TOKENS.index("<think>")
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_matrix else rest).append(parameter)
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95)),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 15) * max(0.03, 1 - step / TRAIN_STEPS)
        )
        for optimizer in optimizers
    ]
    with bar(total=TRAIN_STEPS, desc="tiny verifier", unit="step") as progress:
        for _ in range(TRAIN_STEPS):
            batch = rng.sample(sequences, BATCH_SEQUENCES)
            longest = max(map(len, batch))
            ids_BT = torch.full((BATCH_SEQUENCES, longest), pad)
            labels_BT = torch.full((BATCH_SEQUENCES, longest), -100)
            for row, ids in enumerate(batch):
                answer_start = ids.index(think) + 1
                ids_BT[row, : len(ids)] = torch.tensor(ids)
                labels_BT[row, answer_start : len(ids)] = torch.tensor(ids[answer_start:])
            loss = model(input_ids=ids_BT, labels=labels_BT).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            progress.update()
            progress.set_postfix(refresh=False, loss=f"{loss.item():.3f}")


def _write_configs(out: Path, text_config: dict, image_token_id: int) -> None:
    """The files vLLM asks of a KimiK25ForConditionalGeneration beside weights and tokenizer."""
    text_config |= {
        "model_type": "kimi_k2",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text_config,
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
        },
        "bos_token_id": text_config["bos_token_id"],
        "eos_token_id": text_config["eos_token_id"],
        "pad_token_id": text_config["pad_token_id"],
        "image_token_id": image_token_id,
        "media_placeholder_token_id": image_token_id,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    media = {
        "patch_size": 14,
        "merge_kernel_size": [2, 2],
        "in_patch_limit": 256,
        "patch_limit_on_one_side": 64,
        "in_patch_limit_each_frame": 256,
        "in_patch_limit_video": 1024,
        "fixed_output_tokens": None,
        "temporal_merge_kernel_size": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}, indent=1))
    generation = {"eos_token_id": text_config["eos_token_id"], "bos_token_id": text_config["bos_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=1))


def build_verifier(out: Path, seed: int = SEED, head_dim: int = HEAD_DIM) -> Path:
    """Train the tiny verifier and publish its directory at `out`, complete or not at all.

    Deterministic for a seed on one kind of machine; nothing is done when `out` is already there. Of two processes that
    start at once one trains it and the other waits.
    """
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            _build_verifier(out, seed, head_dim)
    return out


def _build_verifier(out: Path, seed: int, head_dim: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3ForCausalLM

    stream = exchanges(seed)
    corpus = [render(next(stream)) for _ in range(CORPUS_SEQUENCES)]
    tokenizer = _train_tokenizer(corpus)
    sequences = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in corpus]

    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(_text_config(tokenizer.eos_token_id, head_dim))
    _train(model, sequences, random.Random(seed))

    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        tokenizer.save_pretrained(staging)
        model.to(torch.bfloat16).save_pretrained(staging / "text")
        weights = load_file(staging / "text" / "model.safetensors")
        save_file(
            {f"language_model.{name}": tensor for name, tensor in weights.items()},
            staging / "model.safetensors",
            metadata={"format": "pt"},
        )
        text_config = json.loads((staging / "text" / "config.json").read_text())
        shutil.rmtree(staging / "text")
        _write_configs(staging, text_config, SPECIAL_TOKENS.index("<|media_pad|>"))
        staging.chmod(0o755)
        os.rename(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("verifier", "prompts"))
    parser.add_argument("path", type=Path, help="directory of the verifier, or file of the prompts")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, help="of the verifier's attention")
    args = parser.parse_args()
    if args.what == "verifier":
        print(build_verifier(args.path, args.seed, args.head_dim))
    else:
        write_prompts(args.path, args.seed + 1)


if __name__ == "__main__":
    main()
