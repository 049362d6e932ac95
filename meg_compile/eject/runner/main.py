"""Train the stages of this folder, with torch alone: see README.md.

torchrun --nproc-per-node N main.py --weights weights.pt --data data.pt
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from meg_compile.ops.group import Group

HERE = Path(__file__).resolve().parent
SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
}
Batch = dict[str, Tensor]


def main() -> None:
    args = parse()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    rank = Rank(device, args)
    optimizer = torch.optim.AdamW(rank.parameters.items(), lr=args.lr, weight_decay=args.weight_decay)
    for step in range(args.steps):
        loss = rank.gradients(step)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss:.12g}", flush=True)
    if args.save:
        rank.save(args.save)
    dist.destroy_process_group()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the stages of this folder.")
    parser.add_argument(
        "--weights", type=Path, required=True, help="state_dict of the whole model, .pt or .safetensors"
    )
    parser.add_argument(
        "--data", type=Path, help="a dict of tensors, field -> [rows, ...], as .pt; without, random ones"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--micro-batches", type=int, help="of a replica in a step")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1234, help="of dropout and of random data")
    parser.add_argument("--save", type=Path, help="where to write the trained weights of the whole model, a .pt file")
    return parser.parse_args(argv)


class Rank:
    """What one process holds and runs. parameters: by the names of the model, those that it trains."""

    def __init__(self, device: torch.device, args: argparse.Namespace):
        table = json.loads((HERE / "shards.json").read_text())
        self.plan, self.specs, self.fields = table["plan"], table["parameters"], table["fields"]
        self.device, self.args = device, args
        self.num_micro_batches = args.micro_batches or self.plan["num_micro_batches"]
        self._make_groups()
        self.indices = [i for i, rank in enumerate(self.plan["rank_of_stage"]) if rank == self.pp_rank]
        mine = {name: spec for name, spec in self.specs.items() if set(spec["stages"]) & set(self.indices)}
        self.tensors = {name: self._own(mine[name], whole) for name, whole in read(args.weights, mine)}
        self.copies = dict(self._working_copies())
        if missing := mine.keys() - self.tensors.keys():
            raise SystemExit(f"{args.weights} has no {', '.join(sorted(missing))}")
        self.parameters = {n: t for n, t in self.tensors.items() if t.requires_grad}
        self.stages = [self._build(i) for i in self.indices]
        self.data = torch.load(args.data, mmap=True, weights_only=True) if args.data else None
        self.schedule = self._pipeline() if self.plan["pp"] > 1 else None

    def _make_groups(self) -> None:
        """Ranks lie as tp (the fastest), cp, dp, pp; a group of one is None."""
        sizes = {dim: self.plan[dim] for dim in ("pp", "dp", "cp", "tp")}
        wanted = math.prod(sizes.values())
        if dist.get_world_size() != wanted:
            raise SystemExit(f"this plan needs {wanted} processes, and there are {dist.get_world_size()}")
        mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.pp, self.dp, self.cp, self.tp = (mesh.get_group(d) if sizes[d] > 1 else None for d in sizes)
        self.pp_rank, self.dp_rank, self.cp_rank, self.tp_rank = (mesh.get_local_rank(d) for d in sizes)
        self.tied = list(self._tied_groups(mesh.mesh))

    def _tied_groups(self, mesh: Tensor) -> Iterator[tuple[list[str], Any]]:
        """Parameters that several pipeline ranks hold copies of, with the group of those ranks. All ranks make all."""
        tied: dict[tuple[int, ...], list[str]] = {}
        for name, spec in self.specs.items():
            ranks = tuple(sorted({self.plan["rank_of_stage"][stage] for stage in spec["stages"]}))
            if spec["trainable"] and len(ranks) > 1:
                tied.setdefault(ranks, []).append(name)
        for ranks, names in tied.items():
            for others in mesh[list(ranks)].flatten(1).t().tolist():
                group = dist.new_group(others)
                if dist.get_rank() in others:
                    yield names, group

    def _own(self, spec: dict[str, Any], whole: Tensor) -> Tensor:
        """This rank's part of a parameter or buffer; rows that fill up a vocabulary are zero."""
        part = whole
        for dim, runs in spec["runs"][self.tp_rank] if spec["runs"] else ():
            part = torch.cat([part.narrow(dim, start, length) for start, length in runs], dim)
        local = torch.zeros(spec["local_shape"], dtype=getattr(torch, spec["held"]), device=self.device)
        local[tuple(slice(n) for n in part.shape)] = part
        return local if spec["buffer"] else nn.Parameter(local, requires_grad=spec["trainable"])

    def _working_copies(self) -> Iterator[tuple[str, Tensor]]:
        """What the stages read of parameters in half precision: `tensors` are float32, and so are gradients."""
        for name, master in self.tensors.items():
            dtype = getattr(torch, self.specs[name]["dtype"])
            if dtype != master.dtype:
                copy = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
                if copy.requires_grad:
                    copy.register_post_accumulate_grad_hook(functools.partial(hand_over, master))
                yield name, copy

    def _build(self, index: int) -> Any:
        stage = getattr(importlib.import_module(f"stage{index}"), f"Stage{index}")
        tp, cp = Group(self.plan["tp"], self.tp_rank, self.tp), Group(self.plan["cp"], self.cp_rank, self.cp)
        read = self.tensors | self.copies
        return stage({n: t for n, t in read.items() if index in self.specs[n]["stages"]}, tp, cp, self.device)

    def _pipeline(self) -> Any:
        num, last = len(self.plan["rank_of_stage"]), torch.empty((), device="meta")
        stages: Any = [
            pipelining.PipelineStage(
                stage, stage.INDEX, num, self.device, stage.RECEIVED, stage.SENT or (last,), group=self.pp
            )
            for stage in self.stages
        ]
        kind: Any = SCHEDULES[self.plan["schedule"]]
        single = self.plan["schedule"] in ("1f1b", "gpipe")
        scaled = lambda loss, scale: loss * scale[0]  # noqa: E731
        return kind(stages[0] if single else stages, self.num_micro_batches, loss_fn=scaled, scale_grads=False)

    def gradients(self, step: int) -> float:
        """Forward and backward over the global batch of a step; the mean loss, the same on every rank."""
        rows = self.plan["micro_batch_size"] * self.num_micro_batches
        batch = self.batch(step, rows * self.plan["dp"])
        micro_batches = zip(*(x.split(self.plan["micro_batch_size"]) for x in batch.values()), strict=True)
        scale = importlib.import_module("loss").scale([dict(zip(batch, parts, strict=True)) for parts in micro_batches])
        own = {n: x[rows * self.dp_rank : rows * (self.dp_rank + 1)].to(self.device) for n, x in batch.items()}
        with torch.no_grad():
            for name, copy in self.copies.items():
                copy.copy_(self.tensors[name])
        loss = self._run({name: self._part(name, x) for name, x in own.items()}, scale)
        self._reduce()
        total = torch.tensor([loss if self.tp_rank == 0 else 0.0], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def _part(self, name: str, x: Tensor) -> Tensor:
        """This rank's two chunks of a field's sequence: an early one and a late one, which have the same work."""
        if self.cp is None or (sequence := self.fields[name]["sequence"]) is None:
            return x
        dim, before = sequence
        chunks = x.unflatten(dim, (before, 2 * self.plan["cp"], -1)).unbind(dim + 1)
        return torch.cat([chunks[self.cp_rank], chunks[-1 - self.cp_rank]], dim + 1).flatten(dim, dim + 1)

    def batch(self, step: int, num_rows: int) -> Batch:
        """The global batch of a step, field -> [num_rows, ...]."""
        generator = torch.Generator().manual_seed(self.args.seed + step)
        batch = {}
        for name, field in self.fields.items():
            dtype = getattr(torch, field["dtype"])
            if name == "dropout_keys":
                positions = list(range(step * num_rows, (step + 1) * num_rows))
                batch[name] = importlib.import_module("ops.counted").row_keys(self.args.seed, step, positions)
            elif self.data is not None:
                index = torch.arange(step * num_rows, (step + 1) * num_rows) % len(self.data[name])
                batch[name] = self.data[name][index].to(dtype)
            else:
                shape = [num_rows, *field["shape"][1:]]
                few = torch.randint(min([size for size, _ in field["limits"]], default=2), shape, generator=generator)
                batch[name] = (torch.randn(shape, generator=generator) if dtype.is_floating_point else few).to(dtype)
            for size, ignored in field["limits"]:
                counted = batch[name] if ignored is None else batch[name][batch[name] != ignored]
                if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < size:
                    raise SystemExit(f"step {step}: {name} holds an index outside of 0 to {size - 1}")
        return batch

    def _run(self, batch: Batch, scale: float) -> float:
        """The sum of scale * loss over a replica's micro-batches; 0.0 where the last stage is elsewhere."""
        losses: list[Tensor] = []
        fields = {name: batch[name] for stage in self.stages for name in stage.FIELDS}
        if self.schedule is None:
            for i in range(self.num_micro_batches):
                size = self.plan["micro_batch_size"]
                loss = self.stages[0](**{n: x[i * size : (i + 1) * size] for n, x in fields.items()}) * scale
                loss.backward()
                losses.append(loss.detach())
        elif self.stages[-1].SENT:
            self.schedule.step(**fields, return_outputs=False)
        else:
            target = torch.full((self.num_micro_batches,), scale, dtype=torch.float64, device=self.device)
            self.schedule.step(**fields, target=target, losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().sum()) if losses else 0.0

    def _reduce(self) -> None:
        """Sum gradients: partial ones over tp, those of tied parameters over their copies, all over dp and cp."""
        for name, parameter in self.parameters.items():
            if self.tp is not None and self.specs[name]["partial_gradient"]:
                dist.all_reduce(gradient(parameter), group=self.tp)
        for names, group in self.tied:
            for name in names:
                dist.all_reduce(gradient(self.parameters[name]), group=group)
        for group in (self.dp, self.cp):
            for parameter in self.parameters.values():
                if group is not None and parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)

    def save(self, path: Path) -> None:
        """Write the whole model's state_dict, as far as it was trained or loaded, on rank 0."""
        mine = {n: t.detach().cpu() for n, t in self.tensors.items()} if self.dp_rank == self.cp_rank == 0 else {}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.gather_object((self.tp_rank, mine), parts if dist.get_rank() == 0 else None)
        state = {}
        for name, spec in self.specs.items() if dist.get_rank() == 0 else ():
            whole = torch.zeros(spec["shape"], dtype=getattr(torch, spec["held"]))
            for tp_rank, held in parts:
                if name in held:
                    place(held[name], whole, spec["runs"][tp_rank] if spec["runs"] else [])
            state |= {alias: whole for alias in (name, *spec["aliases"]) if spec["in_state_dict"]}
        if state:
            torch.save(state, path)


def gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient; zero where no backward reached this copy of it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def hand_over(master: Tensor, copy: Tensor) -> None:
    """Add the gradient of a working copy to that of its master, in the master's precision."""
    assert copy.grad is not None
    if master.grad is None:
        master.grad = copy.grad.to(master.dtype)
    else:
        master.grad += copy.grad
    copy.grad = None


def place(part: Tensor, whole: Tensor, runs: list[Any]) -> None:
    """Write a rank's part where it belongs in the whole, without what fills it up. runs: of one or more dims."""
    index = [torch.arange(n) for n in whole.shape]
    for dim, pieces in runs:
        index[dim] = torch.cat([torch.arange(start, start + length) for start, length in pieces])
    part = part[tuple(slice(len(i)) for i in index)]
    whole[torch.meshgrid(*index, indexing="ij") if index else ()] = part


def read(path: Path, specs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of a file, and the constants that no state_dict holds, one by one."""
    state = dict(safetensors(path)) if path.suffix == ".safetensors" else torch.load(path, mmap=True, weights_only=True)
    constants = HERE / "constants.pt"
    beside = torch.load(constants, weights_only=True) if constants.exists() else {}
    for name, spec in specs.items():
        for one in (name, *spec["aliases"]):
            if (spec["in_state_dict"] and one in state) or one in beside:
                whole = state[one] if spec["in_state_dict"] else beside[one]
                if list(whole.shape) != spec["shape"]:
                    raise SystemExit(f"{path}: {one} is {list(whole.shape)}, and the model was {spec['shape']}")
                yield name, whole
                break


def safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file, which stays on disk until they are read."""
    codes = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "U8": "uint8"}
    codes |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    start = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
    for name, entry in json.loads(bytes(data[8:start].tolist())).items():
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            dtype = getattr(torch, codes[entry["dtype"]])
            raw = data[start + first : start + end]
            raw = raw.clone() if (start + first) % dtype.itemsize else raw
            yield name, raw.view(dtype).view(entry["shape"])


if __name__ == "__main__":
    main()
