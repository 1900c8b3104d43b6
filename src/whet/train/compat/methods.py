"""The methods of transformers' Trainer that whet's Trainer has too, for scripts and subclasses written for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from whet.config.ranks import require_one_process
from whet.errors import ConfigError
from whet.train import optimizer_setup
from whet.train.callbacks.events import Events
from whet.train.checkpoint import best, weights
from whet.train.compat import dataloaders, overrides, search, user_loss
from whet.train.compat.method_table import ALTERNATIVE, METHODS
from whet.train.output import files as output_files
from whet.train.output import hub, results

if TYPE_CHECKING:
    from transformers import TrainerControl

    from whet.config.ranks import require_one_process
from whet.config.arguments import TrainingArguments


class TransformersMethods:
    """The methods of transformers' Trainer other than train, evaluate and predict; `Trainer` inherits them."""

    events: Events
    search: search.Search | None
    model_init: Callable[..., nn.Module] | None
    loss_is_scaled_for_ga: bool | None = None
    """Whether `compute_loss` divides by all micro-batches of the step itself; None: transformers' rule."""
    is_deepspeed_enabled = is_fsdp_enabled = is_fsdp_xla_enabled = is_model_parallel = False
    deepspeed = None
    hub_model_id: str | None = None

    # ---- what transformers calls some of whet's attributes ----

    @property
    def callback_handler(self: Any) -> Events:
        """The callbacks of this Trainer."""
        return self.events

    @property
    def control(self: Any) -> TrainerControl:
        """The flags that callbacks set."""
        return self.events.control

    @control.setter
    def control(self: Any, control: TrainerControl) -> None:
        self.events.control = control

    @property
    def tokenizer(self: Any) -> Any:
        """The older name of processing_class."""
        return self.processing_class

    @tokenizer.setter
    def tokenizer(self: Any, processing_class: Any) -> None:
        self.processing_class = processing_class

    @property
    def model_wrapped(self: Any) -> nn.Module:
        """The model: whet does not wrap it."""
        return self.model

    # ---- callbacks ----

    def add_callback(self, callback: Any) -> None:
        """Add a callback, or a new one of this class."""
        self.events.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove this callback, or the first of this class, and return it; None if there is none."""
        return self.events.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove this callback, or the first of this class if there is one."""
        self.events.remove_callback(callback)

    # ---- loss ----

    def compute_loss(
        self: Any, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        """Return the loss of a padded batch, with the model's outputs if asked for. Made to be overridden."""
        return user_loss.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def training_step(self: Any, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run one micro-batch forward and backward; return its part of the step's loss."""
        return user_loss.training_step(self, model, inputs, num_items_in_batch)

    def prediction_step(
        self: Any, model: nn.Module, inputs: Mapping[str, Any], prediction_loss_only: bool,
        ignore_keys: Sequence[str] | None = None,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Return loss, predictions and labels of a padded batch; None for each that does not exist."""
        return user_loss.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)

    def compute_loss_context_manager(self: Any) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which a loss is computed: the run's precision."""
        return self.precision.forward()

    def autocast_smart_context_manager(
        self: Any, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the run's precision."""
        return self.precision.forward()

    def get_batch_samples(
        self: Any, epoch_iterator: Any, num_batches: int, device: Any = None
    ) -> tuple[list[Any], Any]:
        """Return the next batches of an iterator, and the number of targets that a loss divides by."""
        batches = [batch for batch, _ in zip(epoch_iterator, range(num_batches), strict=False)]
        return batches, user_loss.n_items_in(self, batches)

    def floating_point_ops(self: Any, inputs: Mapping[str, Any]) -> int:
        """Return the operations of a forward and backward pass over these inputs: 6 for each weight and token."""
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 6 * tokens.numel() * weights.count_without_embeddings(self.model) if isinstance(tokens, Tensor) else 0

    def store_flos(self) -> None:
        """Do nothing: `state.total_flos` is counted at each step."""

    def _prepare_inputs(self: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch on the model's device."""
        return {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    # ---- data ----

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        """Return a loader of the training batches; an overridden one decides what the model is trained on."""
        return dataloaders.train_loader(self)

    def get_eval_dataloader(self: Any, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return a loader of a data set's batches, of `eval_dataset` by default or one of its sets by name."""
        return dataloaders.evaluation_loader(self, eval_dataset)

    def get_test_dataloader(self: Any, test_dataset: Any) -> DataLoader[Any]:
        """Return a loader of a data set's batches."""
        return dataloaders.evaluation_loader(self, test_dataset)

    def _get_train_sampler(self: Any, train_dataset: Any = None) -> Any:
        """Return the sampler of whet's order of rows."""
        return dataloaders.sampler_of(self, self.train_dataset if train_dataset is None else train_dataset)

    def num_examples(self: Any, dataloader: Any) -> int:
        """Return the exact or approximate number of rows of a loader."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError, NotImplementedError):
            return len(dataloader) * self.args.per_device_train_batch_size

    # ---- optimizer and schedule ----

    def create_optimizer_and_scheduler(self: Any, num_training_steps: int) -> None:
        """Make the optimizer and the schedule of a run of this many steps."""
        made = self.create_optimizer()
        self.optimizer = made if self.optimizer is None else self.optimizer
        options = overrides.accepted(self.create_scheduler, optimizer=self.optimizer)
        made = self.create_scheduler(num_training_steps=num_training_steps, **options)
        self.lr_scheduler = made if self.lr_scheduler is None else self.lr_scheduler

    def create_optimizer(self: Any, model: nn.Module | None = None) -> Optimizer:
        """Return the optimizer; make it if there is none yet."""
        if self.optimizer is None:
            self.optimizer = optimizer_setup.create_optimizer(self, self.model if model is None else model)
        return self.optimizer

    def create_scheduler(self: Any, num_training_steps: int, optimizer: Optimizer | None = None) -> Any:
        """Return the schedule of the learning rate; make it if there is none yet."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            if optimizer is None:
                raise _no_optimizer("create_scheduler")
            self.lr_scheduler = optimizer_setup.create_scheduler(self.args, optimizer, num_training_steps)
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Return what makes the optimizer of these arguments from groups of parameters, and its options."""
        return optimizer_setup.class_and_options(args, model)

    def get_decay_parameter_names(self: Any, model: nn.Module | None = None) -> list[str]:
        """Return the names of the parameters that decay: weights, but no biases and norms."""
        return optimizer_setup.decay_names(self.model if model is None else model)

    def get_learning_rates(self: Any) -> list[float]:
        """Return the learning rate of each group of parameters."""
        if self.optimizer is None:
            raise _no_optimizer("get_learning_rates")
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_optimizer_group(self: Any, param: nn.Parameter | None = None) -> Any:
        """Return the optimizer's groups of parameters, or the one of this parameter."""
        if self.optimizer is None:
            raise _no_optimizer("get_optimizer_group")
        groups = self.optimizer.param_groups
        return groups if param is None else next((g for g in groups if any(one is param for one in g["params"])), None)

    def get_num_trainable_parameters(self: Any) -> int:
        """Return the number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    # ---- metrics ----

    def metrics_format(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics as a person reads them."""
        return results.formatted(metrics)

    def log_metrics(self: Any, split: str, metrics: Mapping[str, Any]) -> None:
        """Print the metrics of a split, on rank 0."""
        if self.is_world_process_zero():
            results.show(split, metrics)

    def save_metrics(self: Any, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write {split}_results.json, and add the metrics to all_results.json."""
        results.save(self.args.output_dir, split, metrics, combined=combined, on_error=self.args.save_error_policy)

    def save_state(self: Any) -> None:
        """Write trainer_state.json: the counters and the log history, in transformers' form."""
        path = Path(self.args.output_dir) / "trainer_state.json"
        output_files.write_json(path, best.as_saved(self.state), indent=2, on_error=self.args.save_error_policy)

    # ---- the Hub ----

    def init_hf_repo(self: Any, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository `hub_model_id` on the Hub if there is none."""
        self.hub_model_id = hub.create_repo(self, token, private)

    def create_model_card(
        self: Any, language: Any = None, license: Any = None, tags: Any = None, model_name: Any = None,
        finetuned_from: Any = None, tasks: Any = None, dataset_tags: Any = None, dataset: Any = None,
        dataset_args: Any = None,
    ) -> None:  # fmt: skip
        """Write a draft of a model card, README.md, into the output folder."""
        given = {name: value for name, value in locals().items() if name != "self"}
        if self.args.should_save:
            hub.write_card(self, given)

    def push_to_hub(
        self: Any, commit_message: str | None = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, **facts: Any,
    ) -> Any:  # fmt: skip
        """Save the model with its card, and upload the output folder without its checkpoints."""
        if not self.args.should_save:
            return None
        return hub.push(self, commit_message, blocking, token, revision, facts)

    # ---- search ----

    def hyperparameter_search(
        self: Any, hp_space: Any = None, compute_objective: Any = None, n_trials: int = 20,
        direction: str | list[str] = "minimize", backend: Any = None, hp_name: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Return the best of n_trials trainings with settings that optuna proposes (transformers' BestRun)."""
        require_one_process("hyperparameter_search")
        found = search.make_search(self, hp_space, compute_objective, hp_name, backend)
        return search.run(self, found, n_trials, direction, options)

    def call_model_init(self: Any, trial: Any = None) -> nn.Module:
        """Return a new model from `model_init`."""
        return _called(self.model_init, trial)

    # ---- ranks ----

    def is_world_process_zero(self: Any) -> bool:
        """Return whether this is rank 0, which logs and writes files."""
        return self.sync.place.is_first

    def is_local_process_zero(self: Any) -> bool:
        """Return whether this is the first rank of its machine."""
        return self.sync.place.local_rank == 0

    def get_total_train_batch_size(self: Any, args: TrainingArguments | None = None) -> int:
        """Return the rows of one optimizer step."""
        return (args or self.args).train_rows_per_step

    def get_sp_size(self) -> int:
        """Return 1: no part of a model runs elsewhere."""
        return 1

    get_cp_size = get_tp_size = get_sp_size

    def end(self: Any) -> None:
        """End the runs of the trackers."""
        self.close()

    def create_accelerator_and_postprocess(self) -> None:
        """Raise ConfigError: whet does not run on accelerate."""
        raise not_called("create_accelerator_and_postprocess")

    def set_initial_training_values(self, *_: Any, **__: Any) -> None:
        """Raise ConfigError: whet plans a run otherwise."""
        raise not_called("set_initial_training_values")


def not_called(name: str) -> ConfigError:
    """Return the error of a method of transformers' Trainer that whet's refuses."""
    return ConfigError(what=f"whet's Trainer has no {name}", why=METHODS[name].refused, fix=ALTERNATIVE)


def _called(model_init: Callable[..., Any] | None, trial: Any) -> nn.Module:
    assert model_init is not None
    n_taken = overrides.n_positional(model_init)
    if n_taken > 1:
        raise ConfigError(
            what="model_init has too many parameters",
            got=f"{n_taken} parameters",
            why="it is called with nothing, or with the trial of a search",
            fix="give it no parameter, or one",
        )
    model = model_init(trial) if n_taken else model_init()
    if isinstance(model, nn.Module):
        return model
    raise ConfigError(
        what="model_init returned no model",
        got=type(model).__name__,
        why="each training starts from the model that it returns",
        fix="return the model from model_init",
    )


def _no_optimizer(name: str) -> ConfigError:
    return ConfigError(
        what=f"{name} needs an optimizer",
        why="the optimizer is made when the training begins",
        fix="call it after train() or create_optimizer()",
    )
