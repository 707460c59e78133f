"""RLRun: one reinforcement-learning run of a language model on a mixed fleet."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from motley_api.resources.base import (
    LIST_MAP_BY_NAME,
    MAX_NAME,
    Conditions,
    Count,
    CountOrZero,
    DecimalString,
    Message,
    Model,
    Name,
    PodOverrides,
    Seconds,
    Text,
    Total,
    Url,
    _alias,
    immutable,
    rules,
)
from motley_api.resources.gpus import CapacityType, GpuTypeName, Precision
from motley_api.resources.samplergroup import RUN_PARTS, TEMPLATE_RULES, SamplerGroupTemplate


class ModelSource(Model):
    source: Annotated[
        Url,
        Field(description="source: Hugging Face checkpoint folder, as an fsspec URL or a path that every pod sees."),
    ]
    context_length: Annotated[int, Field(ge=16, le=4_194_304, description="contextLength: longest episode, in tokens.")]


class Advantage(StrEnum):
    GROUP_MEAN = "GroupMean"
    GROUP_MEAN_STD = "GroupMeanStd"


class ImportanceSamplingMode(StrEnum):
    NONE = "None"
    TIS = "TIS"
    MIS = "MIS"
    VTRACE = "VTrace"


class RatioLevel(StrEnum):
    TOKEN = "Token"
    SEQUENCE = "Sequence"
    GEOMETRIC = "Geometric"


class Switch(StrEnum):
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class LossReduction(StrEnum):
    TOKEN_MEAN = "TokenMean"
    SEQUENCE_MEAN = "SequenceMean"


class ImportanceSampling(Model):
    """How a token's ratio r of trainer to sampler becomes the weight of its loss."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.mode != 'MIS' || 0.0 < double(self.low) && double(self.low) < double(self.high)",
                "low and high must satisfy 0 < low < high with mode MIS: ratios outside are masked",
            ),
            ("self.mode != 'TIS' || double(self.high) > 0.0", "high must be above 0 with mode TIS: it caps the ratio"),
            (
                "self.mode != 'VTrace' || double(self.high) >= 1.0",
                "high must be at least 1 with mode VTrace: later tokens' ratios are capped at 1, a token's own at high",
            ),
            (
                "self.level == 'Token' || self.mode in ['TIS', 'MIS']",
                "level must be Token unless mode is TIS or MIS: no other mode has a ratio of sequences",
            ),
        ),
        alias_generator=_alias,
    )
    mode: Annotated[
        ImportanceSamplingMode,
        Field(
            description="mode: None (weight 1), TIS (r, at most high), MIS (IcePop: r within [low, high], else 0) or VTrace"
            " (IMPALA: r at most high, times the later tokens' ratios, each at most 1). Default: MIS."
        ),
    ] = ImportanceSamplingMode.MIS
    level: Annotated[
        RatioLevel,
        Field(
            description="level: r is the token's own, the product over its sequence, or that product's root (geometric mean)."
            " Default: Token."
        ),
    ] = RatioLevel.TOKEN
    low: Annotated[DecimalString, Field(description='low: smallest ratio kept by MIS. Default: "0.5".')] = "0.5"
    high: Annotated[
        DecimalString, Field(description='high: largest ratio kept by MIS, the cap of TIS and VTrace. Default: "5".')
    ] = "5"


class SequenceMaskMode(StrEnum):
    RATIO = "Ratio"
    GEOMETRIC = "Geometric"
    DRIFT = "Drift"


