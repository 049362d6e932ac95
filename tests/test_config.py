"""What is composed from presets, files and the command line, and what reaches the tasks."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml

import run
from meg_compile import config as configuration
from meg_compile import driver
from meg_compile.config import Config, Here, resolve
from meg_compile.config.compose import _new_run, rewrite
from meg_compile.config.help import describe_settings
from meg_compile.config.read import schema_keys
from meg_compile.config.schema import PlanConfig
from meg_compile.plan import Plan
from meg_compile.train.blend import read_paths

CONF = Path(run.CONF)
PRESETS = sorted(f"{path.parent.name}={path.stem}" for path in CONF.glob("*/*.yaml"))

# Radford et al. 2019 as released (Hugging Face); arXiv:1909.08053, table 1; Brown et al. 2020, table 2.1.
PUBLISHED = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "megatron_1b2": "1.2B",
    "megatron_2b5": "2.5B",
    "megatron_4b2": "4.2B",
    "megatron_8b3": "8.3B",
    "gpt3_175b": "175B",
}

USER_MODULE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8, layers=1, **rest):
        super().__init__()
        self.rest = rest

class Rows:
    def __init__(self, path=None, n=3):
        self.path = path
"""


@pytest.fixture
def composed(tmp_path, monkeypatch):
    """composed("plan.tp=2", ...) -> the `Config`s of the jobs that the command line makes; nothing runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "user_code.py").write_text(USER_MODULE)
    sys.modules.pop("user_code", None)
    configs: list[Config] = []

    def keep(plain, faults, run_dir, directory, world):
        found, faults = resolve(plain, faults, Here(), directory)
        assert not faults, [str(fault) for fault in faults]
        configs.append(found)
        return {"task": found.task, "status": "ok"}

    monkeypatch.setattr(driver, "run", keep)

    def call(*args: str) -> list[Config]:
        configs.clear()
        assert run.main(list(args)) == 0
        return list(configs)

    return call


def test_the_defaults(composed):
    (config,) = composed()
    assert config.task == "train" and config.num_ranks == config.launch.nproc == 4
    assert config.plan.plan() == Plan(tp=2, pp=2)
    assert config.optim.warmup_steps == config.train.steps // 10


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes(preset, composed, tmp_path):
    (tmp_path / "corpus.txt").write_text("x" * 1000)
    extra = {"data=text": ["data.path=corpus.txt"], "data=indexed": ["data.path=corpus"]}.get(preset, [])
    (config,) = composed(preset, "task=explain", *extra)
    if preset.startswith("plan="):
        assert vars(config.plan) == yaml.safe_load((CONF / "plan" / f"{preset[5:]}.yaml").read_text())


@pytest.mark.parametrize("path", ["[0.3,a,0.7,sub/b]", "[{path: a, weight: 3},{path: sub/b, weight: 7}]"])
def test_every_path_of_a_blend_starts_where_the_command_was_typed(path, composed, tmp_path):
    (config,) = composed("data=indexed", f"data.path={path}", "task=explain", "eval.data.path=valid", "eval.every=1")
    a, b = str(tmp_path / "a"), str(tmp_path / "sub" / "b")
    assert [name for name, _ in read_paths(config.data.args["path"])] == [a, b]
    assert config.eval.data == {"path": str(tmp_path / "valid")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name, composed):
    (config,) = composed(f"model={name}", "task=explain")
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in config.model.build().parameters())
    published = PUBLISHED[name]
    if isinstance(published, int):
        assert count == published
    else:
        billions = float(published.removesuffix("B"))
        assert abs(count / 1e9 - billions) <= (0.5 if billions > 100 else 0.05)


def test_the_largest_published_models_have_heads_of_96(composed):
    for name in ("megatron_1b2", "megatron_2b5", "megatron_4b2", "megatron_8b3"):
        args = composed(f"model={name}", "task=explain")[0].model.args
        assert args["hidden"] / args["heads"] == 96


def test_patterns_of_a_plan_are_typed_as_they_read(composed):
    (config,) = composed("plan.place={h.0: 0, h.*: 1}", "plan.keep=[*.attn,ffn]", "plan.shard=[h.*.mlp.c_fc.weight:0]")
    assert config.plan.plan() == Plan(
        tp=2, pp=2, place={"h.0": 0, "h.*": 1}, keep=("*.attn", "ffn"), shard=("h.*.mlp.c_fc.weight:0",)
    )


def test_numbers_are_numbers_wherever_they_are_written(composed, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\noptim: {lr: 1e-4, eps: '1e-9'}\ntrain: {steps: '7'}"
    )
    (from_file,) = composed("--config-dir", ".", "--config-name", "mine")
    (typed,) = composed("optim.lr=1e-4")
    swept = composed("-m", "optim.lr=1e-5,1e-4,1")
    rates = [from_file.optim.lr, typed.optim.lr, *(one.optim.lr for one in swept)]
    assert rates == [1e-4, 1e-4, 1e-5, 1e-4, 1.0]
    assert all(type(rate) is float for rate in rates)
    assert (from_file.optim.eps, from_file.train.steps) == (1e-9, 7)


def test_a_new_target_does_not_get_the_old_ones_arguments(composed, tmp_path):
    (config,) = composed("model._target_=user_code.Net", "+model.width=512")
    assert config.model.args == {"width": 512}
    (config,) = composed(
        "model._target_=user_code.Net", "data._target_=user_code.Rows", "+data.n=4", "data.shuffle=false"
    )
    assert config.model.args == {} and config.data.args == {"n": 4} and config.data.shuffle is False
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nmodel: {_target_: user_code.Net, layers: 4}")
    (config,) = composed("--config-dir", ".", "--config-name", "mine", "model.width=3")
    assert config.model.args == {"layers": 4, "width": 3}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.yaml").write_text("_target_: user_code.Net\nwidth: 5\n")
    (config,) = composed("--config-dir", ".", "model=net", "+model.deep.er=1")
    assert config.model.args == {"width": 5, "deep": {"er": 1}}


def test_the_same_target_keeps_its_arguments(composed):
    (config,) = composed("model._target_=meg_compile.models.gpt2.GPT2", "model.layers=2")
    assert config.model.args["layers"] == 2 and config.model.args["hidden"] == 128


def test_arguments_may_be_targets_themselves(composed):
    inner = {"_target_": "user_code.Rows", "n": 9}
    (config,) = composed("model._target_=user_code.Net", f"+model.rows={json.dumps(inner)}".replace('"', ""))
    assert config.model.build().rest["rows"].__class__.__name__ == "Rows"


@pytest.mark.parametrize("chdir", ["null", "false", "true"])
@pytest.mark.parametrize("sweep", [False, True])
def test_relative_paths_start_where_the_command_was_typed(sweep, chdir, composed, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "corpus.txt").write_text("x" * 1000)
    args = ["data=text", "data.path=./sub/corpus.txt", "export.path=out/m.safetensors", f"hydra.job.chdir={chdir}"]
    for config in composed(*(["-m", "train.seed=1,2"] if sweep else []), *args):
        assert Path(config.data.args["path"]) == tmp_path / "sub" / "corpus.txt"
        assert Path(config.export.path) == tmp_path / "out" / "m.safetensors"


def test_the_path_of_a_users_dataset_may_be_something_else(composed, tmp_path):
    (tmp_path / "here").mkdir()
    for path, expected in (("hub/name", "hub/name"), ("here", str(tmp_path / "here"))):
        (config,) = composed("data._target_=user_code.Rows", f"+data.path={path}")
        assert config.data.args["path"] == expected


def test_a_config_survives_its_file(composed, tmp_path):
    (config,) = composed("optim.lr=1e-5", "plan.stages=[3,1]", "optim.eps=1e-12")
    configuration.save(config, tmp_path / "config.yaml")
    assert configuration.load(tmp_path / "config.yaml") == config


def test_explain_needs_no_file_and_no_processes(composed):
    (config,) = composed("task=explain", "data=text", "data.path=gone.txt", "launch.nproc=7", "plan.tp=8")
    assert config.num_ranks == 16


def test_torchrun_must_have_started_as_many_processes_as_the_plan_needs(composed):
    (config,) = composed()
    plain = config.to_dict()
    assert resolve(plain, [], Here(world_size=4, local_size=4), Path.cwd())[1] == []
    (fault,) = resolve(plain, [], Here(world_size=1, local_size=1), Path.cwd())[1]
    assert str(fault).startswith(
        "WORLD_SIZE=1: torchrun started 1 processes, and the plan needs tp 2 x cp 1 x dp 1 x pp 2 = 4"
    )
    assert "--nproc-per-node 4" in fault.fix


@pytest.mark.parametrize("task", ["explain", "eject"])
def test_tasks_of_one_process_are_not_for_torchrun(composed, task):
    plain = composed(f"task={task}")[0].to_dict()
    assert resolve(plain, [], Here(world_size=1, local_size=1), Path.cwd())[1] == []
    (fault,) = resolve(plain, [], Here(world_size=4, local_size=4), Path.cwd())[1]
    assert str(fault) == f"WORLD_SIZE=4: task={task} is one process, and torchrun started 4; run it without torchrun"


@pytest.mark.parametrize(
    "typed, rewritten",
    [
        ("plan.tp=2", "++plan.tp=2"),
        ("+plan.tp=2", "++plan.tp=2"),
        ("++plan.tp=2", "++plan.tp=2"),
        ("task=explain", "++task=explain"),
        ("tsk=explain", "++tsk=explain"),
        ("plan.stages=[1,2]", "++plan.stages=[1,2]"),
        ("data.path='a=b c'", "++data.path='a=b c'"),
        ("model=nano", "model=nano"),
        ("+experiment=x", "+experiment=x"),
        ("~plan.sp", "~plan.sp"),
        ("hydra.run.dir=x", "hydra.run.dir=x"),
        ("hydra/launcher=basic", "hydra/launcher=basic"),
        ("--multirun", "--multirun"),
    ],
)
def test_rewrite(typed, rewritten):
    assert rewrite([typed], CONF) == [rewritten]


def test_rewrite_leaves_the_values_of_flags_alone():
    assert rewrite(["--config-name", "a=b", "train.steps=1"], CONF) == ["--config-name", "a=b", "++train.steps=1"]


def test_runs_of_one_second_have_names_of_their_own():
    assert len({_new_run() for _ in range(100)}) == 100


def test_every_setting_is_documented():
    from dataclasses import fields, is_dataclass
    from inspect import getsource

    from meg_compile.config import schema

    for name, section in vars(schema).items():
        if is_dataclass(section) and section.__module__ == schema.__name__:
            lines = getsource(section).splitlines()
            for field in fields(section):
                at = [i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: ")]
                assert not at or lines[at[0] + 1].strip().startswith('"""'), f"{name}.{field.name}"


def test_plan_and_its_section_have_the_same_fields():
    assert set(vars(Plan())) == set(PlanConfig.__dataclass_fields__)


def test_help_says_what_every_key_means():
    text = describe_settings()
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in text.splitlines() if line.startswith("  ")}
    assert list(lines) == schema_keys()
    assert lines["plan.cp"] == "Ranks that share one sequence (context parallel); 1 for none."
