"""Names of optimizers: every one of transformers' is built or refused with its package; packages may offer others."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_runs import PACKAGES, Layers, arguments, cases, take_steps
from torch import nn
from transformers.training_args import OptimizerNames

from tiny import plain_torch
from whet.config import optimizer_names
from whet.config.optimizer_names import ELSEWHERE, ENTRY_POINTS, Row, missing_package, names, plugged_in, rows
from whet.errors import ConfigError
from whet.kernels.library import library
from whet.optim import registry
from whet.optim.optimizers.native import WhetAdamW

_USUAL = [name for name, row in names().items() if not row.package]


@pytest.mark.true_start
def test_constants_of_a_row_are_read_from_its_source_without_torch() -> None:
    """Help texts and rules read them so; the registry has the same from the imported files."""
    constants = [one.name for one in dataclasses.fields(Row)]
    for name, row in names().items():
        entry = registry.entry(name)
        assert {one: getattr(entry, one) for one in constants} == {one: getattr(row, one) for one in constants}
    code = "import sys; from whet.config.optimizer_names import names; sys.exit('torch' in sys.modules or not names())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_name_that_two_optimizers_have_is_a_mistake_of_their_author(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that was copied would take the place of the first one, for a part of its readers."""
    row = '(Entry(name="{}", rule="SGD", does="it steps", source="a paper", aliases={{"{}": ""}}),)'
    files = {
        name: ast.parse(row.format(name, alias), mode="eval").body
        for name, alias in (("ours", "plain"), ("theirs", "ours"))
    }
    monkeypatch.setattr(optimizer_names, "_files", lambda: files)
    rows.cache_clear()
    optimizer_names._rows_in.cache_clear()
    try:
        with pytest.raises(AssertionError, match="two rows of optimizers have the name ours"):
            names.__wrapped__()
    finally:
        rows.cache_clear()
        optimizer_names._rows_in.cache_clear()


def test_row_of_an_optimizer_has_what_its_readers_need() -> None:
    for row in rows():
        name = row.name
        assert row.does, name
        assert not row.does.endswith("."), name
        assert row.source, name
        assert not row.instead or row.instead in names(), name
        assert row.instead or not (row.package or row.on_cpu), f"{name} does not work everywhere: what does?"


@pytest.mark.parametrize("name", [one.name for one in registry.entries() if one.kind and not one.build])
def test_row_of_an_optimizer_has_the_settings_of_its_class(name: str) -> None:
    """One that it does not have could not be built; one that is missing would refuse what the class can do."""
    entry = registry.entry(name)
    assert entry.kind is not None
    takes = {one for cls in entry.kind.__mro__ for one in inspect.signature(cls.__init__).parameters}
    read = {"betas": entry.betas, "eps": entry.epsilon or "eps" in entry.options}
    assert read == {one: one in takes for one in read}
    assert entry.options.keys() <= takes


@pytest.mark.parametrize("name", sorted(one.value for one in OptimizerNames))
def test_every_optimizer_name_of_transformers_is_known(name: str) -> None:
    if name in names():
        assert arguments(name).optim == name
        return
    with pytest.raises(ConfigError) as caught:
        arguments(name)
    (problem,) = caught.value.problems
    assert ELSEWHERE[name] in problem.why
    assert f"install {ELSEWHERE[name]}" in problem.fix


def test_auto_is_whets_adamw_if_possible() -> None:
    if library() is None:
        pytest.skip("the native operators are not built here (python -m whet.kernels.build)")
    assert isinstance(registry.build(Layers(), arguments("auto")), WhetAdamW)
    assert isinstance(registry.build(Layers(torch.float64), arguments("auto")), torch.optim.AdamW)
    with plain_torch():
        assert isinstance(registry.build(Layers(), arguments("auto")), torch.optim.AdamW)


def test_names_of_other_packages_are_of_transformers() -> None:
    assert ELSEWHERE.keys() <= {one.value for one in OptimizerNames}
    assert not ELSEWHERE.keys() & names().keys()


def test_optimizer_enum_of_transformers_is_accepted() -> None:
    assert type(arguments(OptimizerNames.ADAFACTOR).optim) is str
    assert arguments(OptimizerNames.ADAFACTOR) == arguments("adafactor")