class SequenceMask(Model):
    """Takes whole sequences out of the loss."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.mode == 'Drift' ? has(self.drift) && !has(self.low) && !has(self.high)"
                " : has(self.low) && has(self.high) && !has(self.drift)",
                "drift goes with mode Drift, low and high with modes Ratio and Geometric: set those and no other",
            ),
            (
                "!has(self.low) || !has(self.high) || 0.0 < double(self.low) && double(self.low) < double(self.high)",
                "low and high must satisfy 0 < low < high",
            ),
        ),
        alias_generator=_alias,
    )
    mode: Annotated[
        SequenceMaskMode,
        Field(
            description="mode: Ratio (the product of the tokens' ratios is outside [low, high]), Geometric (its root is), or"
            " Drift (DeepSeek-V3.2: negative advantage, and mean log sampler/trainer above drift)."
        ),
    ]
    low: Annotated[DecimalString, Field(description="low: smallest ratio kept.")] | None = None
    high: Annotated[DecimalString, Field(description="high: largest ratio kept.")] | None = None
    drift: Annotated[DecimalString, Field(description="drift: nats per token.")] | None = None


class Sampling(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            ("double(self.temperature) > 0.0", "temperature must be above 0: a greedy policy explores nothing"),
            ("0.0 < double(self.topP) && double(self.topP) <= 1.0", "topP must be above 0 and at most 1"),
            (
                "self.topK > 0 || double(self.topP) == 1.0",
                "topK must be from 1 to 4096 with topP below 1: the recorded sets must be bounded",
            ),
            (
                "self.topLogprobsNum == 0 || self.topK == -1 && double(self.topP) == 1.0",
                "topLogprobsNum must be 0 unless topP is 1 and topK -1: where the sampler filters, all that it could have drawn"
                " is recorded",
            ),
        ),
        alias_generator=_alias,
    )
    temperature: Annotated[DecimalString, Field(description='temperature: Default: "1".')] = "1"
    top_p: Annotated[
        DecimalString, Field(description='topP: mass of the smallest set sampled from. Default: "0.97".')
    ] = "0.97"
    top_k: Annotated[
        int,
        Field(
            ge=-1,
            le=4096,
            description="topK: most candidates a token is drawn from; -1 is off. Default: 64.",
            json_schema_extra=rules(("self != 0", "topK must be -1 (off) or from 1 to 4096")),
        ),
    ] = 64
    top_logprobs_num: Annotated[
        int,
        Field(
            ge=0,
            le=4096,
            description="topLogprobsNum: so many of the likeliest candidates of each token are recorded where nothing filters; score"
            " centering models the rest (128 in the study). Default: 0.",
        ),
    ] = 0


class ClipLevel(StrEnum):
    TOKEN = "Token"
    SEQUENCE = "Sequence"


class OldPolicy(StrEnum):
    TRAINER = "Trainer"
    SAMPLER = "Sampler"


class Clip(Model):
    """PPO's clip; high above low is DAPO's clip-higher, level Sequence is GSPO."""

    model_config = ConfigDict(
        json_schema_extra=rules(("double(self.low) < 1.0", "low must be below 1: ratios are clipped at 1 - low")),
        alias_generator=_alias,
    )
    low: Annotated[DecimalString, Field(description='low: the ratio is clipped below at 1 - low. Default: "0.2".')] = (
        "0.2"
    )
    high: Annotated[DecimalString, Field(description='high: and above at 1 + high. Default: "0.2".')] = "0.2"
    level: Annotated[
        ClipLevel,
        Field(description="level: a token's own ratio, or its sequence's geometric mean (GSPO). Default: Token."),
    ] = ClipLevel.TOKEN
    old_policy: Annotated[
        OldPolicy,
        Field(
            description="oldPolicy: what the ratio is against: the trainer's own forward (with one update a batch it is 1: plain"
            " GRPO), or the sampler. Default: Trainer."
        ),
    ] = OldPolicy.TRAINER


class Optimizer(Model):
    learning_rate: Annotated[DecimalString, Field(description='learningRate: of Adam. Default: "0.000001".')] = (
        "0.000001"
    )
    beta1: DecimalString = "0.9"
    beta2: DecimalString = "0.98"
    epsilon: DecimalString = "0.00000001"
    weight_decay: DecimalString = "0"
    gradient_clip: Annotated[
        DecimalString, Field(description='gradientClip: largest gradient norm; "0" is off. Default: "1".')
    ] = "1"
    warmup_steps: Annotated[
        int, Field(ge=0, le=1_000_000, description="warmupSteps: steps over which the rate grows from 0. Default: 0.")
    ] = 0


class Algorithm(Model):
    """The study's final recipe by default: corrected GRPO with MIS, score centering and top-p mask replay."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.scoreCentering != 'Enabled' || self.advantage == 'GroupMean'",
                "advantage must be GroupMean with scoreCentering: dividing by the standard deviation is not part of it",
            ),
            (
                "self.scoreCentering != 'Enabled' || !has(self.clip)",
                "clip must be unset with scoreCentering: a clipped token's gradient would be left out of the centre",
            ),
            (
                "self.scoreCentering != 'Enabled' || !has(self.sequenceMask)",
                "sequenceMask must be unset with scoreCentering: the centre is one token's, and a mask that depends on the"
                " whole sequence leaves it uncentred",
            ),
            (
                "self.scoreCentering != 'Enabled' || self.importanceSampling.level == 'Token'"
                " && self.importanceSampling.mode != 'VTrace'",
                "importanceSampling must be None, TIS or MIS at level Token with scoreCentering: the centre is one token's",
            ),
            (
                "self.scoreCentering != 'Enabled' || self.sampling.topK > 0 || self.sampling.topLogprobsNum > 0",
                "sampling.topK or sampling.topLogprobsNum must be set with scoreCentering: it needs recorded candidates, all that a"
                " filter left or the likeliest of all",
            ),
            (
                "self.maskReplay != 'Enabled' || self.sampling.topK > 0",
                "sampling.topP below 1 or topK must be set with maskReplay: without a filter there is no mask to replay",
            ),
            (
                "!has(self.clip) || self.importanceSampling.mode != 'VTrace'",
                "clip must be unset with importanceSampling VTrace, which weighs a plain policy gradient",
            ),
            (
                "!has(self.clip) || self.clip.oldPolicy != 'Sampler' || self.importanceSampling.mode == 'None'",
                "importanceSampling.mode must be None with clip.oldPolicy Sampler: the ratio would count twice",
            ),
            (
                "!has(self.clip) || self.clip.level != 'Sequence' || self.lossReduction == 'SequenceMean'",
                "lossReduction must be SequenceMean with clip.level Sequence: GSPO averages over sequences",
            ),
        ),
        alias_generator=_alias,
    )
    advantage: Annotated[
        Advantage,
        Field(
            description="advantage: reward minus the group's mean, over its standard deviation or not. Default: GroupMean."
        ),
    ] = Advantage.GROUP_MEAN
    importance_sampling: ImportanceSampling = ImportanceSampling()
    sequence_mask: (
        Annotated[
            SequenceMask, Field(description="sequenceMask: takes whole sequences out of the loss. Default: none.")
        ]
        | None
    ) = None
    score_centering: Annotated[
        Switch,
        Field(
            description="scoreCentering: centre the weighted score under the sampler's distribution. Default: Enabled."
        ),
    ] = Switch.ENABLED
    mask_replay: Annotated[
        Switch,
        Field(description="maskReplay: renormalise the trainer over the sampler's candidates. Default: Enabled."),
    ] = Switch.ENABLED
    sampling: Sampling = Sampling()
    clip: (
        Annotated[Clip, Field(description="clip: PPO's, of an uncentred loss (plain GRPO, DAPO, GSPO). Default: none.")]
        | None
    ) = None
    entropy_bonus: Annotated[
        DecimalString,
        Field(
            description='entropyBonus: times the entropy of the policy is taken off each token\'s loss. Default: "0".'
        ),
    ] = "0"
    reference_kl: Annotated[
        DecimalString,
        Field(
            alias="referenceKL",
            description="referenceKL: times k3 of the policy to the weights that the run started from (GRPO's penalty) is added"
            ' to each token\'s loss. Above 0 the trainer keeps those weights, too. Default: "0".',
        ),
    ] = "0"
    loss_reduction: Annotated[
        LossReduction,
        Field(
            description="lossReduction: mean over all tokens, or over sequences of their token means. Default: TokenMean."
        ),
    ] = LossReduction.TOKEN_MEAN
    optimizer: Optimizer = Optimizer()


