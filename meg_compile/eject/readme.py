"""The README of an ejected program."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from meg_compile.explain.table import human_count

if TYPE_CHECKING:
    from meg_compile.program import Program

TEXT = """# {title}

Plain PyTorch: nothing here needs more than torch.

```sh
torchrun --nproc-per-node {ranks} main.py --weights weights.pt --data data.pt
```

`weights.pt` is `torch.save(model.state_dict(), "weights.pt")` of the whole model, in its own names; a `.safetensors`
file does as well. Every rank cuts its part out. `data.pt` is a dict of tensors, field -> [rows, ...]: {fields}. Without
`--data` rows are random. `--save trained.pt` writes the whole model's state_dict at the end; `--help` tells the rest.

| to read | what is in it |
|---|---|
{files}

Comments give the local shape of a value and the axes of its dims, where axis/n is sharded n ways; a line of the
model's own source stands above what comes from it. A micro-batch has {rows}: sizes are those that the model was
compiled for.
"""
ABOUT = {
    "blocks.py": "the repeated blocks of the model, a class for each kind",
    "ops/": "the operators of tensor parallelism that the stages call",
    "loss.py": "how the losses of micro-batches add up",
    "shards.json": "of every parameter its shape, its stages, and which entries each tp rank holds",
    "constants.pt": "tensors of the model that its state_dict does not hold",
    "parts.py": "modules that hold parameters by name",
    "main.py": "the training loop",
}


def readme(program: Program, files: Collection[str]) -> str:
    """files: the names of those that are written, with `ops/`."""
    plan, ranks = program.plan, program.plan.mesh.size
    total = human_count(sum(spec.numel for spec in program.params.values() if spec.trainable))
    stages = ", ".join(f"`{name}`" for name in files if name.startswith("stage"))
    rows = [f"| {stages} | a class for each pipeline stage, as one rank of tensor parallelism runs it |"]
    rows += [f"| `{name}` | {about} |" for name, about in ABOUT.items() if name in files]
    fields = ", ".join(f"`{name}` {list(x.shape[1:])}" for name, x in program.inputs.items() if name != "dropout_keys")
    return TEXT.format(
        title=f"A model of {total} parameters on {ranks} {'rank' if ranks == 1 else 'ranks'}: {plan}",
        ranks=ranks,
        fields=fields,
        files="\n".join(rows),
        rows="one row" if program.micro_batch_size == 1 else f"{program.micro_batch_size} rows",
    )
