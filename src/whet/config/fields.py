"""The fields of `TrainingArguments`, with the names and defaults of `transformers` and a help text for each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from whet.config.ranks import here

if TYPE_CHECKING:
    import torch
    from transformers.training_args import ParallelMode

Interval = Literal["no", "steps", "epoch"]
PaddingInLoss = Literal["none", "sampled", "all"]
SpanLoss = Literal["independent", "compound"]
LastBlockTokens = Literal["read", "all"]
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial",
    "inverse_sqrt", "constant", "constant_with_warmup", "warmup_stable_decay", "reduce_lr_on_plateau", "greedy",
]  # fmt: skip
Tracker = Literal["none", "all", "tensorboard", "wandb", "mlflow", "trackio"]

OUTPUT_DIR = "trainer_output"
UPLOAD = (
    "push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push", "hub_revision"
)  # fmt: skip
"""The settings of an upload to the hub, the one that asks for it first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFields:
    """The settings of a run before validation; `TrainingArguments` applies the rules."""

    output_dir: str = field(default=OUTPUT_DIR, kw_only=False, metadata={"kind": str | None})
    """Folder for the trained model, checkpoints, metrics, predictions and run.log. Created if it is missing."""
    overwrite_output_dir: bool = False
    """Write to output_dir even if it holds files already; a training removes the checkpoints there once it has taken a
    step. Without it, such a run stops before it starts."""
    do_train: bool = False
    """Train the model on the training data."""
    do_eval: bool = False
    """Evaluate the model on the validation data, after training if do_train is set. Turned on by eval_strategy steps
    or epoch, and by eval_on_start."""
    do_predict: bool = False
    """Predict on the test data and write the predictions to output_dir."""
    resume_from_checkpoint: str | bool | None = None
    """Resume an earlier run. auto, true or no value: from the newest intact checkpoint in output_dir. A path: from that
    checkpoint."""
    ignore_data_skip: bool = False
    """On resume, do not read the earlier rows of an iterable data set without a state, or of a DataLoader of your own,
    again: the run takes the rows that come first then. Other data continue with the next row at no cost in any case."""
    resume_allow_changes: Sequence[str] = field(default=(), metadata={"kind": tuple[str, ...]})
    """Settings that may differ from the checkpoint that a run resumes from, such as learning_rate,optim. Also possible:
    model, data, order, dtype and rows_per_step. Any other difference stops the run before it starts."""
    ddp_backend: str | None = None
    """How the ranks of a run exchange numbers: gloo, mpi or nccl, as far as this torch has it. null: gloo on a CPU,
    nccl on GPUs. With one process it has no effect, like the other ddp settings."""
    ddp_timeout: int = 300
    """Seconds that a rank waits for the others before the run ends with an error."""
    ddp_comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Form in which gradients travel between the ranks. none: float32, exact. bf16, fp16: half the bytes, for slow
    networks; bf16 is summed in float32. powersgd: matrices of rank 4 that stand for the gradients, from step 10 on; a
    resumed run forgets what earlier steps left out."""
    ddp_bucket_cap_mb: int | None = None
    """Size in MiB of the buckets in which gradients travel while the backward pass computes others. null: 4."""
    ddp_find_unused_parameters: bool | None = None
    """Whether weights may have no gradient in a step of several ranks. false saves a walk over the graph. null: yes."""
    zero_stage: int | None = None
    """What the ranks of a run share, so that each needs less memory (ZeRO). 1: the state of the optimizer. 2: gradients
    too. 3: weights too, collected for each block when it computes. 0: nothing. null: what fsdp or deepspeed ask for.
    The curve stays the same. With one process it has no effect."""
    fsdp: str | bool | None = None
    """The same in the words of transformers: true or full_shard is zero_stage 3, shard_grad_op is zero_stage 2; they
    may be followed by auto_wrap."""
    offload: Literal["none", "optimizer", "params"] = "none"
    """What waits in the host's memory while a GPU does not need it, with zero_stage 2 or 3 on several ranks: PyTorch
    moves weights, gradients and the optimizer's state together, and the optimizer then updates them on the CPU.
    optimizer and params therefore do the same. Without a GPU there is nothing to offload, and it is refused."""
    deepspeed: str | dict[str, Any] | None = None
    """Configuration of DeepSpeed, a JSON file or a dict. If DeepSpeed is installed, its engine sums gradients and
    shares what ranks hold; if not, zero_stage does, at the stage of the configuration. "auto" takes the value of the
    argument. A value that differs from the argument, and a key that whet does not know, are errors."""
    seed: int = 42
    """Random seed of new weights, dropout and, without data_seed, row order. Same seed and settings: same run."""
    full_determinism: bool = False
    """Refuse or replace operations of torch whose result differs from run to run (torch.use_deterministic_algorithms),
    in training and evaluation. whet's own operators on a CPU never differ; a loss of your own, or a GPU, may."""
    data_seed: int | None = None
    """Random seed of the row order only. null: the same as seed (42 for batch_rebalance, as in transformers)."""
    use_cpu: bool = False
    """Run on the CPU even if there is a GPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Number format of the matrix products; the weights always stay float32. auto: times fp32 and bf16 on your model
    and rows at the start of the training, and uses bf16 if it is clearly faster; the run prints what it measured. int8:
    8-bit integers in the linear layers of packed encoders, on CPUs with VNNI and without fast products of bf16;
    gradients of weights stay float32 products. Faster than fp32 and less exact; auto never chooses it."""
    bf16: bool | None = None
    """The same as precision bf16: matrix products in bfloat16, whose numbers have 2 to 3 decimal digits. Meant for
    processors with bf16 instructions (AMX, AVX-512 BF16, GPUs since Ampere). false: auto may not choose it."""
    fp16: bool | None = None
    """The same as precision fp16: matrix products in float16, which holds 3 decimal digits, but no numbers above 65504;
    losses are scaled up, and gradients down again. Meant for GPUs older than Ampere."""
    tf32: bool | None = None
    """Let float32 products round their factors to 3 decimal digits on the tensor cores of a GPU (since Ampere). null:
    the present setting of torch."""

    per_device_train_batch_size: int = 8
    """Rows in one forward and backward pass of each rank. More rows use the machine better, and need more memory."""
    gradient_accumulation_steps: int = 1
    """Batches whose gradients are summed before the weights change. 4 batches of 8 rows train exactly like 1 batch of
    32 rows, with about a quarter of the activation memory."""
    max_tokens_per_batch: int | None = None
    """Most real tokens in one forward and backward pass. A batch with more is split between rows; a longer row runs
    alone. The rows of a step and its result stay the same; only the memory shrinks. Padding that the loss counts is not
    included: up to 4 tokens a row with padding_in_loss sampled. null: split by rows only."""
    auto_find_batch_size: bool = False
    """Before training, find how many rows fit into memory at a time, up to per_device_train_batch_size, by passes over
    the longest rows. If fewer fit, more batches are accumulated, so each step keeps its rows."""
    gradient_checkpointing: bool = field(default=False, metadata={"kind": bool | None})
    """Keep fewer activations and recompute the rest in backward: less memory, more time, the same result."""
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    """Options that transformers passes to torch, as a JSON object. whet accepts only {"use_reentrant": false}, which is
    what it always does."""
    checkpointing_policy: Literal["blocks", "selective"] = "blocks"
    """What gradient_checkpointing recomputes. blocks: everything but the input of each block, which saves most memory.
    selective: only cheap results (norms, activations, dropouts, softmax); results of matrix products are kept."""
    activation_offload: bool = False
    """Keep the activations in the host's memory until backward reads them. Needs a GPU."""
    methods: Sequence[str] = field(default=(), metadata={"kind": tuple[str, ...]})
    """Methods without a setting of their own that change the model before training, by name and with commas between
    them, such as freeze_tables (no training of the embedding tables). An unknown name is refused with the list."""
    freeze_layers: int | None = None
    """Do not train the embeddings and this many blocks, counted from the input: they keep their weights, without
    dropout. With lora_r these blocks get no pairs. 0: the embeddings alone. null: train all layers."""
    cache_frozen_trunk: bool = False
    """With freeze_layers: run the frozen layers once for each row, and keep the hidden states behind them in a file in
    output_dir, which is removed with the run. Later epochs read them. For packed batches on a CPU."""
    torch_empty_cache_steps: int | None = None
    """Every this many optimizer steps, return unused memory: the GPU's cache, or on a CPU freed memory to the system.
    run.log ends with the time that it took. null: never."""
    torch_compile: bool = False
    """Compile each block of the model with torch.compile: one compilation serves all layers and lengths."""
    torch_compile_backend: str | None = None
    """Compiler backend, by its name in torch._dynamo.list_backends(None). Turns torch_compile on. null: inductor."""
    torch_compile_mode: str | None = None
    """How much inductor optimizes: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs. Turns
    torch_compile on. null: default."""
    cuda_graphs: bool = True
    """On a GPU, record the launches of training passes and repeat them as one, for batches of one size each. What is
    compiled, recomputed or offloaded, and what trains on several GPUs, runs launch by launch. false: all does."""
    attn_implementation: Literal["whet", "eager", "sdpa", "flash_attention_2"] | None = None
    """Which code computes attention. whet: packed rows without padding, with dropout masks that do not depend on how a
    step is split. flash_attention_2: flash kernels of a GPU, without padding if whet knows the model's family. eager,
    sdpa: attention of transformers, with padding. null: whet if it knows the family (a GPU then uses flash kernels if
    possible, with their own dropout masks), otherwise the setting of the model."""
    recipe: Literal["few_samples"] | None = None
    """A named set of values for the settings that you do not give. few_samples: for some hundred training examples, see
    docs/adapt.md. The first lines of the run show which values it set. null: none."""
    last_block_tokens: LastBlockTokens = "read"
    """Which tokens the last block of a packed encoder computes on a CPU. read: those whose hidden states the head reads
    (the first of each row for classes, those with a label for masked words); of the others, keys and values alone. The
    losses are equal to rounding. all: every token."""
    num_train_epochs: float = 3.0
    """How many times the training uses every row. 0.5 stops after half of the rows."""
    min_steps: int | None = None
    """Take at least this many optimizer steps, even if num_train_epochs asks for fewer: a few epochs of little data are
    too few updates. null: num_train_epochs alone decides."""
    max_steps: int = -1
    """Stop after this many optimizer steps; num_train_epochs then has no effect. -1: off."""
    train_sampling_strategy: Literal["random", "sequential", "group_by_length", "batch_rebalance"] = "random"
    """Order of the rows, the same as in transformers' Trainer for this seed. random: shuffled every epoch. sequential:
    as in the data. group_by_length: shuffled, with rows of similar length in each step. batch_rebalance: shuffled,
    with about as many tokens in each batch of a step."""
    length_column_name: str = "length"
    """Column of the training set with the length of each row, for group_by_length and batch_rebalance. Without such a
    column the lengths of input_ids are used."""
    remove_unused_columns: bool = True
    """Remove the columns that the model does not read from the rows before data_collator gets them, except those that
    the data_collator asks for by name."""
    label_names: Sequence[str] | None = field(default=None, metadata={"kind": tuple[str, ...] | None})
    """Columns with labels, one flag each, for a model whose forward does not name them. null: those that the model's
    forward names."""
    dataloader_drop_last: bool = False
    """Leave out the last batch of an epoch of training if it is not full. Evaluations and predictions take every row;
    transformers' Trainer leaves their last rows out as well."""
    dataloader_num_workers: int = 0
    """Threads that prepare batches while the model computes. The data set must allow reads from several threads and
    draw no random numbers. 0: each batch is prepared when it is needed."""
    dataloader_prefetch_factor: int | None = None
    """Batches that each worker prepares ahead. null: 2, if there are workers."""
    dataloader_pin_memory: bool | None = None
    """Keep batches in pinned memory, from which a GPU copies while it computes. null: on with a GPU. On a CPU it has no
    effect, and true is noted in the log."""
    dataloader_persistent_workers: bool = False
    """Let workers prepare the first batches of the next epoch while an epoch ends with its evaluation and checkpoint.
    Otherwise they stop at the end of each epoch. Needs dataloader_num_workers."""
    learning_rate: float = 5e-5
    """Highest learning rate of the run; the schedule stays below it. 2e-5 to 5e-5 is usual for fine-tuning encoders."""
    lr_scheduler_type: Schedule = "linear"
    """How the learning rate changes after the warm-up. linear, polynomial and the cosines fall to 0 or to a lowest
    rate, inverse_sqrt falls more and more slowly, constant and constant_with_warmup do not change, warmup_stable_decay
    is constant and then falls. reduce_lr_on_plateau and greedy follow metric_for_best_model at each evaluation."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Parameters of the schedule as a JSON object, such as num_cycles (cosine), min_lr or min_lr_rate
    (cosine_with_min_lr), lr_end and power (polynomial), num_decay_steps (warmup_stable_decay), patience and factor
    (reduce_lr_on_plateau)."""
    warmup_steps: int | float = 0
    """Optimizer steps over which the learning rate rises from 0 to its highest. Below 1: a share of the run."""
    warmup_ratio: float = 0.0
    """The warm-up as a share of the run, 0 to 1; an older form of a warmup_steps below 1."""
    layerwise_lr_decay: float = 1.0
    """Lower learning rates for lower layers: the head learns at learning_rate, the last block at this times as much,
    the block below it at this times that, and so on down to the embeddings. 0.8 to 0.95 is usual. 1: off."""
    reinit_layers: int = 0
    """Begin with new weights in this many of the last blocks, and in the pooler if there is one, drawn from seed as the
    model's family initialises them. They then learn the task instead of unlearning the pretraining."""
    weight_averaging_start: float | None = None
    """Average the weights over the optimizer steps after this share of the run, such as 0.5. From then on the averaged
    weights are evaluated, saved in checkpoints and returned as the model; the training continues with its own. Works
    best with lr_scheduler_type constant_with_warmup. null: off."""
    optim: str = field(default="auto", metadata={"listing": "optimizers"})
    """Optimizer:"""
    optim_args: str | None = None
    """Options of the optimizer as key=value,key=value, such as momentum=0.9 for sgd. null: its usual ones."""
    padding_in_loss: PaddingInLoss = "none"
    """Which padding tokens count in the softmax of a question answering loss. all: those of rows padded to the longest
    of their per_device_train_batch_size rows (or as pad_to_max_length says); this is the loss of transformers, at the
    cost of a padded run. sampled: a few tokens a row that stand for all; the mean over batches is within 0.02 % of that
    loss. none: real tokens only."""
    span_loss: SpanLoss = "independent"
    """Loss of a question answering model. independent: the cross entropies of start and end, as in transformers.
    compound: also that of the two together, among all spans that end at or after their start."""
    optimizer_in_backward: bool = False
    """Update each weight and free its gradient as soon as the gradient is computed, inside the backward pass. Saves the
    memory of the gradients. Needs max_grad_norm 0, no accumulation and no max_loss_spike."""
    weight_decay: float = 0.0
    """Each step reduces a weight by this share of itself times the learning rate. Not applied to biases and norms."""
    adam_beta1: float = 0.9
    """Share of AdamW's running mean of the gradient that each step keeps."""
    adam_beta2: float = 0.999
    """Share of AdamW's running mean of the squared gradient that each step keeps."""
    adam_epsilon: float = 1e-8
    """Added to the root that AdamW divides by, so that it never divides by 0."""
    label_smoothing_factor: float = 0.0
    """Share of each label that is spread evenly over all classes, 0 to 1, for models that learn from labels. Batches
    are then padded; a model of a known family still computes without the padding. 0: off."""
    max_grad_norm: float = 1.0
    """Scale gradients down if their overall norm is larger than this. 0: off."""

    max_nonfinite_steps: int = 3
    """End the run with exit code 70 after this many steps in a row whose loss or gradient is not finite (or whose loss
    is a spike, see max_loss_spike). None of these steps changes a weight, except that optimizer_in_backward applies
    the gradients of the step that are finite; each is counted and logged."""
    max_loss_spike: float | None = None
    """Do not apply a step whose loss is more than this many times the median loss of the steps before it (the last 32,
    once there are 8). Such steps are counted and logged. null: off."""
    memory_limit_gb: float | None = None
    """Memory in GiB that this process may use. Near the limit the run saves a checkpoint, stops with exit code 75 and
    says what to change. null: what the machine or the cgroup allows. 0: no limit is watched."""

    eval_strategy: Interval = "no"
    """When to evaluate during training: never, every eval_steps, or after every epoch."""
    eval_steps: int | float | None = None
    """Optimizer steps between evaluations, for eval_strategy steps. Below 1: a share of the run. null: as
    logging_steps."""
    eval_delay: float = field(default=0.0, metadata={"kind": float | None})
    """Steps, or epochs for eval_strategy epoch, before the first evaluation of the training."""
    prediction_loss_only: bool = False
    """Keep only the loss of evaluations and predictions, and do not call compute_metrics."""
    include_for_metrics: Sequence[Literal["inputs", "loss"]] = field(
        default=(), metadata={"kind": tuple[Literal["inputs", "loss"], ...]}
    )
    """What compute_metrics gets besides predictions and labels: inputs, the padded input_ids; loss, for each row the
    mean loss of its batch."""
    eval_do_concat_batches: bool = True
    """Give compute_metrics one array of all rows. false: a list with the array of each batch, as Trainer.predict then
    returns it."""
    eval_on_start: bool = False
    """Evaluate once before the first step, as a baseline."""
    per_device_eval_batch_size: int = 8
    """Rows in one forward pass of an evaluation. No gradients are kept, so it may be larger than for training."""

    save_strategy: Literal["no", "steps", "epoch", "time", "best"] = "steps"
    """When to write a checkpoint: never, every save_steps, after every epoch, every save_interval_s, or at each new
    best evaluation."""
    save_steps: int | float = 500
    """Optimizer steps between checkpoints, for save_strategy steps. Below 1: a share of the run."""
    save_interval_s: float = 600.0
    """Seconds between checkpoints, for save_strategy time. A checkpoint is written after the step in which they end."""
    save_async: bool = False
    """Copy weights and optimizer state in memory and write the checkpoint while training continues. Takes as much
    memory as a checkpoint has bytes. The files are the same."""
    save_only_model: bool = False
    """Write checkpoints with the model and without the optimizer, a third of the bytes with AdamW. A run cannot resume
    from them; they serve to load_best_model_at_end, to evaluate and to start new runs. If a signal or a lack of memory
    stops the run, its last checkpoint is a complete one."""
    save_error_policy: Literal["stop", "continue"] = "stop"
    """What happens if a checkpoint cannot be written. stop: the run ends with exit code 74. continue: a warning, and
    the run tries again at the next checkpoint. Earlier checkpoints stay complete in both cases."""
    save_total_limit: int | None = None
    """Keep this many of the newest checkpoints and delete older ones; the best one always stays with
    load_best_model_at_end. null: keep all."""
    enable_jit_checkpoint: bool | None = None
    """On SIGTERM, SIGINT or SIGUSR1 save a checkpoint, even with save_strategy no, and exit with code 75. No finished
    step is lost; the unfinished one is repeated after resuming. null: on in whet qa, off for a Trainer in another
    program, which keeps its own handling of Ctrl-C."""
    load_best_model_at_end: bool = False
    """End with the weights of the best evaluation, not with the last ones."""
    metric_for_best_model: str | None = None
    """Metric that decides which model is best, such as f1 or loss. null: loss, if load_best_model_at_end is set; whet
    qa uses f1, as its evaluation has no loss."""
    greater_is_better: bool | None = None
    """Whether a larger metric is better. null: true, unless the metric's name ends in loss; false also for mse of whet
    classify and rewards/rejected of whet lm."""
    push_to_hub: bool = False
    """Upload the trained model to the hub: weights, configuration, tokenizer and card. Files with texts of the data, as
    predictions, errors and the report, stay here, and so do logs; but the card of whet embed and rerank shows three
    rows, as sentence-transformers writes it. The repository is made before the run begins."""
    hub_model_id: str | None = None
    """Repository of push_to_hub, such as me/answers. null: the name of output_dir, in the account of the token."""
    hub_strategy: Literal["end", "every_save", "checkpoint", "all_checkpoints"] = "every_save"
    """What push_to_hub uploads: end the trained model; every_save also the model of each checkpoint, in the background;
    checkpoint also the newest checkpoint, as last-checkpoint; all_checkpoints all of them, under their names."""
    hub_token: str | None = field(default=None, repr=False, metadata={"secret": True})
    """Token of push_to_hub, which may write. null: token, the environment's HF_TOKEN, or the login kept by the hub's
    own tool. Other users of the machine can read flags, so prefer those."""
    hub_private_repo: bool | None = None
    """Make the repository of push_to_hub private. null: as the account is set. One that exists stays as it is."""
    hub_always_push: bool = False
    """Wait for an upload that is still on its way instead of leaving out the one of this save."""
    hub_revision: str | None = None
    """Branch of the repository that push_to_hub uploads to; made if it is missing. null: main."""

    logging_strategy: Interval = "steps"
    """When to log loss and learning rate: never, every logging_steps, or after every epoch."""
    logging_steps: int | float = 500
    """Optimizer steps between logs, for logging_strategy steps. Below 1: a share of the run."""
    logging_first_step: bool = False
    """Log the first optimizer step as well."""
    log_level: Literal["passive", "debug", "info", "warning", "error", "critical"] = "passive"
    """Least severe messages that are shown. passive: as the program is set; whet qa shows warnings and errors. run.log
    in output_dir gets the messages from info on in any case."""
    log_format: Literal["text", "json"] = "text"
    """Form of what a run prints while it trains. text: for people. json: one JSON object a line, for programs; the
    words for people then go to standard error."""
    report_to: Sequence[str] | str = field(default=(), metadata={"kind": tuple[Tracker, ...]})
    """Trackers that receive the logs, separated by commas or one flag each. all: every one that is installed."""
    run_name: str | None = None
    """Name of the run in the trackers. null: the tracker chooses one."""
    logging_dir: str | None = None
    """Folder for TensorBoard's files; each of several seeds or trials has its own in it. null: runs, in output_dir."""
    disable_tqdm: bool = field(default=False, metadata={"kind": bool | None})
    """Show no live line on a terminal; print a line at each interval instead, as into a file."""
    profile: bool = False
    """Show how the time of a training step is spent: matrix products, attention, norms, optimizer, data and so on. Five
    steps are profiled after twelve steps of warm-up (fewer in a short run); then training continues as usual."""

    @property
    def train_rows_per_step(self) -> int:
        """Rows per optimizer step, over all accumulated batches of all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * here().n_ranks

    @property
    def device(self) -> "torch.device":
        """The device of the model: the first GPU, unless there is none or use_cpu is set."""
        import torch

        return torch.device("cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu")

    @property
    def parallel_mode(self) -> "ParallelMode":
        """How the run is distributed, in transformers' words."""
        from transformers.training_args import ParallelMode

        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return here().n_ranks

    @property
    def should_log(self) -> bool:
        """Whether this process logs: rank 0 does."""
        return here().is_first

    @property
    def should_save(self) -> bool:
        """Whether this process writes files: rank 0 does."""
        return here().is_first

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the steps of warm-up in a run of this many steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil((self.warmup_steps or self.warmup_ratio) * num_training_steps)