class Batch(Model):
    prompts: Annotated[int, Field(ge=1, le=65_536, description="prompts: of one optimizer step. Default: 128.")] = 128
    samples_per_prompt: Annotated[
        int, Field(ge=2, le=1024, description="samplesPerPrompt: trajectories of one prompt. Default: 8.")
    ] = 8


class Staleness(Model):
    max_steps: (
        Annotated[
            int,
            Field(
                ge=0,
                le=10_000,
                description="maxSteps: samples older than this many steps are discarded. Default: no cap.",
            ),
        ]
        | None
    ) = None


class TrainerDtype(StrEnum):
    BF16 = "BF16"
    FP16 = "FP16"
    FP32 = "FP32"


class Trainer(Model):
    """All of it but dtype may change mid-run: the gang saves, leaves, and goes on as it is declared then."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            immutable("dtype", "apply another RLRun: a run's numbers are of one precision"),
            (
                "self.nodes * self.gpusPerNode % (self.tensorParallel * self.expertParallel) == 0",
                "tensorParallel x expertParallel must divide nodes x gpusPerNode: each process has one place in the layout",
            ),
        ),
        alias_generator=_alias,
    )
    gpu_type: Annotated[GpuTypeName, Field(description="gpuType: the trainer's accelerator. Default: B200.")] = (
        GpuTypeName.B200
    )
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    nodes: Annotated[int, Field(ge=1, le=1024, description="nodes: pods of the gang. Default: 1.")] = 1
    gpus_per_node: Annotated[
        int, Field(ge=1, le=16, description="gpusPerNode: GPUs, and training processes, of each. Default: 8.")
    ] = 8
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    expert_parallel: Annotated[int, Field(ge=1, le=256)] = 1
    dtype: Annotated[
        TrainerDtype, Field(description="dtype: BF16, FP16 (with loss scaling), or FP32 on CPUs. Default: BF16.")
    ] = TrainerDtype.BF16
    template: PodOverrides = PodOverrides()


class TaskLimits(Model):
    max_turns: Annotated[int, Field(ge=1, le=10_000, description="maxTurns: replies of one episode. Default: 100.")] = (
        100
    )
    max_tokens_per_turn: Annotated[int, Field(ge=1, le=1_000_000, description="maxTokensPerTurn: Default: 4096.")] = (
        4096
    )
    command_timeout_seconds: Annotated[
        Seconds, Field(description="commandTimeoutSeconds: of one bash command. Default: 120.")
    ] = 120
    episode_timeout_seconds: Annotated[
        Seconds, Field(description="episodeTimeoutSeconds: of a whole episode. Default: 3600.")
    ] = 3600
    output_bytes: Annotated[
        int,
        Field(
            ge=16, le=10_485_760, description="outputBytes: of a command's output that the policy sees. Default: 16384."
        ),
    ] = 16_384
    memory_mebibytes: Annotated[
        int, Field(ge=16, le=1_048_576, description="memoryMebibytes: of a sandbox. Default: 2048.")
    ] = 2048


class Isolation(StrEnum):
    AUTO = "Auto"
    BUBBLEWRAP = "Bubblewrap"
    NAMESPACES = "Namespaces"
    RLIMITS = "Rlimits"


class Sandbox(Model):
    isolation: Annotated[
        Isolation,
        Field(
            description="isolation: of the policy's commands; Auto takes the strongest that works and says which. Default: Auto."
        ),
    ] = Isolation.AUTO


class Tasks(Model):
    source: Annotated[
        Url,
        Field(
            description="source: folder with train/ and, to evaluate, heldout/; each task a folder in Harbor's format."
        ),
    ]
    sandbox: Sandbox = Sandbox()
    limits: TaskLimits = TaskLimits()


class Rollout(Model):
    sessions: (
        Annotated[
            int,
            Field(
                ge=1,
                le=100_000,
                description="sessions: concurrent agent sessions of the run. Default: the fleet's capacity.",
            ),
        ]
        | None
    ) = None
    workers: Annotated[
        int, Field(ge=1, le=1000, description="workers: rollout pods that share the sessions. Default: 1.")
    ] = 1
    turn_latency_seconds: Annotated[
        Seconds,
        Field(
            description="turnLatencySeconds: an engine's capacity is the sessions that it serves while nine of ten turns take"
            " less, queueing included. Default: 10."
        ),
    ] = 10
    minimum_capacity_percent: Annotated[
        int,
        Field(
            ge=0,
            le=100,
            description="minimumCapacityPercent: of the sessions that all groups together declare; before the first step no"
            " session starts while ready engines serve less. Default: 0, the run starts with the groups that are there.",
        ),
    ] = 0
    template: PodOverrides = PodOverrides()


class Evaluation(Model):
    every_steps: Annotated[
        int, Field(ge=1, le=1_000_000, description="everySteps: evaluate on the held-out tasks this often.")
    ]
    samples_per_task: Annotated[int, Field(ge=1, le=1024, description="samplesPerTask: Default: 1.")] = 1


class OnExisting(StrEnum):
    REFUSE = "Refuse"
    RESUME = "Resume"


class Store(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            immutable("url", "apply another RLRun"),
            (
                "has(self.claimName) == has(oldSelf.claimName) && (!has(self.claimName) || self.claimName == oldSelf.claimName)",
                "claimName is immutable; apply another RLRun",
            ),
        ),
        alias_generator=_alias,
    )
    url: Annotated[
        Url, Field(description="url: fsspec URL of the weight store, ledger and checkpoints: file://, s3://, gs://.")
    ]
    claim_name: (
        Annotated[
            str,
            Field(
                max_length=253,
                description="claimName: PersistentVolumeClaim mounted at the url's path, for file:// stores.",
            ),
        ]
        | None
    ) = None
    on_existing: Annotated[
        OnExisting,
        Field(
            description="onExisting: what to do when an earlier run of this name left its folder in the store: Refuse it, with a"
            " condition, or Resume from its last checkpoint. Default: Refuse."
        ),
    ] = OnExisting.REFUSE


class Checkpoint(Model):
    every_steps: Annotated[int, Field(ge=1, le=1_000_000, description="everySteps: Default: 10.")] = 10
    keep: Annotated[int, Field(ge=1, le=1000, description="keep: newest checkpoints kept. Default: 3.")] = 3
    rewind_to_step: (
        Annotated[
            int,
            Field(
                ge=1,
                le=10_000_000,
                description="rewindToStep: an edit of it takes the run back, once, to its newest checkpoint of at most this step, and it"
                " trains on new samples from there. Default: go on.",
            ),
        ]
        | None
    ) = None


class InlineGroup(SamplerGroupTemplate):
    model_config = ConfigDict(
        json_schema_extra=rules(
            immutable("gpuType", "add another group with the type wanted, then take this one out"),
            immutable("precision", "add another group with the precision wanted, then take this one out"),
            *TEMPLATE_RULES,
        ),
        alias_generator=_alias,
    )
    name: Annotated[
        Name,
        Field(
            description="name: the SamplerGroup made from it is called <run>-<name>.",
            json_schema_extra=rules(
                (
                    f"!(self in {list(RUN_PARTS)})",
                    f"name must not be one of {', '.join(RUN_PARTS)}: the run's own parts are called so",
                )
            ),
        ),
    ]


class Price(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "double(self.usdPerGPUHour) <= 10000.0",
                "usdPerGPUHour must be at most 10000: it is dollars, for one GPU, an hour",
            )
        ),
        alias_generator=_alias,
    )
    gpu_type: GpuTypeName
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    usd_per_gpu_hour: Annotated[DecimalString, Field(description='usdPerGPUHour: list price, e.g. "6.25".')]


class Budget(Model):
    usd_per_hour: (
        Annotated[
            DecimalString, Field(description="usdPerHour: most that the run's pods may cost an hour. Default: no cap.")
        ]
        | None
    ) = None
    usd_total: (
        Annotated[
            DecimalString, Field(description="usdTotal: the run pauses when it has cost this much. Default: no cap.")
        ]
        | None
    ) = None
    gpus: (
        Annotated[
            int,
            Field(
                ge=0,
                le=1_000_000,
                description="gpus: most GPUs that the run's pods may hold, the trainer's included. Default: no cap.",
            ),
        ]
        | None
    ) = None


class Baseline(Model):
    """The homogeneous fleet that cost is compared with."""

    gpu_type: GpuTypeName
    precision: Precision = Precision.BF16
    gpus_per_engine: Annotated[int, Field(ge=1, le=64)] = 1
    engines: Annotated[int, Field(ge=1, le=4096, description="engines: of the baseline fleet.")]
    sessions_per_engine: Annotated[int, Field(ge=1, le=4096)] = 32
    turns_per_engine_hour: (
        Annotated[
            int,
            Field(
                ge=1,
                le=100_000_000,
                description="turnsPerEngineHour: of one of its engines at the latency bound. Default: measured from the run.",
            ),
        ]
        | None
    ) = None


class GuardAction(StrEnum):
    WARN = "Warn"
    THROTTLE = "Throttle"
    QUARANTINE = "Quarantine"
    PAUSE = "Pause"


class Guard(Model):
    """Acts on growth of the mismatch, not on its size."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(
                (
                    f"double(self.{field}) > 0.0",
                    f"{field} must be above 0: it multiplies an early level, and 0 alarms always",
                )
                for field in ("klGrowth", "tailRatio", "outOfRangeGrowth")
            ),
            ("double(self.entropyFall) > 0.0", "entropyFall must be above 0: it divides an early level"),
        ),
        alias_generator=_alias,
    )
    action: Annotated[
        GuardAction, Field(description="action: the strongest step that the guard may take. Default: Pause.")
    ] = GuardAction.PAUSE
    kl_growth: Annotated[
        DecimalString, Field(description='klGrowth: KL over its own early level that raises the alarm. Default: "4".')
    ] = "4"
    tail_ratio: Annotated[
        DecimalString, Field(description='tailRatio: growth of the tail ratio that raises it. Default: "3".')
    ] = "3"
    out_of_range_growth: Annotated[
        DecimalString,
        Field(description='outOfRangeGrowth: growth of the out-of-range share that raises it. Default: "4".'),
    ] = "4"
    format_error_percent: Annotated[
        int,
        Field(
            ge=1, le=100, description="formatErrorPercent: episodes ended by format errors that raise it. Default: 30."
        ),
    ] = 30
    entropy_fall: Annotated[
        DecimalString,
        Field(
            description="entropyFall: early entropy over the present one that raises a warning, and never more:"
            ' a policy that learns grows sure. Default: "10".'
        ),
    ] = "10"
    kl_floor: Annotated[
        DecimalString, Field(description='klFloor: KL in nats below which its growth raises nothing. Default: "0.002".')
    ] = "0.002"
    out_of_range_floor_percent: Annotated[
        DecimalString,
        Field(
            description='outOfRangeFloorPercent: share of tokens below which its growth raises nothing. Default: "1".'
        ),
    ] = "1"
    out_of_range_ceiling_percent: Annotated[
        DecimalString,
        Field(
            description="outOfRangeCeilingPercent: share of tokens that raises it whatever the early level, and over patienceSteps pauses"
            ' the run at once: many times what a healthy run shows. Default: "5.5".'
        ),
    ] = "5.5"
    early_steps: Annotated[
        int, Field(ge=1, le=1000, description="earlySteps: first steps that set the early level. Default: 5.")
    ] = 5
    patience_steps: Annotated[
        int,
        Field(
            ge=1,
            le=1000,
            description="patienceSteps: steps in a row above a threshold before the guard acts. Default: 2.",
        ),
    ] = 2


