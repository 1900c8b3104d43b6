"""`whet.Accelerator` is one of accelerate: what guides and examples do with it works, and its parts are theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin, ProfileKwargs, find_executable_batch_size
from own_loops import N_ROWS, Loop, collate, fresh, leave, losses_of, made, tiny_bert
from torch.utils.data import DataLoader

import whet

CLOSE = 1e-5
"""Relative: float32 rounding."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh():
        yield


def test_it_is_an_accelerator_with_the_parts_of_one() -> None:
    accelerator = made("whet")
    assert isinstance(accelerator, accelerate.Accelerator)
    assert type(accelerator.state) is AcceleratorState
    assert type(accelerator.gradient_state) is GradientState
    assert accelerator.scaler is None
    assert not accelerator.is_fsdp2
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_state.num_steps == 3


def test_arguments_are_accelerates_in_their_order() -> None:
    accelerator = whet.Accelerator(False, True, "bf16", 2, True)
    assert not accelerator.device_placement
    assert accelerator.split_batches
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 2)
    with pytest.raises(TypeError, match="no_such_setting"):
        whet.Accelerator(no_such_setting=1)  # pyright: ignore[reportCallIssue]


def test_what_whet_overrides_takes_the_arguments_that_accelerate_takes() -> None:
    """A later accelerate may add or rename one: this is where that shows."""
    plain: Any = accelerate.Accelerator(cpu=True)
    model, loader = torch.nn.Linear(2, 1), DataLoader(range(N_ROWS), 4)  # pyright: ignore[reportArgumentType]
    for accelerator in (plain, made("whet")):
        prepared = accelerator.prepare_model(model=model, device_placement=False, evaluation_mode=True)
        assert prepared is model
        rows = accelerator.prepare_data_loader(loader, device_placement=True, slice_fn_for_dispatch=None)
        assert len(list(accelerator.skip_first_batches(dataloader=rows, num_batches=2))) == len(loader) - 2
        assert accelerator.gather_for_metrics(input_data=["a"], use_gather_object=True) == ["a"]
        accelerator.prepare(model, device_placement=[True])


@pytest.mark.slow
def test_compiled_model_trains_alike_and_its_state_has_the_plain_names(tmp_path: Path) -> None:
    wanted = losses_of(made("whet"))
    with fresh():
        loop = Loop(made("whet", dynamo_backend="eager"))
        loop.epoch(0)
        loop.accelerator.save_state(tmp_path / "state")
        assert type(loop.model).__name__ == "OptimizedModule"
    with fresh():
        plain = Loop(made("whet"))
        plain.accelerator.load_state(tmp_path / "state")
        plain.epoch(1)
    assert loop.losses + plain.losses == pytest.approx(wanted, rel=CLOSE)


def test_profile_and_accumulation_plugin_of_accelerate_work() -> None:
    accelerator = made(
        "whet",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        kwargs_handlers=[ProfileKwargs(activities=["cpu"])],
    )
    loop = Loop(accelerator)
    with accelerator.profile() as profile:
        loop.epoch(0, last=2)
    assert "aten::mm" in {one.key for one in profile.key_averages()}
    with fresh():
        assert loop.losses == losses_of(made("whet", gradient_accumulation_steps=2))[:2]


def test_trigger_stops_the_loop() -> None:
    accelerator = made("whet")
    loop = Loop(accelerator)
    for number, batch in enumerate(loop.loader):
        loop.step(batch)
        if number == 2:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    assert len(loop.losses) == 3


def test_smaller_batches_are_tried_until_they_fit() -> None:
    accelerator, tried = made("whet"), []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        tried.append(batch_size)
        model = tiny_bert()
        loader = DataLoader(range(N_ROWS), batch_size, collate_fn=collate)  # pyright: ignore[reportArgumentType]
        model, loader = accelerator.prepare(model, loader)
        if batch_size > 8:
            raise RuntimeError("CUDA out of memory.")
        return sum(len(batch["labels"]) for batch in loader)

    assert train() == N_ROWS  # pyright: ignore[reportCallIssue]
    assert tried[0] == 16
    assert tried[-1] <= 8


