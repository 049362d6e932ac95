"""compile(): a plain model, example inputs and a plan become a program. Its steps are the architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from meg_compile.axes.infer import Axes, infer
from meg_compile.axes.layout import Layout, Shard, shard
from meg_compile.errors import Fault, Refused
from meg_compile.graph.capture import Captured, Loss, capture, only_logits
from meg_compile.models.loss import cross_entropy
from meg_compile.passes.check import check_shapes
from meg_compile.passes.choose import Choice, choose
from meg_compile.passes.context import share_context
from meg_compile.passes.decode import decode
from meg_compile.passes.dropout import draw_by_counters, find_draws
from meg_compile.passes.in_place import in_place
from meg_compile.passes.lookups import check_lookups
from meg_compile.passes.masks import fold_masks
from meg_compile.passes.partition import Stage, partition
from meg_compile.passes.rows import judge
from meg_compile.passes.sequence import shard_sequence
from meg_compile.passes.tensor import tensor_parallel
from meg_compile.passes.tokens import WHOLE, Units, find_limits, sum_over_tokens
from meg_compile.plan import Plan
from meg_compile.program import ParamSpec, Program
from meg_compile.runtime.init import from_module, record


def compile(
    model: nn.Module | Callable[[], nn.Module],
    inputs: dict[str, torch.Tensor],
    plan: Plan,
    loss: Loss | None = cross_entropy,
    dtype: torch.dtype | None = None,
    dropout: Literal["exact", "fast"] = "exact",
    training: bool = True,
) -> Program:
    """Compile a plain model for a parallel plan. No process is started and nothing is allocated.

    model:   a module, real or on meta; or a function without arguments that builds one, which is then never held whole.
    inputs:  example tensors of one micro-batch by field name; values do not matter, sizes do.
    loss:    loss(logits, labels) for a model that returns logits; one that returns its loss needs none.
    dtype:   train in this dtype (for a builder; a ready module is taken as it is).
    dropout: "exact" draws the same masks under every plan; "fast" draws with torch's generators, as Megatron-LM does.
    training: False compiles the model as it is in evaluation; `Executor.evaluate` runs it on the weights of another.

    Refused, with every fault found, for what cannot work; CaptureError for a model that cannot become a graph.
    """
    module, source = (model, from_module(model)) if isinstance(model, nn.Module) else record(model)
    if dtype is not None and not isinstance(model, nn.Module):
        module = module.to(dtype)

    captured = capture(module, inputs, loss, source.value, training)
    fold_masks(captured, source.value)
    check_lookups(captured, source.value)

    def again(times: int) -> Captured:
        return capture(module, _repeated(inputs, times), loss, source.value, training)

    verdict = judge(captured, again, source.value)
    units, limits = sum_over_tokens(captured, verdict), find_limits(captured.graph)
    if dropout == "exact":
        draw_by_counters(captured)
    fields = captured.examples()
    axes = infer(captured.graph, captured.tensors)
    draws = find_draws(axes)
    axes, parts = share_context(captured, axes, plan, units.tokens)

    choice, stages, params = _parallel(captured, axes, plan)
    program = Program(plan, fields, parts, stages, params, units, limits, draws, captured, axes, choice, module, source)
    _refuse_replicas(program)
    program.again = lambda inputs, training: compile(model, inputs, program.pinned, loss, dtype, dropout, training)
    return program


def compile_decoder(
    model: nn.Module | Callable[[], nn.Module],
    input_ids: torch.Tensor,
    new: int,
    plan: Plan,
    dtype: torch.dtype | None = None,
) -> Program:
    """Compile a plain model of token ids for generation: from `new` tokens of each row to their logits, with a cache of
    keys and values. `runtime.decoder.Decoder` runs it.

    input_ids: an example [rows, total], as long as the longest text; `new` divides its length.
    plan:      of tp, pp, vpp and dp; nothing else has a use here.

    Refused for a model whose tokens see later ones, or that needs more than keys and values of earlier ones.
    """
    module, source = (model, from_module(model)) if isinstance(model, nn.Module) else record(model)
    if dtype is not None and not isinstance(model, nn.Module):
        module = module.to(dtype)
    captured = capture(module, {"input_ids": input_ids}, only_logits, source.value, training=False)
    fold_masks(captured, source.value)
    check_lookups(captured, source.value)
    limits = find_limits(captured.graph)
    axes = decode(captured, infer(captured.graph, captured.tensors), new, source.value)

    choice, stages, params = _parallel(captured, axes, plan)
    fields = {name: ids[:, :new] for name, ids in captured.examples().items()}
    return Program(plan, fields, {}, stages, params, Units(), limits, [], captured, axes, choice, module, source)


def _parallel(captured: Captured, axes: Axes, plan: Plan) -> tuple[Choice, list[Stage], dict[str, ParamSpec]]:
    """A graph of known axes on the ranks of tp and the stages of pp."""
    choice = choose(axes, plan, captured.aliases)
    sequence = shard_sequence(axes, choice.layout, plan)
    parallel = tensor_parallel(captured.graph, axes, choice.layout, sequence)
    check_shapes(parallel.graph, plan, _on_meta(captured, axes, choice.layout))
    in_place(parallel.graph)
    stages = partition(parallel.graph, plan)
    return choice, stages, _specify(captured, axes, choice.layout, stages, parallel.partial)


def _repeated(inputs: dict[str, torch.Tensor], times: int) -> dict[str, torch.Tensor]:
    return {name: torch.cat([rows] * times) for name, rows in inputs.items()}


def _refuse_replicas(program: Program) -> None:
    """Refused for a loss that no replica can compute of its own rows, and for states that they cannot share."""
    plan, units = program.plan, program.units
    if units.coupled and plan.dp > 1:
        problem = f"the loss couples the rows of a batch ({units.coupled}), and a replica sees only its own"
        raise Refused(Fault("plan.dp", plan.dp, problem, WHOLE))
    dtypes = {str(spec.dtype).removeprefix("torch.") for spec in program.params.values() if program.splits(spec)}
    if len(dtypes) > 1:
        problem = f"replicas share parameters of one dtype, and this model has {' and '.join(sorted(dtypes))}"
        raise Refused(Fault("plan.zero", plan.zero, problem, "give them one dtype, or use plan.zero=0"))


def _on_meta(captured: Captured, axes: Axes, layout: Layout) -> dict[str, torch.Tensor]:
    """Local parameters and buffers of a rank, without storage."""
    return {
        name: torch.empty([layout.local(d) for d in dims], dtype=captured.tensors[name].dtype, device="meta")
        for name, dims in axes.stored.items()
    }


def _specify(
    captured: Captured, axes: Axes, layout: Layout, stages: list[Stage], partial: set[str]
) -> dict[str, ParamSpec]:
    """Who holds what. A parameter that no stage reads is kept by the first."""
    specs = {}
    for name, tensor in captured.tensors.items():
        dims = axes.stored.get(name)
        whole = Shard(tuple(tensor.shape), tuple(tensor.shape), ())
        specs[name] = ParamSpec(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            tensor.requires_grad,
            name in captured.buffers,
            name in captured.state,
            tuple(alias for alias, target in captured.aliases.items() if target == name),
            tuple(s.index for s in stages if name in s.params) or (0,),
            tuple(shard(layout, dims, r) if dims is not None else whole for r in range(layout.tp)),
            name in partial,
        )
    return specs