class RLRunSpec(Model):
    model_config = ConfigDict(
        json_schema_extra=rules(
            immutable("model", "apply another RLRun"),
            immutable("tasks", "apply another RLRun"),
            immutable("algorithm", "apply another RLRun: a change would make its curves unreadable"),
            immutable("batch", "apply another RLRun"),
            immutable("seed", "apply another RLRun: tasks are dealt in its order"),
            ("self.steps >= oldSelf.steps", "steps may only grow: what was trained cannot be taken back"),
            (
                "self.trainer.nodes == 1 || self.store.url.startsWith('file://') || self.store.url.startsWith('/')",
                "trainer.nodes must be 1 unless store.url is a file system: a gang's checkpoint needs a folder that all its pods see",
            ),
        ),
        alias_generator=_alias,
    )
    model: ModelSource
    algorithm: Algorithm = Algorithm()
    batch: Batch = Batch()
    steps: Annotated[int, Field(ge=1, le=10_000_000, description="steps: optimizer steps of the run.")]
    seed: Annotated[
        int, Field(ge=0, le=2_147_483_647, description="seed: of task order and of sampling. Default: 0.")
    ] = 0
    staleness: Staleness = Staleness()
    trainer: Trainer = Trainer()
    tasks: Tasks
    rollout: Rollout = Rollout()
    evaluation: Annotated[Evaluation, Field(description="evaluation: on held-out tasks. Default: none.")] | None = None
    store: Store
    checkpoint: Checkpoint = Checkpoint()
    sampler_groups: Annotated[
        list[InlineGroup],
        Field(
            max_length=32,
            description="samplerGroups: first groups, each made into a SamplerGroup <run>-<name>. More may be applied at any time.",
            json_schema_extra=LIST_MAP_BY_NAME,
        ),
    ] = []
    prices: Annotated[
        list[Price],
        Field(
            max_length=64,
            description="prices: per GPU type and capacity type. A type without one has no cost in status, and a condition says so.",
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["gpuType", "capacityType"],
            },
        ),
    ] = []
    budget: Budget = Budget()
    baseline: (
        Annotated[Baseline, Field(description="baseline: the homogeneous fleet to compare cost with. Default: none.")]
        | None
    ) = None
    guard: Guard = Guard()
    suspend: Annotated[
        bool,
        Field(
            description="suspend: true removes every pod of the run after a save; false goes on from there. Default: false."
        ),
    ] = False


