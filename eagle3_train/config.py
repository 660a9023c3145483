"""The whole configuration: the one place where a tunable is declared.

A field's type, default and docstring become its flag (`--section.field`), its line in `--help` and its key
in a preset. A preset is one YAML file of these sections. What a stage uses is, in rising order of precedence:
the defaults here, the preset (or the run's own `run.yaml` when no preset is named), the flags.

pydantic-settings does the work: it is already among speculators' and vLLM's dependencies, reads YAML and
flags into one typed model, and builds `--help` from it, so nothing is declared twice.

Fields made with `how()` say how the work is done (concurrency, time-outs, GPUs), never what comes out of it:
changing one does not make a finished stage stale.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, overload

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from eagle3_train.errors import ConfigError

FLOAT8 = "float8_e4m3"  # extraction.storage_dtype
PRESETS = Path(__file__).resolve().parent.parent / "presets"


def how(default: Any, **constraints: Any) -> Any:
    """A field that changes how the work is done, never its result."""
    return Field(default, json_schema_extra={"how": True}, **constraints)


class Section(BaseModel):
    """One block of a preset."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _null_flag_of_a_list(cls, value: Any) -> Any:
        # pydantic-settings reads `--section.list null` as a list that holds null.
        return None if value == [None] else value


class Verifier(Section):
    """The model whose answers are captured and that the draft will speed up."""

    path: str = how("tiny", min_length=1)
    """Local directory or Hugging Face hub id; `tiny` is the embedded verifier, built on first use."""
    tensor_parallel_size: int = how(1, ge=1)
    """GPUs the verifier is split over."""
    trust_remote_code: bool = False
    """Run Python code shipped with the verifier (Kimi's tokenizer needs it)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of the verifier on vLLM; auto follows its config.json."""
    reasoning_parser: str = "kimi_k2"
    """vLLM's parser that separates thinking from the answer."""
    aux_layer_ids: list[int] | None = None
    """Layers whose INPUT residual stream feeds the draft, vLLM's numbering; null means [2, n/2, n-3]."""


class Server(Section):
    """How a vLLM server is started; each stage adds its own arguments to `args`."""

    port: int | None = how(None, ge=1, le=65535)
    """Loopback port; null takes a free one."""
    ready_timeout_s: float = how(3600, gt=0)
    """Patience until the server answers a one-token request [s]; a 1 T verifier loads in about 25 minutes."""
    stop_timeout_s: float = how(30, gt=0)
    """Patience after SIGTERM before SIGKILL [s]."""
    max_model_len: int = how(32768, ge=16)
    """Longest prompt plus output the server accepts [tokens]."""
    gpu_memory_utilization: float = how(0.9, gt=0, le=1)
    """Share of each GPU's memory (of RAM on a CPU) that vLLM may take."""
    cpu_kv_cache_gib: int = how(4, ge=1)
    """KV cache of a server without GPU [GiB]."""
    args: list[str] = how([])
    """Further arguments of `vllm serve`, in every stage."""
    env: dict[str, str] = how({})
    """Environment variables of the server process."""


class Source(Section):
    """One of several sources of questions."""

    path: str = Field(min_length=1)
    """JSON, JSONL (also .gz, .zst) or Parquet file, a directory of them, or a hub data set id."""
    name: str | None = None
    """Name in prompts.jsonl and in the summary; null takes the row's own `source`, or the path's last part."""
    weight: float | None = Field(None, gt=0)
    """Share of the sample relative to the other sources' weights; null for all means as they come."""


