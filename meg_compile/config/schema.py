"""The configuration as typed values: one dataclass a section, one docstring line a field.

The values themselves live in `conf/`; nothing here has a default. The classes are mutable because the last
steps of loading fill in what was left to us (`launch.nproc`, absolute paths).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from meg_compile.config.targets import MaybeTarget, Target
from meg_compile.plan import Plan

ALONE = ("explain", "eject")
"""Tasks that start no process."""
WITHOUT_DATA = (*ALONE, "generate")
"""Tasks that read no dataset."""


@dataclass
class PlanConfig:
    """How the ranks share the work; the ranks needed are tp x cp x dp x pp."""

    tp: int
    """Ranks that share every layer (tensor parallel)."""
    pp: int
    """Pipeline ranks (pipeline parallel)."""
    vpp: int
    """Stages per pipeline rank; the schedule says how many it runs."""
    dp: int
    """Replicas of the model, each reading its own rows (data parallel)."""
    cp: int
    """Ranks that share one sequence (context parallel); 1 for none."""
    sp: bool
    """Split the sequence over the tp ranks between layers (sequence parallel)."""
    zero: int
    """What the replicas share, instead of each holding it: 0 nothing, 1 optimizer states, 2 and gradients, 3 and
    parameters."""
    schedule: str
    """Order of forward and backward passes, a name in `meg_compile.schedules`."""
    stages: list[int] | str | None
    """Blocks on each stage in order, a layout such as "Et*3|t*3L", or null for a balanced cut."""
    split: int | None
    """Stage at which the second tower (the decoder) starts; null for the one that the cost speaks for."""
    place: dict[str, int]
    """Stages of single blocks by name or pattern, as {h.0: 0, "encoder.*": 1}; the rest is balanced around them."""
    keep: list[str]
    """Axes ("ffn"), parameters or modules ("h.0.mlp.*", "*.attn") that stay whole on every tp rank."""
    shard: list[str]
    """Axes, parameters or modules that must be sharded over tp, a dim behind a colon ("h.*.mlp.fc1.weight:0"); where
    two axes compete in one tensor they win, and what cannot be is refused."""
    recompute: str
    """What backward computes again instead of keeping it: none, selective (the attention core) or full (blocks)."""
    recompute_every: int
    """Of a stage's blocks, recompute each n-th; 1 for all."""
    strict: bool
    """Refuse a model with an axis that tp does not divide, rather than keep those layers whole."""

    def plan(self) -> Plan:
        """The frozen plan that the compiler takes."""
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in vars(self).items()}
        return Plan(**values)


@dataclass
class DataConfig(Target):
    """The dataset: any map-style dataset, with its constructor's arguments beside `_target_`."""

    shuffle: bool
    """Read the rows in a new order every epoch, drawn from `train.seed`; false reads them as they come."""
    fields: list[str] | None
    """Which fields of a sample reach the model and the loss; null for all of them."""