class Mismatch(Model):
    kl: DecimalString | None = None
    out_of_range_percent: DecimalString | None = None
    growth: (
        Annotated[DecimalString, Field(description="growth: KL of the last steps over the run's own early level.")]
        | None
    ) = None


class GroupCost(Model):
    """billedUSD = workPricedUSD + discardedUSD + idleUSD."""

    step: Total
    billed_usd: DecimalString | None = None
    work_priced_usd: DecimalString | None = None
    masked_usd: DecimalString | None = None
    discarded_usd: DecimalString | None = None
    stale_usd: DecimalString | None = None
    idle_usd: DecimalString | None = None


class GroupStatus(Model):
    name: Name
    gpu_type: GpuTypeName
    precision: Precision
    engines: CountOrZero = 0
    ready: CountOrZero = 0
    capacity_sessions: CountOrZero = 0
    capacity_source: Annotated[
        str,
        Field(
            description="capacitySource: Declared until an engine of the group was seen near its declared sessions.",
            json_schema_extra={"enum": ["Declared", "Measured"]},
        ),
    ] = "Declared"
    sessions_per_engine: (
        Annotated[DecimalString, Field(description="sessionsPerEngine: that an engine serves at the latency bound.")]
        | None
    ) = None
    declared_sessions_per_engine: (
        Annotated[CountOrZero, Field(description="declaredSessionsPerEngine: what the measurement began with.")] | None
    ) = None
    measured_until: (
        Annotated[
            str,
            Field(
                description="measuredUntil: load up to here is in sessionsPerEngine.",
                json_schema_extra={"format": "date-time"},
            ),
        ]
        | None
    ) = None
    tokens_per_engine_second: (
        Annotated[DecimalString, Field(description="tokensPerEngineSecond: generated, as last measured under load.")]
        | None
    ) = None
    turn_seconds: (
        Annotated[
            DecimalString, Field(description="turnSeconds: nine of ten turns took less, as last measured under load.")
        ]
        | None
    ) = None
    share_percent: DecimalString = "0"
    samples: Total = 0
    kl: DecimalString | None = None
    kl_ratio: Annotated[DecimalString, Field(description="klRatio: the group's KL over the run's.")] | None = None
    out_of_range_percent: DecimalString | None = None
    ess_percent: DecimalString | None = None
    version: Annotated[int, Field(ge=-1)] = -1
    lag: DecimalString | None = None
    turns_per_engine_hour: (
        Annotated[Total, Field(description="turnsPerEngineHour: declared, or as last measured; prices a turn.")] | None
    ) = None
    usd_per_turn: (
        Annotated[DecimalString, Field(description="usdPerTurn: price of an engine-hour over turnsPerEngineHour.")]
        | None
    ) = None
    usd_per_million_tokens: DecimalString | None = None
    step_cost: (
        Annotated[GroupCost, Field(description="stepCost: the group's part of the newest step that is priced.")] | None
    ) = None