@pytest.mark.parametrize("optim", cases(name for name in names() if name != "adamw_apex_fused"))
def test_every_optimizer_learns(optim: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(64, 8)
    optimizer = registry.build(model, arguments(optim, weight_decay=0.0))
    losses = []
    with torch.compiler.set_stance("force_eager"):
        for _ in range(80):
            loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
            losses.append(float(loss.detach()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < 0.6 * losses[0]


def test_missing_package_is_named() -> None:
    for name in (name for name, row in names().items() if row.installed_by and missing_package(name)):
        with pytest.raises(ConfigError, match=rf"(?s){PACKAGES[name]}.*pip install"):
            registry.build(Layers(), arguments(name))


@pytest.mark.skipif("apex" in sys.modules, reason="apex is here")
def test_missing_apex_names_the_equal_optimizer() -> None:
    with pytest.raises(ConfigError) as caught:
        registry.build(Layers(), arguments("adamw_apex_fused"))
    assert "adamw_torch_fused" in caught.value.problems[0].fix


def test_older_optimizer_name_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="whet"):
        registry.build(Layers(), arguments("adamw_hf"))
    assert "adamw_torch computes the same" in caplog.text


def test_misspelled_optimizer_is_guessed() -> None:
    with pytest.raises(ConfigError, match="did you mean --optim lion_32bit"):
        arguments("lion_32bits")


@pytest.mark.parametrize("optim", _USUAL)
def test_unknown_optimizer_option_is_refused(optim: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)optim_args.*got: rank=8.*{optim} takes"):
        arguments(optim, optim_args="rank=8")


@pytest.mark.parametrize("given", ["momentum", "momentum=", "=0.9", "momentum=0.9,momentum=0.8", "momentum=0.9;x"])
def test_optim_args_that_are_not_pairs_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="optim_args"):
        arguments("sgd", optim_args=given)


def test_wrong_option_types_are_refused_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        arguments("sgd", optim_args="momentum=much,nesterov=0.5,rank=8")
    (problem,) = caught.value.problems
    assert all(one in str(problem.got) for one in ("momentum=much", "nesterov=0.5", "rank=8"))


def test_options_are_written_as_in_transformers() -> None:
    args = arguments("sgd", optim_args="momentum=0.9, nesterov=True")
    (group,) = {(g["momentum"], g["nesterov"]) for g in registry.build(Layers(), args).param_groups}
    assert group == (0.9, True)


def test_error_of_the_optimizer_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="optimizer sgd cannot be built"):
        registry.build(Layers(), arguments("sgd", optim_args="nesterov=true"))  # it needs a momentum


@pytest.mark.parametrize("optim", [name for name in _USUAL if not names()[name].epsilon])
def test_settings_without_effect_on_the_optimizer_are_refused(optim: str) -> None:
    with pytest.raises(ConfigError, match=f"{optim} does not read adam_epsilon"):
        arguments(optim, adam_epsilon=1e-6)
    if not names()[optim].betas:
        with pytest.raises(ConfigError, match=f"{optim} does not read adam_beta1"):
            arguments(optim, adam_beta1=0.8)


@pytest.mark.parametrize("optim", [name for name in _USUAL if names()[name].betas])
def test_settings_of_the_optimizer_change_its_steps(optim: str) -> None:
    def after(**changes: Any) -> torch.Tensor:
        model = Layers()
        take_steps(model, registry.build(model, arguments(optim, **changes)), range(7))
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    usual = after()
    changes = [{"adam_beta1": 0.5}, {"adam_beta2": 0.5}, {"learning_rate": 1e-3}]
    changes += [{"adam_epsilon": 1e-3}] if names()[optim].epsilon else []
    assert not [change for change in changes if torch.equal(after(**change), usual)]


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that offers two optimizers, one under a name of transformers."""
    (tmp_path / "steady_optimizers.py").write_text(
        "import torch\n"
        "from whet.optim.entry import parameter_groups\n"
        "def build(model, args, options):\n"
        "    groups = parameter_groups(model, args.weight_decay)\n"
        "    return torch.optim.NAdam(groups, lr=args.learning_rate, momentum_decay=float(options['decay']))\n"
    )
    info = tmp_path / "steady_optimizers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steady-optimizers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\nsteady = steady_optimizers:build\nlomo = steady_optimizers:build\n"
        "sgd = steady_optimizers:build\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plugged_in.cache_clear()
    yield
    plugged_in.cache_clear()
    sys.modules.pop("steady_optimizers", None)


@pytest.mark.usefixtures("plug_in")
@pytest.mark.parametrize("name", ["steady", "lomo"])
def test_package_can_offer_an_optimizer(name: str) -> None:
    optimizer = registry.build(Layers(), arguments(name, optim_args="decay=0.01"))
    assert isinstance(optimizer, torch.optim.NAdam)
    assert [group["momentum_decay"] for group in optimizer.param_groups] == [0.01, 0.01]


@pytest.mark.usefixtures("plug_in")
def test_package_does_not_replace_whets_optimizer() -> None:
    assert isinstance(registry.build(Layers(), arguments("sgd")), torch.optim.SGD)