class Prompts(Section):
    """Stage 01: the questions."""

    source: str = Field("mlabonne/open-perfectblend", min_length=1)
    """JSON, JSONL (also .gz, .zst) or Parquet file, a directory of them, or a hub data set id."""
    sources: list[Source] = []
    """Several sources instead of one, e.g. [{path: a.jsonl, weight: 2}, {path: owner/name, name: code, weight: 1}]."""
    hub_split: str = "train"
    """Split of a hub data set."""
    turns: Literal["first", "all"] = "first"
    """first asks each conversation's first question on its own; all asks every user turn in order, with the verifier's
    own earlier answers as history."""
    max_samples: int | None = Field(None, ge=1)
    """Questions kept, chosen by a hash of their content, so a larger number is a superset; null keeps all."""
    max_prompt_tokens: int = Field(8192, ge=1)
    """Longer questions are set aside, counted by the verifier's own tokenizer [tokens]."""
    max_prompt_chars: int = Field(131072, ge=1)
    """Longer questions are set aside before anything is tokenized [characters]."""
    val_fraction: float = Field(0.05, gt=0, lt=0.5)
    """Share used to validate the draft while it trains."""
    eval_fraction: float = Field(0.05, gt=0, lt=0.5)
    """Share that only stage 06 ever sees."""
    seed: int = 0
    """Chooses the sample and the split."""
    max_set_aside: float = Field(0.01, ge=0, le=1)
    """Share of unusable rows above which the stage refuses to go on."""

    @model_validator(mode="after")
    def _weights_for_all_or_none(self) -> Prompts:
        given = [source.weight is not None for source in self.sources]
        if any(given) and not all(given):
            raise ValueError("either every source has a weight or none has")
        return self