class Cost(Model):
    billed_usd: DecimalString | None = None
    work_priced_usd: DecimalString | None = None
    masked_usd: (
        Annotated[DecimalString, Field(description="maskedUSD: of workPricedUSD, tokens whose weight was 0.")] | None
    ) = None
    sampler_usd: DecimalString | None = None
    trainer_usd: DecimalString | None = None
    idle_usd: DecimalString | None = None
    discarded_usd: DecimalString | None = None
    stale_usd: (
        Annotated[DecimalString, Field(description="staleUSD: of discardedUSD, samples that were too old.")] | None
    ) = None
    baseline_usd: (
        Annotated[
            DecimalString,
            Field(description="baselineUSD: the same turns, priced on the baseline; compare with workPricedUSD."),
        ]
        | None
    ) = None
    baseline_billed_usd: (
        Annotated[
            DecimalString,
            Field(
                description="baselineBilledUSD: the baseline, sized to the same sessions, for the same time; compare with samplerUSD."
            ),
        ]
        | None
    ) = None
    saving_percent: (
        Annotated[
            str,
            Field(
                max_length=20,
                pattern=r"^-?[0-9]{1,9}(\.[0-9]{1,9})?$",
                description="savingPercent: work-priced, against the baseline; negative when dearer.",
            ),
        ]
        | None
    ) = None