def test_model_whose_weights_are_offloaded_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model, rows = tiny_bert().eval(), collate([1, 2])
    wanted = model(**rows).loss
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    found = made("whet").prepare_model(model, device_placement=False)(**rows).loss
    assert torch.equal(found, wanted)
    assert "its weights are not all here" in caplog.text


def test_seed_of_the_order_is_the_users() -> None:
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    orders = []
    for kind in (accelerate.Accelerator, whet.Accelerator):
        with fresh():
            loader = kind(cpu=True, dataloader_config=config).prepare(DataLoader(range(N_ROWS), 4, shuffle=True))  # pyright: ignore[reportArgumentType]
            orders.append([batch.tolist() for batch in loader])
    assert orders[0] == orders[1]
    assert config.data_seed == 7


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # by torchdata
def test_stateful_loader_resumes_where_it_was_or_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
    straight = losses_of(made("whet", dataloader_config=config), dropout=0.1)
    with fresh():
        before = Loop(made("whet", dataloader_config=config), dropout=0.1)
        before.epoch(0, last=4)
        before.accelerator.save_state(tmp_path / "state")
    with fresh():
        after = Loop(made("whet", dataloader_config=config), dropout=0.1)
        after.accelerator.load_state(tmp_path / "state")
        after.epoch(0)
        after.epoch(1)
    assert before.losses + after.losses == straight
    with fresh(), pytest.raises(whet.ConfigError, match="other rows"):
        Loop(made("whet", dataloader_config=config), num_workers=1)


@pytest.mark.reliability
@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        [sys.executable, "-m", "whet", "launch", "--nproc_per_node", "2", "--"],
    ],
    ids=["torchrun", "whet launch"],
)
def test_two_ranks_do_what_the_guides_do(launcher: list[str], tmp_path: Path) -> None:
    """Without `cpu=True`; the assertions of the ranks are in `main`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*launcher, __file__, str(tmp_path / "state")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "two ranks did it" in done.stdout
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert {"first.txt", "of-rank-0.txt", "of-rank-1.txt", "MANIFEST.json"} <= names


@pytest.mark.reliability
def test_ranks_that_accelerate_left_to_themselves_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import accelerate, whet\naccelerate.PartialState()\nwhet.Accelerator()\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0
    assert "accelerate would leave the ranks to themselves" in done.stderr


def main(folder: str) -> None:
    """Average the weights of local steps, stop all ranks by one's trigger, and let hooks of all ranks save."""
    accelerator = whet.Accelerator()
    rank, n_ranks = accelerator.process_index, accelerator.num_processes
    assert n_ranks == 2
    loop = Loop(accelerator)
    with LocalSGD(accelerator=accelerator, model=loop.model, local_sgd_steps=2) as local:
        for batch in loop.loader:
            loop.step(batch)
            local.step()
    weights = accelerator.gather(accelerator.unwrap_model(loop.model).classifier.weight.detach()[None])
    assert torch.equal(weights[0], weights[1])

    stopped = -1
    for number, _ in enumerate(loop.loader):
        if number == 1 and rank == 1:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            stopped = number
            break
    assert stopped == 1

    if accelerator.is_main_process:  # a hook of one rank alone
        accelerator.register_save_state_pre_hook(lambda *given: _write(given[-1], "first"))
    accelerator.register_save_state_pre_hook(lambda *given: _write(given[-1], f"of-rank-{rank}"))
    accelerator.save_state(folder)
    accelerator.load_state(folder)
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        assert accelerator.gather_for_metrics(part) == ["a", "b", "c"]
    accelerator.print("two ranks did it")


def _write(folder: str, name: str) -> None:
    Path(folder, f"{name}.txt").write_text(name)


if __name__ == "__main__":
    main(sys.argv[1])
    leave()
