"""Generation: logits of the newest tokens, from a cache, are those of the plain model on the whole text."""

import pytest
import torch
from threads import run_threads

from benchmarks.families import FAMILIES
from meg_compile.compiler import compile_decoder
from meg_compile.errors import Refused
from meg_compile.generate import Sampling, continue_texts
from meg_compile.graph.capture import find_logits
from meg_compile.models.gpt2 import GPT2
from meg_compile.plan import Plan
from meg_compile.runtime.decoder import Decoder
from meg_compile.runtime.groups import init_groups

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]
ROWS, TOTAL, CHUNK = 2, 16, 4


def gpt2():
    return GPT2(vocab_size=67, context=TOTAL, layers=4, hidden=16, heads=4, dropout=0.1)


def plain(factory):
    torch.manual_seed(0)
    return factory().double().eval()


def on_decoders(factory, plan, work):
    """What work(decoder) gives on each rank of the plan."""
    programs = []
    for new in (CHUNK, 1):
        torch.manual_seed(0)
        example = torch.zeros(ROWS, TOTAL, dtype=torch.int64)
        programs.append(compile_decoder(factory, example, new, plan, torch.float64))

    def rank_main(_):
        decoder = Decoder(programs, init_groups(plan.mesh, "cpu"), torch.device("cpu"), TOTAL)
        decoder.executor.load()
        torch.distributed.barrier()
        return work(decoder)

    return run_threads(plan.mesh.size, rank_main)


def assert_logits_are_the_plain_ones(factory, vocab, plan):
    ids = torch.randint(0, vocab, (ROWS, TOTAL), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = find_logits(plain(factory)(ids))

    def work(decoder):
        chunks = [(0, CHUNK), (CHUNK, 2 * CHUNK), *((i, i + 1) for i in range(2 * CHUNK, TOTAL))]
        given = [decoder.logits(ids[:, start:end], start) for start, end in chunks]
        return None if given[0] is None else torch.cat(given, 1)

    found = [logits for logits in on_decoders(factory, plan, work) if logits is not None]
    assert len(found) == plan.tp * plan.dp
    for logits in found:
        assert logits.shape == (ROWS, TOTAL, vocab)
        assert (logits - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize(
    "plan",
    [
        Plan(tp=4, pp=2),
        Plan(pp=2, vpp=2, schedule="interleaved_1f1b"),
        Plan(pp=2, vpp=2, schedule="zbv_zero_bubble"),
    ],
    ids=str,
)
def test_logits_from_a_cache(plan):
    assert_logits_are_the_plain_ones(gpt2, 67, plan)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Falcon, alibi"])
def test_logits_of_families(name):
    pytest.importorskip("transformers")
    assert_logits_are_the_plain_ones(FAMILIES[name].build, 64, Plan(tp=2, pp=2))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Llama, eager", r"matmul \(modeling_llama.py:\d+\) relates positions to positions"),
        ("BERT", r"scaled_dot_product_attention \(modeling_bert.py:\d+\) lets tokens see later ones"),
    ],
)
def test_what_a_cache_does_not_hold_is_refused(name, why):
    pytest.importorskip("transformers")
    with pytest.raises(Refused, match=f"task=generate: {why}.*; use a causal model"):
        compile_decoder(FAMILIES[name].build, torch.zeros(ROWS, TOTAL, dtype=torch.int64), 1, Plan())


PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12, 13, 14, 15]]


def greedy(prompt, num_tokens):
    model, ids = plain(gpt2), list(prompt)
    for _ in range(num_tokens):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_prompts_of_two_lengths_and_a_stop():
    expected = [greedy(prompt, 7) for prompt in PROMPTS]
    stop = expected[0][3]

    def work(decoder):
        return [continue_texts(decoder, PROMPTS, 7, Sampling(), end) for end in (None, stop)]

    for freely, to_stop in on_decoders(gpt2, Plan(tp=2, pp=2), work):
        assert [one.tokens for one in freely] == expected and not any(one.stopped for one in freely)
        until = [tokens[: tokens.index(stop)] if stop in tokens else tokens for tokens in expected]
        assert [one.tokens for one in to_stop] == until
        assert [one.stopped for one in to_stop] == [stop in tokens for tokens in expected]


def test_draws_depend_on_seed_text_and_position_alone():
    sampling = Sampling(temperature=2.0, seed=5)

    def work(decoder):
        both = continue_texts(decoder, PROMPTS, 6, sampling)
        one = continue_texts(decoder, PROMPTS[1:], 6, sampling, texts=[1])
        return both, one, continue_texts(decoder, PROMPTS, 6, Sampling(temperature=2.0, seed=6))

    ranks = [found for plan in (Plan(), Plan(tp=2, pp=2)) for found in on_decoders(gpt2, plan, work)]
    assert all(found == ranks[0] for found in ranks)
    both, one, other = ranks[0]
    assert one[0] == both[1] and other != both


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0), {0, 1, 2, 3}),
        (Sampling(temperature=1.0, top_k=2), {1, 3}),
        (Sampling(temperature=1.0, top_p=0.7), {1, 3}),
        (Sampling(temperature=1.0, top_p=0.1), {3}),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling, kept):
    chances = torch.tensor([0.1, 0.25, 0.15, 0.5])
    num = 20_000
    drawn = sampling.pick(chances.log().expand(num, 4), list(range(num)), 9)
    shares = torch.bincount(drawn, minlength=4) / num
    wanted = torch.where(torch.tensor([i in kept for i in range(4)]), chances, 0.0)
    wanted = wanted / wanted.sum()
    assert (shares - wanted).abs().max() < 4 * (0.25 / num) ** 0.5  # four standard deviations
    assert set(drawn.unique().tolist()) == kept