class StepCost(Cost):
    """What one optimizer step cost; kept for the last ten."""

    step: Total
    attempt: Total = 0
    seconds: DecimalString = "0"


class GpuTime(Model):
    """GPU time of one kind at one price: integers, so that dollars are exact whatever restarts in between."""

    role: Annotated[str, Field(json_schema_extra={"enum": ["sampler", "trainer"]})]
    gpu_type: GpuTypeName
    capacity_type: CapacityType = CapacityType.ON_DEMAND
    usd_per_gpu_hour: (
        Annotated[
            DecimalString,
            Field(
                description="usdPerGPUHour: price while the time passed; none: it takes the price that is set later."
            ),
        ]
        | None
    ) = None
    gpu_seconds: Total = 0


class GroupGuard(Model):
    name: Name
    action: GuardAction


class GuardStatus(Model):
    """What the guard holds to until spec changes."""

    action: Annotated[GuardAction, Field(description="action: the strongest step in force for the run.")] | None = None
    groups: Annotated[list[GroupGuard], Field(max_length=256, json_schema_extra=LIST_MAP_BY_NAME)] = []
    since_step: Annotated[Total, Field(description="sinceStep: earlier steps raise no alarm any more.")] = 0
    generation: Annotated[int, Field(ge=0, description="generation: of the spec that it was decided under.")] = 0


