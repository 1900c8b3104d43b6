"""The fields of `TrainingArguments`: names and defaults of `transformers`, and a text for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Interval = Literal["no", "steps", "epoch"]
PaddingInLoss = Literal["none", "sampled", "all"]
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial",
    "inverse_sqrt", "constant", "constant_with_warmup", "warmup_stable_decay", "reduce_lr_on_plateau", "greedy",
]  # fmt: skip
Tracker = Literal["none", "all", "tensorboard", "wandb", "mlflow", "trackio"]

OUTPUT_DIR = "trainer_output"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFields:
    """What a run is asked for, unchecked; `TrainingArguments` applies the rules."""

    output_dir: str = field(default=OUTPUT_DIR, kw_only=False, metadata={"kind": str | None})
    """Folder for the trained model, checkpoints, metrics and predictions. Created where it is missing."""
    overwrite_output_dir: bool = False
    """Write to output_dir even if it holds files already. Without it, such a run stops before it starts."""
    do_train: bool = False
    """Train the model on the training data."""
    do_eval: bool = False
    """Evaluate the model on the validation data, after training if there is any. An eval_strategy other than no, or
    eval_on_start, switches it on."""
    do_predict: bool = False
    """Answer the questions of the test data and write the predictions to output_dir."""
    resume_from_checkpoint: str | bool | None = None
    """Go on where an earlier run stopped. auto, true or nothing: from the newest intact checkpoint in output_dir. A
    path: from that checkpoint."""
    resume_allow_changes: Sequence[str] = field(default=(), metadata={"kind": tuple[str, ...]})
    """Settings that may differ from those of the checkpoint a run goes on from, such as learning_rate,optim; model,
    data, order, dtype and rows_per_step can be named too. Every other difference stops the run before it starts."""
    seed: int = 42
    """Random seed of new weights, dropout and, without data_seed, row order. Same seed and settings: same run."""
    data_seed: int | None = None
    """Random seed of the row order alone. null: the same as seed (42 for batch_rebalance, as in transformers)."""
    use_cpu: bool = False
    """Run on the CPU even where there is a GPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Number format of the matrix products; the weights are float32 in each. auto: times fp32 and bf16 on your model
    and rows at the start of the training and takes bf16 where it is clearly faster; the log shows both times. int8:
    whole numbers of 8 bits in the linear layers of packed encoders, on CPUs with VNNI; only gradients of weights stay
    float32 products. Faster than fp32 and less exact; auto never takes it."""
    bf16: bool | None = None
    """The same as precision bf16: matrix products in bfloat16, each factor rounded to 2 or 3 decimal digits. Meant for
    processors with bf16 instructions (AMX, AVX-512 BF16, GPUs since Ampere). false: auto may not choose it."""
    fp16: bool | None = None
    """The same as precision fp16: matrix products in float16, which holds 3 decimal digits, but no numbers above 65504;
    losses are scaled up, and gradients down again. Meant for GPUs older than Ampere."""
    tf32: bool | None = None
    """Let float32 products round their factors to 3 decimal digits on the tensor cores of a GPU (since Ampere). null:
    as torch is set."""

    per_device_train_batch_size: int = 8
    """Rows in one forward and backward pass. More fill the machine better, and take more memory."""
    gradient_accumulation_steps: int = 1
    """Batches whose gradients are summed before the weights change. 4 batches of 8 rows train as 1 batch of 32 rows
    does, in about a quarter of the activation memory."""
    max_tokens_per_batch: int | None = None
    """Most real tokens in one forward and backward pass: a batch with more is cut between rows into several, and a
    longer row runs alone. The rows of a step, and so its result, stay; only the memory gets less. Padding that the loss
    counts comes on top: up to 4 tokens a row with padding_in_loss sampled. null: cut by rows alone."""
    auto_find_batch_size: bool = False
    """Before training, find how many rows fit into memory at a time, up to per_device_train_batch_size, by passes over
    the longest rows. Where fewer fit, more batches are accumulated: each step keeps its rows."""
    gradient_checkpointing: bool = field(default=False, metadata={"kind": bool | None})
    """Keep fewer activations and compute the rest again in backward: less memory, more time, the same result."""
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    """What transformers passes on to torch, as a JSON object. whet takes {"use_reentrant": false}: it works so
    anyway."""
    checkpointing_policy: Literal["blocks", "selective"] = "blocks"
    """What is computed again. blocks: all but the input of each block, which keeps least. selective: only what is cheap
    (norms, activations, dropouts, softmax); the results of matrix products are kept."""
    activation_offload: bool = False
    """Keep the activations in the host's memory until backward reads them. Needs a GPU."""
    methods: Sequence[str] = field(default=(), metadata={"kind": tuple[str, ...]})
    """Methods without a setting of their own that change the model before training, by name and with commas between
    them, such as freeze_tables (no training of the embedding tables). An unknown name is refused with the list."""
    torch_empty_cache_steps: int | None = None
    """Return unused memory every this many optimizer steps: the GPU's cache, or on a CPU freed memory to the system.
    The log ends with what it cost. null: never."""
    torch_compile: bool = False
    """Compile each block of the model with torch.compile: one compilation serves all layers and lengths."""
    torch_compile_backend: str | None = None
    """What compiles, by its name in torch._dynamo.list_backends(None). It turns torch_compile on; null: inductor."""
    torch_compile_mode: str | None = None
    """How hard inductor tries: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs. It turns
    torch_compile on; null: default."""
    attn_implementation: Literal["whet", "eager", "sdpa", "flash_attention_2"] | None = None
    """Which code computes attention. whet: rows end to end without padding, and dropout masks that no split changes.
    flash_attention_2: flash kernels of a GPU, without padding where whet knows the model's family. eager, sdpa:
    transformers' own, padded. null: whet where it knows the family (a GPU then runs flash kernels where they fit, and
    these draw their own masks), or else as the model is."""
    num_train_epochs: float = 3.0
    """How often every row is seen. 0.5 stops after half of the rows."""
    max_steps: int = -1
    """Stop after this many optimizer steps, whatever num_train_epochs says. -1: off."""
    train_sampling_strategy: Literal["random", "sequential", "group_by_length", "batch_rebalance"] = "random"
    """Order of the rows, as transformers' Trainer has it for this seed. random: shuffled for every epoch. sequential:
    as in the data. group_by_length: shuffled, with rows of similar length in each step. batch_rebalance: shuffled,
    with about as many tokens in each batch of a step."""
    length_column_name: str = "length"
    """Column of the training set with the length of each row, for group_by_length and batch_rebalance. Where there is
    none, the lengths of input_ids are counted."""
    remove_unused_columns: bool = True
    """Take the columns that the model does not read out of the rows before data_collator gets them. It still gets one
    that it asks for by name."""
    label_names: Sequence[str] | None = field(default=None, metadata={"kind": tuple[str, ...] | None})
    """Columns with labels, one flag each, for a model that whet cannot ask. null: those that the model's forward
    names."""
    dataloader_drop_last: bool = False
    """Leave out the last batch of an epoch if too few rows are left to fill it."""
    dataloader_num_workers: int = 0
    """Threads that make batches ahead while the model computes. The data set must allow several of them to read at
    once, and draw no random numbers. 0: each batch is made when its turn comes."""
    dataloader_prefetch_factor: int | None = None
    """Batches that each worker makes ahead. null: 2, where there are workers."""
    dataloader_pin_memory: bool | None = None
    """Keep batches in memory that a GPU copies from while it computes. null: with a GPU. On a CPU it does nothing, and
    true is noted in the log."""
    dataloader_persistent_workers: bool = False
    """Let workers make the next epoch's first batches while an epoch ends, with its evaluation and checkpoint. Without
    it they end with each epoch. Needs dataloader_num_workers."""
    learning_rate: float = 5e-5
    """Highest learning rate of the run; the schedule moves below it. 2e-5 to 5e-5 is usual for fine-tuning encoders."""
    lr_scheduler_type: Schedule = "linear"
    """How the learning rate moves after the warm-up. linear, polynomial and the cosines fall towards 0 or a lowest
    rate, inverse_sqrt falls ever slower, constant and constant_with_warmup stay, warmup_stable_decay stays, then falls.
    reduce_lr_on_plateau and greedy follow metric_for_best_model from evaluation to evaluation."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """Parameters of the schedule as a JSON object, such as num_cycles (cosine), min_lr or min_lr_rate
    (cosine_with_min_lr), lr_end and power (polynomial), num_decay_steps (warmup_stable_decay), patience and factor
    (reduce_lr_on_plateau)."""
    warmup_steps: int | float = 0
    """Optimizer steps over which the learning rate rises from 0 to its highest. Below 1: a share of the run."""
    warmup_ratio: float = 0.0
    """The warm-up as a share of the run, 0 to 1; the older way to write a warmup_steps below 1."""
    optim: str = "auto"
    """Optimizer: auto (AdamW: adamw_whet on a CPU, adamw_torch_fused elsewhere), adamw_torch, adamw_torch_fused,
    adamw_hf, adamw_apex_fused, adamw_anyprecision, adamw_whet, adamw_whet_8bit, adamw_bnb_8bit (adamw_8bit),
    adamw_torch_8bit, adamw_torch_4bit, adafactor, muon, lion_32bit, adagrad, rmsprop, sgd, or one of a package."""
    optim_args: str | None = None
    """Options of the optimizer as key=value,key=value, such as momentum=0.9 for sgd. null: its usual ones."""
    padding_in_loss: PaddingInLoss = "none"
    """Which padding tokens take part in the softmax of a question answering loss, though batches run without them.
    all: every one of the rows padded to the longest of their per_device_train_batch_size rows (or as pad_to_max_length
    has it), which is the loss of transformers, at the price of a padded run. sampled: a few a row that stand for all,
    within 0.1 % of it. none: the loss of the real tokens alone."""
    optimizer_in_backward: bool = False
    """Update each weight as soon as its gradient is there and free the gradient, inside the backward pass. Saves the
    memory of the gradients; needs max_grad_norm 0 and no accumulation."""
    weight_decay: float = 0.0
    """How much of itself each weight loses a step, times the learning rate. Biases and norms are left out."""
    adam_beta1: float = 0.9
    """Share of AdamW's running mean of the gradient that each step keeps."""
    adam_beta2: float = 0.999
    """Share of AdamW's running mean of the squared gradient that each step keeps."""
    adam_epsilon: float = 1e-8
    """Added to the root that AdamW divides by, so that it never divides by 0."""
    label_smoothing_factor: float = 0.0
    """Share of each label that is spread evenly over all classes, 0 to 1, where the model learns from labels. Such
    batches are padded; a model of a known family computes them without their padding. 0: off."""
    max_grad_norm: float = 1.0
    """Gradients whose overall norm is larger are scaled down to it. 0: off."""

    max_nonfinite_steps: int = 3
    """End the run, with exit code 70, after this many steps in a row whose loss or gradient is not finite (or whose
    loss is a spike, see max_loss_spike). None of them changes a weight; each is counted and logged."""
    max_loss_spike: float | None = None
    """Do not apply a step whose loss is more than this many times the median loss of the steps before it (the last 32,
    once there are 8). Such steps are counted and logged. null: off."""
    memory_limit_gb: float | None = None
    """Memory in GiB that this process may hold. Near the limit the run saves a checkpoint and stops with exit code 75,
    and says what to change. null: what the machine or the cgroup allows. 0: no watch."""

    eval_strategy: Interval = "no"
    """When to evaluate during training: never, every eval_steps, or after every epoch."""
    eval_steps: int | float | None = None
    """Optimizer steps between evaluations, for eval_strategy steps. Below 1: a share of the run. null: as
    logging_steps."""
    eval_delay: float = field(default=0.0, metadata={"kind": float | None})
    """Steps, or epochs for eval_strategy epoch, before the first evaluation of the training."""
    prediction_loss_only: bool = False
    """Keep only the loss of evaluations and predictions, and do not call compute_metrics."""
    eval_on_start: bool = False
    """Evaluate once before the first step, to see where training starts from."""
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
    """Copy weights and optimizer state in memory and write the checkpoint while training goes on. Takes as much memory
    as a checkpoint has bytes; the files are those of a save that waits."""
    save_error_policy: Literal["stop", "continue"] = "stop"
    """What a checkpoint that cannot be written means: the end of the run (exit code 74), or a warning, and the next
    one is tried. Earlier checkpoints stay whole either way."""
    save_total_limit: int | None = None
    """Keep this many of the newest checkpoints and delete older ones; the best one always stays with
    load_best_model_at_end. null: keep all."""
    enable_jit_checkpoint: bool | None = None
    """On SIGTERM, SIGINT or SIGUSR1 save a checkpoint, whatever save_strategy says, and leave with exit code 75. The
    unfinished step is done again after resuming; no finished one is lost. null: whet qa does so, a Trainer in another
    program does not, so that Ctrl-C there stays that program's."""
    load_best_model_at_end: bool = False
    """End with the checkpoint that evaluated best, not with the last weights."""
    metric_for_best_model: str | None = None
    """Number of the evaluation that decides which model is best, such as f1 or loss. null: loss, for
    load_best_model_at_end; whet qa, whose evaluation has no loss, takes f1."""
    greater_is_better: bool | None = None
    """Whether a larger number is a better one. null: true, unless the metric's name ends in loss."""

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
    """Trackers that get the logs, separated by commas or one flag each. all: every one that is installed."""
    run_name: str | None = None
    """Name of the run in the trackers. null: they choose one."""
    logging_dir: str | None = None
    """Folder for TensorBoard's files. null: runs, inside output_dir."""
    disable_tqdm: bool = field(default=False, metadata={"kind": bool | None})
    """Show no progress bar."""
    profile: bool = False
    """Show where the time of a training step goes: matrix products, attention, norms, optimizer, data and so on. Five
    steps are profiled after two of warm-up, fewer in a shorter run; then training goes on as without it."""

    @property
    def train_rows_per_step(self) -> int:
        """Rows behind one change of the weights, over all batches that are accumulated."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps
