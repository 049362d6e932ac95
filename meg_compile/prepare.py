"""Everything that can be refused before a process starts: the settings, the targets, the data and the compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meg_compile.checkpoint.resume import restart_faults, resume_faults
from meg_compile.compiler import compile
from meg_compile.config import OWN, Config, Here, resolve
from meg_compile.config.schema import ALONE
from meg_compile.config.targets import Target, locate
from meg_compile.eject import eject_faults
from meg_compile.errors import Fault, Refused
from meg_compile.passes.dropout import find_noise
from meg_compile.passes.labels import shifts_labels
from meg_compile.passes.tokens import HALVES
from meg_compile.program import Program
from meg_compile.runtime.optim_faults import freeze, optim_faults
from meg_compile.runtime.world import World
from meg_compile.train.batches import DTYPES, batches_of
from meg_compile.train.evaluate import validation_programs, validation_target
from meg_compile.train.rows import example
from meg_compile.weights import Stored, fill, stored_weights

# A model of up to this many parameters is compared with the plain one before training, unless told otherwise.
MAX_CHECKED_PARAMETERS = 10_000_000
# What the compiler looks at: with a fault among these its own refusals would only repeat it.
COMPILED = ("task", "precision", "dropout", "model", "loss", "plan", "data", "optim.frozen")
COMPILED += ("train.micro_batch_size", "train.seed")


def prepare(
    plain: Mapping[str, Any], faults: list[Fault], directory: Path, world: World | None
) -> tuple[Config, Program]:
    """The configuration and its program; one `Refused` with all that is wrong in either.

    plain, faults  composed settings, and what went wrong while composing
    directory      where the command was typed
    """
    here = Here(
        world_size=world.size if world else None,
        local_size=world.local_size if world else None,
        num_gpus=torch.cuda.device_count(),
    )
    config, faults = resolve(plain, faults, here, directory)
    if config is None or any(_concerns(fault.key) for fault in faults):
        raise Refused(faults)
    try:
        dataset = None if config.task in ALONE else build_dataset(config)
        program = compile_program(config, dataset)
        faults += _weight_faults(config, program)
        faults += coupling_faults(config, program) + _vocabulary_faults(config, program, dataset)
        faults += label_faults(config, program, dataset) + _field_faults(config, program, dataset)
        faults += _block_faults(config, program) + _noise_faults(config, program)
        faults += eject_faults(program) if config.task == "eject" else []
        faults += [] if any(fault.key.startswith("optim.") for fault in faults) else optim_faults(config.optim, program)
        faults += restart_faults(config, world is not None)
        if config.task == "train":
            faults += resume_faults(config, program)
    except Refused as error:
        if faults:
            raise Refused([*faults, *error.faults]) from error
        raise
    if config.eval.every is not None and config.task == "train" and not faults:
        validation_programs(config, program, build_validation(config))
    if config.train.check is None:
        small = sum(spec.numel for spec in program.params.values()) <= MAX_CHECKED_PARAMETERS
        config.train.check = small and not find_noise(program.captured.graph)
        faults += unclear_faults(config, program)
    if faults:
        raise Refused(faults)
    return config, program


def build_dataset(config: Config) -> Any:
    """The dataset, from a generator that stands at the seed. Refused if it cannot be built or is too small."""
    torch.manual_seed(config.train.seed)
    dataset = _built("data", config)
    batches_of(config, dataset)
    return dataset


def build_validation(config: Config) -> Any:
    """The dataset of `eval`, likewise."""
    torch.manual_seed(config.train.seed)
    target = validation_target(config)
    try:
        return target.build()
    except Refused as error:
        given = {f"data.{name}" for name in config.eval.data or {}}
        raise Refused([replace(f, key=f"eval.{f.key}" if f.key in given else f.key) for f in error.faults]) from error
    except Exception as error:
        raise _unbuildable("eval.data", target, error) from error


def compile_program(config: Config, dataset: Any) -> Program:
    """Compiles the model for one micro-batch of the dataset.

    Without a dataset (task=explain, eject) our own text is taken as `data.seq_len` token ids a row, so that no file or
    tokenizer is needed; any other dataset is built after all, since only it knows its fields.
    """
    inputs = _inputs(config, dataset)
    torch.manual_seed(config.train.seed)
    failed: list[Exception] = []

    def factory() -> nn.Module:
        try:
            return build_model(config)
        except Exception as error:
            failed.append(error)
            raise

    try:
        dtype = DTYPES[config.precision]
        return compile(factory, inputs, config.plan.plan(), loss=loss_of(config), dtype=dtype, dropout=config.dropout)
    except Exception as error:
        if error in failed and not isinstance(error, Refused):
            raise _unbuildable("model", config.model, error) from error
        raise


def coupling_faults(config: Config, program: Program) -> list[Fault]:
    """A loss whose rows see each other, in more than one micro-batch."""
    coupled, size = program.units.coupled, config.train.micro_batch_size
    if not coupled or config.num_microbatches == 1:
        return []
    problem = f"the loss couples the rows of a batch ({coupled}), and a micro-batch sees only its own"
    fix = f"use plan.dp=1 and train.micro_batch_size={config.train.global_batch_size}, the whole global batch"
    return [Fault("train.micro_batch_size", size, problem, fix)]


def unclear_faults(config: Config, program: Program) -> list[Fault]:
    """A loss whose rows may see each other, in more than one micro-batch, that no comparison would tell."""
    unclear = program.units.unclear
    if config.task != "train" or not unclear or config.num_microbatches * config.plan.dp == 1 or config.train.check:
        return []
    problem = f"whether the loss of a micro-batch sees only its own rows is not known: {unclear}"
    fix = "use train.check=true to compare a step with the plain model first, or false to train all the same"
    return [Fault("train.check", None, problem, fix)]


def _vocabulary_faults(config: Config, program: Program, dataset: Any) -> list[Fault]:
    """Indices that the model has no row for, as far as the dataset says (`vocab_size`) or its first row shows."""
    if dataset is None:
        return []
    inputs, faults = _inputs(config, dataset), []
    for limit in (limit for limit in program.limits if limit.table is not None):
        said = getattr(dataset, "vocab_size", 0) if limit.field == "input_ids" else 0
        largest = max(said - 1, int(inputs[limit.field].max()))
        if largest >= limit.size:
            problem = f"its {limit.field} go up to {largest}, and {limit.table} of the model has {limit.size} rows"
            fix = f"give the model {largest + 1} rows, or use other data"
            faults.append(Fault("data._target_", config.data.target, problem, fix))
    return faults


def label_faults(config: Config, program: Program, dataset: Any) -> list[Fault]:
    """Labels that are the next tokens already, as far as the first rows show, for a model that shifts them again."""
    if dataset is None or not shifts_labels(program.captured.graph):
        return []
    inputs = _inputs(config, dataset)
    ids, labels = inputs.get("input_ids"), inputs["labels"]
    if ids is None or ids.shape != labels.shape or bool((ids == labels)[labels >= 0].all()):
        return []
    next_ids, counted = ids[:, 1:], labels[:, :-1] >= 0
    if not bool((next_ids == labels[:, :-1])[counted].all()):
        return []
    problem = "its labels are the next tokens already, and the model shifts them once more"
    fix = (
        "give labels that are the tokens themselves, or take the model's logits alone: "
        f"model._target_=meg_compile.models.without_labels.without_labels +model.model._target_={config.model.target}"
    )
    return [Fault("data._target_", config.data.target, problem, fix)]


def _weight_faults(config: Config, program: Program) -> list[Fault]:
    """Starting weights that are not there, or not the model's."""
    try:
        starting_weights(config, program, check=True)
    except Refused as error:
        return [*error.faults]
    return []


def _field_faults(config: Config, program: Program, dataset: Any) -> list[Fault]:
    """What the data is asked to give to the model, and the model does not take."""
    faults = []
    for name, fields in getattr(dataset, "needed_fields", {}).items():
        if missing := [field for field in fields if field not in program.inputs]:
            problem = f"the model's forward takes no {' and no '.join(missing)}, which would be lost"
            fix = (
                f"use a model that takes {' and '.join(fields)}, as meg_compile.models.gpt2.GPT2, and data.fields=null"
            )
            value = config.data.args.get(name)
            faults.append(Fault(f"data.{name}", value, problem, f"{fix}, or data.{name}=labels"))
    return faults


def _block_faults(config: Config, program: Program) -> list[Fault]:
    """A block to explain that the model does not have."""
    block, blocks = config.explain.block, sum(len(stage.layers) for stage in program.stages)
    if config.task != "explain" or block < max(blocks, 1):
        return []
    fix = f"use 0 to {blocks - 1}" if blocks > 1 else "use explain.block=0"
    return [Fault("explain.block", block, f"the model has {blocks} blocks", fix)]


def _noise_faults(config: Config, program: Program) -> list[Fault]:
    """A comparison with a plain model that draws its own random numbers."""
    noise = find_noise(program.captured.graph)
    problem, fix = (
        f"{noise[0]}, other ones than the plain model's" if noise else "",
        "let the model draw nothing but dropout",
    )
    if noise and config.task == "verify":
        return [Fault("task", "verify", problem, fix)]
    if noise and config.task == "train" and config.train.check:
        return [Fault("train.check", True, problem, f"use train.check=false, or {fix}")]
    return []


def build_model(config: Config) -> nn.Module:
    """The plain model, as its class makes it, with what is to be frozen frozen.

    Raises what the class raises; Refused for what is no module, and for a pattern of optim.frozen that matches nothing.
    """
    model = config.model.build()
    if not isinstance(model, nn.Module):
        problem = f"made a {type(model).__name__}, not a torch.nn.Module"
        raise Refused(Fault("model._target_", config.model.target, problem, "name a class of models"))
    freeze(model, config.optim.frozen)
    return model


def starting_weights(config: Config, program: Program, check: bool = False) -> Stored | None:
    """The weights that `init.path` names; None for those that the model draws. check: Refused where they do not fit."""
    return stored_weights(config.init.path, program, check) if config.init.path is not None else None


def plain_model(config: Config, program: Program) -> nn.Module:
    """The plain model with its starting weights, in the dtype that trains them."""
    model, weights = build_model(config), starting_weights(config, program)
    dtype = DTYPES[config.precision]
    return fill(model.to(torch.float32 if dtype in HALVES else dtype), weights) if weights else model


def loss_of(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """loss(logits, labels). Refused where it cannot be made."""
    try:
        return config.loss.function()
    except Exception as error:
        raise _unbuildable("loss", config.loss, error) from error


def _inputs(config: Config, dataset: Any) -> dict[str, Tensor]:
    rows = config.train.micro_batch_size
    if dataset is None and config.data.target.startswith(OWN):
        lengths = locate(config.data.target).lengths(**config.data.args)
        return {name: torch.empty(rows, length, dtype=torch.int64) for name, length in lengths.items()}
    dataset = _built("data", config) if dataset is None else dataset
    return example(dataset, rows, config.data.fields, DTYPES[config.precision])


def _built(section: str, config: Config) -> Any:
    try:
        return getattr(config, section).build()
    except Refused:
        raise
    except Exception as error:
        raise _unbuildable(section, getattr(config, section), error) from error


def _unbuildable(section: str, target: Target, error: Exception) -> Refused:
    given = ", ".join(f"{name}={value}" for name, value in target.args.items()) or "no arguments"
    problem = f"building it with {given} raised {type(error).__name__}: {error}"
    fix = f"change its arguments, as {section}.NAME=VALUE"
    return Refused(Fault(f"{section}._target_", target.target, problem, fix))


def _concerns(key: str) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in COMPILED)