class Totals(Cost):
    steps: Total = 0
    samples: Total = 0
    generated_tokens: Total = 0
    repeated_steps: Total = 0
    gpu_seconds: Total = 0
    gpu_time: Annotated[list[GpuTime], Field(max_length=128, description="gpuTime: what billedUSD is made of.")] = []
    accounted_until: (
        Annotated[
            str,
            Field(
                description="accountedUntil: pod time up to here is in billedUSD.",
                json_schema_extra={"format": "date-time"},
            ),
        ]
        | None
    ) = None


class Decision(Model):
    time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    what: Text
    why: Annotated[str, Field(max_length=4096)]


class RLRunStatus(Model):
    """Observed; rebuilt at any time from the cluster and the run's ledger."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    conditions: Conditions = []
    status: Annotated[
        str, Field(max_length=64, description="status: the Succeeded condition's reason, for the table.")
    ] = ""
    step: Total | None = None
    attempt: Total | None = None
    weights_version: Annotated[int, Field(ge=-1)] | None = None
    reward: DecimalString | None = None
    evaluation_reward: DecimalString | None = None
    entropy: DecimalString | None = None
    grad_norm: DecimalString | None = None
    mismatch: Mismatch | None = None
    groups_ready: Annotated[str, Field(max_length=32, description="groupsReady: ready of all, for the table: 8/8.")] = (
        ""
    )
    groups: Annotated[list[GroupStatus], Field(max_length=256, json_schema_extra=LIST_MAP_BY_NAME)] = []
    cost_per_step: Annotated[Cost, Field(description="costPerStep: mean over the last steps.")] | None = None
    step_costs: Annotated[list[StepCost], Field(max_length=10, description="stepCosts: of the last ten steps.")] = []
    totals: Totals | None = None
    guard: GuardStatus | None = None
    decisions: Annotated[
        list[Decision], Field(max_length=10, description="decisions: the last ten: what, why, with which numbers.")
    ] = []


class RLRun(Model):
    """RLRun trains one model by reinforcement learning, sampling on every accelerator that its groups name."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"size(self.metadata.name) <= {MAX_NAME - 10}",
                f"metadata.name must be at most {MAX_NAME - 10} characters: children are named after it",
            ),
            (
                "self.metadata.name.matches('^[a-z][-a-z0-9]*$')",
                "metadata.name must start with a letter and have no dots: Services are named after it",
            ),
            (
                "!has(self.spec.samplerGroups) || self.spec.samplerGroups.all(g, size(self.metadata.name) + 1 + size(g.name)"
                f" <= {MAX_NAME})",
                f"<metadata.name>-<samplerGroups[].name> must be at most {MAX_NAME} characters: pods and labels are named after it",
            ),
        ),
        alias_generator=_alias,
    )
    api_version: str = "motley.dev/v1alpha1"
    kind: str = "RLRun"
    metadata: dict[str, Any] = {}
    spec: RLRunSpec
    status: RLRunStatus | None = None


__all__ = ["Count", "Message", "RLRun", "RLRunSpec", "RLRunStatus"]