@dataclass
class OptimConfig(MaybeTarget):
    """The optimizer and its learning rate; with a `_target_` any class of torch.optim's kind, its arguments beside."""

    name: Literal["adamw", "sgd"] | None
    """Which optimizer; null where `_target_` names a class."""
    lr: float
    """Peak learning rate."""
    min_lr: float
    """Learning rate at the end of the schedule; it stays there."""
    warmup_steps: int | None
    """Steps of linear warm-up; null for warmup_fraction, or else a tenth of `train.steps`, and none for a constant
    rate."""
    warmup_fraction: float | None
    """The same as a share of `train.steps`, at least 0 and under 1; null for warmup_steps."""
    weight_decay: float | None
    """Decoupled decay (adamw) or L2 penalty (sgd); null for the class's own."""
    betas: list[float] | None
    """Decay rates of AdamW's two moments; null for the class's own."""
    eps: float | list[float] | None
    """Added to AdamW's denominator; null for the class's own."""
    momentum: float | None
    """SGD's momentum, 0 for none; null for the class's own."""
    decay: Literal["matrices", "all"]
    """Which parameters decay: those with two or more dims, or all."""
    no_decay: list[str]
    """Parameters or modules by pattern ("*.bias", "wte") that do not decay either."""
    groups: list[dict[str, Any]]
    """Parameters with settings of their own: {params: pattern or list of them, and any of lr_scale (a factor of the
    learning rate), weight_decay (of all in the group), betas and other options of the optimizer}."""
    frozen: list[str]
    """Parameters or modules by pattern that are not trained; each must match."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
    """How the rate moves after warm-up."""
    decay_steps: int | None
    """Step at which min_lr is reached; null for `train.steps`."""
    wsd_decay_steps: int | None
    """Steps of the decay at the end of wsd; null for a tenth of all."""
    wsd_decay: Literal["linear", "cosine", "sqrt", "exponential"]
    """Shape of that decay."""


@dataclass
class TrainConfig:
    """The training run."""

    steps: int
    """Optimizer steps; 0 only builds, checks and exports."""
    micro_batch_size: int
    """Rows that go through a stage at once."""
    global_batch_size: int
    """Rows per optimizer step, over all replicas: a multiple of micro_batch_size x plan.dp."""
    batch_ramp: dict[str, int] | None
    """A global batch that grows, as {start: 16, increment: 8, rows: 100000}: from `start` rows by `increment` at a
    time, in equal parts of the first `rows` rows of the run, to global_batch_size; null for none."""
    seed: int
    """Seed of the starting weights, dropout and row order."""
    clip_grad: float
    """Largest global gradient norm; 0 for no clipping."""
    loss_scale: float | None
    """What the loss is multiplied by in fp16, so that small gradients are not lost; null adapts it."""
    check: bool | None
    """Compare one step with the plain model before training; null for small models only."""
    check_replicas: int | None
    """Steps between comparisons of the copies of parameters that ranks hold alike, which stop a run whose copies part;
    null for none."""


@dataclass
class EvalConfig:
    """The loss over validation rows, measured while training (task=train)."""

    every: int | None
    """After how many steps each time, and after the last one; null for never."""
    batches: int | None
    """Of how many global batches of rows, from the first one on; null for all rows."""
    data: dict[str, Any] | None
    """The arguments of the dataset that differ from those in `data`, with another `_target_` if need be, as
    {path: valid.txt}; null for the same data with part=valid."""


@dataclass
class VerifyConfig:
    """The comparison with the plain model (task=verify)."""

    steps: int
    """Optimizer steps to compare."""
    tolerance: float | None
    """Largest relative error that passes; null for the precision's own."""


@dataclass
class LaunchConfig:
    """The processes: those of a local run, and how long any run may wait."""

    nproc: int | None
    """Processes to start; null for as many as the plan needs."""
    device: Literal["auto", "cpu", "cuda"]
    """Where to compute; auto is cuda where every local rank has a GPU of its own, else cpu."""
    threads: int | None
    """CPU threads per process; null shares the cores out evenly."""
    timeout: float | None
    """Seconds in which no rank makes any progress, after which the run ends with every rank's stack, under torchrun
    too; null for never."""
    max_restarts: int
    """How often a run that fails is started again, from the latest good checkpoint in `checkpoint.dir`."""


@dataclass
class CheckpointConfig:
    """The state of a training run on disk, from which it goes on."""

    dir: str | None
    """Where to save; null for nowhere. A run that finds checkpoints there goes on from the latest good one."""
    every: int | None
    """Steps between two checkpoints; null saves at the end, and where a signal stops the run."""
    keep: int
    """How many of the last ones stay."""
    keep_every: int | None
    """Those of every so many steps stay as well; null for none."""
    resume: str | None
    """auto goes on from the latest good one in `dir`, or starts afresh; a path goes on from that one; null starts
    afresh."""
    background: bool
    """Write while training goes on, from a copy in main memory."""
    signal: str | None
    """A signal beside SIGTERM at which the run saves and stops, as Slurm sends one before the time is up; null for
    none."""


@dataclass
class LogConfig:
    """What a run measures and where it is shown."""

    every: int
    """Steps between gatherings of the phases' times and the memory of all ranks."""
    timers: bool | None
    """Whether the phases of a step are timed; null on CPUs alone, where that costs nothing."""
    peak_tflops: float | None
    """What a rank could do at most, in 10^12 operations a second, for the share that it does (MFU); null for that of a
    known GPU, and no share on others."""
    wandb: str | None
    """A project of Weights & Biases to log to as well; null for none."""