class Generation(Section):
    """Stage 01b: the verifier's own thinking and answers."""

    capture: Literal["two_pass", "one_pass"] = how("two_pass")
    """two_pass leaves the hidden states to 02; one_pass saves them while the verifier answers, and 02 loads none. Its
    server takes extraction.server_args after generation.server_args."""
    endpoint: list[str] = how([])
    """Base URLs of running vLLM servers (http://127.0.0.1:8000/v1); none starts one here."""
    temperatures: list[float] = Field([0.6], min_length=1)
    """Sampling temperatures; each prompt gets one of them, by its id. 0 is greedy."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus sampling."""
    max_tokens: int = Field(16384, ge=1)
    """Longest thinking plus answer [tokens]."""
    thinking_share: float = Field(1.0, ge=0, le=1)
    """Share of the prompts that the verifier thinks about; the others are asked with thinking switched off."""
    seed: int = 0
    """Base of the per-prompt sampling seeds."""
    concurrency: int = how(256, ge=1)
    """Most requests in flight at one server; fewer while it queues or refuses."""
    request_timeout_s: float = how(1800, gt=0)
    """Patience with one request, from sending to the last byte [s]; a long reasoning trace takes many minutes."""
    connect_timeout_s: float = how(10, gt=0)
    """Patience with the connection [s]."""
    max_retries: int = how(4, ge=0)
    """Retries of a request after 408, 409, 429, 5xx or a lost connection, with back-off."""
    silence_s: float = how(60, gt=0)
    """Seconds without any answer after which each server gets a one-token canary request."""
    max_restarts: int = how(2, ge=0)
    """Times our own server is started again after it died or fell silent."""
    max_set_aside: float = Field(0.01, ge=0, le=1)
    """Share of prompts without a usable trace above which the stage refuses to go on."""
    server_args: list[str] = how([])
    """Further arguments of this stage's vLLM server."""

    @field_validator("endpoint", mode="before")
    @classmethod
    def _one_endpoint(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else (value or [])

    @field_validator("temperatures", mode="before")
    @classmethod
    def _one_temperature(cls, value: Any) -> Any:
        return value if isinstance(value, list) else [value]

    @field_validator("temperatures")
    @classmethod
    def _not_negative(cls, value: list[float]) -> list[float]:
        if any(temperature < 0 for temperature in value):
            raise ValueError("a temperature is 0 or more")
        return value

    @model_validator(mode="after")
    def _states_need_a_server_of_ours(self) -> Generation:
        if self.endpoint and self.capture == "one_pass":
            raise ValueError(
                "capture one_pass needs a server of our own, which writes into the run; leave endpoint out"
            )
        return self


class Extraction(Section):
    """Stage 02: the verifier's hidden states for every token of every trace."""

    storage_dtype: Literal["bfloat16", "float32", "float8_e4m3"] = "bfloat16"
    """Type of the states on disk; float8_e4m3 takes half of bfloat16's room, with one scale a token."""
    disk_budget_gb: float | None = Field(None, gt=0)
    """Most that hidden states may take on disk [GB of 1e9 bytes]; null keeps them all. Within a budget 02 and 04 take
    turns: the states that training takes next are made, trained on, and deleted for the next wave."""
    wave_epochs: Literal["again", "replay"] = "again"
    """Several epochs within disk_budget_gb: again makes the states anew for each of them, with an unlimited disk's
    result; replay trains all epochs on a wave before it is deleted: one extraction, but another order."""
    cut_off: Literal["keep", "drop"] = "keep"
    """Traces that hit generation.max_tokens: keep trains on what was said, without an end; drop leaves them out."""
    repetition: Literal["keep", "drop"] = "drop"
    """Traces that end in a loop."""
    concurrency: int = how(32, ge=1)
    """Most requests in flight."""
    tokens_in_flight: int = how(65536, ge=1)
    """Most tokens of the requests in flight; the states of as many again are being written and checked. Four times
    vLLM's max_num_batched_tokens keep its batches full [tokens]."""
    request_timeout_s: float = how(600, gt=0)
    """Patience with one request and with its file [s]."""
    max_set_aside: float = Field(0.01, ge=0, le=1)
    """Share of traces without sound states above which the stage refuses to go on."""
    server_args: list[str] = how([])
    """Further arguments of this stage's vLLM server."""


class Vocabulary(Section):
    """Stage 03: the part of the vocabulary that the draft predicts."""

    draft_size: int | None = Field(32000, ge=64)
    """Tokens the draft can propose; null keeps the verifier's whole vocabulary."""


class Draft(Section):
    """Shape of the draft model, and what it starts from."""

    init_from: str | None = Field(None, min_length=1)
    """Draft to start from: a local directory or hub id, in speculators' or flat format; null starts fresh."""
    num_layers: int = Field(1, ge=1)
    """Decoder layers."""
    num_attention_heads: int = Field(64, ge=1)
    """Query heads."""
    num_key_value_heads: int = Field(64, ge=1)
    """Key and value heads."""
    head_dim: int = Field(128, ge=8)
    """Width of a head; always given, because the verifier's own means something else under MLA."""
    intermediate_size: int = Field(12288, ge=1)
    """Width of the MLP."""
    norm_before_residual: bool = True
    """Take the residual after the hidden-state norm."""
    norm_before_fc: bool = False
    """One RMSNorm over the concatenated auxiliary states."""
    fc_norm: bool = False
    """One RMSNorm for each auxiliary state (EAGLE 3.1)."""
    norm_output: bool = False
    """Feed the normed output back across TTT steps (EAGLE 3.1)."""
    sliding_window: int | None = Field(2048, ge=1)
    """Attention window [tokens]; null attends to everything. A window keeps acceptance at long context."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Draft:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other")
        return self


class Training(Section):
    """Stage 04: the draft is trained."""

    prepared_data: str | None = None
    """Train on this directory instead of 02's: a data set in speculators' format, with hidden_states/ inside."""
    epochs: int = Field(3, ge=1)
    """Passes over the training shards."""
    max_steps: int | None = Field(None, ge=1)
    """End after exactly so many optimizer steps, and the schedule with them; null trains all epochs."""
    batch_size: int = Field(1, ge=1)
    """Packs of each optimizer step, over all GPUs together: the result does not depend on their number."""
    lr: float = Field(1e-4, gt=0)
    """Peak learning rate of AdamW (and of AdamW's part under muon)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon orthogonalises the update of every matrix, which costs as much as the rest of a step on one GPU."""
    muon_lr: float = Field(0.02, gt=0)
    """Peak learning rate of muon's part, scaled to AdamW's size of update."""
    muon_period: int = Field(1, ge=1)
    """Orthogonalise whole matrices every so many steps, and blocks of them in between; 5 is nearly free."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    scheduler: Literal["linear", "cosine", "none"] = "cosine"
    """Decay of the learning rate over all steps."""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """Share of all steps spent warming up."""
    ttt_steps: int = Field(3, ge=1)
    """Training-time-test steps: how many tokens ahead the draft learns to guess."""
    ttt_step_loss_decay: float = Field(1.0, gt=0, le=1)
    """Weight of each further TTT step's loss."""
    loss: str = "kl_div"
    """speculators' loss name (kl_div, rkl, jsd, ce, tv, nla, lk_hybrid), or weights of several as JSON."""
    pack_tokens: int = Field(8192, ge=16)
    """Most tokens of a pack, the samples laid end to end; longer samples are cut and counted [tokens]."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations and matrix products; weights and optimizer are float32."""
    fp8: bool = False
    """Matrix products of the trained weights in fp8 (H100, H200, B300, RTX PRO 6000)."""
    recompute: bool = how(False)
    """Keep one TTT step's activations at a time and compute the others again: less memory, a third more time."""
    seed: int = 0
    """Initial weights and order of the data."""
    validation_steps: int | None = Field(None, ge=1)
    """Validate, and so choose the best checkpoint, every so many steps; null means at the end of each epoch."""
    checkpoint_steps: int = how(500, ge=1)
    """Save every so many steps as well: the most that a kill can cost."""
    keep_checkpoints: int = how(2, ge=1)
    """Newest checkpoints kept, besides the best."""
    processes: int | None = how(None, ge=1)
    """Training processes on this machine, one a GPU; null takes every visible GPU that batch_size can use."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Type in which several GPUs exchange gradients; bfloat16 halves the traffic where there is no NVLink."""
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = how(["tensorboard"])
    """Where metrics go besides metrics.jsonl; one that is not installed, or fails, is left out with a warning."""
    data_workers: int = how(4, ge=0)
    """Threads that read shards ahead, in each training process; 0 reads when a pack is needed."""


class Export(Section):
    """Stage 05: the checkpoint that vLLM serves."""

    format: Literal["flat", "speculators"] = "flat"
    """flat is LlamaForCausalLMEagle3, read by vLLM and SGLang; speculators keeps its own nested config."""
    verifier_name: str | None = None
    """Hub id of the verifier to record; null takes verifier.path where that is a hub id."""
    keep_embeddings: bool = False
    """Put the verifier's embedding into the checkpoint; vLLM shares the verifier's own without it (2.35 GB saved)."""
    license: str = "other"
    """Licence named in the model card."""
    push_to: str | None = how(None)
    """Hub id (owner/name) to upload the finished checkpoint to, as a private repository; null keeps it here."""


class Evaluation(Section):
    """Stage 06: the draft on a live vLLM."""

    draft: str | None = None
    """Directory or hub id of another draft to measure instead of 05's, in a folder of its own."""
    endpoint: str | None = how(None)
    """Base URL of a running server with the draft (started with --per-request-spec-decode-metrics detailed)."""
    endpoint_alone: str | None = how(None)
    """Base URL of a running server with the verifier alone."""
    prompt_sets: list[str] = ["eval"]
    """What is asked: eval (the run's held-out split), a local file of prompts, or mt_bench, gsm8k, humaneval, math500,
    aime, ceval (from data/benchmarks/NAME.* or the hub)."""
    max_prompts: int = Field(64, ge=1)
    """Prompts asked of each set."""
    max_tokens: int = Field(4096, ge=1)
    """Longest output [tokens]."""
    draft_tokens: int = Field(3, ge=1, le=16)
    """Tokens the draft proposes a step."""
    sweep: list[int] = []
    """Further numbers of draft tokens to measure, each on a server of its own, e.g. [1, 2, 4, 5, 6, 7]."""
    load_concurrency: list[int] = [1, 8, 16, 64]
    """Requests in flight at which speed is measured with and without the draft, by vLLM's own benchmark."""
    load_prompts: int = Field(64, ge=1)
    """Requests of each speed measurement."""
    sampled_temperature: float = Field(1.0, gt=0)
    """Acceptance is measured greedily and at this temperature."""
    concurrency: int = how(16, ge=1)
    """Requests in flight."""
    min_acceptance_length: float = Field(1.5, ge=1)
    """Mean acceptance length, greedy, below which the stage fails with exit code 3."""
    min_greedy_identical: float = Field(0.9, ge=0, le=1)
    """Share of prompts whose greedy output must equal the verifier's alone; below it exit code 3. In bf16 on a GPU a
    near tie may fall the other way in another batch."""
    server_args: list[str] = how([])
    """Further arguments of this stage's vLLM servers, with and without the draft."""


class Plan(Section):
    """Before stage 01: what the run will take, and what it may take (`plan.py`)."""

    box: list[Literal["rtx6000x8", "b300x8"]] = how([])
    """Boxes to plan for, compared where there are several."""
    from_run: str | None = how(None)
    """A run, or its timings.jsonl: its measured rates replace the priors of the box it was made on."""
    price: list[Annotated[float, Field(ge=0)]] = how([])
    """Price of a whole box [USD an hour]: one for all, or one for each `box` in its order."""
    max_hours: float | None = how(None, gt=0)
    """Refuse a plan whose likely duration is above this [hours]."""
    max_usd: float | None = how(None, gt=0)
    """Refuse a plan whose likely price is above this [USD]; needs `price`."""
    max_disk_gb: float | None = how(None, gt=0)
    """Refuse a plan whose peak on disk is above this [GB of 1e9 bytes; 1 TB is 1000]."""
    prompt_tokens: float | None = how(None, gt=0)
    """Mean length of a question [tokens]; null takes that of `from_run`, else the prior of planning.py."""
    output_tokens: float | None = how(None, gt=0)
    """Mean thinking plus answer [tokens]; null takes that of `from_run`, else the prior of planning.py."""
    train_gpus: int = how(1, ge=1)
    """GPUs that train the draft, where the training rate is not measured."""

    @model_validator(mode="after")
    def _a_price_for_each_box(self) -> Plan:
        if len(self.price) not in (0, 1, len(self.box)):
            raise ValueError(f"{len(self.price)} prices for {len(self.box)} boxes; give one for all, or one for each")
        if self.max_usd is not None and not self.price:
            raise ValueError("max_usd needs price [USD an hour]")
        return self


class Config(BaseSettings):
    """Every section; what `run.yaml` holds."""

    model_config = SettingsConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        nested_model_default_partial_update=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_parse_none_str="null",
        cli_use_class_docs_for_groups=True,
        cli_shortcuts={
            "prompts.max_samples": "max-samples",
            "generation.endpoint": "endpoint",
            "training.prepared_data": "prepared-data",
            "training.batch_size": "batch-size",
            "training.max_steps": "max-steps",
            "plan.box": "box",
            "plan.from_run": "from",
            "plan.price": "price",
            "plan.max_hours": "max-hours",
            "plan.max_usd": "max-usd",
            "plan.max_disk_gb": ["max-disk", "max-disk-gb"],
        },
    )

    verifier: Verifier = Verifier()
    server: Server = Server()
    prompts: Prompts = Prompts()
    generation: Generation = Generation()
    extraction: Extraction = Extraction()
    vocabulary: Vocabulary = Vocabulary()
    draft: Draft = Draft()
    training: Training = Training()
    export: Export = Export()
    evaluation: Evaluation = Evaluation()
    plan: Plan = Plan()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Environment variables are no source: a run must not depend on what a shell happens to export.
        return (init_settings, _PresetSource(settings_cls))

    @model_validator(mode="after")
    def _one_pass_has_no_waves(self) -> Config:
        if self.extraction.disk_budget_gb is not None and self.generation.capture == "one_pass":
            raise ValueError(
                "extraction.disk_budget_gb needs generation.capture two_pass: one_pass saves the states of every answer"
            )
        return self

    @property
    def in_waves(self) -> bool:
        """Whether the states that are trained on are made, and deleted, wave by wave."""
        return self.extraction.disk_budget_gb is not None and self.training.prepared_data is None

    def dump(self) -> str:
        """The configuration as YAML, as kept in `run.yaml`."""
        sections = {name: getattr(self, name).model_dump(mode="json") for name in section_names()}
        return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


class Arguments(Config):
    """A stage's command line: where the run is, what it starts from, and any field of the configuration."""

    run: Path
    """Directory of the run."""
    preset: Path | None = None
    """Preset to start from, e.g. presets/tiny.yaml; left out, the run's own run.yaml."""
    force: bool = False
    """Make the stage again although it is there with another configuration; the old one is set aside."""


CommandLine = TypeVar("CommandLine", bound=Config)


def section_names() -> list[str]:
    """The names of the configuration's sections, in order."""
    return list(Config.model_fields)


def result_fields(config: Config, sections: tuple[str, ...]) -> dict[str, Any]:
    """`section.field` -> value for every field of `sections` that decides a result."""
    fields = {}
    for section in sections:
        values = getattr(config, section)
        for name, info in type(values).model_fields.items():
            if not (isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("how")):
                fields[f"{section}.{name}"] = values.model_dump(mode="json")[name]
    return fields


class _PresetSource(PydanticBaseSettingsSource):
    """The preset named by the flags, else the run's own `run.yaml`."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # asked for by the base class; __call__ answers for all fields at once

    def __call__(self) -> dict[str, Any]:
        flags = self.current_state
        preset, run = flags.get("preset"), flags.get("run")
        if preset is not None:
            return read_preset(Path(preset))
        if run is not None and (own := Path(run) / "run.yaml").exists():
            return read_preset(own)
        if run is not None:
            raise ConfigError(f"{run} is a new run, so it needs a preset: --preset {' | '.join(known_presets())}")
        return {}


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key stands once; by itself YAML keeps the last and drops the first without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is written twice", node.start_mark)
        return super().construct_mapping(node, deep)


def known_presets() -> list[str]:
    """The presets that come with the project, as paths to type."""
    return [f"presets/{path.name}" for path in sorted(PRESETS.glob("*.yaml"))]


def read_preset(path: Path) -> dict[str, Any]:
    """The sections of a preset file.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping of sections.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). The presets here: {', '.join(known_presets())}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).replace(chr(10), ' ')}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(values, dict) for name, values in content.items()
    ):
        raise ConfigError(f"{path}: a preset is a mapping of sections ({', '.join(section_names())}) to their fields")
    return content


