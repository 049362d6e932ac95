"""task=generate: what was trained under any plan writes, under any other, what the plain model would write."""

import json
from unittest.mock import patch

import models
import pytest
import torch
from checkpoints import ADAM, run
from safetensors.torch import load_file
from threads import run_threads
from training import CPU, config

from meg_compile.compiler import compile, compile_decoder
from meg_compile.config import Target
from meg_compile.driver import write_texts
from meg_compile.errors import Refused
from meg_compile.generate import decoding_plan, texts_of
from meg_compile.models.gpt2 import GPT2
from meg_compile.plan import Plan
from meg_compile.prepare import prepare_texts, text_programs
from meg_compile.runtime.decoder import Decoder
from meg_compile.runtime.groups import init_groups
from meg_compile.weights import save_folder

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11], [12, 13, 14, 15]]


def written(run_dir, **settings):
    """The lines of texts.jsonl, as a run on the ranks of the plan writes them, and its figures."""
    model = settings.pop("model", None)
    settings = config(task="generate", **settings)
    settings.model = model or settings.model
    prepare_texts(settings, [])
    programs = text_programs(settings, texts_of(settings))  # by one thread: a capture has its process for itself
    plan = decoding_plan(settings)
    run_dir.mkdir(exist_ok=True)

    def rank_main(_):
        groups = init_groups(plan.mesh, "cpu")
        return write_texts(settings, groups, CPU, run_dir)

    with patch("meg_compile.driver.text_programs", lambda *_: programs):
        figures = run_threads(plan.mesh.size, rank_main)
    return [json.loads(line) for line in (run_dir / "texts.jsonl").read_text().splitlines()], figures[0]


def greedy(model, prompt, num_tokens):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(settings that name its checkpoint, the plain model with its weights) of a run under tp=2 pp=2."""
    folder = tmp_path_factory.mktemp("trained")
    where = {"checkpoint__dir": str(folder / "ck")}
    export = {"export__path": str(folder / "all.safetensors")}
    run(folder / "run", train__steps=3, plan__tp=2, plan__pp=2, **ADAM, **where, **export)
    model = models.TinyGPT().double().eval()
    model.load_state_dict(load_file(folder / "all.safetensors"), strict=False)
    return where, model


@pytest.mark.parametrize(
    "plan",
    [
        {"plan__tp": 2, "plan__pp": 2},
        {"plan__dp": 2, "plan__tp": 2, "plan__zero": 3, "plan__sp": True, "generate__rows": 2},
        {"plan__cp": 2, "plan__recompute": "full", "generate__rows": 1},
    ],
    ids=str,
)
def test_a_checkpoint_writes_what_the_plain_model_writes(plan, trained, tmp_path):
    where, model = trained
    lines, figures = written(tmp_path, generate__prompts=PROMPTS, generate__tokens=10, **where, **plan)
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [line["tokens"] for line in lines] == [greedy(model, prompt, 10) for prompt in PROMPTS]
    assert figures["tokens"] == 50 and figures["num_texts"] == 5


def test_a_stop_ends_a_text(trained, tmp_path):
    where, model = trained
    whole = greedy(model, PROMPTS[1], 10)
    lines, figures = written(
        tmp_path, generate__prompts=[PROMPTS[1]], generate__tokens=10, generate__stop=whole[4], **where
    )
    assert lines[0]["tokens"] == whole[: whole.index(whole[4])] and lines[0]["stopped"]
    assert figures["tokens"] == len(lines[0]["tokens"])


def test_two_hundred_tokens_of_an_exported_gpt2(tmp_path):
    """transformers opens what we export and writes the same tokens, and we from its folder."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"vocab_size": 101, "context": 256, "layers": 2, "hidden": 32, "heads": 4}
    model, ids = GPT2(**sizes).eval(), torch.zeros(1, 8, dtype=torch.int64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))  # so that they do not repeat one token
    save_folder(compile(model, {"input_ids": ids, "labels": ids}, Plan()), model.state_dict().items(), tmp_path / "hf")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    prompt = torch.randint(0, 101, (1, 20), generator=torch.Generator().manual_seed(2))
    assert (theirs(prompt).logits - model(prompt)).abs().max() < 1e-5
    right = theirs.generate(prompt, max_new_tokens=200, do_sample=False, pad_token_id=0)[0, 20:].tolist()
    assert len(set(right)) > 5
    own = {"init__path": str(tmp_path / "hf"), "precision": "fp32", "plan__tp": 2, "plan__pp": 2}
    target = Target("meg_compile.weights.models.gpt2_from_hf", {"path": str(tmp_path / "hf")})
    prompts = {"generate__prompts": prompt.tolist(), "generate__tokens": 200}
    lines, _ = written(tmp_path / "run", model=target, **own, **prompts)
    assert lines[0]["tokens"] == right