@dataclass
class ExportConfig:
    """The trained weights, as whole tensors."""

    path: str | None
    """Where to write them at the end: NAME.safetensors for one file, any other name for a folder as transformers keeps
    it; null for nowhere."""
    dtype: Literal["held", "fp64", "fp32", "bf16", "fp16"]
    """Floating-point format to write; held is the one that they are trained in."""
    max_shard_gb: float
    """Size of a folder's files, in 10^9 bytes, above which there are several."""


@dataclass
class InitConfig:
    """Starting weights from a file."""

    path: str | None
    """A safetensors file, or a folder of transformers; null for the weights that the model's class draws."""


@dataclass
class GenerateConfig:
    """Texts that a trained model goes on with (task=generate), from the weights of `checkpoint` or `init.path`."""

    prompts: list[Any] | None
    """The beginnings, each a text or a list of token ids."""
    file: str | None
    """A text file that has a beginning a line, instead."""
    tokens: int
    """New tokens of each text at most."""
    temperature: float
    """0 takes the likeliest token; else one is drawn, by logits divided by this."""
    top_k: int | None
    """Draw among so many of the likeliest; null for all."""
    top_p: float | None
    """Draw among the likeliest that have this probability together; null for all."""
    seed: int
    """Seed of what is drawn."""
    stop: int | str | None
    """The token that ends a text, by number or name ("<|endoftext|>"); null for none."""
    tokenizer: str | None
    """As data.tokenizer, or `bytes`; null for that of data.tokenizer or of the folder init.path."""
    rows: int | None
    """Texts that a replica works on together; null for up to 16."""


@dataclass
class ExplainConfig:
    """What task=explain prints."""

    block: int
    """The block whose rewritten graph is shown, counted from 0."""


@dataclass
class Config:
    """Everything that a run is made of."""

    task: Literal["train", "generate", "explain", "verify", "eject"]
    """train the model, generate text with it, explain the plan, verify it against the plain model, or eject it as
    source that runs with torch alone; explain and eject start no process."""
    precision: Literal["fp64", "fp32", "bf16", "fp16"]
    """Floating-point format of the model. In bf16 and fp16 the weights that are trained, sums of gradients, their
    reductions and the optimizer are in fp32."""
    compile: bool
    """Run every block through torch.compile; pays on GPUs, and the first step takes long."""
    dropout: Literal["exact", "fast"]
    """Masks that are the same under every plan (exact), or drawn by torch's generators as Megatron-LM does (fast)."""
    model: Target
    """The plain model: `_target_` and its constructor's arguments."""
    loss: Target
    """Loss of a model that returns logits: `_target_(logits, labels, **arguments)`."""
    plan: PlanConfig
    """How the ranks share the work."""
    data: DataConfig
    """The dataset."""
    optim: OptimConfig
    """The optimizer."""
    train: TrainConfig
    """The training run."""
    eval: EvalConfig
    """The loss over validation rows."""
    verify: VerifyConfig
    """The comparison with the plain model."""
    launch: LaunchConfig
    """The processes."""
    init: InitConfig
    """The starting weights."""
    checkpoint: CheckpointConfig
    """The state of the run on disk."""
    log: LogConfig
    """What is measured."""
    export: ExportConfig
    """The trained weights."""
    generate: GenerateConfig
    """Texts to go on with."""
    explain: ExplainConfig
    """What task=explain prints."""

    @property
    def num_ranks(self) -> int:
        """Processes that the plan needs."""
        return self.plan.tp * self.plan.cp * self.plan.dp * self.plan.pp

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per replica and step."""
        return self.train.global_batch_size // (self.train.micro_batch_size * self.plan.dp)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, laid out as in the YAML files."""
        return {key: _plain(value) for key, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, (Target, MaybeTarget)):
        rest = {key: item for key, item in vars(value).items() if key not in ("target", "args")}
        return {"_target_": value.target, **value.args, **rest}
    return dict(vars(value)) if hasattr(value, "__dict__") else value
