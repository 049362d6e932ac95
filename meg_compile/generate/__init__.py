"""Text from a trained model: prompts in, tokens out."""

from meg_compile.generate.loop import Continuation, continue_texts
from meg_compile.generate.sample import Sampling
from meg_compile.generate.texts import Texts, decoder_programs, decoding_plan, generate, texts_of

__all__ = [
    "Continuation",
    "Sampling",
    "Texts",
    "continue_texts",
    "decoder_programs",
    "decoding_plan",
    "generate",
    "texts_of",
]
