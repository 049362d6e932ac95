"""Capture: a plain model and its loss become one torch.fx graph of ATen operators.

In:  an `nn.Module` (real or on meta), example tensors of one micro-batch, a loss.
Out: `Captured`, a graph whose placeholders are the fields of a batch and whose get_attr nodes carry the user's
     own parameter names, with its one output, the loss. The same operators run as in the plain model.
"""

from __future__ import annotations

import inspect
import logging
import operator
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensor

from meg_compile.errors import CaptureError, Fault
from meg_compile.graph.clean import clean
from meg_compile.graph.functions import apply_functions
from meg_compile.graph.nodes import base_name, module_path, source_line
from meg_compile.graph.regions import open_regions
from meg_compile.graph.rehearse import rehearse
from meg_compile.graph.sentinel import sentinel
from meg_compile.graph.stand_in import StandIns, ValueOf, stand_ins
from meg_compile.graph.untouched import untouched

Loss = Callable[..., torch.Tensor]


def only_logits(logits: torch.Tensor) -> torch.Tensor:
    """Stands for the loss where a model is captured for its logits."""
    return logits


@dataclass
class Captured:
    """A captured training step, forward and loss.

    graph:    placeholders are named by the batch's fields; the output is the scalar loss.
    tensors:  parameters, buffers and constants by the user's names; a tied one once, under its first name.
    aliases:  every other name of a tied parameter -> the name it stands under.
    buffers:  the names in `tensors` that are buffers or constants.
    state:    the names in `tensors` that the model's state_dict holds.
    constants: the names in `tensors` that capture gave to what is neither a parameter nor a buffer of the model.
    fields:   the batch's fields that the graph reads, in the order of its placeholders.
    """

    graph: fx.Graph
    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    buffers: set[str]
    state: set[str]
    constants: set[str]
    fields: tuple[str, ...]

    def examples(self) -> dict[str, torch.Tensor]:
        """One micro-batch of each field, on meta."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        return {str(n.target): torch.empty_like(n.meta["val"], device="meta") for n in inputs}


class _Step(nn.Module):
    """The model and its loss as one module that takes the fields of a batch in order."""

    def __init__(self, model: nn.Module, loss: Loss | None, binding: dict[str, str], fields: tuple[str, ...]):
        super().__init__()
        self.model = model
        self.loss = loss
        self.binding = binding
        self.fields = fields

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        batch = dict(zip(self.fields, values, strict=True))
        out = self.model(**{param: batch[name] for name, param in self.binding.items()})
        if self.loss is only_logits:
            return only_logits(find_logits(out))
        found = find_loss(out)
        if found is not None:
            return found
        if self.loss is None or "labels" not in batch:
            raise TypeError("the model returns no loss, and the batch has no `labels` to compute one from")
        return self.loss(find_logits(out), batch["labels"])


def capture(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    loss: Loss | None,
    value_of: ValueOf | None = None,
    training: bool = True,
) -> Captured:
    """Capture a model with its loss. CaptureError names the user's source line and what stopped it.

    loss: `only_logits` to capture the model for these; the output is then [rows, ..., V].
    training: the mode that the model is captured in.
    value_of: the real value of a tensor on meta that the model holds outside its parameters and buffers.
    The model is left as it was.
    """
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        problem = "has parameters, and a run trains and exports those of the model alone"
        raise CaptureError(
            Fault("loss", type(loss).__name__, problem, "make it a part of the model, which returns its loss")
        )
    binding = bind(model, inputs)
    fields = tuple(name for name in inputs if name in binding or name == "labels")
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    step = _Step(model, loss, binding, fields)
    try:
        with (
            untouched(step),
            sentinel(model),
            stand_ins(step, value_of) as stand_in,
            warnings.catch_warnings(),
            _quiet(),
        ):
            model.train(training)
            warnings.simplefilter("ignore")
            with stand_in.mode:
                examples = tuple(torch.empty_like(inputs[name], device=device) for name in fields)
            with untouched(step):
                rehearse(step, examples, stand_in.mode)
            program = torch.export.export(step, examples, strict=False)
            open_regions(program.graph_module)
            if any(_mutates(node) for node in program.graph.nodes):
                program = program.run_decompositions({})
            _refuse_effects(program)
            _refuse_output(program, loss)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_of_labels(error, inputs, binding) or _explain(error)) from error
    return _take(program.module(check_guards=False), step, fields, stand_in)


def bind(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, str]:
    """field of the batch -> parameter of the model's forward.

    By name; `input_ids` goes to the first parameter where no name fits. A field that the model does not name is
    left out (`labels` are then the loss's).
    """
    params = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    binding = {name: name for name in inputs if name in params}
    if "input_ids" in inputs and "input_ids" not in binding and params and params[0] not in binding:
        binding["input_ids"] = params[0]
    required = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.name in params and p.name not in binding.values()
    ]
    if required or not binding:
        raise CaptureError(
            Fault(
                f"{type(model).__name__}.forward",
                None,
                f"takes {', '.join(required) or 'nothing'}, and the data has the fields {', '.join(inputs)}",
                "name the data's fields as forward's parameters",
            )
        )
    return binding


def find_loss(out: Any) -> torch.Tensor | None:
    """The loss in what a model returned: under the name `loss`, or the one scalar."""
    named = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    values = out if isinstance(out, (list, tuple)) else [out]
    scalars = [v for v in values if isinstance(v, torch.Tensor) and v.dim() == 0 and v.is_floating_point()]
    return scalars[0] if len(scalars) == 1 else None


def find_logits(out: Any) -> torch.Tensor:
    if isinstance(out, dict):
        return out["logits"]
    if isinstance(out, (list, tuple)):
        return out[0]
    return out if isinstance(out, torch.Tensor) else out.logits


def _refuse_effects(program: torch.export.ExportedProgram) -> None:
    """CaptureError for a graph that is more than a function from a batch to one number."""
    signature = program.graph_signature
    for kind, changed in (("buffers", signature.buffers_to_mutate), ("parameters", signature.parameters_to_mutate)):
        if changed:
            names = ", ".join(map(module_path, sorted(changed.values())))
            problem = f"forward writes to the {kind} {names}, and a step of micro-batches would lose that"
            fix = "keep no state in forward (BatchNorm: use another norm)"
            raise CaptureError(Fault("forward", None, problem, fix))
    if signature.user_inputs_to_mutate:
        problem = "forward writes to its inputs, which other stages read"
        raise CaptureError(Fault("forward", None, problem, "write to a copy of them, as by .clone()"))
    for node in program.graph.nodes:
        if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and not _is_python(node):
            is_func = "functorch" in getattr(node.target, "__module__", "")
            called = "torch.func" if is_func else base_name(node.target)
            problem = f"uses {called}, whose inside a graph of operators does not show"
            raise CaptureError(Fault(source_line(node) or "forward", None, problem, "write it with plain operators"))
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)):
            problem = "takes a number out of a tensor (.item(), int(), an index), which is known only when it runs"
            raise CaptureError(Fault(source_line(node) or "forward", None, problem, "compute with the tensor itself"))


def _refuse_output(program: torch.export.ExportedProgram, loss: Loss | None) -> None:
    """CaptureError for a loss that is not one number, and for logits that are none of a sequence."""
    output = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    value = output.all_input_nodes[-1].meta["val"] if output.all_input_nodes else None
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    if loss is only_logits:
        if not is_number or len(shape) != 3:
            raise CaptureError(Fault("logits", shape, "are not [rows, tokens, vocabulary]", "return the logits first"))
    elif not is_number or shape:
        raise CaptureError(Fault("loss", shape, "is not one floating-point number", "reduce it, as by .mean()"))


def _is_python(node: fx.Node) -> bool:
    """An item of several results, arithmetic of sizes."""
    return getattr(node.target, "__module__", "") in ("_operator", "builtins", "math")


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _take(module: fx.GraphModule, step: _Step, fields: tuple[str, ...], stand_in: StandIns) -> Captured:
    """The graph and tensors of an exported module, under the user's names; a tied tensor under its first."""
    every = [*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    for name, tensor in every:
        first.setdefault(id(tensor), module_path(name))
    aliases = {module_path(name): first[id(t)] for name, t in every if module_path(name) != first[id(t)]}

    graph, env, placeholders = fx.Graph(), {}, iter(fields)
    tensors: dict[str, torch.Tensor] = {
        first[id(t)]: t for t in step.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)
    }
    state = set(tensors)
    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(env[node.all_input_nodes[0]])
            continue
        if node.op == "placeholder":
            env[node] = graph.placeholder(next(placeholders))
        elif node.op == "get_attr":
            value = stand_in.original(operator.attrgetter(node.target)(module))
            _refuse_constant(value, node)
            name = first.get(id(value), module_path(node.target))
            tensors[name] = value
            env[node] = graph.get_attr(name)
            env[node].meta["val"] = value
            continue
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
        env[node].meta = dict(node.meta)
    apply_functions(graph)
    clean(graph)
    _drop_unread_fields(graph)

    read = {n.target for n in graph.nodes if n.op in ("get_attr", "placeholder")}
    tensors = {name: t for name, t in tensors.items() if name in read or name in state}
    buffers = {name for name, t in tensors.items() if not isinstance(t, nn.Parameter)}
    constants = set(tensors) - set(first.values())
    return Captured(graph, tensors, aliases, buffers, state, constants, tuple(f for f in fields if f in read))


def _refuse_constant(value: Any, node: fx.Node) -> None:
    """CaptureError for what a graph reads beside parameters and buffers and has no value."""
    place = next((line for user in node.users if (line := source_line(user))), "") or "forward"
    if isinstance(value, torch.Generator):
        problem = "draws from a torch.Generator, whose numbers no plan can be made to share"
        raise CaptureError(Fault(place, None, problem, "draw from torch's own generator, or make a buffer in __init__"))
    if isinstance(value, FakeTensor):
        problem = "reads a tensor whose origin is lost: a cache or a variable outside the model keeps it between calls"
        raise CaptureError(Fault(place, None, problem, "compute it where it is used, or make it a buffer in __init__"))
    if not isinstance(value, torch.Tensor):
        problem = f"uses a {type(value).__name__}, which is no tensor"
        raise CaptureError(Fault(place, None, problem, "write it with plain operators"))


def _drop_unread_fields(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)


def _explain(error: Exception) -> Fault:
    """The model's own words, at the user's own line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename)]
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the model"
    text = str(error).strip().split("\n\n")[0].split("\n")
    said = " ".join(line.strip() for line in text[:3])[:400]
    line = f" at `{frames[-1].line}`" if frames and frames[-1].line else ""
    return Fault(where, None, f"{type(error).__name__}: {said}{line}", "change the inputs or this line of the model")


def _of_labels(error: Exception, inputs: dict[str, torch.Tensor], binding: dict[str, str]) -> Fault | None:
    """Labels that are no class indices, in front of a loss of ours that wants them."""
    labels = inputs.get("labels")
    if labels is None or not labels.is_floating_point() or "labels" in binding or "int64" not in str(error):
        return None
    kind = f"{str(labels.dtype).removeprefix('torch.')}{list(labels.shape)}"
    fix = "give integers from the dataset, or a loss of numbers, as loss._target_=torch.nn.functional.mse_loss"
    return Fault("labels", kind, "the loss takes class indices, which are integers", fix)


@contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs about an operator that fails on fake tensors is said by the error too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_ours(filename: str) -> bool:
    return any(part in filename for part in ("/torch/", "/meg_compile/", "<frozen", "<string>"))