def test_working_copies_are_of_the_weights_that_were_loaded():
    """In bf16: twice as far from the numbers of float64 as the plain model in bf16 at most."""
    ids = models.fixed_batch(0)[0]
    programs = [compile_decoder(models.TinyGPT, ids, new, Plan(tp=2), torch.bfloat16) for new in (ids.shape[1], 1)]
    model = models.TinyGPT()
    weights = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(weights)

    def rank_main(_):
        decoder = Decoder(programs, init_groups(Plan(tp=2).mesh, "cpu"), CPU, ids.shape[1])
        decoder.load()
        for name, tensor in decoder.executor.tensors.items():
            if name in weights:
                spec = decoder.executor.specs[name]
                tensor.data.copy_(spec.slice(weights[name], decoder.groups.coords.tp))
        decoder.copy()
        return decoder.logits(ids, 0)

    right = model.double().eval()(ids)
    rounded = (model.to(torch.bfloat16)(ids) - right).abs().max()
    for logits in run_threads(2, rank_main):
        assert (logits - right).abs().max() < 2 * rounded < 0.2 * right.abs().max()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"generate__prompts": []}, "generate.prompts=[]: there is no prompt"),
        ({"generate__prompts": [[]]}, "prompt 1 is empty"),
        ({"generate__prompts": ["def"]}, "generate.tokenizer: prompts are texts, and nothing says"),
        ({"generate__prompts": ["a"], "init__path": "."}, "generate.tokenizer: prompts are texts, and nothing says"),
        ({"generate__prompts": [1.5]}, "generate.prompts=1.5: is neither a text nor a list of token ids"),
        ({"generate__prompts": [[1, 900]]}, "they hold token 900, and the model has 64"),
        ({"generate__stop": "end"}, "generate.stop=end: no tokenizer is known"),
        ({"generate__tokens": 400}, "rows of 403 look up 402"),
        ({"checkpoint__dir": "nowhere"}, "checkpoint.dir=nowhere: there is no checkpoint; "),
        (
            {"model": Target("models.TinyGPT", {"layers": 1})},
            "which this model does not have",
        ),
    ],
    ids=lambda value: ", ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_cannot_be_written_is_refused(changes, words, trained):
    settings = {"generate__prompts": [[1, 2, 3]], **trained[0], **changes}
    model = settings.pop("model", None)
    settings = config(task="generate", **settings)
    settings.model = model or settings.model
    with pytest.raises(Refused) as error:
        prepare_texts(settings, [])
    assert words in str(error.value)


def test_texts_of_bytes(tmp_path):
    settings = config(task="generate", generate__prompts=["dé"], generate__tokenizer="bytes", generate__stop="x")
    texts = texts_of(settings)
    assert texts.prompts == [[100, 195, 169]] and texts.stop == 120
    assert texts.words.decode([100, 195, 169, 256, 195]) == "dé\N{REPLACEMENT CHARACTER}"
    (tmp_path / "prompts").write_text("ab\nc\n")
    settings = config(task="generate", generate__file=str(tmp_path / "prompts"), generate__tokenizer="bytes")
    assert texts_of(settings).prompts == [[97, 98], [99]]
