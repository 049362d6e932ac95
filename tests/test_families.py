"""Models of Hugging Face transformers, as they are: all pairs are found, and they train as the plain model does."""

import models
import pytest
import torch
from compare import Case, check
from training import config, on_ranks

from benchmarks.against_plain import Trial
from benchmarks.families import FAMILIES
from benchmarks.zoo import FULL_PLAN, full_row, num_pairs, write_between
from meg_compile.compiler import compile
from meg_compile.explain.linears import find_linears
from meg_compile.models.loss import cross_entropy
from meg_compile.models.without_labels import without_labels
from meg_compile.passes.labels import shifts_labels
from meg_compile.plan import Plan
from meg_compile.prepare import label_faults
from meg_compile.train.step import Trainer

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),  # torch's, where a graph is functionalised
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]

# Attention and MLP of two blocks; a block of a decoder beside an encoder attends twice. What is left whole besides:
PAIRS = {"T5": 10, "Whisper": 10}
WHOLE = {
    "BERT": {"cls.predictions.transform.dense"},  # between the last block and the vocabulary, on what a norm needs
    "RoBERTa": {"lm_head.dense"},
    "ViT": {"vit.embeddings.patch_embeddings.projection"},  # convolutions
    "Whisper": {"model.encoder.conv1", "model.encoder.conv2"},
    "Mixtral": {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"},  # routers, whose softmax needs every expert
}
TWICE = {"GPT-2", "Llama", "GPT-NeoX", "Mixtral"}  # on four ranks too
NAMES = [name for name in FAMILIES if name not in ("Llama, eager", "BERT, eager", "StarCoder2", "Qwen3-MoE")]


@pytest.mark.parametrize(
    ("name", "plan"),
    [(name, Plan(tp=2, pp=2)) for name in NAMES] + [(name, Plan(tp=4)) for name in NAMES if name in TWICE],
    ids=str,
)
def test_a_family_trains_as_the_plain_model(name, plan):
    trial = Trial(FAMILIES[name], plan)
    whole = {linear.module for linear in find_linears(trial.program) if linear.role == "whole"}
    assert (num_pairs(trial.program), whole) == (PAIRS.get(name, 4), WHOLE.get(name, set()))
    assert trial.program.units.tokens
    assert not trial.program.units.unclear
    report = trial.run()
    assert report.ok, report.worst()


def gpt2():
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 4, "bos_token_id": 0}
    sizes |= {"eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


# Of the plain class on FixedRows, SGD of 0.1, seed 1234: (loss, gradient norm)
GPT2_STEPS = [
    (4.1736138583, 0.8897156898),
    (4.1779612667, 0.5712010718),
    (4.1548537763, 0.516173195),
    (4.1606164871, 0.651905316),
    (4.1624264523, 0.4863359377),
]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_gpt2_on_labels_that_are_shifted_already(tp, pp):
    settings = config(plan__tp=tp, plan__pp=pp)

    def work(program, executor, groups):
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            spec = program.params[f"transformer.h.0.{name}.weight"]
            assert tp == 1 or (spec.sharded and spec.local_numel * 2 == spec.numel)
        trainer = Trainer(settings, program, executor, groups, models.FixedRows())
        rows = []
        for step in range(5):
            gradients = trainer.gradients(step)
            trainer.update(step, gradients.norm)
            rows.append((gradients.loss, gradients.norm))
        return rows

    for rows in on_ranks(settings, work, lambda: without_labels(gpt2())):
        assert rows == [pytest.approx(row, abs=1e-7) for row in GPT2_STEPS]  # they come from a float32 loss


@pytest.mark.parametrize("length", [12, 20])
@pytest.mark.parametrize("padded", [0, 3])
def test_gpt2_on_padded_rows_and_another_length(length, padded):
    def batch(step):
        ids, labels = models.fixed_batch(step, seq=length)
        mask = (torch.arange(length) < length - padded).long().expand_as(ids)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels.where(mask > 0, -100)}

    def objective(model, rows):
        logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        return cross_entropy(logits, rows["labels"])

    blocks = ("*c_attn*", "*attn.c_proj.weight", "*c_fc*", "*mlp.c_proj.weight", "*wte*")
    check(Case(lambda: without_labels(gpt2()), batch, blocks, objective), Plan(tp=2, pp=2), 2)


def test_labels_are_not_shifted_twice():
    shifted, unshifted = models.FixedRows(), models.MaskedRows(masked=0)
    inputs = {name: torch.zeros(2, 12, dtype=torch.int64) for name in ("input_ids", "labels")}
    alone = compile(lambda: without_labels(gpt2()), inputs, Plan())
    shifting = compile(gpt2, inputs, Plan())
    assert not shifts_labels(alone.captured.graph) and shifts_labels(shifting.captured.graph)
    assert "which the model shifts itself" in shifting.explain()
    (fault,) = label_faults(config(), shifting, shifted)
    assert "next tokens already" in fault.problem and "without_labels" in fault.fix
    assert not label_faults(config(), shifting, unshifted) and not label_faults(config(), alone, shifted)


def test_a_full_size_model_compiles_without_storage():
    family = FAMILIES["Llama"]
    large = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 2}
    row = full_row("large", type(family)(family.model, family.config, family.sizes | large), print)
    assert [cell.strip() for cell in row.split("|")][4:6] == ["4", "100.0%"] and FULL_PLAN.tp == 8


def test_the_table_goes_between_its_markers():
    assert (
        write_between("a\n<!-- zoo -->\nold\n<!-- /zoo -->\nb", "new") == "a\n<!-- zoo -->\n\nnew\n\n<!-- /zoo -->\nb"
    )
    with pytest.raises(ValueError, match="zoo"):
        write_between("a\n<!-- zoo -->\nb", "new")
