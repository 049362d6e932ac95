"""Rows of several documents that a model keeps apart: the preset GPT-2, plain and compiled."""

import torch
from compare import Case, check

from meg_compile.models.gpt2 import GPT2
from meg_compile.models.loss import cross_entropy
from meg_compile.plan import Plan

ROWS, T = 4, 12
PAIRS = ("wte.*", "wpe.*", "*c_attn.*", "*.c_proj.weight", "*c_fc.*")


def gpt2() -> GPT2:
    return GPT2(vocab_size=64, context=T, layers=2, hidden=16, heads=4)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(0, 64, (2, ROWS, T), generator=generator)
    starts = torch.rand(ROWS, T, generator=generator) < 0.3
    starts[:, 0] = True
    places = torch.arange(T).expand(ROWS, T)
    labels[:, :-1][starts[:, 1:]] = -100
    document_ids = starts.long().cumsum(1) - 1
    position_ids = places - torch.where(starts, places, 0).cummax(1).values
    return {"input_ids": ids, "labels": labels, "document_ids": document_ids, "position_ids": position_ids}


def objective(model, fields):
    return cross_entropy(model(fields["input_ids"], fields["document_ids"], fields["position_ids"]), fields["labels"])


def test_documents_of_a_row_are_as_if_alone():
    torch.manual_seed(0)
    model, fields = gpt2().double(), batch(0)
    assert fields["document_ids"].max() > 2
    logits = model(fields["input_ids"], fields["document_ids"], fields["position_ids"])
    for row in range(ROWS):
        for document in fields["document_ids"][row].unique():
            mine = fields["document_ids"][row] == document
            alone = model(fields["input_ids"][row, mine][None])[0]
            torch.testing.assert_close(logits[row, mine], alone, rtol=1e-12, atol=1e-13)


def test_compiled_they_are_the_plain_models():
    case = Case(gpt2, batch, PAIRS, objective)
    program = check(case, Plan(tp=2, pp=2, sp=True), 1)
    assert [tensor.shape for tensor in program.stages[0].sent] == [(1, T // 2, 16)]  # the mask is made where it is read
    check(case, Plan(pp=2, dp=2), 1)