@overload
def parse(argv: list[str] | None, description: str) -> tuple[Arguments, Config]: ...
@overload
def parse(argv: list[str] | None, description: str, kind: type[CommandLine]) -> tuple[CommandLine, Config]: ...
def parse(argv: list[str] | None, description: str, kind: type[Config] = Arguments) -> tuple[Config, Config]:
    """Resolve a command line: a stage's, or one of another `kind` that holds every section as well.

    Returns:
        The arguments and, apart from them, the configuration alone.

    Raises:
        ConfigError: unknown field (the nearest name is suggested), wrong value, or unreadable preset.
        SystemExit: after `--help` (0).
    """
    parser = _Parser(
        usage=("%(prog)s --run DIR" if "run" in _required(kind) else "%(prog)s [--run DIR]")
        + " [--preset FILE] [--section.field VALUE ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags: CliSettingsSource = CliSettingsSource(
        kind, root_parser=parser, parse_args_method=_Parser.parse_args, formatter_class=parser.formatter_class
    )
    try:
        given = flags(args=sys.argv[1:] if argv is None else argv)()
        arguments = kind(**given)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from None
    config = Config.model_construct(**{name: getattr(arguments, name) for name in section_names()})
    return arguments, config


def _required(kind: type[Config]) -> list[str]:
    return [name for name, info in kind.model_fields.items() if info.is_required()]


class _Parser(argparse.ArgumentParser):
    """argparse whose complaint about an unknown flag names the nearest known one."""

    def error(self, message: str) -> NoReturn:
        lines = [message]
        for unknown in re.findall(r"--[\w.-]+", message) if "unrecognized" in message else []:
            known = [option for action in self._actions for option in action.option_strings]
            if near := _nearest(unknown, known):
                lines.append(f"{unknown}: did you mean {near}?")
        raise ConfigError("\n".join([*lines, f"All flags: python {self.prog} --help"]))


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        location = [str(part) for part in problem["loc"]]
        dotted = ".".join(location)
        if problem["type"] == "missing":
            yield f"--{dotted} is required"
        elif problem["type"] == "extra_forbidden":
            known = section_names()
            if len(location) > 1:
                section = Config.model_fields[location[0]].annotation
                known = [f"{location[0]}.{name}" for name in section.model_fields]  # type: ignore[union-attr]
            near = _nearest(dotted, known)
            yield f"{dotted}: no such field" + (f"; did you mean {near}?" if near else f"; known: {', '.join(known)}")
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            yield f"{dotted}: {reason}, got {problem['input']!r}"


def _nearest(name: str, known: list[str]) -> str | None:
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return matches[0] if matches else None
